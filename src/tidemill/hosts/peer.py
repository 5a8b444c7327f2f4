"""Another host: its two connections, and all edges between it and this one.

The host that calls says hello on each connection, with a number that grows; the one that
listens answers with the same number. Each tells how far it has come on every edge that it
reads, and both send from there on: what came after a connection was cut is not known to
who sent it, and comes again. Whatever the reading side knows already, it drops by its
position.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import zmq

from tidemill.core.errors import SchemaError
from tidemill.hosts.connections import TOO_MANY, HostConnection
from tidemill.hosts.messages import (
    FRAME_LIMIT,
    Hello,
    Lease,
    Message,
    Offer,
    Piece,
    Position,
    Positions,
    Word,
    pack,
    unpack,
    unpack_piece,
)
from tidemill.hosts.pumps import CellsHere, Incoming, IncomingCell, NoRoom, Outgoing, OutgoingCell
from tidemill.hosts.words import MOST_UNSAID_BYTES, Words

IN_FLIGHT_BYTES = 4 << 20
"""The most bytes that were sent to a host and that it has not said to have."""
LEASE_S = 0.5
"""Seconds between two leases."""
SILENCE_S = 2.0
"""Seconds without a word on control after which the host that calls calls anew."""
WATCH_S = 0.05
"""Seconds between two looks at a host that has said nothing for `SILENCE_S`."""
_MESSAGES = 32  # that are read at a time, so that one host does not keep others waiting


def now() -> float:
    """Return seconds on a clock that counts while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Line:
    """One of the two connections, and its session: how often hello was said. `answered`:
    both sides have said it."""

    def __init__(self, connection: HostConnection) -> None:
        self.connection = connection
        self.session = 0
        self.answered = False


@dataclass
class Flow:
    """What has gone over an edge to another host.

    sent_bytes: of all lives of its writer, with what was sent again
    """

    sent_bytes: int = 0
    # seconds until now, and since when again: one value, which another thread reads
    _under_way: tuple[float, float | None] = (0.0, None)

    @property
    def under_way(self) -> bool:
        """Whether something that its writer has committed has not come there."""
        return self._under_way[1] is not None

    @property
    def under_way_s(self) -> float:
        """For how many seconds that was so."""
        seconds, since = self._under_way
        return seconds if since is None else seconds + now() - since

    def note(self, under_way: bool) -> None:
        """Take note of whether it is so now."""
        seconds, since = self._under_way
        if under_way and since is None:
            self._under_way = seconds, now()
        elif since is not None and not under_way:
            self._under_way = seconds + now() - since, None


class Peer:
    """A peer is another host, as this one knows it.

    name: its name
    calls: where it is to be called: its address, ports and public key; None: it calls
    outgoing, incoming: lives of the edges between the two, by edge number, oldest first
    heard: when it said something on control for the last time, on this host's `now`
    round_trip_s: how long a lease and its echo were under way, without the wait between
        them
    sent_bytes, received_bytes: of data, so far
    flows: what has gone there over each edge, by its number
    said: messages on control, so far
    outdated: messages that came from lives before the current one, and were dropped
    joined: whether its edges are known: before, nothing is said over data
    words: what the two tell each other besides edges
    ended: why nothing is said to it any more; "" as long as it is
    by_own_fault: whether that is since this host had to say what cannot be said, or has
        no room for what the other one offers
    """

    def __init__(
        self,
        name: str,
        control: HostConnection,
        data: HostConnection,
        cells: CellsHere,
        calls: tuple[str, tuple[int, int], bytes] | None = None,
    ) -> None:
        """`cells`: of this host."""
        self.name, self.calls, self._cells = name, calls, cells
        self._control, self._data = _Line(control), _Line(data)
        self.outgoing: dict[int, deque[Outgoing]] = {}
        self.incoming: dict[int, deque[Incoming]] = {}
        self.heard = now()
        self.round_trip_s: float | None = None
        self.sent_bytes = self.received_bytes = self.said = self.outdated = self.hellos = 0
        self.ended = self.lost = ""
        self.flows: dict[int, Flow] = {}
        self._order = deque[int]()  # outgoing edges, the next in turn first
        self._early: dict[int, Position] = {}  # of lives that this host has not been told of yet
        self.joined, self.by_own_fault = True, False
        self._early_hello: Hello | None = None  # over data, when edges were not known
        self._dismissed = ""  # why the host is to be hung up on, by any thread
        self._stirred = True  # something has come, or was asked for, since it was pumped
        self.words = Words()
        self._their_clock = self._their_clock_at = 0.0
        self._next_lease = 0.0
        self._next_call = [0.0, 0.0]
        self._looked = self.heard

    @property
    def lines(self) -> tuple[_Line, _Line]:
        """Control, and data."""
        return self._control, self._data

    @property
    def repeated_bytes(self) -> int:
        """Bytes that came twice, and were dropped."""
        return sum(life.repeated for lives in self.incoming.values() for life in lives)

    @property
    def lag(self) -> int | None:
        """How many versions it is behind of the cell that this host sends it, of that
        which is furthest; None where it has none from here. Any thread may ask."""
        last = [lives[-1] for lives in list(self.outgoing.values()) if lives]
        behind = [life.behind for life in last if isinstance(life, OutgoingCell) and life.known]
        return max(behind, default=None)

    def send(self, life: Outgoing, void: bool = False) -> None:
        """Send what this life of an edge's writer commits, after what the one before has
        committed or, with `void`, in its place."""
        if life.number not in self.outgoing:
            self._order.append(life.number)
            self.flows.setdefault(life.number, Flow())
        lives = self.outgoing.setdefault(life.number, deque())
        if void:
            lives.clear()
        lives.append(life)
        self._stirred = True
        early = self._early.get(life.number)
        if early is not None and early.epoch == life.epoch:
            try:
                life.hear(self._early.pop(life.number), anew=True)
            except SchemaError as error:  # as where it comes in time: only this host is ended
                self.dismiss(str(error))

    def receive(self, life: Incoming, void: bool = False) -> None:
        """Take what this life of an edge's writer commits, after what the one before it
        has committed, or, with `void`, in its place: what comes of that is dropped. A
        cell's is expected before (`Wire.expect`)."""
        lives = self.incoming.setdefault(life.number, deque())
        if void:
            lives.clear()
        lives.append(life)
        self._stirred = True

    def dismiss(self, why: str) -> None:
        """Have the wire hang up on it with its next turn. Any thread may."""
        self._dismissed = why

    def call(self, line: _Line) -> None:
        """Say hello anew over a new call."""
        assert self.calls is not None
        address, ports, key = self.calls
        number = self.lines.index(line)
        try:
            line.connection.call(address, ports[number], key)
        except zmq.ZMQError as error:
            if error.errno in TOO_MANY:  # until others are closed
                self.lost, line.answered = f"this host cannot call it: {error}", False
                self._next_call[number] = now() + SILENCE_S
            else:  # another host has told a port or a key that cannot be
                why = f"it cannot be called at {address}, {ports[number]}: {error}"
                self.end(f"{line.connection.name}: {why}")
            return
        line.session, line.answered = line.session + 1, False
        self._next_call[number] = now() + SILENCE_S
        self._hello(line)

    def _hello(self, line: _Line) -> None:
        positions = []
        if line is self._data:
            positions = [life.position() for lives in self.incoming.values() for life in lives]
            for lives in self.incoming.values():
                for life in lives:
                    life.forget()
        self._say(line, Hello(line.session, positions, self.words.heard if line is self._control else 0))

    def _say(self, line: _Line, message: Message) -> bool:
        data = pack(message)
        if len(data) > FRAME_LIMIT:  # ZeroMQ over there would hang up, without a word
            what = f"a {type(message).__name__} of {len(data):,} bytes, and {FRAME_LIMIT:,} come at once"
            self.by_own_fault = True
            self.end(f"{line.connection.name}: this host has to tell it {what}")
            return False
        self.said += line is self._control
        return line.connection.send(data)

    @property
    def silence_s(self) -> float:
        """Seconds that it has said nothing on control, but for those in which this host
        could hear nothing: it was stopped (Ctrl-Z, SIGSTOP)."""
        return self._looked - self.heard

    @property
    def patience_s(self) -> float:
        """Seconds for which nobody need look at it, as long as nothing comes: until its
        next lease or, once it is silent, a moment, so that deadlines are kept that count
        its silence."""
        lease = self._next_lease - self._looked if self._control.answered else LEASE_S
        return max(min(lease, WATCH_S if self.silence_s > SILENCE_S else LEASE_S), 0.0)

    def part(self) -> None:
        """Give up all edges between the two: only words go on."""
        self.joined, self._early_hello = False, None
        self._data.connection.close()
        self._data.answered = False
        for kept in (self.outgoing, self.incoming, self._order, self._early):
            kept.clear()

    def end(self, why: str) -> None:
        """Hang up for good."""
        self.ended = why
        for line in self.lines:
            line.connection.close()
            line.answered = False

    # What comes.

    def listen(self, line: _Line) -> None:
        """Read what has come on one of the two connections. What does not fit ends
        both."""
        self._stirred = True
        try:
            line.connection.receive(lambda frames: self._take(line, frames), _MESSAGES)
        except SchemaError as error:
            self.by_own_fault = isinstance(error, NoRoom)
            self.end(f"{line.connection.name}: {error}")

    def _take(self, line: _Line, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) == 2 and line is self._data:
            if line.answered:
                self._take_piece(unpack_piece(frames[0].buffer), frames[1].buffer)
            return
        if len(frames) != 1:
            raise SchemaError(f"a message has {len(frames)} frames")
        message = unpack(frames[0].buffer)
        if line is self._control:
            self.heard = now()
        if isinstance(message, Hello) and line is self._data and not self.joined:
            self._early_hello = message
        elif isinstance(message, Hello):
            self._take_hello(line, message)
        elif not line.answered:
            pass  # of a session before, on a new connection
        elif isinstance(message, Lease) and line is self._control:
            if not (isfinite(message.clock) and isfinite(message.echo)):
                raise SchemaError(f"its clock shows {message.clock}, and ours {message.echo}")
            self._their_clock, self._their_clock_at = message.clock, self.heard
            if message.echo:
                self.round_trip_s = self.heard - message.echo
            self.words.take_heard(message.heard)
        elif isinstance(message, Word) and line is self._control:
            self.words.take(message)
        elif isinstance(message, Positions) and line is self._data:
            for position in message.positions:
                self._take_position(position, anew=False)
        elif isinstance(message, Offer) and line is self._data:
            self._take_offer(message)
        else:
            raise SchemaError(f"{message!r:.200} does not belong here")

    def _take_hello(self, line: _Line, message: Hello) -> None:
        if self.calls is None and message.session > line.session:
            line.session = message.session
        elif self.calls is None or line.answered or message.session != line.session:
            return  # of a session before
        line.answered = True
        self.hellos += 1
        self.lost = ""
        for lives in self.outgoing.values() if line is self._data else ():
            for life in lives:
                life.forget()
        for position in message.positions:
            self._take_position(position, anew=True)
        if line is self._control:
            self.words.take_heard(message.heard)
            self.words.again()
        if self.calls is None:
            self._hello(line)

    def _take_position(self, position: Position, anew: bool) -> None:
        lives = self.outgoing.get(position.edge)
        if lives is None:
            raise SchemaError(f"it reads edge {position.edge}, which does not lead to it")
        if (cells := len(position.after)) > (known := len(self._cells.versions)):
            raise SchemaError(f"it releases slots after {cells} cells, of {known}")
        if position.epoch < lives[0].epoch:
            self.outdated += 1
        elif position.epoch > lives[-1].epoch:
            self._early[position.edge] = position
        for life in lives:
            if life.epoch == position.epoch:
                arrived = life.arrived
                life.hear(position, anew)
                self._cells.stirred |= life.arrived != arrived

    def _lives(self, edge: int, epoch: int) -> deque[Incoming] | None:
        """Return the lives of an edge that may send, None where `epoch` is over."""
        lives = self.incoming.get(edge)
        if lives is None:
            raise SchemaError(f"it sends edge {edge}, which does not lead here")
        if epoch < lives[0].epoch:
            self.outdated += 1
            return None
        return lives

    def _take_offer(self, offer: Offer) -> None:
        lives = self._lives(offer.edge, offer.epoch)
        if lives is None:
            return
        if all(life.epoch != offer.epoch for life in lives):
            raise SchemaError(f"it offers edge {offer.edge} in life {offer.epoch}, which nobody waits for")
        while lives[0].epoch < offer.epoch:
            lives.popleft()
        lives[0].take_offer(offer)

    def _take_piece(self, piece: Piece, data: memoryview) -> None:
        lives = self._lives(piece.edge, piece.epoch)
        if lives is None:
            return
        life = lives[0]
        if piece.epoch != life.epoch:
            raise SchemaError(f"it sends edge {piece.edge} in life {piece.epoch}, which it has not offered")
        life.take(piece, data)
        self.received_bytes += len(data)
        known = self._cells.versions
        if life is lives[-1] and isinstance(life, IncomingCell) and life.version > known[piece.edge]:
            known[piece.edge], self._cells.stirred = life.version, True

    def _version_of(self, cell: int) -> int:
        if cell not in self._cells.versions:
            raise SchemaError(f"a slot is released after cell {cell}, which does not lead here")
        return self._cells.versions[cell]

    # What is sent.

    def tick(self) -> None:
        """Send the lease if it is due, or if much has come, and call anew whoever is not
        heard."""
        time_now = now()
        if time_now - self._looked > SILENCE_S:  # nobody turned the wire
            self.heard += time_now - self._looked
        self._looked = time_now
        if self.calls is not None:
            silent = self._control.answered and time_now - self.heard > SILENCE_S
            for number, line in enumerate(self.lines if self.joined else self.lines[:1]):
                if line.session == 0:
                    if time_now >= self._next_call[number]:
                        self.call(line)
                elif why := line.connection.lost():
                    wait = 0.0 if line.answered else LEASE_S
                    self.lost, line.answered = why, False
                    self._next_call[number] = min(self._next_call[number], time_now + wait)
                if silent and line.answered:
                    self.lost, line.answered = f"it has not been heard for {SILENCE_S:g} s", False
                    self._next_call[number] = time_now
                if not line.answered and time_now >= self._next_call[number]:
                    self.call(line)
                if self.ended:
                    return
        due = time_now >= self._next_lease or self.words.unsaid_bytes > MOST_UNSAID_BYTES
        if self._control.answered and due:
            # all at once, so that a host of many others is not woken for each
            self._next_lease, self.words.unsaid_bytes = (time_now // LEASE_S + 1) * LEASE_S, 0
            echo = self._their_clock + time_now - self._their_clock_at if self._their_clock else 0.0
            self._say(self._control, Lease(time_now, echo, self.words.heard))

    @property
    def stirs(self) -> bool:
        """Whether it is to be pumped though no worker has rung: something has come of it,
        was asked for, or waits until its edges are known."""
        return self._stirred or bool(self._dismissed) or (self.joined and self._early_hello is not None)

    def pump(self) -> None:
        """Send what there is, as far as the bytes in flight allow, an edge's piece in
        turn with others'; and tell what came and what was released."""
        self._stirred = False
        if self._dismissed:
            self.end(self._dismissed)
            return
        try:
            self._send_words()
        except SchemaError as error:
            self.end(f"{self._control.connection.name}: {error}")
            return
        try:
            if self.joined and self._early_hello is not None:
                hello, self._early_hello = self._early_hello, None
                self._take_hello(self._data, hello)
            if not self._data.answered:
                return
            self._settle()
        except SchemaError as error:
            self.end(f"{self._data.connection.name}: {error}")
            return
        told = [
            (life, position)
            for lives in self.incoming.values()
            for life in lives
            if (position := life.news()) is not None
        ]
        if told and not self._say(self._data, Positions([position for _, position in told])):
            for life, _ in told:
                life.forget()
        self._send_pieces()
        self._note_flows()

    def _send_words(self) -> None:
        # asked for in any case: it is bounded also while nobody is there
        while (word := self.words.next()) is not None and self._control.answered:
            if not self._say(self._control, word):
                return
            self.words.sent()

    def _settle(self) -> None:
        for lives in self.outgoing.values():
            lives[0].settle(self._version_of)
            while len(lives) > 1 and lives[0].drained():
                lives.popleft()

    def _send_pieces(self) -> None:
        window = IN_FLIGHT_BYTES - sum(lives[0].sent - lives[0].received for lives in self.outgoing.values())
        idle = 0
        while window > 0 and idle < len(self._order):
            number = self._order[0]
            self._order.rotate(-1)
            life = self.outgoing[number][0]
            if (offer := life.offer()) is not None and not self._say(self._data, offer):
                life.forget()
                return
            found = life.piece()
            if found is None:
                idle += 1
                continue
            piece, data = found
            if not self._data.connection.send(piece.pack(), data):
                life.unsend(piece)
                return
            idle = 0
            window -= len(data)
            self.sent_bytes += len(data)
            self.flows[number].sent_bytes += len(data)

    def _note_flows(self) -> None:
        for number, lives in self.outgoing.items():
            self.flows[number].note(lives[0].under_way)
