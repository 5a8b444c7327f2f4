"""The index of a parameter database: an SQLite file with a row per version (with its
file's checksum), per tag, and per running mean of what was recorded of a version.

Each transaction opens the file and closes it, so that nothing is held in between. The
file may be anybody's: its tables are compared with those that it should have, and a value
that is not what it should be is damage.

It keeps a rollback journal: a write-ahead log would not work on network shares, leaves
files behind when its last user is killed, and has been found to corrupt (SQLite 3.7.0 to
3.51.2, "WAL-reset bug"). Transactions are few and short here.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tidemill.core.errors import DatabaseAway, DatabaseError, VersionGone, did_you_mean
from tidemill.core.resource_shortage import why
from tidemill.core.untrusted_files import check_database, read_json
from tidemill.store.database_locks import locked_error
from tidemill.store.fence import check
from tidemill.store.versions import Mean, Version

INDEX = "index.sqlite"
"""The file's name in the database's folder."""
_numbers_of_writes = count(1)
_newest_write = 0
_NAMES = re.compile(r"[A-Za-z0-9._/-]{1,200}")  # of policies, tags and means
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


class VersionIndex:
    """The index of the database in `folder`, which the first transaction that may
    "create" makes.

    Its errors are `DeadlineError` when another process holds the lock for longer than
    `patience` seconds, `VersionGone` where there is no index yet, `DatabaseAway` where
    it cannot be read or written, and `DatabaseError` for what is damaged, or of another
    format.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self.path, self._patience = folder, folder / INDEX, patience

    @contextmanager
    def transaction(self, kind: Literal["read", "write", "create"]) -> Iterator[sqlite3.Connection]:
        """One transaction of the index, committed unless something is raised inside. Only
        "create" makes an index where there is none."""
        mode = "rwc" if kind == "create" else "rw"
        try:
            if kind != "create" and not self.path.exists():
                raise VersionGone(f"{self._folder} holds no versions yet")
            check_database(self.path)
            with closing(
                sqlite3.connect(
                    f"{self.path.absolute().as_uri()}?mode={mode}",
                    self._patience,
                    isolation_level=None,
                    uri=True,
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
                        self.path.chmod(0o600)
                self._check_format(db, kind == "create")
                yield db
                if kind != "read":
                    check(self._folder)
                db.execute("COMMIT")
            if kind != "read":
                global _newest_write
                _newest_write = next(_numbers_of_writes)
        except sqlite3.Error as error:
            raise self._explain(error) from None
        except OSError as error:
            raise DatabaseAway(
                f"{self.path} cannot be read or written: {why(error)}; look whether its disk, or share, is "
                "there, or let yourself read it"
            ) from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self._damaged(error) from None

    def serialized(self) -> bytes:
        """Return the index as SQLite has it in a file; b"" before the first version."""
        with suppress(VersionGone), self.transaction("read") as db:
            return db.serialize()
        return b""

    def roll_back(self) -> None:
        """Remove the journal of a writer that was killed before its commit began, which
        SQLite leaves to the next one. For when no writer lives."""
        if self.path.with_name(f"{INDEX}-journal").exists():
            with self.transaction("create") as db:
                db.execute(f"PRAGMA user_version = {_FORMAT}")

    def _check_format(self, db: sqlite3.Connection, create: bool) -> None:
        (number,) = db.execute("PRAGMA user_version").fetchone()
        if number not in (0, _FORMAT):
            raise DatabaseError(f"{self.path} has format {number}; this version of tidemill reads {_FORMAT}")
        found = column(db, "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~'")
        # a view may never end, a trigger does something else
        if set(found) != (set(_TABLES) if number else set()):
            raise self._damaged("its tables are not those of a parameter database")
        if not number and not create:
            raise VersionGone(f"{self._folder} holds no versions yet")
        if not number:
            for table in _TABLES:
                db.execute(table)
            db.execute(f"PRAGMA user_version = {_FORMAT}")

    def _damaged(self, how: object) -> DatabaseError:
        return DatabaseError(
            f"{self.path} is damaged ({how}); move {self._folder} away to go on without its versions"
        )

    def _explain(self, error: sqlite3.Error) -> Exception:
        # Python's own errors, of text that is none, have no code
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return locked_error(self.path, self._patience)
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._damaged(error)
        if code in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
        ):
            return DatabaseAway(
                f"{self.path} cannot be read or written: {error}; free space or make it writable"
            )
        return error  # a mistake of ours


def newest_write() -> int:
    """Return the number of this process's newest write into any index: another one with
    each."""
    return _newest_write


def column(db: sqlite3.Connection, query: str, given: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
    """Return what a query for one column finds."""
    return [value for (value,) in db.execute(query, given)]


def point(db: sqlite3.Connection, policy: str, tag: str, version: int) -> None:
    """Let a tag point to a version."""
    db.execute("INSERT OR REPLACE INTO tags VALUES (?, ?, ?)", (policy, tag, version))


def known_versions(db: sqlite3.Connection, policy: str) -> list[Version]:
    """Return what is known of a policy's versions, oldest first, in numeric order."""
    tags: dict[int, list[str]] = {}
    for tag, version in db.execute("SELECT tag, version FROM tags WHERE policy = ? ORDER BY tag", (policy,)):
        tags.setdefault(version, []).append(name_in(tag))
    means: dict[int, dict[str, Mean]] = {}
    for version, name, *mean in db.execute(
        "SELECT version, name, count, mean, squares FROM means WHERE policy = ?", (policy,)
    ):
        means.setdefault(version, {})[name_in(name)] = Mean(int(mean[0]), float(mean[1]), float(mean[2]))
    return [
        Version(
            policy,
            int(version),
            float(pushed),
            counters_in(counters),
            tuple(tags.get(version, ())),
            means.get(version, {}),
        )
        for version, pushed, counters in db.execute(
            "SELECT version, pushed, counters FROM versions WHERE policy = ? ORDER BY version", (policy,)
        )
    ]


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
        kept = column(db, newest, (policy,))
        never = bool(kept) and int(version) > kept[0]
        raise _no_such(db, policy) or VersionGone(
            f'version {version} of policy "{policy}" '
            + ("was never pushed" if never else "was collected, or never pushed; tag a version to keep it")
            + f". The newest that are kept: {', '.join(map(str, kept))}"
        )
    return int(found[0]), str(found[1])


def _no_such(db: sqlite3.Connection, policy: str) -> VersionGone | None:
    """Return the error for a policy without any version, None when it has some."""
    known = column(db, "SELECT DISTINCT policy FROM versions")
    if policy in known:
        return None
    return VersionGone(f'no version of a policy "{policy}" is kept; {did_you_mean(policy, known)}')


def name_in(value: Any) -> str:
    """Return a name that stands in an index. Raises `ValueError` or `TypeError` for what
    is none."""
    if not _NAMES.fullmatch(value):
        raise ValueError(f"{value!a} is no name")
    return str(value)


def counters_in(text: str) -> dict[str, float]:
    """Return counters as they were pushed. Raises `ValueError` or `TypeError` for
    anything else."""
    return {str(name): float(value) for name, value in dict(read_json(text)).items()}
