"""A centralised critic: parts of the observation that it alone sees, and on which nothing
that the actor does depends."""

import numpy as np
import pytest
import torch
from tests.nets.test_actor_critic import draw

from tidemill.algorithms.ppo import PPO
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces, Tuple, schema_of_space
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.gpu_acting import DeviceActing
from tidemill.nets.image_networks import NATURE

STATE = Box((7,), "float32")
VIEW = Box((3,), "float32")
CAMERA = Box((36, 36, 1), "uint8", (0.0,), (255.0,))
OBSERVATIONS = {  # the state stands first: that the actor's columns come first is the encoder's doing
    "vector": Dict({"global_state": STATE, "view": VIEW}),
    "nested": Dict(
        {"global_state": Dict({"phase": Discrete(4), "all": STATE}), "view": Tuple((VIEW, Discrete(3)))}
    ),
    "camera": Dict({"camera": CAMERA, "global_state": STATE}),
    "camera and vector": Dict({"camera": CAMERA, "global_state": STATE, "view": VIEW}),
}
ACTIONS = {
    "discrete": Discrete(4),
    "branches": MultiDiscrete((2, 3)),
    "box": Box((2,), "float32", (-2.0,), (6.0,)),
}
NET = ActorCritic(hidden=(8, 6), normalise_observations=True)


def built(observation="vector", action="discrete", kind="numpy", net=NET):
    """A policy whose weights are stirred but where they must be 0, and random rows."""
    spaces = Spaces(OBSERVATIONS[observation], ACTIONS[action])
    policy = ActorCriticPolicy(net, spaces, 0, "torch") if kind != "numpy" else net.build(spaces, 0)
    stir = np.random.default_rng(1).standard_normal(policy.network.size).astype(np.float32)
    policy.network.flat[:] = np.where(
        policy.network.flat, policy.network.flat + 0.1 * stir, policy.network.flat
    )
    return policy, spaces


def answered(policy, spaces, seen, kind, deterministic=False):
    """The answers to `seen`, drawn by the policy's first random numbers."""
    out = allocate(NET.answer(spaces), (len(next(iter(seen.values()))),))
    if kind == "device":
        DeviceActing(policy.network, 0, True).begin(
            policy.prepare(seen), deterministic, policy.value_scale, out
        )()
    else:
        policy._rng = np.random.default_rng(3)
        policy.act(seen, {}, deterministic, out)
    return out


def changed(seen):
    """The same rows with another global state, in part no number at all."""
    rng, other = np.random.default_rng(9), dict(seen)
    for name in seen:
        if name.startswith("obs.global_state"):
            other[name] = (
                rng.integers(0, 4, seen[name].shape)
                if "phase" in name
                else rng.standard_normal(seen[name].shape, np.float32) * 1e6
            )
    return other


CASES = [
    (name, kind)
    for name in OBSERVATIONS
    for kind in ("numpy", "torch", "device")
    if not ("camera" in name and kind == "numpy")
]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("observation", "kind"), CASES)
def test_the_actor_does_not_depend_on_what_the_critic_alone_sees(observation, kind, action):
    policy, spaces = built(observation, action, kind)
    seen = draw(spaces.observation, 50)
    for deterministic in (False, True):
        out, other = (answered(policy, spaces, rows, kind, deterministic) for rows in (seen, changed(seen)))
        for name in ("action", "log_prob"):
            np.testing.assert_array_equal(out[name], other[name])
        assert (out["value"] != other["value"]).mean() > 0.9


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_not_even_by_what_is_no_number(kind):
    policy, spaces = built(kind=kind)
    seen = draw(spaces.observation, 20)
    out = answered(policy, spaces, seen, kind)
    seen["obs.global_state"][...] = np.nan
    other = answered(policy, spaces, seen, kind)
    for name in ("action", "log_prob"):
        np.testing.assert_array_equal(out[name], other[name])
    assert np.isnan(other["value"]).all()


def blind(policy, array):
    """The actor's part of the first layer where it does not see, of weights or of a
    gradient."""
    named, start = {}, 0
    for name, shape in policy.network.shape.forms().items():
        size = int(np.prod(shape))
        named[name], start = array[start : start + size].reshape(shape), start + size
    return named["hidden.0.weight"][0, policy.encoder.seen + NATURE.features * len(policy.encoder.images) :]


def by_autograd(policy, features, action, factors):
    """(log_prob, entropy, value) and the gradient of a plain network of two separate
    towers."""
    w = {name: torch.tensor(array, requires_grad=True) for name, array in policy.network.weights.items()}
    x, seen = torch.from_numpy(features), policy.encoder.seen

    def tower(i, h):
        for layer in range(len(policy.network.shape.hidden)):
            weight = w[f"hidden.{layer}.weight"][i]
            h = torch.tanh(h @ weight[: h.shape[1]] + w[f"hidden.{layer}.bias"][i])
        return h

    head = tower(0, x[:, :seen]) @ w["actor.weight"].T + w["actor.bias"][:, 0]
    log_prob, entropy = policy.network.shape.distribution.evaluate(
        head, w["log_std"][:, 0], torch.from_numpy(action)
    )
    found = log_prob, entropy, tower(1, x) @ w["critic.weight"] + w["critic.bias"]
    sum(
        (torch.from_numpy(factor) * part).sum() for factor, part in zip(factors, found, strict=True)
    ).backward()
    return found, torch.cat(
        [torch.zeros(v.numel()) if v.grad is None else v.grad.reshape(-1) for v in w.values()]
    )


@pytest.mark.parametrize("hidden", [(8, 6), (7,)])
@pytest.mark.parametrize("observation", ["vector", "nested"])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_are_autograd_s_and_0_where_the_actor_is_blind(action, observation, hidden):
    net, n = NET.replace(hidden=hidden), 40
    factors = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    for kind in ("numpy", "torch"):
        policy, spaces = built(observation, action, kind, net)
        seen = draw(spaces.observation, n)
        acted, inputs = answered(policy, spaces, seen, kind)["action"], policy.prepare(seen)
        expected, gradient = by_autograd(policy, inputs["features"], acted, factors)
        if kind == "numpy":
            found, out = (
                policy.network.forward(inputs, {"action": acted}),
                np.full(policy.network.size, np.nan, np.float32),
            )
            policy.network.backward(*factors, out)
        else:
            tensor = torch.full((policy.network.size,), torch.nan)
            found = policy.network.forward(
                {"features": torch.from_numpy(inputs["features"])}, {"action": torch.from_numpy(acted)}
            )
            policy.network.backward(*torch.from_numpy(factors), tensor)
            out = tensor.numpy()
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out, gradient, rtol=1e-5, atol=1e-5)
        part = blind(policy, out)
        assert part.size == (policy.encoder.width - policy.encoder.seen) * hidden[0]
        assert (part == 0).all()


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_updates_leave_the_actor_blind_and_teach_the_critic(observation):
    """The reward is in the state alone: only a critic that sees it can foretell it."""
    net = NET.replace(hidden=(32,))
    policy, spaces = built(observation, kind="torch" if "camera" in observation else "numpy", net=net)
    (state,) = (
        name
        for name in schema_of_space(spaces.observation, "obs")
        if name in ("obs.global_state", "obs.global_state.all")
    )
    learner = PPO(
        gamma=0.0, minibatch_size=64, learning_rate=1e-2, epochs=2 if "camera" in observation else 8
    ).build(policy, 0)
    metrics = {}
    for seed in range(3 if "camera" in observation else 12):
        steps, seats = 17, 16
        sample = Sample(
            allocate(
                {**ROW_FIELDS, **schema_of_space(spaces.observation, "obs"), **net.answer(spaces)},
                (steps, seats),
            )
        )
        seen = draw(spaces.observation, steps * seats, seed)
        for name, array in (seen | answered(policy, spaces, seen, "torch")).items():
            sample[name][...] = array.reshape(steps, seats, *array.shape[1:])
        sample["reward"][...] = sample[state][..., 0] / 3
        metrics = learner.update([sample], 0.0)
        assert (blind(policy, policy.network.flat) == 0).all()
    if "camera" not in observation:
        assert metrics["explained_variance"] > 0.8
    out, other = (answered(policy, spaces, rows, "torch") for rows in (seen, changed(seen)))
    np.testing.assert_array_equal(out["log_prob"], other["log_prob"])


def test_first_weights_are_orthogonal_for_what_each_tower_sees():
    policy = ActorCritic(hidden=(16,)).build(Spaces(OBSERVATIONS["vector"], Discrete(4)), 0)
    actor, critic = policy.network.weights["hidden.0.weight"]
    np.testing.assert_allclose(actor[:3] @ actor[:3].T, 2 * np.eye(3), atol=1e-5)
    np.testing.assert_allclose(critic @ critic.T, 2 * np.eye(10), atol=1e-5)
    assert (actor[3:] == 0).all()


def test_a_state_that_an_observation_lacks_changes_nothing():
    space = Dict({"place": STATE, "view": VIEW})
    named, bare = (
        ActorCritic(critic_only=parts).build(Spaces(space, Discrete(4)), 0)
        for parts in (("global_state",), ())
    )
    np.testing.assert_array_equal(named.network.flat, bare.network.flat)
    seen = draw(space, 30)
    outs = [answered(policy, Spaces(space, Discrete(4)), seen, "numpy") for policy in (named, bare)]
    for name in outs[0]:
        np.testing.assert_array_equal(outs[0][name], outs[1][name])


def test_a_part_of_another_name_may_be_the_critic_s():
    policy = ActorCritic(critic_only=("view", "global_state.phase")).build(
        Spaces(OBSERVATIONS["nested"], Discrete(4)), 0
    )
    assert policy.encoder.critic_only == ["obs.global_state.phase", "obs.view.0", "obs.view.1"]
    assert (policy.encoder.seen, policy.encoder.width) == (7, 17)


@pytest.mark.parametrize(
    ("settings", "observation", "message"),
    [
        (
            {"shared_critic": True},
            OBSERVATIONS["vector"],
            r"shared_critic = True, but only the critic is to see obs\.global_state; ",
        ),
        (
            {"hidden": ()},
            OBSERVATIONS["vector"],
            r"hidden = \[\], but only the critic is to see obs\.global_state",
        ),
        (
            {"critic_only": ("camera",)},
            OBSERVATIONS["camera"],
            r'critic_only names obs\.camera, an image; .*encoder = "mlp"',
        ),
        (
            {"critic_only": ("global_stat",)},
            OBSERVATIONS["vector"],
            r'names "global_stat", but the .* no such part; did you mean "global_state"?',
        ),
        (
            {},
            Dict({"global_state": STATE}),
            r"the critic alone sees obs\.global_state, so the actor has nothing",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, observation, message):
    with pytest.raises(ConfigError, match=message):
        ActorCritic(**settings).build(Spaces(observation, Discrete(4)), 0)


def test_a_mask_is_not_for_the_critic():
    with pytest.raises(ConfigError, match='"legal" is named by action_mask and by critic_only'):
        ActorCritic(action_mask="legal", critic_only=("legal",))
    assert ActorCritic(shared_critic=True).build(Spaces(VIEW, Discrete(4)), 0).network.shape.towers == 1
    flattened = ActorCritic(critic_only=("camera",), encoder="mlp").build(
        Spaces(OBSERVATIONS["camera and vector"], Discrete(4)), 0
    )
    assert flattened.encoder.width - flattened.encoder.seen == 36 * 36
