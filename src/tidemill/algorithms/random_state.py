"""A numpy generator's state as an array, so that it can be saved with the rest."""

import numpy as np
from numpy.typing import NDArray

from tidemill.core.schema import Array

_LOW = (1 << 64) - 1


def random_state(rng: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of a PCG64 generator (numpy's default) as six uint64."""
    whole = rng.bit_generator.state
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
