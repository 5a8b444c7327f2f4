"""Noise that is a function of the state: its formulas, gradients, and when it changes."""

import numpy as np
import pytest
import torch

from tidemill import ActorCritic
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate
from tidemill.nets.state_dependent_exploration import log_prob_of, noise_of, variance_of

SPACES = Spaces(Box((3,), "float32"), Box((2,), "float32", (-2.0,), (4.0,)))
NET = ActorCritic(hidden=(8, 5), sde_steps=3, log_std_init=-0.5)


def test_noise_and_variance_are_those_of_the_paper():
    z = np.array([[1, 2]], np.float32)
    deviation = np.array([[0.5, 1], [0.25, 2]], np.float32)
    normal = np.array([[[1, -1], [2, 0.5]]], np.float32)
    # 1 · 0.5 · 1 + 2 · 0.25 · 2, and 1 · 1 · -1 + 2 · 2 · 0.5
    np.testing.assert_allclose(noise_of(z, deviation, normal), [[1.5, 1]])
    # (1 · 0.5)² + (2 · 0.25)², and (1 · 1)² + (2 · 2)²
    np.testing.assert_allclose(variance_of(z, deviation), [[0.5, 17]], rtol=1e-5)
    # -½ (1.5² / 0.5 + log 0.5 + 1 / 17 + log 17) - log 2π
    found = log_prob_of(np.array([[1.5, 1]], np.float32), np.array([[0.5, 17]], np.float32))
    np.testing.assert_allclose(found, [-5.187326], rtol=1e-5)


def acted(n=6, net=NET):
    policy = net.build(SPACES, 0)
    rng = np.random.default_rng(1)
    policy.network.flat += rng.standard_normal(policy.network.size).astype(np.float32) * 0.3
    seen = {"obs": rng.standard_normal((n, 3), np.float32)}
    return policy, seen, allocate({**net.answer(SPACES), **net.state(SPACES)}, (n,))


def test_noise_stays_for_some_steps_and_is_drawn_where_an_episode_begins():
    policy, seen, out = acted()
    state, actions, seeds = allocate(NET.state(SPACES), (6,)), [], []
    for _ in range(7):
        policy.act(seen, state, False, out)
        actions.append(out["action"].copy())
        state = {"state.noise": out["state.noise"].copy()}
        seeds.append(state["state.noise"][:, 0])
        if len(actions) == 4:
            state["state.noise"][2] = 0  # an episode begins
    for before, after in ((0, 1), (1, 2), (3, 4), (4, 5)):
        same = np.arange(6) != 2 if (before, after) == (3, 4) else slice(None)
        np.testing.assert_array_equal(actions[before][same], actions[after][same])
    assert (actions[3][2] != actions[4][2]).all() and (seeds[3][2] != seeds[4][2]).all()
    assert (actions[2] != actions[3]).all() and len(set(seeds[0].tolist())) == 6


def test_a_policy_that_is_built_anew_goes_on_with_the_noise_that_a_state_names():
    policy, seen, out = acted()
    policy.act(seen, allocate(NET.state(SPACES), (6,)), False, out)
    first, state = out["action"].copy(), {"state.noise": out["state.noise"].copy()}
    other = NET.build(SPACES, 99)
    other.load({name: array.copy() for name, array in policy.parameters().items()}, 1)
    other.act({"obs": seen["obs"][::-1]}, {"state.noise": state["state.noise"][::-1]}, False, out)
    np.testing.assert_allclose(out["action"][::-1], first, rtol=1e-5, atol=1e-6)


def test_the_mode_is_the_mean_and_draws_nothing():
    policy, seen, out = acted()
    state = allocate(NET.state(SPACES), (6,))
    policy.act(seen, state, True, out)
    mode = out["action"].copy()
    assert not out["state.noise"].any()
    policy.act(seen, state, np.arange(6) < 3, out)
    np.testing.assert_array_equal(out["action"][:3], mode[:3])
    assert (out["action"][3:] != mode[3:]).all()


def test_gradients_are_autograd_s_and_log_probs_those_of_acting():
    policy, seen, out = acted(40)
    policy.act(seen, allocate(NET.state(SPACES), (40,)), False, out)
    inputs, network = policy.prepare(seen), policy.network
    w = {k: torch.tensor(a, dtype=torch.float64, requires_grad=True) for k, a in network.weights.items()}
    towers = []
    for i in range(2):
        h = torch.tensor(seen["obs"]).double()
        for layer in range(2):
            h = (h @ w[f"hidden.{layer}.weight"][i] + w[f"hidden.{layer}.bias"][i]).tanh()
        towers.append(h)
    mean = towers[0] @ w["actor.weight"].T + w["actor.bias"][:, 0]
    variance = towers[0].detach().square() @ w["log_std"].exp().square() + 1e-6
    normal = torch.distributions.Normal(mean, variance.sqrt())
    action = (torch.tensor(out["action"]).double() - 1) / 3
    expected = (
        normal.log_prob(action).sum(-1), normal.entropy().sum(-1),
        towers[1] @ w["critic.weight"] + w["critic.bias"],
    )  # fmt: skip
    factors = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    sum((torch.tensor(f) * x).sum() for f, x in zip(factors, expected, strict=True)).backward()
    found = network.forward(inputs, {"action": out["action"]})
    for array, tensor in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, tensor.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[0], out["log_prob"], rtol=1e-4, atol=1e-4)
    gradient = np.full(network.size, np.nan, np.float32)
    network.backward(*factors, gradient)
    exact = torch.cat([x.grad.reshape(-1) for x in w.values()]).numpy()
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="sde_steps = -1"):
        ActorCritic(sde_steps=-1)
    with pytest.raises(ConfigError, match="sde_steps = 4 has no effect on actions"):
        ActorCritic(sde_steps=4).weights(Spaces(Box((3,), "float32"), Discrete(2)))
    with pytest.raises(ConfigError, match="computed by numpy"):
        ActorCritic(sde_steps=4).build_on("cuda", SPACES, 0)
