"""Locks of a parameter database that other processes may hold: a wait for one has an end,
and its error names who holds it."""

import fcntl
from pathlib import Path
from time import monotonic, sleep

from tidemill.core.errors import DeadlineError

BUSY = 60.0
"""Seconds that a call waits for another process's lock: one may be stopped for a
while."""


def lock(descriptor: int, folder: Path, patience: float) -> None:
    """Take a folder's lock, which its holder's death frees. The system has no such wait
    with an end, so it is asked for again and again."""
    deadline = monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                raise locked_error(folder, patience) from None
            sleep(0.005)
        except OSError:
            return  # a network share without such locks: nothing keeps two writers of a policy apart there


def locked_error(path: Path, patience: float) -> DeadlineError:
    """Return the error of a lock that was not freed in time."""
    holders: list[str] = []
    try:
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            # number, kind, …, access, process, device:inode, from, to
            parts = line.replace("-> ", "").split()
            if len(parts) > 5 and parts[5].rpartition(":")[2] == inode and parts[4] not in holders:
                holders.append(parts[4])
    except OSError:
        pass  # not Linux
    who = f"process {', '.join(holders)}" if holders else "another process"
    return DeadlineError(
        f"{path} was not free within {patience:g} s: {who} holds its lock (the run's trainer or evaluation, "
        "a tidemill params, or an SQLite tool); let that finish or end it, then try again"
    )
