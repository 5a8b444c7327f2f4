"""The priority queue: samples are copied out of the stream at once, and trained on
several times, those first that were used least.

So producers never wait; what makes room for newer samples is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from mmap import mmap

from tidemill.api.algorithm import Sample
from tidemill.api.buffer import Buffer, BufferConfig, BufferedSample, Demand, check_reuses
from tidemill.api.stream import SampleConsumer
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need
from tidemill.core.schema import layout, schema_of, views


@dataclass(frozen=True, kw_only=True)
class PriorityQueue(BufferConfig):
    """A priority queue copies samples into the trainer's own memory, so that producers
    never wait for it, and lets the trainer use each sample `reuses` times. A batch takes
    the samples with most uses left, the newest first; a full queue evicts those with
    fewest uses left, the oldest first. It is empty after a resume, but for runs that
    resume exactly.

    capacity: rows that it holds, as `batch_size` counts them; equal trainers share them
    reuses: how often each sample is trained on, unless it is evicted or becomes too old
        before
    """

    capacity: int
    reuses: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reuses(self.reuses, None)
        self.check_least(capacity=1)

    def check(self, max_lag: int | None) -> None:
        check_reuses(self.reuses, max_lag)
        if max_lag == 0:
            raise ConfigError(
                "max_policy_lag = 0 makes producers wait until their sample was trained on, but a "
                "PriorityQueue takes it off them at once; take Queue, or allow some lag"
            )

    def build(self, source: SampleConsumer, demand: Demand) -> Buffer:
        return _OwnMemory(self, source, demand)


class _OwnMemory(Buffer):
    def __init__(self, config: PriorityQueue, source: SampleConsumer, demand: Demand) -> None:
        super().__init__(source, demand)
        self._config = config
        self._queue: list[_Placed] = []
        self._taken = 0  # the first so many of the queue are the batch
        self._free: list[int] = []  # places
        self._slots = 0  # of all producers, once these have made them
        self._arrivals = 0
        self._make()

    def _make(self) -> bool:
        """Make the memory, as soon as the size of samples is known."""
        blocks = self._source.offered()
        if blocks is None:
            return False
        config, demand = self._config, self._demand
        own = -(-config.capacity // demand.trainers)
        largest, least = max(block.rows for block in blocks), min(block.rows for block in blocks)
        places = own // largest
        shared = f" ({own:,} for each of {demand.trainers} trainers)" if demand.trainers > 1 else ""
        if not places:
            raise ConfigError(
                f"PriorityQueue: capacity = {config.capacity:,} rows{shared} cannot hold a sample of "
                f"{largest:,}; make it at least {largest * demand.trainers:,}, or the actors' sample_steps "
                "or lanes less"
            )
        if places * least < demand.rows if demand.rows is not None else places < demand.samples:
            wanted = (
                f"{demand.samples} samples, as many as actors fill at a time"
                if demand.rows is None
                else f"{demand.rows:,} rows"
            )
            raise ConfigError(
                f"PriorityQueue: capacity = {config.capacity:,} rows{shared} holds {places} samples of "
                f"{least:,} rows, less than a batch of {wanted}; make it more, or batch_size less"
            )
        self._stride = max(layout(block.schema, block.lead)[1] for block in blocks)
        # of the system, page by page when it is first written
        self._memory = memoryview(mmap(-1, places * self._stride))
        self._free = list(range(places))
        self._slots = sum(block.slots for block in blocks)
        sums = f"{places:,} samples x {self._stride:,} bytes"
        self.needs = (Need("buffers", places * self._stride, sums, shared=True),)
        return True

    def take(self, version: int) -> Sequence[BufferedSample] | None:
        if self._taken:
            return self._queue[: self._taken]
        if not self._slots and not self._make():
            return None
        self._discard([buffered for buffered in self._queue if self._too_old(buffered, version)])
        self._receive(version)
        self._queue.sort(key=_Placed.order)
        count = 0
        while not self._demand.met(self._queue[:count]):
            if count < len(self._queue):
                count += 1
            elif self._free:
                return None
            else:
                break  # it is full, of short episodes: waiting would bring no more rows
        self._taken = count
        self.counts.reused += sum(buffered.uses > 0 for buffered in self._queue[: self._taken])
        return self._queue[: self._taken]

    def _receive(self, version: int) -> None:
        """Copy what has come, up to all slots once: whoever fills them faster than they
        are copied does not keep the trainer from training."""
        for _ in range(self._slots):
            sample = self._source.consume()
            if sample is None:
                break
            buffered = BufferedSample.of(sample)
            if not self._too_old(buffered, version):
                self._store(buffered)
            self._source.release()

    def _store(self, buffered: BufferedSample) -> None:
        if not self._free:
            self.counts.evicted += 1
            self._discard([max(self._queue, key=_Placed.order)])
        self._arrivals += 1
        self._place(buffered, self._arrivals)

    def _place(self, buffered: BufferedSample, number: int) -> None:
        """Copy a sample into its own memory: the arrival of this `number`."""
        place = self._free.pop()
        own = Sample(views(schema_of(buffered.sample), (), self._memory, place * self._stride))
        vars(own).update(vars(buffered.sample))
        for name, array in buffered.sample.items():
            own[name][...] = array
        self._queue.append(
            _Placed(
                own,
                buffered.rows,
                buffered.trained,
                buffered.oldest,
                buffered.stamps,
                buffered.uses,
                place=place,
                number=number,
            )
        )

    def _discard(self, gone: Sequence["_Placed"]) -> None:
        self._free += [buffered.place for buffered in gone]
        self._queue = [buffered for buffered in self._queue if buffered not in gone] if gone else self._queue

    def release(self) -> None:
        batch, self._taken = self._queue[: self._taken], 0
        for buffered in batch:
            buffered.uses += 1
        self._discard([buffered for buffered in batch if buffered.uses >= self._config.reuses])

    def state(self) -> Part:
        return {
            "samples": {str(place): buffered.sample for place, buffered in enumerate(self._queue)},
            "about": {str(place): vars(buffered.sample) for place, buffered in enumerate(self._queue)},
            "uses": [buffered.uses for buffered in self._queue],
            "numbers": [buffered.number for buffered in self._queue],
            "arrivals": self._arrivals,
            "taken": self._taken,
        }

    def load_state(self, state: Part) -> None:
        for place, (uses, number) in enumerate(zip(state["uses"], state["numbers"], strict=True)):
            sample = Sample(state["samples"][str(place)])
            vars(sample).update(state["about"][str(place)])
            self._place(replace(BufferedSample.of(sample), uses=uses), number)
        self._arrivals, self._taken = state["arrivals"], state["taken"]


@dataclass(eq=False)
class _Placed(BufferedSample):
    place: int = 0
    number: int = 0
    """Of its arrival."""

    def order(self) -> tuple[int, int]:
        """First is trained on first, last is evicted first."""
        return self.uses, -self.number
