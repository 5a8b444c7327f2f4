"""One leaf of observations and actions, between what many copies of an environment in Python take and return, and arrays with a row for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.api.spaces import Discrete, Space, field_of
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import Array
from tidemill.envs.spaces import action_caster


class LeafReader:
    """One leaf of the observation: from what the copies returned into one array. `path` are the keys that lead to it."""

    def __init__(self, name: str, path: tuple[str | int, ...], leaf: Space) -> None:
        self.name, self.path, self.field = name, path, field_of(leaf)
        self.start = leaf.start if isinstance(leaf, Discrete) else 0

    def write(self, observations: Sequence[Any], out: Array) -> None:
        """Fill `out`; raises when anything has not the declared shape, or a dtype that would lose something."""
        for key in self.path:
            observations = [observation[key] for observation in observations]
        if not self.field.shape:
            values = np.asarray(observations)
            np.copyto(out, values - self.start if self.start else values, casting="same_kind")
        elif out.flags.c_contiguous:
            # One call for all, without an array in between: their first axes laid end to end are the memory of `out`.
            np.concatenate(observations, out=out.reshape(-1, *out.shape[2:]))
        else:
            out[:] = np.concatenate(observations, dtype=out.dtype).reshape(out.shape)

    def write_some(self, observations: Sequence[Any], out: Array, rows: Array) -> None:
        """Fill those rows of `out`, one for each observation, and the others with zeros."""
        out[...] = 0
        if len(rows):
            some = np.empty((len(rows), *self.field.shape), out.dtype)
            self.write(observations, some)
            out[rows] = some

    def check(self, observation: Any, where: str, agent: str = "agent") -> None:
        """Raise `EnvironmentFault` when `observation` lacks this leaf or has another shape or dtype there."""
        for key in self.path:
            try:
                observation = observation[key]
            except (KeyError, IndexError, TypeError):
                raise EnvironmentFault(
                    f"{where}: the observation of agent {agent} has no part {key!r}, which its space declares: {brief(observation)}"
                ) from None
        value = np.asarray(observation)
        if value.shape != self.field.shape:
            raise EnvironmentFault(f"{where}: {self.name} of agent {agent} has shape {value.shape}; the observation space says {self.field.shape}")
        if not np.can_cast(value.dtype, self.field.dtype, "same_kind"):
            raise EnvironmentFault(f"{where}: {self.name} of agent {agent} has dtype {value.dtype}; the observation space says {self.field.dtype}")


class LeafWriter:
    """One leaf of the action: from one array to what each copy is given, and may keep.

    Scalars are numpy's, as `action_space.sample()` returns them: Gymnasium's `Discrete.contains`, which most environments call, takes 0.3 µs longer
    with Python's. `plain`: they are Python's, as what speaks JSON needs them.
    """

    def __init__(self, name: str, leaf: Space, plain: bool) -> None:
        self.name, self._cast, self._plain = name, action_caster(leaf), plain and field_of(leaf).shape == ()

    def column(self, array: Array) -> list[Any]:
        """Return one value per row: a number, or an array."""
        values = self._cast(array)
        return values.tolist() if self._plain else list(values)


def brief(value: Any) -> str:
    """Return a value as a message can hold it."""
    text = repr(value).replace("\n", " ")
    return text if len(text) < 100 else text[:100] + "…"
