"""A copy of a run's parameter database on a host that does not see the run's folder: the
index as the run's own was a moment ago, and the files of those versions that somebody
there has asked for. Workers read it as they would the database, and the host's agent
gets what they miss from the runner.

Who misses a version's file leaves another one that says so (``asked/POLICY/VERSION``),
and waits.
"""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep, time_ns

from tidemill.core.config import check_name
from tidemill.core.errors import DeadlineError
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import read_plain
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.store.version_files import SUFFIX, file_of
from tidemill.store.version_index import INDEX, find_version

MOST_CACHED_BYTES = 1 << 30
"""The most bytes of files that are kept, but for the newest one; those that were not read
for longest go first."""
PATIENCE_S = 240.0
"""Seconds that a version has to come."""
_ASKED = "asked"
_LOOK_S = 0.005  # seconds between two looks for a file


class MirroredDatabase(ParameterDatabase):
    """The copy, as workers read it. A version that does not come raises
    `DeadlineError`."""

    def read(self, policy: str, which: int | str) -> tuple[bytes, int]:
        check_name("policy", policy)
        deadline = monotonic() + PATIENCE_S
        while True:
            with self.index.transaction("read") as db:
                version, digest = find_version(db, policy, which)
            path = file_of(self.folder / policy, version)
            with suppress(OSError):
                data = read_plain(path)
                if sha256(data).hexdigest() == digest:
                    now = time_ns()  # the kernel's own clock would have two reads in 4 ms at once
                    os.utime(path, ns=(now, now))
                    return data, version
                path.unlink()  # it is damaged: what is there is not sent
            asked = self.folder / _ASKED / policy
            asked.mkdir(mode=0o700, exist_ok=True)
            (asked / str(version)).touch(mode=0o600)
            if monotonic() > deadline:
                raise DeadlineError(
                    f'version {version} of policy "{policy}" has not come from the runner\'s host within '
                    f"{PATIENCE_S:.0f} s: is the line between the hosts too slow for it, or its file damaged?"
                )
            sleep(_LOOK_S)


def database_in(folder: Path) -> ParameterDatabase:
    """Return the parameter database in `folder`, or the copy of one."""
    return MirroredDatabase(folder) if (folder / _ASKED).is_dir() else ParameterDatabase(folder)


class DatabaseMirror:
    """The copy, as the host's agent fills it: a part of one file at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / _ASKED).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._coming: tuple[str, int] | None = None
        self._parts = bytearray()

    def take_index(self, data: bytes) -> None:
        """Have this index from now on."""
        self._place(self._folder / INDEX, data)

    def wanted(self) -> tuple[str, int, int] | None:
        """Return policy, version and first byte of what is to be asked for now, or
        None."""
        if self._coming is None:
            for path in (self._folder / _ASKED).glob("*/*"):
                policy, version = path.parent.name, int(path.name)
                if file_of(self._folder / policy, version).exists():  # it came as its reader asked again
                    path.unlink(missing_ok=True)
                    continue
                self._coming = policy, version
                self._parts.clear()
                return *self._coming, 0
        return None

    def take_part(self, policy: str, version: int, data: bytes, whole: int) -> tuple[str, int, int] | None:
        """Take the next part of a file of `whole` bytes, of one that is gone none. Return
        what is to be asked for next, or None."""
        if self._coming != (policy, version):
            return None
        self._parts += data
        if data and len(self._parts) < whole:
            return policy, version, len(self._parts)
        if data:
            path = file_of(self._folder / policy, version)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._place(path, bytes(self._parts))
            self._forget_oldest(path)
        self._parts.clear()
        (self._folder / _ASKED / policy / str(version)).unlink(missing_ok=True)
        self._coming = None
        return None

    @staticmethod
    def _place(path: Path, data: bytes) -> None:
        aside = path.with_name(f".{path.name}")
        with open(aside, "wb", opener=private) as file:
            file.write(data)
        aside.rename(path)

    def _forget_oldest(self, newest: Path) -> None:
        files = [(path.stat(), path) for path in self._folder.glob(f"*/*{SUFFIX}") if path != newest]
        left = MOST_CACHED_BYTES - newest.stat().st_size - sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime_ns):
            if left >= 0:
                return
            path.unlink(missing_ok=True)
            left += stat.st_size
