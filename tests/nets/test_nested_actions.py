"""Actions of several parts, those of a Dict or Tuple: what is drawn, its probability and
entropy, gradients, and masks, in numpy, in torch and as on a device."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from tidemill import ActorCritic, ConfigError, DeterministicActor, QNetwork, SquashedGaussian, TorchNetwork
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.ppo import PPO
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Spaces,
    Tuple,
    choices_of,
    leaves,
)
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCriticPolicy
from tidemill.nets.gpu_acting import DeviceActing
from tidemill.testing.check_env import keep_allowed, sample_actions

VIEW = Box((3,), "float32")
ACTION = Dict(
    {
        "aim": Box((2,), "float32", (-2.0,), (6.0,)),  # outputs 0, 1
        "kind": Discrete(4),  # 2 … 5
        "more": Tuple((MultiBinary(3), MultiDiscrete((2, 3)), Box((1,), "float32"))),  # 6 … 8, 9 … 13, 14
    }
)
NAMES = ["action.aim", "action.kind", "action.more.0", "action.more.1", "action.more.2"]
BRANCHES = {"kind": (4,), "more.1": (2, 3)}
NET = ActorCritic(hidden=(8, 6))
MASKS = {
    "joined": MultiBinary(9),
    "apart": Dict(
        {
            "kind": Box((4,), "bool"),
            "more": Dict({"1": Box((5,), "int8", (0.0,), (1.0,))}),
        }
    ),
    "kind alone": Dict({"kind": Box((4,), "int8", (0.0,), (1.0,))}),
}


def built(kind="numpy", mask=None, net=NET):
    """A policy with stirred weights, and its spaces."""
    seen = VIEW if mask is None else Dict({"action_mask": MASKS[mask], "obs": VIEW})
    spaces = Spaces(seen, ACTION)
    policy = ActorCriticPolicy(net, spaces, 0, kind)
    policy.network.flat += np.random.default_rng(1).standard_normal(policy.network.size, np.float32) * 0.3
    return policy, spaces


def draw(spaces, n, seed=0):
    """Random observations; each branch allows at least one action, and in row 0 just its
    last."""
    rng = np.random.default_rng(seed)
    view = rng.standard_normal((n, 3)).astype(np.float32)
    if not isinstance(spaces.observation, Dict):
        return {"obs": view}
    masks = {}
    for name, branches in BRANCHES.items():
        parts = []
        for size in branches:
            part = rng.random((n, size)) < 0.4
            part[np.arange(n), rng.integers(0, size, n)] = True
            part[0] = np.arange(size) == size - 1
            parts.append(part)
        masks[f"obs.action_mask.{name}"] = np.concatenate(parts, 1)
    joined = {"obs.action_mask": np.concatenate([*masks.values()], 1)}
    given = {**masks, **joined, "obs.obs": view}
    return {
        name: given[name].astype(np.bool_ if name.endswith("kind") else np.int8) if "mask" in name else view
        for name in leaves(spaces.observation, "obs")
    }


def answered(policy, spaces, seen, deterministic=False, device=False):
    n = len(next(iter(seen.values())))
    out = allocate(NET.answer(spaces), (n,))
    if device:
        DeviceActing(policy.network, 0, True).begin(policy.prepare(seen), deterministic, 1.0, out)()
    else:
        policy.act(seen, {}, deterministic, out)
    return out


def acted(out):
    return {name: out[name] for name in NAMES}


def by_torch(policy, inputs, out):
    """(log_prob, entropy) [n] of what was done, written with torch's distributions."""
    w = {name: torch.from_numpy(array) for name, array in policy.network.weights.items()}
    x = torch.from_numpy(inputs["features"])
    for i in range(2):
        x = torch.tanh(x @ w[f"hidden.{i}.weight"][0] + w[f"hidden.{i}.bias"][0])
    head = x @ w["actor.weight"].T + w["actor.bias"][:, 0]
    if "forbidden" in inputs:
        head = head.masked_fill(torch.from_numpy(inputs["forbidden"]), -1e30)
    std = w["log_std"][:, 0].exp()
    did = {name: torch.from_numpy(out[name]) for name in NAMES}
    found = [  # -2 … 6: centre 2, half 4
        (Normal(head[:, :2], std[:2]), (did["action.aim"] - 2) / 4),
        (Categorical(logits=head[:, 2:6]), did["action.kind"]),
        (Bernoulli(logits=head[:, 6:9]), did["action.more.0"].float()),
        (Categorical(logits=head[:, 9:11]), did["action.more.1"][:, 0]),
        (Categorical(logits=head[:, 11:14]), did["action.more.1"][:, 1]),
        (Normal(head[:, 14:], std[2:]), did["action.more.2"]),
    ]
    n = len(head)
    return [
        sum(part.reshape(n, -1).sum(1) for part in parts)
        for parts in (
            [each.log_prob(value) for each, value in found],
            [each.entropy() for each, _ in found],
        )
    ]


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
def test_probabilities_and_entropies_are_sums_over_the_parts(kind, mask):
    policy, spaces = built("torch" if kind == "device" else kind, mask)
    assert [*NET.answer(spaces)] == [*NAMES, "log_prob", "value"]
    assert policy.network.weights["actor.weight"].shape[0] == 15
    assert policy.network.weights["log_std"].shape == (3, 1)
    seen = draw(spaces, 50)
    out = answered(policy, spaces, seen, False, kind == "device")
    inputs = policy.prepare(seen)
    log_prob, entropy = by_torch(policy, inputs, out)
    np.testing.assert_allclose(out["log_prob"], log_prob, rtol=1e-5, atol=1e-5)
    tensors = [{name: torch.from_numpy(x) for name, x in part.items()} for part in (inputs, acted(out))]
    found = policy.evaluate(*tensors)
    np.testing.assert_allclose(found.log_prob.detach(), log_prob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy.detach(), entropy, rtol=1e-5, atol=1e-5)


def test_a_sum_by_hand():
    """With weights of 0: a fair choice of 4, three fair bits, of 2 and of 3, and three
    normal numbers at 0 of deviation 1."""
    policy, spaces = built()
    policy.network.flat[...] = 0
    mode = answered(policy, spaces, draw(spaces, 1), True)
    expected = -np.log(4 * 8 * 2 * 3) - 1.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(mode["log_prob"], expected, rtol=1e-6)
    np.testing.assert_allclose(mode["action.aim"], 2)
    found = policy.network.forward(policy.prepare(draw(spaces, 1)), acted(mode))
    np.testing.assert_allclose(found.entropy, np.log(192) + 1.5 * np.log(2 * np.pi * np.e), rtol=1e-6)


def test_the_mode_is_taken_of_every_part_in_the_rows_that_ask_for_it():
    policy, spaces = built()
    seen = draw(spaces, 60)
    modes, flags = answered(policy, spaces, seen, True), np.arange(60) % 2 == 0
    for device in (False, True):
        policy = built("torch" if device else "numpy")[0]
        out = answered(policy, spaces, seen, flags, device)
        for name in NAMES:
            np.testing.assert_allclose(out[name][flags], modes[name][flags], rtol=1e-5, atol=1e-5)
            assert (out[name][~flags] != modes[name][~flags]).any(), name


def test_parts_are_drawn_independently_of_each_other():
    policy, spaces = built()
    n = 40_000
    seen = {"obs": np.tile(draw(spaces, 1)["obs"], (n, 1))}
    for device in (False, True):
        out = answered(built("torch")[0] if device else policy, spaces, seen, False, device)
        columns = np.concatenate([out[name].reshape(n, -1) for name in NAMES], 1)
        correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
        assert np.abs(correlations).max() < 5 / n**0.5


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
def test_what_a_mask_forbids_is_never_drawn_and_has_no_gradient(kind, mask):
    policy, spaces = built("torch" if kind == "device" else kind, mask)
    assert policy.encoder.width == 3  # the network does not see it
    seen = draw(spaces, 3000)
    out = answered(policy, spaces, seen, False, kind == "device")
    masked = ["kind"] if mask == "kind alone" else [*BRANCHES]
    whole = draw(Spaces(Dict({"action_mask": MASKS["joined"], "obs": VIEW}), ACTION), 3000)["obs.action_mask"]
    starts = {"kind": [0], "more.1": [4, 6]}
    for name in masked:
        chosen = out[f"action.{name}"].reshape(3000, -1) + starts[name]
        assert np.take_along_axis(whole, chosen, 1).all(), name
    assert (out["action.more.1"].max(0) == [1, 2]).all()
    policy.check(seen)
    inputs = policy.prepare(seen)
    assert inputs["forbidden"][:, [0, 1, 6, 7, 8, 14]].sum() == 0
    if kind == "numpy":
        policy.network.forward(inputs, acted(out))
        gradient = np.empty(policy.network.size, np.float32)
        policy.network.backward(*np.ones((3, 3000), np.float32), gradient)
        assert np.isfinite(gradient).all()
    row = {name: array.copy() for name, array in seen.items()}
    leaf = next(name for name in row if "mask" in name)
    row[leaf][7, :4] = 0
    with pytest.raises(
        EnvironmentFault, match=rf"{leaf} allows no action of action\.kind in 1 of 3000 .*row 7 "
    ):
        policy.check(row)


@pytest.mark.parametrize("algorithm", [PPO(minibatch_size=16), Impala()])
@pytest.mark.parametrize("mask", [None, "apart"])
def test_numpy_and_torch_learn_the_same(mask, algorithm):
    weights = []
    for kind in ("numpy", "torch"):
        policy, spaces = built(kind, mask)
        rows, seats = 9, 8
        learner, seen = algorithm.build(policy, 0), draw(spaces, rows * seats)
        out = answered(built("numpy", mask)[0], spaces, seen)
        sample = Sample({**allocate(ROW_FIELDS, (rows, seats)), "version": np.zeros((rows, seats), np.int64)})
        for name, array in {**seen, **out}.items():
            sample[name] = array.reshape(rows, seats, *array.shape[1:])
        sample["reward"][...] = np.random.default_rng(5).standard_normal((rows, seats))
        learner.update([sample], 0.0)
        weights.append({name: array.copy() for name, array in policy.parameters().items()})
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=1e-3, atol=2e-4, err_msg=name)
    before = built("numpy", mask)[0].parameters()
    assert np.abs(weights[0]["log_std"] - before["log_std"]).min() > 0
    assert (np.abs(weights[0]["actor.weight"] - before["actor.weight"]).max(1) > 0).all()


@dataclass(frozen=True, kw_only=True)
class Joined(TorchNetwork):
    """A module of one's own with a linear head."""

    def network(self, spaces, outputs):
        class Linear(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, outputs + 1)

            def forward(self, seen):
                out = self.layer(seen["obs.obs"])
                return out[:, :-1], out[:, -1]

        return Linear()


def test_a_module_of_one_s_own_acts_in_parts_under_masks():
    for mask in MASKS:
        spaces = Spaces(Dict({"action_mask": MASKS[mask], "obs": VIEW}), ACTION)
        policy, seen = Joined().build(spaces, 0), draw(spaces, 500)
        out = answered(policy, spaces, seen)
        assert (out["action.kind"][0], out["log_prob"].shape) == (3, (500,))
        tensors = {name: torch.from_numpy(array) for name, array in policy.prepare(seen).items()}
        found = policy.evaluate(tensors, {name: torch.from_numpy(x) for name, x in acted(out).items()})
        np.testing.assert_allclose(found.log_prob.detach(), out["log_prob"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MultiBinary(8), r"int8\[8\]; it must be one array, bool or int8, of 4\+2\+3 = 9 elements"),
        (Dict({"kind": MultiBinary(3)}), r"obs\.action_mask\.kind of 4, obs\.action_mask\.more\.1 of 5"),
        (Dict({"aim": MultiBinary(2)}), r"has parts itself \(obs\.action_mask\.aim\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_what_would(mask, message):
    spaces = Spaces(Dict({"action_mask": mask, "obs": VIEW}), ACTION)
    with pytest.raises(ConfigError, match=message):
        NET.build(spaces, 0)


def test_random_play_keeps_to_masks_of_parts():
    for mask in MASKS:
        spaces = Spaces(Dict({"action_mask": MASKS[mask], "obs": VIEW}), ACTION)
        seen, rng = draw(spaces, 400), np.random.default_rng(0)
        actions = sample_actions(ACTION, rng, 400)
        before = {name: array.copy() for name, array in actions.items()}
        keep_allowed(actions, ACTION, seen, rng)
        forbidden = NET.build(spaces, 0).mask.forbidden(seen)
        assert not forbidden[np.arange(400), 2 + actions["action.kind"]].any()
        assert not forbidden[np.arange(400), 9 + actions["action.more.1"][:, 0]].any()
        assert not forbidden[np.arange(400), 11 + actions["action.more.1"][:, 1]].any()
        assert len(np.unique(actions["action.kind"])) == 4
        for name, leaf in leaves(ACTION, "action").items():
            if not choices_of(leaf):
                np.testing.assert_array_equal(actions[name], before[name])


def test_state_dependent_noise_is_refused():
    with pytest.raises(ConfigError, match="sde_steps = 4 has no effect on actions that are no Box by itself"):
        ActorCritic(sde_steps=4).build(Spaces(VIEW, ACTION), 0)


@pytest.mark.parametrize("config", [QNetwork(), SquashedGaussian(), DeterministicActor()])
def test_policies_that_act_by_values_name_what_acts_in_parts(config):
    with pytest.raises(ConfigError, match=r"ActorCritic with PPO"):
        config.weights(Spaces(VIEW, ACTION))
