"""SAC: what an update does to critics, actor, temperature and targets; and that it
learns."""

import numpy as np
import pytest
import torch
from tests.algorithms.restoring import check_restored
from tests.nets.activations import FUNCTIONS, hidden_layers
from torch.nn import functional

from tidemill.algorithms.action_value_formulas import differentiate_actor, soft_values
from tidemill.algorithms.sac import SAC
from tidemill.api.algorithm import Sample
from tidemill.api.schedule import LinearSchedule
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.schema import allocate
from tidemill.nets.mlp import MLP, MLPShape
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian, squash
from tidemill.nets.weights import views

SPACES = Spaces(Box((3,), "float32"), Box((2,), "float32", (-1.0, 0.0), (3.0, 1.0)))
CENTRE, HALF = np.array([1, 0.5], np.float32), np.array([2, 0.5], np.float32)
BATCH = 16


def sample_of(seed=0, **fields):
    rng = np.random.default_rng(seed)
    batch = {
        "obs": rng.standard_normal((BATCH, 3)).astype(np.float32),
        "next.obs": rng.standard_normal((BATCH, 3)).astype(np.float32),
        "action": (rng.uniform(-1, 1, (BATCH, 2)) * HALF + CENTRE).astype(np.float32),
        "rewards": rng.standard_normal((BATCH, 1)).astype(np.float32),
        "steps": np.ones(BATCH, np.int32),
        "done": rng.random(BATCH) < 0.3,
        "weight": rng.uniform(0.2, 1, BATCH).astype(np.float32),
        "version": np.zeros(BATCH, np.int64),
        "priority": np.full(BATCH, np.nan, np.float32),
        **fields,
    }
    sample = Sample({name: array[np.newaxis] for name, array in batch.items()})
    sample.bootstrap = 0
    return sample


def learner_of(config=None, seed=0):
    policy = SquashedGaussian(hidden=(8, 6)).build(SPACES, seed)
    policy.flat += np.random.default_rng(seed).standard_normal(policy.flat.size).astype(np.float32) * 0.2
    return (config or SAC()).build(policy, seed)


# ---- the formulas ----------------------------------------------------------------------


def test_the_log_probability_is_that_of_the_squashed_variable():
    """For one action its density, summed over a fine grid, is 1; and torch's transformed
    distribution agrees."""
    a = np.linspace(-0.9999, 0.9999, 20001)
    mean, log_std = np.float32(0.3), np.float32(-0.5)
    noise = ((np.arctanh(a) - mean) / np.exp(log_std))[:, None].astype(np.float32)
    action, log_prob = squash(np.full_like(noise, mean), np.full_like(noise, log_std), noise)
    np.testing.assert_allclose(action[:, 0], a, atol=1e-5)
    assert abs(np.trapezoid(np.exp(log_prob), a) - 1) < 2e-3
    base = torch.distributions.Normal(torch.tensor(float(mean)), torch.tensor(float(np.exp(log_std))))
    squashed = torch.distributions.TransformedDistribution(
        base, [torch.distributions.transforms.TanhTransform()]
    )
    np.testing.assert_allclose(
        log_prob[5000:15000:100],
        squashed.log_prob(torch.tensor(a[5000:15000:100])).numpy(),
        rtol=1e-3,
        atol=1e-3,
    )


def test_the_log_probability_is_finite_at_the_bounds():
    action, log_prob = squash(
        np.full((1, 2), 40, np.float32), np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
    )
    assert (action == 1).all()
    # 1 - tanh² u ≈ 4 e^-2u
    np.testing.assert_allclose(log_prob, 2 * (-0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 40)), rtol=1e-5)


def test_soft_values_are_those_of_the_lesser_critic_less_the_temperature_times_log_pi():
    told = np.array([[1, 5], [2, 3]], np.float32)
    np.testing.assert_allclose(soft_values(told, np.array([-2, 1], np.float32), 0.5), [2, 2.5])


def test_the_actors_derivatives_are_autograds():
    rng = np.random.default_rng(0)
    mean, log_std, noise, of_action = rng.standard_normal((4, 5, 2))
    m, s = (torch.tensor(part, requires_grad=True) for part in (mean, log_std))
    u = m + s.exp() * torch.tensor(noise)
    a = u.tanh()
    log_prob = -0.5 * torch.tensor(noise) ** 2 - s - (1 - a * a).log()
    (0.7 * log_prob - torch.tensor(of_action) * a).sum().backward()
    found = differentiate_actor(np.tanh(u.detach().numpy()), np.exp(log_std) * noise, of_action, 0.7)
    np.testing.assert_allclose(found[0], m.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found[1], s.grad.numpy(), rtol=1e-5)


# ---- networks --------------------------------------------------------------------------


def test_critics_have_layers_of_their_own():
    net = SquashedGaussian(hidden=(8,), critic_hidden=(9, 3), activation="elu")
    learner = SAC().build(net.build(SPACES, 0), 0)
    assert (learner.critics.shape.hidden, learner.critics.shape.activation) == ((9, 3), "elu")
    assert learner.policy.shape.hidden == (8,)


@pytest.mark.parametrize("hidden", [(), (7,), (7, 5)])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_an_mlps_gradients_are_autograds(towers, hidden, activation, layer_norm):
    rng = np.random.default_rng(0)
    shape = MLPShape(towers, 4, hidden, 3, activation=activation, layer_norm=layer_norm)
    flat = (
        shape.begin(rng)
        + rng.standard_normal(sum(int(np.prod(form)) for form in shape.forms().values())).astype(np.float32)
        * 0.3
    )
    network = MLP(shape, flat)
    inputs = rng.standard_normal((11, 4)).astype(np.float32)
    factors = rng.standard_normal((towers, 11, 3)).astype(np.float32)
    x = torch.tensor(inputs, requires_grad=True)
    parts = {n: torch.tensor(part, requires_grad=True) for n, part in views(flat, shape.forms()).items()}
    h = hidden_layers(x.expand(towers, 11, 4), parts, activation)
    h = h @ parts["head.weight"] + parts["head.bias"]
    (h * torch.tensor(factors)).sum().backward()
    np.testing.assert_allclose(network.forward(inputs), h.detach().numpy(), atol=1e-5)
    gradient = np.full_like(flat, np.nan)
    of_inputs = network.backward(factors, gradient, True)
    told = np.concatenate([part.grad.numpy().ravel() for part in parts.values()])
    np.testing.assert_allclose(gradient, told, atol=1e-4)
    np.testing.assert_allclose(of_inputs, x.grad.numpy(), atol=1e-4)
    network.forward(inputs)
    np.testing.assert_allclose(network.backward(factors, None, True), of_inputs, atol=1e-6)


def test_actions_are_within_their_bounds_and_the_mode_is_tanh_of_the_mean():
    config = SquashedGaussian(hidden=(8,))
    policy = config.build(SPACES, 0)
    seen = {"obs": np.random.default_rng(0).standard_normal((4000, 3)).astype(np.float32)}
    out = allocate(config.answer(SPACES), (4000,))
    policy.act(seen, {}, False, out)
    low, high = CENTRE - HALF, CENTRE + HALF
    assert ((out["action"] >= low) & (out["action"] <= high)).all()
    assert (out["action"].min(0) < low + 0.1 * HALF).all() and (
        out["action"].max(0) > high - 0.1 * HALF
    ).all()
    u = np.arctanh(np.clip(policy.unscaled(out["action"]), -0.999, 0.999))
    # the first actor is about standard normal
    assert np.abs(u.mean(0)).max() < 0.1 and np.abs(u.std(0) - 1).max() < 0.1
    again = allocate(config.answer(SPACES), (4000,))
    some = np.arange(4000) % 2 == 0
    policy.act(seen, {}, some, again)
    mean = policy._acting.forward(seen["obs"])[0][:, :2]
    np.testing.assert_allclose(again["action"][some], (np.tanh(mean) * HALF + CENTRE)[some], atol=1e-5)
    assert np.abs(again["action"] - (np.tanh(mean) * HALF + CENTRE))[~some].mean() > 0.1


# ---- the update ------------------------------------------------------------------------


def test_a_step_is_that_of_torchs_adam_down_the_papers_losses():
    config = SAC(
        gamma=0.9,
        learning_rate=0.01,
        critic_learning_rate=0.02,
        target_rate=0.1,
        temperature=0.5,
        target_entropy=-1.5,
    )
    learner = learner_of(config)
    rng = np.random.default_rng(3)
    learner.targets.flat += rng.standard_normal(learner.targets.flat.size).astype(np.float32) * 0.1
    learner.policy.flat[-2] += 2  # the bias of a log-deviation, so that some are cut at 2
    sample = sample_of()
    b = {name: torch.tensor(array[0]) for name, array in sample.items()}
    draws = np.random.default_rng()
    draws.bit_generator.state = learner._rng.bit_generator.state
    noise = [torch.tensor(draws.standard_normal((BATCH, 2), np.float32)) for _ in range(2)]
    share = b["weight"] / BATCH

    cut = []

    def network(shape, flat, x):
        start, forms = 0, list(shape.forms().values())
        h = x.expand(shape.towers, *x.shape)
        for i in range(0, len(forms), 2):
            weight, bias = (int(np.prod(form)) for form in forms[i : i + 2])
            h = h @ flat[start : start + weight].reshape(forms[i]) + flat[
                start + weight : start + weight + bias
            ].reshape(forms[i + 1])
            start += weight + bias
            h = h.relu() if i < len(forms) - 2 else h
        return h

    def act(flat, x, noise):
        mean, raw = network(learner.policy.shape, flat, x)[0].chunk(2, 1)
        cut.append(raw > 2)
        normal = torch.distributions.Normal(mean, raw.clamp(-20, 2).exp())
        u = mean + raw.clamp(-20, 2).exp() * noise
        # log(1 - tanh² u)
        return u.tanh(), (normal.log_prob(u) - 2 * (np.log(2) - u - functional.softplus(-2 * u))).sum(1)

    actor = torch.tensor(learner.policy.flat.copy(), requires_grad=True)
    critics = torch.tensor(learner.critics.flat.copy(), requires_grad=True)
    targets = torch.tensor(learner.targets.flat.copy())
    log_alpha = torch.tensor(np.log(0.5), dtype=torch.float32, requires_grad=True)
    adams = [
        torch.optim.Adam([leaf], lr=rate)
        for leaf, rate in ((critics, 0.02), (actor, 0.01), (log_alpha, 0.01))
    ]
    shape = learner.critics.shape
    with torch.no_grad():
        action, log_prob = act(actor, b["next.obs"], noise[0])
        least = network(shape, targets, torch.cat([b["next.obs"], action], 1))[..., 0].min(0).values
        goal = b["rewards"][:, 0] + 0.9 * ~b["done"] * (least - 0.5 * log_prob)
    taken = (b["action"] - torch.tensor(CENTRE)) / torch.tensor(HALF)
    found = network(shape, critics, torch.cat([b["obs"], taken], 1))[..., 0]
    of_critics = (0.5 * (found - goal) ** 2 * share).sum()
    of_critics.backward()
    adams[0].step()
    action, log_prob = act(actor, b["obs"], noise[1])
    least = network(shape, critics.detach(), torch.cat([b["obs"], action], 1))[..., 0].min(0).values
    of_policy = ((0.5 * log_prob - least) * share).sum()
    of_policy.backward()
    (-log_alpha.exp() * (log_prob.detach() - 1.5) * share).sum().backward()
    adams[1].step()
    adams[2].step()
    targets += 0.1 * (critics.detach() - targets)
    metrics = learner.update([sample], 0.0)
    assert cut[1].any() and not cut[1].all()
    assert metrics["loss/value"] == pytest.approx(of_critics.item(), rel=1e-3) and metrics[
        "loss/policy"
    ] == pytest.approx(of_policy.item(), rel=1e-3)
    assert metrics["entropy"] == pytest.approx(-log_prob.mean().item(), rel=1e-3) and metrics[
        "q/mean"
    ] == pytest.approx(found.mean().item(), rel=1e-3)
    np.testing.assert_allclose(learner.critics.flat, critics.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(learner.policy.flat, actor.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(learner.targets.flat, targets.numpy(), atol=1e-4)
    np.testing.assert_allclose(learner.log_temperature[0], log_alpha.item(), atol=1e-5)
    np.testing.assert_allclose(
        sample["priority"][0], (found - goal).abs().mean(0).detach().numpy(), rtol=1e-3, atol=1e-4
    )


def test_a_temperature_that_is_not_learnt_stays():
    learner = learner_of(SAC(learn_temperature=False, temperature=0.2))
    for i in range(3):
        assert learner.update([sample_of(i)], 0.0)["temperature"] == 0.2


def test_a_temperature_that_was_fixed_is_where_learning_it_begins():
    fixed = learner_of(SAC(learn_temperature=False, temperature=0.2))
    fixed.update([sample_of()], 0.0)
    learnt = learner_of(SAC())
    learnt.load_state(fixed.state())
    assert learnt.temperature == pytest.approx(0.2)


def test_a_temperature_may_follow_a_schedule_where_it_is_not_learnt():
    config = SAC(learn_temperature=False, temperature=LinearSchedule(0.4, 0.1, to_step=300))
    learner = learner_of(config)
    told = []
    for steps in (0, 100, 300, 900):
        learner.config = config.at(steps, 0.0)
        told.append(learner.update([sample_of()], 0.0)["temperature"])
    assert told == pytest.approx([0.4, 0.3, 0.1, 0.1])


def test_a_restored_learner_goes_on_exactly():
    check_restored(learner_of(), learner_of(seed=5), sample_of)


def test_a_step_that_would_spoil_the_weights_is_left_out():
    learner = learner_of()
    before = learner.critics.flat.copy()
    with pytest.raises(RunError, match="left out a step"):
        learner.update([sample_of(rewards=np.full((BATCH, 1), np.inf, np.float32))], 0.0)
    np.testing.assert_array_equal(learner.critics.flat, before)


def test_it_tells_what_it_said_it_measures():
    assert set(learner_of().update([sample_of()], 0.0)) == set(SAC().measures())


REFUSED = {
    "target_rate = 0 is not between": lambda: SAC(target_rate=0),
    "set learn_temperature to False, or": lambda: SAC(temperature=LinearSchedule(1, 0.5)),
    "take a SquashedGaussian": lambda: SAC().build(
        QNetwork().build(Spaces(Box((3,), "float32"), Discrete(2)), 0), 0
    ),
    "needs bounds on both sides": lambda: SquashedGaussian().build(
        Spaces(Box((3,), "float32"), Box((3,), "float32")), 0
    ),
    "or QNetwork with DQN for Discrete": lambda: SquashedGaussian().build(
        Spaces(Box((3,), "float32"), Discrete(3)), 0
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


@pytest.mark.parametrize("settings", [{}, {"sde_steps": 4, "log_std_init": -2.0}])
def test_it_learns_where_the_reward_is_and_keeps_the_entropy_that_is_wanted(settings):
    """One step, paid 1 - 10 (a - obs)², a in [-1, 1] as the policy sees it."""
    space = Spaces(Box((1,), "float32"), Box((1,), "float32", (-1.0,), (1.0,)))
    net = SquashedGaussian(hidden=(32, 32), **settings)
    policy, state = net.build(space, 0), allocate(net.state(space), (64,))
    learner = SAC(learning_rate=3e-3, target_entropy=-1.0).build(policy, 0)
    rng, out = np.random.default_rng(0), allocate({**net.answer(space), **net.state(space)}, (64,))
    for _ in range(900):
        obs = rng.uniform(-0.6, 0.6, (64, 1)).astype(np.float32)
        policy.act({"obs": obs}, state, False, out)
        rewards = (1 - 10 * (out["action"] - obs) ** 2).astype(np.float32)
        fields = {
            "obs": obs,
            "next.obs": obs,
            "action": out["action"].copy(),
            "rewards": rewards,
            "steps": np.ones(64, np.int32),
        }
        fields |= {
            "done": np.ones(64, bool),
            "weight": np.ones(64, np.float32),
            "version": np.zeros(64, np.int64),
        }
        metrics = learner.update([Sample({name: array[np.newaxis] for name, array in fields.items()})], 0.0)
    policy.act({"obs": obs}, state, True, out)
    assert np.abs(out["action"] - obs).mean() < 0.1
    assert abs(metrics["entropy"] + 1.0) < 0.3


def test_actions_never_leave_their_bounds_also_where_tanh_is_one():
    rng = np.random.default_rng(0)
    for low, high in np.sort(rng.uniform(-3, 3, (200, 2)).astype(np.float32)).tolist():
        made = SquashedGaussian(hidden=(2,)).build(
            Spaces(Box((1,), "float32"), Box((1,), "float32", (low,), (high,))), 0
        )
        for sign in (-1, 1):
            made.parameters()["head.bias"][..., 0] = sign * 100
            out = {"action": np.zeros((1, 1), np.float32), "log_prob": np.zeros(1, np.float32)}
            made.act({"obs": np.zeros((1, 1), np.float32)}, {}, True, out)
            assert low <= out["action"][0, 0] <= high
