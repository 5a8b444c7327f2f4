"""What a cut of a run is made of: the state of each part at one moment, from which the
run goes on as if it had not been cut.

A *part* is nested: names → arrays, plain data (numbers, texts, lists of these, None), or
further parts. It is kept as files of arrays and as JSON, and nothing in it is code.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tidemill.core.errors import CheckpointError
from tidemill.core.schema import Array, Arrays

Part = Mapping[str, Any]
"""State by name: arrays, plain data, and parts of their own."""


def flatten(part: Part) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays of `part`, by their places ("agents/0/finished"), and the rest of
    it as plain data."""
    arrays, facts = Arrays(), dict[str, Any]()
    for name, value in part.items():
        if isinstance(value, np.ndarray | np.generic):
            arrays[name] = np.asarray(value)
        elif isinstance(value, Mapping):
            inner, facts[name] = flatten(value)
            arrays |= {f"{name}/{place}": array for place, array in inner.items()}
        else:
            facts[name] = value
    return arrays, facts


def unflatten(arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that `flatten` took apart."""
    part: dict[str, Any] = {
        name: unflatten({}, value) if isinstance(value, Mapping) else value for name, value in facts.items()
    }
    for place, array in arrays.items():
        *path, name = place.split("/")
        within = part
        for each in path:
            within = within.setdefault(each, {})
        within[name] = array
    return part


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return where a generator of random numbers is."""
    return dict(generator.bit_generator.state)


def set_generator_state(generator: np.random.Generator, state: Part) -> None:
    """Have a generator go on from `state`. Raises `CheckpointError` where that is one of
    another kind."""
    try:
        generator.bit_generator.state = dict(state)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"a saved state of a random stream is none of a {type(generator.bit_generator).__name__}: "
            f"{type(error).__name__}: {error}; the run was saved by another version of numpy, or is damaged"
        ) from None
