"""Equal trainers of one policy, as each of them sees the others: what all bring to an
update is summed, so that their weights stay the same, bit by bit. One that is left alone
(another is dead, or hangs) ends without them.

Whatever decides how weights change (rows, moments of advantages, each minibatch's
gradient, statistics of normalisers) is yielded by the algorithm
(`DataParallel.parallel_update`) and summed in the order of ranks (`streams.all_reduce`):
n trainers on n parts of a batch do what one does on the whole. Before each update they
agree on who is to end, so that all end at one update; one that is left alone undoes its
half-done update and saves.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Self, cast

import numpy as np

from tidemill.api.algorithm import Algorithm, DataParallel, Sample, UpdateFault
from tidemill.api.buffer import BufferedSample, SampleCounts
from tidemill.api.edges import number
from tidemill.api.experiment import Context
from tidemill.api.policy import Policy
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need
from tidemill.core.schema import Array, Arrays
from tidemill.streams.all_reduce import AllReduce
from tidemill.workers.base import PollResult
from tidemill.workers.trainer_config import TrainerConfig

# seconds that a trainer which is told to end waits for equal ones: longer than a
# minibatch takes, less than the controller waits
LEAVE_ALONE = 2.0
# for what equal trainers bring, before others get their turns: a look takes 0.5 µs, the
# turns of a process 20
LOOKS = 32


class CombinedCounts(NamedTuple):
    """The counts of all equal trainers together: how many are to end, how many were not
    told to change settings, rows of the batch that enter the loss, those of them that do
    so for the first time, what became of samples since the last update, how many have no
    batch, and the number of the cut for which all are to rest, 0 for none."""

    ending: float
    unchanged: float
    rows: float
    fresh: float
    dropped: float
    evicted: float
    reused: float
    waiting: float
    cut: float


class EqualTrainers:
    """One trainer's equals; without a `summing` there are none, and a sum is what it
    brings. `clock` is the trainer's."""

    def __init__(self, clock: Clock, summing: AllReduce | None = None) -> None:
        self._clock, self._summing = clock, summing
        self._met_at = 0.0  # when they last met, or this one began to end
        # parameters and the algorithm's state, while an update is half done
        self._before: tuple[Arrays, Arrays] | None = None
        self._left = False  # without the others
        self.alone = False
        """Another one has died: there is nobody to wait for."""
        self._patient = False  # the first writes the last checkpoint, however long that takes

    @classmethod
    def of(
        cls, context: Context, config: TrainerConfig, algorithm: Algorithm, clock: Clock, *, restored: bool
    ) -> Self:
        """Return those of a trainer whose algorithm was `restored` from the first one's
        checkpoint or not. Raises `ConfigError` for an algorithm that cannot have any,
        where there are some."""
        policy, names = config.policy, context.experiment.holders(config.policy, "sum")
        if not names:
            return cls(clock)
        if not isinstance(algorithm, DataParallel):
            raise ConfigError(
                f"count = {config.count}: several equal trainers cannot run "
                f"{type(config.algorithm).__name__}, since its algorithm is no DataParallel (see "
                "tidemill.api.algorithm); set the trainer's count to 1"
            )
        # all were given the random state of the first, which the checkpoint has
        if restored and (own := number(context.name)):
            algorithm.separate(own)
        others = {rank: name for rank, name in enumerate(names) if name != context.name}
        senders = {
            rank: context.endpoints.producer(f"sums/{policy}/{context.name}/{name}")
            for rank, name in others.items()
        }
        receivers = {
            rank: context.endpoints.consumer(f"sums/{policy}/{name}/{context.name}")
            for rank, name in others.items()
        }
        counts = 8 * len(CombinedCounts._fields)
        return cls(
            clock,
            AllReduce(names.index(context.name), senders, receivers, max(algorithm.largest_sum, counts)),
        )

    def needs(self, algorithm: Algorithm, weights: int) -> list[Need]:
        """Return the memory that they are going to fill; `weights`: bytes of the
        policy's."""
        if self._summing is None:
            return []
        state = sum(array.nbytes for array in algorithm.state().values())
        return [Need("sums", self._summing.nbytes), Need("weights before an update", weights + state)]

    @property
    def others(self) -> bool:
        """True when there are any."""
        return self._summing is not None

    @property
    def first(self) -> bool:
        """True of the one that reports updates and writes checkpoints: all have the same
        weights."""
        return self._summing is None or self._summing.rank == 0 or self._left

    def sum(self, array: Array) -> Iterator[PollResult]:
        """Replace `array` by its sum over all equal trainers."""
        if self._summing is not None:
            left = self._clock.enter("copy")
            for look, _ in enumerate(self._summing.add(array), 1):
                self._clock.enter("wait")
                if look % LOOKS == 0:
                    yield PollResult()
                self._clock.enter("copy")
            self._met_at = awake()
            self._clock.enter(left)

    def agree(
        self,
        ending: bool,
        unchanged: bool,
        batch: Sequence[BufferedSample],
        counts: SampleCounts,
        waiting: bool = False,
        cut: int = 0,
    ) -> Generator[PollResult, None, CombinedCounts]:
        """Return what all together bring to the update that is due. It is the first one's
        `cut` that counts, so that all rest for the same one."""
        rows = sum(held.trained for held in batch)
        fresh = sum(held.trained for held in batch if not held.uses)
        dropped, evicted, reused = counts.dropped, counts.evicted, counts.reused
        cut = cut if self.first else 0
        own = CombinedCounts(ending, unchanged, rows, fresh, dropped, evicted, reused, waiting, cut)
        numbers = np.array(own, np.float64)
        yield from self.sum(numbers)
        return CombinedCounts(*numbers.tolist())

    def update(
        self, algorithm: Algorithm, policy: Policy, samples: Sequence[Sample], steps: int
    ) -> Generator[PollResult, None, dict[str, float]]:
        """Do one update, all together, and return its metrics."""
        if self._summing is None:
            return algorithm.update(samples, steps)
        algorithm = cast("DataParallel", algorithm)  # `of` has seen to that
        self._before = {k: v.copy() for k, v in policy.parameters().items()}, algorithm.state()
        parts = algorithm.parallel_update(samples, steps)
        try:
            while True:
                yield from self.sum(next(parts))
        except StopIteration as end:
            self._before = None
            metrics: dict[str, float] = end.value
            return metrics
        except UpdateFault:  # all leave the rest out, at the same sum
            self._before = None
            raise

    def state(self, algorithm: Algorithm, policy: Policy) -> tuple[Arrays, Arrays]:
        """Return parameters and the algorithm's state; while an update is half done,
        those before it."""
        return self._before or (policy.parameters(), algorithm.state())

    # ---- the end -----------------------------------------------------------------------

    def begin_to_end(self) -> None:
        """Say that this one is told to end: from now on it does not wait for long."""
        self._met_at = awake()

    def missing(self) -> bool:
        """True of one that is told to end when the others do not come."""
        late = not self._patient and awake() - self._met_at > LEAVE_ALONE
        return self._summing is not None and (self.alone or late)

    def end(self, save: Callable[[], None]) -> Iterator[PollResult]:
        """Have the first one `save`, and the others stay until it has: should it die, one
        of them knows what it would have saved."""
        if self.first:
            yield from self._word()
            save()
            yield from self._word()
        else:
            yield from self._word()
            self._patient = True
            yield from self._word()

    def _word(self) -> Iterator[PollResult]:
        if self._summing is not None:
            for _ in self._summing.word():
                yield PollResult()
            self._met_at = awake()

    def leave(self, algorithm: Algorithm, policy: Policy, version: int) -> None:
        """Go on without the others. What an unfinished update has done is undone, and
        this one is the first now."""
        self._left = True
        if self._before is not None:
            parameters, state = self._before
            policy.load(parameters, version)
            algorithm.load_state(state)
            self._before = None
