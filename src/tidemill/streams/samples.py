"""The sample stream: blocks [time, seats] of rows, written in place by actors and read in
place by trainers.

Every group of consumers gets every sample (broadcast); within a group each sample goes to
one consumer (round robin). Nobody drops: a producer waits until the next consumer of each
group has room; of buffer workers until any has.
"""

from collections import deque
from collections.abc import Sequence

from tidemill.api.algorithm import Sample
from tidemill.api.edges import group_of
from tidemill.api.stream import Offered, SampleConsumer, SampleProducer
from tidemill.api.transport import Consumer, Producer
from tidemill.api.worker import Context
from tidemill.core.cut import Part
from tidemill.core.schema import Arrays, Schema, allocate


class ChannelSampleProducer(SampleProducer):
    """The producer sends each sample over one channel of every group, in turn within the
    group. Rows are written once, into the first group's slot, and copied into the others'
    when they are sent.

    groups: for each group of consumers, of whichever stream, the channels to those of
        them that this producer serves
    lockstep: those of the channels whose consumers go in lockstep with it
    by_room: numbers of groups in which one that has no room (which is dead, say) is
        passed over
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Producer]],
        lockstep: Sequence[Producer] = (),
        by_room: Sequence[int] = (),
    ) -> None:
        # the next in turn is the first
        self._groups, self._lockstep = [deque(channels) for channels in groups], lockstep
        self._by_room = [self._groups[number] for number in by_room]
        self._slots = self._sent = 0

    def offer(self, schema: Schema, rows: int, seats: int, slots: int) -> None:
        self._slots = slots
        for channels in self._groups:
            for channel in channels:
                channel.offer(schema, (rows, seats), slots)

    def reserve(self) -> Arrays | None:
        for channels in self._by_room:
            for _ in range(len(channels)):
                if channels[0].reserve() is not None:
                    break
                channels.rotate(-1)
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
        self._sent += 1

    def settled(self) -> bool:
        return all(channel.free() == self._slots for channel in self._lockstep)

    def state(self, cut: bool = False) -> Part:
        held = {
            f"{group}.{place}": {
                str(number): _to_its_end(slot) if cut else slot
                for number, slot in enumerate(channel.unreleased())
            }
            for group, channels in enumerate(self._groups)
            for place, channel in enumerate(channels)
        }
        return {"sent": self._sent, "held": held}

    def load_state(self, state: Part) -> None:
        self._sent = state["sent"]
        for group, channels in enumerate(self._groups):
            channels.rotate(-self._sent)
            for place, channel in enumerate(channels):
                held = state["held"][f"{group}.{place}"]
                for number in range(len(held)):
                    slot = channel.reserve()
                    assert slot is not None  # it had one when it was saved
                    for name, array in slot.items():
                        saved = held[str(number)][name]
                        array[: len(saved)] = saved
                    channel.commit()


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

    def state(self, cut: bool = False) -> Part:
        return {}

    def load_state(self, state: Part) -> None:
        pass


def sample_producer(context: Context, streams: Sequence[str], outlet: int = 0) -> SampleProducer:
    """Return a worker's producer for one of its outlets, whose samples all of `streams`
    get."""
    if not streams:
        return NullSampleProducer()
    groups: dict[tuple[str, str], list[Producer]] = {}
    lockstep: list[Producer] = []
    by_room = set[tuple[str, str]]()  # equal trainers, and what is to be repeated, have strict turns
    for stream in streams:
        awaited = context.experiment.in_lockstep(stream)
        for edge in context.edges(f"samples/{stream}/{context.name}/{outlet}/"):
            (consumer,) = edge.targets
            channel = context.endpoints.producer(edge.name)
            group = stream, group_of(consumer)
            groups.setdefault(group, []).append(channel)
            if (
                context.experiment.workers[group_of(consumer)].forwards()
                and not context.experiment.exact_resume
            ):
                by_room.add(group)
            if consumer in awaited:
                lockstep.append(channel)
    numbers = [number for number, group in enumerate(groups) if group in by_room]
    return ChannelSampleProducer(list(groups.values()), lockstep, numbers)


class ChannelSampleConsumer(SampleConsumer):
    """The consumer receives from one channel per producer, in turn, so that no producer
    waits while others are served twice. `cut`: a sample is one seat's episode and ends
    with its final row, whatever its slot holds behind that."""

    def __init__(self, channels: Sequence[Consumer], burn_in: int, bootstrap: int, cut: bool = False) -> None:
        self._channels = list(channels)
        self._burn_in, self._bootstrap, self._cut = burn_in, bootstrap, cut
        self._next = 0
        self._attached = False  # all of them
        self._taken: deque[int] = deque()
        self._again: deque[int] = deque()  # channels to take from first, once they have anything

    def offered(self) -> list[Offered] | None:
        self._attached = self._attached or all(channel.attach() for channel in self._channels)
        if not self._attached:
            return None
        kept = self._burn_in + self._bootstrap
        return [Offered(c.schema, c.lead, c.slots, (c.lead[0] - kept) * c.lead[1]) for c in self._channels]

    def consume(self) -> Sample | None:
        if self._again:
            sample = self._take(self._again[0])
            if sample is not None:
                self._again.popleft()
            return sample
        for _ in self._channels:
            number = self._next
            self._next = (number + 1) % len(self._channels)
            if (sample := self._take(number)) is not None:
                return sample
        return None

    def _take(self, number: int) -> Sample | None:
        channel = self._channels[number]
        if not (self._attached or channel.attach()) or (views := channel.take()) is None:
            return None
        self._taken.append(number)
        if self._cut:
            views = _to_its_end(views)
        sample = Sample(views)
        sample.burn_in, sample.bootstrap, sample.channel = self._burn_in, self._bootstrap, number
        return sample

    def release(self) -> None:
        self._channels[self._taken.popleft()].release()

    def lives(self) -> list[int | None]:
        """Return of each channel to how many later lives of its producer it has gone
        over, having taken all that those before had sent; None where it is about to."""
        return [channel.life() for channel in self._channels]

    def pass_on(self) -> None:
        """Say that the oldest consumed sample is sent on between now and its release."""
        self._channels[self._taken[0]].pass_on()

    def void(self) -> int:
        """Give back what a life before may have sent on and had not released: it is not
        to come twice. Return how many samples that are. Before the first `consume`."""
        doubtful = [number for number, channel in enumerate(self._channels) if channel.in_doubt()]
        for number in doubtful:
            if self._take(number) is not None:
                self.release()
        return len(doubtful)

    def give_back(self, channel: int) -> None:
        """Give back the oldest sample that is held of a channel, whatever is held of
        others."""
        self._taken.remove(channel)
        self._channels[channel].release()

    def state(self) -> Part:
        """Return whose samples are held, and whose is next. The samples themselves are
        their producers' to keep."""
        return {"held": [*self._taken, *self._again], "next": self._next}

    def load_state(self, state: Part) -> None:
        """Take first what was held, in the same order."""
        self._again, self._next = deque(state["held"]), state["next"]


def _to_its_end(views: Arrays) -> Arrays:
    """Return the rows of one seat's episode, whatever its slot holds behind that."""
    rows = int((views["done"] | views["truncated"])[:, 0].argmax()) + 1
    return {name: array[:rows] for name, array in views.items()}
