"""Action masks: what is forbidden is never drawn, has probability 0 and no gradient, in
numpy, in torch and as on a device."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from tidemill.algorithms.ppo import PPO
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Spaces, schema_of_space
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.gpu_acting import DeviceActing
from tidemill.nets.torch_network import TorchNetwork

ACTIONS = {"discrete": Discrete(5), "branches": MultiDiscrete((2, 4, 3))}
NET = ActorCritic(hidden=(8, 6), normalise_observations=True)


def spaces_of(action, mask=None):
    branches = action.nvec if isinstance(action, MultiDiscrete) else (action.n,)
    mask = mask or Box((sum(branches),), "int8", (0.0,), (1.0,))
    return Spaces(Dict({"action_mask": mask, "view": Box((3,), "float32")}), action), branches


def draw(branches, n, seed=0):
    """Random observations; each branch allows at least one action, and in row 0 just its
    last."""
    rng = np.random.default_rng(seed)
    parts = []
    for size in branches:
        part = rng.random((n, size)) < 0.4
        part[np.arange(n), rng.integers(0, size, n)] = True
        part[0] = np.arange(size) == size - 1
        parts.append(part)
    return {
        "obs.action_mask": np.concatenate(parts, 1).astype(np.int8),
        "obs.view": rng.standard_normal((n, 3)).astype(np.float32),
    }


def built(action, kind="numpy", net=NET, seed=0):
    """A policy with stirred weights."""
    spaces, branches = spaces_of(action)
    policy = net.build(spaces, seed) if kind == "numpy" else ActorCriticPolicy(net, spaces, seed, "torch")
    policy.network.flat += np.random.default_rng(1).standard_normal(policy.network.size).astype(np.float32)
    return policy, spaces, branches


def answered(policy, spaces, seen, deterministic=False, kind="numpy"):
    out = allocate(NET.answer(spaces), (len(seen["obs.view"]),))
    if kind == "device":
        DeviceActing(policy.network, 0, True).begin(
            policy.prepare(seen), deterministic, policy.value_scale, out
        )()
    else:
        policy.act(seen, {}, deterministic, out)
    return out


def allowed(action, seen, branches):
    """[n]: whether the mask allows every branch's action."""
    choices = action.reshape(len(action), -1) + np.cumsum([0, *branches[:-1]])
    return np.take_along_axis(seen["obs.action_mask"], choices, 1).all(1)


def plain(policy, seen, branches):
    """The unnormalised log-probabilities [n, actions] as float64, and per branch the
    log-probabilities of what is allowed (-inf: nothing)."""
    w = policy.network.weights
    x = (seen["obs.view"] - policy._observation.moments.mean) / np.sqrt(
        policy._observation.moments.variance + 1e-8
    )
    for i in range(len(policy.network.shape.hidden)):
        x = np.tanh(x @ w[f"hidden.{i}.weight"][0] + w[f"hidden.{i}.bias"][0])
    head = (x @ w["actor.weight"].T + w["actor.bias"][:, 0]).astype(np.float64)
    found = []
    for end, size in zip(np.cumsum(branches), branches, strict=True):
        part = np.where(seen["obs.action_mask"][:, end - size : end] > 0, head[:, end - size : end], -np.inf)
        found.append(part - np.logaddexp.reduce(part, 1, keepdims=True))
    return found


@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_forbidden_is_never_drawn_and_the_rest_as_often_as_it_should_be(action, kind):
    policy, spaces, branches = built(ACTIONS[action], kind)
    n = 40_000
    seen = draw(branches, n)
    out = answered(policy, spaces, seen, kind=kind)
    assert allowed(out["action"], seen, branches).all()
    rows = {name: np.repeat(array[5:6], n, 0) for name, array in seen.items()}
    out = answered(policy, spaces, rows, kind=kind)
    for i, log_probs in enumerate(plain(policy, rows, branches)):
        counts = np.bincount(out["action"].reshape(n, -1)[:, i], minlength=branches[i])
        np.testing.assert_allclose(counts / n, np.exp(log_probs[0]), atol=0.012)


@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
@pytest.mark.parametrize("action", ACTIONS)
def test_log_probabilities_and_entropies_are_those_of_what_is_allowed(action, kind):
    policy, spaces, branches = built(ACTIONS[action], kind)
    seen = draw(branches, 60)
    expected = plain(policy, seen, branches)
    mode = np.stack([log_probs.argmax(1) for log_probs in expected], 1)
    flags = np.arange(60) % 2 == 0
    for deterministic in (False, True, flags):
        out = answered(policy, spaces, seen, deterministic, kind)
        choices = out["action"].reshape(60, -1)
        asked = np.broadcast_to(deterministic, 60)
        np.testing.assert_array_equal(choices[asked], mode[asked])
        log_prob = sum(np.take_along_axis(x, choices[:, i : i + 1], 1)[:, 0] for i, x in enumerate(expected))
        np.testing.assert_allclose(out["log_prob"], log_prob, rtol=1e-4, atol=1e-5)
        assert allowed(out["action"], seen, branches).all()
    tensors = {name: torch.from_numpy(array) for name, array in policy.prepare(seen).items()}
    found = policy.evaluate(tensors, {"action": torch.from_numpy(out["action"])})
    np.testing.assert_allclose(found.log_prob.detach(), log_prob, rtol=1e-4, atol=1e-5)
    entropy = -sum(
        np.where(np.isfinite(x), np.exp(x) * np.where(np.isfinite(x), x, 0), 0).sum(1) for x in expected
    )
    np.testing.assert_allclose(found.entropy.detach(), entropy, rtol=1e-4, atol=1e-5)
    assert found.entropy[0] == 0  # one action per branch
    assert out["log_prob"][0] == 0


@pytest.mark.parametrize("action", ACTIONS)
def test_a_forbidden_action_has_probability_0(action):
    policy, spaces, branches = built(ACTIONS[action])
    seen = draw(branches, 20)
    best = answered(policy, spaces, seen, True)["action"].reshape(20, -1)
    for i, size in enumerate(branches):
        start = sum(branches[:i])
        for choice in range(size):
            acted = best.copy()
            acted[:, i] = choice
            log_prob = policy.network.forward(
                policy.prepare(seen),
                {"action": acted.reshape(answered(policy, spaces, seen)["action"].shape)},
            ).log_prob
            np.testing.assert_array_equal(
                np.exp(log_prob) > 0, seen["obs.action_mask"][:, start + choice] > 0
            )


def by_autograd(policy, inputs, action, factors, branches):
    """The flat gradient of a plain network in torch, whose distribution is over what is
    allowed alone."""
    w = {name: torch.tensor(array, requires_grad=True) for name, array in policy.network.weights.items()}

    def tower(i):
        h = torch.from_numpy(inputs["features"])
        for layer in range(len(policy.network.shape.hidden)):
            h = torch.tanh(h @ w[f"hidden.{layer}.weight"][i] + w[f"hidden.{layer}.bias"][i])
        return h

    head = tower(0) @ w["actor.weight"].T + w["actor.bias"][:, 0]
    log_prob = entropy = 0
    for i, size in enumerate(branches):
        start = sum(branches[:i])
        legal = ~torch.from_numpy(inputs["forbidden"][:, start : start + size])
        part = head[:, start : start + size]
        log_probs = part - part.masked_fill(~legal, -torch.inf).logsumexp(1, keepdim=True)
        log_prob = (
            log_prob
            + log_probs.gather(1, torch.from_numpy(action.reshape(len(action), -1)[:, i : i + 1]))[:, 0]
        )
        entropy = entropy - torch.where(legal, log_probs.exp() * log_probs, 0).sum(1)
    value = tower(1) @ w["critic.weight"] + w["critic.bias"]
    sum(
        (torch.from_numpy(factor) * x).sum()
        for factor, x in zip(factors, (log_prob, entropy, value), strict=True)
    ).backward()
    return torch.cat([torch.zeros(x.numel()) if x.grad is None else x.grad.reshape(-1) for x in w.values()])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_are_autograd_s_and_exactly_0_for_what_is_forbidden(action, kind):
    policy, spaces, branches = built(ACTIONS[action], kind)
    policy.network.flat *= 0.3
    n, never = 40, [2, sum(branches) - 1]
    seen = draw(branches, n)
    seen["obs.action_mask"][:, never] = 0
    seen["obs.action_mask"][:, np.cumsum(branches) - 2] = 1
    action, inputs = answered(policy, spaces, seen)["action"], policy.prepare(seen)
    factors = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    expected = by_autograd(policy, inputs, action, factors, branches)
    if kind == "numpy":
        gradient = np.full(policy.network.size, np.nan, np.float32)
        policy.network.forward(inputs, {"action": action})
        policy.network.backward(*factors, gradient)
    else:
        tensor = torch.full((policy.network.size,), torch.nan)
        policy.network.forward(
            {name: torch.from_numpy(array) for name, array in inputs.items()},
            {"action": torch.from_numpy(action)},
        )
        policy.network.backward(*torch.from_numpy(factors), tensor)
        gradient = tensor.numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    start = sum(
        int(np.prod(shape))
        for name, shape in policy.network.shape.forms().items()
        if name.startswith("hidden")
    )
    of_head = gradient[start : start + 6 * sum(branches)].reshape(-1, 6)
    assert (of_head[never] == 0).all()
    assert (of_head[1:-1] != 0).any(1).sum() >= 2
    # evaluate, as an algorithm with autograd around the policy uses it
    policy.trainable_parameters()[0].grad.zero_()
    found = policy.evaluate(
        {name: torch.from_numpy(array) for name, array in inputs.items()},
        {"action": torch.from_numpy(action)},
    )
    sum((torch.from_numpy(factor) * x).sum() for factor, x in zip(factors, found, strict=True)).backward()
    np.testing.assert_allclose(policy.trainable_parameters()[0].grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_forbidden_has_no_gradient_even_where_it_was_done(action):
    """Rows of another behaviour, or that forbid everything: nothing acts on these, but
    they may pass through the network."""
    policy, spaces, branches = built(ACTIONS[action])
    torched, _, _ = built(ACTIONS[action], "torch")
    seen, n = draw(branches, 40), 40
    seen["obs.action_mask"][:, 2] = 0
    seen["obs.action_mask"][::4] = 0
    acted = allocate(NET.answer(spaces), (n,))["action"]
    acted.reshape(n, -1)[...] = np.random.default_rng(0).integers(0, branches, (n, len(branches)))
    factors = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    gradient = np.empty(policy.network.size, np.float32)
    of_torch = torch.empty(policy.network.size)
    inputs = policy.prepare(seen)
    policy.network.forward(inputs, {"action": acted})
    policy.network.backward(*factors, gradient)
    torched.network.forward(
        {name: torch.from_numpy(array) for name, array in inputs.items()}, {"action": torch.from_numpy(acted)}
    )
    torched.network.backward(*torch.from_numpy(factors), of_torch)
    np.testing.assert_allclose(gradient, of_torch, rtol=1e-4, atol=1e-4)
    start = sum(
        int(np.prod(shape))
        for name, shape in policy.network.shape.forms().items()
        if name.startswith("hidden")
    )
    assert (gradient[start + 12 : start + 18] == 0).all()


@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_mask_that_allows_everything_changes_nothing(action, kind):
    masked, spaces, branches = built(ACTIONS[action], kind)
    without = Spaces(spaces.observation.spaces["view"], spaces.action)
    bare = NET.build(without, 0) if kind == "numpy" else ActorCriticPolicy(NET, without, 0, "torch")
    bare.load(masked.parameters(), 0)
    seen = draw(branches, 50)
    seen["obs.action_mask"][...] = 1
    outs = [
        answered(policy, spaces, seen | {"obs": seen["obs.view"]}, kind=kind) for policy in (masked, bare)
    ]
    for name in outs[0]:
        np.testing.assert_array_equal(outs[0][name], outs[1][name])


def test_the_network_does_not_see_the_mask():
    policy, spaces, branches = built(Discrete(5))
    seen = draw(branches, 30)
    assert policy.encoder.width == 3
    value = answered(policy, spaces, seen)["value"]
    seen["obs.action_mask"][...] = 1
    np.testing.assert_array_equal(answered(policy, spaces, seen)["value"], value)
    other = NET.replace(action_mask=None).build(spaces, 0)
    assert (other.encoder.width, other.mask) == (8, None)
    assert NET.build(Spaces(Box((3,), "float32"), Discrete(5)), 0).mask is None


MASKS = {"bool": Box((5,), "bool"), "uint8": Box((5,), "uint8", (0.0,), (255.0,)), "bits": MultiBinary(5)}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_may_be_bits_of_any_small_dtype(mask):
    spaces, branches = spaces_of(Discrete(5), MASKS[mask])
    policy = NET.build(spaces, 0)
    seen = draw(branches, 200)
    ((_, field),) = schema_of_space(MASKS[mask], "x").items()
    seen["obs.action_mask"] = seen["obs.action_mask"].astype(field.dtype) * (255 if mask == "uint8" else 1)
    policy.check(seen)
    assert allowed(answered(policy, spaces, seen)["action"], seen, branches).all()


@pytest.mark.parametrize(
    ("action", "mask", "message"),
    [
        (
            Discrete(5),
            Box((4,), "int8"),
            r"obs\.action_mask is int8\[4\]; it must be one array, bool or int8, of 5 elements",
        ),
        (Discrete(5), Box((5,), "float32"), r"obs\.action_mask is float32\[5\]; .* of 5 elements"),
        (Discrete(5), Discrete(5), r"obs\.action_mask is int64\[\]; .* of 5 elements"),
        (
            MultiDiscrete((2, 4, 3)),
            MultiBinary(3),
            r"obs\.action_mask is int8\[3\]; .* of 2\+4\+3 = 9 elements",
        ),
        (
            MultiDiscrete((2, 3)),
            Dict({"a": MultiBinary(2), "b": MultiBinary(3)}),
            r"has parts itself \(obs\.action_mask\.a, obs\.action_mask\.b\)",
        ),
        (
            Box((2,), "float32"),
            MultiBinary(2),
            r"masks go with Discrete and MultiDiscrete; take action_mask = None",
        ),
        (MultiBinary(2), MultiBinary(2), r"masks go with Discrete and MultiDiscrete"),
    ],
)
def test_a_mask_that_does_not_fit_the_actions_is_refused_by_name(action, mask, message):
    spaces = Spaces(Dict({"action_mask": mask, "view": Box((3,), "float32")}), action)
    for config in (NET, Joined()):
        with pytest.raises(ConfigError, match=message):
            config.build(spaces, 0)


def test_a_mask_of_another_name_must_be_there():
    """Else whoever misspells it plays what is forbidden, and does not know."""
    spaces, _ = spaces_of(Discrete(5))
    for config in (NET.replace(action_mask="action_msk"), Joined(action_mask="action_msk")):
        with pytest.raises(
            ConfigError,
            match=r'action_mask = "action_msk", but the observation has no such part; did you mean '
            r'"action_mask"\?',
        ):
            config.build(spaces, 0)
    with pytest.raises(ConfigError, match="no such part; known: none"):
        NET.replace(action_mask="legal").build(Spaces(Box((3,), "float32"), Discrete(5)), 0)


def test_a_mask_alone_is_no_observation():
    with pytest.raises(ConfigError, match=r"besides the action mask obs\.action_mask"):
        NET.build(Spaces(Dict({"action_mask": MultiBinary(3)}), Discrete(3)), 0)


def make_sample(policy, spaces, branches, seed=0, steps=12, seats=8):
    """Rows as an actor writes them: action 0 pays; final rows forbid everything."""
    rng = np.random.default_rng(seed)
    answer = NET.answer(spaces)
    sample = Sample(
        allocate({**ROW_FIELDS, **schema_of_space(spaces.observation, "obs"), **answer}, (steps, seats))
    )
    for t in range(steps):
        seen = draw(branches, seats, seed * 1000 + t)
        final = rng.random(seats) < 0.2
        sample["done"][t], sample["truncated"][t] = (
            final & (np.arange(seats) % 2 == 0),
            final & (np.arange(seats) % 2 == 1),
        )
        seen["obs.action_mask"][final] = 0
        out = allocate(answer, (seats,))
        policy.act(seen, {}, False, out)
        assert np.isfinite(out["log_prob"]).all()
        for name, array in (seen | out).items():
            sample[name][t] = array
    sample["version"][...] = np.where(sample["done"], -1, 0)
    first = sample["action"].reshape(steps, seats, -1)[..., 0]
    sample["reward"][...] = np.where(sample["done"] | sample["truncated"], 0, first == 0)
    return sample


@pytest.mark.parametrize("action", ACTIONS)
def test_updates_with_masks_are_equal_in_numpy_and_torch_and_learn(action):
    learners, share = [], []
    for kind in ("numpy", "torch"):
        policy, spaces, branches = built(ACTIONS[action], kind)
        learners.append(
            PPO(gamma=0.0, minibatch_size=64, epochs=4, learning_rate=1e-2, correct_off_policy=True).build(
                policy, 0
            )
        )
    for seed in range(15):
        sample = make_sample(learners[0].policy, spaces, branches, seed, 17, 16)
        trained = sample.trained()
        could = trained & (sample["obs.action_mask"][..., 0] > 0)
        share.append((sample["action"].reshape(*could.shape, -1)[..., 0] == 0)[could].mean())
        metrics = [learner.update([sample], 0.0) for learner in learners]
        assert metrics[0]["loss/policy"] == pytest.approx(metrics[1]["loss/policy"], abs=1e-4)
        if seed < 2:
            np.testing.assert_allclose(
                learners[1].policy.network.flat, learners[0].policy.network.flat, rtol=1e-3, atol=1e-4
            )
    assert share[-1] > 0.9
    assert share[0] < 0.8


@pytest.mark.parametrize("action", ACTIONS)
def test_a_row_that_was_acted_on_and_allows_nothing_is_named_and_a_final_one_is_not(action):
    policy, spaces, branches = built(ACTIONS[action])
    learner = PPO(minibatch_size=64).build(policy, 0)
    sample = make_sample(policy, spaces, branches)
    assert (sample["obs.action_mask"][sample["truncated"]] == 0).all()
    assert sample["truncated"].any()
    learner.update([sample], 0.0)
    before = policy.network.flat.copy()
    row = np.argwhere(sample.trained())[3]
    sample["obs.action_mask"][tuple(row)][-branches[-1] :] = 0
    where = " in branch 2" if len(branches) > 1 else ""
    with pytest.raises(
        EnvironmentFault,
        match=rf"obs\.action_mask allows no action{where} in 1 of {sample.trained().sum()} rows .*row 3 ",
    ):
        learner.update([sample], 0.0)
    np.testing.assert_array_equal(policy.network.flat, before)


class Layer(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(3, outputs + 1)

    def forward(self, seen):
        out = self.layer(seen["obs.view"])
        return out[:, :-1], out[:, -1]


@dataclass(frozen=True, kw_only=True)
class Joined(TorchNetwork):
    def network(self, spaces, outputs):
        return Layer(outputs)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_module_of_one_s_own_is_masked_by_its_base(action):
    spaces, branches = spaces_of(ACTIONS[action])
    policy, seen = Joined().build(spaces, 0), draw(branches, 500)
    for kind in ("torch", "device"):
        for deterministic in (False, True):
            assert allowed(
                answered(policy, spaces, seen, deterministic, kind)["action"], seen, branches
            ).all()
    assert not allowed(
        answered(Joined(action_mask=None).build(spaces, 0), spaces, seen)["action"], seen, branches
    ).all()
    learner = PPO(minibatch_size=64).build(policy, 0)
    sample = make_sample(policy, spaces, branches)
    assert learner.update([sample], 0.0)["rows"] > 0
    sample["obs.action_mask"][...] = 0
    with pytest.raises(EnvironmentFault, match=r"obs\.action_mask allows no action"):
        learner.update([sample], 0.0)


def test_the_mode_of_a_distribution_stands_in_for_what_rounding_hit_upon():
    distribution = NET.build(spaces_of(Discrete(5))[0], 0).network.shape.distribution
    head = torch.tensor([[0.3, -0.2, 0.1, -1e30, -1e30]]).repeat(20_000, 1)
    noise = torch.full((20_000, 1), 1 - 2**-24)  # the largest number that is drawn
    head[:, :3] += torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    drawn, never = torch.empty(20_000, dtype=torch.long), torch.zeros(20_000, dtype=torch.bool)
    distribution.choose(head, torch.empty(0), noise, never, drawn)
    assert (head.softmax(-1).cumsum(-1)[:, 2] < noise[:, 0]).any()  # sums do end too early
    assert (drawn < 3).all()
