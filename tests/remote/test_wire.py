"""What is written into a body is read out of it, and what does not fit is named."""

import math

import msgspec
import numpy as np
import pytest

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.remote.wire import ENCODINGS, StepResult, Values, decode, encode, space_from_wire, space_to_wire

SPACES = [
    Box((4,), "float32"),
    Box((2, 3), "uint8", (0.0,), (255.0,)),
    Box((3,), "float64", (-1.0, -math.inf, 0.0), (1.0, 2.0, math.inf)),
    Box((), "float32", (-1.0,), (1.0,)),
    Discrete(5),
    Discrete(3, -1),
    MultiDiscrete((2, 3)),
    MultiBinary(4),
    Dict({"low": Box((2,), "float32"), "n": Discrete(2), "spaces": Tuple((Discrete(2), Box((1,), "int16")))}),
]
VALUES = [
    np.arange(4, dtype=np.float32),
    np.arange(6, dtype=np.uint8).reshape(2, 3),
    np.array([0.1, 1e300, 3.0]),
    np.array(0.5, np.float32),
    4,
    -1,
    np.array([1, 2]),
    np.array([0, 1, 1, 0], np.int8),
    {"low": np.ones(2, np.float32), "n": 1, "spaces": (0, np.array([7], np.int16))},
]


def through(value, content_type):
    return decode(encode(value, content_type), content_type, object)


def equal(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return (
        type(left) is type(right)
        and np.array_equal(left, right)
        and getattr(left, "dtype", None) == getattr(right, "dtype", None)
    )


@pytest.mark.parametrize("content_type", ENCODINGS)
@pytest.mark.parametrize(("space", "value"), list(zip(SPACES, VALUES, strict=True)))
def test_spaces_and_values_come_back_as_they_were(space, value, content_type):
    assert space_from_wire(through(space_to_wire(space), content_type), "space") == space
    values = Values(space, "observation")
    assert equal(values.read(through(values.write(value), content_type)), value)


@pytest.mark.parametrize("content_type", ENCODINGS)
def test_a_reward_that_is_not_finite_is_not_taken_for_a_number(content_type):
    sent = StepResult(session="s", episode=0, step=1, observation=0, reward=math.nan)
    reward = decode(encode(sent, content_type), content_type, StepResult).reward
    assert reward is None or math.isnan(reward)


@pytest.mark.parametrize(
    ("space", "wire", "words"),
    [
        (
            Box((2,), "float32"),
            {"dtype": "float32", "shape": [3], "data": b"\0" * 12},
            "float32 of shape \\[2\\]",
        ),
        (Box((2,), "float32"), {"dtype": "float64", "shape": [2], "data": b"\0" * 16}, "'float64'"),
        (Box((2,), "float32"), {"dtype": "float32", "shape": [2], "data": b"\0" * 7}, "8 bytes"),
        (Box((2,), "float32"), {"dtype": "float32", "shape": [2], "data": "%%%"}, "base64"),
        (
            Box((1,), "float32"),
            {"dtype": "float32", "shape": [1], "data": np.array([np.nan], np.float32).tobytes()},
            "not finite",
        ),
        (Box((2,), "float32"), [1.0, 2.0], "an array"),
        (Box((2,), "float32"), {"dtype": "float32", "shape": 2, "data": b"\0" * 8}, "of shape 2; its space"),
        (Discrete(3), 3, "0 to 2"),
        (Discrete(3), True, "0 to 2"),
        (Discrete(3), None, "0 to 2"),
        (Dict({"a": Discrete(2)}), {"b": 1}, r"\['a'\]"),
        (Tuple((Discrete(2),)), [1, 1], "1 in a list"),
    ],
)
def test_a_value_that_does_not_fit_is_named(space, wire, words):
    with pytest.raises(EnvironmentFault, match=words):
        Values(space, "observation").read(wire)


@pytest.mark.parametrize(
    "wire",
    [
        None,
        "box",
        {"type": "ball"},
        {"type": "box", "shape": [2]},
        {"type": "box", "shape": [2], "dtype": "object"},
        {"type": "box", "shape": [2], "dtype": "float32", "low": [0, 0, 0]},
        {"type": "box", "shape": [-1], "dtype": "float32"},
        {"type": "box", "shape": [2], "dtype": "float32", "low": [0, 5], "high": [1]},
        {"type": "discrete", "n": 0},
        {"type": "dict", "spaces": {"a.b": {"type": "discrete", "n": 2}}},
        {"type": "multi_discrete", "nvec": []},
        {"type": "box", "shape": [1 << 40], "dtype": "float32"},
        {"type": "multi_binary", "n": 1 << 40},
        {"type": "discrete", "n": 1 << 63},
    ],
)
def test_what_is_no_space_is_refused(wire):
    with pytest.raises(ConfigError, match="no space"):
        space_from_wire(wire, "observation_space")


def test_actions_that_do_not_fit_are_not_written():
    with pytest.raises(EnvironmentFault, match="does not fit"):
        Values(Box((2,), "float32"), "action").write(np.zeros(3, np.float32))


def test_a_body_is_never_taken_for_another():
    with pytest.raises(msgspec.DecodeError):
        decode(b"<html>", "application/json", StepResult)
