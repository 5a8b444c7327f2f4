"""What two hosts say to each other. Nothing else is understood, and nothing is unpickled.

Bytes of slots and of cells' values travel in pieces: a header (`Piece`) in a frame of its
own, and the bytes, as they lie in memory, in another. All else is one frame of typed
msgpack. What hosts tell each other besides (orders, and what workers say) goes in words,
which are numbered, too, and come once and in order.

Each direction of an edge is counted by two numbers that only grow: how many bytes of its
slots the reading host has received, and how many slots its worker has released. A
message that comes twice says what is known.
"""

import struct
from typing import NamedTuple

import msgspec

from tidemill.core.errors import SchemaError
from tidemill.core.schema import Field

PIECE_BYTES = 512 << 10
"""The most bytes of slots in one message: so many may an edge's wait behind another
edge's."""
WORD_BYTES = 32 << 10
"""The most bytes of a word: so many may a lease wait behind."""
FRAME_LIMIT = 2 * PIECE_BYTES
"""The most bytes of a frame that is read at all: who sends a longer one is hung up on by
ZeroMQ."""

_HEADER = struct.Struct("<QQQq")
_UNSIGNED = 1 << 63


class Piece(NamedTuple):
    """The header of a piece: the bytes of edge number `edge` from byte `position` on, of
    all that the life `epoch` of its writer has sent. `version` is that of a cell's value;
    in a channel it says how many slots the writer has committed by now."""

    edge: int
    epoch: int
    position: int
    version: int

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _HEADER.pack(*self)


class Position(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A position is how far the reading host of an edge has come in the life `epoch` of
    its writer.

    received: bytes that have come, in order
    released: slots that the worker who reads has given back
    after: edge numbers and versions of cells: the slots were released by somebody who had
        written these, and who finds a slot free finds these versions there
    offered: whether its memory is made there: what the writer offers has come
    """

    edge: int
    epoch: int
    received: int
    released: int = 0
    after: tuple[tuple[int, int], ...] = ()
    offered: bool = False


class Positions(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The message tells what has come and what was released since the last one."""

    positions: list[Position]


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The first message in each direction once a connection is there, or there anew:
    `session` counts these. Both sides send from `positions` on over data, and over
    control from the word after the `heard` ones that have come."""

    session: int
    positions: list[Position] = []
    heard: int = 0


class Offer(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The message says that the writer of an edge has offered, and what: `slots` of
    `nbytes` each, or a cell's value (0 slots)."""

    edge: int
    epoch: int
    schema: dict[str, Field]
    lead: tuple[int, ...]
    slots: int
    nbytes: int


class Lease(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The message says that its sender lives.

    clock: seconds on the sender's own clock
    echo: what the receiver's clock would show now as far as the sender knows: its last
        `clock`, and the time since that came; 0 before the first
    heard: words that have come from the receiver, of all its life
    """

    clock: float
    echo: float
    heard: int = 0


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A word is a part of what hosts tell each other: number `number` of all words that
    its sender has told, `WORD_BYTES` long at most. `last`: it ends what was told."""

    number: int
    part: bytes
    last: bool


Message = Positions | Hello | Offer | Lease | Word

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def unpack(data: bytes | memoryview) -> Message:
    """Return the message. Raises `SchemaError` for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"a message of {len(data)} bytes cannot be read: {error}") from None


def unpack_piece(data: bytes | memoryview) -> Piece:
    """Return the header of a piece. Raises `SchemaError` for anything else."""
    if len(data) != _HEADER.size:
        raise SchemaError(f"a piece begins with {len(data)} bytes in place of {_HEADER.size}")
    piece = Piece._make(_HEADER.unpack(data))
    if max(piece) >= _UNSIGNED:
        raise SchemaError(f"a piece has numbers that cannot be: {piece}")
    return piece
