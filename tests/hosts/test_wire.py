"""Channels and cells between two hosts: what was put in comes out, once and in order,
whatever becomes of the line."""

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from tests.hosts.hosts import LOOPBACK, Carrier, Cell, Channel, Host, join, until

import tidemill.hosts.peer
from tidemill.api.edges import Edge
from tidemill.api.launcher import Loss
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import Field
from tidemill.hosts import messages
from tidemill.hosts.connections import Door, Keys
from tidemill.hosts.crossing import Crossing
from tidemill.hosts.messages import (
    Hello,
    Lease,
    Offer,
    Piece,
    Position,
    Positions,
    Word,
    pack,
    unpack,
    unpack_piece,
)
from tidemill.hosts.pumps import NoRoom, OutgoingChannel
from tidemill.launchers.lost_samples import LostSamples


@pytest.fixture
def closing():
    """What is to be closed in the end, whatever happens."""
    with ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))


@pytest.fixture
def hosts(closing):
    return [closing(Host("here")), closing(Host("there"))]


def directions(hosts):
    """Join the hosts; return the two ends and bells of an edge each way."""
    here, there = hosts
    at_here, at_there = join(here, there)
    return (at_here, at_there, (here, there)), (at_there, at_here, (there, here))


@pytest.mark.parametrize("rows", [1, 128, 40_000])  # 128 B, 2 kB, 640 kB: three pieces
def test_slots_come_in_order_and_whole(hosts, rows):
    there, back = (Channel(*ends, number=i) for i, ends in enumerate(directions(hosts)))
    for channel in (there, back):
        channel.offer(rows)
    while min(there.taken, back.taken) < 50:
        for channel in (there, back):
            channel.put()
            channel.get()
        for host in hosts:
            host.turn(0.001)
    until(lambda: there.drained() and back.drained(), *hosts)
    assert there.incoming.repeated == back.incoming.repeated == 0


def test_a_slot_is_free_only_when_its_consumer_released_it(hosts):
    channel = Channel(*directions(hosts)[0])
    channel.offer(1)
    while channel.put():
        pass
    until(lambda: channel.get(release=False) and channel.taken == 4, *hosts)
    until(lambda: channel.outgoing.received == channel.outgoing.sent > 0, *hosts)
    assert channel.producer.free() == 0 and not channel.put()  # all have come, none was released
    channel.consumer.release()
    until(lambda: channel.producer.free() == 1, *hosts)
    assert channel.put() and not channel.put()


def test_a_cell_gives_its_newest_value_and_skips_what_is_outdated(hosts):
    source, *_ = ends = directions(hosts)[0]
    cell = Cell(*ends)
    assert source.lag is None
    schema = {"weights": Field((100_000,), "float32"), "step": Field((), "int64")}
    cell.writer.offer(schema)
    value = {"weights": np.zeros(100_000, "float32"), "step": np.zeros((), "int64")}
    seen = []
    read = {name: np.empty_like(array) for name, array in value.items()}
    for version in range(1, 201):
        value["weights"][:] = value["step"][...] = version
        cell.writer.write(value, version)
        if version % 5 == 0:
            for host in hosts:
                host.turn(0.0)
        if cell.reader.attach() and cell.reader.newest() > (seen[-1] if seen else 0):
            seen.append(cell.reader.read(read))
            assert (read["weights"] == seen[-1]).all() and read["step"] == seen[-1]
    until(lambda: cell.reader.attach() and cell.reader.newest() == 200, *hosts)
    assert seen == sorted(seen) and len(seen) < 100
    until(lambda: cell.outgoing.behind == 0, *hosts)
    cell.writer.write(value, 203)
    assert source.lag == 3
    until(lambda: cell.outgoing.behind == 0, *hosts)
    assert cell.incoming.received < 150 * 400_064  # most were never sent


def test_nothing_is_lost_and_nothing_comes_twice_however_often_the_line_is_cut(hosts, closing):
    here, there = hosts
    carrier = closing(Carrier())
    at_here, at_there = join(here, there, carrier.relay)
    ends = (at_here, at_there, (here, there)), (at_there, at_here, (there, here))
    channels = [Channel(*ends[i % 2], number=i) for i in range(4)]
    for channel, rows in zip(channels, (128, 40_000, 40_000, 128), strict=True):
        channel.offer(rows, slots=6)
    chance = random.Random(7)
    cell = Cell(*ends[1], number=9)
    cell.writer.offer({"step": Field((1000,), "int64")})
    version = 0
    for _ in range(6):
        end = time.monotonic() + chance.uniform(0.05, 0.2)
        mark = min(channel.taken for channel in channels) + 20
        while time.monotonic() < end or min(channel.taken for channel in channels) < mark:
            version += 1
            cell.writer.write({"step": np.full(1000, version)}, version)
            for channel in channels:
                channel.put()
                channel.get()
            for host in hosts:
                host.turn(0.0)
        carrier.cut()
    until(lambda: all(channel.drained() for channel in channels), here, there)
    until(lambda: cell.reader.attach() and cell.reader.newest() == version, here, there)
    assert at_there.hellos > 6 and not at_here.ended and not at_there.ended


def test_what_hosts_tell_each_other_comes_once_and_in_order_however_often_the_line_is_cut(hosts, closing):
    here, there = hosts
    carrier = closing(Carrier())
    at_here, at_there = join(here, there, carrier.relay)
    chance = random.Random(3)
    # some of them longer than a word, one of them empty
    said = [chance.randbytes(chance.choice((0, 1, 900, 700_000))) for _ in range(60)]
    heard = {"here": list[bytes](), "there": list[bytes]()}
    for number, message in enumerate(said):
        here.tell("there", message)
        there.tell("here", message[::-1])
        for host in hosts:
            host.turn(0.002)
        if number % 10 == 9:
            hellos = at_there.hellos
            carrier.cut()
            until(lambda before=hellos: at_there.hellos > before, *hosts)

    def all_heard() -> bool:
        for name, peer in (("here", at_there), ("there", at_here)):
            while (message := peer.words.read()) is not None:
                heard[name].append(message)
        return len(heard["here"]) == len(heard["there"]) == len(said)

    until(all_heard, *hosts)
    assert heard["here"] == said and heard["there"] == [message[::-1] for message in said]
    until(lambda: at_here.words.heard_all and at_there.words.heard_all, *hosts)
    assert at_there.hellos >= 6 and not at_here.ended and not at_there.ended


def test_edges_may_be_joined_long_after_hosts_have_met(hosts):
    """Nothing is said over data before, and nothing that is then said is lost."""
    here, there = hosts
    at_here, ports = here.listen("there", there.keys.public, LOOPBACK, joined=False)
    at_there = there.call("here", here.keys.public, LOOPBACK, ports, joined=False)
    here.tell("there", b"join")
    until(lambda: at_there.words.unread, *hosts)
    channel = Channel(at_here, at_there, (here, there))
    channel.offer(128)
    channel.put()
    at_there.joined = True
    for _ in range(20):
        there.turn(0.01)
        here.turn(0.01)
    assert not channel.get()
    at_here.joined = True
    until(channel.get, *hosts)


def test_a_wrong_hello_before_edges_are_joined_ends_its_connection_alone(hosts, closing):
    here, there = hosts
    keys = Keys.new()
    peer, ports = here.listen("stranger", keys.public, LOOPBACK, joined=False)
    at_here, at_there = join(here, there)
    stranger = closing(Stranger(ports, keys, here.keys.public))
    stranger.lines[1].send(pack(Hello(2, [Position(7, 1, 0)])))
    until(lambda: peer.hellos == 1, here, there)
    here.tell("there", b"before")
    until(lambda: at_there.words.unread, here, there)
    assert not peer.ended
    peer.joined = True
    until(lambda: peer.ended, here, there)
    assert "it reads edge 7" in peer.ended and not at_here.ended


def test_what_is_told_wrongly_of_a_life_to_come_ends_its_connection_alone(hosts):
    ends = directions(hosts)[0]
    Channel(*ends, epoch=1)
    reader = ends[0]
    reader._take_position(Position(0, 2, 7), anew=False)
    Channel(*ends, epoch=2)
    until(lambda: reader.ended, *hosts)
    assert "it has 7 bytes of edge 0, of which 0 were sent" in reader.ended


def test_who_is_told_much_says_so_before_its_lease_is_due(hosts, monkeypatch):
    monkeypatch.setattr(tidemill.hosts.peer, "MOST_UNSAID_BYTES", 1 << 20)
    here, _ = hosts
    at_here, at_there = join(*hosts)
    until(lambda: at_there.hellos == 2, *hosts)
    at_there._next_lease = float("inf")
    for _ in range(8):
        here.tell("there", bytes(1 << 20))
    until(lambda: at_there.words.heard == 256, *hosts)
    until(lambda: at_here.words._unheard_bytes <= 1 << 20, *hosts)


def test_what_nobody_reads_is_kept_up_to_a_bound(hosts, monkeypatch):
    monkeypatch.setattr("tidemill.hosts.words.MOST_TOLD_BYTES", 100_000)
    here, there = hosts
    at_here, at_there = join(here, there)
    for _ in range(3):  # each time as much, once it is read
        for _ in range(2):
            here.tell("there", bytes(45_000))
        until(lambda: at_here.words.heard_all, *hosts)
        while at_there.words.read() is not None:
            pass
    for _ in range(3):
        here.tell("there", bytes(45_000))
        until(lambda: at_here.words.heard_all or at_there.ended, *hosts)
    assert "that nobody has read" in at_there.ended


def test_what_a_host_is_told_that_is_away_is_kept_up_to_a_bound(hosts, monkeypatch):
    monkeypatch.setattr("tidemill.hosts.words.MOST_TOLD_BYTES", 100_000)
    here, _ = hosts
    peer, _ = here.listen("nobody", Keys.new().public, LOOPBACK)
    for _ in range(10):
        here.tell("nobody", bytes(9000))
        here.turn(0.0)
    assert not peer.ended
    for _ in range(2):
        here.tell("nobody", bytes(9000))
        here.turn(0.0)
    assert "it has not heard 108,000 bytes" in peer.ended


def test_a_host_that_is_dismissed_is_hung_up_on_with_the_next_turn(hosts):
    here, there = hosts
    at_here, _ = join(here, there)
    until(lambda: at_here.hellos == 2, *hosts)
    at_here.dismiss("it speaks for nobody")
    until(lambda: at_here.ended, *hosts)
    assert at_here.ended == "it speaks for nobody"


def test_what_comes_twice_is_dropped_by_its_number_and_a_gap_is_an_error():
    channel = Alone()
    piece = bytes(range(64)) * 2  # two slots
    channel.take(0, piece[:64])
    channel.take(0, piece)  # the first of them was known
    assert channel.life.received == 128 and channel.life.repeated == 64
    channel.take(0, piece)
    assert channel.life.received == 128 and channel.life.repeated == 192
    assert channel.consumer.attach() and channel.consumer.waiting() == 2
    with pytest.raises(SchemaError, match="where byte 128 is next"):
        channel.take(192, piece[:64])


class Alone:
    """The receiving pump of a channel of four slots of 64 bytes, without a wire."""

    def __init__(self):
        from tidemill.core.memory import LocalSegment
        from tidemill.hosts.pumps import IncomingChannel
        from tidemill.transports.local import LocalBell
        from tidemill.transports.slots import SlotConsumer, SlotProducer

        segment = LocalSegment()
        self.consumer = SlotConsumer(segment, LocalBell())
        self.life = IncomingChannel(0, 1, SlotProducer(segment, LocalBell()))
        self.life.take_offer(Offer(0, 1, {"x": Field((8,), "int64")}, (), 4, 64))

    def take(self, position, data):
        slots = -(-(position + len(data)) // 64)
        self.life.take(Piece(0, 1, position, slots), memoryview(data))


@pytest.mark.parametrize(
    ("position", "nbytes"), [(0, 0), (0, 320), (64, 64), (1 << 62, 64), (0, messages.PIECE_BYTES + 64)]
)
def test_a_piece_that_does_not_fit_writes_nothing(position, nbytes):
    channel = Alone()
    with pytest.raises(SchemaError, match="edge 0 sends"):
        channel.take(position, bytes([1]) * nbytes)
    assert channel.consumer.attach() and channel.consumer.waiting() == 0
    assert not any(channel.consumer.memory)


def test_a_piece_may_not_overwrite_what_is_not_released():
    channel = Alone()
    channel.take(0, bytes(256))
    with pytest.raises(SchemaError, match="256 have room"):
        channel.take(256, bytes([1]) * 64)
    assert channel.consumer.attach() and not any(channel.consumer.memory)
    channel.consumer.take()
    channel.consumer.release()
    channel.take(256, bytes([1]) * 64)
    with pytest.raises(SchemaError, match="320 have room"):
        channel.take(320, bytes([1]) * 64)


@pytest.mark.parametrize("slots", [-1, 0, 5])
def test_a_piece_may_not_be_of_more_slots_than_there_are_nor_of_fewer_than_it_fills(slots):
    channel = Alone()
    with pytest.raises(SchemaError, match=f"of {slots} slots of 64"):
        channel.life.take(Piece(0, 1, 0, slots), memoryview(bytes([1]) * 64))
    assert channel.consumer.attach() and not any(channel.consumer.memory)


def test_what_was_sent_and_has_not_come_whole_is_counted(hosts, closing):
    carrier = closing(Carrier())
    ends = join(*hosts, carrier.relay)
    channel = Channel(*ends, hosts)
    crossing = Crossing(hosts[1], [Edge("samples/s/a/0/t", "channel", "a", ("t",))], {}, "there", {}, {})
    lost = LostSamples()
    channel.offer(40_000)  # three pieces each
    channel.put()
    until(channel.get, *hosts)
    until(channel.drained, *hosts)
    data = carrier.relays[1]
    data.most = data.carried + 1_000_000  # it stops in the midst of the second one from now on
    while channel.put():
        pass
    until(lambda: channel.incoming.received % channel.outgoing._nbytes, *hosts)
    carrier.cut()
    whole = channel.incoming.whole
    assert crossing.came(ends[1]) == [(0, 1, whole, 5)] and 1 <= whole < 5
    lost.came("here", crossing.came(ends[1]), crossing.edges)
    assert lost.take() == [Loss("a", 1, "here", 5 - whole)]
    while channel.get():  # what has come whole is read
        pass
    assert channel.taken == whole
    lost.sent("here", [(0, 1, channel.outgoing.slots)], crossing.edges)
    assert lost.take() == []  # it was known before
    lost.sent("here", [(0, 1, channel.outgoing.slots + 2)], crossing.edges)
    assert lost.take() == [Loss("a", 1, "here", 2)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slots": 0}, "0 slots for a channel"),
        ({"slots": 1 << 20}, "slots for a channel"),
        ({"nbytes": 128}, "slots of 128 bytes where its fields take 64"),
        ({"schema": {}}, "slots of 64 bytes where its fields take 0"),
        ({"schema": {"x": Field((8,), "object")}}, "impossible field"),
        ({"schema": {"x": Field((-8,), "int64")}}, "impossible field"),
        ({"schema": {"x": Field((1 << 50,), "int64")}}, "impossible field"),
        ({"schema": {"x": Field((1 << 27,), "int64")}, "nbytes": 1 << 30, "slots": 1 << 12}, "are free"),
        (
            {"schema": {f"x{i}": Field((), "int8") for i in range(5)}, "nbytes": 320, "slots": 1 << 16},
            "asks for 327,680 arrays, and 262,144 may be",
        ),
        ({"schema": {"x": Field((4,), "int64")}}, "offered anew"),
    ],
)
def test_an_offer_that_cannot_be_makes_no_memory(change, told):
    from tidemill.core.memory import LocalSegment
    from tidemill.hosts.pumps import IncomingChannel
    from tidemill.transports.local import LocalBell
    from tidemill.transports.slots import SlotProducer

    segment = LocalSegment()
    life = IncomingChannel(0, 1, SlotProducer(segment, LocalBell()))
    good = Offer(0, 1, {"x": Field((8,), "int64")}, (), 4, 64)
    if told == "offered anew":
        life.take_offer(good)
    offer = Offer(**{name: change.get(name, getattr(good, name)) for name in good.__struct_fields__})
    with pytest.raises(SchemaError, match=told):
        life.take_offer(offer)
    if told != "offered anew":
        assert segment.attach() is None


@pytest.mark.parametrize(("error", "own"), [(NoRoom("no memory"), True), (SchemaError("garbage"), False)])
def test_whoever_has_no_room_for_an_offer_hangs_up_by_its_own_fault(hosts, monkeypatch, error, own):
    at_here, _ = join(*hosts)

    def take(line, frames):
        raise error

    monkeypatch.setattr(at_here, "_take", take)
    until(lambda: at_here.ended, *hosts)
    assert str(error) in at_here.ended and at_here.by_own_fault is own


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_an_offer_whose_memory_cannot_be_had_is_one_without_room(monkeypatch, error):
    from tidemill.hosts.pumps import IncomingChannel

    def make(offer):
        raise error

    life = IncomingChannel(0, 1, None)
    monkeypatch.setattr(life, "_make", make)
    with pytest.raises(NoRoom, match=r"the offer of edge 0 cannot be had: .*memory"):
        life.take_offer(Offer(0, 1, {"x": Field((8,), "int64")}, (), 4, 64))


def test_messages_come_back_as_they_were_and_garbage_is_none():
    position = Position(1, 2, 3, 4, ((5, 6),))
    for message in (
        Hello(1, [position]),
        Positions([position]),
        Lease(1.5, 0.0),
        Offer(1, 2, {"x": Field((3,), "int8")}, (4,), 5, 6),
    ):
        assert unpack(pack(message)) == message
    piece = Piece(1, 2, 3, -1)
    assert unpack_piece(piece.pack()) == piece
    chance = random.Random(3)
    for length in (0, 1, 31, 33, 1000):
        garbage = chance.randbytes(length)
        with pytest.raises(SchemaError):
            unpack(garbage)
        with pytest.raises(SchemaError):
            unpack_piece(garbage)
    with pytest.raises(SchemaError, match="cannot be"):
        unpack_piece(Piece(0, 1, 1 << 63, 0).pack())


class Plain:
    """Somebody with ZeroMQ."""

    def __init__(self):
        self.context = zmq.Context()

    def close(self):
        self.context.destroy(linger=0)


class Stranger(Plain):
    """Somebody who calls host `here` by hand, over both connections, and says hello."""

    def __init__(self, ports, keys, server):
        super().__init__()
        self.lines = []
        for port in ports:
            line = self.context.socket(zmq.DEALER)
            line.curve_publickey, line.curve_secretkey, line.curve_serverkey = *keys, server
            line.routing_id, line.linger = b"host", 0
            line.connect(f"tcp://{LOOPBACK}:{port}")
            line.send(pack(Hello(1)))
            self.lines.append(line)


BAD = {
    "garbage": (1, [b"\xc1garbage"], "cannot be read"),
    "three frames": (1, [b"a", b"b", b"c"], "3 frames"),
    "a short header": (1, [b"short", b"data"], "begins with 5 bytes"),
    "an edge that is not there": (1, [Piece(77, 1, 0, 0).pack(), b"data"], "it sends edge 77"),
    "a life that nobody waits for": (1, [Piece(0, 2, 0, 0).pack(), b"data"], "in life 2"),
    "nothing offered": (1, [Piece(0, 1, 0, 0).pack(), b"data"], "has offered nothing"),
    "an offer of a life": (1, [pack(Offer(0, 9, {}, (), 1, 64))], "in life 9"),
    "a lease on data": (1, [pack(Lease(1.0, 0.0))], "does not belong here"),
    "an offer on control": (0, [pack(Offer(0, 1, {}, (), 1, 64))], "does not belong here"),
    "positions of nobody's edge": (1, [pack(Positions([Position(5, 1, 0)]))], "it reads edge 5"),
    "more received than sent": (1, [pack(Positions([Position(1, 1, 640)]))], "of which 0 were sent"),
    "more released than received": (1, [pack(Positions([Position(1, 1, 0, 3)]))], "3 slots of edge 1"),
    "a word beyond the next": (0, [pack(Word(3, b"x", True))], "where 0 is next"),
    "a word that is too long": (
        0,
        [pack(Word(0, bytes(messages.WORD_BYTES + 1), True))],
        "come at once but for the last",
    ),
    "an empty word before the last": (0, [pack(Word(0, b"", False))], "word 0 of 0 bytes"),
    "a clock that is no number": (0, [pack(Lease(float("nan"), 0.0))], "its clock shows nan"),
    "words that were never told": (0, [pack(Lease(1.0, 0.0, 7))], "has 7 words"),
    "a word on data": (1, [pack(Word(0, b"x", True))], "does not belong here"),
    "a frame of more than a piece": (
        1,
        [Piece(0, 1, 0, 0).pack(), bytes(messages.PIECE_BYTES + 1)],
        "edge 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_message_that_does_not_fit_ends_that_connection_by_name(hosts, closing, case):
    here, there = hosts
    line, frames, told = BAD[case]
    keys = Keys.new()
    peer, ports = here.listen("stranger", keys.public, LOOPBACK)
    at_here, at_there = join(here, there)
    good = Channel(at_there, at_here, (there, here))
    good.offer(1)
    bad = Channel(None, peer, (here, here), number=0)
    Channel(peer, None, (here, here), number=1)
    stranger = closing(Stranger(ports, keys, here.keys.public))
    until(lambda: peer.hellos == 2, here)
    stranger.lines[line].send_multipart(frames)
    until(lambda: peer.ended, here)
    assert told in peer.ended and peer.ended.startswith(f"stranger/{('control', 'data')[line]}: ")
    assert bad.consumer.attach() is False
    good.put()
    until(good.get, here, there)  # others go on


def test_a_key_that_is_not_on_the_list_and_noise_are_kept_out(hosts, closing):
    here, there = hosts
    peer, ports = here.listen("friend", Keys.new().public, LOOPBACK)
    closing(Stranger(ports, Keys.new(), here.keys.public))
    until(lambda: len(here.refused) >= 2, here)
    assert all("its key" in text and "is not on the list" in text for text in here.refused)
    assert {text.split()[4] for text in here.refused} == {"friend/control,", "friend/data,"}
    noisy = [closing(socket.create_connection((LOOPBACK, port))) for port in ports]
    for connection in noisy:
        connection.sendall(os.urandom(100_000))
    unencrypted = closing(closing(Plain()).context.socket(zmq.DEALER))
    unencrypted.linger = 0
    unencrypted.connect(f"tcp://{LOOPBACK}:{ports[1]}")
    unencrypted.send(pack(Hello(5)))
    at_here, at_there = join(here, there)
    channel = Channel(at_there, at_here, (there, here))
    channel.offer(1)
    channel.put()
    until(channel.get, here, there)
    assert peer.hellos == 0 and not peer.ended
    # who is refused learns that it is
    other = closing(Host("other"))
    at_other = other.call("here", here.keys.public, LOOPBACK, ports)
    until(lambda: "key" in at_other.lost, here, other)


def test_strangers_fill_no_memory():
    context = zmq.Context()
    door, asks = Door(context), context.socket(zmq.REQ)
    asks.connect("inproc://zeromq.zap.01")
    for number in range(150):
        address = f"10.0.0.{number}".encode()
        asks.send_multipart([b"1.0", b"1", b"friend/data", address, b"", b"CURVE", bytes(32)])
        door.answer()
        assert asks.recv_multipart()[2] == b"400"
    assert len(door.refused) == 101 and sum(door.refused.values()) == 150
    for each in (asks, door.socket):
        each.close(0)
    context.term()


def test_a_host_that_is_dropped_is_let_in_no_more_and_its_name_may_be_another_s(hosts, closing):
    here, there = hosts
    join(here, there)
    until(lambda: here.others["there"].hellos == 2, *hosts)
    here.drop("there")
    other = closing(Host("there"))
    _, ports = here.listen("there", other.keys.public, LOOPBACK)  # before it has turned
    here.turn(0.0)
    assert set(here._door.admitted.values()) == {other.keys.public}
    peer = other.call("here", here.keys.public, LOOPBACK, ports)
    until(lambda: peer.hellos == 2, here, other)
    here.drop("there")
    here.turn(0.0)
    assert here._door.admitted == {}


def test_what_a_host_cannot_be_told_at_once_is_named_here(hosts):
    here, there = hosts
    at_here, _ = join(here, there)
    until(lambda: at_here.hellos == 2, *hosts)
    at_here._say(at_here.lines[1], Positions([Position(0, 1, 0)] * (messages.FRAME_LIMIT // 4)))
    assert "a Positions of " in at_here.ended and "1,048,576 come at once" in at_here.ended
    here.turn(0.0)  # and what is left to say is not


def test_a_caller_tells_a_host_with_another_key_from_the_one_it_means(hosts):
    here, there = hosts
    _, ports = here.listen("there", there.keys.public, LOOPBACK)
    at_there = there.call("here", Keys.new().public, LOOPBACK, ports)
    until(lambda: at_there.lost, here, there)
    assert at_there.hellos == 0


@pytest.mark.parametrize(("ports", "key"), [((1, -3), None), ((1, 1), b"?"), ((1, 1), b"%" * 40)])
def test_a_port_or_key_that_cannot_be_ends_that_connection_alone(hosts, ports, key):
    here, there = hosts
    join(here, there)
    third = there.call("third", key or Keys.new().public, LOOPBACK, ports)
    until(lambda: third.ended and there.others["here"].round_trip_s is not None, *hosts)
    assert "third/" in third.ended and "cannot be called at 127.0.0.1" in third.ended
    assert there.others["here"].ended == ""


def test_hosts_are_let_in_by_the_hundred(closing):
    """Each takes descriptors, of which a process may have few before it asks for more,
    and sockets of ZeroMQ, which has a bound of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 600
    if 0 <= hard < 16 * many:
        pytest.skip(f"a process may have {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        host = closing(Host("many"))
        for number in range(many):
            host.listen(f"h{number}", Keys.new().public, LOOPBACK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "::", ""])
def test_no_socket_listens_on_all_addresses(hosts, address):
    with pytest.raises(ConfigError, match="all of this host's"):
        hosts[0].listen("there", hosts[1].keys.public, address)


def test_an_address_of_another_host_is_an_error(hosts):
    with pytest.raises(ConfigError, match="give the address of this host"):
        hosts[0].listen("there", hosts[1].keys.public, "192.0.2.1")


def test_a_new_life_of_a_writer_comes_after_what_the_one_before_committed(hosts):
    ends = directions(hosts)[0]
    old = Channel(*ends, epoch=1)
    old.offer(1)
    for _ in range(3):
        old.put()
    new = Channel(*ends, epoch=2)
    new.offer(1)
    new.put()
    until(lambda: old.get() and old.taken == 3, *hosts)
    until(new.get, *hosts)
    assert ends[1].outdated == 0


@pytest.mark.parametrize("rows", [1, 20_000])
def test_a_channel_goes_on_to_the_next_agent_of_its_reader_from_what_was_not_released(hosts, closing, rows):
    first, second = hosts
    at_first, at_second = join(first, second)
    channel = Channel(at_first, at_second, hosts)
    channel.offer(rows)
    for _ in range(6):  # so that it goes on in the middle of its ring
        assert channel.put()
        until(channel.get, *hosts)
    until(channel.drained, *hosts)
    assert channel.put() and channel.put()
    until(lambda: channel.get(release=False), *hosts)  # one that it holds is lost with it
    at_first.part()
    at_second.end("it is lost")
    third = closing(Host("third"))
    at_first, at_third = join(first, third)
    new = Channel(None, at_third, (first, third))
    new.slots, new.producer, new.outgoing = 4, channel.producer, channel.outgoing.anew()
    new.sent, new.taken = channel.sent, 6
    at_first.send(new.outgoing)
    for _ in range(20):
        until(new.put, first, third)
        until(new.get, first, third)
    until(new.drained, first, third)
    assert new.taken == new.sent == 28


def test_what_a_void_life_sends_is_dropped_and_counted(hosts):
    ends = source, target, _ = directions(hosts)[0]
    old = Channel(*ends, epoch=1)
    old.offer(1)
    old.put()
    until(old.get, *hosts)
    new = Channel(None, None, ends[2], epoch=4)
    target.receive(new.incoming, void=True)
    old.put()  # whose writer does not know yet that it is void
    until(lambda: target.outdated, *hosts)
    source.send(new.outgoing, void=True)
    new.offer(1)
    new.put()
    until(new.get, *hosts)
    assert not old.get() and not source.ended and not target.ended


def test_a_host_may_be_told_of_a_new_life_before_the_one_that_sends(hosts):
    ends = source, target, _ = directions(hosts)[0]
    old = Channel(*ends, epoch=1)
    old.offer(1)
    old.put()
    until(old.get, *hosts)
    new = Channel(None, target, ends[2], epoch=2)
    for _ in range(100):
        for host in hosts:
            host.turn(0.0005)
    source.send(new.outgoing)
    new.offer(1)
    new.put()
    until(new.get, *hosts)


def test_a_slot_that_was_released_is_free_once_the_cell_has_come_that_was_written_before(hosts):
    ends, back = directions(hosts)
    channel = Channel(*ends)
    cell = Cell(*back, number=5)
    channel.incoming.after = [cell.outgoing]
    channel.offer(1)
    cell.writer.offer({"w": Field((2_000_000,), "float64")})  # 16 MB: many pieces
    until(lambda: cell.outgoing.newest() == -1 and cell.reader.attach(), *hosts)
    channel.put()
    until(lambda: channel.get(release=False), *hosts)
    for version in range(1, 4):
        cell.writer.write({"w": np.full(2_000_000, version)}, version)
        channel.consumer.release()
        until(lambda: channel.producer.free() == 4, *hosts)
        assert cell.reader.newest() >= version
        channel.put()
        until(lambda: channel.get(release=False), *hosts)


def test_a_release_waits_for_versions_of_a_cell_s_next_life_that_begin_lower(hosts):
    """As those of an exact run that goes back to a cut."""
    ends, back = directions(hosts)
    value = lambda version: {"w": np.full(2_000_000, version)}  # noqa: E731
    schema = {"w": Field((2_000_000,), "float64")}
    old = Cell(*back, number=5)
    old.writer.offer(schema)
    old.writer.write(value(120), 120)
    until(lambda: old.reader.attach() and old.reader.newest() == 120, *hosts)
    new = Cell(*back, number=5, epoch=2)
    new.writer.offer(schema)
    new.writer.write(value(100), 100)
    until(lambda: new.reader.attach() and new.reader.newest() == 100, *hosts)
    channel = Channel(*ends)
    channel.incoming.after = [new.outgoing]
    channel.offer(1)
    until(channel.put, *hosts)
    until(lambda: channel.get(release=False), *hosts)
    new.writer.write(value(101), 101)
    channel.consumer.release()
    until(lambda: channel.producer.free() == 4, *hosts)
    assert new.reader.newest() == 101


def test_what_is_given_back_waits_for_what_the_last_word_names_alone():
    """A cell that is not to come is left out of it."""
    freed = list[int]()
    slots: Any = SimpleNamespace(release_read=freed.append)
    outgoing = OutgoingChannel(0, 1, slots)
    versions = {7: 3, 9: 0}
    outgoing._release(1, ((7, 2), (9, 1)))
    outgoing._release(3, ((7, 4), (9, 2)))
    outgoing.settle(versions.__getitem__)
    assert freed == []
    outgoing._release(4, ((7, 3),))
    outgoing._release(5, ((7, 4),))
    outgoing.settle(versions.__getitem__)
    assert freed == [4]
    versions[7] = 4
    outgoing.settle(versions.__getitem__)
    assert freed == [4, 1]


def test_a_cell_is_taken_on_from_whoever_hands_it_on_next(hosts):
    source, target, bells = directions(hosts)[0]
    cell = Cell(source, target, bells)
    value = lambda version: {"w": np.full(1000, float(version))}  # noqa: E731
    cell.writer.offer({"w": Field((1000,), "float64")})
    cell.writer.write(value(5), 5)
    until(lambda: cell.reader.attach() and cell.reader.newest() == 5 and not cell.outgoing.behind, *hosts)
    outgoing, incoming = cell.outgoing.anew(), cell.incoming.anew()
    target.receive(incoming, void=True)
    source.send(outgoing, void=True)
    until(lambda: incoming.version == 5, *hosts)  # the same one, once more
    cell.writer.write(value(7), 7)
    until(lambda: cell.reader.newest() == 7, *hosts)
    read = value(0)
    assert cell.reader.read(read) == 7 and (read["w"] == 7).all()
    late = incoming.anew()
    with pytest.raises(SchemaError, match="is offered as"):
        late.take_offer(Offer(1, 1, {"w": Field((10,), "float64")}, (), 0, 128))
    late.take_offer(incoming.offered)
    with pytest.raises(SchemaError, match="sends version 6 of its value, after 6"):
        late.take(Piece(1, 1, 0, 6), memoryview(bytes(8000)))  # it has had a newer one


def test_a_cell_has_arrived_once_it_has_where_it_is_handed_on(hosts):
    source, target, bells = directions(hosts)[0]
    cell, there = Cell(source, target, bells), False
    cell.incoming._onward = lambda: there
    cell.writer.offer({"w": Field((10,), "float64")})
    until(cell.reader.attach, *hosts)
    for _ in range(20):
        for host in hosts:
            host.turn(0.0)
    assert not cell.outgoing.arrived
    there = True
    target._cells.stirred = True  # as where the next host says so
    until(lambda: cell.outgoing.arrived, *hosts)


def test_silence_of_a_line_is_noticed_and_the_host_is_called_anew(hosts, closing):
    here, there = hosts
    carrier = closing(Carrier())
    at_here, at_there = join(here, there, carrier.relay)
    channel = Channel(at_here, at_there, (here, there))
    channel.offer(1)
    channel.put()
    until(channel.get, here, there)
    until(lambda: at_there.round_trip_s is not None and at_here.round_trip_s is not None, here, there)
    until(lambda: 0 < at_there.round_trip_s < 5, here, there)  # it is measured on and on
    control = carrier.relays[0]
    control.frozen = True
    until(lambda: "not been heard" in at_there.lost, here, there)
    control.frozen = False
    until(lambda: at_there.hellos >= 4, here, there)
    channel.put()
    until(channel.get, here, there)


def test_an_edge_tells_for_how_long_something_is_under_way(hosts):
    at_here, at_there = join(*hosts)
    channel = Channel(at_here, at_there, hosts)
    cell = Cell(at_here, at_there, hosts)
    cell.writer.offer({"w": Field((), "float64")})
    channel.offer(1)
    cell.writer.write({"w": np.ones(())}, 1)
    channel.put()
    until(lambda: channel.get(release=False), *hosts)
    until(lambda: not any(flow.under_way for flow in at_here.flows.values()), *hosts)
    nbytes = [flow.sent_bytes for flow in at_here.flows.values()]
    assert nbytes == [channel.outgoing.sent, cell.outgoing.sent] and all(nbytes)
    before = [flow.under_way_s for flow in at_here.flows.values()]
    time.sleep(0.01)  # what is there, and not released, is not under way
    hosts[0].turn(0.0)
    assert [flow.under_way_s for flow in at_here.flows.values()] == before
    channel.put()
    hosts[0].turn(0.0)  # and nobody turns the other host
    time.sleep(0.05)
    hosts[0].turn(0.0)
    after = [flow.under_way_s for flow in at_here.flows.values()]
    assert after[0] >= before[0] + 0.05 and after[1] == before[1]


def test_a_host_that_is_silent_is_looked_at_often_and_leases_are_told_in_time(hosts):
    at_here, at_there = join(*hosts)
    until(lambda: at_here.round_trip_s is not None and at_there.round_trip_s is not None, *hosts)
    for peer in (at_here, at_there):
        peer.tick()
        due = peer._next_lease - peer._looked
        assert 0 < peer.patience_s == due <= tidemill.hosts.peer.LEASE_S
        peer.heard -= 3
        assert 0 < peer.patience_s <= tidemill.hosts.peer.WATCH_S


_DIES = """
import os, sys, time
from tests.hosts.hosts import Cell, Channel, Host, LOOPBACK
from tidemill.hosts.connections import Door, Keys
host = Host("there")
print(host.keys.public.decode(), flush=True)
key, *ports = input().split()
peer = host.call("here", key.encode(), LOOPBACK, tuple(map(int, ports)))
channel = Channel(peer, None, (host, host))
channel.offer(40_000)
while True:
    channel.put()
    host.turn(0.001)
"""


def test_a_host_that_is_killed_leaves_whole_slots_and_the_others_go_on(hosts):
    here, other = hosts
    child = subprocess.Popen(
        [sys.executable, "-c", _DIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    key = child.stdout.readline().strip()
    peer, ports = here.listen("there", key.encode(), LOOPBACK)
    channel = Channel(None, peer, (here, here))
    at_here, at_other = here.listen("other", other.keys.public, LOOPBACK)
    channel2 = other.call("here", here.keys.public, LOOPBACK, at_other)
    good = Channel(channel2, at_here, (other, here))
    good.offer(128)
    print(here.keys.public.decode(), *ports, file=child.stdin, flush=True)
    until(lambda: channel.get() and channel.taken == 20, here, other)
    child.send_signal(signal.SIGKILL)
    child.wait()
    taken = good.taken

    def goes_on() -> bool:
        good.put()
        good.get()
        channel.get()  # what it had sent before
        return good.taken > taken + 100 and tidemill.hosts.peer.now() > peer.heard + 1

    until(goes_on, here, other)  # of the dead one nothing more is heard
    assert not peer.ended
    child.stdin.close()
    child.stdout.close()
