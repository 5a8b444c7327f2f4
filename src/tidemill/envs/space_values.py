"""One leaf of observations and actions, between what many copies of an environment in
Python take and return, and arrays with a row for each."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tidemill.api.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, field_of, leaves
from tidemill.core.errors import EnvironmentFault, fault_of, message_of
from tidemill.core.schema import Array, Arrays
from tidemill.envs.spaces import action_caster, nest, paths


class LeafReader:
    """One leaf of the observation: from what the copies returned into one array. `path`
    are the keys that lead to it."""

    def __init__(self, name: str, path: tuple[str | int, ...], leaf: Space) -> None:
        self.name, self.path, self.field, self.space = name, path, field_of(leaf), leaf
        self.start = leaf.start if isinstance(leaf, Discrete) else 0
        self._length = self.field.shape[0] if self.field.shape else 0
        self._lengths = {self._length}
        self._join = (
            np.concatenate
            if np.dtype(self.field.dtype).kind == "f"
            else partial(np.concatenate, casting="safe")
        )

    def write(self, observations: Sequence[Any], out: Array) -> None:
        """Fill `out`; raises when anything has not the declared shape, or a value that
        `out` cannot hold."""
        for key in self.path:
            observations = [observation[key] for observation in observations]
        # One call for all, without an array in between: their first axes laid end to end
        # are the memory of `out`, if each has the right length.
        if self._length and out.flags.c_contiguous and {*map(len, observations)} == self._lengths:
            try:
                self._join(observations, out=out.reshape(-1, *out.shape[2:]))
                return
            except TypeError:  # whole numbers of a wider dtype, which may fit all the same
                pass
        self.put(np.asarray(observations), out)

    def put(self, values: Array, out: Array) -> None:
        """Copy `values` into `out`, of which they must have the shape. Raises `TypeError`
        for another kind of number, and `OverflowError` where one is too large for `out`.
        """
        if values.shape != out.shape:
            raise ValueError(f"shape {values.shape} is not {out.shape}")
        if values.dtype.kind in "iu" and out.dtype.kind in "iu":
            limits = np.iinfo(out.dtype)
            wider = values.size and not np.can_cast(values.dtype, out.dtype, "safe")
            if wider and (values.min() < limits.min or values.max() > limits.max):
                raise OverflowError(f"{out.dtype} holds {limits.min} … {limits.max}")
            out[...] = values
        else:
            np.copyto(out, values, casting="same_kind")
        if self.start:
            out -= self.start

    def write_some(self, observations: Sequence[Any], out: Array, rows: Array) -> None:
        """Fill those rows of `out`, one for each observation, and the others with
        zeros."""
        out[...] = 0
        if len(rows):
            some = np.empty((len(rows), *self.field.shape), out.dtype)
            self.write(observations, some)
            out[rows] = some

    def row(self, observation: Any) -> Array:
        """Return this leaf of one observation, as its row has it."""
        row = np.empty(self.field.shape, self.field.dtype)
        self.write([observation], row[np.newaxis])
        return row

    def check(self, observation: Any, where: str, agent: str = "agent") -> None:
        """Raise `EnvironmentFault` when `observation` lacks this leaf, or `check_leaf`
        finds fault with it."""
        for key in self.path:
            try:
                observation = observation[key]
            except (KeyError, IndexError, TypeError):
                raise EnvironmentFault(
                    f"{where}: the observation of agent {agent} has no part {key!r}, which its space "
                    f"declares: {brief(observation)}"
                ) from None
        self.check_leaf(observation, where, agent)

    def check_leaf(self, value: Any, where: str, agent: str = "agent") -> None:
        """Raise `EnvironmentFault` when what stands in this leaf's place has another
        shape or dtype, or holds what the space has no place for."""
        if wrong := misfit(self.space, value, "the observation space"):
            raise EnvironmentFault(f"{where}: {self.name} of agent {agent}{wrong}")


Reader = TypeVar("Reader", bound=LeafReader)


def readers_of(space: Space, kind: type[Reader], name: str = "obs") -> list[Reader]:
    """Return a reader for each leaf of `space`, whose flat names begin with `name`."""
    found = zip(leaves(space, name).items(), paths(space), strict=True)
    return [kind(leaf_name, path, leaf) for (leaf_name, leaf), path in found]


def is_sequence(value: Any) -> bool:
    """Return whether `value` is a list, a tuple, or an array with a row at least."""
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def misfit(space: Space, value: Any, whose: str, stored: str | None = None) -> str:
    """Return what is wrong with `value` as one of a leaf `space`, called `whose`: its
    shape, its dtype, or that it cannot be stored (as rows are, or as the dtype `stored`);
    "" when nothing. Bounds of a Box are no law, and NaN and infinity are told by
    `TickCheck`."""
    declared = field_of(space)
    low: Any
    high: Any
    dtype = np.dtype(stored or declared.dtype)
    try:
        value = np.asarray(value)
    except BaseException as error:  # rows of different lengths, or what another library's arrays raise
        return f" is no array: {message_of(fault_of(error))}"
    if value.shape != declared.shape:
        return f" has shape {value.shape}; {whose} says {declared.shape}"
    if not np.can_cast(value.dtype, dtype, "same_kind") and not (
        value.dtype.kind in "iu" and dtype.kind in "iu"
    ):
        return f" has dtype {value.dtype}; {whose} says {dtype}"
    match space:
        case Discrete(n=n, start=start):
            low, high, says = start, start + n - 1, f"{whose} says {start} … {start + n - 1} (Discrete({n}))"
        case MultiDiscrete(nvec=nvec):
            low = 0
            high = np.asarray(nvec) - 1
            says = f"{whose} says numbers from 0 on, below {list(nvec)} (MultiDiscrete)"
        case MultiBinary():
            low, high, says = 0, 1, f"{whose} says 0 or 1 (MultiBinary)"
        case _:
            if value.dtype == dtype:
                return ""
            limits: Any = (
                np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype) if dtype.kind in "iu" else None
            )
            if limits is None:  # bool, of which numpy's kinds let nothing else through
                return ""
            low = limits.min.item() if dtype.kind == "f" else limits.min
            high = limits.max.item() if dtype.kind == "f" else limits.max
            says = (
                f"it is stored as {dtype}, which holds {low:.4g} … {high:.4g}: clip or scale it, or declare "
                "a dtype that holds it"
            )
    wrong = ~((value >= low) & (value <= high) | ~np.isfinite(value))
    if not wrong.any():
        return ""
    place = tuple(np.argwhere(wrong)[0].tolist())
    return f"{list(place) if place else ''} is {value[place]} ({value.dtype}); {says}"


class LeafWriter:
    """One leaf of the action: from one array to what each copy is given, and may keep.

    Scalars are numpy's, as `action_space.sample()` returns them: Gymnasium's
    `Discrete.contains`, which most environments call, takes 0.3 µs longer with Python's.
    `plain`: they are Python's, as what speaks JSON needs them.
    """

    def __init__(self, name: str, leaf: Space, plain: bool) -> None:
        self.name, self._cast, self._plain = name, action_caster(leaf), plain and field_of(leaf).shape == ()

    def column(self, array: Array) -> list[Any]:
        """Return one value per row: a number, or an array."""
        values = self._cast(array)
        return values.tolist() if self._plain else list(values)


class ActionWriter:
    """The action: from arrays with a row for each copy to what the copies are given.
    `plain` as of `LeafWriter`."""

    def __init__(self, space: Space, plain: bool) -> None:
        self._space, self._nested = space, isinstance(space, (Dict, Tuple))
        self._leaves = [LeafWriter(name, leaf, plain) for name, leaf in leaves(space, "action").items()]

    def values(self, arrays: Arrays) -> list[Any]:
        """Return one action per row."""
        columns = [leaf.column(arrays[leaf.name]) for leaf in self._leaves]
        if not self._nested:
            return columns[0]
        return [nest(self._space, iter(parts)) for parts in zip(*columns, strict=True)]


def brief(value: Any) -> str:
    """Return a value as a message can hold it."""
    text = repr(value).replace("\n", " ")
    return text if len(text) < 100 else text[:100] + "…"
