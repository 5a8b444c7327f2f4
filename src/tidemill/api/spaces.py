"""Spaces as plain data: what an observation or an action looks like. No library is
imported before a space is wanted as one of its own."""

from collections.abc import Mapping
from math import isnan, prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays, Field, is_of_numbers

if TYPE_CHECKING:
    import gymnasium


class Box(msgspec.Struct, frozen=True, tag="box"):
    """A box space holds arrays of `shape` and `dtype`; `low` and `high` hold one bound
    per element, or a single one for all (infinite bounds as ±inf)."""

    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...] = (-float("inf"),)
    high: tuple[float, ...] = (float("inf"),)

    def bounds(self) -> tuple[Array, Array]:
        """Return (low, high), each float32 of `shape`."""
        low, high = (np.asarray(b, np.float32) for b in (self.low, self.high))
        return tuple(  # type: ignore[return-value]
            np.broadcast_to(b.reshape(()), self.shape) if b.size == 1 else b.reshape(self.shape)
            for b in (low, high)
        )


class Discrete(msgspec.Struct, frozen=True, tag="discrete"):
    """A discrete space holds the integers `start` … `start + n - 1`. Rows and policies
    use 0 … n-1; the environment adapter adds `start`."""

    n: int
    start: int = 0


class MultiDiscrete(msgspec.Struct, frozen=True, tag="multi_discrete"):
    """A multi-discrete space holds one integer 0 … nvec[i]-1 per branch."""

    nvec: tuple[int, ...]


class MultiBinary(msgspec.Struct, frozen=True, tag="multi_binary"):
    """A multi-binary space holds `n` bits."""

    n: int


class Dict(msgspec.Struct, frozen=True, tag="dict"):
    """A dict space holds named spaces."""

    spaces: dict[str, "Space"]


class Tuple(msgspec.Struct, frozen=True, tag="tuple"):
    """A tuple space holds spaces in order."""

    spaces: tuple["Space", ...]


MOST_ELEMENTS = 1 << 26
"""Of a row's value."""
Space = Box | Discrete | MultiDiscrete | MultiBinary | Dict | Tuple


class Spaces(msgspec.Struct, frozen=True):
    """The spaces of one policy: what it observes and how it acts."""

    observation: Space
    action: Space


def check_space(space: Space, name: str) -> None:
    """Raise `SchemaError` for a space that no row can hold: read from somewhere, it may
    say anything. Nothing is allocated."""
    for path, leaf in leaves(space, name).items():
        match leaf:
            case Box():
                elements = prod(leaf.shape)
                good = (
                    is_of_numbers(leaf.dtype)
                    and all(length >= 0 for length in leaf.shape)
                    and {len(leaf.low), len(leaf.high)} <= {1, elements}
                )
                good = good and not any(map(isnan, (*leaf.low, *leaf.high)))
            case Discrete():
                elements, good = 1, leaf.n >= 1
            case MultiDiscrete():
                elements, good = len(leaf.nvec), all(n >= 1 for n in leaf.nvec)
            case MultiBinary():
                elements, good = leaf.n, leaf.n >= 1
            case _:
                elements, good = 0, False
        if not good or elements > MOST_ELEMENTS:
            raise SchemaError(f"the space {path}, {str(leaf)[:200]}, cannot be: no row has such a value")


def field_of(space: Space) -> Field:
    """Return the array of one element of a leaf space: Discrete () int64, MultiDiscrete
    (k,) int64, MultiBinary (n,) int8, Box its own (float64 becomes float32)."""
    match space:
        case Box():
            return Field(space.shape, "float32" if space.dtype == "float64" else space.dtype)
        case Discrete():
            return Field((), "int64")
        case MultiDiscrete():
            return Field((len(space.nvec),), "int64")
        case MultiBinary():
            return Field((space.n,), "int8")
    cure = "Dict and Tuple have parts; one of Gymnasium goes through envs.spaces.from_gymnasium"
    raise SchemaError(f"{space!r} is no leaf of api.spaces: {cure}")


def choices_of(leaf: Space) -> tuple[int, ...]:
    """Return the number of choices in each branch of a leaf: (n,) of a Discrete, nvec of
    a MultiDiscrete, () of what an action mask says nothing about."""
    match leaf:
        case Discrete():
            return (leaf.n,)
        case MultiDiscrete():
            return leaf.nvec
    return ()


def flat_width(leaf: Space) -> int:
    """Return how many numbers a leaf is, flattened, with integers one-hot: as networks
    see it, and as many as they give of an action in it."""
    match leaf:
        case Box():
            return prod(leaf.shape)
        case MultiBinary():
            return leaf.n
    return sum(choices_of(leaf))


def leaves(space: Space, name: str) -> dict[str, Space]:
    """Return the leaf spaces of `space` by flat name: ``obs`` for a leaf,
    ``obs.position``, ``obs.0`` for the parts of Dict and Tuple.

    The names are the field names of rows, and the keys of the observation that a policy
    receives.
    """
    match space:
        case Dict():
            return {
                k: leaf
                for key, sub in space.spaces.items()
                for k, leaf in leaves(sub, f"{name}.{key}").items()
            }
        case Tuple():
            return {
                k: leaf
                for i, sub in enumerate(space.spaces)
                for k, leaf in leaves(sub, f"{name}.{i}").items()
            }
    return {name: space}


def schema_of_space(space: Space, name: str) -> dict[str, Field]:
    """Return the row fields of `space`, by the flat names of `leaves`."""
    return {k: field_of(leaf) for k, leaf in leaves(space, name).items()}


def write_leaves(value: Any, target: Arrays, index: Any, name: str) -> None:
    """Write one (nested) observation into ``target[leaf][index]``. `value` is an array,
    or a Mapping / sequence of them as its space is nested."""
    if name in target:
        target[name][index] = value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            write_leaves(part, target, index, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            write_leaves(part, target, index, f"{name}.{i}")
    else:
        raise SchemaError(f'no field "{name}" among {", ".join(target)}')


def to_gymnasium(space: Space) -> "gymnasium.Space[Any]":
    """Return the Gymnasium space that `space` describes."""
    from gymnasium import spaces

    match space:
        case Box():
            dtype = np.dtype(space.dtype)
            low, high = (
                np.full(space.shape, b[0]) if len(b) == 1 else np.reshape(b, space.shape)
                for b in (space.low, space.high)
            )
            return spaces.Box(low.astype(dtype), high.astype(dtype), space.shape, dtype.type)
        case Discrete():
            return spaces.Discrete(space.n, start=space.start)
        case MultiDiscrete():
            return spaces.MultiDiscrete(list(space.nvec))
        case MultiBinary():
            return spaces.MultiBinary(space.n)
        case Dict():
            return spaces.Dict({key: to_gymnasium(part) for key, part in space.spaces.items()})
        case Tuple():
            return spaces.Tuple([to_gymnasium(part) for part in space.spaces])
