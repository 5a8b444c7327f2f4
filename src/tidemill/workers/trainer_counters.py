"""The counters of a trainer (updates, rows, env steps, seconds), and the limits of the
run that they come to."""

from dataclasses import dataclass

from tidemill.api.buffer import SampleCounts
from tidemill.api.limits import Limits
from tidemill.core.clock import awake
from tidemill.workers.data_parallel import CombinedCounts


@dataclass
class Counters:
    """What a resumed run goes on from. `steps` are env steps that entered training:
    trained rows, each counted when it is first trained on, divided by the seats in a
    lane. `dropped`, `evicted` and `reused` count samples (see `api.buffer.SampleCounts`),
    `skipped` updates that were left out, since they were not finite,
    `adopted` is the version as which it went on from another policy's weights last,
    `changes` the number of the last change of settings that it was told
    (`ChangeSettings`), `stage` the curriculum's (from 0) of which the newest version is,
    `rounds` how many there were (see `tidemill.workers.stages`), where these are
    counted."""

    updates: int = 0
    rows: int = 0
    steps: int = 0
    dropped: int = 0
    evicted: int = 0
    reused: int = 0
    skipped: int = 0
    adopted: int = 0
    changes: int = 0
    stage: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, counts: SampleCounts | CombinedCounts) -> None:
        """Count what became of samples."""
        self.dropped += int(counts.dropped)
        self.evicted += int(counts.evicted)
        self.reused += int(counts.reused)


class TrainingLimits:
    """The run's limits, as far as a trainer's `counters` have come in them."""

    def __init__(self, counters: Counters, limits: Limits) -> None:
        self.counters, self._limits = counters, limits
        self._counted_at, self._running = 0.0, False

    def start(self) -> None:
        """Begin to count the time of training."""
        self._counted_at = awake()
        self._running = True

    def pause(self) -> None:
        """Count no time until the next `start`."""
        self.count_time()
        self._running = False

    def count_time(self) -> None:
        """Count the seconds of training up to now."""
        now = awake()
        if self._running:
            self.counters.seconds += now - self._counted_at
        self._counted_at = now

    def progress(self) -> float:
        """Return the share of the run that is over, as far as that is known."""
        counters, limits = self.counters, self._limits
        shares = [
            counters.steps / limits.steps if limits.steps else 0.0,
            counters.updates / limits.updates if limits.updates else 0.0,
        ]
        return min(max(shares), 1.0)

    @property
    def updates_left(self) -> bool:
        """True while the limit of updates lets one more be done."""
        limit = self._limits.updates
        return limit is None or self.counters.updates < limit

    def limit_reached(self, why_more: str, awaits_more: bool = False) -> str:
        """Return which of the run's limits is reached, "" for none. `why_more` says where
        steps above their limit come from; where it `awaits_more` that limit is none."""
        counters, limits = self.counters, self._limits
        if limits.steps is not None and counters.steps >= limits.steps and not awaits_more:
            over = counters.steps - limits.steps
            more = f", {over:,} more than the limit: {why_more}" if over else ""
            return f"{counters.steps:,} env steps trained{more}"
        if not self.updates_left:
            return f"{counters.updates:,} updates done"
        if limits.seconds is not None and counters.seconds >= limits.seconds:
            return f"{counters.seconds:.0f} s of training"
        return ""
