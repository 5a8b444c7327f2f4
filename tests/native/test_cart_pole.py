"""Carts and poles in C: Gymnasium's numbers in every bit."""

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill import GymnasiumVector
from tidemill.core.errors import ConfigError
from tidemill.envs.classic_control import CartPoleVector
from tidemill.envs.vector import VectorLanes
from tidemill.native.library import INSTRUCTION_SETS, VARIABLE, Kernels, choose

LANES = 19


@pytest.mark.parametrize("settings", [{}, {"sutton_barto_reward": True}, {"max_episode_steps": 15}], ids=str)
@pytest.mark.parametrize("native", ["off", *INSTRUCTION_SETS])
def test_a_thousand_steps_of_the_vector_form_are_gymnasiums_in_every_bit(
    settings, native, monkeypatch, library
):
    best = INSTRUCTION_SETS.index(Kernels(library).instruction_set)
    if native in INSTRUCTION_SETS[best + 1 :]:
        pytest.skip(f"this processor cannot run {native}")
    monkeypatch.setattr("tidemill.native.library.BUILT", library)
    monkeypatch.setenv(VARIABLE, native)
    choose.cache_clear()
    ours = GymnasiumVector(id="CartPole-v1", kwargs=settings).build(LANES, 3)
    choose.cache_clear()  # it was of this library
    assert type(ours) is CartPoleVector and (ours._poles._kernel is None) is (native == "off")
    bare = gymnasium.make_vec("CartPole-v1", LANES, "vector_entry_point", **settings)
    assert ours.max_episode_steps == bare.max_episode_steps
    drivers = Driver(ours), Driver(VectorLanes(bare, "theirs", 3, "next-step"))
    rng, ends, seen = np.random.default_rng(1), np.zeros(2, int), None
    for tick in range(1000):
        actions = rng.integers(0, 2, LANES)
        if seen is not None:
            actions[1::2] = seen[1::2] @ [0.05, 0.1, 1, 0.4] > 0
        whole = np.ones(LANES, bool) if tick == 0 else None
        (mine,), (theirs,) = (driver.tick(whole, [{"action": actions.copy()}]) for driver in drivers)
        assert np.array_equal(mine.reset, theirs.reset)
        for part in ("reward", "done", "truncated", "present", "restarted"):
            assert np.array_equal(getattr(mine.tick, part), getattr(theirs.tick, part)), (tick, part)
        seen = theirs.tick.observation["obs"]
        assert np.array_equal(mine.tick.observation["obs"], seen), tick
        ends += theirs.tick.done.sum(), theirs.tick.truncated.sum()
    assert (ends > 3).all()


def test_all_that_begin_together_take_a_seed_that_was_given_meanwhile():
    ours = GymnasiumVector(id="CartPole-v1", max_episode_steps=4).build(3, 3)
    bare = gymnasium.make_vec("CartPole-v1", 3, "vector_entry_point", max_episode_steps=4)
    drivers = Driver(ours), Driver(VectorLanes(bare, "theirs", 3, "next-step"))
    for tick in range(12):  # every fourth step ends all episodes
        if tick == 7:
            for driver in drivers:
                driver.environment.seed(8)
        (mine,), (theirs,) = (driver.tick(None, [{"action": np.arange(3) % 2}]) for driver in drivers)
        assert np.array_equal(mine.reset, theirs.reset) and mine.reset.all() == (tick % 5 == 0)
        assert np.array_equal(mine.tick.observation["obs"], theirs.tick.observation["obs"]), tick


def test_a_picture_is_drawn_by_gymnasiums_own_and_a_curriculum_refused():
    config = GymnasiumVector(id="CartPole-v1")
    drawn = config.build(2, 0, render=True)
    assert type(drawn) is VectorLanes
    Driver(drawn).tick()
    assert drawn.render().shape == (400, 600, 3)
    with pytest.raises(ConfigError, match="resets finished lanes by itself, without options"):
        config.build(2, 0).enter_stage({"low": -0.1})
