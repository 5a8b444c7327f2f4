"""Actors of SAC whose noise is a function of the state: gradients, densities, and what
the noise does."""

import numpy as np
import pytest
import torch
from tests.algorithms.restoring import check_restored
from tests.algorithms.test_sac import sample_of
from tests.nets.activations import hidden_layers
from torch.nn import functional

from tidemill import SAC, SquashedGaussian
from tidemill.api.spaces import Box, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate
from tidemill.nets.exploring_mlp import ExploringMLP, ExploringShape
from tidemill.nets.squashed_gaussian import split, squash

SPACES = Spaces(Box((3,), "float32"), Box((2,), "float32", (-1.0, 0.0), (3.0, 1.0)))
NET = SquashedGaussian(hidden=(8, 5), sde_steps=3, log_std_init=-1.0)


@pytest.mark.parametrize("hidden", [(), (8, 5)])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_its_gradients_are_autograd_s_through_the_features_too(hidden, layer_norm):
    rng = np.random.default_rng(0)
    shape = ExploringShape(
        1, 4, hidden, 3, 0.01, "tanh", layer_norm=layer_norm and bool(hidden), log_std=-0.5
    )
    flat = shape.begin(rng)
    flat += rng.standard_normal(flat.size, np.float32) * 0.3
    network = ExploringMLP(shape, flat)
    network.weights["head.weight"] *= 10  # so that some means are beyond ±2
    inputs, factors = rng.standard_normal((40, 4), np.float32), rng.standard_normal((1, 40, 6), np.float32)
    w = {name: torch.tensor(part, requires_grad=True) for name, part in network.weights.items()}
    x = torch.tensor(inputs, requires_grad=True)
    z = hidden_layers(x[None], w, "tanh")
    mean = functional.hardtanh(z @ w["head.weight"] + w["head.bias"], -2, 2)
    variance = z.square() @ w["log_std"].exp().square() + 1e-6
    told = torch.cat([mean, variance.log() / 2], -1)
    (told * torch.tensor(factors)).sum().backward()
    found = network.forward(inputs)
    np.testing.assert_allclose(found, told.detach(), atol=1e-5)
    clipped = np.abs(found[..., :3]) == 2
    assert 0 < clipped.sum() < clipped.size
    gradient = np.full_like(flat, np.nan)
    of_inputs = network.backward(factors, gradient, True)
    exact = torch.cat([part.grad.reshape(-1) for part in w.values()]).numpy()
    np.testing.assert_allclose(gradient, exact, atol=1e-4 * np.abs(exact).max())
    np.testing.assert_allclose(of_inputs, x.grad, atol=1e-4)


def test_noise_stays_for_some_steps_and_its_density_is_that_over_all_noise():
    policy = NET.build(SPACES, 0)
    policy.flat += np.random.default_rng(1).standard_normal(policy.flat.size, np.float32) * 0.3
    seen = {"obs": np.repeat(np.random.default_rng(2).standard_normal((1, 3), np.float32), 4000, 0)}
    state, actions = allocate(NET.state(SPACES), (4000,)), []
    for _ in range(4):
        out = allocate({**NET.answer(SPACES), **NET.state(SPACES)}, (4000,))
        policy.act(seen, state, False, out)
        state = {"state.noise": out["state.noise"].copy()}
        actions.append(policy.unscaled(out["action"]))
    np.testing.assert_array_equal(actions[0], actions[2])
    assert (actions[3] != actions[2]).all()
    mean, log_std, _ = split(policy.network(policy.flat).forward(seen["obs"][:1])[0])
    u = np.arctanh(actions[3].astype(np.float64).clip(-0.9999999, 0.9999999))
    np.testing.assert_allclose(u.mean(0), mean[0], atol=0.05)
    np.testing.assert_allclose(u.std(0), np.exp(log_std)[0], rtol=0.05)
    expected = squash(mean, log_std, ((u - mean) / np.exp(log_std)).astype(np.float32))[1]
    np.testing.assert_allclose(out["log_prob"], expected, rtol=2e-3, atol=2e-3)
    flags = np.arange(4000) < 2000
    policy.act(seen, state, flags, out)
    np.testing.assert_allclose(
        policy.unscaled(out["action"])[flags], np.tanh(mean).repeat(2000, 0), atol=1e-6
    )
    assert (policy.unscaled(out["action"])[~flags] != np.tanh(mean)).all()


def test_sac_trains_it_and_a_restored_learner_goes_on_exactly():
    net = NET.replace(critic_hidden=(16,))
    one, other = (SAC().build(net.build(SPACES, seed), seed) for seed in (0, 5))
    before = one.policy.parameters()["log_std"].copy()
    check_restored(one, other, sample_of)
    assert (one.policy.parameters()["log_std"] != before).all()


REFUSED = {
    "sde_steps = -1: noise stays": lambda: SquashedGaussian(sde_steps=-1),
    "log_std_init = 30": lambda: SquashedGaussian(sde_steps=4, log_std_init=30),
    "log_std_init = -2.0 has no effect": lambda: SquashedGaussian(log_std_init=-2.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()
