"""PPO: its settings, its gradient, its masks, its state, and that it learns."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.algorithms.losses import clipped_surrogate, clipped_value_loss, explained_variance, value_loss

from tidemill.algorithms.minibatches import Rows, gae_of, gather
from tidemill.algorithms.policy_gradient_formulas import adapted_rate
from tidemill.algorithms.policy_gradient_loss import Minibatches
from tidemill.algorithms.ppo import PPO, PPOLearner
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, RunError, SchemaError
from tidemill.core.schema import allocate, poison
from tidemill.nets.actor_critic import ActorCritic

SPACES = Spaces(Box((3,), "float32"), Discrete(3))
NET = ActorCritic(hidden=(8, 8))


def make_sample(policy, spaces=SPACES, T=9, N=4, seed=0, reward=None):
    """Rows as an actor writes them, in memory poisoned first: random episode ends,
    answers by `policy`."""
    rng = np.random.default_rng(seed)
    answer = NET.answer(spaces)
    sample = Sample(allocate({**ROW_FIELDS, **schema_of_space(spaces.observation, "obs"), **answer}, (T, N)))
    poison(sample)
    sample["obs"][...] = rng.standard_normal(sample["obs"].shape)
    done = rng.random((T, N)) < 0.15
    truncated = ~done & (rng.random((T, N)) < 0.15)
    sample["done"][...], sample["truncated"][...] = done, truncated
    sample["version"][...] = np.where(done, -1, 5)
    for t in range(T):
        answers = allocate(answer, (N,))
        policy.act({"obs": sample["obs"][t]}, {}, False, answers)
        for name, array in answers.items():
            sample[name][t][~done[t]] = array[~done[t]]
    sample["reward"][...] = np.where(
        done | truncated, 0, rng.standard_normal((T, N)) if reward is None else reward(sample["action"])
    )
    sample["reward"][-1] = np.nan  # committed before it came
    return sample


def learner_of(seed=0, net=NET, **settings):
    learner = PPO(**{"minibatch_size": 8, "learning_rate": 1e-2, **settings}).build(
        net.build(SPACES, 0), seed
    )
    assert isinstance(learner, PPOLearner)
    return learner


def weights(learner):
    return {name: array.copy() for name, array in learner.policy.parameters().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gamma", 1.5),
        ("gae_lambda", -0.1),
        ("clip", 0.0),
        ("epochs", 0),
        ("minibatch_size", 0),
        ("learning_rate", -1.0),
        ("adam_epsilon", -1.0),
        ("adam_epsilon", 0.0),
        ("adam_epsilon", float("nan")),
        ("target_kl", float("nan")),
    ],
)
def test_an_impossible_setting_is_refused_by_name_and_value(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} = {value}.*usual"):
        PPO(**{setting: value})


def test_the_configuration_survives_encoding():
    config = PPO(target_kl=0.02, learning_rate=LinearSchedule(1e-3, 0))
    assert decode(PPO, encode(config)) == config


def test_configurations_import_no_torch():
    code = (
        "import sys\nfrom tidemill.algorithms.ppo import PPO\nfrom tidemill.nets.actor_critic import "
        "ActorCritic\n"
        "from tidemill.api.spaces import *\nPPO(); p = ActorCritic().build(Spaces(Box((3,), 'float32'), "
        "Discrete(2)), 0)\n"
        "import numpy as np\nout = {'action': np.zeros(1, int), 'value': np.zeros(1), 'log_prob': "
        "np.zeros(1)}\n"
        "p.act({'obs': np.zeros((1, 3), np.float32)}, {}, False, out)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_training_an_mlp_imports_no_torch():
    code = (
        "import sys\nimport numpy as np\nfrom tidemill import PPO, ActorCritic\nfrom tidemill.api.algorithm "
        "import ROW_FIELDS, Sample\n"
        "from tidemill.api.spaces import *\nfrom tidemill.core.schema import Field, allocate\n"
        "config, spaces = ActorCritic(normalise_observations=True), Spaces(Box((3,), 'float32'), "
        "Discrete(2))\n"
        "fields = {**ROW_FIELDS, 'obs': Field((3,), 'float32'), **config.answer(spaces)}\nsample = "
        "Sample(allocate(fields, (9, 4)))\n"
        "learner = PPO(entropy_coefficient=0.01, correct_off_policy=True).build(config.build(spaces, 0), 0)\n"
        "assert learner.update([sample], 0.0)['rows'] == 32\nlearner.load_state(learner.state())\nassert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_policy_that_cannot_be_trained_is_refused():
    class Fixed(Policy):
        act = parameters = load = None

    Fixed.__abstractmethods__ = frozenset()
    with pytest.raises(ConfigError, match="Fixed"):
        PPO().build(Fixed(), 0)


def test_only_rows_with_an_action_and_a_successor_are_gathered_and_none_is_poisoned():
    learner = learner_of()
    sample = make_sample(learner.policy)
    sample.burn_in = 2
    batch = gather([sample, sample], gae_of(0.99, 0.95))
    acted = ~(sample["done"] | sample["truncated"])[2:-1]
    assert len(batch) == 2 * acted.sum()
    np.testing.assert_array_equal(batch.observation["obs"][: len(batch) // 2], sample["obs"][2:-1][acted])
    for array in (batch.log_prob, batch.value, batch.advantage, batch.target):
        assert np.isfinite(array).all()


def test_what_is_gathered_does_not_view_the_samples():
    learner = learner_of()
    sample = make_sample(learner.policy)
    batch = gather([sample], gae_of(0.99, 0.95))
    for array in (
        *batch.observation.values(),
        *batch.action.values(),
        batch.log_prob,
        batch.value,
        batch.advantage,
        batch.target,
    ):
        assert not any(np.shares_memory(array, field) for field in sample.values())


def test_masked_cells_change_nothing():
    check_masked(learner_of(), learner_of())


def check_masked(*learners):
    """What cannot count differs between the samples of two equal learners, and they learn
    the same."""
    samples = [make_sample(learner.policy, seed=3) for learner in learners]
    final = samples[0]["done"]
    for name in ("value", "log_prob", "obs"):
        samples[1][name][final] = 1e6
    samples[1]["reward"][-1] = 77
    metrics = [learner.update([sample], 0.0) for learner, sample in zip(learners, samples, strict=True)]
    assert metrics[0] == metrics[1]
    assert_equal(weights(learners[0]), weights(learners[1]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_gradient_is_that_of_a_plain_torch_network(shared, activation):
    net = ActorCritic(hidden=(8, 6), shared_critic=shared, activation=activation)
    learner = learner_of(net=net, entropy_coefficient=0.01)
    policy = learner.policy
    rng = np.random.default_rng(1)
    for weight in policy.network.weights.values():
        weight += rng.standard_normal(weight.shape).astype(np.float32) * 0.3
    n = 16
    torch.manual_seed(1)
    x, action = torch.randn(n, 3), torch.randint(0, 3, (n,))
    old, advantage, target = -torch.rand(n) - 0.5, torch.randn(n), torch.randn(n)
    scalars = torch.stack([old, advantage, target, target]).numpy()
    source = Rows(learner.loss.library, policy, {"obs": x.numpy()}, n)
    columns = [{"action": action.numpy()}, {"scalars": scalars}]
    learner.loss.differentiate(Minibatches(source, columns, 1 / n), np.arange(n))
    of_policy, of_value, entropy, *_, share = learner.loss.parts.tolist()
    assert share == 1

    w = {name: torch.tensor(array, requires_grad=True) for name, array in policy.network.weights.items()}
    function = getattr(torch, activation)

    def tower(g):
        h = x
        for i in range(2):
            h = function(h @ w[f"hidden.{i}.weight"][g] + w[f"hidden.{i}.bias"][g])
        return h

    logits = tower(0) @ w["actor.weight"].T + w["actor.bias"].T
    value = tower(policy.network.shape.towers - 1) @ w["critic.weight"] + w["critic.bias"]
    p = torch.softmax(logits, -1)
    ratio = p[torch.arange(n), action] / old.exp()
    surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage).mean()
    naive = -surrogate + 0.5 * (0.5 * (value - target) ** 2).mean() + 0.01 * (p * p.log()).sum(-1).mean()
    naive.backward()
    assert of_policy + 0.5 * of_value - 0.01 * entropy == pytest.approx(naive.item(), rel=1e-5, abs=1e-6)
    expected = torch.cat([w[name].grad.reshape(-1) if w[name].numel() else torch.zeros(0) for name in w])
    np.testing.assert_allclose(learner.loss.gradient, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("normalise", "limit", "deviation", "clip_value", "apart"),
    [
        (False, None, None, None, False),
        (True, None, None, None, True),
        (False, 0.05, None, None, False),
        (False, 0.05, None, None, True),
        (True, 0.05, None, 0.1, False),
        (True, None, 4, None, False),
        (True, None, 4, 0.1, False),
    ],
)
def test_an_update_is_that_of_a_plain_torch_network(normalise, limit, deviation, clip_value, apart):
    """With a `deviation` of the returns so far, values are learnt in units of it: targets
    and the values before are divided by it."""
    settings = {
        "normalise_returns": deviation is not None,
        "normalise_advantages": normalise,
        "max_gradient_norm": limit,
        "clip_value": clip_value,
        "clip_apart": apart,
    }
    learner = learner_of(minibatch_size=10**6, epochs=3, entropy_coefficient=0.01, **settings)
    policy, scale = learner.policy, deviation or 1
    policy.network.weights["critic.weight"] *= 30  # so that values leave what they are clipped to
    policy.fold_moments(
        policy.moments({}, None if deviation is None else np.array([-scale, scale], np.float32))
    )
    assert policy.value_scale == scale
    sample = make_sample(policy, T=33, N=8)
    batch = gather([sample], gae_of(0.99, 0.95))
    w = {
        name: torch.tensor(array, requires_grad=True)
        for name, array in policy.network.weights.items()
        if array.size
    }
    adam = torch.optim.Adam(w.values(), lr=1e-2, eps=1e-5)
    x, action = torch.from_numpy(batch.observation["obs"]), torch.from_numpy(batch.action["action"])
    target, old = torch.from_numpy(batch.target / scale), torch.from_numpy(batch.value / scale)
    advantage = torch.from_numpy(batch.advantage)
    if normalise:
        advantage = (advantage - advantage.mean()) / advantage.std(correction=0)

    def tower(g):
        h = x
        for i in range(2):
            h = torch.tanh(h @ w[f"hidden.{i}.weight"][g] + w[f"hidden.{i}.bias"][g])
        return h

    for _ in range(3):
        logs = torch.log_softmax(tower(0) @ w["actor.weight"].T + w["actor.bias"].T, -1)
        value = tower(1) @ w["critic.weight"] + w["critic.bias"]
        log_ratio = logs[torch.arange(len(x)), action] - torch.from_numpy(batch.log_prob)
        of_value = (
            value_loss(value, target)
            if clip_value is None
            else clipped_value_loss(value, old, target, clip_value)
        )
        loss = (
            clipped_surrogate(log_ratio, advantage, 0.2)
            + 0.5 * of_value
            + 0.01 * (logs.exp() * logs).sum(-1).mean()
        )
        adam.zero_grad()
        loss.backward()
        both = [[w[name].grad for name in w if name.startswith(head)] for head in ("actor.", "critic.")]
        for g, parts in enumerate(both):
            parts += [w[name].grad[g] for name in w if name.startswith("hidden.")]
        for parts in both if apart else [[*both[0], *both[1]]]:
            norm = torch.cat([part.ravel() for part in parts]).norm()
            assert limit is None or norm > limit
            for part in parts if limit is not None else ():
                part *= limit / norm
        adam.step()
    assert clip_value is None or ((value - old).abs() > clip_value).any()
    assert learner.update([sample], 0.0)["minibatches"] == 3
    assert (policy.value_scale != scale) is (deviation is not None)
    for name, tensor in w.items():
        # the head follows the deviation afterwards
        rescaled = policy.value_scale / scale if name.startswith("critic") else 1
        np.testing.assert_allclose(
            policy.network.weights[name] * rescaled, tensor.detach(), rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_two_runs_of_updates_are_byte_equal():
    results = []
    for _ in range(2):
        learner = learner_of(seed=4)
        metrics = [learner.update([make_sample(learner.policy, seed=i)], i / 3) for i in range(3)]
        results.append((metrics, weights(learner)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def test_a_resumed_learner_goes_on_exactly():
    net = ActorCritic(hidden=(8,), normalise_observations=True)
    whole, first = learner_of(net=net), learner_of(net=net)
    samples = [make_sample(whole.policy, seed=i) for i in range(4)]
    for sample in samples:
        whole.update([sample], 0.0)
    for sample in samples[:2]:
        first.update([sample], 0.0)
    second = learner_of(seed=99, net=net)
    second.policy.load({k: v.copy() for k, v in first.policy.parameters().items()}, 2)
    second.load_state(first.state())
    for sample in samples[2:]:
        second.update([sample], 0.0)
    assert_equal(weights(whole), weights(second))
    assert_equal(whole.state(), second.state())


def test_the_state_is_a_copy_and_another_network_s_is_refused():
    learner = learner_of()
    state = learner.state()
    learner.update([make_sample(learner.policy)], 0.0)
    assert state["adam.0.step"] == 0
    with pytest.raises(SchemaError, match=r"adam\.0\.exp_avg"):
        learner_of(net=ActorCritic(hidden=(4,))).load_state(state)


def test_a_learning_rate_that_has_fallen_to_zero_changes_nothing():
    learner = learner_of()
    sample = make_sample(learner.policy)
    falling = learner.config.replace(learning_rate=LinearSchedule(0.01, 0))
    learner.config = falling.at(0, 0.25)
    assert learner.update([sample], 0)["learning_rate"] == pytest.approx(0.0075)
    before = learner.policy.network.flat.copy()
    learner.config = falling.at(0, 1.0)
    assert learner.update([sample], 0)["learning_rate"] == 0
    # only the critic's head moves: rescaled with the returns' deviation
    ratio = learner.policy.network.flat / np.where(before == 0, 1, before)
    unchanged = np.ones(len(before), bool)
    unchanged[-len(learner.policy.network.weights["critic.weight"]) - 1 :] = False
    assert np.isin(ratio[unchanged], [0, 1]).all()


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (3e-4, 0.021, 2e-4),
        (3e-4, 0.0049, 4.5e-4),
        (3e-4, 0.02, 3e-4),
        (3e-4, 0.005, 3e-4),
        (3e-4, 0.0, 3e-4),
        (1.2e-5, 1.0, 1e-5),
        (9e-3, 0.001, 1e-2),
        (5e-2, 0.001, 5e-2),  # beyond the bounds it does not go on, and is not moved back
        (1e-6, 1.0, 1e-6),
    ],
)
def test_the_adapted_rate_is_that_of_the_paper_s_code(rate, kl, expected):
    assert adapted_rate(rate, kl, 0.01) == pytest.approx(expected)


def test_the_rate_follows_how_far_updates_go_and_is_saved():
    sample, rates = make_sample(learner_of().policy), []
    learner = learner_of(desired_kl=1e-9, learning_rate=1e-2)
    for _ in range(3):
        rates.append(learner.update([sample], 0)["learning_rate"])
    assert rates == pytest.approx([1e-2, 1e-2 / 1.5, 1e-2 / 1.5**2])
    other = learner_of(desired_kl=1e-9, learning_rate=1e-2)
    other.load_state(learner.state())
    assert other.update([sample], 0)["learning_rate"] == pytest.approx(1e-2 / 1.5**3)
    other.load_state({name: array for name, array in learner.state().items() if name != "rate"})
    # another rate is begun from
    learner.config = learner.config.replace(learning_rate=5e-3)
    assert learner.update([sample], 0)["learning_rate"] == 5e-3
    # of one minibatch, the divergence is that before its step
    learner = learner_of(desired_kl=0.01, minibatch_size=10**6, epochs=1)
    assert [learner.update([sample], 0)["learning_rate"] for _ in range(3)] == [0.01] * 3
    with pytest.raises(ConfigError, match=r"target_kl = 0\.004 ends updates before they go half as far"):
        PPO(desired_kl=0.01, target_kl=0.004)
    with pytest.raises(ConfigError, match=r"desired_kl = 0\.01 adapts the learning rate, which is to follow"):
        PPO(desired_kl=0.01, learning_rate=LinearSchedule(1e-3, 0))


def test_target_kl_stops_an_update_before_the_first_minibatch_whose_divergence_is_above_it():
    settings = {"minibatch_size": 10**6, "epochs": 2, "learning_rate": 0.1}
    kl = (found := learner_of(**settings).update([make_sample(learner_of().policy)], 0.0))["kl"]
    assert found["minibatches"] == 2 and kl > 0
    for target, minibatches in ((1.01 * kl, 2), (0.99 * kl, 1)):
        assert (
            learner_of(target_kl=target, **settings).update([make_sample(learner_of().policy)], 0.0)[
                "minibatches"
            ]
            == minibatches
        )


def test_target_kl_stops_an_update_early():
    learner = learner_of(target_kl=1e-4, epochs=50, learning_rate=0.1)
    metrics = learner.update([make_sample(learner.policy)], 0.0)
    assert 1 <= metrics["minibatches"] < 10


def test_metrics_have_their_names():
    learner = learner_of()
    metrics = learner.update([make_sample(learner.policy)], 0.0)
    assert metrics.keys() == {
        "loss/policy", "loss/value", "entropy", "kl", "clip_fraction", "explained_variance", "gradient_norm",
        "learning_rate", "rows", "minibatches",
    }  # fmt: skip
    assert 0 < metrics["entropy"] <= np.log(3) + 1e-6
    batch = gather([make_sample(learner_of().policy)], gae_of(0.99, 0.95))
    assert metrics["explained_variance"] == pytest.approx(
        explained_variance(batch.value, batch.target), abs=1e-6
    )


def test_a_batch_without_a_trainable_row_changes_nothing():
    learner = learner_of()
    sample = make_sample(learner.policy)
    sample["version"][...] = -1
    before = weights(learner)
    assert learner.update([sample], 0.0)["rows"] == 0
    assert_equal(before, weights(learner))


@pytest.mark.parametrize(
    ("field", "name"),
    [("reward", "advantages or targets"), ("obs", "loss/policy is nan"), ("log_prob", "loss/policy is nan")],
)
def test_what_is_not_finite_is_named_before_the_weights_are_spoilt(field, name):
    learner = learner_of()
    sample = make_sample(learner.policy)
    row = tuple(np.argwhere(sample["version"][:-1] >= 0)[0])
    while sample["truncated"][row]:
        row = (row[0] + 1, row[1])
    sample[field][row] = np.inf if field == "reward" else np.nan
    with np.errstate(invalid="ignore"), pytest.raises(RunError, match=name):
        learner.update([sample], 0.0)
    assert np.isfinite(learner.policy.network.flat).all()


def test_observations_and_returns_are_folded_in_once_after_the_last_epoch():
    net = ActorCritic(hidden=(8,), normalise_observations=True)
    learner = learner_of(net=net)
    sample = make_sample(learner.policy)
    batch = gather([sample], gae_of(0.99, 0.95))
    learner.update([sample], 0.0)
    parameters = learner.policy.parameters()
    assert parameters["observation.count"] == parameters["returns.count"] == len(batch)
    np.testing.assert_allclose(parameters["observation.mean"], batch.observation["obs"].mean(0), atol=1e-6)
    np.testing.assert_allclose(parameters["observation.variance"], batch.observation["obs"].var(0), rtol=1e-5)
    np.testing.assert_allclose(parameters["returns.variance"], batch.target.var(), rtol=1e-5)
    off = learner_of(net=net, normalise_returns=False)
    off.update([sample], 0.0)
    assert off.policy.parameters()["returns.count"] == 0


def test_off_policy_correction_changes_nothing_on_policy_and_something_off_it():
    plain, corrected = learner_of(), learner_of(correct_off_policy=True)
    sample = make_sample(plain.policy)
    plain.update([sample], 0.0)
    corrected.update([sample], 0.0)
    np.testing.assert_allclose(plain.policy.network.flat, corrected.policy.network.flat, atol=1e-5)
    plain.update([sample], 0.0)
    corrected.update([sample], 0.0)
    assert np.abs(plain.policy.network.flat - corrected.policy.network.flat).max() > 1e-4


def test_ratios_are_computed_once_per_batch_before_the_first_step():
    learner = learner_of(correct_off_policy=True, epochs=3)
    sample = make_sample(learner.policy)
    before, found, steps = learner.policy.network.flat.copy(), [], []
    evaluate, step = learner._evaluate, learner.loss.descend

    def look(sample, rows):
        assert not steps
        np.testing.assert_array_equal(learner.policy.network.flat, before)
        assert not (sample["done"] | sample["truncated"]).reshape(-1)[rows].any()
        found.append(len(rows))
        return evaluate(sample, rows)

    learner._evaluate = look
    learner.loss.epoch = lambda *args: None  # minibatch by minibatch, by whatever computes
    learner.loss.descend = lambda *args: steps.append(1) or step(*args)
    learner.update([sample, sample], 0.0)
    assert len(found) == 2 and len(steps) >= 6


@pytest.mark.parametrize("correct_off_policy", [False, True])
def test_the_clip_is_around_the_behaviour_whatever_the_policy_at_the_start_of_the_update(correct_off_policy):
    # The behaviour took every action with probability 1/9 at most of what the policy does
    # now: ratios are far above 1 + ε already, so that rows with a positive advantage have
    # no gradient. Around the policy at the start of the update, ratios would be 1 and all
    # rows would have one.
    learner = learner_of(
        correct_off_policy=correct_off_policy,
        value_coefficient=0.0,
        normalise_advantages=False,
        epochs=1,
        minibatch_size=10**6,
    )
    sample = make_sample(learner.policy, reward=lambda action: 1000.0)
    sample["log_prob"] -= np.float32(np.log(9))
    before = learner.policy.network.flat.copy()
    metrics = learner.update([sample], 0.0)
    assert metrics["clip_fraction"] == 1 and metrics["kl"] == pytest.approx(9 - 1 - np.log(9), rel=1e-4)
    assert metrics["gradient_norm"] == 0
    # folding the returns in rescales the critic's head, which comes last
    unchanged = len(learner.policy.network.weights["critic.weight"]) + 1
    np.testing.assert_array_equal(learner.policy.network.flat[:-unchanged], before[:-unchanged])


def test_it_learns_which_action_pays():
    # One step pays 1 for action 2 and nothing else; γ = 0 makes it a bandit.
    learner = learner_of(gamma=0.0, minibatch_size=64, learning_rate=3e-3)
    share = []
    for i in range(15):
        sample = make_sample(learner.policy, T=33, N=8, seed=i, reward=lambda action: action == 2)
        acted = sample["version"] >= 0
        share.append((sample["action"][acted] == 2).mean())
        learner.update([sample], 0.0)
    assert share[0] < 0.5
    assert share[-1] > 0.9


def test_the_trained_rows_leave_out_burn_in_overlap_final_rows_and_fillers():
    sample = make_sample(learner_of().policy, T=8, N=1)
    sample["version"][:, 0] = [-1, 3, 3, 3, -1, 3, 3, 3]
    sample["done"][:, 0] = np.arange(8) == 4
    sample["truncated"][:, 0] = np.arange(8) == 5
    sample["obs"][:, 0] = np.arange(8)[:, None]
    sample["value"][...] = sample["reward"][...] = 0
    sample.burn_in = 2
    np.testing.assert_array_equal(gather([sample], gae_of(0.99, 0.95)).observation["obs"][:, 0], [2, 3, 6])
