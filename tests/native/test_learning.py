"""A learner whose network the native core computes learns what numpy's learns."""

from dataclasses import replace

import numpy as np
import pytest
from tests.algorithms.test_ppo import NET, SPACES, make_sample

from tidemill import PPO
from tidemill.api.algorithm import run_alone
from tidemill.core.errors import RunError
from tidemill.nets.native_actor_critic import NativeActorCritic


def learners_of(kernels, **settings):
    """Numpy's and the core's, of the same weights and the same shuffling."""
    config, policies = PPO(minibatch_size=8, learning_rate=1e-3, **settings), []
    for native in (False, True):
        policy = NET.build(SPACES, 0)
        if native:
            policy.network = NativeActorCritic(NET.shape(SPACES), policy.network.flat, kernels)
        policies.append(policy)
    return [config.build(policy, 0) for policy in policies]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_value": 0.2, "entropy_coefficient": 0.01},
        {"target_kl": 0.01},
        {"normalise_advantages": "minibatch"},
        {"clip_apart": True, "max_gradient_norm": 0.1},
    ],
)
def test_updates_are_numpy_s(kernels, settings):
    plain, native = learners_of(kernels, **settings)
    for seed in range(3):
        sample = make_sample(plain.policy, seed=seed)
        told = [learner.update([sample], 0.1) for learner in (plain, native)]
        assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-5, nan_ok=True)
    np.testing.assert_allclose(native.policy.network.flat, plain.policy.network.flat, atol=1e-4)
    assert np.abs(native.policy.network.flat - NET.build(SPACES, 0).network.flat).max() > 1e-3


@pytest.mark.parametrize("helpers", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_gradient_norm": None},
        {"target_kl": 0.01},
        {"normalise_advantages": "minibatch"},
        {"clip_apart": True, "max_gradient_norm": 0.1},
    ],
)
def test_an_epoch_in_one_call_has_the_bits_of_one_minibatch_after_the_other(kernels, settings, helpers):
    """Minibatches of their own are one thread's, towers in an epoch a thread's each."""
    assert kernels.helpers(helpers) >= helpers
    _, whole = learners_of(kernels, **settings)
    _, single = learners_of(kernels, **settings)
    for seed in range(3):
        sample = make_sample(whole.policy, seed=seed)
        told = whole.update([sample], 0.1), run_alone(single.parallel_update([sample], 0.1))
        assert told[0] == told[1]
    state = single.state()
    for name, array in whole.state().items():
        np.testing.assert_array_equal(array, state[name], name)
    np.testing.assert_array_equal(whole.policy.network.flat, single.policy.network.flat)


def test_settings_that_change_between_updates_are_followed(kernels):
    learners = learners_of(kernels)
    sample = make_sample(learners[0].policy)
    for learner in learners:
        learner.update([sample], 0)
        learner.config = replace(learner.config, entropy_coefficient=0.5)
        learner.update([sample], 0)
    plain, native = (learner.policy.network.flat for learner in learners)
    np.testing.assert_allclose(native, plain, atol=1e-4)


def test_a_minibatch_that_is_not_finite_changes_no_weight(kernels):
    _, native = learners_of(kernels)
    sample = make_sample(native.policy)
    sample["reward"][:-1] = np.inf
    before = native.policy.network.flat.copy()
    with pytest.raises(RunError, match="left out a step"):
        native.update([sample], 0)
    np.testing.assert_array_equal(native.policy.network.flat, before)
