"""The policy that remembers: acting and training are one function, in numpy as in torch,
for every distribution."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.nets.test_gradients import ACTIONS, VECTOR

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, Spaces
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.recurrent import RecurrentActorCritic

LENGTH, COUNT = 9, 4
KINDS = ["lstm", "gru"]
MASKED = Dict({"speed": VECTOR, "action_mask": MultiBinary(4), "global_state": Box((2,), "float32")})
CAMERA = Dict({"camera": Box((36, 36, 1), "uint8", (0.0,), (255.0,)), "speed": VECTOR})


def stirred(net, spaces, device="numpy", seed=0):
    policy = net.build(spaces, 0) if device == "numpy" else ActorCriticPolicy(net, spaces, 0, "torch", device)
    source = ActorCriticPolicy(net, spaces, 0) if not policy.encoder.images else policy
    rng = np.random.default_rng(seed)
    parameters = {name: array.copy() for name, array in source.parameters().items()}
    for name, array in parameters.items():
        if not name.startswith(("returns", "observation")):
            array += rng.standard_normal(array.shape).astype(np.float32) * 0.3
    policy.load(parameters, 3)
    return policy


def play(policy, net, spaces, seed=0):
    """Act for LENGTH steps as actors do. Return the observations, on_reset, the states
    before acting, the answers; all time first."""
    rng = np.random.default_rng(seed)
    shape = (LENGTH, COUNT)
    seen = {"obs": rng.standard_normal((*shape, 3)).astype(np.float32)}
    if spaces.observation == CAMERA:
        seen = {
            "obs.camera": rng.integers(0, 256, (*shape, 36, 36, 1)).astype(np.uint8),
            "obs.speed": seen["obs"],
        }
    elif spaces.observation == MASKED:
        allowed = rng.random((*shape, 4)) < 0.5
        allowed[..., 0] |= ~allowed.any(-1)
        state = rng.standard_normal((*shape, 2)).astype(np.float32)
        seen = {
            "obs.speed": seen["obs"],
            "obs.action_mask": allowed.astype(np.int8),
            "obs.global_state": state,
        }
    on_reset = rng.random(shape) < 0.25
    states, answers = allocate(net.state(spaces), (LENGTH + 1, COUNT)), allocate(net.answer(spaces), shape)
    for name, array in states.items():
        array[0] = rng.standard_normal(array[0].shape)
        array[0, on_reset[0]] = 0
        assert name.startswith("state.")
    for t in range(LENGTH):
        out = {name: array[t] for name, array in answers.items()} | {
            name: array[t + 1] for name, array in states.items()
        }
        policy.act(
            {name: array[t] for name, array in seen.items()},
            {name: array[t] for name, array in states.items()},
            False,
            out,
        )
        if t + 1 < LENGTH:
            for array in states.values():
                array[t + 1, on_reset[t + 1]] = 0
    return seen, on_reset, {name: array[:-1] for name, array in states.items()}, answers


def flat(arrays):
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}


def inputs_of(policy, played, rows):
    seen, on_reset, states, answers = played
    inputs = (
        policy.prepare(flat(seen))
        | {name: array[0] for name, array in states.items()}
        | {"on_reset": on_reset, "rows": rows}
    )
    acted = {name: array for name, array in answers.items() if f"{name}.".startswith("action.")}
    return inputs, {name: array[rows] for name, array in flat(acted).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hidden", [(7,), (8, 6), ()])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_what_training_recomputes_is_what_acting_answered(kind, shared, hidden, action):
    net = RecurrentActorCritic(cell=kind, shared_critic=shared, hidden=hidden, width=5)
    spaces = Spaces(VECTOR, ACTIONS[action])
    policy = stirred(net, spaces)
    played = play(policy, net, spaces)
    rows = np.flatnonzero(np.random.default_rng(5).random(LENGTH * COUNT) < 0.7)
    found = policy.network.forward(*inputs_of(policy, played, rows))
    answers = flat(played[3])
    np.testing.assert_allclose(found.log_prob, answers["log_prob"][rows], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.value * policy.value_scale, answers["value"][rows], rtol=1e-5, atol=1e-5)
    assert np.ptp(answers["log_prob"]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_seen_earlier_in_the_episode_bears_on_what_is_done(kind):
    net, spaces = RecurrentActorCritic(cell=kind, width=5), Spaces(VECTOR, Discrete(4))
    policy = stirred(net, spaces)
    values = []
    for shown in (-3, 3):
        state = allocate(net.state(spaces), (1,))
        out = allocate({**net.answer(spaces), **net.state(spaces)}, (1,))
        for x in (shown, 0, 0):
            policy.act({"obs": np.full((1, 3), x, np.float32)}, state, True, out)
            state = {name: out[name].copy() for name in state}
        values.append(out["value"][0])
    assert abs(values[0] - values[1]) > 0.003


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_what_the_critic_alone_sees_hold_for_the_rows_asked_for(kind):
    net, spaces = RecurrentActorCritic(cell=kind, hidden=(7,), width=5), Spaces(MASKED, Discrete(4))
    plain, other = (stirred(net, spaces, device) for device in ("numpy", "cpu"))
    played = play(plain, net, spaces)
    actions, allowed = played[3]["action"].reshape(-1), played[0]["obs.action_mask"].reshape(-1, 4)
    assert allowed[np.arange(len(actions)), actions].all()
    rows = np.flatnonzero(np.random.default_rng(5).random(LENGTH * COUNT) < 0.6)
    inputs, acted = inputs_of(plain, played, rows)
    found = plain.network.forward(inputs, acted)
    np.testing.assert_allclose(found.log_prob, played[3]["log_prob"].reshape(-1)[rows], rtol=1e-5, atol=1e-5)
    factors = np.random.default_rng(2).standard_normal((3, len(rows))).astype(np.float32)
    gradient, of_torch = (
        np.full(plain.network.size, np.nan, np.float32),
        torch.full((plain.network.size,), np.nan),
    )
    plain.network.backward(*factors, gradient)
    as_tensors = [{name: torch.from_numpy(array) for name, array in part.items()} for part in (inputs, acted)]
    np.testing.assert_allclose(
        other.network.forward(*as_tensors).entropy,
        plain.network.forward(inputs, acted).entropy,
        rtol=1e-5,
        atol=1e-5,
    )
    other.network.backward(*torch.from_numpy(factors), of_torch)
    np.testing.assert_allclose(gradient, of_torch, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())

    before = [array.copy() for array in plain.network.forward(inputs, acted)]
    inputs["features"][:, 3:] += 1  # the critic's part
    after = plain.network.forward(inputs, acted)
    np.testing.assert_array_equal(after.log_prob, before[0])
    assert np.abs(after.value - before[2]).min() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_numpy_and_torch_are_one_network(kind, shared, action):
    net = RecurrentActorCritic(
        cell=kind,
        shared_critic=shared,
        hidden=(7,),
        width=5,
        normalise_observations=True,
        layer_norm=action == "box",
    )
    spaces = Spaces(VECTOR, ACTIONS[action])
    plain, other = (stirred(net, spaces, device) for device in ("numpy", "cpu"))
    assert [*plain.parameters()] == [*other.parameters()]
    played = play(plain, net, spaces)
    rows = np.arange(LENGTH * COUNT)[::2]
    inputs, actions = inputs_of(plain, played, rows)
    as_tensors = [
        {name: torch.from_numpy(array) for name, array in part.items()} for part in (inputs, actions)
    ]
    factors = np.random.default_rng(2).standard_normal((3, len(rows))).astype(np.float32)
    for ours, theirs in zip(
        plain.network.forward(inputs, actions), other.network.forward(*as_tensors), strict=True
    ):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5)
    gradient, of_torch = (
        np.full(plain.network.size, np.nan, np.float32),
        torch.full((plain.network.size,), np.nan),
    )
    plain.network.backward(*factors, gradient)
    other.network.backward(*torch.from_numpy(factors), of_torch)
    np.testing.assert_allclose(gradient, of_torch, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())
    for name, array in zip(
        plain.network.weights,
        np.split(gradient, np.cumsum([w.size for w in plain.network.weights.values()])[:-1]),
        strict=True,
    ):
        assert not array.size or array.any(), name

    (weights,) = plain.trainable_parameters()  # by torch's autograd around the same function
    weights.grad.zero_()
    found = plain.evaluate(*as_tensors)
    sum((torch.from_numpy(factor) * x).sum() for factor, x in zip(factors, found, strict=True)).backward()
    np.testing.assert_allclose(weights.grad, gradient, rtol=1e-6, atol=1e-6)

    state = {name: array[0] for name, array in played[2].items()}
    outs = [allocate({**net.answer(spaces), **net.state(spaces)}, (COUNT + 1,)) for _ in range(2)]
    for policy, out in zip((plain, other), outs, strict=True):
        policy.act({"obs": played[0]["obs"][0]}, state, True, out)
    for name, array in outs[0].items():
        np.testing.assert_allclose(outs[1][name], array, rtol=1e-5, atol=1e-5, err_msg=name)
        assert not array[COUNT:].any()


@pytest.mark.parametrize("encoder", ["nature_cnn", "impala_cnn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "observation", [CAMERA, Box((36, 36, 1), "uint8", (0.0,), (255.0,))], ids=["both", "image"]
)
def test_images_are_remembered_too(kind, observation, encoder):
    net = RecurrentActorCritic(cell=kind, width=5, encoder=encoder)
    spaces = Spaces(observation, Discrete(3))
    policy = stirred(net, spaces, "cpu")
    assert policy.network.library == "torch" and policy.recurrent
    assert [field.shape for field in net.state(spaces).values()] == [(1, 5)] * (2 if kind == "lstm" else 1)
    if observation is not CAMERA:
        return
    played = play(policy, net, spaces)
    rows = np.arange(LENGTH * COUNT)
    parts = [
        {name: torch.from_numpy(array) for name, array in part.items()}
        for part in inputs_of(policy, played, rows)
    ]
    found = policy.network.forward(*parts)
    np.testing.assert_allclose(found.log_prob, played[3]["log_prob"].reshape(-1), rtol=1e-4, atol=1e-5)


def test_acting_on_a_device_hands_the_state_on():
    from tidemill.nets.gpu_acting import DeviceActing

    net, spaces = RecurrentActorCritic(cell="lstm", width=5), Spaces(VECTOR, Discrete(3))
    plain, other = (stirred(net, spaces, device) for device in ("numpy", "cpu"))
    acting = DeviceActing(other.network, 0, True)
    for n in (3, 9, 2):
        rng = np.random.default_rng(n)
        seen = {"obs": rng.standard_normal((n, 3)).astype(np.float32)}
        state = {
            name: rng.standard_normal((n, *f.shape)).astype(np.float32)
            for name, f in net.state(spaces).items()
        }
        outs = [allocate({**net.answer(spaces), **net.state(spaces)}, (n,)) for _ in range(2)]
        plain.act(seen, state, True, outs[0])
        acting.begin(other.prepare(seen) | state, True, other.value_scale, outs[1])()
        for name, array in outs[0].items():
            np.testing.assert_allclose(outs[1][name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_nothing_is_asked_of_no_rows():
    net, spaces = RecurrentActorCritic(), Spaces(VECTOR, Discrete(3))
    policy, out = net.build(spaces, 0), allocate({**net.answer(spaces), **net.state(spaces)}, (2,))
    policy.act({"obs": np.zeros((0, 3), np.float32)}, allocate(net.state(spaces), (0,)), False, out)
    assert not any(array.any() for array in out.values())


def test_rows_without_their_order_in_time_are_refused():
    policy = RecurrentActorCritic().build(Spaces(VECTOR, Discrete(3)), 0)
    rows = {"features": np.zeros((4, 3), np.float32)}
    with pytest.raises(SchemaError, match=r"stretches of rows.*on_reset.*ActorCritic"):
        policy.network.forward(rows, {"action": np.zeros(4, np.int64)})
    other = ActorCriticPolicy(RecurrentActorCritic(), Spaces(VECTOR, Discrete(3)), 0, "torch")
    with pytest.raises(SchemaError, match="stretches of rows"):
        other.network.forward({"features": torch.zeros(4, 3)}, {"action": torch.zeros(4)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cell": "rnn"}, 'cell = "rnn" is not known; take one of lstm, gru'),
        ({"width": 0}, "width = 0.*64 is usual"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RecurrentActorCritic(**settings)


def test_the_configuration_survives_encoding_and_another_width_s_weights_are_refused():
    config, spaces = RecurrentActorCritic(cell="lstm", width=9, hidden=()), Spaces(VECTOR, Discrete(3))
    assert decode(ActorCritic, encode(config)) == config
    policy, wider = config.build(spaces, 0), config.replace(width=10).build(spaces, 0)
    with pytest.raises(
        SchemaError, match=r"cell\.weight is float32\[2, 3, 40\], but this network's is float32\[2, 3, 36\]"
    ):
        policy.load(wider.parameters(), 1)


def test_an_mlp_that_remembers_imports_no_torch():
    code = (
        "import sys\nimport numpy as np\nfrom tidemill import PPO, RecurrentActorCritic\nfrom "
        "tidemill.api.algorithm import ROW_FIELDS, Sample\n"
        "from tidemill.api.spaces import *\nfrom tidemill.core.schema import Field, allocate\n"
        "config, spaces = RecurrentActorCritic(cell='lstm'), Spaces(Box((3,), 'float32'), Discrete(2))\n"
        "fields = {**ROW_FIELDS, 'obs': Field((3,), 'float32'), **config.answer(spaces), "
        "**config.state(spaces)}\n"
        "sample = Sample(allocate(fields, (9, 4)))\n"
        "learner = PPO(entropy_coefficient=0.01, correct_off_policy=True, "
        "chunk_steps=3).build(config.build(spaces, 0), 0)\n"
        "assert learner.update([sample], 0.0)['rows'] == 32\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
