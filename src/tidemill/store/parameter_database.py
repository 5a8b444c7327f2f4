"""The parameter database: versions of named sets of arrays, tags that point to them, and
what is known of each. Files in one folder::

    index.sqlite: a row per version (with its file's checksum), per tag, per running mean
    POLICY/VERSION.safetensors

Several processes of one machine use it at a time; each call opens the index, does one
transaction and closes it, so that nothing is held in between. Safe against a kill at any
instant: a file is synced and renamed before its row is committed, and removed after its
row is. So a row always has its file, and what has no row (a file, or one written aside)
is removed by whoever writes next. One lock per policy keeps writers of files apart.

The index keeps a rollback journal: a write-ahead log would not work on network shares,
leaves files behind when its last user is killed, and has been found to corrupt (SQLite
3.7.0 to 3.51.2, "WAL-reset bug"). Transactions are few and short here.
"""

import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from math import isfinite, sqrt
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.core.config import check_name
from tidemill.core.cut import Part
from tidemill.core.errors import (
    ConfigError,
    DatabaseError,
    DeadlineError,
    SchemaError,
    VersionGone,
    did_you_mean,
)
from tidemill.core.safetensors_io import pack, unpack
from tidemill.core.schema import Array, Arrays, check_finite
from tidemill.core.untrusted_files import check_database, read_json, read_plain
from tidemill.store.checkpoint import sync, write_synced
from tidemill.store.fence import check
from tidemill.store.query import Query, check_field

PARAMETERS = "parameters"
"""The database's folder in a run's."""
LATEST = "latest"
"""The tag that moves with each push."""
BUSY = 60.0  # seconds that a call waits for another process's lock: one may be stopped for a while
INDEX, SUFFIX = "index.sqlite", ".safetensors"
RESERVED = ("version", "age")  # fields that every version has
NO_RECORDS: Part = {
    "versions": np.zeros(0, np.int64),
    "names": [],
    "counts": np.zeros(0),
    "means": np.zeros(0),
}
"""What `ParameterDatabase.records` returns where there are none."""
_numbers_of_writes = count(1)
_newest_write = 0
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_NAMES = re.compile(r"[A-Za-z0-9._/-]{1,200}")  # of policies, tags and means
_OURS = re.compile(r"\.?\d+\.safetensors")
_FORMAT = 1
_TABLES = (
    "CREATE TABLE versions (policy TEXT, version INTEGER, sha256 TEXT NOT NULL, pushed REAL NOT NULL, "
    "counters TEXT NOT NULL, PRIMARY KEY (policy, version)) WITHOUT ROWID",
    "CREATE TABLE tags (policy TEXT, tag TEXT, version INTEGER NOT NULL, PRIMARY KEY (policy, tag), FOREIGN "
    "KEY (policy, version) REFERENCES versions) WITHOUT ROWID",
    "CREATE TABLE means (policy TEXT, version INTEGER, name TEXT, count INTEGER NOT NULL, mean REAL NOT "
    "NULL, squares REAL NOT NULL, PRIMARY KEY (policy, version, name), FOREIGN KEY (policy, version) "
    "REFERENCES versions ON DELETE CASCADE) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Mean:
    """The running mean of `count` values. `squares` is the sum of their squared
    deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float64]) -> "Mean":
        """Return the mean of these values too (Chan, Golub, LeVeque 1983, "Algorithms for
        Computing the Sample Variance", equations 2.1)."""
        if not len(values):
            return self
        count, mean = self.count + len(values), float(values.mean())
        apart = mean - self.mean
        squares = (
            self.squares
            + float(((values - mean) ** 2).sum())
            + apart * apart * self.count * len(values) / count
        )
        return Mean(count, self.mean + apart * len(values) / count, squares)

    @property
    def variance(self) -> float | None:
        """The values' sample variance; None of fewer than two."""
        return self.squares / (self.count - 1) if self.count > 1 else None

    @property
    def margin(self) -> float | None:
        """Half of the mean's 95 % confidence interval, by the normal distribution; None
        of fewer than two values."""
        return None if self.variance is None else 1.96 * sqrt(self.variance / self.count)


@dataclass(frozen=True)
class Version:
    """What is known of a version.

    pushed: when it was pushed, in seconds since 1970
    counters: numbers that were pushed with it
    means: running means of what was recorded for it since, by name
    """

    policy: str
    version: int
    pushed: float
    counters: dict[str, float]
    tags: tuple[str, ...] = ()
    means: dict[str, Mean] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return the number behind each field that a query can ask for."""
        means = {name: mean.mean for name, mean in self.means.items()} | {
            f"{name}.n": float(mean.count) for name, mean in self.means.items()
        }
        return {**self.counters, **means, "version": self.version, "age": time() - self.pushed}


class ParameterDatabase:
    """The database in `folder`, which the first `push` makes.

    Every call ends within some seconds: it raises `DeadlineError` when another process
    holds a lock for longer than `BUSY`, `VersionGone` for a version or tag that is not
    there (any more), and `DatabaseError` for what is damaged or cannot be written.
    `which` is a version or a tag.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._index = folder, folder / INDEX

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
            _check_new_field(name, RESERVED)
            if not isfinite(value):
                raise ConfigError(f'counter "{name}" = {value} is not a finite number')
        if not 0 <= version < 2**63:
            raise ConfigError(f"version = {version} must not be negative")
        data = pack(
            arrays,
            {**(text or {}), "policy": policy, "version": str(version), "counters": json.dumps(counters)},
        )
        with self._writing(policy) as folder:
            held = self._holds(policy, version, arrays)
            if not held:
                _place(folder / f".{version}{SUFFIX}", file_of(folder, version), data)
                sync(folder)
            with self._transaction("create") as db:
                if not held:
                    row = policy, version, sha256(data).hexdigest(), time(), json.dumps(counters)
                    db.execute(
                        "INSERT INTO versions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET sha256 = "
                        "excluded.sha256",
                        row,
                    )
                _point(db, policy, LATEST, version)

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
            with self._transaction("read") as db:
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
            _place(path.with_name(f".{path.name}.{os.getpid()}"), path, data)
        except OSError as error:
            raise DatabaseError(f"{path} cannot be written: {error.strerror}") from None
        return version

    def index(self) -> bytes:
        """Return the index, as SQLite has it in a file; b"" before the first version."""
        try:
            with self._transaction("read") as db:
                return db.serialize()
        except VersionGone:
            return b""

    def policies(self) -> list[str]:
        """Return the policies that have versions."""
        try:
            with self._transaction("read") as db:
                return [
                    _name(name)
                    for name in _column(db, "SELECT DISTINCT policy FROM versions ORDER BY policy")
                ]
        except VersionGone:
            return []

    def versions(self, policy: str) -> list[Version]:
        """Return what is known of a policy's versions, oldest first, in numeric order."""
        try:
            with self._transaction("read") as db:
                tags: dict[int, list[str]] = {}
                for tag, version in db.execute(
                    "SELECT tag, version FROM tags WHERE policy = ? ORDER BY tag", (policy,)
                ):
                    tags.setdefault(version, []).append(_name(tag))
                means: dict[int, dict[str, Mean]] = {}
                for version, name, *mean in db.execute(
                    "SELECT version, name, count, mean, squares FROM means WHERE policy = ?", (policy,)
                ):
                    means.setdefault(version, {})[_name(name)] = Mean(
                        int(mean[0]), float(mean[1]), float(mean[2])
                    )
                return [
                    Version(
                        policy,
                        int(version),
                        float(pushed),
                        _numbers(counters),
                        tuple(tags.get(version, ())),
                        means.get(version, {}),
                    )
                    for version, pushed, counters in db.execute(
                        "SELECT version, pushed, counters FROM versions WHERE policy = ? ORDER BY version",
                        (policy,),
                    )
                ]
        except VersionGone:
            return []

    # ---- tags and metadata -------------------------------------------------------------

    def tag(self, policy: str, tag: str, which: int | str) -> int:
        """Let `tag` point to a version, which is not collected while it does, and return
        the version's number. A tag that exists moves."""
        check_tag(tag)
        with self._transaction("write") as db:
            version, _ = find_version(db, policy, which)
            _point(db, policy, tag, version)
        return version

    def untag(self, policy: str, tag: str) -> None:
        """Remove a tag; the version that it pointed to stays until it is collected."""
        check_tag(tag)
        with self._transaction("write") as db:
            find_version(db, policy, tag)
            db.execute("DELETE FROM tags WHERE policy = ? AND tag = ?", (policy, tag))

    def tags(self, policy: str) -> dict[str, int]:
        """Return the version that each tag of a policy points to."""
        return {tag: version.version for version in self.versions(policy) for tag in version.tags}

    def record(self, policy: str, version: int, results: Mapping[str, float | Sequence[float]]) -> None:
        """Fold results of a version, one value or one per game, into its running means by
        name. Raises `VersionGone` once it was collected."""
        values = {name: np.atleast_1d(np.asarray(value, np.float64)) for name, value in results.items()}
        for name, array in values.items():
            if array.ndim > 1 or not np.isfinite(array).all():
                raise ConfigError(
                    f'result "{name}" = {results[name]!r} must be a finite number, or a list of them'
                )
        with self._transaction("write") as db:
            find_version(db, policy, version)
            (counters,) = db.execute(
                "SELECT counters FROM versions WHERE policy = ? AND version = ?", (policy, version)
            ).fetchone()
            for name, array in values.items():
                _check_new_field(name, (*RESERVED, *_numbers(counters)))
                key = policy, version, name
                known = db.execute(
                    "SELECT count, mean, squares FROM means WHERE (policy, version, name) = (?, ?, ?)", key
                ).fetchone()
                mean = Mean(*(known or ())).add(array)
                db.execute(
                    "INSERT OR REPLACE INTO means VALUES (?, ?, ?, ?, ?, ?)",
                    (*key, mean.count, mean.mean, mean.squares),
                )

    def unrecorded(self, policy: str, name: str, every: int) -> int | None:
        """Return the oldest version, of those whose number `every` divides, of which
        nothing was recorded by this name; None where there is none."""
        with suppress(VersionGone), self._transaction("read") as db:
            found = _column(
                db,
                "SELECT min(version) FROM versions WHERE policy = ? AND version % ? = 0 AND version NOT IN "
                "(SELECT version FROM means WHERE (policy, name) = (?, ?))",
                (policy, every, policy, name),
            )
            return None if found[0] is None else int(found[0])
        return None

    def recorded(self, policy: str, version: int) -> dict[str, float]:
        """Return the means of what was recorded of a version, by name. Raises
        `VersionGone`."""
        with self._transaction("read") as db:
            find_version(db, policy, version)
            rows = db.execute(
                "SELECT name, mean FROM means WHERE (policy, version) = (?, ?)", (policy, version)
            )
            return {_name(name): float(mean) for name, mean in rows}

    def records(self, policy: str, prefix: str) -> Part:
        """Return all that was recorded of a policy's versions by names that begin with
        `prefix`, so that `set_records` may go back to it."""
        found = [
            (version.version, name, mean)
            for version in self.versions(policy)
            for name, mean in sorted(version.means.items())
            if name.startswith(prefix)
        ]
        return {
            "versions": np.array([version for version, _, _ in found], np.int64),
            "names": [name for _, name, _ in found],
            "counts": np.array([mean.count for _, _, mean in found], np.int64),
            "means": np.array([(mean.mean, mean.squares) for _, _, mean in found], np.float64).reshape(-1, 2),
        }

    def set_records(self, policy: str, prefix: str, records: Part) -> None:
        """Have these records, and no others, of names that begin with `prefix`: what was
        recorded since is going to be recorded again."""
        rows = zip(
            records["versions"].tolist(),
            records["names"],
            records["counts"].tolist(),
            records["means"].tolist(),
            strict=True,
        )
        with self._transaction("write") as db:
            known = {*_column(db, "SELECT version FROM versions WHERE policy = ?", (policy,))}
            db.execute(
                "DELETE FROM means WHERE policy = ? AND substr(name, 1, ?) = ?", (policy, len(prefix), prefix)
            )
            for version, name, count, mean in rows:
                if version in known:
                    db.execute(
                        "INSERT INTO means VALUES (?, ?, ?, ?, ?, ?)", (policy, version, name, count, *mean)
                    )

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

    # ---- keeping order -----------------------------------------------------------------

    def collect(self, policy: str, keep_newest: int) -> list[int]:
        """Remove a policy's versions but for the newest `keep_newest` and those that a
        tag points to. Return the removed ones."""
        with self._writing(policy) as folder:
            with self._transaction("write") as db:
                newest = (
                    "SELECT version FROM versions WHERE policy = :policy ORDER BY version DESC LIMIT :keep"
                )
                tagged = "SELECT version FROM tags WHERE policy = :policy"
                chosen = (
                    f"FROM versions WHERE policy = :policy AND version NOT IN ({newest}) AND version NOT IN "
                    f"({tagged})"
                )
                given = {"policy": policy, "keep": keep_newest}
                removed = _column(db, f"SELECT version {chosen} ORDER BY version", given)
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
        with self._writing(policy) as folder:
            with self._transaction("create") as db:
                known = _column(db, "SELECT version FROM versions WHERE policy = ?", (policy,))
                missing = [
                    number for number in known if number <= version and not file_of(folder, number).is_file()
                ]
                removed = [number for number in known if number > version] + missing
                for number in removed:
                    tags = _column(
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
                    _point(db, policy, LATEST, max(left))
            self._sweep(policy, folder)
        return notices

    def tidy(self) -> None:
        """Remove what writers that were killed left: files without a row, and a journal.
        For when no writer lives."""
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder.is_dir():
                with self._writing(folder.name):
                    self._sweep(folder.name, folder)
        # of a commit that had not begun: SQLite leaves it to the next one
        if self._index.with_name(f"{INDEX}-journal").exists():
            with self._transaction("create") as db:
                db.execute(f"PRAGMA user_version = {_FORMAT}")

    def _sweep(self, policy: str, folder: Path) -> None:
        kept = {file_of(folder, version.version).name for version in self.versions(policy)}
        for path in folder.iterdir():
            if path.name not in kept and _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)

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

    # ---- locks and transactions --------------------------------------------------------

    @contextmanager
    def _writing(self, policy: str) -> Iterator[Path]:
        """Hold the lock of a policy's folder (the folder itself: no file to leave behind)
        and return its path."""
        folder = self.folder / policy
        lock = -1
        check(self.folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock(lock, folder)
            yield folder
        except OSError as error:
            raise DatabaseError(
                f"{folder} cannot be written: {error.strerror}; free space or make the folder writable"
            ) from None
        finally:
            if lock >= 0:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile would hold it on
                os.close(lock)

    @contextmanager
    def _transaction(self, kind: Literal["read", "write", "create"]) -> Iterator[sqlite3.Connection]:
        """One transaction of the index, committed unless something is raised inside. Only
        "create" makes an index where there is none."""
        if kind != "create" and not self._index.exists():
            raise VersionGone(f"{self.folder} holds no versions yet")
        mode = "rwc" if kind == "create" else "rw"
        try:
            check_database(self._index)
            with closing(
                sqlite3.connect(
                    f"{self._index.absolute().as_uri()}?mode={mode}", BUSY, isolation_level=None, uri=True
                )
            ) as db:
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA trusted_schema = OFF")  # the file may be anybody's
                # a lock that is taken first cannot be in the way of another's
                db.execute("BEGIN" if kind == "read" else "BEGIN IMMEDIATE")
                if kind == "create":
                    with suppress(OSError):
                        # by name: closing a descriptor of its own would give up SQLite's
                        # locks
                        self._index.chmod(0o600)
                self._check_format(db, kind == "create")
                yield db
                if kind != "read":
                    check(self.folder)
                db.execute("COMMIT")
            if kind != "read":
                global _newest_write
                _newest_write = next(_numbers_of_writes)
        except sqlite3.Error as error:
            raise self._explain(error) from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self._damaged(error) from None

    def _check_format(self, db: sqlite3.Connection, create: bool) -> None:
        (number,) = db.execute("PRAGMA user_version").fetchone()
        if number not in (0, _FORMAT):
            raise DatabaseError(
                f"{self._index} has format {number}; this version of tidemill reads {_FORMAT}"
            )
        found = _column(db, "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~'")
        # a view may never end, a trigger does something else
        if set(found) != (set(_TABLES) if number else set()):
            raise self._damaged("its tables are not those of a parameter database")
        if not number and not create:
            raise VersionGone(f"{self.folder} holds no versions yet")
        if not number:
            for table in _TABLES:
                db.execute(table)
            db.execute(f"PRAGMA user_version = {_FORMAT}")

    def _damaged(self, how: object) -> DatabaseError:
        return DatabaseError(
            f"{self._index} is damaged ({how}); move {self.folder} away to go on without its versions"
        )

    def _explain(self, error: sqlite3.Error) -> Exception:
        # Python's own errors, of text that is none, have no code
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return _locked_error(self._index)
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._damaged(error)
        if code in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
        ):
            return DatabaseError(
                f"{self._index} cannot be read or written: {error}; free space or make it writable"
            )
        return error  # a mistake of ours


def newest_write() -> int:
    """Return the number of this process's newest write into any database: another one
    with each."""
    return _newest_write


def file_of(folder: Path, version: int) -> Path:
    """Return where a version's file lies, in the folder of its policy."""
    return folder / f"{version}{SUFFIX}"


def _column(db: sqlite3.Connection, query: str, given: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
    """Return what a query for one column finds."""
    return [value for (value,) in db.execute(query, given)]


def _place(aside: Path, path: Path, data: bytes) -> None:
    """Write a file aside and let it take the place of `path`, which is there whole, or as
    it was. Raises `OSError`."""
    try:
        aside.unlink(missing_ok=True)
        write_synced(aside, data)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _point(db: sqlite3.Connection, policy: str, tag: str, version: int) -> None:
    db.execute("INSERT OR REPLACE INTO tags VALUES (?, ?, ?)", (policy, tag, version))


def find_version(db: sqlite3.Connection, policy: str, which: int | str) -> tuple[int, str]:
    """Return number and checksum of the version that `which` means. Raises
    `VersionGone`."""
    version = which
    if isinstance(which, str) and which.isascii() and which.isdigit():
        version = min(int(which[:4000]), 2**63 - 1)  # more is no number that SQLite takes
    elif isinstance(which, str):
        tags: dict[str, int] = dict(db.execute("SELECT tag, version FROM tags WHERE policy = ?", (policy,)))
        if which not in tags:
            raise _no_such(db, policy) or VersionGone(
                f'policy "{policy}" has no tag "{which}"; {did_you_mean(which, tags)}'
            )
        version = int(tags[which])
    found = db.execute(
        "SELECT version, sha256 FROM versions WHERE policy = ? AND version = ?", (policy, version)
    ).fetchone()
    if found is None:
        newest = "SELECT version FROM versions WHERE policy = ? ORDER BY version DESC LIMIT 8"
        kept = _column(db, newest, (policy,))
        never = bool(kept) and int(version) > kept[0]
        raise _no_such(db, policy) or VersionGone(
            f'version {version} of policy "{policy}" '
            + ("was never pushed" if never else "was collected, or never pushed; tag a version to keep it")
            + f". The newest that are kept: {', '.join(map(str, kept))}"
        )
    return int(found[0]), str(found[1])


def _no_such(db: sqlite3.Connection, policy: str) -> VersionGone | None:
    """Return the error for a policy without any version, None when it has some."""
    known = _column(db, "SELECT DISTINCT policy FROM versions")
    if policy in known:
        return None
    return VersionGone(f'no version of a policy "{policy}" is kept; {did_you_mean(policy, known)}')


def _name(value: Any) -> str:
    """Return a name that stands in an index. Raises `ValueError` or `TypeError` for what
    is none."""
    if not _NAMES.fullmatch(value):
        raise ValueError(f"{value!a} is no name")
    return str(value)


def _numbers(text: str) -> dict[str, float]:
    """Return counters as they were pushed. Raises `ValueError` or `TypeError` for
    anything else."""
    return {str(name): float(value) for name, value in dict(read_json(text)).items()}


def check_tag(tag: str) -> None:
    """Raise `ConfigError` unless `tag` is a name that a user may let point to a
    version."""
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f'tag "{tag}" is not a name: use 1 to 64 of letters, digits, ".", "_" and "-", beginning with a '
            "letter"
        )
    if tag == LATEST:
        raise ConfigError(
            f'the tag "{LATEST}" moves by itself, with each version that is pushed; take another name'
        )


def _check_new_field(name: str, taken: Sequence[str]) -> None:
    check_field(name)
    if name in taken:
        raise ConfigError(f'"{name}" is already a field of every version; record it under another name')


def _same(a: Array, b: Array) -> bool:
    # to the bit: NaN equals itself
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _lock(descriptor: int, folder: Path) -> None:
    """Take a folder's lock, which its holder's death frees. The system has no such wait
    with an end, so it is asked for again and again."""
    deadline = monotonic() + BUSY
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                raise _locked_error(folder) from None
            sleep(0.005)
        except OSError:
            return  # a network share without such locks: nothing keeps two writers of a policy apart there


def _locked_error(path: Path) -> DeadlineError:
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
        f"{path} was not free within {BUSY:g} s: {who} holds its lock (the run's trainer or evaluation, a "
        "tidemill params, or an SQLite tool); let that finish or end it, then try again"
    )
