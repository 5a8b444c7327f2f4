"""What networks see of observations of bytes."""

import numpy as np
import pytest

from tidemill import ActorCritic, DeterministicActor, QNetwork, SquashedGaussian
from tidemill.api.spaces import Box, Dict, Discrete, Spaces
from tidemill.core.config import brought_up_to_date, decode, encode
from tidemill.nets.encoders import ObservationEncoder

GRID = Box((7, 7, 3), "uint8", (0.0,), (255.0,))
PICTURE = Box((36, 40), "uint8", (0.0,), (255.0,))
PUSH = Box((2,), "float32", (-1.0,), (1.0,))


@pytest.mark.parametrize(("scaled_bytes", "divisor"), [("images", 1), ("all", 255)])
def test_bytes_of_small_grids_are_seen_as_they_are_and_those_of_images_as_fractions(scaled_bytes, divisor):
    space = Dict({"grid": GRID, "picture": PICTURE, "ram": Box((5,), "uint8", (0.0,), (255.0,))})
    encoder = ObservationEncoder(space, "mlp", scaled_bytes=scaled_bytes)
    rng = np.random.default_rng(0)
    seen = {
        f"obs.{name}": rng.integers(0, 256, (4, *leaf.shape)).astype(np.uint8)
        for name, leaf in space.spaces.items()
    }
    told = encoder.flat(seen)
    parts = (seen["obs.grid"] / divisor, seen["obs.picture"] / 255, seen["obs.ram"] / divisor)
    expected = np.concatenate([part.reshape(4, -1) for part in parts], 1)
    np.testing.assert_allclose(told, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "action"),
    [
        (ActorCritic(), PUSH),
        (QNetwork(filters=0), Discrete(3)),
        (SquashedGaussian(), PUSH),
        (DeterministicActor(), PUSH),
    ],
)
def test_what_was_saved_before_goes_on_with_all_bytes_divided(config, action):
    saved = encode(config)
    del saved["scaled_bytes"]  # which there was not
    data, told = brought_up_to_date(saved)
    again = decode(type(config), data)
    assert told == [] and again == config.replace(scaled_bytes="all")
    assert decode(type(config), brought_up_to_date(encode(config))[0]) == config
    spaces, seen = Spaces(GRID, action), {"obs": np.full((1, 7, 7, 3), 51, np.uint8)}
    for each, value in ((config, 51), (again, np.float32(0.2))):
        flat = each.build(spaces, 0).encoder.flat(seen)
        np.testing.assert_allclose(flat, value)
