"""Processes that were killed are waited for: the kernel ends them, but for those that it
holds itself."""

import os
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tidemill.core.errors import DeadlineError

KILLED = 20.0  # seconds


def kill_session(leader: int) -> None:
    """Kill the process group that `leader` began (a worker and what its environment
    started)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def living_groups(leaders: Collection[int]) -> set[int]:
    """Return which of the process groups that these began have a process that has not
    ended. Of its leader the number is to be kept, by nobody having waited for it."""
    found = set[int]()
    for place in Path("/proc").glob("[0-9]*/stat") if leaders else ():
        with suppress(OSError):  # it has ended, and was waited for
            state, _, group = place.read_bytes().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X"):
                found.add(int(group))
    return found.intersection(leaders)


def await_end(process: "subprocess.Popen[bytes]", what: str, seconds: float = KILLED) -> None:
    """Wait until a process that was killed is gone. Raises `DeadlineError` where the
    kernel does not end it; `what` it is."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{what} (process {process.pid}) was killed, and has not ended within {seconds:.3g} s: the "
            "kernel, which is to end it, waits for a disk, a share or a device in its place, most likely "
            "(state D in `ps`); it ends once that answers"
        ) from None
