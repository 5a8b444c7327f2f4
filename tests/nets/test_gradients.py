"""Gradients written by hand are those of torch's autograd, for every distribution and
network."""

import numpy as np
import pytest
import torch
from tests.nets.activations import hidden_layers
from torch.nn import functional

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Spaces, Tuple, leaves
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic

VECTOR = Box((3,), "float32")
ACTIONS = {
    "discrete": Discrete(4),
    "branches": MultiDiscrete((2, 5, 3)),
    "bits": MultiBinary(6),
    "box": Box((2, 2), "float32", (-2.0,), (6.0,)),
    "half bounded": Box((2,), "float64", (-1.0, 0.0), (1.0, float("inf"))),
    "nested": Dict(
        {
            "aim": Box((2,), "float32", (-2.0,), (6.0,)),
            "kind": Discrete(4),
            "more": Tuple((MultiBinary(3), MultiDiscrete((2, 3)), Box((1, 2), "float32"))),
        }
    ),
}


def built(net, action, n=40, observation=VECTOR):
    """A policy with stirred weights, the inputs of n rows, their actions, and factors (of
    log_prob, entropy, value)."""
    spaces, rng = Spaces(observation, action), np.random.default_rng(0)
    policy = net.build(spaces, 0)
    policy.network.flat += rng.standard_normal(policy.network.size).astype(np.float32) * 0.3
    seen = {"obs": rng.standard_normal((n, 3)).astype(np.float32)}
    out = allocate(net.answer(spaces), (n,))
    policy.act(seen, {}, False, out)
    return (
        policy,
        policy.prepare(seen),
        {name: out[name] for name in leaves(action, "action")},
        rng.standard_normal((3, n)).astype(np.float32),
    )


def by_autograd(policy, inputs, action, factors):
    """(log_prob, entropy, value) and the flat gradient, of a plain network in torch."""
    w = {name: torch.tensor(array, requires_grad=True) for name, array in policy.network.weights.items()}
    shape = policy.network.shape

    def tower(i):
        name, i = ("critic_hidden", 0) if i and shape.critic_hidden is not None else ("hidden", i)
        own = {part: weight[i] for part, weight in w.items() if part.startswith(name)}
        return hidden_layers(torch.from_numpy(inputs["features"]), own, shape.activation, name)

    head = functional.linear(tower(0), w["actor.weight"], w["actor.bias"][:, 0])
    given = {name: torch.from_numpy(array) for name, array in action.items()}
    log_prob, entropy = shape.distribution.evaluate(
        head, w["log_std"][:, 0], shape.distribution.action_of(given)
    )
    found = log_prob, entropy, tower(policy.network.shape.towers - 1) @ w["critic.weight"] + w["critic.bias"]
    sum((torch.from_numpy(factor) * x).sum() for factor, x in zip(factors, found, strict=True)).backward()
    return found, torch.cat(
        [torch.zeros(x.numel()) if x.grad is None else x.grad.reshape(-1) for x in w.values()]
    )


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("hidden", "activation"),
    [((8, 6), "tanh"), ((8, 6), "relu"), ((7,), "tanh"), ((), "tanh"), ((8, 6), "elu"), ((8, 6), "gelu"),
     ((8, 6), "silu")],
)  # fmt: skip
def test_forward_and_backward_are_autograd_s(action, shared, hidden, activation):
    check_gradients(ActorCritic(hidden=hidden, activation=activation, shared_critic=shared), ACTIONS[action])


@pytest.mark.parametrize("action", ["discrete", "box"])
@pytest.mark.parametrize(("shared", "critic_hidden"), [(False, None), (True, None), (False, (5, 9))])
@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_normalised_layers_have_gradients_of_their_scales_and_shifts(
    action, shared, critic_hidden, activation
):
    config = ActorCritic(
        hidden=(8, 6),
        critic_hidden=critic_hidden,
        activation=activation,
        shared_critic=shared,
        layer_norm=True,
    )
    check_gradients(config, ACTIONS[action])


@pytest.mark.parametrize("activation", ["tanh", "silu"])
@pytest.mark.parametrize(
    ("hidden", "critic_hidden"), [((8, 6), (5,)), ((3,), (9, 4, 1)), ((), (5,)), ((5,), ())]
)
def test_a_critic_of_other_layers_has_gradients_of_its_own(hidden, critic_hidden, activation):
    config = ActorCritic(hidden=hidden, critic_hidden=critic_hidden, activation=activation)
    for action in ("discrete", "box"):
        check_gradients(config, ACTIONS[action])


def check_gradients(config, action):
    policy, inputs, actions, factors = built(config, action)
    expected, gradient = by_autograd(policy, inputs, actions, factors)
    found = policy.network.forward(inputs, actions)
    for array, tensor in zip(found, expected, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, tensor.detach(), rtol=1e-5, atol=1e-5)
    out = np.full(policy.network.size, np.nan, np.float32)
    policy.network.backward(*factors, out)
    np.testing.assert_allclose(out, gradient, rtol=1e-5, atol=1e-5)

    factors[1] = 0
    _, gradient = by_autograd(policy, inputs, actions, factors)
    policy.network.forward(inputs, actions)
    policy.network.backward(factors[0], None, factors[2], out)
    np.testing.assert_allclose(out, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
def test_evaluate_has_the_same_gradient_whatever_comes_between(action):
    policy, inputs, actions, factors = built(ActorCritic(hidden=(8,)), ACTIONS[action])
    expected, gradient = by_autograd(policy, inputs, actions, factors)
    tensors = [{name: torch.from_numpy(array) for name, array in part.items()} for part in (inputs, actions)]
    (weights,) = policy.trainable_parameters()
    for between in (
        lambda: None,
        lambda: policy.network.forward(
            {"features": inputs["features"][:5]}, {name: array[:5] for name, array in actions.items()}
        ),
    ):
        found = policy.evaluate(*tensors)
        between()
        weights.grad.zero_()
        sum((torch.from_numpy(factor) * x).sum() for factor, x in zip(factors, found, strict=True)).backward(
            retain_graph=True
        )
        np.testing.assert_allclose(weights.grad, gradient, rtol=1e-5, atol=1e-5)
        found.value.mean().backward()  # added, and a factor that is one number spread out
        assert not np.allclose(weights.grad, gradient)
        np.testing.assert_allclose(found.log_prob.detach(), expected[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shared", "encoder"), [(False, "auto"), (True, "auto"), (True, "impala_cnn")])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_images_write_what_autograd_adds(action, shared, encoder):
    observation = Dict({"camera": Box((36, 36, 1), "uint8", (0.0,), (255.0,)), "speed": VECTOR})
    net = ActorCritic(shared_critic=shared, encoder=encoder)
    spaces = Spaces(observation, ACTIONS[action])
    rng = np.random.default_rng(0)
    n = 6
    policy = net.build(spaces, 0)
    assert policy.network.library == "torch"
    seen = {
        "obs.camera": rng.integers(0, 256, (n, 36, 36, 1)).astype(np.uint8),
        "obs.speed": rng.standard_normal((n, 3)).astype(np.float32),
    }
    out = allocate(net.answer(spaces), (n,))
    policy.act(seen, {}, False, out)
    inputs = {name: torch.from_numpy(array) for name, array in policy.prepare(seen).items()}
    actions = {"action": torch.from_numpy(out["action"])}
    factors = torch.from_numpy(rng.standard_normal((3, n)).astype(np.float32))
    found = policy.evaluate(inputs, actions)
    sum((factor * x).sum() for factor, x in zip(factors, found, strict=True)).backward()
    expected = policy.trainable_parameters()[0].grad.clone()
    gradient = torch.full((policy.network.size,), np.nan)
    for _ in range(2):
        plain = policy.network.forward(inputs, actions)
        assert not any(x.requires_grad for x in plain)
        policy.network.backward(*factors, gradient)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain.log_prob, out["log_prob"], rtol=1e-4, atol=1e-5)
    assert policy.trainable_parameters()[0].grad is gradient


def test_extreme_heads_have_finite_gradients():
    for action in ACTIONS.values():
        policy, inputs, actions, factors = built(ActorCritic(hidden=(8,)), action)
        policy.network.weights["actor.weight"] *= 1000
        policy.network.forward(inputs, actions)
        out = np.empty(policy.network.size, np.float32)
        policy.network.backward(*factors, out)
        assert np.isfinite(out).all()


def test_any_number_of_rows_in_turn():
    policy, inputs, actions, factors = built(ActorCritic(hidden=(8, 8)), ACTIONS["branches"])
    out = np.empty(policy.network.size, np.float32)
    for n in (3, 40, 1, 39, 40, 3):
        part, acted = {"features": inputs["features"][:n]}, {"action": actions["action"][:n]}
        _, gradient = by_autograd(policy, part, acted, factors[:, :n])
        policy.network.forward(part, acted)
        policy.network.backward(*factors[:, :n], out)
        np.testing.assert_allclose(out, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("off", [0.0, 1e4])
def test_moments_of_parts_add_up_to_those_of_the_whole(off):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((60, 3)) + off).astype(np.float32)
    returns = (rng.standard_normal(60) * 5 + off).astype(np.float32)
    whole, parts = (
        ActorCritic(normalise_observations=True).build(Spaces(VECTOR, Discrete(2)), 0) for _ in range(2)
    )
    for start in (0, 30):
        span = slice(start, start + 30)
        whole.fold({"obs": rows[span]}, returns[span])
        sums = [
            parts.moments({"obs": rows[i : i + 10]}, returns[i : i + 10])
            for i in (start, start + 10, start + 20)
        ]
        parts.fold_moments(sum(sums) + parts.moments({}, None))
    for name, array in whole.parameters().items():
        np.testing.assert_allclose(parts.parameters()[name], array, rtol=1e-6, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(
        whole.parameters()["observation.mean"], rows.mean(0, np.float64), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        whole.parameters()["observation.variance"], rows.var(0, dtype=np.float64), rtol=1e-6
    )
