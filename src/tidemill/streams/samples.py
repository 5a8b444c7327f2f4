"""The sample stream: blocks [time, seats] of rows, written in place by actors and read in
place by trainers.

Every group of consumers gets every sample (broadcast); within a group each sample goes to
one consumer (round robin). Nobody drops: a producer waits until the next consumer of each
group has room.
"""

from collections import deque
from collections.abc import Sequence

from tidemill.api.algorithm import Sample
from tidemill.api.edges import group_of
from tidemill.api.experiment import Context
from tidemill.api.stream import Offered, SampleConsumer, SampleProducer
from tidemill.api.transport import Consumer, Producer
from tidemill.core.schema import Arrays, Schema, allocate


class ChannelSampleProducer(SampleProducer):
    """The producer sends each sample over one channel of every group, in turn within the
    group. Rows are written once, into the first group's slot, and copied into the others'
    when they are sent.

    groups: for each group of consumers, of whichever stream, the channels to those of
        them that this producer serves
    lockstep: those of the channels whose consumers go in lockstep with it
    """

    def __init__(self, groups: Sequence[Sequence[Producer]], lockstep: Sequence[Producer] = ()) -> None:
        # the next in turn is the first
        self._groups, self._lockstep = [deque(channels) for channels in groups], lockstep
        self._slots = 0

    def offer(self, schema: Schema, rows: int, seats: int, slots: int) -> None:
        self._slots = slots
        for channels in self._groups:
            for channel in channels:
                channel.offer(schema, (rows, seats), slots)

    def reserve(self) -> Arrays | None:
        first, *others = (channels[0].reserve() for channels in self._groups)
        return None if any(slot is None for slot in others) else first

    def commit(self) -> None:
        first, *others = (channels[0].reserve() for channels in self._groups)  # the same slots again
        assert first is not None
        for slot in others:
            assert slot is not None
            for name, array in first.items():
                slot[name][...] = array
        for channels in self._groups:
            channels[0].commit()
            channels.rotate(-1)

    def settled(self) -> bool:
        return all(channel.free() == self._slots for channel in self._lockstep)


class NullSampleProducer(SampleProducer):
    """The null producer sends nothing: one block of this process's own memory is written
    again and again."""

    def __init__(self) -> None:
        self._block: Arrays = {}

    def offer(self, schema: Schema, rows: int, seats: int, slots: int) -> None:
        self._block = allocate(schema, (rows, seats))

    def reserve(self) -> Arrays | None:
        return self._block

    def commit(self) -> None:
        pass

    def settled(self) -> bool:
        return True


def sample_producer(context: Context, streams: Sequence[str], outlet: int = 0) -> SampleProducer:
    """Return a worker's producer for one of its outlets, whose samples all of `streams`
    get."""
    if not streams:
        return NullSampleProducer()
    groups: dict[tuple[str, str], list[Producer]] = {}
    lockstep: list[Producer] = []
    for stream in streams:
        awaited = context.experiment.in_lockstep(stream)
        for edge in context.edges(f"samples/{stream}/{context.name}/{outlet}/"):
            (consumer,) = edge.targets
            channel = context.endpoints.producer(edge.name)
            groups.setdefault((stream, group_of(consumer)), []).append(channel)
            if consumer in awaited:
                lockstep.append(channel)
    return ChannelSampleProducer(list(groups.values()), lockstep)


class ChannelSampleConsumer(SampleConsumer):
    """The consumer receives from one channel per producer, in turn, so that no producer
    waits while others are served twice. `cut`: a sample is one seat's episode and ends
    with its final row, whatever its slot holds behind that."""

    def __init__(self, channels: Sequence[Consumer], burn_in: int, bootstrap: int, cut: bool = False) -> None:
        self._channels = list(channels)
        self._burn_in, self._bootstrap, self._cut = burn_in, bootstrap, cut
        self._next = 0
        self._attached = False  # all of them
        self._taken: deque[Consumer] = deque()

    def offered(self) -> list[Offered] | None:
        self._attached = self._attached or all(channel.attach() for channel in self._channels)
        if not self._attached:
            return None
        kept = self._burn_in + self._bootstrap
        return [Offered(c.schema, c.lead, c.slots, (c.lead[0] - kept) * c.lead[1]) for c in self._channels]

    def consume(self) -> Sample | None:
        for _ in self._channels:
            number, channel = self._next, self._channels[self._next]
            self._next = (number + 1) % len(self._channels)
            if (self._attached or channel.attach()) and (views := channel.take()) is not None:
                self._taken.append(channel)
                if self._cut:
                    rows = int((views["done"] | views["truncated"])[:, 0].argmax()) + 1
                    views = {name: array[:rows] for name, array in views.items()}
                sample = Sample(views)
                sample.burn_in, sample.bootstrap, sample.channel = self._burn_in, self._bootstrap, number
                return sample
        return None

    def release(self) -> None:
        self._taken.popleft().release()
