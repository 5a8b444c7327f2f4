"""The sample stream: who gets which sample, and that nobody drops one."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.api.transport import Bell
from tidemill.core.memory import LocalSegment
from tidemill.core.schema import Field, poison
from tidemill.streams.samples import ChannelSampleConsumer, ChannelSampleProducer
from tidemill.transports.slots import SlotConsumer, SlotProducer

SCHEMA = {"obs": Field((2,), "float32"), "action": Field((), "int64")}
ROWS, SEATS = 3, 2


class Silent(Bell):
    def ring(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        raise AssertionError("nothing waits here")


def joined(
    *groups: int, slots: int = 2, by_room: Sequence[int] = ()
) -> tuple[ChannelSampleProducer, list[list[ChannelSampleConsumer]]]:
    """A producer and its groups of so many consumers."""
    segments = [[LocalSegment() for _ in range(count)] for count in groups]
    producer = ChannelSampleProducer(
        [[SlotProducer(segment, Silent()) for segment in group] for group in segments], by_room=by_room
    )
    consumers = [
        [ChannelSampleConsumer([SlotConsumer(segment, Silent())], 0, 1) for segment in group]
        for group in segments
    ]
    assert all(consumer.offered() is None for group in consumers for consumer in group)
    producer.offer(SCHEMA, ROWS, SEATS, slots)
    for group in consumers:
        for consumer in group:
            assert [offered.slots for offered in consumer.offered() or ()] == [slots]
            for slot in consumer._channels[0]._views:  # type: ignore[attr-defined]
                poison(slot)
    return producer, consumers


def send(producer: ChannelSampleProducer, mark: int) -> bool:
    """Send a sample that says which it is."""
    block = producer.reserve()
    if block is None:
        return False
    block["obs"][...] = np.arange(ROWS * SEATS * 2).reshape(ROWS, SEATS, 2) + 1000 * mark
    block["action"][...] = mark
    producer.commit()
    return True


def take(consumer: ChannelSampleConsumer) -> int | None:
    """Take a sample, see that it is whole, destroy it, and return its mark."""
    sample = consumer.consume()
    if sample is None:
        return None
    mark = int(sample["action"][0, 0])
    assert (sample["action"] == mark).all()
    assert (sample["obs"] == np.arange(ROWS * SEATS * 2).reshape(ROWS, SEATS, 2) + 1000 * mark).all()
    poison(sample)
    consumer.release()
    return mark


def test_every_group_gets_every_sample() -> None:
    producer, ((first,), (second,), (third,)) = joined(1, 1, 1)
    for mark in range(10):
        assert send(producer, mark)
        assert [take(c) for c in (first, third, second)] == [mark] * 3


def test_within_a_group_consumers_take_turns() -> None:
    producer, ((alone,), three) = joined(1, 3)
    for mark in range(9):
        assert send(producer, mark)
        assert take(alone) == mark
        assert [take(consumer) for consumer in three] == [mark if i == mark % 3 else None for i in range(3)]


def test_where_turns_go_by_room_who_takes_nothing_holds_nobody_up() -> None:
    producer, ((dead, living), (third,)) = joined(2, 1, by_room=[0])
    marks = list[int]()
    for mark in range(8):
        assert send(producer, mark)
        assert take(third) == mark
        if (mark := take(living)) is not None:  # type: ignore[assignment]
            marks.append(mark)
    assert marks == [1, 3, 4, 5, 6, 7]  # the other one has two slots
    assert [take(dead), take(dead), take(dead)] == [0, 2, None]
    assert send(producer, 8) and take(dead) == 8  # it has its turn again


@pytest.mark.parametrize("slow", [0, 1])
def test_one_slow_group_holds_the_producer_up_and_loses_nothing(slow: int) -> None:
    producer, groups = joined(1, 1)
    (quick,), (held,) = groups[1 - slow], groups[slow]
    assert send(producer, 0) and send(producer, 1)
    assert [take(quick), take(quick), take(quick)] == [0, 1, None]
    for _ in range(3):
        assert not send(producer, 2)
    assert take(held) == 0
    assert send(producer, 2) and not send(producer, 3)
    assert [take(held), take(held), take(held), take(quick)] == [1, 2, None, 2]


def test_what_is_reserved_is_one_block_until_it_is_sent() -> None:
    """So that it may be filled over many ticks, whatever the others do."""
    producer, ((first,), (second,)) = joined(1, 1)
    assert send(producer, 0)
    block = producer.reserve()
    assert block is not None
    block["action"][...] = 1
    assert take(first) == 0 and take(second) == 0
    again = producer.reserve()
    assert again is not None and again["action"] is block["action"]


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), max_size=80),
)
def test_nothing_is_lost_repeated_or_out_of_order(groups: list[int], slots: int, moves: list[int]) -> None:
    producer, consumers = joined(*groups, slots=slots)
    flat = [(g, i, consumer) for g, group in enumerate(consumers) for i, consumer in enumerate(group)]
    got: dict[tuple[int, int], list[int]] = {(g, i): [] for g, i, _ in flat}
    marks = 0

    def drain(consumer: ChannelSampleConsumer, key: tuple[int, int]) -> None:
        if (mark := take(consumer)) is not None:
            got[key].append(mark)

    for move in moves:
        if move < 4:
            marks += send(producer, marks)
        else:
            g, i, consumer = flat[move % len(flat)]
            drain(consumer, (g, i))
    for _ in range(slots):
        for g, i, consumer in flat:
            drain(consumer, (g, i))
    for (g, i), seen in got.items():
        assert seen == list(range(marks))[i :: groups[g]]
