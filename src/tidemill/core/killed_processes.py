"""Processes that were killed are waited for: the kernel ends them, but for those that it
holds itself."""

import os
import signal
import subprocess
from contextlib import suppress

from tidemill.core.errors import DeadlineError

KILLED = 20.0  # seconds


def kill_session(leader: int) -> None:
    """Kill the process group that `leader` began (a worker and what its environment
    started)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


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
