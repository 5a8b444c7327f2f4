"""Files of TensorBoard events: records of bytes with their lengths and checksums, as
TensorFlow defines them (TFRecord, with CRC-32C). TensorBoard's own writer does the same,
but with its import comes half of a file system in the network, and it looks at a byte at
a time.
"""

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits in reverse
_BLOCK = 512  # bytes of which a checksum is computed at once


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
