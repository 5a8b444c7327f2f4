"""Channel and Cell over a memory segment: used by the local transport (threads) and the
shared one (processes) alike.

Whoever dies and lives again (`Endpoints.renew`) writes into a new segment, and goes on
reading at the first slot that it had not released: what it had reserved is void, what it
had committed is read first, and what it held is there again.

Only the cost per message matters here: an index is one aligned 8-byte word, read and
written whole and in order (see `ordered_words`); data are written before the word that
announces them. Nothing is copied, packed or allocated per message.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod

import msgspec
import numpy as np

from tidemill.api.transport import Bell, Consumer, Endpoints, Handle, Link, Producer, Reader, Writer
from tidemill.core.errors import DeadlineError, SchemaError
from tidemill.core.memory import Segment
from tidemill.core.schema import ALIGNMENT, Arrays, Field, Schema, layout, views
from tidemill.transports.ordered_words import OrderedWords, words_of

Words = memoryview | OrderedWords
_WORDS = ALIGNMENT // 8
# Positions of words at the start of a segment, each on its own cache line so that the two
# ends do not fight over one.
_MAGIC, _HEAD, _TAIL = 0, _WORDS, 2 * _WORDS
_LENGTH = _MAGIC + 1  # bytes of the header's description
_PASSED = _TAIL + 1  # slots that were released, or are being sent on; the consumer's, as the tail is
_DESCRIPTION = 4 * ALIGNMENT  # byte offset of the description
_READY = 0x6C6C696D65646974  # "tidemill"
_NOTHING = memoryview(bytearray(8 * (_PASSED + 1))).cast("Q")  # words of a channel that nobody has offered
_DESCRIPTION_LIMIT = 1 << 20
_AXES = 32
_DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)) - {
    "float8"
} | {"bool"}


class _Description(msgspec.Struct):
    """What a segment's header says about the rest."""

    schema: dict[str, Field]
    lead: tuple[int, ...]
    slots: int


def _data_start(description_bytes: int) -> int:
    return _DESCRIPTION + -(-description_bytes // 4096) * 4096


def _create(segment: Segment, description: _Description, stride: int) -> tuple[memoryview, Words, int]:
    packed = msgspec.msgpack.encode(description)
    start = _data_start(len(packed))
    memory = segment.create(start + stride * description.slots)
    memory[_DESCRIPTION : _DESCRIPTION + len(packed)] = packed
    words = words_of(segment, memory[:_DESCRIPTION])
    words[_LENGTH] = len(packed)
    words[_MAGIC] = _READY
    return memory, words, start


_Offered = tuple[memoryview, Words, _Description, int]
"""What an end that offers has made: its memory, the words at its start, and where its
data begin."""


def _attach(segment: Segment) -> _Offered | None:
    memory = segment.attach()
    if memory is None or len(memory) < _DESCRIPTION:
        return None
    words = words_of(segment, memory[:_DESCRIPTION])
    if not words[_MAGIC]:
        return None
    if words[_MAGIC] != _READY:
        raise SchemaError(
            f"a shared segment begins with {words[_MAGIC]:#x} instead of {_READY:#x}: it is none of ours"
        )
    length = words[_LENGTH]
    if length > _DESCRIPTION_LIMIT or _DESCRIPTION + length > len(memory):
        raise SchemaError(f"a shared segment of {len(memory)} bytes claims a description of {length}")
    try:
        description = msgspec.msgpack.decode(
            bytes(memory[_DESCRIPTION : _DESCRIPTION + length]), type=_Description
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"a shared segment's description cannot be read: {error}") from None
    check_fields("a shared segment", description.schema, description.lead, len(memory))
    return memory, words, description, _data_start(length)


def check_fields(what: str, schema: Schema, lead: tuple[int, ...], most: int) -> None:
    """Raise `SchemaError` for a schema that another process tells of and that cannot be
    one: no types of numbers, or a field of more than `most` elements."""
    for name, field in schema.items():
        axes = (*lead, *field.shape)
        if (
            field.dtype not in _DTYPES
            or min(axes, default=0) < 0
            or len(axes) > _AXES
            or prod(max(n, 1) for n in axes) > most
        ):
            raise SchemaError(
                f'{what} describes an impossible field "{name}": {lead} + {field.shape} of {field.dtype!r}'
            )


class SlotProducer(Producer):
    """The sending end of a channel over a segment. `wake` is the consumer's bell.

    memory: the bytes of all slots, one behind the other, once it has offered
    """

    memory: memoryview

    def __init__(self, segment: Segment, wake: Bell) -> None:
        self._segment = segment
        self._ring: Callable[[], None] = wake.ring
        self._slots: list[Arrays] = []
        self._head = 0

    def offer(self, schema: Schema, lead: tuple[int, ...], slots: int) -> None:
        stride = layout(schema, lead)[1]
        memory, self._words, start = _create(self._segment, _Description(dict(schema), lead, slots), stride)
        self._slots = [views(schema, lead, memory, start + i * stride) for i in range(slots)]
        self._count = slots
        self.memory = memory[start : start + slots * stride]
        self._ring()

    def reserve(self) -> Arrays | None:
        head = self._head
        if head - self._words[_TAIL] >= self._count:
            return None
        return self._slots[head % self._count]

    def commit(self) -> None:
        self._head = self._words[_HEAD] = self._head + 1
        self._ring()

    def commit_written(self, slots: int) -> None:
        """Hand the next so many slots to the consumer, all of which were written through
        `memory`."""
        self._head = self._words[_HEAD] = self._head + slots
        self._ring()

    def free(self) -> int:
        return self._count - (self._head - self._words[_TAIL])

    def unreleased(self) -> list[Arrays]:
        return [self._slots[number % self._count] for number in range(self._words[_TAIL], self._head)]


class SlotConsumer(Consumer):
    """The receiving end of a channel over a segment. `wake` is the producer's bell.

    memory: the bytes of all slots, one behind the other, once it has attached
    """

    memory: memoryview

    def __init__(self, segment: Segment, wake: Bell) -> None:
        self._segment = segment
        self._ring: Callable[[], None] = wake.ring
        self._views: list[Arrays] = []
        self._taken = self._released = 0
        self._words: Words = _NOTHING
        self._renewed = deque[Segment]()  # those of the producer's later lives, in order
        self._steady = True  # the producer of this life offers, or has offered, and none comes after it
        self._outlived = 0  # slots held of earlier lives, to which nobody gives them back
        self._life = 0  # lives that it has gone over to

    def renew(self, segment: Segment) -> None:
        """Take from `segment`, which a new life of the producer writes, once all that was
        committed before is taken."""
        self._renewed.append(segment)
        self._steady = False

    def _next(self) -> tuple[int, _Offered] | None:
        """Return which of the producer's later lives comes next, and what it has offered;
        None before one has. All that lives before it have sent is there by then, from
        another host, too, whose wire offers a life behind them; until then there may be
        more of them."""
        if not any(_attach(segment) for segment in self._renewed):
            return None
        found = ((number, _attach(segment)) for number, segment in enumerate(self._renewed))
        return next((number, offered) for number, offered in found if offered is not None)

    def _go_over(self, number: int, offered: _Offered) -> None:
        """Go over to the life that comes next. Those between died before they offered."""
        for _ in range(number + 1):
            self._segment.close()
            self._segment = self._renewed.popleft()
        self._outlived += self._taken - self._released
        self._life += number + 1
        self._use(offered)

    def attach(self) -> bool:
        if self._views:
            return True
        later = self._next()
        if (offered := _attach(self._segment)) is not None:
            self._use(offered)
        elif later is not None:
            self._go_over(*later)
        return bool(self._views)

    def _use(self, offered: _Offered) -> None:
        """Take from what a life has offered. Raises `SchemaError`."""
        memory, words, description, start = offered
        schema, lead = getattr(self, "schema", description.schema), getattr(self, "lead", description.lead)
        if (schema, lead) != (description.schema, description.lead):
            raise SchemaError(
                f"a new life of a producer offers {description.lead} + {description.schema}, the one before "
                f"it offered {lead} + {schema}"
            )
        self.schema, self.lead = schema, lead
        stride = layout(self.schema, self.lead)[1]
        if not 0 < description.slots <= 1 << 16 or start + stride * description.slots > len(memory):
            raise SchemaError(
                f"{description.slots} slots of {stride} bytes do not fit a segment of {len(memory)} bytes"
            )
        self._words = words
        self._views = [
            views(self.schema, self.lead, memory, start + i * stride) for i in range(description.slots)
        ]
        self.slots = description.slots
        self.memory = memory[start : start + stride * description.slots]
        self._taken = self._released = self._words[_TAIL]

    def take(self) -> Arrays | None:
        taken = self._taken
        if self._words[_HEAD] <= taken:
            return None if self._steady else self._take_of_next_life()
        self._taken = taken + 1
        return self._views[taken % self.slots]

    def _take_of_next_life(self) -> Arrays | None:
        later = self._next()
        if not self._views:
            if not self.attach():
                return None
        elif self._words[_HEAD] <= self._taken:
            if later is None and self._renewed:
                return None
            if later is not None:
                self._go_over(*later)
        self._steady = not self._renewed
        return self.take()

    def release(self) -> None:
        if self._outlived:
            self._outlived -= 1
            return
        if self._released >= self._taken:
            raise SchemaError("release() without a slot held")
        self._released = self._words[_TAIL] = self._released + 1
        self._ring()

    def pass_on(self) -> None:
        if not self._outlived:  # nobody reads again what a life before had sent
            self._words[_PASSED] = self._released + 1

    def in_doubt(self) -> bool:
        return self._words[_PASSED] > self._taken

    def waiting(self) -> int:
        return self._words[_HEAD] - self._taken

    def life(self) -> int | None:
        return None if self._renewed else self._life

    def release_read(self, slots: int) -> None:
        """Give the next so many slots back, all of which were read through `memory` and
        none was taken."""
        self._taken = self._released = self._words[_TAIL] = self._released + slots
        self._ring()


# A cell has three buffers in turn. Each begins with a cache line of two words: the number
# of the write that began filling it, and of the one that finished. A reader that finds
# both equal before and after its copy has a whole value.
_BUFFERS = 3
_BEGUN, _ENDED, _VERSION = 0, 1, 2
_READ_TRIES = 1000


def _buffers(
    segment: Segment, memory: memoryview, start: int, schema: Schema, stride: int
) -> tuple[list[Words], list[Arrays]]:
    """Return the two words and the value of each buffer of a cell."""
    places = range(start, start + _BUFFERS * stride, stride)
    marks = [words_of(segment, memory[place : place + ALIGNMENT], "q") for place in places]
    return marks, [views(schema, (), memory, place + ALIGNMENT) for place in places]


class SlotWriter(Writer):
    """The writing end of a cell over a segment."""

    def __init__(self, segment: Segment, wake: Sequence[Bell]) -> None:
        self._segment = segment
        self._rings = [bell.ring for bell in wake]
        self._count = 0

    def offer(self, schema: Schema) -> None:
        stride = ALIGNMENT + layout(schema, ())[1]
        memory, self._words, start = _create(self._segment, _Description(dict(schema), (), _BUFFERS), stride)
        self._marks, self._values = _buffers(self._segment, memory, start, schema, stride)
        self._bytes = [
            memory[place + ALIGNMENT : place + stride]
            for place in range(start, start + _BUFFERS * stride, stride)
        ]
        for ring in self._rings:
            ring()

    def write(self, value: Arrays, version: int) -> None:
        count = self._begin()
        for name, array in self._values[count % _BUFFERS].items():
            array[...] = value[name]
        self.publish(version)

    def _begin(self) -> int:
        count = self._count + 1
        self._marks[count % _BUFFERS][_BEGUN] = count
        return count

    def begin(self) -> memoryview:
        """Return the bytes of the next value, which are written through this and then
        published. Until then readers find the one before."""
        return self._bytes[self._begin() % _BUFFERS]

    def publish(self, version: int) -> None:
        """Make the value that was begun the newest, under `version`."""
        count = self._count + 1
        marks = self._marks[count % _BUFFERS]
        marks[_VERSION] = version
        marks[_ENDED] = count
        self._count = self._words[_HEAD] = count
        for ring in self._rings:
            ring()


class SlotReader(Reader):
    """A reading end of a cell over a segment."""

    _words: Words
    _marks: list[Words]

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._renewed: Segment | None = None
        self._values: list[Arrays] = []

    def renew(self, segment: Segment) -> None:
        """Read from `segment`, which a new life of the writer writes, as soon as it has
        written; what the one before wrote counts until then."""
        if self._renewed is not None:
            self._renewed.close()
        self._renewed = segment

    def _go_over(self, renewed: Segment) -> None:
        """Go over to the new life of the writer, if it has written."""
        reader = SlotReader(renewed)
        if not reader.attach() or reader.newest() < 0:
            return
        if reader.schema != self.schema:
            raise SchemaError(
                f"a new life of a writer offers {reader.schema}, the one before it offered {self.schema}"
            )
        self._segment.close()
        self._segment, self._renewed = renewed, None
        self._words, self._marks, self._values = reader._words, reader._marks, reader._values

    def attach(self) -> bool:
        if self._values:
            return True
        if self._renewed is not None:  # the one before may have died before it offered
            self._segment.close()
            self._segment, self._renewed = self._renewed, None
        found = _attach(self._segment)
        if found is None:
            return False
        memory, words, description, start = found
        self.schema = description.schema
        stride = ALIGNMENT + layout(self.schema, ())[1]
        if start + stride * _BUFFERS > len(memory):
            raise SchemaError(
                f"{_BUFFERS} values of {stride} bytes do not fit a segment of {len(memory)} bytes"
            )
        self._words = words
        self._marks, self._values = _buffers(self._segment, memory, start, self.schema, stride)
        return True

    def newest(self) -> int:
        if self._renewed is not None:
            self._go_over(self._renewed)
        count = self._words[_HEAD]
        return self._marks[count % _BUFFERS][_VERSION] if count else -1

    def read(self, into: Arrays) -> int:
        if self._renewed is not None:
            self._go_over(self._renewed)
        for _ in range(_READ_TRIES):
            count = self._words[_HEAD]
            if count == 0:
                return -1
            marks, value = self._marks[count % _BUFFERS], self._values[count % _BUFFERS]
            if marks[_ENDED] == count:
                for name, array in value.items():
                    np.copyto(into[name], array)
                version = marks[_VERSION]
                if marks[_BEGUN] == count:
                    return version
        raise DeadlineError(
            f"a cell was rewritten {_READ_TRIES} times while it was read; its writer publishes faster than a "
            "copy takes"
        )


class SlotEndpoints(Endpoints):
    """The ends that one worker holds, over segments.

    edges: of each edge its segment, and the bells of those at the other end
    segment_of: how a handle that comes later, of an edge's new life, is reached
    """

    def __init__(
        self,
        bell: Bell,
        link: Link,
        edges: Mapping[str, tuple[Segment, Sequence[Bell]]],
        segment_of: Callable[[Handle], Segment] | None = None,
    ) -> None:
        self.bell, self.link, self._edges, self._segment_of = bell, link, dict(edges), segment_of
        self._read: dict[str, SlotConsumer | SlotReader] = {}  # those that this worker reads from

    def producer(self, edge: str) -> SlotProducer:
        segment, (wake,) = self._edges[edge]
        return SlotProducer(segment, wake)

    def consumer(self, edge: str) -> SlotConsumer:
        segment, (wake,) = self._edges[edge]
        consumer = self._read[edge] = SlotConsumer(segment, wake)
        return consumer

    def writer(self, edge: str) -> SlotWriter:
        return SlotWriter(*self._edges[edge])

    def reader(self, edge: str) -> SlotReader:
        reader = self._read[edge] = SlotReader(self._edges[edge][0])
        return reader

    def renew(self, edges: Mapping[str, Handle]) -> None:
        assert self._segment_of is not None, "nobody lives again here"
        for edge, handle in edges.items():
            old, bells = self._edges[edge]
            segment = self._segment_of(handle)
            self._edges[edge] = segment, bells
            if (end := self._read.get(edge)) is not None:
                end.renew(segment)
            else:
                old.close()
