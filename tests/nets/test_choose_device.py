"""Policies on a device: the same policy as in numpy, padding and buffers of acting,
copies in pieces, and which device is taken.

No GPU is needed: the device is data, here "cpu", or "meta", on which every operation that
mixes devices or reads a number fails.
"""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.nets.test_actor_critic import ACTIONS, draw, stir
from torch import nn

from tidemill.algorithms.policy_gradient_formulas import differentiate_surrogate, differentiate_value_loss
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Dict, Discrete, Spaces, schema_of_space
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate
from tidemill.nets import choose_device as devices
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.choose_device import check_device, choose_device, visible_gpus
from tidemill.nets.gpu_acting import LANES, DeviceActing
from tidemill.nets.torch_copies import Mirror, Staging
from tidemill.nets.torch_network import TorchNetwork

VECTOR = Box((3,), "float32")
BOTH = Dict({"camera": Box((36, 36, 1), "uint8", (0.0,), (255.0,)), "speed": VECTOR})


def both(action, **settings):
    """One policy twice, with stirred weights and statistics: numpy's, and the one that
    computes on devices."""
    spaces = Spaces(VECTOR, action)
    config = ActorCritic(hidden=(16, 8), normalise_observations=True, **settings)
    plain, other = config.build(spaces, 0), ActorCriticPolicy(config, spaces, 0, "torch", "cpu")
    assert all(np.array_equal(array, other.parameters()[name]) for name, array in plain.parameters().items())
    stir(plain)
    other.load(plain.parameters(), 3)
    return plain, other, config, spaces


def answer(policy, config, spaces, seen, deterministic=False):
    out = allocate(config.answer(spaces), (len(next(iter(seen.values()))),))
    policy.act(seen, {}, deterministic, out)
    return out


@pytest.mark.parametrize("settings", [{}, {"shared_critic": True}, {"activation": "relu"}])
@pytest.mark.parametrize("action", ACTIONS)
def test_an_mlp_in_torch_is_the_one_in_numpy(action, settings):
    plain, other, config, spaces = both(ACTIONS[action], **settings)
    seen, rng = draw(VECTOR, 40), np.random.default_rng(0)
    out = answer(plain, config, spaces, seen)
    inputs, factors = plain.prepare(seen), rng.standard_normal((3, 40)).astype(np.float32)
    found = plain.network.forward(inputs, {"action": out["action"]})
    torched = other.network.forward(
        {name: torch.from_numpy(x) for name, x in inputs.items()}, {"action": torch.from_numpy(out["action"])}
    )
    for ours, theirs in zip(found, torched, strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5)
    gradient, of_torch = np.empty(plain.network.size, np.float32), torch.empty(plain.network.size)
    plain.network.backward(*factors, gradient)
    other.network.backward(*torch.from_numpy(factors), of_torch)
    np.testing.assert_allclose(of_torch, gradient, rtol=1e-5, atol=1e-5)
    modes = [answer(policy, config, spaces, seen, True) for policy in (plain, other)]
    for name in modes[0]:
        np.testing.assert_allclose(modes[1][name], modes[0][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_acting_on_a_device_answers_what_the_policy_is(action, recorded):
    plain, other, config, spaces = both(ACTIONS[action])
    acting = DeviceActing(other.network, 0, recorded)
    for n in (5, 1, 8, 9, 33, 2):  # larger and smaller than what has memory already
        seen = draw(VECTOR, n)
        flags = np.arange(n) % 2 == 0
        out = allocate(config.answer(spaces), (n + 2,))
        acting.begin(other.prepare(seen), flags, other.value_scale, out)()
        mode = answer(plain, config, spaces, seen, True)
        np.testing.assert_allclose(out["action"][:n][flags], mode["action"][flags], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out["value"][:n], mode["value"], rtol=1e-5, atol=1e-5)
        found = plain.network.forward(plain.prepare(seen), {"action": out["action"][:n]})
        np.testing.assert_allclose(out["log_prob"][:n], found.log_prob, rtol=1e-5, atol=1e-5)
        assert not any(array[n:].any() for array in out.values())


def test_draws_follow_the_probabilities_and_the_seed():
    n = 40_000
    seen = {"obs": np.tile(draw(VECTOR, 1)["obs"], (n, 1))}
    for action in ("discrete", "branches", "bits"):
        _, other, config, spaces = both(ACTIONS[action])
        outs = []
        for seed in (1, 1, 2):
            out = allocate(config.answer(spaces), (n,))
            DeviceActing(other.network, seed, True).begin(other.prepare(seen), False, 1.0, out)()
            outs.append(out)
        np.testing.assert_array_equal(outs[0]["action"], outs[1]["action"])
        assert (outs[0]["action"] != outs[2]["action"]).any()
        _, where, counts = np.unique(
            outs[0]["action"].reshape(n, -1), axis=0, return_index=True, return_counts=True
        )
        np.testing.assert_allclose(counts / n, np.exp(outs[0]["log_prob"][where]), atol=0.012)
    _, other, config, spaces = both(Box((1,), "float32", (-2.0,), (6.0,)))
    out, mode = allocate(config.answer(spaces), (n,)), answer(other, config, spaces, seen, True)
    DeviceActing(other.network, 0, False).begin(other.prepare(seen), False, 1.0, out)()
    deviation = 4 * np.exp(other.network.weights["log_std"].item())
    assert out["action"].mean() == pytest.approx(mode["action"].mean(), abs=4 * deviation / n**0.5)
    assert out["action"].std() == pytest.approx(deviation, rel=0.02)


def test_several_batches_are_under_way_and_one_more_waits_for_a_lane():
    _, other, config, spaces = both(Discrete(4))
    acting = DeviceActing(other.network, 0, True)
    batches = [
        {name: array + i for name, array in other.prepare(draw(VECTOR, 4)).items()} for i in range(LANES + 1)
    ]
    outs = [allocate(config.answer(spaces), (4,)) for _ in batches]
    ends = [acting.begin(batch, True, 1.0, out) for batch, out in zip(batches[:LANES], outs, strict=False)]
    assert not outs[0]["value"].any()
    rest = threading.Thread(target=lambda: acting.begin(batches[-1], True, 1.0, outs[-1])())
    rest.start()
    rest.join(0.05)
    assert rest.is_alive()
    for end in ends:
        end()
    rest.join(60)
    assert not rest.is_alive()
    for batch, out in zip(batches, outs, strict=True):
        value = other.network.heads({name: torch.from_numpy(array) for name, array in batch.items()})[1]
        np.testing.assert_allclose(out["value"], value.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("convolutions", ["float32", "auto"])  # bfloat16 where that is there
def test_images_are_answered_in_padded_batches_too(convolutions):
    spaces, config = Spaces(BOTH, Discrete(4)), ActorCritic(convolutions=convolutions)
    policy, seen = config.build(spaces, 0), draw(BOTH, 11)
    out, plain = (allocate(config.answer(spaces), (11,)) for _ in range(2))
    DeviceActing(policy.network, 0, True).begin(policy.prepare(seen), True, 1.0, out)()
    policy.act(seen, {}, True, plain)
    np.testing.assert_array_equal(out["action"], plain["action"])
    np.testing.assert_allclose(
        out["value"], plain["value"], rtol=1e-3, atol=1e-2 if convolutions == "auto" else 1e-5
    )


@pytest.mark.parametrize("observation", [VECTOR, BOTH], ids=["vector", "image"])
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_on_the_way_lies_on_another_device_or_is_read(action, observation, monkeypatch):
    monkeypatch.setattr(Mirror, "pull", lambda mirror, rows=None: None)
    spaces, config, n = Spaces(observation, ACTIONS[action]), ActorCritic(), 6
    policy = config.build_on("meta", spaces, 0)
    inputs = Staging(policy.network.device)(policy.prepare(draw(observation, n)))
    answer = schema_of_space(spaces.action, "action")
    given = {name: torch.empty((n, *f.shape), device="meta") for name, f in answer.items()}
    distribution, (head, value) = policy.network.shape.distribution, policy.network.heads(inputs)
    noise = torch.empty((n, distribution.draws), device="meta")
    flags = torch.empty(n, dtype=torch.bool, device="meta")
    distribution.choose(head, policy.network.log_std(), noise, flags, distribution.action_of(given))
    assert (head.device.type, head.shape, value.shape) == ("meta", (n, distribution.size), (n,))
    found = policy.network.forward(inputs, given)
    _, of_log_prob, *_ = differentiate_surrogate(torch, found.log_prob, found.value, 0.2)
    _, of_value = differentiate_value_loss(torch, found.value, found.value, found.value, 0.2)
    policy.network.backward(
        of_log_prob, torch.full_like(of_value, 0.1), of_value, torch.empty(policy.network.size, device="meta")
    )


def test_a_module_of_one_s_own_moves_with_its_buffers(monkeypatch):
    class Scaled(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.layer = nn.Linear(3, outputs + 1)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, seen):
            out = self.layer(seen["obs"] * self.scale)
            return out[:, :-1], out[:, -1]

    @dataclass(frozen=True, kw_only=True)
    class OwnScaled(TorchNetwork):
        def network(self, spaces, outputs):
            return Scaled(outputs)

    spaces, config = Spaces(VECTOR, ACTIONS["box"]), OwnScaled()
    policy, seen = config.build(spaces, 0), draw(VECTOR, 5)
    out = allocate(config.answer(spaces), (5,))
    DeviceActing(policy.network, 0, False).begin(policy.prepare(seen), True, 1.0, out)()
    np.testing.assert_allclose(
        out["action"], answer(policy, config, spaces, seen, True)["action"], rtol=1e-5, atol=1e-6
    )
    monkeypatch.setattr(Mirror, "pull", lambda mirror, rows=None: None)
    moved = config.build_on("meta", spaces, 0)
    assert {
        tensor.device.type
        for tensor in (
            *moved.trainable_parameters(),
            *moved.network.heads(Staging(moved.network.device)(seen)),
        )
    } == {"meta"}
    assert moved.parameters().keys() == policy.parameters().keys()


def test_arrays_are_copied_in_pieces():
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (37, 5, 5)).astype(np.uint8),
        "numbers": rng.standard_normal((4, 21)),
        "flags": rng.random(3) < 0.5,
        "none": np.zeros((0, 3), np.float32),
        "actions": rng.integers(0, 9, 50),
    }
    tensors = Staging(torch.device("cpu"), chunk=64)(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].numpy(), array)
        assert tensors[name].numpy().dtype == array.dtype
        assert not np.shares_memory(tensors[name].numpy(), array)


def test_devices_are_named_or_found(monkeypatch, tmp_path):
    for device in ("auto", "cpu", "cuda", "cuda:3"):
        check_device(device)
    for device in ("gpu", "cuda:", "cuda:-1", "mps", ""):
        with pytest.raises(ConfigError, match=f'device = "{device}" is not known; take "cpu"'):
            check_device(device)
    monkeypatch.setattr(devices, "_DRIVER", (tmp_path / "none",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked without need"))
    assert [choose_device(device, 0) for device in ("auto", "cpu")] == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'device = "cuda:1", but .*; take "cpu", or "auto"'):
        choose_device("cuda:1", 0)
    monkeypatch.setattr(devices, "_DRIVER", (tmp_path,))
    assert choose_device("auto", 0) == "cpu"  # a driver, but a torch without CUDA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device("cuda", i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [choose_device(device, 1) for device in ("auto", "cpu", "cuda:0")] == ["cuda:1", "cpu", "cuda:0"]
    with pytest.raises(ConfigError, match=r'"cuda:2", but there are 2 GPUs; take cuda:0, cuda:1'):
        choose_device("cuda:2", 0)


def test_gpus_are_counted_without_torch(monkeypatch, tmp_path):
    driver, made, windows = tmp_path / "driver", tmp_path / "dev", tmp_path / "dxg"
    monkeypatch.setattr(devices, "_GPUS", ((driver, "*"), (made, "nvidia[0-9]*")))
    monkeypatch.setattr(devices, "_WINDOWS", windows)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus() == 0
    windows.touch()
    assert visible_gpus() == 1  # it tells no number
    for index in range(4):
        (driver / f"0000:0{index}:00.0").mkdir(parents=True)
    assert visible_gpus() == 4
    made.mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia3"):  # those of a container
        (made / name).touch()
    assert visible_gpus() == 3
    for visible, count in (
        ("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("1,7,2", 1), ("NoDevFiles", 0),
        ("GPU-8932f937, GPU-3f1a", 2), ("MIG-1", 1),
    ):  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus() == count, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    assert visible_gpus() == 1


def test_a_policy_that_knows_no_gpu_says_so():
    class Own(PolicyConfig):
        def build(self, spaces, seed):
            return "built"

    assert Own().build_on("cpu", Spaces(VECTOR, Discrete(2)), 0) == "built"
    with pytest.raises(ConfigError, match=r'device = "cuda:0", but Own has no .* take device = "cpu"'):
        Own().build_on("cuda:0", Spaces(VECTOR, Discrete(2)), 0)
