"""Updates on a device: an MLP learns in torch what it learns in numpy, nothing is read
before the end, and what is not finite changes nothing."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.algorithms.test_ppo import NET, SPACES, make_sample

from tidemill.algorithms import torch_library
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.torch_library import TorchLibrary
from tidemill.api.spaces import Box, Spaces
from tidemill.core.errors import RunError
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.torch_copies import Mirror

BOXES = Spaces(Box((3,), "float32"), Box((2,), "float32", (-1.0, -3.0), (1.0, 5.0)))
NORMALISED = ActorCritic(hidden=(8, 8), normalise_observations=True)


def both(spaces=SPACES, net=NET, device="cpu", **settings):
    """The same learner twice, with numpy's policy and torch's."""
    config = PPO(**{"minibatch_size": 8, "learning_rate": 1e-2, **settings})
    return [
        config.build(policy, 0)
        for policy in (net.build(spaces, 0), ActorCriticPolicy(net, spaces, 0, "torch", device))
    ]


def sample_of(learner, spaces, seed):
    sample = make_sample(learner.policy, SPACES, seed=seed)
    if spaces is not SPACES:  # rows of the same form, with actions of this space
        rng = np.random.default_rng(seed)
        sample["action"] = rng.standard_normal((*sample["done"].shape, 2)).astype(np.float32)
        sample["log_prob"] = rng.standard_normal(sample["done"].shape).astype(np.float32) - 3
    return sample


SETTINGS = [
    {},
    {"entropy_coefficient": 0.02, "clip_value": 0.1},
    {"max_gradient_norm": 0.05, "clip_apart": True},
    {"max_gradient_norm": None, "normalise_advantages": False, "epochs": 1},
    {"target_kl": 0.01},
    {"normalise_advantages": "minibatch"},
    {"correct_off_policy": True, "max_gradient_norm": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings) or "default")
@pytest.mark.parametrize("spaces", [SPACES, BOXES], ids=["discrete", "box"])
def test_updates_in_torch_are_those_in_numpy(spaces, settings):
    plain, other = both(spaces, NORMALISED, **settings)
    actor = both()[0]
    for update in range(2):
        sample = sample_of(actor, spaces, update)
        metrics = [learner.update([sample], 0.0) for learner in (plain, other)]
        assert metrics[0].keys() == metrics[1].keys()
        for name, value in metrics[0].items():
            assert metrics[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        for name, array in plain.policy.parameters().items():
            np.testing.assert_allclose(
                other.policy.parameters()[name], array, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_learning_in_torch_does_not_import_its_compiler():
    code = (
        "import sys\nfrom tests.algorithms.test_device import BOXES, NORMALISED, both, sample_of\n"
        "learner = both(BOXES, NORMALISED)[1]\nassert learner.update([sample_of(both()[0], BOXES, 0)], "
        "0.0)['rows']\n"
        "assert not {'torch._dynamo', 'sympy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_checkpoint_goes_on_with_either():
    plain, other = both()
    sample = make_sample(plain.policy)
    plain.update([sample], 0.0)
    other.policy.load(plain.policy.parameters(), 1)
    other.load_state(plain.state())
    for learner in (plain, other):
        learner.update([sample], 0.0)
    np.testing.assert_allclose(other.policy.network.flat, plain.policy.network.flat, rtol=1e-4, atol=1e-5)
    state = plain.state()
    plain.load_state(other.state())
    for name, array in plain.state().items():
        np.testing.assert_allclose(array, state[name], rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("field", ["reward", "obs", "log_prob"])
def test_steps_that_are_not_finite_change_nothing_and_are_named_at_the_end(field):
    _, learner = both(minibatch_size=1000, epochs=3)
    sample = make_sample(learner.policy)
    row = tuple(np.argwhere(sample.trained())[0])
    before = learner.policy.network.flat.copy()
    sample[field][row] = np.inf if field == "reward" else np.nan
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(RunError, match=r"loss/.* is nan|advantages or targets"),
    ):
        learner.update([sample], 0.0)
    np.testing.assert_array_equal(learner.policy.network.flat, before)
    assert learner.state()["adam.0.step"] == 0


class Steps:
    """In place of torch's Adam, which has no fused step for a device without numbers."""

    def __init__(self, parameters, betas, eps, fused):
        assert fused
        self.state, self.param_groups = {}, [{}]

    def step(self):
        assert self.grad_scale.device.type == self.found_inf.device.type == "meta"


def test_an_update_leaves_the_device_once(monkeypatch):
    """On a device without numbers reading one fails."""
    read = []

    def to_host(library, array):
        read.append(tuple(array.shape))
        return np.zeros(array.shape, np.float32)

    monkeypatch.setattr(Mirror, "pull", lambda mirror, rows=None: None)
    monkeypatch.setattr(torch.optim, "Adam", Steps)
    monkeypatch.setattr(TorchLibrary, "to_host", to_host)
    sample, policy = make_sample(NET.build(SPACES, 0)), ActorCriticPolicy(NET, SPACES, 0, "torch", "meta")
    learner = PPO(minibatch_size=8, epochs=3, entropy_coefficient=0.01, clip_value=0.2).build(policy, 0)
    metrics = learner.update([sample], 0.0)
    assert read == [(metrics["minibatches"], 6)]
    for array in learner.parallel_update([sample], 0.0):
        assert isinstance(array, np.ndarray)
    assert read.count((policy.network.size + 6,)) == metrics["minibatches"]


def test_the_gradient_on_the_host_is_the_device_s_where_they_share_memory():
    _, learner = both()
    sample = make_sample(learner.policy)
    sums = learner.parallel_update([sample], 0.0)
    next(sums)
    shared = next(sums)
    assert np.shares_memory(shared, learner.loss.gradient.numpy())
    assert isinstance(learner.loss.optimiser, torch_library.TorchAdam)
