"""Hosts in one process, and edges between them."""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from benchmarks.networks import Network, NotAllowed

from tidemill.core.memory import LocalSegment
from tidemill.core.schema import Field
from tidemill.hosts.peer import Peer
from tidemill.hosts.pumps import IncomingCell, IncomingChannel, OutgoingCell, OutgoingChannel
from tidemill.hosts.wire import Wire
from tidemill.transports.local import LocalBell
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter

LOOPBACK = "127.0.0.1"
ROW = {"number": Field((), "int64"), "row": Field((), "int64")}


def needs_namespaces(why: str) -> None:
    """Skip a test, unless this machine must be one that can have it."""
    if os.environ.get("TIDEMILL_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"TIDEMILL_REQUIRE_CLUSTER=1, and {why}")
    pytest.skip(why)


@contextmanager
def networked(hosts: int) -> Iterator[Network]:
    """Hosts with a network each, where that is allowed."""
    try:
        network = Network(hosts)
    except NotAllowed as error:
        needs_namespaces(str(error))
    with network:
        yield network


class Host(Wire):
    """A host whose bell is made with it."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        super().__init__(name, EventBell(self.descriptor))

    def close(self) -> None:
        super().close()
        os.close(self.descriptor)


def until(done: Callable[[], object], *hosts: Wire, seconds: float = 60.0) -> None:
    """Turn the hosts by turns until it is so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to be so"
        for host in hosts:
            host.turn(0.002)


def join(
    first: Host, second: Host, relay: Callable[[int], int] = int, address: str = LOOPBACK
) -> tuple[Peer, Peer]:
    """Have `second` call `first`, by way of `relay` if there is one. Return each as the
    other knows it. `address`: of `first`."""
    at_first, (control, data) = first.listen(second.name, second.keys.public, address)
    at_second = second.call(first.name, first.keys.public, address, (relay(control), relay(data)))
    return at_first, at_second


class Channel:
    """A channel from one host to another, as the workers at its two ends hold it."""

    def __init__(
        self, source: Peer | None, target: Peer | None, bells: Sequence[Wire], number: int = 0, epoch: int = 1
    ):
        """`source`: the reading host, as the writing one knows it; `target`: the
        reverse, None where only one side is here; `bells`: of the writing host and the
        reading one."""
        near, far = LocalSegment(), LocalSegment()
        writer, reader = (host.bell for host in bells)
        self.producer = SlotProducer(near, writer)
        self.consumer = SlotConsumer(far, reader)
        self.outgoing = OutgoingChannel(number, epoch, SlotConsumer(near, LocalBell()))
        self.incoming = IncomingChannel(number, epoch, SlotProducer(far, LocalBell()))
        if target is not None:
            target.receive(self.incoming)
        if source is not None:
            source.send(self.outgoing)
        self.sent = self.taken = 0

    def offer(self, rows: int, slots: int = 4) -> None:
        self.slots = slots
        self.producer.offer(ROW, (rows,), slots)

    def put(self) -> bool:
        """Commit a slot that tells its number in every row, if one is free."""
        slot = self.producer.reserve()
        if slot is None:
            return False
        slot["number"][:] = self.sent
        slot["row"][:] = range(len(slot["row"]))
        self.producer.commit()
        self.sent += 1
        return True

    def get(self, release: bool = True) -> bool:
        """Take the slot that is there, if one is, and look at every cell of it."""
        if not self.consumer.attach() or (slot := self.consumer.take()) is None:
            return False
        assert (slot["number"] == self.taken).all(), (slot["number"][0], self.taken)
        assert (slot["row"] == range(len(slot["row"]))).all()
        self.taken += 1
        if release:
            self.consumer.release()
        return True

    def drained(self) -> bool:
        """Take all that is there. True when that was all, and the producer knows."""
        while self.get():
            pass
        return self.taken == self.sent and self.outgoing.drained() and self.producer.free() == self.slots


class Cell:
    """A cell from one host to another."""

    def __init__(self, source: Peer, target: Peer, bells: Sequence[Wire], number: int = 1, epoch: int = 1):
        near, far = LocalSegment(), LocalSegment()
        self.writer = SlotWriter(near, [bells[0].bell])
        self.reader = SlotReader(far)
        self.outgoing = OutgoingCell(number, epoch, SlotReader(near))
        self.incoming = IncomingCell(number, epoch, SlotWriter(far, [LocalBell()]))
        bells[1].expect(number)
        target.receive(self.incoming)
        source.send(self.outgoing)


class Relay:
    """A line between two hosts that can be cut. It carries bytes from a port of its own
    to the one that is called, a piece at a time, and counts them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server((LOOPBACK, 0))
        self.port = self._door.getsockname()[1]
        self._ends = dict[socket.socket, socket.socket]()
        self.carried, self.most = 0, sys.maxsize
        self.frozen = False

    def carry(self) -> None:
        """Carry what there is, unless the line is frozen, or has carried `most` bytes."""
        if self.frozen or self.carried >= self.most:
            return
        readable = select.select([self._door, *self._ends], [], [], 0)[0]
        for end in readable:
            if end is self._door:
                near = self._door.accept()[0]
                far = socket.create_connection((LOOPBACK, self._target))
                self._ends |= {near: far, far: near}
            elif end in self._ends:
                try:
                    data = end.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if data:
                    self.carried += len(data)
                    with suppress(ConnectionError):
                        self._ends[end].sendall(data)
                else:
                    self._close(end)

    def _close(self, end: socket.socket) -> None:
        other = self._ends.pop(end)
        del self._ends[other]
        end.close()
        other.close()

    def cut(self) -> None:
        """Cut what is connected: what was under way is lost."""
        while self._ends:
            self._close(next(iter(self._ends)))

    def close(self) -> None:
        self.cut()
        self._door.close()


class Carrier(threading.Thread):
    """Carries what relays have, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.relays: list[Relay] = []
        self._lock, self._ended = threading.Lock(), False
        self.start()

    def relay(self, port: int) -> int:
        """Return the port of a new relay to `port`."""
        with self._lock:
            self.relays.append(Relay(port))
        return self.relays[-1].port

    def run(self) -> None:
        while not self._ended:
            with self._lock:
                for relay in self.relays:
                    relay.carry()
            time.sleep(0.0005)

    def cut(self) -> None:
        """Cut all lines in whatever they carry just now."""
        with self._lock:
            for relay in self.relays:
                relay.cut()

    def close(self) -> None:
        self._ended = True
        self.join()
        for relay in self.relays:
            relay.close()
