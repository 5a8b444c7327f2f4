"""Carts and poles in C: Gymnasium's numbers in every bit."""

import gymnasium
import numpy as np
import pytest

from tidemill import GymnasiumVector
from tidemill.envs.classic_control import CartPoleVector
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
    theirs = gymnasium.make_vec("CartPole-v1", LANES, "vector_entry_point", **settings)
    ours = GymnasiumVector(id="CartPole-v1", kwargs=settings).build(LANES, 0).env
    assert type(ours) is CartPoleVector
    told = [
        environment.reset(seed=3, options={"low": -0.1, "high": 0.1})[0] for environment in (ours, theirs)
    ]
    choose.cache_clear()  # it was of this library
    assert np.array_equal(*told) and (ours._poles._kernel is None) is (native == "off")
    rng, ends = np.random.default_rng(1), np.zeros(2, int)
    for tick in range(1000):
        actions = rng.integers(0, 2, LANES)
        actions[1::2] = told[0][1::2] @ [0.05, 0.1, 1, 0.4] > 0
        (*own, _), (*of_gymnasium, _) = ours.step(actions), theirs.step(actions)
        for mine, each in zip(own, of_gymnasium, strict=True):
            assert mine.dtype == each.dtype and np.array_equal(mine, each), tick
        told = [own[0]]
        ends += own[2].sum(), own[3].sum()
    assert (ends > 3).all()
