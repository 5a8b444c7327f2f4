"""The wire: a host's connections to others, and the pumps of the edges that cross hosts.

One thread turns it (`WireThread`). It sleeps on its bell, which workers ring who hold an
end of such an edge, and on its sockets.
"""

import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from tidemill.core.descriptors import allow_descriptors
from tidemill.core.errors import ConfigError, place
from tidemill.core.memory import keep_freed
from tidemill.hosts.connections import Door, HostConnection, Keys
from tidemill.hosts.orders import Traffic
from tidemill.hosts.peer import LEASE_S, Peer
from tidemill.hosts.pumps import CellsHere
from tidemill.transports.shared import EventBell

_THREADS = 2  # of ZeroMQ: one for control, which waits for no data
_SOCKETS = 1 << 14  # of ZeroMQ at most: six for each host that is called
_DESCRIPTORS = 10  # of one host, with those of the sockets' own threads
PARTS = ("control", "data")
"""The two connections to each other host."""


class Wire:
    """A wire joins this host with others.

    name: this host's name
    bell: what wakes it; the ends that workers hold of edges that cross hosts ring it
    keys: this host's, of this life
    others: the other hosts, by name
    """

    def __init__(self, name: str, bell: EventBell) -> None:
        self.name, self.bell = name, bell
        self.keys = Keys.new()
        self.others: dict[str, Peer] = {}
        self._cells = CellsHere()
        self._context = zmq.Context(_THREADS)
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        self._door = Door(self._context)
        # not ZeroMQ's poller, which asks each socket of it by calls of the system
        self._poll = select.epoll()
        self._waking = bell.descriptor, self._door.socket.fileno()
        for descriptor in self._waking:
            self._poll.register(descriptor, select.EPOLLIN)
        self._listening: dict[str, Sequence[HostConnection]] = {}
        self._before = Traffic()  # with those that were dropped
        self._tasks = deque[Callable[[], None]]()
        keep_freed()  # pieces come in memory of their own, and go

    def _connections(self, other: str) -> list[HostConnection]:
        if other in self.others:
            raise ConfigError(f'host "{other}" is joined already; each host has a name of its own')
        allow_descriptors(_DESCRIPTORS, f"connections to host {other}", "take fewer hosts")
        return [
            HostConnection(self._context, self.keys, f"{other}/{part}", i, self._poll)
            for i, part in enumerate(PARTS)
        ]

    @property
    def refused(self) -> dict[str, int]:
        """What was told of those whose key is not on the list, and how often."""
        return self._door.refused

    @property
    def traffic(self) -> Traffic:
        """What this host has told others and heard of them, so far."""
        peers, before = list(self.others.values()), self._before
        return Traffic(
            before.sent + sum(p.sent_bytes for p in peers),
            before.received + sum(p.received_bytes for p in peers),
            before.said + sum(p.said for p in peers),
        )

    def listen(
        self, other: str, key: bytes, address: str, joined: bool = True
    ) -> tuple[Peer, tuple[int, int]]:
        """Wait for host `other`, which has this public key, to call at an address of this
        host. Return it and the two ports. `joined`: see `Peer`. Raises `ConfigError`."""
        control, data = self._connections(other)
        peer = Peer(other, control, data, self._cells)
        peer.joined = joined
        try:
            ports = control.listen(address, self._door, key), data.listen(address, self._door, key)
        except ConfigError:
            peer.end("it cannot be listened for")
            raise
        self.others = {**self.others, other: peer}  # another one: its thread goes through it
        return peer, ports

    def call(self, other: str, key: bytes, address: str, ports: tuple[int, int], joined: bool = True) -> Peer:
        """Call host `other`, which listens at these ports and has this public key, and
        have this one turn for it. Return it. `joined`: see `Peer`."""
        control, data = self._connections(other)
        peer = Peer(other, control, data, self._cells, (address, ports, key))
        peer.joined = joined
        self.others = {**self.others, other: peer}
        self.bell.ring()
        return peer

    def drop(self, other: str) -> None:
        """Hang up on a host for good, with the next turn, and know it no more."""
        peer, before = self.others[other], self._before
        self._before = Traffic(
            before.sent + peer.sent_bytes, before.received + peer.received_bytes, before.said + peer.said
        )
        self.others = {name: each for name, each in self.others.items() if name != other}
        self.do(partial(peer.end, "it is not of the run any more"))

    def tell(self, other: str, message: bytes) -> None:
        """Tell a host something (`Words`), and have this one turn for it."""
        self.others[other].words.tell(message)
        self.bell.ring()

    def expect(self, cell: int) -> None:
        """Wait for the first version of a cell's next life, which may be lower than the
        last one of its life before. For the thread that turns this."""
        self._cells.versions[cell] = -1

    def do(self, task: Callable[[], None]) -> None:
        """Have the thread that turns this do something, with the next turn."""
        self._tasks.append(task)
        self.bell.ring()

    def turn(self, seconds: float) -> None:
        """Sleep until there is something to do, at most `seconds`, and do it."""
        while self._tasks:
            self._tasks.popleft()()
        peers = [peer for peer in self.others.values() if not peer.ended]
        for peer in peers:
            peer.tick()
        lines = [(peer, line) for peer in peers for line in peer.lines]
        if any(line.connection.unread for _, line in lines) or any(peer.stirs for peer in peers):
            seconds = 0.0
        seconds = min([seconds, LEASE_S, *(peer.patience_s for peer in peers)])
        woken = {descriptor for descriptor, _ in self._poll.poll(seconds)}
        bell, door = self._waking
        rang = bell in woken
        if rang:
            self.bell.hear(0.0)
        if door in woken:
            self._door.answer()
        for peer, line in lines:
            connection = line.connection
            if (connection.descriptor in woken or connection.unread) and not peer.ended:
                peer.listen(line)
        stirred, self._cells.stirred = self._cells.stirred, False  # others may wait for what has come
        for peer in peers:
            if not peer.ended and (rang or stirred or peer.stirs):
                peer.pump()

    def close(self) -> None:
        """Hang up on all."""
        for peer in self.others.values():
            peer.end("this host closed")
        self._context.destroy(linger=0)
        self._poll.close()


class WireThread(threading.Thread):
    """A thread that turns a wire until it is ended.

    came: function that is called, in this thread, when there is something to read of what
        hosts have told
    error: what went wrong with the wire, None as long as nothing has
    """

    def __init__(self, wire: Wire, came: Callable[[], None]) -> None:
        super().__init__(name="wire", daemon=True)
        self._wire, self._came, self._over = wire, came, False
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over:
                self._wire.turn(LEASE_S)
                if any(peer.words.unread for peer in self._wire.others.values()):
                    self._came()
        except Exception as error:  # whoever waits for hosts must not wait for nothing
            self.error = error
            self._came()

    @property
    def failed(self) -> str:
        """What went wrong with the wire, "" as long as nothing has."""
        return f"{type(self.error).__name__}: {self.error}{place(self.error)}" if self.error else ""

    def end(self) -> None:
        """Have it end, and wait for that."""
        self._over = True
        self._wire.bell.ring()
        self.join(10 * LEASE_S)
