"""Pumps: what moves the slots of a channel, and the values of a cell, from the memory of
the worker that writes them to that of the worker, on another host, that reads them.

Each end is ordinary shared memory for its worker. The pump at the writer's side reads the
committed bytes where they lie; the one at the reader's side writes them where the reader
looks for them, at the same place of a ring of as many slots. A slot is free for its
writer only when its reader has released it, so that what has not arrived is still there,
to be sent again, and nothing is kept besides.

A cell is sent like a channel of one slot: its newest value is copied out of it, as
versions that are written meanwhile are to be skipped, and the next one is looked for when
this one has arrived.
"""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidemill.core.errors import SchemaError
from tidemill.core.memory import LIMIT, available, size
from tidemill.core.schema import layout, views
from tidemill.hosts.messages import PIECE_BYTES, Offer, Piece, Position
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter, check_fields

_SLOTS = 1 << 16  # the most that a channel may have, as where it is attached
_ARRAYS = 1 << 18  # of all slots of a channel together


class NoRoom(SchemaError):
    """This host lacks the memory for what another one rightly offers."""


class Outgoing(ABC):
    """What one life of an edge's writer sends to one host.

    number, epoch: which edge, and which life of its writer
    sent: bytes that were sent, of all that this life has committed, and that no agent
        before had been told to be released
    received: how many of them the other host said that it has
    awaited: whether the other host has said that it waits for this life
    arrived: whether it has said that it has what the writer offers
    """

    _memory: memoryview

    def __init__(self, number: int, epoch: int) -> None:
        self.number, self.epoch = number, epoch
        self.sent = self.received = self._furthest = 0
        self.awaited = self.arrived = False
        self._offered = False
        self._skipped = 0  # bytes that an agent before has said to be released

    @abstractmethod
    def anew(self) -> "Outgoing":
        """Return what sends this life on to a new agent of the host, from the first slot
        on that was not released."""

    @abstractmethod
    def _offer(self) -> Offer | None:
        """Return what the writer has offered, or None as long as it has not."""

    @abstractmethod
    def _committed(self) -> int:
        """Return how many bytes may have been sent by now."""

    def _release(self, released: int, after: tuple[tuple[int, int], ...]) -> None:
        """So many slots were given back by the reader, who had written `after`."""

    def settle(self, version_of: Callable[[int], int]) -> None:
        """Give back to the writer what was released, once the cells' values are here that
        its reader wrote before. `version_of`: of a cell by its edge number."""

    def offer(self) -> Offer | None:
        """Return what the writer offers, if that is still to be told."""
        if self._offered or not self.awaited or (offer := self._offer()) is None:
            return None
        self._offered = True
        return offer

    def piece(self) -> tuple[Piece, memoryview] | None:
        """Return what is to be sent next, which counts as sent from then on, or None."""
        if not self._offered or (left := self._committed() - self.sent) <= 0:
            return None
        ring = len(self._memory)
        start = (self.sent + self._skipped) % ring
        part = self._memory[start : start + min(left, PIECE_BYTES, ring - self.sent % ring)]
        piece = Piece(self.number, self.epoch, self.sent, self._version())
        self.sent += len(part)
        self._furthest = max(self._furthest, self.sent)
        return piece, part

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """True while the other host lacks something that was committed."""

    @abstractmethod
    def _version(self) -> int:
        """Return the `version` of the piece that is sent."""

    def unsend(self, piece: Piece) -> None:
        """The piece could not be sent."""
        self.sent = piece.position

    def forget(self) -> None:
        """What was offered may not have come."""
        self._offered = False

    def hear(self, position: Position, anew: bool) -> None:
        """Take note of how far the other host is; `anew`: it has received nothing beyond,
        and what was sent since is to be sent again. Raises `SchemaError`."""
        if not 0 <= position.received <= self._furthest:
            raise SchemaError(
                f"it says that it has {position.received} bytes of edge {self.number}, of which "
                f"{self._furthest} were sent"
            )
        if not position.released * max(self._slot_bytes(), 1) <= position.received:
            raise SchemaError(
                f"it says that {position.released} slots of edge {self.number} are released, of which it has "
                f"{position.received} bytes"
            )
        self.awaited = True
        self.arrived |= position.offered
        self.received = max(self.received, position.received)
        self.sent = max(self.sent, self.received)
        if anew:
            self.sent = self.received
        self._release(position.released, position.after)

    @abstractmethod
    def _slot_bytes(self) -> int:
        """Return the bytes of a slot, 0 before it was offered."""

    def drained(self) -> bool:
        """True when the other host has all that this life has committed."""
        return self._offer() is None or self.received == self._committed()


class OutgoingChannel(Outgoing):
    """The sending pump of a channel. `slots` is the end from which it takes."""

    def __init__(self, number: int, epoch: int, slots: SlotConsumer) -> None:
        super().__init__(number, epoch)
        self._slots = slots
        self._nbytes = self._freed = 0
        self._released = deque[tuple[int, tuple[tuple[int, int], ...]]]()  # not freed yet, in order

    def anew(self) -> "OutgoingChannel":
        self.settle(lambda _: sys.maxsize)  # what it waits for comes no more
        new = OutgoingChannel(self.number, self.epoch, self._slots)
        new._skipped = self._skipped + self._freed * self._nbytes
        return new

    def _offer(self) -> Offer | None:
        if not self._slots.attach():
            return None
        channel = self._slots
        self._memory = channel.memory
        self._nbytes = len(self._memory) // channel.slots
        return Offer(self.number, self.epoch, dict(channel.schema), channel.lead, channel.slots, self._nbytes)

    def _slot_bytes(self) -> int:
        return self._nbytes

    @property
    def slots(self) -> int:
        """How many slots its writer has committed, of those that count in `sent`."""
        return self._freed + self._slots.waiting() if self._nbytes else 0

    def _committed(self) -> int:
        return self.slots * self._nbytes

    @property
    def under_way(self) -> bool:
        return self.received < self._committed()

    def _version(self) -> int:
        return self.slots

    def _release(self, released: int, after: tuple[tuple[int, int], ...]) -> None:
        last, awaited = self._released[-1] if self._released else (self._freed, ())
        if released > last:
            self._released.append((released, after))
        elif released == last and awaited:
            # it may wait for less by now: a cell that a lost host would hand on is left
            # out, and one whose writer lives again, from lower versions on, has a lower
            # one, or none yet
            now = dict(after)
            less = (
                (cell, least if now[cell] < 0 else min(least, now[cell]))
                for cell, least in awaited
                if cell in now
            )
            self._released[-1] = released, tuple(less)

    def settle(self, version_of: Callable[[int], int]) -> None:
        # the last one says all that is to be waited for: what is not to come is left out
        for number, (released, after) in reversed([*enumerate(self._released, 1)]):
            if all(version_of(cell) >= version for cell, version in after):
                self._slots.release_read(released - self._freed)
                self._freed = released
                for _ in range(number):
                    self._released.popleft()
                return


class OutgoingCell(Outgoing):
    """The sending pump of a cell, which reads the newest value from `cell`.

    version: the value that was sent, or is being sent; -1 before the first
    """

    def __init__(self, number: int, epoch: int, cell: SlotReader) -> None:
        super().__init__(number, epoch)
        self._cell = cell
        self.version = self._there = -1
        self._values = 0

    def anew(self) -> "OutgoingCell":
        return OutgoingCell(self.number, self.epoch, self._cell)

    @property
    def behind(self) -> int:
        """How many versions the other host's value is older than the newest, as far as it
        has said."""
        return max(self._cell.newest() - self._there, 0) if self._values else 0

    @property
    def known(self) -> bool:
        """Whether the other host has a value of this life, as far as it has said."""
        return self._there >= 0

    @property
    def under_way(self) -> bool:
        return self.behind > 0

    def hear(self, position: Position, anew: bool) -> None:
        super().hear(position, anew)
        if self._values and self.received == self._values * len(self._memory):
            self._there = self.version

    def _offer(self) -> Offer | None:
        if not self._cell.attach():
            return None
        schema = self._cell.schema
        nbytes = layout(schema, ())[1]
        if not self._values:
            self._memory = memoryview(bytearray(nbytes))
            self._arrays = views(schema, (), self._memory)
        return Offer(self.number, self.epoch, dict(schema), (), 0, nbytes)

    def newest(self) -> int:
        """Return the version that the cell has, -1 before the first write."""
        return self._cell.newest() if self._cell.attach() else -1

    def _slot_bytes(self) -> int:
        return 0

    def _version(self) -> int:
        return self.version

    def _committed(self) -> int:
        nbytes = len(self._memory)
        if self.received == self._values * nbytes and self._cell.newest() > self.version:
            self.version = self._cell.read(self._arrays)
            self._values += 1
        return self._values * nbytes


class Incoming(ABC):
    """What one life of an edge's writer, on another host, sends.

    number, epoch: which edge, and which life of its writer
    received: bytes that have come, in order
    repeated: bytes that came twice, and were dropped
    """

    def __init__(self, number: int, epoch: int) -> None:
        self.number, self.epoch = number, epoch
        self.received = self.repeated = 0
        self.offered: Offer | None = None
        self._told: Position | None = None

    @abstractmethod
    def _make(self, offer: Offer) -> None:
        """Make the memory that the reader waits for."""

    @abstractmethod
    def _room(self) -> int:
        """Return how many bytes may have come by now."""

    @abstractmethod
    def _write(self, data: memoryview, version: int) -> None:
        """Write the bytes that come next, all of one slot's ring or value."""

    @abstractmethod
    def position(self) -> Position:
        """Return how far this is."""

    def news(self) -> Position | None:
        """Return how far this is, unless that was told."""
        position = self.position()
        if position == self._told:
            return None
        self._told = position
        return position

    def forget(self) -> None:
        """What was told may not have come."""
        self._told = None

    def take_offer(self, offer: Offer) -> None:
        """Make room for what is offered. Raises `SchemaError` for what cannot be."""
        if self.offered is not None:
            if offer != self.offered:
                raise SchemaError(f"edge {self.number} is offered anew as {offer}, and was {self.offered}")
            return
        what = f"the offer of edge {self.number}"
        channel = isinstance(self, IncomingChannel)
        if not (1 <= offer.slots <= _SLOTS if channel else offer.slots == 0 and not offer.lead):
            raise SchemaError(f"{what} has {offer.slots} slots for a {'channel' if channel else 'cell'}")
        free = min(LIMIT, available())
        check_fields(what, offer.schema, offer.lead, free)
        nbytes = layout(offer.schema, offer.lead)[1]
        if not 0 < nbytes == offer.nbytes:
            raise SchemaError(f"{what} says slots of {offer.nbytes} bytes where its fields take {nbytes}")
        if (count := len(offer.schema) * offer.slots) > _ARRAYS:
            raise SchemaError(f"{what} asks for {count:,} arrays, and {_ARRAYS:,} may be")
        if nbytes * (offer.slots or 1) > free:
            raise NoRoom(
                f"{what} asks for {offer.slots or 1} slots of {size(nbytes)} where {size(free)} are free"
            )
        try:
            self._make(offer)
        except (OSError, MemoryError) as error:
            raise NoRoom(f"{what} cannot be had: {str(error) or 'no memory'}") from None
        self.offered = offer

    def take(self, piece: Piece, data: memoryview) -> None:
        """Write what has come where the reader finds it, and drop what came before.
        Raises `SchemaError` for what does not fit, of which nothing is written."""
        if self.offered is None:
            raise SchemaError(f"edge {self.number} sends bytes and has offered nothing")
        end = piece.position + len(data)
        if not 0 < len(data) <= PIECE_BYTES or end > self._room() or piece.position > self.received:
            raise SchemaError(
                f"edge {self.number} sends {len(data)} bytes from byte {piece.position} on, where byte "
                f"{self.received} is next, {self._room()} have room, and {PIECE_BYTES} may come at once"
            )
        ring = self.offered.nbytes * (self.offered.slots or 1)
        if piece.position // ring != (end - 1) // ring:
            raise SchemaError(f"edge {self.number} sends a piece that goes beyond the end of its ring")
        known = self.received - piece.position
        self.repeated += min(known, len(data))
        if known < len(data):
            self._write(data[known:], piece.version)
            self.received = end


class IncomingChannel(Incoming):
    """The receiving pump of a channel. `slots` is the end into which it puts.

    after: the cells, to the same host, whose values a release may not overtake
    told: how many slots the writer has said to have committed
    """

    def __init__(
        self, number: int, epoch: int, slots: SlotProducer, after: Sequence[OutgoingCell] = ()
    ) -> None:
        super().__init__(number, epoch)
        self._slots, self.after = slots, after
        self.told = 0

    def _make(self, offer: Offer) -> None:
        self._slots.offer(offer.schema, offer.lead, offer.slots)
        self._count, self._nbytes = offer.slots, offer.nbytes

    def _released(self) -> int:
        return self.received // self._nbytes - self._count + self._slots.free()

    def _room(self) -> int:
        return (self._released() + self._count) * self._nbytes

    @property
    def whole(self) -> int:
        """How many slots have come whole."""
        return 0 if self.offered is None else self.received // self._nbytes

    def _write(self, data: memoryview, version: int) -> None:
        if not self.received + len(data) <= version * self._nbytes <= self._room():
            raise SchemaError(
                f"edge {self.number} sends bytes until {self.received + len(data)} of {version} slots of "
                f"{self._nbytes}, where {self._room()} bytes have room"
            )
        self.told = max(self.told, version)
        memory = self._slots.memory
        start = self.received % len(memory)
        memory[start : start + len(data)] = data
        whole = (self.received + len(data)) // self._nbytes - self.received // self._nbytes
        if whole:
            self._slots.commit_written(whole)

    def position(self) -> Position:
        released = 0 if self.offered is None else self._released()
        # looked at after the release: who released had written them
        after = tuple((cell.number, cell.newest()) for cell in self.after)
        return Position(self.number, self.epoch, self.received, released, after, self.offered is not None)


class IncomingCell(Incoming):
    """The receiving pump of a cell, which writes into `cell`.

    version: the newest value that has come whole; -1 before the first
    """

    def __init__(
        self, number: int, epoch: int, cell: SlotWriter, onward: Callable[[], bool] = lambda: True
    ) -> None:
        """`onward`: whether the hosts that are handed it on have what is offered."""
        super().__init__(number, epoch)
        self._cell, self._onward = cell, onward
        self.version = self._coming = -1
        self._made: Offer | None = None

    def anew(self) -> "IncomingCell":
        """Return what takes this life from a new agent of the host from which it comes:
        its newest value may be the one that has come."""
        new = IncomingCell(self.number, self.epoch, self._cell, self._onward)
        new._made, new.version = self._made, max(self.version - 1, -1)
        return new

    def _make(self, offer: Offer) -> None:
        if self._made is None:
            self._cell.offer(offer.schema)
        elif offer != self._made:
            raise SchemaError(f"edge {self.number} is offered as {offer}, and was {self._made}")
        self._made, self._nbytes = offer, offer.nbytes

    def _room(self) -> int:
        return (self.received // self._nbytes + 1) * self._nbytes

    def _write(self, data: memoryview, version: int) -> None:
        start = self.received % self._nbytes
        if version <= self.version or (start and version != self._coming):
            raise SchemaError(
                f"edge {self.number} sends version {version} of its value, after {self.version} and within "
                f"{self._coming}"
            )
        if start == 0:
            self._memory, self._coming = self._cell.begin(), version
        self._memory[start : start + len(data)] = data
        if start + len(data) == self._nbytes:
            self._cell.publish(version)
            self.version = version

    def position(self) -> Position:
        offered = self.offered is not None and self._onward()
        return Position(self.number, self.epoch, self.received, offered=offered)


@dataclass
class CellsHere:
    """The cells that come to a host, from any other.

    versions: the newest of each that has come whole, by edge number; -1 before the first
    stirred: whether one has come, or an offer has come to where it is handed on, since
        the wire has looked
    """

    versions: dict[int, int] = field(default_factory=dict)
    stirred: bool = False
