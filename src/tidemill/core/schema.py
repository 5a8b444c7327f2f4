"""Schemas: what the arrays of a slot are called and how they lie in memory. Fixed at
start; nothing is allocated later."""

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import SchemaError

Array = NDArray[Any]
"""Any numpy array."""
Arrays = dict[str, NDArray[Any]]
"""Arrays by field name, e.g. ``{"obs": ..., "action": ...}``."""

ALIGNMENT = 64  # bytes: a cache line, so that two fields never share one


class Field(msgspec.Struct, frozen=True):
    """One named array of a schema: the shape of a single element (without leading axes)
    and its numpy dtype name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Schema = Mapping[str, Field]


def is_of_numbers(dtype: Any) -> bool:
    """True for the name of a type of numbers; numpy knows others, and some of any
    size."""
    return isinstance(dtype, str) and dtype in np.sctypeDict and np.dtype(dtype).kind in "biuf"


def layout(schema: Schema, lead: tuple[int, ...]) -> tuple[dict[str, int], int]:
    """Return the byte offset of each field with leading axes `lead`, and the total bytes,
    each field on its own cache line."""
    offsets, end = {}, 0
    for name, field in schema.items():
        offsets[name] = end
        end += -(-prod(lead) * field.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(schema: Schema, lead: tuple[int, ...], memory: memoryview, start: int = 0) -> Arrays:
    """Return arrays of shape `lead + field.shape` over `memory` from byte `start` on.
    Nothing is copied."""
    offsets, total = layout(schema, lead)
    if start + total > memory.nbytes:
        raise SchemaError(f"{total} bytes at {start} do not fit a memory of {memory.nbytes} bytes")
    return {
        name: np.ndarray(lead + field.shape, field.dtype, memory, start + offsets[name])
        for name, field in schema.items()
    }


def zeros(shape: int | tuple[int, ...], dtype: str) -> Array:
    """Return a zeroed array whose memory begins on a cache line of its own: threads that
    write parts of it, whole lines each, do not take them from each other."""
    count, size = int(np.prod(shape)), np.dtype(dtype).itemsize
    memory = np.zeros(count * size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count * size].view(dtype).reshape(shape)


def allocate(schema: Schema, lead: tuple[int, ...]) -> Arrays:
    """Return zeroed arrays of shape `lead + field.shape` in this process's own memory."""
    return {name: np.zeros(lead + field.shape, field.dtype) for name, field in schema.items()}


def schema_of(arrays: Mapping[str, Array]) -> dict[str, Field]:
    """Return the schema whose elements are the given arrays."""
    return {name: Field(tuple(a.shape), a.dtype.name) for name, a in arrays.items()}


def check_finite(arrays: Mapping[str, Array], infinities: bool = False) -> None:
    """Raise `SchemaError` for arrays that hold NaN or infinity. With `infinities` for NaN
    alone: modules of one's own may mask by them."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and (np.isnan(array).any() or (not infinities and np.isinf(array).any())):
            raise SchemaError(
                f"parameter {name} holds NaN or infinity: nothing can be played with it; take an earlier "
                "checkpoint or version"
            )


def poison(arrays: Mapping[str, Array]) -> None:
    """Fill arrays with values that no correct program reads: NaN, the smallest integer,
    255. Used in debug runs and tests."""
    for array in arrays.values():
        if array.dtype.kind == "f":
            array.fill(np.nan)
        elif array.dtype.kind == "i":
            array.fill(np.iinfo(array.dtype.name).min)
        elif array.dtype.kind == "u":
            array.fill(np.iinfo(array.dtype.name).max)
        else:
            array.fill(True)
