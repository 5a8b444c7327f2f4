"""The files of a parameter database: one per version, in a folder per policy.

A file is there whole or not at all. One lock per policy keeps writers of files apart.
"""

import errno
import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.core.errors import DatabaseAway
from tidemill.core.resource_shortage import why
from tidemill.store.checkpoint import AWAY, write_synced
from tidemill.store.database_locks import lock
from tidemill.store.fence import check

SUFFIX = ".safetensors"
_OURS = re.compile(r"\.?\d+\.safetensors")  # a version's file, or one that is written aside


def file_of(folder: Path, version: int) -> Path:
    """Return where a version's file lies, in the folder of its policy."""
    return folder / f"{version}{SUFFIX}"


@contextmanager
def writing(database: Path, policy: str, patience: float) -> Iterator[Path]:
    """Hold the lock of a policy's folder (the folder itself: no file to leave behind),
    which is made where there is none, and return its path. Another writer is waited for
    for `patience` seconds. What the system refuses meanwhile becomes a
    `DatabaseAway`."""
    folder = database / policy
    descriptor = -1
    try:
        check(database)
        if not database.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, AWAY)
        database.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock(descriptor, folder, patience)
        yield folder
    except OSError as error:
        raise DatabaseAway(
            f"{folder} cannot be written: {why(error)}; free space or make the folder writable"
        ) from None
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                # a process that was forked meanwhile would hold it on
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def place(aside: Path, path: Path, data: bytes) -> None:
    """Write a file aside and let it take the place of `path`, which is there whole, or as
    it was. Raises `OSError`."""
    try:
        aside.unlink(missing_ok=True)
        write_synced(aside, data)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def sweep(folder: Path, kept: Collection[int]) -> None:
    """Remove what is no file of the versions `kept` from the folder of a policy whose
    lock one holds. Raises `OSError`."""
    names = {file_of(folder, version).name for version in kept}
    for path in folder.iterdir():
        if path.name not in names and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
