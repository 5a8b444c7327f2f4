"""What is recorded of versions after they were pushed: results of games and the like, of
which the index keeps a running mean by name."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, VersionGone
from tidemill.store.version_index import VersionIndex, column, counters_in, find_version, name_in
from tidemill.store.versions import Mean, check_new_field

NO_RESULTS: Part = {
    "versions": np.zeros(0, np.int64),
    "names": [],
    "counts": np.zeros(0, np.int64),
    "means": np.zeros((0, 2)),
}
"""What `RecordedResults.state` returns where there are none."""


class RecordedResults:
    """The results that `index` has of versions. Errors are those of its transactions."""

    def __init__(self, index: VersionIndex) -> None:
        self._index = index

    def add(self, policy: str, version: int, results: Mapping[str, float | Sequence[float]]) -> None:
        """Fold results of a version, one value or one per game, into its running means by
        name. Raises `VersionGone` once it was collected."""
        values = {name: np.atleast_1d(np.asarray(value, np.float64)) for name, value in results.items()}
        for name, array in values.items():
            if array.ndim > 1 or not np.isfinite(array).all():
                raise ConfigError(
                    f'result "{name}" = {results[name]!r} must be a finite number, or a list of them'
                )
        with self._index.transaction("write") as db:
            find_version(db, policy, version)
            (counters,) = db.execute(
                "SELECT counters FROM versions WHERE policy = ? AND version = ?", (policy, version)
            ).fetchone()
            taken = counters_in(counters)
            for name, array in values.items():
                check_new_field(name, taken)
                key = policy, version, name
                known = db.execute(
                    "SELECT count, mean, squares FROM means WHERE (policy, version, name) = (?, ?, ?)", key
                ).fetchone()
                mean = Mean(*(known or ())).add(array)
                db.execute(
                    "INSERT OR REPLACE INTO means VALUES (?, ?, ?, ?, ?, ?)",
                    (*key, mean.count, mean.mean, mean.squares),
                )

    def means(self, policy: str, version: int) -> dict[str, float]:
        """Return the means of what was recorded of a version, by name. Raises
        `VersionGone`."""
        with self._index.transaction("read") as db:
            find_version(db, policy, version)
            rows = db.execute(
                "SELECT name, mean FROM means WHERE (policy, version) = (?, ?)", (policy, version)
            )
            return {name_in(name): float(mean) for name, mean in rows}

    def oldest_without(self, policy: str, name: str, every: int) -> int | None:
        """Return the oldest version, of those whose number `every` divides, of which
        nothing was recorded by this name; None where there is none."""
        with suppress(VersionGone), self._index.transaction("read") as db:
            found = column(
                db,
                "SELECT min(version) FROM versions WHERE policy = ? AND version % ? = 0 AND version NOT IN "
                "(SELECT version FROM means WHERE (policy, name) = (?, ?))",
                (policy, every, policy, name),
            )
            return None if found[0] is None else int(found[0])
        return None

    def state(self, policy: str, prefix: str) -> Part:
        """Return all that was recorded of a policy's versions by names that begin with
        `prefix`, so that `load_state` may go back to it."""
        with suppress(VersionGone), self._index.transaction("read") as db:
            found = db.execute(
                "SELECT version, name, count, mean, squares FROM means WHERE policy = ? AND substr(name, 1, "
                "?) = ? ORDER BY version, name",
                (policy, len(prefix), prefix),
            ).fetchall()
            return {
                "versions": np.array([int(version) for version, *_ in found], np.int64),
                "names": [name_in(name) for _, name, *_ in found],
                "counts": np.array([int(count) for _, _, count, *_ in found], np.int64),
                "means": np.array([(float(mean), float(squares)) for *_, mean, squares in found]).reshape(
                    -1, 2
                ),
            }
        return NO_RESULTS

    def load_state(self, policy: str, prefix: str, state: Part) -> None:
        """Have these results, and no others, of names that begin with `prefix`: what was
        recorded since is going to be recorded again."""
        rows = zip(
            state["versions"].tolist(),
            state["names"],
            state["counts"].tolist(),
            state["means"].tolist(),
            strict=True,
        )
        with self._index.transaction("write") as db:
            known = {*column(db, "SELECT version FROM versions WHERE policy = ?", (policy,))}
            db.execute(
                "DELETE FROM means WHERE policy = ? AND substr(name, 1, ?) = ?", (policy, len(prefix), prefix)
            )
            for version, name, count, mean in rows:
                if version in known:
                    db.execute(
                        "INSERT INTO means VALUES (?, ?, ?, ?, ?, ?)", (policy, version, name, count, *mean)
                    )
