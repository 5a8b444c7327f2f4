import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from numpy.testing import assert_array_equal

from tidemill.core.errors import ConfigError
from tidemill.envs.image_wrappers import GrayImages, ResizedImages, area_means
from tidemill.envs.plain_gymnasium import Gymnasium


class Shows(gymnasium.Env):
    """An environment that shows one observation."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, shown=None):
        self.observation_space = space
        self.shown = space.sample() if shown is None else shown

    def reset(self, seed=None, options=None):
        return self.shown, {}

    def step(self, action):
        return self.shown, 0.0, False, False, {}


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def test_a_pixel_is_the_mean_of_the_area_that_it_covers():
    assert_array_equal(area_means(4, 2).along(np.array([1, 3, 10, 20]), 0), [2, 15])
    # three pixels to two: each has one and a half of them
    np.testing.assert_allclose(area_means(3, 2).along(np.array([0, 3, 9]), 0), [1, 7], rtol=1e-6)
    # two to four: each has half of one
    assert_array_equal(area_means(2, 4).along(np.array([8, 6]), 0), [8, 8, 6, 6])
    shown = np.arange(16, dtype=np.uint8).reshape(4, 4)
    seen, _ = ResizedImages(Shows(image(4, 4), shown), 2).reset()
    # means of 0, 1, 4, 5; of 2, 3, 6, 7; of 8, 9, 12, 13; of 10, 11, 14, 15; halves
    # become even
    assert_array_equal(seen, [[2, 4], [10, 12]])


@pytest.mark.parametrize("size", range(1, 40))
def test_means_lose_nothing_of_any_line(size):
    line = np.random.default_rng(size).uniform(size=size)
    for new in range(1, 60):
        means = area_means(size, new)
        np.testing.assert_allclose(means.shares.sum(0), 1, rtol=1e-5)
        np.testing.assert_allclose(means.along(line, 0).mean(), line.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "resized"), [((40, 60), (20, 30)), ((40, 60, 3), (20, 30, 3)), ((3, 40, 60), (3, 20, 30))]
)
def test_images_lie_as_before(shape, resized):
    env = ResizedImages(Shows(image(*shape)), (20, 30))
    seen, _ = env.reset()
    assert seen.shape == env.observation_space.shape == resized
    assert env.observation_space.contains(np.ascontiguousarray(seen))
    tiles = env.unwrapped.shown.astype(np.float64)
    axis = shape.index(40)
    tiles = tiles.reshape(*shape[:axis], 20, 2, 30, 2, *shape[axis + 2 :]).mean((axis + 1, axis + 3))
    assert_array_equal(seen, np.rint(tiles))


def test_parts_of_a_dict_change_that_are_images_and_no_others():
    space = spaces.Dict(screen=image(240, 320, 3), board=image(21, 79), health=spaces.Box(0, 100, (1,)))
    env = GrayImages(ResizedImages(Shows(space), 84))
    seen, _ = env.reset()
    assert env.observation_space["screen"] == image(84, 84, 1)
    assert env.observation_space.contains(seen)
    assert_array_equal(seen["board"], env.unwrapped.shown["board"])
    assert seen["health"] is env.unwrapped.shown["health"]
    assert env.unwrapped.shown["screen"].shape == (240, 320, 3), "the environment's own is left alone"


def test_gray_is_luminance():
    shown = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], np.uint8)
    # 255 times 0.2125, 0.7154 and 0.0721: 54.2, 182.4, 18.4
    seen, _ = GrayImages(Shows(image(1, 4, 3), shown)).reset()
    assert_array_equal(seen, [[[54], [182], [18], [255]]])
    seen, _ = GrayImages(Shows(image(1, 4, 3), shown), keep_dim=False).reset()
    assert_array_equal(seen, [[54, 182, 18, 255]])
    first = np.moveaxis(np.tile(shown, (40, 10, 1)), -1, 0)
    seen, _ = GrayImages(Shows(image(3, 40, 40), first)).reset()
    assert seen.shape == (1, 40, 40) and seen[0, 0, 1] == 182


def test_what_is_no_image_is_refused():
    with pytest.raises(ConfigError, match=r"resize takes an image .* none in Box\("):
        ResizedImages(Shows(spaces.Box(0, 1, (4,))), 84)
    with pytest.raises(ConfigError, match="grayscale takes an image of three colours"):
        GrayImages(Shows(image(84, 84, 4)))
    for shape in (0, -1, "84", (84,), (84.0, 84), (84, 84, 3), True):
        with pytest.raises(ConfigError, match=r"shape = .* must be a height and a width"):
            ResizedImages(Shows(image(84, 84, 3)), shape)


def test_an_environment_is_wrapped_by_name():
    made = Gymnasium(
        make=lambda: Shows(spaces.Dict(a=image(90, 90, 3), b=spaces.Discrete(3), c=spaces.Discrete(2))),
        wrap=('filter(["a", "b"])', "resize(45)", "grayscale"),
    ).make_one()
    assert made.observation_space == spaces.Dict(a=image(45, 45, 1), b=spaces.Discrete(3))
