"""What is read when whoever writes dies and lives again, and when whoever reads does."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tidemill.api.edges import Edge
from tidemill.api.transport import Handle
from tidemill.core.errors import SchemaError
from tidemill.core.memory import LocalSegment, MemfdSegment, Segment
from tidemill.core.schema import Arrays, Field
from tidemill.transports.local import LocalBell
from tidemill.transports.shared import SharedTransport
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter

SCHEMA = {"x": Field((), "int64")}


class Memory:
    """Makes segments, two ends of each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.descriptors: list[int] = []

    def __call__(self) -> tuple[Segment, Segment]:
        if self.kind == "local":
            both = LocalSegment()
            return both, both
        made = os.memfd_create("test")
        self.descriptors.append(made)
        return MemfdSegment(os.dup(made)), MemfdSegment(os.dup(made))


@pytest.fixture(params=["local", "memfd"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = Memory(request.param)
    yield made
    for descriptor in made.descriptors:
        os.close(descriptor)


def producer_of(segment: Segment, slots: int = 3, rows: int = 1) -> SlotProducer:
    producer = SlotProducer(segment, LocalBell())
    producer.offer(SCHEMA, (rows,), slots)
    return producer


def send(producer: SlotProducer, number: int) -> None:
    slot = producer.reserve()
    assert slot is not None
    slot["x"][:] = number
    producer.commit()


def take(consumer: SlotConsumer) -> int | None:
    slot = consumer.take()
    return None if slot is None else int(slot["x"][0])


def test_what_a_dead_producer_committed_comes_first_and_what_it_reserved_is_void(memory: Memory) -> None:
    theirs, ours = memory()
    first, consumer = producer_of(theirs), SlotConsumer(ours, LocalBell())
    assert consumer.attach()
    send(first, 1)
    send(first, 2)
    reserved = first.reserve()
    assert reserved is not None
    reserved["x"][:] = 3
    assert take(consumer) == 1
    theirs, ours = memory()
    consumer.renew(ours)
    assert (take(consumer), take(consumer)) == (2, None)
    second = producer_of(theirs)
    send(second, 4)
    assert (take(consumer), take(consumer)) == (4, None)
    assert consumer.waiting() == 0


def test_slots_held_of_a_dead_producer_stay_as_they_are_and_go_back_to_nobody(memory: Memory) -> None:
    theirs, ours = memory()
    first, consumer = producer_of(theirs), SlotConsumer(ours, LocalBell())
    consumer.attach()
    for number in (1, 2):
        send(first, number)
    held: list[Arrays | None] = [consumer.take(), consumer.take()]
    theirs, ours = memory()
    consumer.renew(ours)
    second = producer_of(theirs, slots=2)
    for number in (3, 4):
        send(second, number)
    held += [consumer.take(), consumer.take()]
    assert [int(slot["x"][0]) for slot in held if slot is not None] == [1, 2, 3, 4]
    for _ in range(2):
        consumer.release()
    assert second.free() == 0  # those were of the life before
    for free in (1, 2):
        consumer.release()
        assert second.free() == free
    with pytest.raises(SchemaError, match="without a slot held"):
        consumer.release()


def test_lives_that_offered_nothing_are_passed_over(memory: Memory) -> None:
    consumer = SlotConsumer(memory()[1], LocalBell())
    assert not consumer.attach()
    consumer.renew(memory()[1])
    theirs, ours = memory()
    consumer.renew(ours)
    assert not consumer.attach()
    send(producer_of(theirs), 5)
    assert consumer.attach() and take(consumer) == 5 and consumer.life() == 2
    consumer.renew(memory()[1])  # and one after it has lived
    theirs, ours = memory()
    consumer.renew(ours)
    assert take(consumer) is None and consumer.life() is None
    send(producer_of(theirs), 6)
    assert take(consumer) == 6 and consumer.life() == 4


def test_what_a_dead_producer_has_sent_from_another_host_is_awaited(memory: Memory) -> None:
    theirs, ours = memory()
    wire, consumer = producer_of(theirs), SlotConsumer(ours, LocalBell())
    consumer.attach()
    send(wire, 1)
    (second, ours), (third, last) = memory(), memory()
    consumer.renew(ours)
    assert (take(consumer), take(consumer)) == (1, None)
    send(wire, 2)  # it was under way when the consumer was told of the new life
    assert take(consumer) == 2
    consumer.renew(last)
    assert take(consumer) is None
    send(wire, 3)  # and right before the wire offers what the next lives do
    send(producer_of(second), 4)
    send(producer_of(third), 5)
    assert [take(consumer) for _ in range(4)] == [3, 4, 5, None]


def test_a_new_life_must_offer_what_the_one_before_did(memory: Memory) -> None:
    theirs, ours = memory()
    consumer = SlotConsumer(ours, LocalBell())
    producer_of(theirs)
    consumer.attach()
    theirs, ours = memory()
    consumer.renew(ours)
    producer_of(theirs, rows=2)
    with pytest.raises(SchemaError, match=r"a new life of a producer offers \(2,\)"):
        consumer.take()


def test_a_new_life_of_the_consumer_begins_with_what_was_not_released(memory: Memory) -> None:
    theirs, ours = memory()
    producer, first = producer_of(theirs), SlotConsumer(ours, LocalBell())
    first.attach()
    for number in (1, 2, 3):
        send(producer, number)
    assert (take(first), take(first)) == (1, 2)
    first.release()
    second = SlotConsumer(ours, LocalBell())  # the other one died
    assert second.attach()
    assert (take(second), take(second), take(second)) == (2, 3, None)
    second.release()
    assert producer.free() == 2


def test_a_new_life_of_the_consumer_knows_what_the_last_one_may_have_sent_on(memory: Memory) -> None:
    theirs, ours = memory()
    producer, first = producer_of(theirs), SlotConsumer(ours, LocalBell())
    first.attach()
    send(producer, 1)
    send(producer, 2)
    for number in (1, 2):
        assert take(first) == number
        first.pass_on()
        second = SlotConsumer(ours, LocalBell())  # as if the first one died now
        assert second.attach() and second.in_doubt()
        first.release()
        third = SlotConsumer(ours, LocalBell())  # or now
        assert third.attach() and not third.in_doubt()
    send(producer, 3)
    assert not third.in_doubt() and take(third) == 3


def test_a_reader_keeps_what_a_dead_writer_wrote_until_the_next_life_has_written(memory: Memory) -> None:
    theirs, ours = memory()
    writer, reader = SlotWriter(theirs, []), SlotReader(ours)
    writer.offer(SCHEMA)
    writer.write({"x": np.array(7)}, 1)
    assert reader.attach() and reader.newest() == 1
    theirs, ours = memory()
    reader.renew(ours)
    into = {"x": np.zeros((), np.int64)}
    assert (reader.newest(), reader.read(into), int(into["x"])) == (1, 1, 7)
    writer = SlotWriter(theirs, [])
    writer.offer(SCHEMA)
    assert (reader.newest(), reader.read(into), int(into["x"])) == (1, 1, 7)
    writer.write({"x": np.array(8)}, 1 << 32)
    assert (reader.newest(), reader.read(into), int(into["x"])) == (1 << 32, 1 << 32, 8)


def test_a_reader_whose_writer_died_before_it_offered_attaches_to_the_next(memory: Memory) -> None:
    reader = SlotReader(memory()[1])
    assert not reader.attach()
    theirs, ours = memory()
    reader.renew(ours)
    writer = SlotWriter(theirs, [])
    writer.offer(SCHEMA)
    assert reader.attach() and reader.newest() == -1


def test_the_edges_that_the_dead_write_are_joined_anew_and_no_others() -> None:
    edges = [
        Edge("samples/a", "channel", "actor-0", ("trainer-0",)),
        Edge("samples/b", "channel", "actor-1", ("trainer-0",)),
        Edge("parameters", "cell", "trainer-0", ("actor-0", "actor-1")),
        Edge("credits/b", "cell", "trainer-0", ("actor-1",)),
    ]
    bells = {name: os.eventfd(0) for name in ("actor-0", "actor-1", "trainer-0")}
    transport = SharedTransport(edges, bells)
    try:
        before = {worker: transport.handles(worker) for worker in bells}
        kept = {edge: os.fstat(before["trainer-0"][edge].descriptors[0]).st_ino for edge in ("samples/b",)}
        dead = os.fstat(before["trainer-0"]["samples/a"].descriptors[0]).st_ino
        told = transport.renew(["actor-0"])
        assert {worker: list(handles) for worker, handles in told.items()} == {"trainer-0": ["samples/a"]}
        (new,) = told["trainer-0"]["samples/a"].descriptors
        assert os.fstat(new).st_ino != dead
        after = transport.handles("actor-0")
        assert after["samples/a"].descriptors[0] == new
        assert after["parameters"] == before["actor-0"]["parameters"]
        of_other = transport.handles("actor-1")["samples/b"].descriptors[0]
        assert os.fstat(of_other).st_ino == kept["samples/b"]
        # credits begin anew with who spends them, and who grants them is told, or the
        # other way round
        told = transport.renew(["actor-1"])
        assert {worker: list(handles) for worker, handles in told.items()} == {
            "trainer-0": ["samples/b", "credits/b"]
        }
        (new,) = told["trainer-0"]["credits/b"].descriptors
        assert transport.handles("actor-1")["credits/b"].descriptors[0] == new
        told = transport.renew(["trainer-0"])
        assert {worker: list(handles) for worker, handles in told.items()} == {
            "actor-0": ["parameters"],
            "actor-1": ["parameters", "credits/b"],
        }
        # who dies with whom it writes to is told by its own handles
        told = transport.renew(["actor-0", "trainer-0"])
        anew = {
            edge: Handle(transport.handles("actor-1")[edge].descriptors[:1])
            for edge in ("parameters", "credits/b")
        }
        assert told == {"actor-1": anew}
    finally:
        transport.close()
        for bell in bells.values():
            os.close(bell)
