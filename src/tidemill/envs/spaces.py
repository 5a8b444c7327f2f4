"""Converts Gymnasium's spaces to Tidemill's, and back."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium

_CURE = (
    "use a wrapper (gymnasium.wrappers.TransformObservation or TransformAction) that turns it into Box, "
    "Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
)


def from_gymnasium(space: "gymnasium.Space[Any]", where: str = "space") -> Space:
    """Return `space` as plain data. Raises `ConfigError` naming `where` when it (or a
    part of it) is of a kind that has no array of fixed shape."""
    from gymnasium import spaces

    match space:
        case spaces.Box():
            if space.dtype is None or space.dtype.kind not in "fiub":
                raise ConfigError(f"{where} is a Box of {space.dtype}, which no row can hold; {_CURE}")
            return Box(
                tuple(map(int, space.shape)), space.dtype.name, _bounds(space.low), _bounds(space.high)
            )
        case spaces.Discrete():
            return Discrete(int(space.n), int(space.start))
        case spaces.MultiDiscrete():
            if space.nvec.ndim != 1 or np.any(space.start != 0):
                raise ConfigError(
                    f"{where} is {space}: a MultiDiscrete must have one axis and start at 0; {_CURE}"
                )
            return MultiDiscrete(tuple(map(int, space.nvec)))
        case spaces.MultiBinary():
            if len(space.shape) != 1:
                raise ConfigError(f"{where} is {space}: a MultiBinary must have one axis; {_CURE}")
            return MultiBinary(int(space.shape[0]))
        case spaces.Dict():
            for key in space.spaces:
                if not isinstance(key, str) or not key or "." in key:
                    raise ConfigError(
                        f"{where} has the key {key!r}; keys must be strings without a dot, since they become "
                        "names of fields. Rename it in a wrapper"
                    )
            return Dict({key: from_gymnasium(part, f"{where}.{key}") for key, part in space.spaces.items()})
        case spaces.Tuple():
            return Tuple(tuple(from_gymnasium(part, f"{where}.{i}") for i, part in enumerate(space.spaces)))
    cure = (
        "its picture alone is --wrap minigrid-image, picture and mission in one row --wrap minigrid-flat"
        if type(space).__module__.startswith("minigrid.")
        else _CURE
    )
    raise ConfigError(
        f"{where} is a {type(space).__name__} space ({space}), which has no array of fixed shape; {cure}"
    )


def spaces_of(env: Any, name: str) -> Spaces:
    """Return the spaces of a `gymnasium.Env` that messages call `name`."""
    return Spaces(
        from_gymnasium(env.observation_space, f"{name}: observation_space"),
        from_gymnasium(env.action_space, f"{name}: action_space"),
    )


def paths(space: Space) -> list[tuple[str | int, ...]]:
    """Return the keys that lead to each leaf of a (nested) observation, in the order of
    `tidemill.api.spaces.leaves`."""
    parts: list[tuple[str | int, Space]]
    match space:
        case Dict():
            parts = list(space.spaces.items())
        case Tuple():
            parts = list(enumerate(space.spaces))
        case _:
            return [()]
    return [(key, *rest) for key, part in parts for rest in paths(part)]


def nest(space: Space, parts: Iterator[Any]) -> Any:
    """Return the leaves `parts`, in the order of `leaves`, as the (nested) value that
    `space` describes."""
    match space:
        case Dict():
            return {key: nest(part, parts) for key, part in space.spaces.items()}
        case Tuple():
            return tuple([nest(part, parts) for part in space.spaces])
    return next(parts)


def action_caster(leaf: Space) -> Callable[[Any], "np.typing.NDArray[Any]"]:
    """Return what turns rows of actions of one leaf, [N, ...], into what Gymnasium is
    given: a fresh array, inside bounds, of the space's dtype."""
    match leaf:
        case Discrete(start=start):
            return (lambda array: array + start) if start else (lambda array: array.copy())
        case Box(dtype=dtype):
            low, high = leaf.bounds()
            return lambda array: np.clip(array, low, high).astype(dtype, copy=False)
        case MultiBinary():
            return lambda array: np.array(array, np.int8)
    return lambda array: np.array(array, np.int64)


def _bounds(bound: "np.typing.NDArray[Any]") -> tuple[float, ...]:
    """One number when all elements agree. What float32 cannot hold is no bound: many
    environments write the largest float64 for "none"."""
    largest = float(np.finfo(np.float32).max)
    values = [
        v if abs(v) <= largest else math.copysign(math.inf, v)
        for v in np.ravel(bound).astype(np.float64).tolist()
    ]
    return (values[0],) if len(set(values)) == 1 else tuple(values)
