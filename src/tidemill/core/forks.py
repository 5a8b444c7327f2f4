"""Forks of this process that come back to what began before them: an environment that
calls `os.fork`, and whose child returns, raises or exits, too, would have two processes
play as one."""

import os
from contextlib import suppress

STATUS = 70  # with which such a fork ends
_WHY = (
    b"a process that an environment had forked came back as if it were the worker, and was "
    b"ended. Have such a child end by os._exit(), or take subprocess or multiprocessing for it\n"
)
_forks = 0  # between the process that imported this and this one


def forks() -> int:
    """Return a number that a fork of this process has another one of."""
    return _forks


def end_in_fork(since: int) -> None:
    """End this process, where it is a fork of the one in which `forks` was `since`: at
    once, as it shares all with that one. Standard error says why."""
    if _forks != since:
        with suppress(OSError):  # nobody reads it any more, or the disk is full
            os.write(2, _WHY)
        os._exit(STATUS)


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)
