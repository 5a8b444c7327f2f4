"""Whoever waits for what others write into a parameter database need not ask SQLite each
time that it looks: this process knows when it writes itself (so inline nothing depends on
the clock), and the index's time says when others do."""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic

from tidemill.store.version_index import INDEX, newest_write

# seconds until it is asked again all the same: files' times are coarse,
SOON = 0.02
# and network shares may tell them late
LATER = 0.25


class DatabaseWatch:
    """A watch over the database in `folder` says when to look into it."""

    def __init__(self, folder: Path) -> None:
        self._index = folder / INDEX
        self._stamp: tuple[int, ...] | None = None
        self._again = self._pause = 0.0

    def due(self) -> bool:
        """True where the database was written since the last time that this was True, or
        may have been: then look."""
        stamp: tuple[int, ...] = (newest_write(),)
        with suppress(OSError):  # there is none yet; else the look itself says what is wrong
            told = os.stat(self._index)
            stamp += told.st_mtime_ns, told.st_size, told.st_ino
        now = monotonic()
        if stamp != self._stamp:
            self._stamp, self._pause = stamp, SOON
        elif now < self._again:
            return False
        else:
            self._pause = min(2 * self._pause, LATER)
        self._again = now + self._pause
        return True
