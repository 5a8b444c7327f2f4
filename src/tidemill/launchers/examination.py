"""What a host is asked by ``tidemill doctor cluster``, and what two hosts find out about
the line between them. An engine starts the same agent as for a run (`launchers/host.py`);
its introduction says that it is to be looked over, and it does what stands here.

Down: `Look`, `Await`, `Join`, `MeasureLine`, `Leave`. Up: `Found`, `Awaits`,
`MeasuredLine`.
"""

import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tidemill.core.cores import cores
from tidemill.core.errors import SchemaError
from tidemill.core.memory import LocalSegment, available
from tidemill.core.schema import Field
from tidemill.hosts.messages import PIECE_BYTES
from tidemill.hosts.orders import Introduction
from tidemill.hosts.peer import IN_FLIGHT_BYTES, now
from tidemill.hosts.pumps import IncomingChannel, OutgoingChannel
from tidemill.hosts.wire import Wire
from tidemill.nets.choose_device import visible_gpus
from tidemill.transports.slots import SlotConsumer, SlotProducer

PINGS = 5
SECONDS = 0.5
"""Seconds for which bytes are sent from a host to another."""
REACH_S = 8.0
"""Seconds that two hosts have to reach each other."""
ALONE_S = 15.0  # seconds without a word of the runner after which a host gives up
_SLOTS = 2 * IN_FLIGHT_BYTES // PIECE_BYTES  # so that what is in flight bounds it
T = TypeVar("T")


class Look(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to say what the host has. `seen`: a file of the runner's; "" for none."""

    seen: str


class Found(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What a host has.

    versions: see `launchers.host.versions`
    clock: its wall clock (s)
    files: how many its processes may have open, -1 for any number
    memory: bytes that can be filled
    sees: whether it sees the file
    """

    cores: int
    gpus: int
    versions: dict[str, str]
    clock: float
    files: int
    memory: int
    sees: bool


class Await(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to wait for a host, which has this public key."""

    host: str
    key: str


class Awaits(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host is waited for at these ports."""

    host: str
    ports: tuple[int, int]


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to call a host that waits there."""

    host: str
    address: str
    ports: tuple[int, int]
    key: str


class MeasureLine(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to find out about the line to a host, which is told the same. `sends`:
    whether this one sends."""

    host: str
    sends: bool


class MeasuredLine(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the two have found: bytes per second that came, and seconds of a round trip,
    of either what this side knows; or why they do not reach each other."""

    host: str
    rate: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""


class Leave(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to end."""


Order = Look | Await | Join | MeasureLine | Leave
Report = Found | Awaits | MeasuredLine
_encoder = msgspec.msgpack.Encoder()
orders: "msgspec.msgpack.Decoder[Order]" = msgspec.msgpack.Decoder(Order)
reports: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)


def pack(message: Order | Report) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def read(wire: Wire, host: str, decoder: "msgspec.msgpack.Decoder[T]") -> T | None:
    """Return the next message that a host has told, or None. Raises `SchemaError`."""
    if (data := wire.others[host].words.read()) is None:
        return None
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"{len(data)} bytes of host {host} cannot be read: {error}") from None


def look(seen: str, versions: dict[str, str]) -> Found:
    """Return what this host has."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = -1 if files == resource.RLIM_INFINITY else files
    sees = bool(seen) and os.path.isfile(seen)
    return Found(cores(), visible_gpus(), versions, time.time(), files, available(), sees)


def measure_line(wire: Wire, order: MeasureLine) -> MeasuredLine:
    """Find out about the line to a host, which does the same. Nobody else turns the wire
    meanwhile."""
    peer = wire.others[order.host]
    segment = LocalSegment()
    # each end rings the wire, which is at the other one, and looks whom it is to pump
    producer, consumer = SlotProducer(segment, wire.bell), SlotConsumer(segment, wire.bell)
    outgoing = OutgoingChannel(0, 1, consumer)
    if order.sends:
        producer.offer({"data": Field((PIECE_BYTES,), "uint8")}, (), _SLOTS)
        peer.send(outgoing)
    else:
        peer.receive(IncomingChannel(0, 1, producer))
    peer.joined = True
    deadline = now() + REACH_S
    trips: list[float] = []
    asked = 0.0
    began, came = 0.0, 0
    while not peer.ended and now() < deadline:
        word = peer.words.read() if len(trips) < PINGS else None  # then comes what it has found
        if order.sends:
            if word is not None:
                trips.append(now() - asked)
            if (word is not None or not asked) and len(trips) < PINGS:
                asked = now()
                wire.tell(order.host, b"ping")
            while len(trips) == PINGS and producer.reserve() is not None:
                producer.commit()
            began = began or (now() if outgoing.received else 0.0)
        else:
            if word is not None:
                wire.tell(order.host, b"pong")
            while consumer.attach() and consumer.take() is not None:
                consumer.release()
                came += PIECE_BYTES if began else 0
                began = began or now()
        if began and now() > began + SECONDS:
            break
        wire.turn(0.005)
    seconds = now() - began
    if not began:
        why = peer.ended or peer.lost or f"nothing came within {REACH_S:.0f} s"
        return MeasuredLine(order.host, error=why)
    return MeasuredLine(order.host, came / max(seconds, 1e-9), min(trips, default=0.0))


def serve(wire: Wire, introduction: Introduction, versions: dict[str, str], gone: Callable[[], bool]) -> None:
    """Do what the runner orders until it says that this is over, or is gone. Raises
    `SchemaError`."""
    runner, address = introduction.runner, introduction.address
    peer = wire.call(
        runner, introduction.key.encode(), introduction.runner_address, introduction.ports, joined=False
    )
    while not (peer.ended or gone()) and now() - peer.heard < ALONE_S:
        wire.turn(0.2)
        match read(wire, runner, orders):
            case Look(seen):
                wire.tell(runner, pack(look(seen, versions)))
            case Await(host, key):
                _, ports = wire.listen(host, key.encode(), address, joined=False)
                wire.tell(runner, pack(Awaits(host, ports)))
            case Join(host, where, ports, key):
                wire.call(host, key.encode(), where, ports, joined=False)
            case MeasureLine() as order:
                wire.tell(runner, pack(measure_line(wire, order)))
            case Leave():
                return
