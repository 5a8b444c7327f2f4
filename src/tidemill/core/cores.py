"""Cores: how many there are for us, and staying on one of them."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

from tidemill.core.control_groups import processors


def cores() -> int:
    """Return the cores that this process may use: its affinity, or the quota of its
    control groups, rounded up, where that is less."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processors()
    return own if quota is None else max(1, min(own, ceil(quota)))


_every: set[int] | None = None  # the cores of this process, once threads of it keep to one of them


class _Own(threading.local):
    cores: set[int] | None = None


_own = _Own()  # what a thread keeps to, where it may use every core for the moment


def keep_to(core: int | None) -> None:
    """Keep this thread to one core, and what it starts; None ends that. Where something
    must not inherit it: `every_core`. Where the system cannot do that, nothing happens.
    """
    global _every
    if not hasattr(os, "sched_setaffinity"):
        return
    if core is not None:
        _every = _every or os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
    elif _every is not None:
        os.sched_setaffinity(0, _every)
        _every = None


@contextmanager
def every_core() -> Iterator[None]:
    """Let this thread, and the threads and processes that it starts meanwhile, use every
    core that the process had."""
    every = _every
    if every is None or _own.cores is not None:
        yield
        return
    _own.cores = os.sched_getaffinity(0)  # other threads of the process need not keep to a core
    os.sched_setaffinity(0, every)
    try:
        yield
    finally:
        os.sched_setaffinity(0, _own.cores)
        _own.cores = None


def same_cores() -> Callable[[], None]:
    """Return what moves another thread to the cores that this one keeps to, also while it
    may use every one: what is started to step for it, not to live by itself."""
    cores = _own.cores
    return (lambda: None) if cores is None else lambda: os.sched_setaffinity(0, cores)
