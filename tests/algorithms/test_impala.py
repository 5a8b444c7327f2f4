"""IMPALA: its settings, its gradient against the paper's sums written out, and that it
learns from what older weights gathered."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.algorithms.test_ppo import NET, SPACES, assert_equal, check_masked, make_sample, weights

from tidemill.algorithms.impala import Impala, ImpalaLearner
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, RunError
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy


def learner_of(seed=0, net=NET, **settings):
    learner = Impala(**{"minibatch_size": 8, "learning_rate": 1e-2, **settings}).build(
        net.build(SPACES, 0), seed
    )
    assert isinstance(learner, ImpalaLearner)
    return learner


def other_weights(policy, seed):
    """The weights of a version that has gone on."""
    rng = np.random.default_rng(seed)
    for weight in policy.network.weights.values():
        weight += rng.standard_normal(weight.shape).astype(np.float32) * 0.3


def test_impossible_settings_are_refused_by_name_and_value():
    for setting, value in (
        ("gamma", 1.5),
        ("trace_lambda", -0.1),
        ("rho_clip", 0.0),
        ("learning_rate", -1.0),
    ):
        with pytest.raises(ConfigError, match=f"{setting} = {value}.*usual"):
            Impala(**{setting: value})
    with pytest.raises(ConfigError, match=r"c_clip = 1\.5 is above rho_clip = 1\.0"):
        Impala(c_clip=1.5)
    config = Impala(rho_clip=2.0, c_clip=1.5, minibatch_size=512)
    assert decode(Impala, encode(config)) == config


def test_training_an_mlp_imports_no_torch():
    code = (
        "import sys\nfrom tidemill import Impala, ActorCritic\nfrom tidemill.api.algorithm import "
        "ROW_FIELDS, Sample\n"
        "from tidemill.api.spaces import *\nfrom tidemill.core.schema import Field, allocate\n"
        "config, spaces = ActorCritic(), Spaces(Box((3,), 'float32'), Discrete(2))\n"
        "fields = {**ROW_FIELDS, 'obs': Field((3,), 'float32'), **config.answer(spaces)}\nsample = "
        "Sample(allocate(fields, (9, 4)))\n"
        "assert Impala().build(config.build(spaces, 0), 0).update([sample], 0.0)['rows'] == 32\nassert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize(("clips", "scale"), [((1.0, 1.0), 1), ((2.5, 0.7), 1), ((1.0, 1.0), 4)])
def test_the_gradient_is_that_of_the_paper_s_sums(clips, scale):
    """Eq. 1 as a sum of products over each episode, in plain torch, against an update of
    one minibatch without a step. What is learnt is in units of the returns' deviation so
    far, `scale`."""
    rho_clip, c_clip = clips
    gamma, lam, entropy_coefficient = 0.9, 0.8, 0.01
    learner = learner_of(
        gamma=gamma, trace_lambda=lam, rho_clip=rho_clip, c_clip=c_clip,
        entropy_coefficient=entropy_coefficient, minibatch_size=10**6, learning_rate=0.0,
        normalise_returns=scale != 1, max_gradient_norm=None,
    )  # fmt: skip
    policy = learner.policy
    sample = make_sample(policy, T=12, N=3, seed=2)
    other_weights(policy, 1)
    policy.fold_moments(policy.moments({}, None if scale == 1 else np.array([-scale, scale], np.float32)))
    assert policy.value_scale == scale
    w = {name: torch.tensor(array, requires_grad=True) for name, array in policy.network.weights.items()}
    metrics = learner.update([sample], 0.0)

    def tower(g, h):
        for i in range(2):
            h = torch.tanh(h @ w[f"hidden.{i}.weight"][g] + w[f"hidden.{i}.bias"][g])
        return h

    x = torch.tensor(sample["obs"])
    logits = tower(0, x) @ w["actor.weight"].T + w["actor.bias"].T
    values = (tower(1, x) @ w["critic.weight"] + w["critic.bias"]) * scale
    log_p = torch.log_softmax(logits, -1)
    held = log_p.detach()
    V, done, final = values.detach().numpy(), sample["done"], sample["done"] | sample["truncated"]
    T, N = done.shape
    loss, count, far = torch.tensor(0.0), 0, 0
    for n in range(N):

        def ratio(t, n=n):
            return float(torch.exp(held[t, n, int(sample["action"][t, n])] - float(sample["log_prob"][t, n])))

        def delta(t, n=n):
            after = 0.0 if done[t + 1, n] else V[t + 1, n]
            return min(rho_clip, ratio(t)) * (sample["reward"][t, n] + gamma * after - V[t, n])

        def target(t, n=n):
            """v_t = V_t + Σ_k γ^k (Π_i<k c_i) δ_{t+k}, up to the end of the episode or of
            the sample."""
            if done[t, n]:
                return 0.0
            total, factor = V[t, n], 1.0
            while t < T - 1 and not final[t, n]:
                total += factor * delta(t)
                factor *= gamma * lam * min(c_clip, ratio(t))
                t += 1
            return total

        for t in range(T - 1):
            if final[t, n]:
                continue
            log_prob = log_p[t, n, int(sample["action"][t, n])]
            advantage = min(rho_clip, ratio(t)) * (sample["reward"][t, n] + gamma * target(t + 1) - V[t, n])
            loss = loss - advantage / scale * log_prob + 0.5 * 0.5 * ((values[t, n] - target(t)) / scale) ** 2
            loss = loss + entropy_coefficient * (log_p[t, n].exp() * log_p[t, n]).sum()
            count += 1
            far += ratio(t) > 1.001 * rho_clip
    (loss / count).backward()
    expected = torch.cat(
        [w[name].grad.reshape(-1) if w[name].grad is not None else torch.zeros(w[name].numel()) for name in w]
    )
    assert metrics["rows"] == count and metrics["minibatches"] == 1
    assert metrics["clip_fraction"] == pytest.approx(far / count, abs=1e-6) and (clips[0] > 1 or far > 0)
    np.testing.assert_allclose(learner.loss.gradient, expected, atol=2e-6, rtol=1e-3)


def test_on_its_own_samples_nothing_is_clipped():
    learner = learner_of(minibatch_size=10**6)
    metrics = learner.update([make_sample(learner.policy)], 0.0)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_fraction"] == 0
    assert metrics["gradient_norm"] > 0


def test_ratios_are_those_of_the_start_of_the_update():
    """Whatever the minibatches before have done to the weights."""
    learner = learner_of()
    sample = make_sample(learner.policy)
    found, steps = [], []
    estimate, loss = learner._estimate, learner.loss.of_policy
    learner._estimate = lambda s: found.append(len(steps)) or estimate(s)
    learner.loss.of_policy = lambda *arrays: steps.append(1) or loss(*arrays)
    assert learner.update([sample, sample], 0.0)["minibatches"] > 2
    assert found == [0, 0] and len(steps) > 2


def test_masked_cells_change_nothing():
    check_masked(learner_of(), learner_of())


def test_updates_in_torch_are_those_in_numpy():
    config = Impala(minibatch_size=8, learning_rate=1e-2, entropy_coefficient=0.01)
    net = ActorCritic(hidden=(8, 8), normalise_observations=True)
    learners = [
        config.build(policy, 0)
        for policy in (net.build(SPACES, 0), ActorCriticPolicy(net, SPACES, 0, "torch", "cpu"))
    ]
    actor = learner_of().policy
    for update in range(2):
        sample = make_sample(actor, seed=update)
        plain, other = (learner.update([sample], 0.0) for learner in learners)
        for name, value in plain.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        for name, array in learners[0].policy.parameters().items():
            np.testing.assert_allclose(
                learners[1].policy.parameters()[name], array, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_a_resumed_learner_goes_on_exactly():
    whole, first, second = learner_of(), learner_of(), learner_of(seed=99)
    samples = [make_sample(whole.policy, seed=i) for i in range(4)]
    for sample in samples:
        whole.update([sample], 0.0)
    for sample in samples[:2]:
        first.update([sample], 0.0)
    second.policy.load({k: v.copy() for k, v in first.policy.parameters().items()}, 2)
    second.load_state(first.state())
    for sample in samples[2:]:
        second.update([sample], 0.0)
    assert_equal(weights(whole), weights(second))


def test_what_is_not_finite_is_named_before_the_weights_are_spoilt():
    learner = learner_of()
    sample = make_sample(learner.policy)
    sample["reward"][:-1] = np.inf
    with np.errstate(invalid="ignore"), pytest.raises(RunError, match="Impala left out a step"):
        learner.update([sample], 0.0)
    assert np.isfinite(learner.policy.network.flat).all()


def test_it_learns_which_action_pays_from_samples_of_older_weights():
    # One step pays 1 for action 2 and nothing else; γ = 0 makes it a bandit. Samples are
    # three updates old.
    learner = learner_of(gamma=0.0, minibatch_size=64, learning_rate=3e-3, entropy_coefficient=0.0)
    waiting, share = [], []
    for i in range(60):
        sample = make_sample(learner.policy, T=33, N=8, seed=i, reward=lambda action: action == 2)
        acted = sample["version"] >= 0
        share.append((sample["action"][acted] == 2).mean())
        waiting.append(sample)
        if len(waiting) > 3:
            learner.update([waiting.pop(0)], 0.0)
    assert share[0] < 0.5
    assert share[-1] > 0.9
