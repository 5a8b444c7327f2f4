"""What every transport must keep to: the same tests over local and shared memory."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.api.edges import Edge
from tidemill.api.transport import Bell, Link
from tidemill.core.asyncio_loops import Loop
from tidemill.core.errors import ConfigError, DeadlineError, SchemaError
from tidemill.core.memory import LocalSegment, MemfdSegment, Segment
from tidemill.core.schema import Field
from tidemill.native.library import BUILT, Kernels, NativeUnavailable
from tidemill.transports import ordered_words, shared
from tidemill.transports.local import LocalBell, LocalLink, local_endpoints
from tidemill.transports.shared import EventBell, SharedTransport, SocketLink
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter

SCHEMA = {"number": Field((), "int64"), "data": Field((3,), "float32")}
needs_linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd and eventfd are Linux's")


class Counting(Bell):
    """A bell that counts."""

    def __init__(self) -> None:
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1

    def wait(self, seconds: float) -> bool:
        raise NotImplementedError


@dataclass
class Kind:
    """Makes two ends of everything; what it opens is closed after the test."""

    name: str
    _descriptors: list[int] = field(default_factory=list)

    def segments(self) -> tuple[Segment, Segment]:
        if self.name == "local":
            both = LocalSegment()
            return both, both
        self._descriptors.append(os.memfd_create("test", os.MFD_CLOEXEC))
        return MemfdSegment(self._descriptors[-1]), MemfdSegment(self._descriptors[-1])

    def bells(self) -> tuple[Bell, Bell]:
        """One bell, as its owner and as the others have it."""
        if self.name == "local":
            bell = LocalBell()
            return bell, bell
        self._descriptors.append(os.eventfd(0, os.EFD_CLOEXEC))
        return EventBell(self._descriptors[-1]), EventBell(self._descriptors[-1])

    def links(self) -> tuple[Link, Link]:
        if self.name == "local":
            return LocalLink.pair(LocalBell(), LocalBell())
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return SocketLink(one), SocketLink(other)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


KINDS = ["local", *(pytest.param(name, marks=needs_linux) for name in ("shared", "ordered by the core"))]


@contextmanager
def kind_of(name: str) -> Iterator[Kind]:
    """Ends in threads, in processes, and in processes of a processor such as ARM."""
    with pytest.MonkeyPatch.context() as patched:
        if name == "ordered by the core":
            try:
                Kernels(BUILT)
            except NativeUnavailable as error:
                pytest.skip(str(error))
            patched.setattr(ordered_words, "IN_ORDER", False)
        made = Kind(name)
        yield made
        made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with kind_of(request.param) as made:
        yield made


@pytest.fixture(params=KINDS[1:])
def between_processes(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with kind_of(request.param) as made:
        yield made


class TestChannel:
    def make(self, kind: Kind, slots: int = 3) -> tuple[SlotProducer, SlotConsumer, Counting, Counting]:
        one, other = kind.segments()
        to_consumer, to_producer = Counting(), Counting()
        producer, consumer = SlotProducer(one, to_consumer), SlotConsumer(other, to_producer)
        assert not consumer.attach()
        producer.offer(SCHEMA, (2,), slots)
        assert to_consumer.rings == 1
        assert consumer.attach() and consumer.attach()
        return producer, consumer, to_consumer, to_producer

    def test_the_consumer_learns_what_is_offered(self, kind: Kind) -> None:
        _, consumer, _, _ = self.make(kind)
        assert (consumer.schema, consumer.lead, consumer.slots, consumer.waiting()) == (SCHEMA, (2,), 3, 0)
        assert consumer.take() is None

    def test_values_are_seen_in_place(self, kind: Kind) -> None:
        producer, consumer, _, _ = self.make(kind)
        views = producer.reserve()
        assert views is not None and views["data"].shape == (2, 3) and not views["data"].any()
        views["data"][:] = 7
        assert consumer.take() is None  # reserved is not committed
        producer.commit()
        taken = consumer.take()
        assert taken is not None and (taken["data"] == 7).all()
        views["data"][0, 0] = 8  # the same memory
        assert taken["data"][0, 0] == 8

    def test_reserving_again_gives_the_same_slot(self, kind: Kind) -> None:
        producer, _, _, _ = self.make(kind)
        assert producer.reserve() is producer.reserve()

    def test_each_commit_and_each_release_rings(self, kind: Kind) -> None:
        producer, consumer, to_consumer, to_producer = self.make(kind)
        for n in range(3):
            producer.reserve()
            producer.commit()
            assert to_consumer.rings == 2 + n
        for n in range(3):
            consumer.take()
            consumer.release()
            assert to_producer.rings == 1 + n

    def test_a_release_needs_a_slot_held(self, kind: Kind) -> None:
        _, consumer, _, _ = self.make(kind)
        with pytest.raises(SchemaError, match="without a slot held"):
            consumer.release()

    @needs_linux
    def test_a_reservation_that_is_never_committed_is_void(self, kind: Kind) -> None:
        producer, consumer, _, _ = self.make(kind)
        views = producer.reserve()
        assert views is not None
        views["number"][:] = 9
        del producer  # it died
        assert consumer.take() is None and consumer.waiting() == 0

    @settings(max_examples=40)
    @given(
        slots=st.integers(1, 4),
        moves=st.lists(st.sampled_from(["reserve", "commit", "take", "release"]), max_size=80),
    )
    @pytest.mark.parametrize("name", KINDS)
    def test_order_and_bound_hold_and_nothing_is_lost(self, name: str, slots: int, moves: list[str]) -> None:
        with kind_of(name) as kind:
            self.check_moves(kind, slots, moves)

    def check_moves(self, kind: Kind, slots: int, moves: list[str]) -> None:
        producer, consumer, _, _ = self.make(kind, slots)
        sent = received = released = 0
        reserved = False
        held: deque[tuple[int, dict]] = deque()
        for move in moves:
            if move == "reserve":
                views = producer.reserve()
                assert (views is None) == (sent - released >= slots) and producer.free() == slots - (
                    sent - released
                )
                reserved = views is not None
                if views is not None:
                    views["number"][:] = sent
                    views["data"][:] = sent
            elif move == "commit" and reserved:
                producer.commit()
                sent, reserved = sent + 1, False
            elif move == "take":
                assert consumer.waiting() == sent - received
                taken = consumer.take()
                assert (taken is None) == (received == sent)
                if taken is not None:
                    held.append((received, taken))
                    received += 1
            elif move == "release" and held:
                held.popleft()
                consumer.release()
                released += 1
            for number, views in held:  # nobody writes what is held
                assert (views["number"] == number).all() and (views["data"] == number).all()


class TestCell:
    def make(self, kind: Kind, readers: int = 1) -> tuple[SlotWriter, list[SlotReader], Counting]:
        one, other = kind.segments()
        bell = Counting()
        writer, ends = SlotWriter(one, [bell]), [SlotReader(other) for _ in range(readers)]
        assert not any(end.attach() for end in ends)
        writer.offer(SCHEMA)
        assert all(end.attach() and end.attach() for end in ends)
        return writer, ends, bell

    def test_the_newest_value_wins(self, kind: Kind) -> None:
        writer, readers, bell = self.make(kind, readers=2)
        into = {"number": np.zeros((), np.int64), "data": np.zeros(3, np.float32)}
        for reader in readers:
            assert reader.schema == SCHEMA
            assert reader.newest() == -1 and reader.read(into) == -1
        for version in (0, 1, 5, 6, 7, 8, 9):
            rings = bell.rings
            writer.write({"number": np.array(version), "data": np.full(3, version)}, version)
            assert bell.rings == rings + 1
            if version == 6:
                continue
            for reader in readers:
                assert reader.newest() == version
                assert reader.read(into) == reader.read(into) == version
                assert into["number"] == version and (into["data"] == version).all()

    def test_values_are_copies(self, kind: Kind) -> None:
        writer, (reader,), _ = self.make(kind)
        value = {"number": np.array(1), "data": np.ones(3, np.float32)}
        into = {"number": np.zeros((), np.int64), "data": np.zeros(3, np.float32)}
        writer.write(value, 0)
        value["data"][:] = 2
        reader.read(into)
        writer.write(value, 1)
        assert (into["data"] == 1).all()


class TestBell:
    def test_a_ring_before_the_wait_ends_it_at_once(self, kind: Kind) -> None:
        owner, other = kind.bells()
        other.ring()
        other.ring()
        assert owner.wait(60)
        assert not owner.wait(0)

    def test_nobody_rings(self, kind: Kind) -> None:
        owner, _ = kind.bells()
        assert not owner.wait(0)


@needs_linux
def test_who_rings_for_others_of_its_thread_ends_its_next_wait_without_a_system_call() -> None:
    """And whoever rings while it waits, or from elsewhere, ends the wait as ever."""
    edge = Edge("samples", "channel", "a-0", ("b-0",))
    descriptor = os.eventfd(0)
    bell, transport = EventBell(descriptor), SharedTransport([edge], {"a-0": descriptor, "b-0": descriptor})
    link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def told() -> bool:
        return bool(select.select([descriptor], [], [], 0)[0])

    try:
        ends = {
            worker: SharedTransport.endpoints(bell, SocketLink(link), transport.handles(worker))
            for worker in ("a-0", "b-0")
        }
        producer = ends["a-0"].producer("samples")
        producer.offer(SCHEMA, (), 2)
        assert told()  # nobody has waited yet, so that nobody knows whose thread it is
        assert bell.wait(60) and not bell.wait(0)
        producer.reserve()
        producer.commit()
        assert not told() and bell.wait(60) and not bell.wait(0)
        thread = threading.Thread(target=bell.ring)
        thread.start()
        thread.join()
        assert told() and bell.wait(60) and not bell.wait(0)
        loop = Loop.take()
        loop.loop.call_later(0.01, bell.ring)
        assert bell.wait(60)
        bell.ring()
        assert not told() and bell.wait(60) and not bell.wait(0)
        loop.give_back()
    finally:
        transport.close()
        os.close(descriptor)
        link.close()
        other.close()


class TestLink:
    def test_the_last_words_of_who_goes_without_having_read_all_are_heard(self, kind: Kind) -> None:
        one, other = kind.links()
        one.send(b"configure")
        other.send(b"failed")
        other.close()
        assert one.receive() == [b"failed"]
        assert one.receive() is None
        one.close()

    def test_messages_come_in_order(self, kind: Kind) -> None:
        one, other = kind.links()
        assert one.receive() == []
        messages = [bytes([i]) * (1 + 100 * i) for i in range(20)]
        assert all(other.send(m) for m in messages)
        other.send(b"last")
        assert one.receive() == [*messages, b"last"]
        assert one.send(b"back") and other.receive() == [b"back"]

    def test_a_sender_ahead_of_its_reader_loses_nothing(self, kind: Kind) -> None:
        one, other = kind.links()
        messages = [i.to_bytes(4, "little") * 2000 for i in range(500)]
        for message in messages:
            assert one.send(message)
        got: list[bytes] = []
        while len(got) < len(messages):
            got += other.receive() or []
            assert one.receive() == []  # sends what is left
        assert got == messages

    def test_long_messages_come_whole_and_in_order(self, kind: Kind) -> None:
        ends = kind.links()
        long = bytes(range(256)) * 4096
        for size in (1 << 15, (1 << 15) + 1, (1 << 16) - 1, 1 << 16):
            assert ends[0].send(long[:size]) and ends[1].receive() == [long[:size]]
        sent = [[bytes([end]), long[end:], b"", b"short", long[: 1 << 18], b"last"] for end in range(2)]
        for messages in zip(*sent, strict=True):
            for end, message in zip(ends, messages, strict=True):
                assert end.send(message)  # though nobody reads
        got: list[list[bytes]] = [[], []]
        for _ in range(1000):
            for end, other in zip(ends, reversed(got), strict=True):
                other += end.receive() or []
        assert got == sent

    @needs_linux
    def test_a_message_beyond_all_bounds_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = Kind("shared").links()
        monkeypatch.setattr(shared, "MESSAGE_LIMIT", 100_000)
        with pytest.raises(SchemaError, match="control message of 100001 bytes"):
            one.send(bytes(100_001))
        assert other.receive() == []
        assert one.send(bytes(100_000))
        monkeypatch.setattr(shared, "MESSAGE_LIMIT", 99_999)
        with pytest.raises(SchemaError, match="longer than"):
            other.receive()

    def test_what_was_sent_is_read_before_the_end(self, kind: Kind) -> None:
        one, other = kind.links()
        one.send(b"a")
        one.send(b"b")
        one.close()
        assert other.receive() == [b"a", b"b"]
        assert other.receive() is None and other.receive() is None
        assert not other.send(b"c") and not other.send(b"d")


# ---- headers that lie ------------------------------------------------------------------


def described(
    description: object, memory: int = 1 << 16, length: int | None = None, magic: bytes = b"tidemill"
) -> LocalSegment:
    packed = description if isinstance(description, bytes) else msgspec.msgpack.encode(description)
    segment = LocalSegment()
    data = segment.create(memory)
    data[256 : 256 + len(packed)] = packed
    data[8:16] = (len(packed) if length is None else length).to_bytes(8, "little")
    data[:8] = magic
    return segment


def plain(dtype: str = "int64", shape: object = (), lead: object = (), slots: object = 2) -> dict:
    return {"schema": {"a": {"shape": shape, "dtype": dtype}}, "lead": lead, "slots": slots}


ENDS: list[Callable[[Segment], SlotConsumer | SlotReader]] = [
    lambda s: SlotConsumer(s, Counting()),
    SlotReader,
]
LIES = {
    "another magic": described(plain(), magic=b"notmine!"),
    "a huge description": described(plain(), length=1 << 40),
    "a description beyond the memory": described(plain(), length=1 << 17),
    "no msgpack": described(b"\xc1\xff\x00"),
    "nothing": described(b"", length=0),
    "another structure": described([1, 2, 3]),
    "no schema": described({"lead": (), "slots": 1}),
    "strings for numbers": described(plain(slots="2")),
    "an unknown dtype": described(plain("quaternion")),
    "objects": described(plain("object")),
    "a structured dtype": described(plain("i4,O")),
    "a negative axis": described(plain(shape=(-4,))),
    "a negative lead": described(plain(lead=(-1, 2))),
    "fields that do not fit": described(plain(shape=(1 << 14,))),
    "an overflowing shape": described(plain(shape=(1 << 31, 1 << 31, 1 << 31))),
    "nothing of a lot": described(plain(shape=(0, 1 << 62, 1 << 62))),
    "very many axes": described(plain(shape=(1,) * 100)),
}


@pytest.mark.parametrize("end", ENDS, ids=["channel", "cell"])
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, end: Callable[[Segment], SlotConsumer | SlotReader]) -> None:
    with pytest.raises(SchemaError):
        end(LIES[lie]).attach()


@pytest.mark.parametrize("slots", [0, -1, 1 << 12, 1 << 20, 1 << 60])
def test_slots_that_do_not_fit_are_refused(slots: int) -> None:
    with pytest.raises(SchemaError, match="do not fit"):
        SlotConsumer(described(plain(slots=slots)), Counting()).attach()


@given(st.binary(min_size=1, max_size=80), st.integers(0, 1 << 63))
@settings(max_examples=60)
def test_any_bytes_are_refused(description: bytes, length: int) -> None:
    for end in ENDS:
        for size in (None, length):
            with pytest.raises(SchemaError):
                end(described(description, length=size)).attach()


@pytest.mark.parametrize("size", [1, 64, 255])
def test_a_segment_without_room_for_a_header_is_not_there_yet(size: int) -> None:
    segment = LocalSegment()
    segment.create(size)
    assert not any(end(segment).attach() for end in ENDS)


# ---- between processes -----------------------------------------------------------------

WRITER = """
import sys, numpy as np
from tidemill.core.memory import MemfdSegment
from tidemill.core.schema import Field
from tidemill.transports import ordered_words
from tidemill.transports.slots import SlotWriter
ordered_words.IN_ORDER = sys.argv[3] == "True"
writer = SlotWriter(MemfdSegment(int(sys.argv[1])), [])
writer.offer({"a": Field((20000,), "float32"), "b": Field((77,), "int64")})
a, b = np.empty(20000, np.float32), np.empty(77, np.int64)
for version in range(int(sys.argv[2])):
    a.fill(version); b.fill(version)
    writer.write({"a": a, "b": b}, version)
"""


def test_a_cell_is_never_torn(between_processes: Kind) -> None:
    descriptor = os.memfd_create("cell")
    last = 10_000
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(descriptor), str(last), str(ordered_words.IN_ORDER)],
        pass_fds=[descriptor],
    )
    try:
        reader = SlotReader(MemfdSegment(descriptor))
        while not reader.attach():
            assert writer.poll() in (None, 0)
        into = {"a": np.empty(20000, np.float32), "b": np.empty(77, np.int64)}
        seen, before = set(), -1
        while before < last - 1:
            try:
                version = reader.read(into)
            except DeadlineError:  # rewritten too often while it was read: said, and not torn
                continue
            if version < 0:
                continue
            assert version >= before, "an older value after a newer one"
            assert (into["a"] == version).all() and (into["b"] == version).all(), (
                f"version {version} is a mixture"
            )
            before = version
            seen.add(version)
            assert writer.poll() in (None, 0)
        assert seen
    finally:
        writer.kill()
        writer.wait()
        os.close(descriptor)


PONG = """
import sys
from tidemill.core.memory import MemfdSegment
from tidemill.core.schema import Field
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer
there, back, own, peer, rounds = map(int, sys.argv[1:])
bell, other = EventBell(own), EventBell(peer)
consumer, producer = SlotConsumer(MemfdSegment(there), other), SlotProducer(MemfdSegment(back), other)
producer.offer({"n": Field((), "int64")}, (), 2)
while not consumer.attach():
    bell.wait(120.0)
for n in range(rounds):
    while (views := consumer.take()) is None:
        if not bell.wait(120.0):
            sys.exit(f"round {n}: nobody rang")
    value = int(views["n"])
    consumer.release()
    producer.reserve()["n"][...] = value + 1
    producer.commit()
"""


@needs_linux
def test_no_ring_is_lost_between_processes() -> None:
    rounds = 20_000
    there, back = os.memfd_create("there"), os.memfd_create("back")
    own, peer = os.eventfd(0), os.eventfd(0)
    descriptors = [there, back, peer, own]
    other = subprocess.Popen(
        [sys.executable, "-c", PONG, *map(str, descriptors), str(rounds)], pass_fds=descriptors
    )
    rescues = 0
    try:
        bell, wake = EventBell(own), EventBell(peer)
        producer, consumer = SlotProducer(MemfdSegment(there), wake), SlotConsumer(MemfdSegment(back), wake)
        producer.offer({"n": Field((), "int64")}, (), 2)
        while not consumer.attach():
            assert bell.wait(120.0)
        for n in range(rounds):
            slot = producer.reserve()
            assert slot is not None
            slot["n"][...] = n
            producer.commit()
            while (views := consumer.take()) is None:
                rescues += not bell.wait(120.0)
                assert other.poll() in (None, 0)
            assert views["n"] == n + 1
            consumer.release()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()
        for descriptor in descriptors:
            os.close(descriptor)
    assert rescues == 0


def test_processes_that_nothing_orders_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ordered_words, "IN_ORDER", False)
    monkeypatch.setattr(ordered_words, "BUILT", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"need the native core, .* not built .* --launch threads"):
        SharedTransport([], {})
    monkeypatch.setattr(ordered_words, "IN_ORDER", True)
    SharedTransport([], {}).close()


def test_workers_of_one_thread_are_woken_by_what_comes_to_any_of_them() -> None:
    ends = local_endpoints(["a-0", "b-0", "c-0"], [], [["a-0", "b-0"], ["c-0"]])
    assert ends["b-0"][1].send(b"do")
    assert ends["a-0"][0].bell.wait(60)
    assert ends["b-0"][0].link.receive() == [b"do"]
    assert not ends["c-0"][0].bell.wait(0)
