"""The versions that hosts get which do not see the run's folder, as the runner sends
them."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

from tidemill.core.config import check_name
from tidemill.core.errors import TidemillError
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.core.untrusted_files import open_plain
from tidemill.hosts.orders import KnownVersions, VersionPart, WantVersion
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.store.version_files import file_of

PART_BYTES = 1 << 20
"""The most bytes of a file that are sent at once: a lease waits behind them."""
_LOOK_S = 0.5  # seconds between two looks at the index
_PATIENCE_S = 0.1  # seconds for a lock of it, which the runner's thread may lose; then the next look


class VersionsSent:
    """What the runner sends of the run's parameter database, which is in `folder`.
    `disk`: the thread that reads it, as the share that it is on may hang."""

    def __init__(self, folder: Path, disk: FolderThread) -> None:
        self._database, self._disk = ParameterDatabase(folder, _PATIENCE_S), disk
        self._looked = float("-inf")
        self._seen: tuple[int, int] | None = None  # of the index's file, when it was read
        self._index = b""
        self._told: dict[str, bytes] = {}  # the index that each agent has

    def news(self, agent: str, now: bool = False) -> KnownVersions | None:
        """Return what is to be told to an agent that has not heard it, if anything is.
        `now`: look at once."""
        if now or monotonic() >= self._looked + _LOOK_S:
            self._looked = monotonic()
            with suppress(Unanswered):
                self._disk.do(self._look)
        if not self._index or self._told.get(agent) is self._index:
            return None
        self._told[agent] = self._index
        return KnownVersions(self._index)

    def _look(self) -> None:
        try:
            stat = self._database.index.path.stat()
            seen = stat.st_mtime_ns, stat.st_size
            if seen != self._seen:
                self._index, self._seen = self._database.index.serialized(), seen
        except (OSError, TidemillError):
            pass  # there are none yet, or it is being written: the next look finds more

    def forget(self, agent: str) -> None:
        """Know nothing of what an agent has: it has none of it any more, or is gone."""
        self._told.pop(agent, None)

    def part(self, wanted: WantVersion) -> VersionPart | None:
        """Return the part of a version's file that is wanted, None as long as the disk
        does not answer. Whoever has all of it sees whether it is whole."""
        with suppress(Unanswered):
            return self._disk.do(partial(self._part, wanted))
        return None

    def _part(self, wanted: WantVersion) -> VersionPart:
        policy, version, start = wanted.policy, wanted.version, wanted.start
        data, nbytes = b"", 0
        with suppress(OSError, OverflowError, TidemillError):  # it was collected meanwhile, or never was
            check_name("policy", policy)
            with open_plain(file_of(self._database.folder / policy, version)) as file:
                nbytes = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), PART_BYTES, start)
        return VersionPart(policy, version, data, nbytes)
