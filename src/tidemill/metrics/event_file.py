"""Files of TensorBoard events: records of bytes with their lengths and checksums, as
TensorFlow defines them (TFRecord, with CRC-32C), each an `Event` of protocol buffers.
TensorBoard's own writer does the same, but with its import comes half of a file system in
the network, and it looks at a byte at a time; its messages bring protobuf, the largest
import of a command that trains.
"""

import struct
from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits in reverse
_BLOCK = 512  # bytes of which a checksum is computed at once


# ---- messages --------------------------------------------------------------------------
# The numbers of fields are those of TensorBoard's event.proto and summary.proto.

VERSION = "brain.Event:2"  # of the file's form: its first event says so
_START = 1  # SessionLog.START


def version_event(wall_time: float) -> bytes:
    """Return the event that every file begins with. `wall_time`: seconds since 1970."""
    return _event(wall_time) + _sized(3, VERSION.encode())


def start_event(wall_time: float, step: int) -> bytes:
    """Return the event of a run that goes on: TensorBoard hides what earlier files have
    from this step on."""
    return _event(wall_time, step) + _sized(7, _tag(1, _VARINT) + _varint(_START))


def scalars_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Return the event of what these scalars are at a step, as float32."""
    with np.errstate(over="ignore"):  # infinite, then
        packed = np.array([*scalars.values()], "<f4").tobytes()
    values = (
        _sized(1, name.encode()) + _tag(2, _FIXED32) + packed[4 * place : 4 * place + 4]
        for place, name in enumerate(scalars)
    )
    return _event(wall_time, step) + _sized(5, b"".join(_sized(1, value) for value in values))


_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5  # how a field is written


def _event(wall_time: float, step: int = 0) -> bytes:
    head = _tag(1, _FIXED64) + struct.pack("<d", wall_time)
    return head + _tag(2, _VARINT) + _varint(step) if step else head


def _sized(field: int, content: bytes) -> bytes:
    return _tag(field, _SIZED) + _varint(len(content)) + content


def _tag(field: int, how: int) -> bytes:
    return bytes([field << 3 | how])


def _varint(number: int) -> bytes:
    """Return a number of at least 0, seven bits to a byte, the lowest first."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


# ---- records ---------------------------------------------------------------------------


def framed(record: bytes) -> bytes:
    """Return a record as a file has it.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord
    """
    length = struct.pack("<Q", len(record))
    return b"".join((length, _number(_masked_checksum(length)), record, _number(_masked_checksum(record))))


def _number(value: int) -> bytes:
    return struct.pack("<I", value)


def _masked_checksum(data: bytes) -> int:
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data` (RFC 3720, B.4).

    The checksum of a block is the sum (XOR) of what each byte makes of it by itself, by
    how many bytes come after it; the checksum until then is added to the first four.
    """
    tables, state = _tables(), 0xFFFFFFFF
    for first in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - first), first)
        before, state = state.to_bytes(4, "little"), state >> 8 * min(4, len(block))
        block = block.copy()
        block[:4] ^= np.frombuffer(before, np.uint8, min(4, len(block)))
        after = np.arange(len(block) - 1, -1, -1)
        state ^= int(np.bitwise_xor.reduce(tables[after, block]))
    return state ^ 0xFFFFFFFF


@cache
def _tables() -> NDArray[np.uint32]:
    """Return what each byte [256] makes of a checksum, by how many bytes come after it
    [_BLOCK]."""
    one, polynomial = np.uint32(1), np.uint32(_POLYNOMIAL)
    table: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> one) ^ (table & one) * polynomial
    tables = [table]
    while len(tables) < _BLOCK:
        tables.append((tables[-1] >> 8) ^ table[tables[-1] & 0xFF])
    return np.stack(tables)
