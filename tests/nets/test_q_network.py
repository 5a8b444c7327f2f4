"""Networks of action values: their gradients are autograd's, their noise is the paper's,
and the policy explores as it says."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import allocate
from tidemill.nets.q_function import QFunction, first_weights
from tidemill.nets.q_network import QNetwork, small_image_of

VECTOR = Box((3,), "float32")
IMAGE = Box((6, 7, 2), "bool", (0,), (1,))
LARGE = Box((40, 37, 2), "uint8", (0,), (255,))
MASKED = Dict({"seen": VECTOR, "action_mask": Box((4,), "int8", (0,), (1,))})


def by_autograd(shape, weights, inputs):
    """The network in plain torch, of float64 weights by name."""
    x = inputs
    if shape.image is not None:
        x = x.permute(0, 3, 1, 2) / (255 if len(shape.convolutions) > 1 else 1)
        for i, (filters, size, stride) in enumerate(shape.convolutions):
            kernel = weights[f"convolution.{i}.weight"].reshape(size, size, -1, filters).permute(3, 2, 0, 1)
            x = functional.conv2d(x, kernel, weights[f"convolution.{i}.bias"], stride).relu()
        x = x.permute(0, 2, 3, 1).flatten(1)
    for i in range(len(shape.hidden)):
        x = (x @ weights[f"hidden.{i}.weight"][0] + weights[f"hidden.{i}.bias"][0]).relu()
    head = (x @ weights["head.weight"] + weights["head.bias"]).reshape(len(x), -1, shape.atoms)
    if not shape.duelling:
        return head
    return head[:, :1] + head[:, 1:] - head[:, 1:].mean(1, keepdim=True)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("duelling", [False, True])
@pytest.mark.parametrize(
    ("observation", "hidden", "atoms"),
    [
        (VECTOR, (8, 5), 1),
        (VECTOR, (), 1),
        (IMAGE, (9,), 1),
        (VECTOR, (8,), 7),
        (IMAGE, (), 3),
        (LARGE, (9,), 1),
    ],
)
def test_values_and_gradients_are_autograds(observation, hidden, atoms, duelling, noise):
    filters = {"filters": 4} if observation is IMAGE else {}
    config = QNetwork(hidden=hidden, atoms=atoms, duelling=duelling, noise=noise, **filters)
    shape = config.plan(Spaces(observation, Discrete(4)))[0]
    rng = np.random.default_rng(0)
    flat = first_weights(shape, rng)
    flat += rng.standard_normal(flat.size).astype(np.float32) * 0.1
    function = QFunction(shape, flat)
    function.draw_noise(rng)
    inputs = rng.standard_normal((20, *observation.shape)).astype(np.float32)
    if observation is LARGE:
        inputs = rng.integers(0, 256, inputs.shape, np.uint8)
    leaf = torch.tensor(flat.astype(np.float64), requires_grad=True)
    used = leaf[: shape.size]
    if noise:
        used = used + leaf[shape.size :] * torch.tensor(function._noise.astype(np.float64))
    named, start = {}, 0
    for name, (form, _) in shape.weights().items():
        named[name] = used[start : start + int(np.prod(form))].reshape(form)
        start += int(np.prod(form))
    expected = by_autograd(shape, named, torch.tensor(inputs.astype(np.float64)))
    found = function.forward(inputs)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4)
    factors = rng.standard_normal(found.shape).astype(np.float32)
    (expected * torch.tensor(factors.astype(np.float64))).sum().backward()
    gradient = np.full_like(flat, np.nan)
    function.backward(factors.copy(), gradient)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_noisy_network_s_normalised_layers_have_no_noise_in_scales_and_shifts(noise):
    config = QNetwork(hidden=(8, 5), noise=noise, layer_norm=True)
    shape = config.plan(Spaces(VECTOR, Discrete(4)))[0]
    function = QFunction(shape, first_weights(shape, np.random.default_rng(0)))
    function.draw_noise(np.random.default_rng(1))
    for layer in range(2):
        assert (function.weights[f"hidden.{layer}.scale"] == 1).all()
        assert (function.weights[f"hidden.{layer}.shift"] == 0).all()
        assert (function.weights[f"hidden.{layer}.bias"] != 0).all() == bool(noise)
    inputs = np.random.default_rng(2).standard_normal((20, *VECTOR.shape)).astype(np.float32)
    once = function.forward(inputs).copy()
    function.weights["hidden.0.weight"] *= 3  # which the normalisation takes back, but for ε
    function.weights["hidden.0.bias"] *= 3
    np.testing.assert_allclose(function.forward(inputs), once, atol=1e-4)


def test_noise_is_factorised_and_gone_when_it_is_still():
    shape = QNetwork(hidden=(40,), noise=0.5).plan(Spaces(VECTOR, Discrete(4)))[0]
    flat = first_weights(shape, np.random.default_rng(0))
    function = QFunction(shape, flat)
    inputs = np.ones((1, 3), np.float32)
    before = function.forward(inputs).copy()
    rng = np.random.default_rng(1)
    function.draw_noise(rng)
    first = function.forward(inputs).copy()
    weight = (function.weights["hidden.0.weight"][0] - flat[:120].reshape(3, 40)) / (0.5 / 3**0.5)
    np.testing.assert_allclose(np.linalg.svd(weight)[1][1:], 0, atol=1e-5)  # an outer product has rank 1
    np.testing.assert_allclose(np.outer(weight[:, 0], weight[0]) / weight[0, 0], weight, rtol=1e-3)
    function.draw_noise(rng)
    assert (first != function.forward(inputs)).any() and (first != before).any()
    function.still()
    np.testing.assert_array_equal(function.forward(inputs), before)


def answers(config, observation, space, n, epsilon, deterministic=False, seed=0):
    policy = config.build(Spaces(space, Discrete(4)), seed)
    policy.epsilon[...] = epsilon
    out = allocate(config.answer(Spaces(space, Discrete(4))), (n,))
    policy.act(observation, {}, deterministic, out)
    return policy, out


def test_it_explores_as_often_as_it_says_and_tells_the_chance_of_what_it_did():
    n = 40_000
    seen = {"obs": np.tile(np.random.default_rng(0).standard_normal(3).astype(np.float32), (n, 1))}
    policy, out = answers(QNetwork(), seen, VECTOR, n, 0.4)
    values = policy.expected(policy.function(policy.flat.copy()).forward(seen["obs"][:1]))[0]
    best = int(values.argmax())
    found = np.bincount(out["action"], minlength=4) / n
    chance = np.where(np.arange(4) == best, 0.6 + 0.1, 0.1)
    assert np.abs(found - chance).max() < 0.01
    np.testing.assert_allclose(np.exp(out["log_prob"]), chance[out["action"]], rtol=1e-5)
    np.testing.assert_allclose(out["value"], values.max(), rtol=1e-5)


def test_asked_for_the_mode_it_neither_explores_nor_is_noisy():
    rng = np.random.default_rng(0)
    seen = {"obs": rng.standard_normal((50, 3)).astype(np.float32)}
    config = QNetwork(noise=0.5)
    policy, out = answers(config, seen, VECTOR, 50, 1.0, True)
    twin = policy.function(policy.flat.copy())
    twin.still()
    np.testing.assert_array_equal(out["action"], policy.expected(twin.forward(seen["obs"])).argmax(1))
    assert (out["log_prob"] == 0).all()
    some = np.arange(50) % 2 == 0
    mixed = answers(config, seen, VECTOR, 50, 1.0, some)[1]
    np.testing.assert_array_equal(mixed["action"][some], out["action"][some])
    assert (mixed["action"][~some] != out["action"][~some]).any() and (mixed["log_prob"][~some] < 0).all()


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_what_is_forbidden_is_never_done(epsilon):
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (2000, 4)).astype(np.int8)
    mask[np.arange(2000), rng.integers(0, 4, 2000)] = 1
    seen = {"obs.seen": rng.standard_normal((2000, 3)).astype(np.float32), "obs.action_mask": mask}
    _, out = answers(QNetwork(), seen, MASKED, 2000, epsilon)
    assert mask[np.arange(2000), out["action"]].all()
    if epsilon:
        np.testing.assert_allclose(np.exp(out["log_prob"]), 1 / mask.sum(1), rtol=1e-5)
        assert len(set(out["action"][(mask == 1).all(1)].tolist())) == 4


def test_a_distribution_is_acted_on_by_its_mean():
    seen = {"obs": np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)}
    config = QNetwork(atoms=51, least_return=-2, greatest_return=6)
    policy, out = answers(config, seen, VECTOR, 30, 0.0)
    told = torch.tensor(policy.function(policy.flat.copy()).forward(seen["obs"]).copy())
    mean = (told.softmax(-1) * torch.linspace(-2, 6, 51)).sum(-1).numpy()
    np.testing.assert_array_equal(out["action"], mean.argmax(1))
    np.testing.assert_allclose(out["value"], mean.max(1), rtol=1e-4)


def test_loaded_parameters_act_as_those_that_they_were_taken_from():
    seen = {"obs": np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)}
    config = QNetwork(noise=0.5)
    policy, out = answers(config, seen, VECTOR, 30, 0.3, True)
    other = config.build(Spaces(VECTOR, Discrete(4)), 9)
    other.load(policy.parameters(), 5)
    again = allocate(config.answer(Spaces(VECTOR, Discrete(4))), (30,))
    other.act(seen, {}, True, again)
    np.testing.assert_array_equal(out["value"], again["value"])
    assert other.version == 5 and other.epsilon == np.float32(0.3)
    with pytest.raises(SchemaError, match="another network"):
        other.load({}, 6)


@pytest.mark.parametrize("shape", [(6, 7, 2), (2, 6, 7)])
@pytest.mark.parametrize(
    ("dtype", "scaled", "divisor"),
    [("bool", "all", 1), ("uint8", "images", 1), ("uint8", "all", 255), ("float32", "all", 1)],
)
def test_small_images_are_seen_with_their_channels_last(shape, dtype, scaled, divisor):
    space = Box(shape, dtype, (0,), (255,))
    policy = QNetwork(filters=4, scaled_bytes=scaled).build(Spaces(space, Discrete(4)), 0)
    assert small_image_of(space) == (6, 7, 2)
    image = (np.random.default_rng(0).random((5, *shape)) * 200).astype(dtype)
    seen = policy.inputs({"obs": image})
    expected = image.astype(np.float32) / divisor
    np.testing.assert_allclose(seen, expected if shape[2] == 2 else np.moveaxis(expected, 1, -1), rtol=1e-6)
    np.testing.assert_array_equal(policy.inputs({"next.obs": image}, "next.obs"), seen)


REFUSED = {
    "every width must be at least 1": lambda: QNetwork(hidden=(0,)),
    "filters = -1": lambda: QNetwork(filters=-1),
    "take 51 from the least": lambda: QNetwork(atoms=51, least_return=1, greatest_return=1),
    "chooses among Discrete actions": lambda: QNetwork().build(Spaces(VECTOR, VECTOR), 0),
    "action space is MultiDiscrete": lambda: QNetwork().build(Spaces(VECTOR, MultiDiscrete((2, 2))), 0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


@pytest.mark.parametrize(
    ("shape", "seen"), [((4, 40, 37), (40, 37, 4)), ((40, 37, 4), (40, 37, 4)), ((40, 37), (40, 37, 1))]
)
def test_large_images_stay_bytes_and_are_acted_on_however_they_lie(shape, seen):
    spaces = Spaces(Box(shape, "uint8", (0,), (255,)), Discrete(3))
    config = QNetwork(hidden=(8,))
    policy, out = config.build(spaces, 0), allocate(config.answer(spaces), (5,))
    images = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
    found = policy.inputs({"obs": images})
    assert found.dtype == np.uint8 and found.shape == (5, *seen) and policy.shape.image == seen
    policy.act({"obs": images}, {}, True, out)
    np.testing.assert_allclose(
        out["value"], policy.function(policy.flat.copy()).forward(found)[..., 0].max(1), rtol=1e-4
    )
    policy.act({"obs": images[:0]}, {}, True, out)
    assert policy.inputs({"obs": images[:0]}).shape == (0, *seen)
