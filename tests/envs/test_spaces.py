import math

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gs

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, to_gymnasium
from tidemill.core.errors import ConfigError
from tidemill.envs.spaces import from_gymnasium


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (gs.Box(0, 255, (4, 84, 84), np.uint8), Box((4, 84, 84), "uint8", (0.0,), (255.0,))),
        (
            gs.Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32)),
            Box((2,), "float32", (-1.0, -2.0), (1.0, math.inf)),
        ),
        (gs.Box(-1, 2, (), np.float32), Box((), "float32", (-1.0,), (2.0,))),
        (gs.Discrete(4, start=-1), Discrete(4, -1)),
        (gs.MultiDiscrete([2, 3]), MultiDiscrete((2, 3))),
        (gs.MultiBinary(5), MultiBinary(5)),
        (
            gs.Dict({"b": gs.Discrete(2), "a": gs.Tuple([gs.MultiBinary(1)])}),
            Dict({"b": Discrete(2), "a": Tuple((MultiBinary(1),))}),
        ),
    ],
)
def test_spaces_convert_there_and_back(theirs, ours):
    assert from_gymnasium(theirs) == ours
    assert to_gymnasium(ours) == theirs


def test_bounds_have_the_shape_of_their_box():
    for shape, low in (((), (-1.0,)), ((2, 1), (-1.0,)), ((2, 1), (-1.0, -2.0))):
        bounds = Box(shape, "float32", low, (3.0,)).bounds()
        assert [bound.shape for bound in bounds] == [shape, shape]
        assert bounds[0].ravel().tolist() == list(low) * (bounds[0].size // len(low))


def test_a_bound_that_float32_cannot_hold_is_none():
    largest = np.finfo(np.float64).max
    assert from_gymnasium(gs.Box(-largest, largest, (2,), np.float64)) == Box(
        (2,), "float64", (-math.inf,), (math.inf,)
    )


@pytest.mark.parametrize(
    "space",
    [
        gs.Text(5),
        gs.Sequence(gs.Discrete(2)),
        gs.MultiBinary([2, 2]),
        gs.MultiDiscrete([[2, 2]]),
        gs.Dict({"a.b": gs.Discrete(2)}),
    ],
)
def test_a_space_without_a_fixed_array_is_refused_by_place(space):
    with pytest.raises(ConfigError, match=r"observation\.part.*wrapper"):
        from_gymnasium(gymnasium.spaces.Dict({"part": space}), "observation")
