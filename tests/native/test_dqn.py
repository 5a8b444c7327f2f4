"""DQN's loss by the native core: numpy's, or nearer to that in 64 bits."""

import numpy as np
import pytest
import torch
from tests.native.test_layers import sample_of
from tests.nets.activations import hidden_layers

from tidemill import DQN, QNetwork
from tidemill.api.algorithm import Sample, UpdateFault
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, Spaces
from tidemill.core.schema import allocate
from tidemill.native import library as native_library
from tidemill.nets.weights import views

PLAIN = Spaces(Box((5,), "float32"), Discrete(3))
MASKED = Spaces(Dict({"seen": Box((5,), "float32"), "action_mask": MultiBinary(3)}), Discrete(3))
CASES = {
    "as published": (DQN(double=False), QNetwork(hidden=(64, 64), duelling=False), PLAIN, 1),
    "duelling, double": (DQN(), QNetwork(hidden=(33, 20)), PLAIN, 1),
    "duelling alone": (DQN(double=False), QNetwork(hidden=(128,)), PLAIN, 1),
    "windows": (DQN(gamma=0.9), QNetwork(hidden=(32,), duelling=False, activation="silu"), PLAIN, 4),
    "masked": (DQN(), QNetwork(hidden=(32, 32), layer_norm=True), MASKED, 1),
    "masked, one network": (DQN(double=False), QNetwork(hidden=(), duelling=False), MASKED, 2),
    "normalised": (DQN(), QNetwork(hidden=(32, 32), normalise_observations=True), PLAIN, 1),
}


def rows_of(spaces, steps, seed):
    """Transitions of up to so many steps."""
    rng, sample = np.random.default_rng(seed), sample_of(spaces, seed, 50)
    spans = rng.integers(1, steps + 1, (1, 50)).astype(np.int32)
    rewards = rng.standard_normal((1, 50, steps), np.float32) * 2
    rewards[np.arange(steps) >= spans[..., None]] = 0
    sample |= {"rewards": rewards, "steps": spans}
    if spaces is MASKED:
        for name in ("obs", "next.obs"):
            sample[f"{name}.seen"] = sample.pop(name)
            mask = rng.integers(0, 2, (1, 50, 3)).astype(np.int8)
            mask[0, :5] = 0  # nothing is allowed
            sample[f"{name}.action_mask"] = mask
    return Sample(sample)


def learners_of(case, kernels, monkeypatch):
    """Numpy's and the core's, of the same weights."""
    algorithm, policy, spaces, _ = case
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    monkeypatch.setattr(native_library, "named", lambda setting: None if setting == "off" else kernels)
    found = [
        algorithm.build(policy.replace(native=native).build(spaces, 0), 1)
        for native in ("off", kernels.instruction_set)
    ]
    rng = np.random.default_rng(5)
    moved, target = rng.standard_normal((2, found[0].policy.flat.size), np.float32) * np.float32(0.3)
    for learner in found:
        learner.policy.flat += moved
        learner.load_state({**learner.state(), "target": learner.policy.flat + target})
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_acts_as_numpy_does(kernels, monkeypatch, name):
    _, _, spaces, steps = CASES[name]
    told = []
    for learner in learners_of(CASES[name], kernels, monkeypatch):
        policy = learner.policy
        found = allocate(policy.config.answer(spaces), (50,))
        for seed, modes in enumerate([False, np.arange(50) % 3 == 0, True]):
            policy.epsilon[...] = 0.3
            rows = {each: array[0] for each, array in rows_of(spaces, steps, seed).items()}
            for n in (50, 50, 8, 1):
                few = {each: array[:n] for each, array in rows.items()}
                policy.act(few, {}, modes if isinstance(modes, bool) else modes[:n], found)
                told.append({each: array[:n].copy() for each, array in found.items()})
    explored = 0
    for plain, native in zip(told[: len(told) // 2], told[len(told) // 2 :], strict=True):
        np.testing.assert_array_equal(native["action"], plain["action"])
        np.testing.assert_allclose(native["value"], plain["value"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(native["log_prob"], plain["log_prob"], rtol=1e-6)
        explored += np.count_nonzero(plain["log_prob"] < -1)
    assert explored > 3


def in_64_bits(learner, batch):
    """The loss, what each row adds, how far off it was, its value, and the gradient."""
    policy, config = learner.policy, learner.config
    weights = torch.tensor(policy.flat, dtype=torch.float64, requires_grad=True)

    def told(flat, of):
        parts, at = {}, 0
        for name, (form, _) in policy.shape.weights().items():
            size = int(np.prod(form))
            parts[name], at = flat[at : at + size].view(form), at + size
        x = torch.tensor(policy.features(batch, of), dtype=torch.float64)
        head = hidden_layers(x, parts, policy.shape.activation) @ parts["head.weight"] + parts["head.bias"]
        head = head.reshape(len(x), -1)
        if not policy.shape.duelling:
            return head
        advantage = head[:, 1:]
        return head[:, :1] + advantage - advantage.mean(1, keepdim=True)

    with torch.no_grad():
        then = told(torch.tensor(learner.state()["target"], dtype=torch.float64), "next.obs")
        chooser = told(weights, "next.obs") if config.double else then
        if policy.mask is not None:
            chooser = chooser.masked_fill(torch.tensor(batch["next.obs.action_mask"] == 0), -torch.inf)
        hoped = then.gather(1, chooser.argmax(1, keepdim=True))[:, 0]
        rewards = torch.tensor(batch["rewards"], dtype=torch.float64)
        returns = (rewards * config.gamma ** torch.arange(rewards.shape[1])).sum(1)
        goal = returns + ~torch.tensor(batch["done"]) * config.gamma ** torch.tensor(batch["steps"]) * hoped
    value = told(weights, "obs").gather(1, torch.tensor(batch["action"])[:, None])[:, 0]
    losses = torch.nn.functional.smooth_l1_loss(value, goal, reduction="none")
    loss = (losses * torch.tensor(batch["weight"])).mean()
    loss.backward()
    results = loss, losses, (value - goal).abs(), value, weights.grad
    return [np.asarray(each.detach()) for each in results]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_as_near_to_64_bits_as_numpy_s(kernels, monkeypatch, name):
    case = CASES[name]
    learners = learners_of(case, kernels, monkeypatch)
    errors = []
    for seed in range(4):
        sample = rows_of(*case[2:], seed)
        for learner in learners:
            learner.take_in({**sample, "on_reset": np.ones((1, 50), np.bool_), "version": sample["steps"]})
            learner.policy.fold()
        batch = {field: array[0] for field, array in sample.items()}
        exact = in_64_bits(learners[0], batch)
        found = []
        for learner in learners:
            told = learner._go_back(batch)
            found.append([np.array(each) for each in (*told, learner._gradient)])
        for part, (true, plain, native) in enumerate(zip(exact, *found, strict=True)):
            arrays = [{"": each} for each in (true, plain, native)]
            if part == 4:
                forms = {each: form for each, (form, _) in learners[0].policy.shape.weights().items()}
                arrays = [views(each, forms) for each in (true, plain, native)]
            for field in arrays[0]:
                true, plain, native = (each[field] for each in arrays)
                most = np.abs(true).max()
                errors.append((part, field, *(np.abs(each - true).max() / most for each in (native, plain))))
    for kind in {error[:2] for error in errors}:
        native, plain = (
            np.sqrt(np.mean([error[i] ** 2 for error in errors if error[:2] == kind])) for i in (2, 3)
        )
        assert native <= max(2e-6, 2 * plain), kind


def test_it_is_bound_to_the_rows_that_it_is_given(kernels, monkeypatch):
    """Batches that lie in the same arrays, in others, of other sizes and types."""
    plain, native = learners_of(CASES["windows"], kernels, monkeypatch)
    first, second = (rows_of(PLAIN, 4, seed) for seed in (0, 1))
    fewer = Sample({name: array[:, :7] for name, array in second.items()})
    wider = Sample({**second, "action": second["action"].astype(np.int16)})
    for sample in (first, second, fewer, wider, first):
        told = [learner.update([sample], 0.0) for learner in (plain, native)]
        assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-5)
    for name in first:
        first[name][...] = second[name]
    told = [learner.update([first], 0.0) for learner in (plain, native)]
    assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-5)
    wider["action"][...] = 0
    told = [learner.update([wider], 0.0) for learner in (plain, native)]
    assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-5)


def test_what_is_not_finite_is_left_out_and_what_is_no_action_is_refused(kernels, monkeypatch):
    _, native = learners_of(CASES["duelling, double"], kernels, monkeypatch)
    before = native.policy.flat.copy()
    for name in ("obs", "next.obs", "rewards"):
        sample = rows_of(PLAIN, 1, 0)
        sample[name][0, 3, 0] = np.nan
        with pytest.raises(UpdateFault, match="Look for NaN"):
            native.update([sample], 0.0)
    for name, value in (("action", 3), ("action", -1), ("steps", 2), ("steps", -1)):
        sample = rows_of(PLAIN, 1, 0)
        sample[name][0, 3] = value
        with pytest.raises(IndexError, match="not of 0 to 2, or transitions of more than 1 steps"):
            native.update([sample], 0.0)
    np.testing.assert_array_equal(native.policy.flat, before)
