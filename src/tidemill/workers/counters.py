"""The counters of a trainer: updates, rows, env steps, seconds."""

from dataclasses import dataclass

from tidemill.api.buffer import SampleCounts
from tidemill.api.experiment import Limits
from tidemill.workers.data_parallel import CombinedCounts


@dataclass
class Counters:
    """What a resumed run goes on from. `steps` are env steps that entered training:
    trained rows, each counted when it is first trained on, divided by the seats in a
    lane. `dropped`, `evicted` and `reused` count samples (see `api.buffer.SampleCounts`),
    `adopted` is the version as which it went on from another policy's weights last."""

    updates: int = 0
    rows: int = 0
    steps: int = 0
    dropped: int = 0
    evicted: int = 0
    reused: int = 0
    adopted: int = 0
    seconds: float = 0.0

    def add(self, counts: SampleCounts | CombinedCounts) -> None:
        """Count what became of samples."""
        self.dropped += int(counts.dropped)
        self.evicted += int(counts.evicted)
        self.reused += int(counts.reused)

    def progress(self, limits: Limits) -> float:
        """Return the share of the run that is over, as far as that is known."""
        shares = [
            self.steps / limits.steps if limits.steps else 0.0,
            self.updates / limits.updates if limits.updates else 0.0,
        ]
        return min(max(shares), 1.0)
