"""Policies with a torch module of the user's: both sides of the distribution agree,
parameters are the module's memory, mistakes are named."""

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from tidemill.algorithms.ppo import PPO
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Spaces, schema_of_space
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import allocate
from tidemill.nets.torch_network import TorchNetwork

OBSERVATION = Dict(
    {"camera": Box((4, 3), "uint8", (0.0,), (255.0,)), "speed": Box((5,), "float32"), "gear": Discrete(6)}
)
ACTIONS = {
    "discrete": Discrete(4),
    "branches": MultiDiscrete((2, 5, 3)),
    "bits": MultiBinary(6),
    "box": Box((2, 2), "float32", (-2.0,), (6.0,)),
}


class Joined(nn.Module):
    """Every leaf, cast and flattened, through one layer; a buffer besides the weights."""

    def __init__(self, outputs, extra):
        super().__init__()
        self.actor, self.critic = nn.Linear(12 + 5 + 1, outputs + extra), nn.Linear(12 + 5 + 1, 1)
        self.register_buffer("scale", torch.tensor(1 / 255))

    def forward(self, observation):
        camera, speed, gear = observation["obs.camera"], observation["obs.speed"], observation["obs.gear"]
        x = torch.cat([camera.flatten(1) * self.scale, speed, gear[:, None].float()], -1)
        return self.actor(x), self.critic(x).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class JoinedNetwork(TorchNetwork):
    extra: int = 0

    def network(self, spaces, outputs):
        return Joined(outputs, self.extra)


def draw(n):
    rng = np.random.default_rng(0)
    observation = allocate(schema_of_space(OBSERVATION, "obs"), (n,))
    observation["obs.camera"][...] = rng.integers(0, 256, (n, 4, 3))
    observation["obs.speed"][...] = rng.standard_normal((n, 5))
    observation["obs.gear"][...] = rng.integers(0, 6, n)
    return observation


def ask(policy, config, spaces, observation, deterministic):
    out = allocate(config.answer(spaces), (len(observation["obs.gear"]) + 3,))
    policy.act(observation, {}, deterministic, out)
    return out


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize(
    "deterministic", [False, True, np.array([True, False] * 4)], ids=["drawn", "mode", "mixed"]
)
def test_acting_and_training_agree_and_rows_beyond_the_request_stay(action, deterministic):
    spaces = Spaces(OBSERVATION, action)
    config = JoinedNetwork(**({"log_std_init": -0.3} if isinstance(action, Box) else {}))
    policy, observation = config.build(spaces, seed=1), draw(8)
    policy.fold(observation, np.array([0.0, 8.0], np.float32))  # deviation 4
    out = ask(policy, config, spaces, observation, deterministic)
    inputs = {name: torch.from_numpy(array) for name, array in policy.prepare(observation).items()}
    found = policy.evaluate(inputs, {"action": torch.from_numpy(out["action"][:8])})
    np.testing.assert_allclose(found.log_prob.detach(), out["log_prob"][:8], atol=1e-5)
    assert policy.value_scale == 4
    np.testing.assert_allclose(found.value.detach() * 4, out["value"][:8], rtol=1e-5, atol=1e-6)
    assert found.entropy.shape == (8,)
    assert not out["value"][8:].any()


def test_parameters_are_the_module_s_memory_and_load_copies_into_it():
    spaces, config = Spaces(OBSERVATION, ACTIONS["box"]), JoinedNetwork()
    one, other, same = config.build(spaces, 1), config.build(spaces, 2), config.build(spaces, 1)
    assert set(one.parameters()) == {
        "network.actor.weight", "network.actor.bias", "network.critic.weight", "network.critic.bias",
        "network.scale", "log_std", "returns.mean", "returns.variance", "returns.count",
    }  # fmt: skip
    assert all(
        np.array_equal(a, b)
        for a, b in zip(one.parameters().values(), same.parameters().values(), strict=True)
    )
    with torch.no_grad():
        for weight in one.trainable_parameters():
            weight.fill_(0.125)
    assert (one.parameters()["network.actor.weight"] == 0.125).all()
    assert (one.parameters()["log_std"] == 0.125).all()
    assert not (other.parameters()["network.actor.weight"] == 0.125).any()
    other.load(one.parameters(), version=7)
    assert other.version == 7
    observation = draw(5)
    answers = [ask(policy, config, spaces, observation, True) for policy in (one, other)]
    np.testing.assert_array_equal(answers[0]["action"], answers[1]["action"])
    np.testing.assert_array_equal(answers[0]["value"], answers[1]["value"])


def test_parameters_of_another_network_are_refused_by_name_and_change_nothing():
    spaces = Spaces(OBSERVATION, ACTIONS["discrete"])
    policy = JoinedNetwork().build(spaces, 1)
    given = {name: array.copy() + 1 for name, array in policy.parameters().items()}
    given["network.actor.bias"] = np.zeros(5, np.float32)
    before = {name: array.copy() for name, array in policy.parameters().items()}
    with pytest.raises(SchemaError, match=r"network\.actor\.bias"):
        policy.load(given, 1)
    assert all(np.array_equal(array, before[name]) for name, array in policy.parameters().items())


def test_a_network_of_the_wrong_width_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"JoinedNetwork.network gave \[\[2, 5\], \[2\]\].*head \[2, 4\]"):
        JoinedNetwork(extra=1).build(Spaces(OBSERVATION, ACTIONS["discrete"]), 1)


class OfNumpy(torch.nn.Module):
    def forward(self, observation):
        return np.zeros((2, 4)), np.zeros(2)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (None, r"network\(\) returned None; it must return an instance of Module$"),
        (lambda observation: observation, r"network\(\) returned <function .*an instance of Module$"),
        (OfNumpy(), r"network gave \['ndarray', 'ndarray'\] for 2 rows; it must return \(head \[2, 4\]"),
    ],
)
def test_what_is_no_network_is_refused_and_named(made, told):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(JoinedNetwork):
        def network(self, spaces, outputs):
            return made

    with pytest.raises(ConfigError, match=told):
        Wrong().build(Spaces(OBSERVATION, ACTIONS["discrete"]), 1)


def test_frozen_weights_are_not_trained():
    @dataclass(frozen=True, kw_only=True)
    class Frozen(JoinedNetwork):
        def network(self, spaces, outputs):
            module = Joined(outputs, 0)
            module.critic.requires_grad_(False)
            return module

    assert len(Frozen().build(Spaces(OBSERVATION, ACTIONS["discrete"]), 1).trainable_parameters()) == 2


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_backward_writes_what_autograd_adds(action):
    spaces, config = Spaces(OBSERVATION, action), JoinedNetwork()
    policy, observation = config.build(spaces, 1), draw(8)
    inputs = {name: torch.from_numpy(array) for name, array in policy.prepare(observation).items()}
    actions = {"action": torch.from_numpy(ask(policy, config, spaces, observation, False)["action"][:8])}
    factors = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32))
    found = policy.evaluate(inputs, actions)
    sum((factor * x).sum() for factor, x in zip(factors, found, strict=True)).backward()
    expected = torch.cat([weight.grad.reshape(-1) for weight in policy.trainable_parameters()])
    gradient = torch.full((policy.network.size,), np.nan)
    for _ in range(2):
        plain = policy.network.forward(inputs, actions)
        np.testing.assert_array_equal(plain.value, found.value.detach())
        policy.network.backward(*factors, gradient)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_ppo_takes_it_and_the_configuration_comes_back_equal():
    policy = JoinedNetwork().build(Spaces(OBSERVATION, ACTIONS["box"]), 1)
    assert PPO().build(policy, 1).policy is policy
    assert decode(TorchNetwork, encode(JoinedNetwork(extra=2))) == JoinedNetwork(extra=2)


def test_the_configuration_imports_no_torch():
    code = "import sys, tidemill.nets.torch_network; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
