"""The parameter database: versions of named sets of arrays, tags that point to them, and
what is known of each. Files in one folder::

    index.sqlite: what is known (version_index.py)
    POLICY/VERSION.safetensors: a version's arrays (version_files.py)

Several processes of one machine use it at a time. Safe against a kill at any instant: a
file is synced and renamed before its row is committed, and removed after its row is. So a
row always has its file, and what has no row (a file, or one written aside) is removed by
whoever writes next.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from pathlib import Path
from time import time

from tidemill.core.config import check_name
from tidemill.core.errors import ConfigError, DatabaseError, SchemaError, VersionGone
from tidemill.core.safetensors_io import pack, unpack
from tidemill.core.schema import Array, Arrays, check_finite
from tidemill.core.untrusted_files import read_plain
from tidemill.store.checkpoint import sync
from tidemill.store.database_locks import BUSY
from tidemill.store.query import Query
from tidemill.store.recorded_results import RecordedResults
from tidemill.store.version_files import SUFFIX, file_of, place, sweep, writing
from tidemill.store.version_index import (
    VersionIndex,
    column,
    find_version,
    known_versions,
    name_in,
    point,
)
from tidemill.store.versions import LATEST, RESERVED, Version, check_new_field, check_tag

PARAMETERS = "parameters"
"""The database's folder in a run's."""


class ParameterDatabase:
    """The database in `folder`, which the first `push` makes.

    Every call ends within some seconds: it raises `DeadlineError` when another process
    holds a lock for longer than `patience`, `VersionGone` for a version or tag that is
    not there (any more), and `DatabaseError` for what is damaged or cannot be written.
    `which` is a version or a tag.

    index: what is known of the versions
    results: what is recorded of them after they were pushed
    """

    def __init__(self, folder: Path, patience: float = BUSY) -> None:
        self.folder, self._patience = folder, patience
        self.index = VersionIndex(folder, patience)
        self.results = RecordedResults(self.index)

    # ---- versions ----------------------------------------------------------------------

    def push(
        self,
        policy: str,
        version: int,
        arrays: Mapping[str, Array],
        counters: Mapping[str, float] | None = None,
        text: Mapping[str, str] | None = None,
    ) -> None:
        """Keep `arrays` as this version, and move the tag `latest` to it.

        counters: finite numbers that are known of it
        text: goes into the file's header, beside ``policy``, ``version`` and ``counters``
            (JSON)

        To push a version again changes nothing but `latest`; with other arrays it raises
        `DatabaseError`: a version means one set of weights.
        """
        check_name("policy", policy)
        counters = {name: float(value) for name, value in (counters or {}).items()}
        for name, value in counters.items():
            check_new_field(name)
            if not isfinite(value):
                raise ConfigError(f'counter "{name}" = {value} is not a finite number')
        if not 0 <= version < 2**63:
            raise ConfigError(f"version = {version} must not be negative")
        data = pack(
            arrays,
            {**(text or {}), "policy": policy, "version": str(version), "counters": json.dumps(counters)},
        )
        with writing(self.folder, policy, self._patience) as folder:
            held = self._holds(policy, version, arrays)
            if not held:
                place(folder / f".{version}{SUFFIX}", file_of(folder, version), data)
                sync(folder)
            with self.index.transaction("create") as db:
                if not held:
                    row = policy, version, sha256(data).hexdigest(), time(), json.dumps(counters)
                    db.execute(
                        "INSERT INTO versions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET sha256 = "
                        "excluded.sha256",
                        row,
                    )
                point(db, policy, LATEST, version)

    def load(self, policy: str, which: int | str) -> tuple[Arrays, int]:
        """Return a version's arrays, and its number."""
        data, version = self.read(policy, which)
        try:
            arrays, _ = unpack(data)
            check_finite(arrays, infinities=True)
            return arrays, version
        except SchemaError as error:
            raise DatabaseError(f"{file_of(self.folder / policy, version)}: {error}") from None

    def read(self, policy: str, which: int | str) -> tuple[bytes, int]:
        """Return the bytes of a version's file (see `tidemill.core.safetensors_io`), and
        its number. They are those that were pushed."""
        check_name("policy", policy)
        known: tuple[int, str] | None = None
        while True:  # again when it was collected, or its tag moved, between looking it up and reading it
            with self.index.transaction("read") as db:
                found = find_version(db, policy, which)
            path = file_of(self.folder / policy, found[0])
            try:
                data = read_plain(path)
                if sha256(data).hexdigest() == found[1]:
                    return data, found[0]
                wrong = "is damaged (its checksum differs)"
            except OSError as error:
                wrong = f"cannot be read: {error.strerror}"
            if known == found:
                raise DatabaseError(
                    f'{path}, version {found[0]} of policy "{policy}", {wrong}; take another version'
                )
            known = found

    def export(self, policy: str, which: int | str, path: Path) -> int:
        """Write a version into the file `path` (replacing what is there), and return its
        number."""
        if path.is_dir():
            raise DatabaseError(f"{path} is a folder; name a file in it")
        data, version = self.read(policy, which)
        try:
            place(path.with_name(f".{path.name}.{os.getpid()}"), path, data)
        except OSError as error:
            raise DatabaseError(f"{path} cannot be written: {error.strerror}") from None
        return version

    def policies(self) -> list[str]:
        """Return the policies that have versions."""
        with suppress(VersionGone), self.index.transaction("read") as db:
            return [
                name_in(name) for name in column(db, "SELECT DISTINCT policy FROM versions ORDER BY policy")
            ]
        return []

    def versions(self, policy: str) -> list[Version]:
        """Return what is known of a policy's versions, oldest first, in numeric order."""
        with suppress(VersionGone), self.index.transaction("read") as db:
            return known_versions(db, policy)
        return []

    def query(self, policy: str, query: Query, declared: Sequence[str] = ()) -> list[Version]:
        """Return the versions that `query` asks for, in its order. Raises `ConfigError`
        for a field that no version of the policy has, unless it is `declared`: of those
        that are still to be recorded."""
        versions = [(version, version.values()) for version in self.versions(policy)]
        query.check(
            {
                *RESERVED,
                *declared,
                *(name for _, values in versions for name in values if not name.endswith(".n")),
            }
        )
        return [version for version, _ in query.select(versions, lambda item: item[1])]

    # ---- tags --------------------------------------------------------------------------

    def tag(self, policy: str, tag: str, which: int | str) -> int:
        """Let `tag` point to a version, which is not collected while it does, and return
        the version's number. A tag that exists moves."""
        check_tag(tag)
        with self.index.transaction("write") as db:
            version, _ = find_version(db, policy, which)
            point(db, policy, tag, version)
        return version

    def untag(self, policy: str, tag: str) -> None:
        """Remove a tag; the version that it pointed to stays until it is collected."""
        check_tag(tag)
        with self.index.transaction("write") as db:
            find_version(db, policy, tag)
            db.execute("DELETE FROM tags WHERE policy = ? AND tag = ?", (policy, tag))

    def tags(self, policy: str) -> dict[str, int]:
        """Return the version that each tag of a policy points to."""
        return {tag: version.version for version in self.versions(policy) for tag in version.tags}

    # ---- keeping order -----------------------------------------------------------------

    def collect(self, policy: str, keep_newest: int) -> list[int]:
        """Remove a policy's versions but for the newest `keep_newest` and those that a
        tag points to. Return the removed ones."""
        with writing(self.folder, policy, self._patience) as folder:
            with self.index.transaction("write") as db:
                newest = (
                    "SELECT version FROM versions WHERE policy = :policy ORDER BY version DESC LIMIT :keep"
                )
                tagged = "SELECT version FROM tags WHERE policy = :policy"
                chosen = (
                    f"FROM versions WHERE policy = :policy AND version NOT IN ({newest}) AND version NOT IN "
                    f"({tagged})"
                )
                given = {"policy": policy, "keep": keep_newest}
                removed = column(db, f"SELECT version {chosen} ORDER BY version", given)
                db.execute(f"DELETE {chosen}", given)
            self._sweep(policy, folder)
        return removed

    def rewind(self, policy: str, version: int) -> list[str]:
        """Make a policy's versions end at `version`, from which its writer goes on.
        Return what a user should know of it.

        Later versions are removed, tagged or not, since their numbers are going to mean
        other weights; so are those whose files are gone.
        """
        notices = []
        with writing(self.folder, policy, self._patience) as folder:
            with self.index.transaction("create") as db:
                known = column(db, "SELECT version FROM versions WHERE policy = ?", (policy,))
                missing = [
                    number for number in known if number <= version and not file_of(folder, number).is_file()
                ]
                removed = [number for number in known if number > version] + missing
                for number in removed:
                    tags = column(
                        db, "SELECT tag FROM tags WHERE (policy, version) = (?, ?)", (policy, number)
                    )
                    why = (
                        "its file is gone" if number in missing else f"the run goes on from version {version}"
                    )
                    if number in missing or tags not in ([], [LATEST]):
                        tagged = f", tagged {', '.join(tags)}," if tags else ""
                        notices.append(
                            f'version {number} of policy "{policy}"{tagged} is removed from the parameter '
                            f"database: {why}"
                        )
                    db.execute("DELETE FROM tags WHERE (policy, version) = (?, ?)", (policy, number))
                    db.execute("DELETE FROM versions WHERE (policy, version) = (?, ?)", (policy, number))
                if left := set(known) - set(removed):
                    point(db, policy, LATEST, max(left))
            self._sweep(policy, folder)
        return notices

    def tidy(self) -> None:
        """Remove what writers that were killed left: files without a row, and a journal.
        For when no writer lives."""
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder.is_dir():
                with writing(self.folder, folder.name, self._patience):
                    self._sweep(folder.name, folder)
        self.index.roll_back()

    def _sweep(self, policy: str, folder: Path) -> None:
        sweep(folder, {version.version for version in self.versions(policy)})

    def _holds(self, policy: str, version: int, arrays: Mapping[str, Array]) -> bool:
        """True when this version is there with these arrays; False when it is not, or
        damaged. Raises `DatabaseError` when it has others."""
        try:
            known, _ = self.load(policy, version)
        except DatabaseError:
            return False
        if known.keys() != arrays.keys() or not all(
            _same(known[name], array) for name, array in arrays.items()
        ):
            raise DatabaseError(
                f'version {version} of policy "{policy}" already means other weights in {self.folder}; push '
                "them as another version"
            )
        return True


def _same(a: Array, b: Array) -> bool:
    # to the bit: NaN equals itself
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
