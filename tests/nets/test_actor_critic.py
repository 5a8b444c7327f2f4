"""The built-in policy: every space, both sides of every distribution, loading,
normalisers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tidemill.algorithms.torch_library import TorchLibrary
from tidemill.api.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Spaces,
    Tuple,
    leaves,
    schema_of_space,
)
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.encoders import AT_A_TIME
from tidemill.nets.image_networks import IMPALA
from tidemill.nets.torch_convolutions import convolved

VECTOR = Box((3,), "float32")
ACTIONS = {
    "discrete": Discrete(4),
    "offset": Discrete(3, start=5),
    "branches": MultiDiscrete((2, 5, 3)),
    "bits": MultiBinary(6),
    "box": Box((2, 2), "float32", (-2.0,), (6.0,)),
    "half bounded": Box((2,), "float64", (-1.0, 0.0), (1.0, float("inf"))),
    "unbounded": Box((3,), "float32"),
    "scalar": Box((), "float32", (-1.0,), (1.0,)),
}
OBSERVATIONS = {
    "vector": VECTOR,
    "scalar": Box((), "float32"),
    "matrix": Box((2, 3), "float64"),
    "ram": Box((16,), "uint8", (0.0,), (255.0,)),
    "discrete": Discrete(5, start=2),
    "parts": Dict({"position": VECTOR, "pair": Tuple((MultiDiscrete((2, 3)), MultiBinary(4)))}),
    "pixels": Box((40, 36, 3), "uint8", (0.0,), (255.0,)),
    "frames": Box((4, 36, 40), "uint8", (0.0,), (255.0,)),
    "grey": Box((36, 40), "uint8", (0.0,), (255.0,)),
    "pixels and vector": Dict({"camera": Box((36, 36, 3), "uint8", (0.0,), (255.0,)), "speed": VECTOR}),
}


def draw(space, n, seed=0):
    """Random observations by leaf name."""
    rng = np.random.default_rng(seed)
    observation = allocate(schema_of_space(space, "obs"), (n,))
    for name, leaf in leaves(space, "obs").items():
        match leaf:
            case Box():
                values = (
                    rng.integers(0, 256, (n, *leaf.shape))
                    if leaf.dtype == "uint8"
                    else rng.standard_normal((n, *leaf.shape)) * 3
                )
            case Discrete():
                values = rng.integers(0, leaf.n, n)
            case MultiDiscrete():
                values = rng.integers(0, leaf.nvec, (n, len(leaf.nvec)))
            case _:
                values = rng.integers(0, 2, (n, leaf.n))
        observation[name][...] = values
    return observation


def act(policy, config, spaces, observation, deterministic=False, room=0):
    n = len(next(iter(observation.values())))
    out = allocate(config.answer(spaces), (n + room,))
    policy.act(observation, {}, deterministic, out)
    return out


def evaluate(policy, observation, action):
    inputs = {k: torch.from_numpy(v) for k, v in policy.prepare(observation).items()}
    return policy.evaluate(inputs, {"action": torch.from_numpy(action)})


def stir(policy, size=0.3):
    """Random weights and normalisers, so that nothing agrees by being zero."""
    rng = np.random.default_rng(1)
    for name, array in policy.parameters().items():
        if name.endswith("count"):
            array[...] = 10
        elif name.endswith("variance"):
            array[...] = rng.uniform(0.5, 4, array.shape)
        else:
            array += rng.standard_normal(array.shape).astype(array.dtype) * (
                size if array.size < 20_000 else 0.01
            )
    policy.load({k: v.copy() for k, v in policy.parameters().items()}, 3)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_acting_and_evaluating_agree_for_every_action_space(action, shared):
    spaces = Spaces(VECTOR, ACTIONS[action])
    config = ActorCritic(hidden=(16, 8), normalise_observations=True, shared_critic=shared)
    policy = config.build(spaces, 0)
    stir(policy)
    observation = draw(VECTOR, 33)
    for deterministic in (False, True, np.arange(33) % 2 == 0):
        out = act(policy, config, spaces, observation, deterministic)
        evaluation = evaluate(policy, observation, out["action"])
        np.testing.assert_allclose(out["log_prob"], evaluation.log_prob.detach(), atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(
            out["value"], evaluation.value.detach() * policy.value_scale, atol=1e-5, rtol=1e-5
        )
    assert policy.value_scale != 1


NORMALISED = ("vector", "scalar", "matrix", "ram", "parts", "pixels and vector")


@pytest.mark.parametrize(
    ("observation", "normalise"),
    [*((name, False) for name in OBSERVATIONS), *((name, True) for name in NORMALISED)],
)
def test_acting_and_evaluating_agree_for_every_observation_space(observation, normalise):
    space = OBSERVATIONS[observation]
    layers = {} if observation in ("pixels", "frames", "grey") else {"hidden": (8,)}
    spaces, config = Spaces(space, Discrete(3)), ActorCritic(normalise_observations=normalise, **layers)
    policy = config.build(spaces, 0)
    stir(policy)
    rows = draw(space, 5)
    out = act(policy, config, spaces, rows)
    evaluation = evaluate(policy, rows, out["action"])
    np.testing.assert_allclose(out["log_prob"], evaluation.log_prob.detach(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        out["value"], evaluation.value.detach() * policy.value_scale, atol=1e-5, rtol=1e-4
    )
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    gradient = policy.trainable_parameters()[0].grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_images_reach_the_network_as_bytes_and_the_layout_does_not_matter():
    spaces_first = Spaces(Box((4, 36, 40), "uint8", (0.0,), (255.0,)), Discrete(3))
    spaces_last = Spaces(Box((36, 40, 4), "uint8", (0.0,), (255.0,)), Discrete(3))
    config = ActorCritic()
    images = draw(spaces_first.observation, 3 * AT_A_TIME // 2)
    policies = [config.build(s, 0) for s in (spaces_first, spaces_last)]
    prepared = policies[0].prepare(images)["obs"]
    assert prepared.flags.c_contiguous
    np.testing.assert_array_equal(prepared, np.moveaxis(images["obs"], 1, 3), strict=True)
    last = np.ascontiguousarray(prepared)
    assert np.shares_memory(policies[1].prepare({"obs": last})["obs"], last)
    assert policies[0].network.shape.towers == 1
    assert config.replace(shared_critic=False).build(spaces_first, 0).network.shape.towers == 2
    values = [
        act(p, config, s, {"obs": o}, True)["value"]
        for p, s, o in zip(
            policies,
            (spaces_first, spaces_last),
            (images["obs"], np.moveaxis(images["obs"], 1, 3)),
            strict=True,
        )
    ]
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)


def test_the_convolutions_are_torch_s_own_on_the_flattened_weights():
    spaces, config = Spaces(Box((2, 36, 36), "uint8", (0.0,), (255.0,)), Discrete(3)), ActorCritic()
    policy = config.build(spaces, 0)
    stir(policy)
    images = draw(spaces.observation, 3)
    w = {k: torch.tensor(v) for k, v in policy.network.weights.items()}
    x = torch.from_numpy(images["obs"]).float() / 255
    for i, stride in enumerate((4, 2, 1)):
        x = torch.relu(torch.conv2d(x, w[f"cnn.obs.{i}.weight"][0], w[f"cnn.obs.{i}.bias"][0], stride))
    h = torch.relu(
        x.permute(0, 2, 3, 1).reshape(3, -1) @ w["cnn.obs.out.weight"][0] + w["cnn.obs.out.bias"][0]
    )
    expected = (h @ w["critic.weight"] + w["critic.bias"]) * policy.value_scale
    np.testing.assert_allclose(act(policy, config, spaces, images)["value"], expected, rtol=1e-4, atol=1e-4)


def test_the_residual_network_is_that_of_impala_s_figure_3():
    """Written out by hand: 15 convolutions in three sections."""
    spaces = Spaces(Box((37, 50, 3), "uint8", (0.0,), (255.0,)), Discrete(3))
    config = ActorCritic(encoder="impala_cnn")
    policy = config.build(spaces, 0)
    stir(policy)
    images = draw(spaces.observation, 3)
    w = {k: torch.tensor(v) for k, v in policy.network.weights.items()}

    def conv(i, x):
        return torch.conv2d(x, w[f"cnn.obs.{i}.weight"][0], w[f"cnn.obs.{i}.bias"][0], padding=1)

    x, i = torch.from_numpy(images["obs"]).permute(0, 3, 1, 2).float() / 255, 0
    for filters, height, width in ((16, 19, 25), (32, 10, 13), (32, 5, 7)):
        x = torch.max_pool2d(conv(i, x), 3, 2, 1)
        assert x.shape == (3, filters, height, width)
        x = x + conv(i + 2, torch.relu(conv(i + 1, torch.relu(x))))
        x = x + conv(i + 4, torch.relu(conv(i + 3, torch.relu(x))))
        i += 5
    assert f"cnn.obs.{i}.weight" not in w
    x = torch.relu(x).permute(0, 2, 3, 1).reshape(3, 5 * 7 * 32)
    h = torch.relu(x @ w["cnn.obs.out.weight"][0] + w["cnn.obs.out.bias"][0])
    assert h.shape == (3, 256)
    expected = (h @ w["critic.weight"] + w["critic.bias"]) * policy.value_scale
    np.testing.assert_allclose(act(policy, config, spaces, images)["value"], expected, rtol=1e-4, atol=1e-4)


def test_the_residual_network_begins_with_features_of_the_image_s_size():
    """What six blocks add does not grow with each."""
    spaces = Spaces(Box((36, 36), "uint8", (0.0,), (255.0,)), Discrete(3))
    policy = ActorCritic(encoder="impala_cnn").build(spaces, 0)
    w = {k: torch.tensor(v) for k, v in policy.network.weights.items()}
    x = torch.from_numpy(draw(spaces.observation, 16)["obs"]).unsqueeze(1).float() / 255
    layers = [(w[f"cnn.obs.{i}.weight"][0], w[f"cnn.obs.{i}.bias"][0]) for i in range(15)]
    left = convolved(IMPALA, x, layers)
    assert 0.3 < left.square().mean().sqrt() / x.square().mean().sqrt() < 10


def fused(policy):
    optimiser = TorchLibrary(policy.network).optimiser(policy.network, torch.ones(policy.network.size), 1e-5)
    optimiser.descend(0.01, 1.0, None, torch.zeros(()))


def in_place(policy):
    with torch.no_grad():
        policy.trainable_parameters()[0].mul_(1.1)


def unseen(policy):
    policy.trainable_parameters()[0].data.mul_(1.1)


def test_a_processor_without_bfloat16_refuses_it_and_plays_in_float32():
    """There oneDNN would emulate it, 12 to 19 times slower. Held back to AVX2, this
    machine's processor has none."""
    script = """if True:
        import torch
        from tidemill import ActorCritic
        from tidemill.api.spaces import Box, Discrete, Spaces
        from tidemill.core.errors import ConfigError
        from tidemill.nets.torch_copies import convolution_type
        named = ActorCritic(convolutions="bfloat16")
        spaces = Spaces(Box((36, 36), "uint8", (0.0,), (255.0,)), Discrete(3))
        try:
            named.build(spaces, 0)
        except ConfigError as error:
            assert "which this processor does not compute" in str(error)
        else:
            raise AssertionError("it was taken")
        named.to_play().build(spaces, 0)
        assert convolution_type("auto", torch.device("cpu")) is torch.float32
        assert convolution_type("bfloat16", torch.device("meta")) is torch.bfloat16
        assert convolution_type("float32", torch.device("meta")) is torch.float32
        """
    subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        check=True,
        timeout=240,
    )


@pytest.mark.parametrize("encoder", ["auto", "impala_cnn"])
def test_bfloat16_is_what_a_processor_computes_in_that_has_it(encoder):
    spaces = Spaces(Box((36, 36), "uint8", (0.0,), (255.0,)), Discrete(3))
    images = draw(Box((36, 36), "uint8", (0.0,), (255.0,)), 64)
    values = [
        act(config.build(spaces, 0), config, spaces, images)["value"]
        for config in (ActorCritic(encoder=encoder), ActorCritic(encoder=encoder, convolutions="auto"))
    ]
    native = "avx512_bf16" in Path("/proc/cpuinfo").read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert np.array_equal(*values) is not native
    np.testing.assert_allclose(*values, atol=0.05)


@pytest.mark.parametrize("convolutions", ["float32", "auto"])  # bfloat16 where that is there
@pytest.mark.parametrize("change", [fused, in_place, unseen])
def test_who_has_acted_sees_every_change_of_the_convolutions_weights(convolutions, change):
    """They are converted once for many answers."""
    spaces = Spaces(Box((2, 36, 36), "uint8", (0.0,), (255.0,)), Discrete(3))
    config = ActorCritic(convolutions=convolutions)
    policy, other, images = config.build(spaces, 0), config.build(spaces, 1), draw(spaces.observation, 3)

    def value():
        return act(policy, config, spaces, images, True)["value"].copy()

    def afresh():
        twin = config.build(spaces, 2)
        twin.load(policy.parameters(), 1)
        return act(twin, config, spaces, images, True)["value"]

    first = value()
    policy.load(other.parameters(), 1)
    loaded = value()
    assert not np.allclose(first, loaded, atol=1e-3)
    np.testing.assert_array_equal(loaded, afresh())
    for _ in range(2):
        before = value()
        change(policy)
        assert not np.allclose(value(), before, atol=1e-3)
        np.testing.assert_array_equal(value(), afresh())


def test_who_acts_while_weights_are_loaded_keeps_none_of_those_before(monkeypatch):
    """As where several threads ask one policy."""
    spaces, config = Spaces(Box((36, 36), "uint8", (0.0,), (255.0,)), Discrete(3)), ActorCritic()
    policy, other, images = config.build(spaces, 0), config.build(spaces, 1), draw(spaces.observation, 3)
    contiguous, calls = torch.Tensor.contiguous, []

    def meanwhile(tensor, **form):
        if not calls:
            calls.append(policy.load(other.parameters(), 1))
            act(policy, config, spaces, images, True)
        return contiguous(tensor, **form)

    monkeypatch.setattr(torch.Tensor, "contiguous", meanwhile)
    act(policy, config, spaces, images, True)
    assert calls
    np.testing.assert_array_equal(
        act(policy, config, spaces, images, True)["value"], act(other, config, spaces, images, True)["value"]
    )


def test_who_has_acted_without_gradients_can_be_trained_and_may_be_built_without():
    spaces, config = Spaces(Box((36, 36), "uint8", (0.0,), (255.0,)), Discrete(3)), ActorCritic()
    images = draw(spaces.observation, 3)
    with torch.inference_mode():
        inside = act(config.build(spaces, 0), config, spaces, images, True)["value"]
    policy = config.build(spaces, 0)
    np.testing.assert_array_equal(act(policy, config, spaces, images, True)["value"], inside)
    evaluate(policy, images, np.zeros(3, np.int64)).value.sum().backward()
    assert policy.trainable_parameters()[0].grad.abs().sum() > 0


@pytest.mark.parametrize("action", ["discrete", "branches", "bits"])
def test_sampling_follows_the_probabilities(action):
    spaces, config = Spaces(VECTOR, ACTIONS[action]), ActorCritic(hidden=())
    policy = config.build(spaces, 0)
    stir(policy)
    n = 40_000
    observation = {"obs": np.tile(draw(VECTOR, 1)["obs"], (n, 1))}
    out = act(policy, config, spaces, observation)
    rows, where, counts = np.unique(
        out["action"].reshape(n, -1), axis=0, return_index=True, return_counts=True
    )
    expected = np.exp(out["log_prob"][where])
    assert len(rows) > 2
    np.testing.assert_allclose(counts / n, expected, atol=0.012)


def test_the_gaussian_has_the_stated_mean_deviation_and_density():
    # bounds -2 … 6: centre 2, half 4. With all weights 0 the mean is 2 and the deviation
    # 4·e^0.5.
    spaces, config = Spaces(VECTOR, Box((1,), "float32", (-2.0,), (6.0,))), ActorCritic(log_std_init=0.5)
    policy = config.build(spaces, 0)
    policy.network.weights["actor.weight"][...] = 0
    observation = draw(VECTOR, 40_000)
    out = act(policy, config, spaces, observation)
    assert out["action"].mean() == pytest.approx(2, abs=0.1)
    assert out["action"].std() == pytest.approx(4 * np.exp(0.5), rel=0.02)
    assert (np.abs(out["action"] - 2) > 4).any()  # not clipped
    noise = (out["action"][:, 0] - 2) / 4 / np.exp(0.5)
    np.testing.assert_allclose(out["log_prob"], -0.5 * noise**2 - 0.5 - 0.5 * np.log(2 * np.pi), atol=1e-5)
    np.testing.assert_allclose(act(policy, config, spaces, observation, True)["action"], 2, atol=1e-6)
    entropy = evaluate(policy, observation, out["action"]).entropy
    assert entropy[0].item() == pytest.approx(0.5 + 0.5 * np.log(2 * np.pi * np.e))


def test_entropies_by_hand():
    # Uniform over 4: log 4. Branches 2 × 5 × 3: log 30. Six fair bits: 6 log 2.
    for action, expected in (("discrete", np.log(4)), ("branches", np.log(30)), ("bits", 6 * np.log(2))):
        spaces, config = Spaces(VECTOR, ACTIONS[action]), ActorCritic()
        policy = config.build(spaces, 0)
        policy.network.weights["actor.weight"][...] = 0
        observation = draw(VECTOR, 2)
        out = act(policy, config, spaces, observation)
        assert evaluate(policy, observation, out["action"]).entropy[0].item() == pytest.approx(
            expected, rel=1e-6
        )


@pytest.mark.parametrize("action", ACTIONS)
def test_extreme_heads_give_finite_answers(action):
    spaces, config = Spaces(VECTOR, ACTIONS[action]), ActorCritic()
    policy = config.build(spaces, 0)
    stir(policy, 200)
    if "log_std" in policy.parameters():
        policy.network.weights["log_std"][...] = 1
    out = act(policy, config, spaces, draw(VECTOR, 50))
    evaluation = evaluate(policy, draw(VECTOR, 50), out["action"])
    assert np.isfinite(out["log_prob"]).all()
    assert torch.isfinite(evaluation.log_prob).all()
    assert torch.isfinite(evaluation.entropy).all()


def test_deterministic_per_row_and_any_number_of_rows_into_larger_arrays():
    spaces, config = Spaces(VECTOR, Discrete(4)), ActorCritic()
    policy = config.build(spaces, 0)
    for n in (3, 1, 200, 3):
        observation = draw(VECTOR, n)
        mode = act(policy, config, spaces, observation, True)["action"]
        chosen = np.arange(n) % 3 == 0
        out = act(policy, config, spaces, observation, chosen, room=2)
        np.testing.assert_array_equal(out["action"][:n][chosen], mode[chosen])
        assert (out["log_prob"][:n] < 0).all()
        assert (out["log_prob"][n:] == 0).all()
    act(policy, config, spaces, draw(VECTOR, 0))


def test_weights_and_samples_come_from_the_seed():
    spaces, config = Spaces(VECTOR, Discrete(4)), ActorCritic()
    observation = draw(VECTOR, 50)
    first, again, other = (act(config.build(spaces, seed), config, spaces, observation) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert (first["action"] != other["action"]).any()
    assert (first["value"] != other["value"]).all()


def test_first_weights_are_orthogonal_with_the_usual_gains():
    policy = ActorCritic(hidden=(16, 16)).build(Spaces(VECTOR, Discrete(4)), 0)
    for tower in range(2):
        w = policy.network.weights["hidden.1.weight"][tower]
        np.testing.assert_allclose(w @ w.T, 2 * np.eye(16), atol=1e-5)
    w = policy.network.weights["actor.weight"]
    np.testing.assert_allclose(w @ w.T, 1e-4 * np.eye(4), atol=1e-9)
    assert np.linalg.norm(policy.network.weights["critic.weight"]) == pytest.approx(1)


def test_parameters_view_the_policy_s_memory_and_load_copies():
    spaces, config = Spaces(VECTOR, Box((2,), "float32")), ActorCritic(normalise_observations=True)
    one, two = config.build(spaces, 1), config.build(spaces, 2)
    stir(one)
    given = one.parameters()
    two.load(given, 7)
    assert two.version == 7
    assert two.value_scale == one.value_scale
    observation = draw(VECTOR, 4)
    assert_same = [act(p, config, spaces, observation, True) for p in (one, two)]
    np.testing.assert_array_equal(assert_same[0]["action"], assert_same[1]["action"])
    for name, array in two.parameters().items():
        assert np.shares_memory(array, two.parameters()[name])
        assert not np.shares_memory(array, given[name])


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype"])
def test_parameters_of_another_network_are_refused_and_change_nothing(change):
    spaces = Spaces(VECTOR, Discrete(4))
    policy, other = ActorCritic().build(spaces, 1), ActorCritic().build(spaces, 2)
    given = dict(other.parameters())
    if change == "missing":
        given.pop("actor.bias")
    elif change == "unknown":
        given["extra"] = np.zeros(1)
    else:
        given["actor.bias"] = (
            np.zeros((5, 1), np.float32) if change == "shape" else np.zeros((4, 1), np.float64)
        )
    before = policy.network.flat.copy()
    with pytest.raises(SchemaError, match="extra" if change == "unknown" else "actor.bias"):
        policy.load(given, 1)
    np.testing.assert_array_equal(policy.network.flat, before)
    assert policy.version == -1


def test_normalised_observations_have_mean_0_and_deviation_1_and_are_clipped_at_10():
    spaces = Spaces(Dict({"a": Box((2,), "float32"), "b": Discrete(3)}), Discrete(2))
    policy = ActorCritic(normalise_observations=True).build(spaces, 0)
    rng = np.random.default_rng(0)
    rows = {
        "obs.a": (rng.standard_normal((500, 2)) * [3, 0.1] + [5, -2]).astype(np.float32),
        "obs.b": rng.integers(0, 3, 500),
    }
    # nothing folded yet
    np.testing.assert_array_equal(policy.prepare(rows)["features"][:, :2], rows["obs.a"].clip(-10, 10))
    policy.fold({k: v[:200] for k, v in rows.items()}, None)
    policy.fold({k: v[200:] for k, v in rows.items()}, None)
    features = policy.prepare(rows)["features"]
    np.testing.assert_allclose(features[:, :2].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(features[:, :2].std(0), 1, atol=1e-4)
    np.testing.assert_array_equal(features[:, 2:], np.eye(3)[rows["obs.b"]])
    far = {"obs.a": np.array([[1e6, -1e6]], np.float32), "obs.b": np.zeros(1, int)}
    np.testing.assert_array_equal(policy.prepare(far)["features"][0, :2], [10, -10])


def test_folding_returns_moves_the_scale_and_leaves_every_value_where_it_was():
    spaces, config = Spaces(VECTOR, Discrete(2)), ActorCritic(normalise_observations=False)
    policy = config.build(spaces, 0)
    observation = draw(VECTOR, 10)
    before = act(policy, config, spaces, observation)["value"]
    policy.fold(observation, np.array([100, 300], np.float32))  # deviation 100
    assert policy.value_scale == 100
    np.testing.assert_allclose(act(policy, config, spaces, observation)["value"], before, rtol=1e-5)
    policy.fold(observation, np.full(1000, 200, np.float32))
    assert policy.value_scale < 100


def test_constant_returns_are_not_blown_up():
    policy = ActorCritic().build(Spaces(VECTOR, Discrete(2)), 0)
    policy.fold(draw(VECTOR, 1), np.zeros(5, np.float32))
    assert policy.value_scale == 1
    policy.fold(draw(VECTOR, 1), np.full(10**6, 500, np.float32))
    assert policy.value_scale >= 4.9


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        (
            Spaces(VECTOR, Dict({"a": Discrete(2), "b": Box((2,), "int32")})),
            r"part action\.b is a Box of int32",
        ),
        (Spaces(VECTOR, Dict({})), "no element"),
        (Spaces(VECTOR, Box((2,), "int32")), "MultiDiscrete"),
        (Spaces(VECTOR, Box((2,), "float32", (0.0, 1.0), (1.0, 1.0))), "low = high"),
        (Spaces(Dict({}), Discrete(2)), "no element"),
    ],
)
def test_spaces_without_a_policy_are_refused(spaces, message):
    with pytest.raises(ConfigError, match=message):
        ActorCritic().build(spaces, 0)


def test_settings_are_checked_and_survive_encoding():
    for settings, message in (
        ({"hidden": (64, 0)}, "hidden"),
        ({"activation": "sine"}, "activation"),
        ({"critic_hidden": (64, 0)}, "critic_hidden"),
        ({"encoder": "resnet"}, "encoder"),
        ({"log_std_init": float("nan")}, "log_std_init"),
    ):
        with pytest.raises(ConfigError, match=message):
            ActorCritic(**settings)
    with pytest.raises(ConfigError, match="nature_cnn"):
        ActorCritic(encoder="nature_cnn").build(Spaces(VECTOR, Discrete(2)), 0)
    with pytest.raises(ConfigError, match=r'encoder = "impala_cnn" needs a uint8 image'):
        ActorCritic(encoder="impala_cnn").build(Spaces(VECTOR, Discrete(2)), 0)
    config = ActorCritic(hidden=(32,), shared_critic=True)
    assert decode(ActorCritic, encode(config)) == config


@pytest.mark.parametrize(
    ("setting", "board", "both", "steps"),
    [
        (False, False, False, False),
        (True, True, True, None),
        (None, True, True, False),
        ("numbers", False, True, False),
    ],
)
def test_what_is_normalised(setting, board, both, steps):
    """Marks on a board of truth values are as large as they are rare then: MinAtar's
    Freeway by PPO after 200,000 steps: 9.6 to 12.7, and 5.8 where they were."""
    marks = Box((12,), "bool")
    seen = {"board": marks, "both": Dict({"board": marks, "speed": VECTOR}), "steps": Discrete(5)}
    config = ActorCritic(hidden=(4,), normalise_observations=setting)
    for name, expected in (("board", board), ("both", both), ("steps", steps)):
        spaces = Spaces(seen[name], Discrete(3))
        if expected is None:
            with pytest.raises(ConfigError, match="without flattened Boxes"):
                config.build(spaces, 0)
        else:
            config.build(spaces, 0)
            assert ("observation.mean" in config.weights(spaces)) is expected, name
    assert decode(ActorCritic, encode(config)) == config


def test_what_is_not_to_be_normalised_by_that_word_is_refused_with_the_words_there_are():
    with pytest.raises(ConfigError, match='"nombers" is not known; take one of numbers, True, False, None'):
        ActorCritic(normalise_observations="nombers")
    with pytest.raises(ConfigError, match="normalise_observations = 'nombers'; did you mean \"numbers\""):
        decode(ActorCritic, {"normalise_observations": "nombers"})
