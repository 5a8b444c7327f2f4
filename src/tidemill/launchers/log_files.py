"""The logs of workers' processes: files to which several lives append what they print."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20
"""The most bytes that a log has before it is shortened."""
KEPT_BYTES = 1 << 20
"""Of its beginning, and of its end, that are kept then."""
_TAIL = 2000  # characters of a dead worker's output that are shown


def tail(log: Path) -> str:
    """Return the end of a log, "" where there is none."""
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _TAIL))  # a character has 4 bytes at most
        return file.read().decode(errors="replace")[-_TAIL:].strip()


def shorten(logs: Sequence[Path]) -> list[Path]:
    """Take the middle out of logs that are too long, so that what prints without end
    fills no disk, and return these. Who writes there appends, and goes on."""
    return [log for log in logs if _shorten(log)]


def _shorten(log: Path) -> bool:
    """True where the log was too long; one that is not there, or is no file of ours, is
    left as it is."""
    with suppress(OSError):
        if log.lstat().st_size <= MOST_BYTES:
            return False
        descriptor = os.open(log, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            end = os.pread(descriptor, KEPT_BYTES, size - KEPT_BYTES)
            file.truncate(KEPT_BYTES)
            gone = (size - 2 * KEPT_BYTES) >> 20
            file.write(b"\n[... %d MB that were printed here are taken out ...]\n" % gone + end)
        return True
    return False


def remove_empty(logs: Sequence[Path], folder: Path) -> None:
    """Remove the logs of those who had nothing to say, and their folder where it has
    nothing else."""
    for log in logs:
        if log.exists() and log.stat().st_size == 0:
            log.unlink()
    with suppress(OSError):
        folder.rmdir()
