"""The contract of metric sinks: a place that the records of a run go to, beside
`metrics.jsonl`, which every run has.

A record is a mapping from names to numbers, such as ``{"step": 4096, "update": 2,
"return/mean": 21.5}``. A new sink is one file with a subclass of `MetricSink`, and a line
in `metrics/writer.py`; or a user's own, named as ``--log FILE.py:NAME``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoggedRun:
    """A logged run is what a sink is told of its run.

    folder: the run's folder, which exists
    settings: the experiment as plain data, without secrets
    resume_at: the env step that a resumed run goes on from; None: a new run
    updates: the update that a resumed run goes on from
    by_trainer: the update that each trainer goes on from whose policy goes back, by its
        name in records, where several train: one of them may be behind the run
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume_at: int | None = None
    updates: int | None = None
    by_trainer: Mapping[str, int] = field(default_factory=dict)

    def left_of(self, record: Mapping[str, float]) -> Mapping[str, float]:
        """Return what stays of an earlier record: nothing, where it is of later steps and
        updates, which are made anew. Where several train, what each has told of an update
        goes by its own count, since the run's is that of who was furthest, and may be
        undone; nothing of the run is beyond where it goes on from then."""
        limits = {"step": self.resume_at, "update": self.updates}
        trainers = {name.removesuffix("/update") for name in record if name.endswith("/update")}
        if not trainers:
            stays = all(most is None or record.get(name, 0) <= most for name, most in limits.items())
            return record if stays else {}
        undone = {
            trainer for trainer in trainers if record[f"{trainer}/update"] > self.by_trainer.get(trainer, inf)
        }
        if undone == trainers:
            return {}
        beyond = {
            name: most for name, most in limits.items() if most is not None and record.get(name, 0) > most
        }
        if not (undone or beyond):
            return record
        gone = tuple(f"{trainer}/" for trainer in undone)
        return {name: number for name, number in record.items() if not name.startswith(gone)} | beyond


class MetricSink(ABC):
    """A metric sink is a place that a run's records are written to, in the main process,
    by a thread of its own: that makes it, calls `write` with one record after the other,
    and closes it. So it may hold what only the thread may use that made it (a connection
    of sqlite3), but takes no signals, and what it shares with others needs a lock.

    It is made when the run begins: what keeps it from working raises a `TidemillError`
    then, which ends the run before anything is trained. What it raises later does not end
    the training: with an `OSError` it is tried again later, with the records that it
    missed, from the one on at which it was raised; anything else ends the sink. A call
    that does not return is told after 10 s. The newest 1,000 records wait; where that
    many wait for a sink that is merely slow, the run waits with them, 1 s for each record
    at most. A run that goes back to a checkpoint has its sinks closed, and made anew with
    the next record.
    """

    title = "this sink"
    """What warnings call it."""
    rereads = False
    """Whether, after an `OSError`, it takes from `metrics.jsonl` what it missed."""
    recorded: float = inf
    """Bytes of `metrics.jsonl` that hold the records up to the one that is being written:
    those of later ones may be there already."""
    closing_s = 30.0
    """Seconds that a run's end waits until it has written what waits and is closed, 10 at
    most once a signal has come. Then it is left."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @abstractmethod
    def write(self, record: Mapping[str, float]) -> None:
        """Write one record. It has a ``step`` at least; metrics whose names look like a
        secret's ("token", "password") were left out of it. A number may be NaN or
        infinite. Others may read the record meanwhile: it is not to be changed."""

    def close(self) -> None:
        """Give back what the sink holds. May be called twice."""


@lru_cache(4096)
def viewer_name(name: str) -> str:
    """Return what viewers are to call a metric. They fold what stands before the first
    slash: the times of workers (``time/actor-0/wait``) stand in a group of their own
    there, ``workers``, beside the run's ``time/seconds``."""
    return re.sub(r"^time/(?=[^/]+/)", "workers/", name)
