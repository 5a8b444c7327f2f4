"""Cores: how many there are for us, and staying on one of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path


def cores() -> int:
    """Return the cores that this process may use: its affinity, or the quota of its control groups where that is less."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def _quotas(own: Path, root: Path) -> list[int]:
    """Return the cores, rounded up, that each control group (version 2) that this process is in allows."""
    found: list[int] = []
    with suppress(OSError, StopIteration):
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
        folder = root / name.lstrip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # the root has no such file, and an unlimited one says "max"
                quota, period = (group / "cpu.max").read_text().split()
                found.append(ceil(int(quota) / int(period)))
    return found


_every: set[int] | None = None  # the cores of this process, once it keeps to one of them
_kept: set[int] = set()


def keep_to(core: int | None) -> None:
    """Keep this thread to one core, and what it starts; None ends that. Where something must not inherit it: `every_core`. Where the system cannot do
    that, nothing happens."""
    global _every, _kept
    if not hasattr(os, "sched_setaffinity"):
        return
    if core is None:
        _kept = _every or set()
        keep()
        _every = None
    else:
        _every, _kept = _every or os.sched_getaffinity(0), {core}
        keep()


def keep() -> None:
    """Move this thread to the core that the process keeps to, if it keeps to one."""
    if _every is not None:
        os.sched_setaffinity(0, _kept)


@contextmanager
def every_core() -> Iterator[None]:
    """Let this thread, and the threads and processes that it starts meanwhile, use every core that the process had."""
    if _every is None:
        yield
        return
    own = os.sched_getaffinity(0)  # other threads of the process need not keep to a core
    os.sched_setaffinity(0, _every)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
