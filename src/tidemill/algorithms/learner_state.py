"""What learners save and take back: the check that it fits, and a numpy generator's state
as an array."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays

_LOW = (1 << 64) - 1


def check_learner_state(own: Arrays, given: Mapping[str, Array]) -> None:
    """Raise `SchemaError` unless `given` has the names and shapes of a learner's `own`
    state."""
    wrong = sorted(
        name
        for name in own.keys() | given.keys()
        if name not in own or name not in given or own[name].shape != given[name].shape
    )
    if wrong:
        raise SchemaError(
            f"this learner state does not fit: {', '.join(wrong)}; resume with the algorithm and network "
            "that saved it"
        )


def prefixed(name: str, arrays: Arrays) -> Arrays:
    """Return `arrays`, a part of a learner's state, as ``NAME.…``."""
    return {f"{name}.{key}": array for key, array in arrays.items()}


def unprefixed(name: str, state: Mapping[str, Array]) -> Arrays:
    """Return the part of `state` that `prefixed` called by `name`."""
    head = f"{name}."
    return {key.removeprefix(head): array for key, array in state.items() if key.startswith(head)}


def random_state(rng: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of a PCG64 generator (numpy's default) as six uint64."""
    return state_numbers(rng.bit_generator.state)


def state_numbers(whole: Mapping[str, Any]) -> NDArray[np.uint64]:
    """Return what a PCG64 generator tells as its state, as six uint64."""
    state, increment = int(whole["state"]["state"]), int(whole["state"]["inc"])
    numbers = [
        state >> 64,
        state & _LOW,
        increment >> 64,
        increment & _LOW,
        int(whole["has_uint32"]),
        int(whole["uinteger"]),
    ]
    return np.array(numbers, np.uint64)


def set_random_state(rng: np.random.Generator, numbers: Array) -> None:
    """Put `rng`, a PCG64 generator, where `random_state` found another."""
    n = [int(x) for x in numbers]
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": n[0] << 64 | n[1], "inc": n[2] << 64 | n[3]},
        "has_uint32": n[4],
        "uinteger": n[5],
    }
