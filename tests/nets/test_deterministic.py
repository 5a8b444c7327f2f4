"""The mode is asked for row by row: those rows get it, and no other row is answered
otherwise than without them."""

import numpy as np
import pytest
from tests.nets.test_actor_critic import ACTIONS, draw, stir

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Spaces
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.gpu_acting import DeviceActing

N = 48
VIEW = Box((3,), "float32")
CASES = {
    **{name: Spaces(VIEW, action) for name, action in ACTIONS.items()},
    "discrete, masked": Spaces(Dict({"action_mask": MultiBinary(4), "view": VIEW}), Discrete(4)),
    "branches, masked": Spaces(
        Dict({"action_mask": MultiBinary(10), "view": VIEW}), MultiDiscrete((2, 5, 3))
    ),
}
NET = ActorCritic(hidden=(8,))


def ways(spaces):
    """Each way to answer the same rows by the same weights and the same random numbers:
    name → function of the flags."""
    seen = draw(spaces.observation, N)
    if "obs.action_mask" in seen:
        # one of each branch at least
        seen["obs.action_mask"][:, [0, 2, 7][: 1 + 2 * (spaces.action == MultiDiscrete((2, 5, 3)))]] = 1
    plain, torched = NET.build(spaces, 0), ActorCriticPolicy(NET, spaces, 0, "torch")
    stir(plain)
    torched.load(plain.parameters(), 0)

    def act(policy, flags):
        policy._rng, out = np.random.default_rng(5), allocate(NET.answer(spaces), (N,))
        policy.act(seen, {}, flags, out)
        return out

    def device(flags):
        out = allocate(NET.answer(spaces), (N,))
        DeviceActing(torched.network, 5, True).begin(torched.prepare(seen), flags, torched.value_scale, out)()
        return out

    return {
        "numpy": lambda flags: act(plain, flags),
        "torch": lambda flags: act(torched, flags),
        "device": device,
    }


@pytest.mark.parametrize("way", ["numpy", "torch", "device"])
@pytest.mark.parametrize("case", CASES)
def test_rows_get_what_they_ask_for_whatever_others_ask_for(case, way):
    answer = ways(CASES[case])[way]
    mode, drawn = answer(True), answer(False)
    assert (mode["action"] != drawn["action"]).any()
    flags = np.random.default_rng(0).random(N) < 0.5
    for mixed in (flags, ~flags, np.arange(N) == N - 1, np.arange(N) != 0):
        out = answer(mixed)
        for name in out:
            np.testing.assert_array_equal(out[name][~mixed], drawn[name][~mixed], err_msg=name)
            np.testing.assert_allclose(
                out[name][mixed], mode[name][mixed], rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("way", ["numpy", "torch", "device"])
@pytest.mark.parametrize("case", CASES)
def test_one_flag_for_all_may_be_of_any_form(case, way):
    answer = ways(CASES[case])[way]
    for flag in (False, True):
        plain = answer(flag)
        for form in (np.bool_(flag), np.array(flag), np.full(N, flag)):
            out = answer(form)
            for name in out:
                np.testing.assert_allclose(out[name], plain[name], rtol=1e-5, atol=1e-5, err_msg=name)
