"""Plain layers of the native core, and the learners that are made of them: numpy's
results, by any number of threads."""

import os
import signal
from threading import Thread

import numpy as np
import pytest
import torch
from tests.nets.activations import hidden_layers

from tidemill import DQN, SAC, TD3, DeterministicActor, QNetwork, SquashedGaussian
from tidemill.algorithms.action_value_formulas import approach
from tidemill.api.algorithm import Sample
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.native import library as native_library
from tidemill.nets.mlp import MLP, MLPShape
from tidemill.nets.native_mlp import NativeMLP
from tidemill.nets.squashed_gaussian import draw
from tidemill.nets.weights import views

SHAPES = {
    "critics": (MLPShape(2, 23, (256, 256), 1), 256),
    "actor": (MLPShape(1, 17, (64, 64), 12), 100),
    "one row": (MLPShape(1, 4, (128, 128), 2), 1),
    "no hidden layer": (MLPShape(2, 3, (), 5), 7),
    "narrowest": (MLPShape(1, 1, (1,), 1), 2),
    "odd": (MLPShape(2, 130, (37, 300, 5), 33), 301),
    "widest": (MLPShape(1, 5, (1024,), 3), 65),
    "tanh": (MLPShape(2, 130, (37, 300, 5), 33, activation="tanh"), 301),
    "elu": (MLPShape(2, 23, (64, 33), 1, activation="elu"), 256),
    "gelu": (MLPShape(1, 17, (33, 64, 7), 12, activation="gelu"), 100),
    "silu": (MLPShape(2, 130, (37, 300, 5), 33, activation="silu"), 301),
    "normalised": (MLPShape(2, 23, (256, 256), 1, layer_norm=True), 256),
    "normalised silu": (MLPShape(2, 130, (37, 300, 5), 33, activation="silu", layer_norm=True), 301),
    "normalised tanh": (MLPShape(1, 17, (33, 64, 7), 12, activation="tanh", layer_norm=True), 100),
}


class Case:
    """Networks of the same weights, numpy's and the core's, with rows and a gradient of
    what they tell."""

    def __init__(self, kernels, name, seed=0):
        self.shape, n = SHAPES[name]
        self.rng = rng = np.random.default_rng(seed)
        self.flat = self.shape.begin(rng)
        self.flat += rng.standard_normal(self.flat.size, np.float32) * np.float32(0.1)
        self.plain, self.native = MLP(self.shape, self.flat), NativeMLP(self.shape, self.flat, kernels)
        self.inputs = rng.standard_normal((n, self.shape.inputs), np.float32)
        self.of_out = rng.standard_normal((self.shape.towers, n, self.shape.outputs), np.float32)

    def results(self, network):
        """What it tells, and the gradients of inputs and weights."""
        gradient = np.full_like(self.flat, 7)
        told = network.forward(self.inputs).copy()
        of_inputs = network.backward(self.of_out.copy(), gradient, True).copy()
        return told, of_inputs, gradient

    def in_64_bits(self):
        """The same by torch."""
        parts = {
            name: torch.tensor(part, dtype=torch.float64).requires_grad_()
            for name, part in views(self.flat, self.shape.forms()).items()
        }
        x = torch.tensor(self.inputs, dtype=torch.float64, requires_grad=True)
        h = hidden_layers(x, parts, self.shape.activation)
        h = (h @ parts["head.weight"] + parts["head.bias"]).expand(self.of_out.shape)
        (h * torch.tensor(self.of_out)).sum().backward()
        gradient = np.concatenate([part.grad.numpy().ravel() for part in parts.values()])
        return h.detach().numpy(), x.grad.numpy(), gradient


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_as_near_to_64_bits_as_numpy_s(kernels, name):
    errors = []
    for seed in range(4):
        case = Case(kernels, name, seed)
        for kind, plain, native, exact in zip(
            range(3), case.results(case.plain), case.results(case.native), case.in_64_bits(), strict=True
        ):
            most = np.abs(exact).max()
            errors.append((kind, np.abs(native - exact).max() / most, np.abs(plain - exact).max() / most))
    for kind in range(3):
        native, plain = (np.sqrt(np.mean([row[i] ** 2 for row in errors if row[0] == kind])) for i in (1, 2))
        assert native <= max(2e-6, 2 * plain), kind


@pytest.mark.parametrize("name", ["critics", "odd", "actor", "normalised"])
def test_what_is_not_a_number_stays_where_numpy_has_it(kernels, name):
    case = Case(kernels, name)
    case.inputs[3, 1] = np.nan
    case.of_out[0, 5] = np.inf
    with np.errstate(invalid="ignore"):
        plain = case.results(case.plain)
    for ours, theirs in zip(case.results(case.native), plain, strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))


def test_only_the_gradient_that_is_asked_for_is_written(kernels):
    case = Case(kernels, "critics")
    _, of_inputs, gradient = case.results(case.native)
    case.native.forward(case.inputs)
    np.testing.assert_array_equal(case.native.backward(case.of_out, None, True), of_inputs)
    found = np.zeros_like(gradient)
    case.native.forward(case.inputs)
    assert case.native.backward(case.of_out, found) is None
    np.testing.assert_array_equal(found, gradient)


@pytest.mark.parametrize("name", ["critics", "elu", "normalised", "narrowest"])
def test_gradients_of_what_one_tower_tells_of_each_row_are_those_of_all(kernels, name):
    case = Case(kernels, name)
    towers = case.rng.integers(0, case.shape.towers, len(case.inputs))
    for chosen in (towers, np.zeros_like(towers)):
        case.native.forward(case.inputs)
        found = case.native.backward_chosen(chosen).copy()
        case.native.forward(case.inputs)
        np.testing.assert_array_equal(MLP.backward_chosen(case.native, chosen), found)
        case.plain.forward(case.inputs)
        plain = case.plain.backward_chosen(chosen)
        assert np.abs(found - plain).max() <= 2e-6 * np.abs(plain).max()


def test_drawn_actions_are_numpy_s(kernels):
    rng = np.random.default_rng(0)
    noise, head = rng.standard_normal((101, 3), np.float32), rng.standard_normal((101, 6), np.float32) * 3
    head[:10] *= 100
    head[10, :3], head[11, :3], head[12, 3:], noise[13] = np.inf, -np.inf, np.inf, 0
    head[20, 0] = head[21, 3] = noise[22, 1] = np.nan
    with np.errstate(invalid="ignore"):
        plain, native = draw(head, noise, None), draw(head, noise, kernels)
    for name, ours, theirs in zip(plain._fields, native, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6, err_msg=name)
    assert not plain.uncut.all() and plain.uncut.any()


def test_the_number_of_threads_changes_no_bit(kernels):
    """Two threads that compute at the same time, of which one gets the helpers, too."""
    case = Case(kernels, "critics")
    alone = case.results(case.native)
    assert kernels.helpers(2) >= 2
    found = []

    def work():
        own = NativeMLP(case.shape, case.flat, kernels)
        for _ in range(20):
            found.append(case.results(own))

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for results in found:
        for ours, theirs in zip(results, alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_the_other_one(kernels):
    case = Case(kernels, "critics")
    before = case.results(case.native)
    assert kernels.helpers(2) >= 2
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        told = 1
        try:
            assert (kernels.helpers(0), kernels.helpers(1)) == (0, 1)
            assert all(map(np.array_equal, case.results(case.native), before))
            told = 0
        finally:
            os._exit(told)
    assert os.waitpid(child, 0)[1] == 0


def test_a_target_moves_as_numpy_s_does(kernels):
    rng = np.random.default_rng(0)
    weights, target = rng.standard_normal((2, 1001), np.float32)
    plain = target.copy()
    approach(plain, weights, 0.005, None)
    approach(target, weights, 0.005, kernels)
    np.testing.assert_allclose(target, plain, rtol=1e-6, atol=1e-7)


def sample_of(spaces, seed, n=32):
    """A batch as a replay draws it."""
    rng = np.random.default_rng(seed)
    seen = {name: rng.standard_normal((1, n, 5), np.float32) for name in ("obs", "next.obs")}
    if isinstance(spaces.action, Discrete):
        action = rng.integers(0, spaces.action.n, (1, n))
    else:
        action = rng.uniform(-1, 1, (1, n, *spaces.action.shape)).astype(np.float32)
    return Sample(
        seen
        | {
            "action": action,
            "rewards": rng.standard_normal((1, n, 1), np.float32),
            "steps": np.ones((1, n), np.int32),
            "done": rng.random((1, n)) < 0.1,
            "weight": rng.uniform(0.5, 1, (1, n)).astype(np.float32),
        }
    )


@pytest.mark.parametrize(
    ("algorithm", "policy", "action"),
    [
        (SAC(), SquashedGaussian(hidden=(64, 32)), Box((3,), "float32", (-2.0,), (1.0,))),
        (TD3(), DeterministicActor(hidden=(64, 32)), Box((3,), "float32", (-2.0,), (1.0,))),
        (DQN(target_steps=0, target_rate=0.1), QNetwork(hidden=(32, 32)), Discrete(3)),
        (DQN(), QNetwork(hidden=(32,), noise=0.5, atoms=11, duelling=False), Discrete(3)),
    ],
)
def test_updates_are_numpy_s(kernels, monkeypatch, algorithm, policy, action):
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    monkeypatch.setattr(native_library, "named", lambda setting: None if setting == "off" else kernels)
    spaces = Spaces(Box((5,), "float32"), action)
    learners = []
    for native in ("off", kernels.instruction_set):
        learners.append(algorithm.build(policy.replace(native=native).build(spaces, 0), 1))
    assert learners[1].policy.kernels is kernels
    for seed in range(5):
        told = [learner.update([sample_of(spaces, seed)], 0.1) for learner in learners]
        assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-5)
    plain, native = (learner.state() for learner in learners)
    for name in plain.keys() - {"random"}:
        np.testing.assert_allclose(native[name], plain[name], rtol=1e-2, atol=2e-4, err_msg=name)
    np.testing.assert_allclose(learners[1].policy.flat, learners[0].policy.flat, atol=2e-4)
    before = policy.build(spaces, 0).flat
    assert np.abs(learners[1].policy.flat - before).max() > 1e-4


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ConfigError, match='native = "sse9" is not known; take one of off, auto'):
        SquashedGaussian(native="sse9")
