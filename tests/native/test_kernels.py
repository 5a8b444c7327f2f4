"""What the native core computes is what numpy computes, for every distribution, option
and instruction set: gradients are as near to those of 64 bits as numpy's."""

import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.nets.activations import FUNCTIONS

from tidemill import PPO, ActorCritic
from tidemill.algorithms.adam import Adam, NativeAdam
from tidemill.algorithms.minibatches import Rows
from tidemill.algorithms.policy_gradient_loss import Minibatches
from tidemill.algorithms.ppo import PPOLoss
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
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCriticPolicy
from tidemill.nets.masks import FORBIDDEN
from tidemill.nets.native_actor_critic import NativeActorCritic

ACTIONS = {
    "discrete": Discrete(4),
    "branches": MultiDiscrete((2, 5, 3)),
    "bits": MultiBinary(6),
    "box": Box((2, 2), "float32", (-2.0,), (6.0,)),
    "half bounded": Box((2,), "float64", (-1.0, 0.0), (1.0, float("inf"))),
    "nested": Dict(
        {
            "aim": Box((2, 1), "float32", (-2.0,), (6.0,)),
            "kind": Discrete(4),
            "more": Tuple((MultiBinary(3), Box((1,), "float32"), MultiDiscrete((2, 3)))),
        }
    ),
}
OPTIONS = {
    "usual": PPO(),
    "entropy": PPO(entropy_coefficient=0.02, value_coefficient=1.5),
    "clipped values": PPO(clip_value=0.3, clip=0.1),
    "all": PPO(entropy_coefficient=-0.01, clip_value=0.1, clip=0.05),
}


class Case:
    """One batch of `n` rows and two policies of the same weights, numpy's and the
    core's."""

    def __init__(self, kernels, config, action, n=150, width=5, masked=False, seed=0):
        rng = np.random.default_rng(seed)
        parts = {"own": Box((width,), "float32")}
        branches = [n for leaf in leaves(action, "action").values() for n in choices_of(leaf)]
        count = sum(branches)
        if masked:
            parts["action_mask"] = Box((count,), "int8", (0,), (1,))
        if config.critic_only == ("more",):
            parts["more"] = Box((3,), "float32")
        self.spaces = Spaces(Dict(parts), action)
        self.config, self.n, self.rng = config, n, rng
        self.plain, self.native = (ActorCriticPolicy(config, self.spaces, 3) for _ in range(2))
        shape, network = config.shape(self.spaces), self.native.network
        self.native.network = NativeActorCritic(shape, network.flat, kernels)
        stir = rng.standard_normal(network.size).astype(np.float32) * np.float32(0.3)
        if config.critic_only == ("more",):  # what the actor does not see has no weight
            stir[:] = 0
        for policy in (self.plain, self.native):
            policy.network.flat += stir
        self.seen = {"obs.own": rng.standard_normal((n, width), np.float32)}
        if masked:
            mask = rng.random((n, count)) < 0.6
            starts = np.cumsum([0, *branches[:-1]])
            mask[:, starts] = True  # one is allowed in each branch
            self.seen["obs.action_mask"] = mask.astype(np.int8)
        if "more" in parts:
            self.seen["obs.more"] = rng.standard_normal((n, 3), np.float32)

    def answers(self, deterministic):
        found = []
        for policy in (self.plain, self.native):
            policy.reseed(11)
            out = allocate(self.config.answer(self.spaces), (self.n,))
            policy.act(self.seen, {}, deterministic, out)
            found.append(out)
        return found

    def batch(self):
        """The inputs of all rows and the columns that a learner makes of them."""
        out, rng = self.answers(False)[0], self.rng
        scalars = rng.standard_normal((4, self.n), np.float32)
        scalars[0] = out["log_prob"] + scalars[0] * np.float32(0.15)
        scalars[3] = out["value"] + scalars[3] * np.float32(0.2)
        return [{name: out[name] for name in leaves(self.spaces.action, "action")}, {"scalars": scalars}]

    def gradients(self, algorithm, columns, picked, weight):
        """[gradient, parts] of numpy's learner and of the core's."""
        found = []
        for policy in (self.plain, self.native):
            loss = PPOLoss(algorithm, policy)
            source = Rows(loss.library, policy, self.seen, self.n)
            assert loss.differentiate(Minibatches(source, columns, weight), picked) == len(picked)
            found.append(loss.shared.astype(np.float64))
        return found

    def reference(self, algorithm, columns, picked, weight):
        """The same in 64 bits, by autograd."""
        network, inputs = self.plain.network, self.plain.prepare(self.seen)
        w = {k: torch.tensor(a, dtype=torch.float64, requires_grad=True) for k, a in network.weights.items()}
        shape, features = network.shape, torch.from_numpy(inputs["features"][picked]).double()

        def tower(i):
            h, name, hidden = features, "hidden", shape.hidden
            if shape.critic_hidden is not None:
                h = h if i else h[:, : shape.encoder.seen]
                i, name, hidden = 0, *(("critic_hidden", shape.critic_hidden) if i else (name, hidden))
            for layer in range(len(hidden)):
                h = FUNCTIONS[shape.activation](
                    h @ w[f"{name}.{layer}.weight"][i] + w[f"{name}.{layer}.bias"][i]
                )
            return h

        head = torch.nn.functional.linear(tower(0), w["actor.weight"], w["actor.bias"][:, 0])
        if "forbidden" in inputs:
            head = head.masked_fill(torch.from_numpy(inputs["forbidden"][picked]), FORBIDDEN)
        taken = {name: torch.from_numpy(array[picked]) for name, array in columns[0].items()}
        action = network.shape.distribution.action_of(
            {name: x.double() if x.is_floating_point() else x for name, x in taken.items()}
        )
        log_prob, entropy = network.shape.distribution.evaluate(head, w["log_std"][:, 0], action)
        value = tower(network.shape.towers - 1) @ w["critic.weight"] + w["critic.bias"]
        behaviour, advantage, target, old = torch.from_numpy(columns[1]["scalars"][:, picked]).double()
        ratio, clip = (log_prob - behaviour).exp(), algorithm.clip
        policy = -torch.minimum(ratio * advantage, ratio.clip(1 - clip, 1 + clip) * advantage).sum()
        errors = (value - target) ** 2
        if algorithm.clip_value is not None:
            near = old + (value - old).clip(-algorithm.clip_value, algorithm.clip_value)
            errors = torch.maximum(errors, (near - target) ** 2)
        loss = policy + algorithm.value_coefficient * 0.5 * errors.sum()
        loss = (loss - algorithm.entropy_coefficient * entropy.sum()) * weight
        loss.backward()
        gradient = [(torch.zeros_like(x) if x.grad is None else x.grad).reshape(-1) for x in w.values()]
        kl, clipped = (ratio - 1 - ratio.log()).sum(), ((ratio - 1).abs() > clip).sum()
        parts = [policy, 0.5 * errors.sum(), entropy.sum(), kl, clipped, torch.tensor(len(picked))]
        return torch.cat(gradient).numpy(), np.array([float(part.detach()) for part in parts]) * weight

    def errors(self, algorithm, count):
        """The largest error of each array of the gradient of `count` rows, by the core
        and by numpy, and the array's largest entry: [arrays, 3]."""
        columns = self.batch()
        picked, weight = self.rng.permutation(self.n)[:count], 1.0 / count
        plain, native = self.gradients(algorithm, columns, picked, weight)
        exact, parts = self.reference(algorithm, columns, picked, weight)
        np.testing.assert_allclose(native[len(exact) :], parts, rtol=1e-5, atol=2e-6)
        sizes = [array.size for array in self.plain.network.weights.values()]
        return np.array(
            [
                [
                    *(np.abs(found[start:end] - exact[start:end]).max() for found in (native, plain)),
                    np.abs(exact[start:end]).max(),
                ]
                for start, end in pairwise(np.cumsum([0, *sizes]).tolist())
                if start < end
            ]
        )


def check(kernels, config, action, algorithm, count=70, **more):
    """Each array's error is at most 2e-6 of its largest entry, or twice numpy's: root
    mean squares over batches, since in one of them an array of a single number may be
    exact by luck."""
    found = [Case(kernels, config, action, seed=seed, **more).errors(algorithm, count) for seed in range(6)]
    native, plain, entry = np.sqrt(np.square(found).mean(0)).T
    assert (entry > 0).any()
    assert (native <= np.maximum(2e-6 * entry, 2 * plain)).all(), (native / entry, plain / entry)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_64_bits(kernels, action, options):
    shared = (list(ACTIONS).index(action) + list(OPTIONS).index(options)) % 2 == 1
    config = ActorCritic(hidden=(64, 64), shared_critic=shared)
    check(kernels, config, ACTIONS[action], OPTIONS[options], 137)


@pytest.mark.parametrize(
    ("hidden", "activation", "width"),
    [
        ((), "tanh", 5),
        ((1,), "tanh", 1),
        ((7,), "relu", 1),
        ((3, 130), "tanh", 17),
        ((100, 33, 18), "relu", 17),
        ((1024,), "tanh", 4),
        ((257, 1), "relu", 33),
        ((64, 64), "elu", 5),
        ((3, 130), "elu", 17),
        ((64, 64), "gelu", 5),
        ((7, 33), "gelu", 1),
        ((64, 64), "silu", 5),
        ((100, 33, 18), "silu", 17),
    ],
)
def test_layers_of_any_width_and_number_have_right_gradients(kernels, hidden, activation, width):
    config = ActorCritic(hidden=hidden, activation=activation)
    check(kernels, config, Discrete(3), OPTIONS["entropy"], width=width)


@pytest.mark.parametrize(
    ("hidden", "critic_hidden", "activation"),
    [
        ((64, 64), (256, 128), "tanh"),
        ((33, 5), (7,), "relu"),
        ((7,), (5, 130, 3), "gelu"),
        ((), (17,), "elu"),
        ((17,), (), "tanh"),
    ],
)
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_a_critic_of_other_layers_has_right_gradients(kernels, hidden, critic_hidden, activation, action):
    config = ActorCritic(hidden=hidden, critic_hidden=critic_hidden, activation=activation)
    check(kernels, config, ACTIONS[action], OPTIONS["entropy"])
    plain, native = Case(kernels, config, ACTIONS[action]).answers(False)
    for name, array in plain.items():
        np.testing.assert_allclose(native[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_critic_of_other_layers_alone_sees_what_is_for_it(kernels):
    config = ActorCritic(critic_only=("more",), critic_hidden=(32, 8))
    check(kernels, config, Discrete(3), OPTIONS["usual"])


def test_a_head_may_be_wider_than_every_layer(kernels):
    check(kernels, ActorCritic(hidden=(3,)), Discrete(40), OPTIONS["entropy"], width=2)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 63, 64, 65, 128, 2048])
def test_minibatches_of_any_size_have_right_gradients(kernels, count):
    check(kernels, ActorCritic(), ACTIONS["box"], OPTIONS["all"], count, n=max(count, 150))


@pytest.mark.parametrize("action", ["discrete", "branches", "nested"])
def test_what_a_mask_forbids_is_not_drawn_and_has_no_gradient(kernels, action):
    case = Case(kernels, ActorCritic(), ACTIONS[action], masked=True)
    check(kernels, ActorCritic(), ACTIONS[action], OPTIONS["entropy"], masked=True)
    plain, native = case.answers(False)
    for name in leaves(ACTIONS[action], "action"):
        np.testing.assert_allclose(native[name], plain[name], rtol=1e-5, atol=1e-5)


def test_the_actor_does_not_depend_on_what_only_the_critic_sees(kernels):
    config = ActorCritic(critic_only=("more",), shared_critic=False)
    case = Case(kernels, config, Discrete(3))
    check(kernels, config, Discrete(3), OPTIONS["usual"])
    before = case.answers(True)[1]
    case.seen["obs.more"] += 1
    after = case.answers(True)[1]
    np.testing.assert_array_equal(before["log_prob"], after["log_prob"])
    assert (before["value"] != after["value"]).any()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("deterministic", [False, True, "some"])
@pytest.mark.parametrize("n", [1, 64, 131])
def test_acting_draws_what_numpy_draws(kernels, action, deterministic, n):
    case = Case(kernels, ActorCritic(hidden=(33, 64)), ACTIONS[action], n=n)
    plain, native = case.answers(np.arange(n) % 2 == 0 if deterministic == "some" else deterministic)
    for name, array in plain.items():
        np.testing.assert_allclose(native[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    assert case.plain._rng.bit_generator.state == case.native._rng.bit_generator.state


def test_rows_that_were_acted_on_are_held_until_others_are(kernels):
    case, held = Case(kernels, ActorCritic(), ACTIONS["box"]), []
    out = allocate(case.config.answer(case.spaces), (case.n,))
    for n in (5, 7, 6):
        case.native.act({name: array[:n] for name, array in case.seen.items()}, {}, False, out)
        held.append(weakref.ref(case.native._features))
    assert [each() is None for each in held] == [True, True, False]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["features", "log_prob", "advantage", "target", "weight"])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_what_is_not_finite_shows_as_it_does_with_numpy(kernels, spoilt, where, activation):
    case = Case(kernels, ActorCritic(activation=activation), ACTIONS["discrete"])
    columns = case.batch()
    if where == "features":
        case.seen["obs.own"][3, 2] = spoilt
    elif where == "weight":
        for policy in (case.plain, case.native):
            policy.network.flat[7] = spoilt
    else:
        columns[1]["scalars"][("log_prob", "advantage", "target").index(where), 3] = spoilt
    with np.errstate(all="ignore"):
        plain, native = case.gradients(OPTIONS["entropy"], columns, np.arange(150), 1 / 150)
    size = case.plain.network.size
    assert np.isfinite(plain[size:]).all() == np.isfinite(native[size:]).all()
    for kind in (np.isnan, np.isfinite):
        np.testing.assert_array_equal(kind(plain[size:]), kind(native[size:]))
    assert np.isfinite(plain[:size]).all() == np.isfinite(native[:size]).all()


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
@pytest.mark.parametrize("action", ["discrete", "box", "bits"])
def test_a_row_that_is_not_finite_is_acted_on_as_by_numpy_and_spoils_no_other(kernels, spoilt, action):
    case = Case(kernels, ActorCritic(normalise_observations=False), ACTIONS[action])
    case.seen["obs.own"][3] = spoilt
    with np.errstate(all="ignore"):
        plain, native = case.answers(False)
    others = np.arange(case.n) != 3
    for name, array in plain.items():
        np.testing.assert_allclose(native[name][others], array[others], rtol=1e-5, atol=1e-5, err_msg=name)
    for name in ("value", "log_prob"):
        assert np.isnan(native[name][3]) == np.isnan(plain[name][3]), name


@pytest.mark.parametrize("size", [1, 5, 16, 1000, 70001])
def test_adam_s_steps_are_numpy_s(kernels, size):
    rng = np.random.default_rng(0)
    weights, gradient = rng.standard_normal((2, size)).astype(np.float32)
    both = [
        (w, g, make) for w, g, make in ((weights.copy(), gradient.copy(), Adam), (weights, gradient, None))
    ]
    optimisers = [make(w, g, 1e-5) if make else NativeAdam(w, g, 1e-5, kernels) for w, g, make in both]
    for step in range(5):
        for (_, g, _), optimiser in zip(both, optimisers, strict=True):
            g[:] = np.random.default_rng(step).standard_normal(size)
            norm = optimiser.descend(3e-4, 0.7, 0.5, 1.0)
            assert norm == pytest.approx(np.linalg.norm(g.astype(np.float64)) / 0.7, rel=1e-5)
    np.testing.assert_allclose(both[1][0], both[0][0], rtol=1e-5, atol=1e-7)
    for name, array in optimisers[0].state().items():
        np.testing.assert_allclose(optimisers[1].state()[name], array, rtol=1e-5, atol=1e-9)


def test_a_gradient_too_large_for_its_square_leaves_the_weights_alone(kernels):
    weights, gradient = np.ones(20, np.float32), np.full(20, 1e30, np.float32)
    assert NativeAdam(weights, gradient, 1e-5, kernels).descend(0.1, 1.0, None, 0.0) == np.inf
    assert (weights == 1).all()


def test_an_action_beyond_the_space_is_brought_into_it(kernels):
    case = Case(kernels, ActorCritic(), ACTIONS["branches"])
    encoded = case.native.network.encode({"action": np.array([[-7, 9, 1], [1, 4, 2**40]])})
    np.testing.assert_array_equal(encoded, [[0, 4, 1], [1, 4, 2]])


def test_settings_change_what_is_computed(kernels):
    """The options above are told apart at all."""
    case = Case(kernels, ActorCritic(), ACTIONS["discrete"])
    columns, picked = case.batch(), np.arange(150)
    found = [
        case.gradients(o, columns, picked, 0.01)[1] for o in (*OPTIONS.values(), replace(PPO(), clip=0.01))
    ]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(one - other).max() > 1e-4
