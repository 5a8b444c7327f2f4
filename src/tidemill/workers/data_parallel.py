"""Equal trainers of one policy, as each of them sees the others: what all bring to an
update is summed, so that their weights stay the same, bit by bit. Where one dies the
others wait for its next life, which goes on from what they know; one that is left alone
at the end (another hangs, say) ends without them.

Whatever decides how weights change (rows, moments of advantages, each minibatch's
gradient, statistics of normalisers) is yielded by the algorithm
(`DataParallel.parallel_update`) and summed (`streams.all_reduce`): n trainers on n parts
of a batch do what one does on the whole. Before each update they agree on who is to end,
so that all end at one update. An update that cannot be finished, since one of them has
died in it, is undone, and done again by all with the same batches, but for that of the
dead; it is undone, too, where the run is about to be broken off.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self, cast

import numpy as np

from tidemill.api.algorithm import Algorithm, DataParallel, Sample
from tidemill.api.buffer import BufferedSample, SampleCounts
from tidemill.api.control_messages import Rejoin
from tidemill.api.edges import number
from tidemill.api.policy import Policy
from tidemill.api.transport import Consumer, Producer
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need
from tidemill.core.schema import Array, Arrays
from tidemill.nets.choose_device import choose_device
from tidemill.streams.all_reduce import AllReduce, HostSums, SharedSums, SumBroken
from tidemill.workers.base import PollResult
from tidemill.workers.trainer_config import HOSTS, RANKS, TORCH, Trainer, TrainerConfig

# seconds that a trainer which is told to end, or that one has died, waits for equal ones:
# longer than a minibatch takes, less than the controller and the supervisor wait
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


def _summing(context: Context, config: TrainerConfig, names: Sequence[str], most_bytes: int) -> SharedSums:
    """Return a trainer's part in the sums of all `names`, the largest of which has so
    many bytes."""
    policy, rank = config.policy, names.index(context.name)
    how = config.sums if isinstance(config, Trainer) else RANKS

    def sender(other: int) -> Producer:
        return context.endpoints.producer(f"sums/{policy}/{context.name}/{names[other]}")

    def receiver(other: int) -> Consumer:
        return context.endpoints.consumer(f"sums/{policy}/{names[other]}/{context.name}")

    def all_reduce(most_bytes: int) -> AllReduce:
        others = [other for other in range(len(names)) if other != rank]
        senders = {other: sender(other) for other in others}
        return AllReduce(rank, senders, {other: receiver(other) for other in others}, most_bytes)

    hosts = [context.places.get(name, "") for name in names]
    if how == HOSTS and len({*hosts}) > 1:
        return HostSums(rank, hosts, sender, receiver, most_bytes)
    if how != TORCH:
        return all_reduce(most_bytes)
    from tidemill.streams.torch_sums import SMALL, TorchSums

    if context.folder is None:
        raise ConfigError(
            f'sums = "{TORCH}": equal trainers meet in the run\'s folder, and this one keeps none; take '
            f'sums = "{RANKS}"'
        )
    device, file = choose_device(config.device, context.gpu), Path(context.folder) / f"sums-{policy}"
    return TorchSums(all_reduce(SMALL), file, device, most_bytes, context.endpoints.bell.ring)


class EqualTrainers:
    """One trainer's equals; without a `summing` there are none, and a sum is what it
    brings. `clock` is the trainer's, `names` those of all in the order of ranks."""

    def __init__(self, clock: Clock, summing: SharedSums | None = None, names: Sequence[str] = ()) -> None:
        self._clock, self._summing, self._names = clock, summing, names
        self._met_at = 0.0  # when they last met, or this one began to end
        self._apart = False  # it has broken off, until all begin anew
        # parameters and the algorithm's state, while an update is half done
        self._before: tuple[Arrays, Arrays] | None = None
        self.stands_in = False
        """True of one that is the first in place of that: it is dead, or has not come."""
        self._patient = False  # the first writes the last checkpoint, however long that takes

    @classmethod
    def of(
        cls,
        context: Context,
        config: TrainerConfig,
        algorithm: Algorithm,
        clock: Clock,
        joins: Rejoin,
        *,
        restored: bool,
    ) -> Self:
        """Return those of a trainer whose algorithm was `restored` from the first one's
        checkpoint or not, and which `joins` the others so. Raises `ConfigError` for an
        algorithm that cannot have any, where there are some."""
        names = context.experiment.holders(config.policy, "sum")
        if not names:
            return cls(clock)
        if not isinstance(algorithm, DataParallel):
            raise ConfigError(
                f"count = {config.count}: several equal trainers cannot run "
                f"{type(config.algorithm).__name__}, since its algorithm is no DataParallel (see "
                "tidemill.api.algorithm); set the trainer's count to 1"
            )
        # all were given the random state of the first, which the checkpoint has, or of
        # whoever has written it for those that live again
        if restored and (own := number(context.name) + len(names) * joins.number):
            algorithm.separate(own)
        most = max(algorithm.largest_sum, 8 * len(CombinedCounts._fields))
        summing = _summing(context, config, names, most)
        summing.begin(joins.number)
        return cls(clock, summing, names)

    def needs(self, algorithm: Algorithm, weights: int) -> list[Need]:
        """Return the memory that they are going to fill; `weights`: bytes of the
        policy's."""
        if self._summing is None:
            return []
        state = sum(array.nbytes for array in algorithm.state().values())
        return [
            Need("sums", self._summing.slot_bytes, shared=True),
            Need("sums", self._summing.own_bytes),
            Need("weights before an update", weights + state),
        ]

    @property
    def others(self) -> bool:
        """True when there are any."""
        return self._summing is not None

    @property
    def first(self) -> bool:
        """True of the one that reports updates and writes checkpoints: all have the same
        weights."""
        return self._summing is None or self._summing.rank == 0 or self.stands_in

    def sum(self, array: Array) -> Iterator[PollResult]:
        """Replace `array` by its sum over all equal trainers. Raises `SumBroken` where
        one has died and has not brought its part."""
        if self._summing is not None:
            left = self._clock.enter("copy")
            for look, _ in enumerate(self._summing.add(array), 1):
                self._clock.enter("wait")
                if self.lost and awake() - self._met_at > LEAVE_ALONE:  # who lives may wait, too
                    raise SumBroken
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
        """Do one update, all together, and return its metrics. It may be undone until it
        is `done`."""
        if self._summing is None:
            return algorithm.update(samples, steps)
        algorithm = cast("DataParallel", algorithm)  # `of` has seen to that
        self._before = {k: v.copy() for k, v in policy.parameters().items()}, algorithm.state()
        parts = algorithm.parallel_update(samples, steps)
        try:
            while True:
                yield from self.sum(next(parts))
        except StopIteration as end:
            metrics: dict[str, float] = end.value
            return metrics
        except SumBroken:
            parts.close()  # it has its last words before all is undone
            raise

    def done(self) -> None:
        """Say that the update counts."""
        self._before = None

    def undo(self, algorithm: Algorithm, policy: Policy, version: int) -> bool:
        """Have policy and algorithm be as they were before an update that is not done.
        False where none is under way."""
        if self._before is None:
            return False
        parameters, state = self._before
        policy.load(parameters, version)
        algorithm.load_state(state)
        self._before = None
        return True

    def state(self, algorithm: Algorithm, policy: Policy) -> tuple[Arrays, Arrays]:
        """Return parameters and the algorithm's state; while an update is half done,
        those before it."""
        return self._before or (policy.parameters(), algorithm.state())

    # ---- deaths ------------------------------------------------------------------------

    def lose(self, names: Sequence[str]) -> None:
        """Note that these have died: sums to which they have not brought their parts are
        broken."""
        if self._summing is not None:
            self._summing.lost.update(map(self._names.index, names))
            self._patient, self._met_at = False, awake()

    @property
    def lost(self) -> bool:
        """True while some are dead, which this one was told, or another one has told it
        that it brings no more."""
        return self._apart or self.told_lost

    @property
    def told_lost(self) -> bool:
        """True while some are dead, as this one was told."""
        return self._summing is not None and bool(self._summing.lost)

    def break_off(self) -> None:
        """Bring no more until all begin anew, and tell the others."""
        if self._summing is not None:
            self._apart = True
            self._summing.break_off()

    def stand_in(self) -> None:
        """Be the first one, until all live again."""
        self.stands_in = True

    def rejoin(self, sums: int) -> None:
        """Begin anew with all others, who live again. `sums`: see `Rejoin.number`."""
        if self._summing is not None:
            self._summing.begin(sums)
            self._apart, self.stands_in, self._met_at = False, False, awake()

    # ---- the end -----------------------------------------------------------------------

    def begin_to_end(self) -> None:
        """Say that this one is told to end: from now on it does not wait for long."""
        self._met_at = awake()

    def missing(self) -> bool:
        """True of one that is told to end when the others do not come."""
        late = awake() - self._met_at > LEAVE_ALONE
        return self._summing is not None and late and not self._patient

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
                if self.lost and awake() - self._met_at > LEAVE_ALONE:
                    raise SumBroken
                yield PollResult()
            self._met_at = awake()

    def leave(self, algorithm: Algorithm, policy: Policy, version: int) -> None:
        """Go on without the others. What an unfinished update has done is undone, and
        this one is the first now."""
        self.stand_in()
        self.undo(algorithm, policy, version)
