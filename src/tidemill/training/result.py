"""What a run leaves to whoever trained from Python."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import RunError
from tidemill.metrics.json_lines import each_record
from tidemill.trained.load import LoadedPolicy, load


@dataclass(frozen=True, eq=False)
class Summary(Mapping[str, Any]):
    """A summary says how a run ended, as its summary.json does. It is a mapping, too,
    without what there is nothing to say of: ``summary["mean_return"]``.

    status: "completed", "interrupted" or "failed"
    reason: what ended it, in words
    env_steps: env steps that entered training
    seconds: wall time of training, pauses left out
    steps_per_second: `env_steps` per second of training
    updates: finished updates
    mean_return: mean undiscounted return, in reward units, of the last episodes
        (`Limits.window`); None before the first, and with several policies
    episodes: finished episodes
    mean_returns: the same of each of several policies, by name
    dropped: samples that were too old to be trained on
    started: env steps that a limiter let begin, of which `committed` were stored and
        `voided` lost
    stage: stage of the curriculum, "1 of 3"
    """

    status: str
    reason: str
    env_steps: int = 0
    seconds: float = 0.0
    steps_per_second: float = 0.0
    updates: int = 0
    mean_return: float | None = None
    episodes: int = 0
    dropped: int = 0
    mean_returns: Mapping[str, float | None] | None = None
    started: int | None = None
    committed: int | None = None
    voided: int | None = None
    stage: str | None = None

    def _values(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: v for name, v in values.items() if v is not None or name == "mean_return"}

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


@dataclass(frozen=True)
class Result:
    """A result says of a run that has ended its folder, how it ended, what it trained and
    what it measured."""

    folder: Path
    summary: Summary

    @cached_property
    def policy(self) -> LoadedPolicy:
        """The trained policy, of the newest checkpoint; of several, `tidemill.load` takes
        one by name."""
        return load(self.folder)

    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Return the run's metrics as columns, with NaN where a record has no such
        name."""
        records = list(each_record(self.folder))
        names = dict.fromkeys(name for record in records for name in record)
        return {name: np.array([record.get(name, np.nan) for record in records]) for name in names}

    def frame(self) -> Any:
        """Return the metrics as a data frame of pandas or polars, whichever is
        installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            try:
                from polars import DataFrame
            except ImportError:
                raise RunError(
                    "a data frame needs pandas or polars, and neither is installed; metrics() has the "
                    "columns as arrays"
                ) from None
        return DataFrame(self.metrics())
