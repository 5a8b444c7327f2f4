"""The buffer contract: where samples wait between a sample stream and the updates of a
trainer. The loop that calls it (a trainer worker does)::

    buffer = config.build(source, demand)
    while ...:
        # None until a batch is full: asked again in the next poll
        taken = buffer.take(version)
        algorithm.update([held.sample for held in taken], steps)
        # each of them was used once more
        buffer.release()

How old a sample is counts at the moment of training: `take` looks at each one again, at
every use, and drops what has become too old.

A replay memory (`ReplayBuffer`) holds arrivals (of `ReplayActors`), and a
limiter says how often it is drawn from::

    # every poll, as often as it likes
    for received in buffer.receive():
        # its steps are committed or voided
        ...
    # the limiter owes an update
    if buffer.sampleable and ...:
        # a batch of transitions, drawn anew each time
        taken = buffer.take(version)
        algorithm.update([held.sample for held in taken], steps)
        # takes back what the update wrote into the batch: new priorities
        buffer.release()

What a buffer dropped, evicted or used again is counted in samples (`SampleCounts`); env
steps count a row when it is first trained on. Buffers start empty after a resume, unless
their checkpoints hold them, or the run resumes exactly (`Buffer.state`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.policy import number_of
from tidemill.api.stream import Offered, SampleConsumer
from tidemill.core.config import Config
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need, own_of
from tidemill.core.schema import layout


@dataclass
class SampleCounts:
    """The counts tell how many samples a buffer did not simply hand on once, since the
    trainer last took them away.

    dropped: too old to be trained on (once more)
    evicted: had uses left, and made room for newer ones
    reused: trained on again: one more for each use after the first
    """

    dropped: int = 0
    evicted: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Demand:
    """A demand says what a trainer asks of its buffer.

    rows: least number of rows in a batch; None: it has so many `samples` instead, of
        whichever producer has some
    max_lag: versions that the oldest trained row of a sample may be behind; None: any
        number
    trainers: number of equal trainers that share what settings count in rows, this one
        included
    seed: seed of what the buffer draws
    folder: the run's folder, for a buffer whose memory lies in a file; None: there is
        none
    """

    rows: int | None
    samples: int
    max_lag: int | None = None
    trainers: int = 1
    seed: int = 0
    folder: Path | None = None

    @property
    def lockstep(self) -> bool:
        """True when each producer waits until the sample that it sent was given back: no
        lag is allowed."""
        return self.max_lag == 0

    def batches(self, offered: Sequence[Offered], copies: int) -> list[Need]:
        """Return the memory of so many `copies` of a batch, about: of samples as these
        producers offer."""
        if not (offered and copies):
            return []
        most = max(block.rows for block in offered)
        row = max(layout(block.schema, block.lead)[1] // max(block.rows, 1) for block in offered)
        rows = self.samples * most if self.rows is None else self.rows
        return [Need("batches", copies * rows * row, f"{copies} copies x {rows:,} rows x {row:,} bytes")]

    def met(self, batch: Sequence["BufferedSample"]) -> bool:
        """True when `batch` is full."""
        return (
            len(batch) >= self.samples
            if self.rows is None
            else sum(buffered.rows for buffered in batch) >= self.rows
        )


@dataclass(eq=False)
class BufferedSample:
    """A buffered sample is a sample in a buffer, and what the buffer must know of it.

    rows: its rows as `batch_size` counts them (`Sample.advance`)
    trained: number of its rows that enter the loss
    oldest: version of the oldest of these, None when there is none
    stamps: sum of the versions of these
    uses: times that it was trained on
    """

    sample: Sample
    rows: int
    trained: int
    oldest: int | None
    stamps: int
    uses: int = field(default=0)

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Look at `sample`, once."""
        versions = sample["version"][sample.trained()]
        oldest = int(versions.min()) if len(versions) else None
        return cls(sample, sample.advance, len(versions), oldest, int(versions.sum(dtype=np.int64)))

    def lag(self, version: int) -> int:
        """Return how many versions its oldest trained row is behind `version`, in
        whichever life of the trainer; 0 without such a row."""
        return 0 if self.oldest is None else max(number_of(version) - number_of(self.oldest), 0)


class Buffer(ABC):
    """A buffer holds samples of `source` and gives them out in batches. It never
    waits."""

    def __init__(self, source: SampleConsumer, demand: Demand) -> None:
        self._source, self._demand = source, demand
        self.counts = SampleCounts()
        """The trainer puts new ones in their place when it has read them."""
        self.least = 0
        """Samples whose oldest trained row is of a version before this one are dropped,
        too: since then the policy goes on from other weights."""
        self.needs: tuple[Need, ...] = ()
        """Memory that it is going to fill; complete once the producers have made their
        slots."""

    @property
    def unfilled(self) -> int:
        """Bytes of those needs that are not shared which it is still to fill. By itself
        all of them, always: one that does not tell may fill them at any time."""
        return own_of(self.needs)

    @abstractmethod
    def take(self, version: int) -> Sequence[BufferedSample] | None:
        """Return the batch that the trainer, at `version`, is to train on now; None while
        it is not full. What is in it stays as it is until `release`: asked again before,
        it is the same one. Raises `ConfigError` for a batch that can never be full."""

    @abstractmethod
    def release(self) -> None:
        """Say that the batch taken last was trained on."""

    def state(self) -> Part | None:
        """Return what the buffer holds of a run that resumes exactly, the batch that was
        taken and not yet released included: its own copies of samples, and of those that
        lie in the source's slots, which come again, what it knows of them. None where it
        cannot tell: such a run is refused then."""
        return None

    def load_state(self, state: Part) -> None:
        """Be as the buffer was whose state this is. Called before the first `take`: the
        source hands out what that one had not given back, in the same order."""
        raise NotImplementedError(f"{type(self).__name__} has a state(), but no load_state()")

    def _too_old(self, buffered: BufferedSample, version: int) -> bool:
        """True when `buffered` may not be trained on by a trainer at `version`; it is
        counted then, so that it must go."""
        limit = self._demand.max_lag
        if (limit is None or buffered.lag(version) <= limit) and (
            buffered.oldest is None or buffered.oldest >= self.least
        ):
            return False
        self.counts.dropped += 1
        return True


class Received(NamedTuple):
    """What a replay memory has stored of one arrival: the consumer's `channel` through
    which it came, the number of its seats' steps that are `committed`, and of those that
    are lost (`voided`). Episodes' first rows and fillers are neither. `returns` are those
    of the episodes that it finished (`info.return`)."""

    channel: int
    committed: int
    voided: int
    returns: tuple[float, ...] = ()


class ReplayBuffer(Buffer):
    """A replay buffer stores arrivals, a sequence for each (channel, column), and draws
    batches of transitions from them. `ARRIVAL_FIELDS` tells how rows make transitions. An
    episode of a column ends with its row that is done or truncated; it was cut after its
    last row (to be bootstrapped, never an end) where a row with `voided` or `on_reset`
    follows. Samples of its `source` hold one row, in the order in which each channel sent
    them."""

    @abstractmethod
    def receive(self) -> list[Received]:
        """Copy what has come into its own memory, in the order in which it came, give the
        slots back, and say what that was. Empty when nothing has come. Never waits; may
        leave some for the next call, where much has come."""

    @property
    @abstractmethod
    def sampleable(self) -> bool:
        """True from the moment on when the warm-up is reached and a batch can be drawn;
        for ever."""

    @abstractmethod
    def take(self, version: int) -> Sequence[BufferedSample] | None:
        """Draw a batch for a trainer at `version`: one `BufferedSample` of B transitions,
        [1, B] each (`BufferedSample.oldest`, `stamps` from the versions that acted). None
        while it is not `sampleable`. What is drawn depends on what was received, on the
        draws before, and on `Demand.seed`, never on time. The sample's fields, each [1,
        B, ...]::

            obs*, action*: before the step, and what was done then
            rewards: float32 [1, B, n]: of the n steps from there on; 0 behind the last
                one
            steps: int32: how many these are, 1 to n
            next.obs*: after them
            done: the episode ended there (one that was cut did not: the value there
                counts)
            weight: float32, of importance sampling, at most 1; 1 where all draws are
                equally likely
            version: that acted
            priority: float32 NaN; an algorithm that measures how far off it was on each
                transition writes that here, not negative
        """

    @abstractmethod
    def release(self) -> None:
        """Say that the batch drawn last was trained on; what the algorithm wrote into it
        (priorities) is taken over."""

    def forget_large(self) -> int:
        """Draw those transitions of the batch drawn last never again whose numbers are so
        large that they may have made its update infinite, and return how many these are.
        By default it keeps all, and returns 0."""
        return 0

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all that it holds into files in `folder`, which exists and is empty,
        random streams and accumulators included."""

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote, so that the same arrivals lead to the same
        batches. Episodes that were open are cut there if a row with `on_reset` follows.
        Raises `CheckpointError` for what is of another configuration."""


class BufferConfig(Config):
    """The configuration of a buffer: a subclass is what `Trainer.buffer` takes."""

    replays: ClassVar[bool] = False
    """Its members build a `ReplayBuffer`."""

    @property
    def begins_midway(self) -> bool:
        """True when the first row that comes of an episode may be any of its rows: of a
        replay memory, whose trainer's next life goes on from a checkpoint."""
        return True

    def check(self, max_lag: int | None) -> None:
        """Raise `ConfigError` where samples that lag at most `max_lag` versions would
        never be trained on as often as set."""

    def build(self, source: SampleConsumer, demand: Demand) -> Buffer:
        """Return the buffer of one trainer. Raises `ConfigError` for a demand or a size
        of samples that it can never meet, where that is known."""
        raise TypeError(f"{type(self).__name__} has no build()")


def check_reuses(reuses: int, max_lag: int | None) -> None:
    """Raise `ConfigError` unless a sample can be trained on `reuses` times before it lags
    more than `max_lag` versions: each use makes one."""
    if reuses < 1:
        raise ConfigError(f"reuses = {reuses} must be at least 1: how often each sample is trained on")
    if max_lag is not None and reuses > max_lag + 1:
        raise ConfigError(
            f"reuses = {reuses}, but max_policy_lag = {max_lag}: at its last use a sample is at least "
            f"{reuses - 1} versions old, so that it would always be dropped before; take reuses = "
            f"{max_lag + 1} or max_policy_lag = {reuses - 1} (or more, since samples wait)"
        )
