"""The queue: samples are trained on in the order in which they come, straight from the
stream's slots.

The slots that wait are what holds producers back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidemill.api.buffer import Buffer, BufferConfig, BufferedSample, Demand, check_reuses
from tidemill.api.stream import SampleConsumer
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Queue(BufferConfig):
    """A queue hands samples on in the order in which they come, without a copy: the slots
    that a batch lies in are held until it was used, which is what holds the producers
    back.

    reuses: how often each sample is trained on: a batch is used so many times in
        succession, topped up where samples have become too old for it. Unlike an
        algorithm's epochs each use is an update of its own, with new ratios and
        advantages
    """

    reuses: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reuses(self.reuses, None)

    def check(self, max_lag: int | None) -> None:
        check_reuses(self.reuses, max_lag)

    def build(self, source: SampleConsumer, demand: Demand) -> Buffer:
        return _SlotQueue(self, source, demand)


class _SlotQueue(Buffer):
    def __init__(self, config: Queue, source: SampleConsumer, demand: Demand) -> None:
        super().__init__(source, demand)
        self._reuses = config.reuses
        self._batch: list[BufferedSample] = []
        self._taken = False  # the batch is full, and was handed out
        self._slots: deque[BufferedSample] = deque()  # all that are held, in the order in which they came
        # those of them that nobody needs any more: they go back when all before them do
        self._spent: set[BufferedSample] = set()
        # samples that all producers can have sent at a time, once they have made their
        # slots
        self._capacity: int | None = None
        self._look()

    def _look(self) -> None:
        blocks = self._source.offered()
        if blocks is None:
            return
        self._capacity = len(blocks) if self._demand.lockstep else sum(block.slots for block in blocks)
        most = sum(block.slots * block.rows for block in blocks)
        size = self._demand.rows
        trainers = self._demand.trainers
        if size is not None and most < size:
            whose = f"batch_size = {size * trainers}" + (
                f" ({size} for each of {trainers} trainers)" if trainers > 1 else ""
            )
            raise ConfigError(
                f"{whose} is more than the {most} rows that all {self._capacity} sample slots hold, so that "
                "no batch would ever be full; make it smaller, or the actors' slots, sample_steps or lanes "
                "more"
            )

    def take(self, version: int) -> Sequence[BufferedSample] | None:
        if self._taken:
            return self._batch
        if self._capacity is None:
            self._look()
        self._batch = [buffered for buffered in self._batch if not self._drop(buffered, version)]
        while not self._demand.met(self._batch):
            sample = self._source.consume()
            if sample is not None:
                buffered = BufferedSample.of(sample)
                self._slots.append(buffered)
                if not self._drop(buffered, version):
                    self._batch.append(buffered)
            elif self._capacity is not None and len(self._slots) >= self._capacity:
                # nobody sends more: dropped ones hold the other slots until this batch is
                # done, or all are of short episodes
                break
            else:
                return None
        if self._demand.lockstep:  # one of each producer: which one came first is chance
            self._batch.sort(key=lambda buffered: buffered.sample.channel)
        self.counts.reused += sum(buffered.uses > 0 for buffered in self._batch)
        self._taken = True
        return self._batch

    def _drop(self, buffered: BufferedSample, version: int) -> bool:
        """True for a sample that is too old; its slot goes back."""
        if not self._too_old(buffered, version):
            return False
        self._spent.add(buffered)
        self._give_back()
        return True

    def _give_back(self) -> None:
        while self._slots and self._slots[0] in self._spent:
            self._spent.remove(self._slots.popleft())
            self._source.release()

    def release(self) -> None:
        self._taken = False
        for buffered in self._batch:
            buffered.uses += 1
        self._spent.update(buffered for buffered in self._batch if buffered.uses >= self._reuses)
        self._batch = [buffered for buffered in self._batch if buffered not in self._spent]
        self._give_back()

    def state(self) -> Part:
        slots = [*self._slots]
        return {
            "uses": [buffered.uses for buffered in slots],
            "batch": [slots.index(buffered) for buffered in self._batch],
            "spent": [place for place, buffered in enumerate(slots) if buffered in self._spent],
            "taken": self._taken,
        }

    def load_state(self, state: Part) -> None:
        for uses in state["uses"]:
            sample = self._source.consume()
            assert sample is not None  # their producers have sent them again
            self._slots.append(replace(BufferedSample.of(sample), uses=uses))
        self._batch = [self._slots[place] for place in state["batch"]]
        self._spent = {self._slots[place] for place in state["spent"]}
        self._taken = state["taken"]
