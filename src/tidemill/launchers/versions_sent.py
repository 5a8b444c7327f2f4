"""The versions that hosts get which do not see the run's folder, as the runner sends
them."""

from pathlib import Path
from time import monotonic

from tidemill.core.errors import TidemillError
from tidemill.hosts.orders import KnownVersions, VersionPart, WantVersion
from tidemill.store.parameter_database import INDEX, ParameterDatabase

PART_BYTES = 1 << 20
"""The most bytes of a file that are sent at once: a lease waits behind them."""
_LOOK_S = 0.5  # seconds between two looks at the index


class VersionsSent:
    """What the runner sends of the run's parameter database, which is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._database = ParameterDatabase(folder)
        self._looked = float("-inf")
        self._seen: tuple[int, int] | None = None  # of the index's file, when it was read
        self._index = b""
        self._told: dict[str, bytes] = {}  # the index that each agent has
        self._file: tuple[str, int, bytes] = "", -1, b""  # that was read last

    def news(self, agent: str, now: bool = False) -> KnownVersions | None:
        """Return what is to be told to an agent that has not heard it, if anything is.
        `now`: look at once."""
        if now or monotonic() >= self._looked + _LOOK_S:
            self._looked = monotonic()
            self._look()
        if not self._index or self._told.get(agent) is self._index:
            return None
        self._told[agent] = self._index
        return KnownVersions(self._index)

    def _look(self) -> None:
        try:
            stat = (self._database.folder / INDEX).stat()
            seen = stat.st_mtime_ns, stat.st_size
            if seen != self._seen:
                self._index, self._seen = self._database.index(), seen
        except (OSError, TidemillError):
            pass  # there are none yet, or it is being written: the next look finds more

    def part(self, wanted: WantVersion) -> VersionPart:
        """Return the part of a version's file that is wanted."""
        policy, version, start = wanted.policy, wanted.version, wanted.start
        if start == 0 or self._file[:2] != (policy, version):
            try:
                self._file = policy, version, self._database.read(policy, version)[0]
            except TidemillError:  # it was collected meanwhile
                self._file = "", -1, b""
        data = self._file[2]
        return VersionPart(
            policy, version, data[start : start + PART_BYTES] if start >= 0 else b"", len(data)
        )
