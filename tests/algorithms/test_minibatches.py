"""PPO on policies that remember: chunks, burn-in, states as they were in the rollout, and
that it learns to remember."""

import numpy as np
import pytest
import torch
from tests.algorithms.test_device import Steps
from tests.algorithms.test_parallel import assert_same, in_step

from tidemill.algorithms.array_library import NumpyLibrary
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.minibatches import Chunks, cut, gae_of, gather, trained_rows
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.torch_library import TorchLibrary
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate, poison
from tidemill.nets.actor_critic import ActorCritic, ActorCriticPolicy
from tidemill.nets.recurrent import RecurrentActorCritic
from tidemill.nets.torch_copies import Mirror

SPACES = Spaces(Box((3,), "float32"), Discrete(3))
NETS = {
    kind: RecurrentActorCritic(cell=kind, hidden=(8,), width=6, normalise_observations=True)
    for kind in ("lstm", "gru")
}


def stirred(policy, seed=0):
    rng = np.random.default_rng(seed)
    for weight in policy.network.weights.values():
        weight += rng.standard_normal(weight.shape).astype(np.float32) * 0.4
    return policy


def rollout(policy, net, seed=0, T=14, N=5, burn_in=0, fillers=0, bootstrap=1, ends=0.12, see=None, pay=None):
    """Rows as an actor writes them, in memory poisoned first. The first `fillers` rows
    are those before each seat's first."""
    rng = np.random.default_rng(seed)
    schema = {
        **ROW_FIELDS,
        **schema_of_space(SPACES.observation, "obs"),
        **net.answer(SPACES),
        **net.state(SPACES),
    }
    sample = Sample(allocate(schema, (T, N)))
    poison(sample)
    sample.burn_in, sample.bootstrap = burn_in, bootstrap
    state, fresh, age = allocate(net.state(SPACES), (N,)), np.ones(N, bool), np.zeros(N, int)
    for name in ("on_reset", "done", "truncated"):
        sample[name][:] = False
    sample["version"][:] = -1
    for t in range(fillers, T):
        age = np.where(fresh, 0, age + 1)
        for array in state.values():
            array[fresh] = 0
        sample["on_reset"][t] = fresh
        ended = ~fresh & (rng.random(N) < ends)
        done = ended & (rng.random(N) < 0.5)
        sample["done"][t], sample["truncated"][t] = done, ended & ~done
        obs = rng.standard_normal((N, 3)) if see is None else see(rng, sample, t, age)
        sample["obs"][t] = obs
        acts = np.flatnonzero(~done)
        out = allocate({**net.answer(SPACES), **net.state(SPACES)}, (len(acts),))
        for name, array in state.items():
            sample[name][t] = array
        policy.act(
            {"obs": sample["obs"][t, acts]}, {name: array[acts] for name, array in state.items()}, False, out
        )
        for name, array in out.items():
            if name in state:
                state[name][acts] = array
            else:
                sample[name][t, acts] = array
        sample["version"][t, acts] = 5
        sample["reward"][t] = np.where(
            ended, 0, rng.standard_normal(N) if pay is None else pay(sample, t, age)
        )
        fresh = ended
    sample["reward"][-1] = np.nan  # committed before it came
    return sample


def learner_of(net, seed=0, **settings):
    return PPO(**{"minibatch_size": 16, "learning_rate": 1e-2, **settings}).build(
        stirred(net.build(SPACES, 0)), seed
    )


SHAPES = [
    {"chunk_steps": None},
    {"chunk_steps": 1},
    {"chunk_steps": 4},  # 13 rows: three whole chunks and a rest
    {"chunk_steps": 1000},
    {"chunk_steps": 4, "burn_in": 3},
    {"chunk_steps": None, "burn_in": 3, "fillers": 3},
    {"chunk_steps": 5, "burn_in": 2, "fillers": 2, "bootstrap": 3},
]


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(f"{k}={v}" for k, v in shape.items()))
def test_unchanged_weights_give_the_behaviour_s_log_probs_and_values(kind, shape):
    """Over borders of episodes, with fillers, cut and ended rows, and whatever chunks."""
    net, shape = NETS[kind], dict(shape)
    learner = learner_of(net, chunk_steps=shape.pop("chunk_steps"))
    samples = [rollout(learner.policy, net, seed, N=4 + seed, ends=0.25, **shape) for seed in range(2)]
    assert all(sample["done"].any() and sample["truncated"].any() for sample in samples)
    batch = gather(samples, gae_of(0.99, 0.95))
    source = learner._source(batch, samples)
    seen = []
    for pieces in np.array_split(np.random.default_rng(0).permutation(len(source)), 3):
        inputs, rows = source.pick(pieces)
        found = learner.policy.network.forward(inputs, {"action": batch.action["action"][rows]})
        np.testing.assert_allclose(found.log_prob, batch.log_prob[rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            found.value * learner.policy.value_scale, batch.value[rows], rtol=1e-5, atol=1e-5
        )
        seen += rows.tolist()
    assert sorted(seen) == [*range(len(batch))]  # each trained row once
    assert np.ptp(batch.log_prob) > 0.5
    for sample in samples:
        acted = np.flatnonzero(sample["version"] >= 0)  # cut rows and the last ones among them
        for found, name in zip(learner._evaluate(sample, acted), ("log_prob", "value"), strict=True):
            np.testing.assert_allclose(found, sample[name].ravel()[acted], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(
    "algorithm",
    [PPO(learning_rate=0.0, epochs=1, chunk_steps=4, correct_off_policy=True), Impala(learning_rate=0.0)],
)
def test_an_update_that_changes_nothing_finds_no_divergence(kind, algorithm):
    learner = algorithm.build(stirred(NETS[kind].build(SPACES, 0)), 0)
    metrics = learner.update([rollout(learner.policy, NETS[kind], burn_in=2, fillers=2)], 0.0)
    assert 0 <= metrics["kl"] < 1e-10 and metrics["clip_fraction"] == 0


def test_chunks_lie_in_the_sample_one_after_the_other_with_burn_in_before_each():
    net = NETS["gru"]
    sample = rollout(net.build(SPACES, 0), net, T=14, N=2, burn_in=2, bootstrap=1, ends=0)
    sample["obs"][..., 0] = np.arange(14)[:, None]
    sample["obs"][..., 1] = np.arange(2)
    found = cut([sample], trained_rows([sample]), 2, 4)  # 11 trained rows: 4, 4, 3
    assert found.on_reset.shape == (6, 6)
    times = found.observation["obs"][:, 0].reshape(6, 6)
    assert times[:, ::2].T.tolist() == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9], [8, 9, 10, 11, 12, 13]]
    assert (found.observation["obs"][:, 1].reshape(6, 6) == [0, 1, 0, 1, 0, 1]).all()
    place = found.place.reshape(6, 6)
    assert (place[:2] == -1).all() and (place[5, 4:] == -1).all()
    assert sorted(place[place >= 0]) == [*range(22)]
    np.testing.assert_array_equal(
        found.state["state.hidden"], np.concatenate([sample["state.hidden"][t] for t in (0, 4, 8)])
    )


def test_samples_of_any_length_make_one_batch():
    """Each an episode of one seat, some with fillers behind it."""
    net = NETS["lstm"]
    learner = learner_of(net)
    samples = [rollout(learner.policy, net, seed, T=T, N=1, ends=0) for seed, T in enumerate((9, 4, 14))]
    for sample in samples:
        sample["version"][-1], sample["done"][-1] = -1, True
    for name, array in samples[2].items():
        array[6:] = samples[0][name][-1:] if name in ("done", "truncated", "on_reset") else -1
    samples[2]["done"][6:] = False
    found = cut(samples, trained_rows(samples), 0, None)
    assert found.on_reset.shape == (8, 3)
    assert (found.place.reshape(8, 3) >= 0).sum(0).tolist() == [8, 3, 6]
    batch = gather(samples, gae_of(0.99, 0.95))
    inputs, rows = learner._source(batch, samples).pick(np.arange(3))
    log_prob = learner.policy.network.forward(inputs, {"action": batch.action["action"][rows]}).log_prob
    np.testing.assert_allclose(log_prob, batch.log_prob[rows], rtol=1e-5, atol=1e-5)


def test_chunks_without_a_trained_row_are_left_out():
    net = NETS["gru"]
    learner = learner_of(net, chunk_steps=4)
    sample = rollout(learner.policy, net, T=13, N=3, ends=0)
    sample["version"][4:8] = -1
    sample["version"][:, 2] = -1
    assert cut([sample], trained_rows([sample]), 0, 4).on_reset.shape == (4, 4)
    sample["version"][:] = -1
    before = learner.policy.network.flat.copy()
    assert learner.update([sample], 0.0)["rows"] == 0
    np.testing.assert_array_equal(learner.policy.network.flat, before)


@pytest.mark.parametrize("kind", NETS)
def test_cells_that_are_masked_change_nothing(kind):
    net, metrics, weights = NETS[kind], [], []
    for number in (np.nan, 1e6):
        learner = learner_of(net, chunk_steps=4, correct_off_policy=True)
        sample = rollout(learner.policy, net, burn_in=2, fillers=2)
        for t, seat in np.argwhere(sample["version"] < 0):
            for name in ("obs", "log_prob", "value", "state.hidden"):
                sample[name][t, seat] = number
        sample["reward"][-1] = number
        metrics.append(learner.update([sample], 0.0))
        weights.append(learner.policy.network.flat.copy())
    assert metrics[0] == metrics[1]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("kind", NETS)
def test_burn_in_brings_an_old_state_up_to_date(kind):
    """Chunks of 4 after 4 rows of burn-in that begin an episode: whatever the stored
    states are, the new weights' own are used."""
    net = NETS[kind]
    learner = learner_of(net, chunk_steps=4)
    policy = learner.policy
    sample = rollout(policy, net, T=9, N=3, burn_in=4, ends=0)
    stirred(policy, seed=3)
    batch = gather([sample], gae_of(0.99, 0.95))
    source = learner._source(batch, [sample])
    inputs, rows = source.pick(np.arange(3))
    found = policy.network.forward(inputs, {"action": batch.action["action"][rows]}).log_prob.copy()
    whole = policy.prepare({"obs": sample["obs"].reshape(-1, 3)})
    start = {name: np.zeros_like(sample[name][0]) for name in net.state(SPACES)}
    fresh = policy.network.forward(
        {**whole, **start, "on_reset": sample["on_reset"], "rows": np.arange(12, 24)},
        {"action": sample["action"][4:8].ravel()},
    )
    np.testing.assert_allclose(found, fresh.log_prob, rtol=1e-5, atol=1e-5)
    sample.burn_in = 0  # without it the chunk begins with the state of the old weights
    batch = gather([sample], gae_of(0.99, 0.95))
    inputs, rows = learner._source(batch, [sample]).pick(np.arange(3, 6))
    stale = policy.network.forward(inputs, {"action": batch.action["action"][rows]}).log_prob
    assert np.abs(stale - found).max() > 1e-2


@pytest.mark.parametrize("kind", NETS)
def test_what_an_earlier_episode_showed_changes_no_gradient_of_a_later_one(kind):
    net, gradients = NETS[kind], []
    for shown in (-2.0, 2.0):
        learner = learner_of(net, normalise_advantages=False)
        sample = rollout(learner.policy, net, ends=0)
        sample["on_reset"][7] = True
        sample["done"][6], sample["version"][:7] = True, -1  # the earlier episode is not trained on …
        sample["obs"][:7] = shown  # … and shows something else
        sample["version"][:6] = 5
        sample["state.hidden"][:7] = shown
        rows = trained_rows([sample])[0]
        late = rows[rows >= 7 * 5]
        source = Chunks(NumpyLibrary(), learner.policy, cut([sample], [late], 0, 13))
        inputs, found = source.pick(np.arange(len(source)))
        learner.policy.network.forward(inputs, {"action": sample["action"].ravel()[late][found]})
        out = np.empty(learner.policy.network.size, np.float32)
        ones = np.ones(len(found), np.float32)
        learner.policy.network.backward(ones, ones, ones, out)
        gradients.append(out)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-5)
    assert np.abs(gradients[0]).max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_steps": 4, "target_kl": 0.05, "correct_off_policy": True, "clip_value": 0.2},
        {"chunk_steps": 4, "normalise_advantages": "minibatch"},
    ],
)
def test_equal_trainers_keep_the_same_weights(settings):
    net = NETS["lstm"]
    learners = [learner_of(net, seed, entropy_coefficient=0.01, **settings) for seed in range(2)]
    for update in range(3):
        samples = [
            [rollout(learner.policy, net, 10 * update + i, N=2 + 3 * i, burn_in=1)]
            for i, learner in enumerate(learners)
        ]
        metrics = in_step(learners, samples)
        assert metrics[0] == metrics[1]
        assert_same(learners)
    assert metrics[0]["minibatches"] > 0


@pytest.mark.parametrize("recurrent", [False, True])
def test_each_minibatch_takes_its_own_normalised_advantages(recurrent, monkeypatch):
    monkeypatch.setenv("TIDEMILL_NATIVE", "off")  # numpy's loss is looked into
    net = NETS["gru"] if recurrent else ActorCritic(hidden=(8,))
    chunks = {"chunk_steps": 4} if recurrent else {}
    learner = learner_of(net, minibatch_size=12, normalise_advantages="minibatch", epochs=3, **chunks)
    loss, taken = learner.loss.of_policy, []
    monkeypatch.setattr(
        learner.loss, "of_policy", lambda *given: taken.append(given[2].astype(np.float64)) or loss(*given)
    )
    metrics = learner.update([rollout(learner.policy, net)], 0.0)
    assert len(taken) == metrics["minibatches"] >= 9
    for advantage in taken:
        assert advantage.mean() == pytest.approx(0, abs=1e-6)
        assert advantage.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", NETS)
def test_parts_teach_what_the_whole_does(kind, empty):
    net, settings = NETS[kind], {"epochs": 1, "minibatch_size": 10**6, "chunk_steps": 5}
    alone, *learners = (learner_of(net, seed, **settings) for seed in (0, 0, 1))
    samples = [rollout(alone.policy, net, i, N=3 + i) for i in range(2)]
    if empty:
        samples[1]["version"][:] = -1
    expected = alone.update(samples, 0.0)
    metrics = in_step(learners, [[sample] for sample in samples])
    assert_same(learners)
    for name, array in alone.policy.parameters().items():
        np.testing.assert_allclose(
            learners[0].policy.parameters()[name], array, rtol=1e-4, atol=1e-5, err_msg=name
        )
    for name, value in expected.items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", NETS)
def test_updates_in_torch_are_those_in_numpy(kind):
    net = NETS[kind]
    settings = {"minibatch_size": 16, "learning_rate": 1e-2, "chunk_steps": 4, "correct_off_policy": True}
    plain, other = (
        learner_of(net, **settings),
        PPO(**settings).build(ActorCriticPolicy(net, SPACES, 0, "torch"), 0),
    )
    other.policy.load({name: array.copy() for name, array in plain.policy.parameters().items()}, 0)
    for update in range(2):
        sample = rollout(plain.policy, net, update, burn_in=2, fillers=2)
        metrics = [learner.update([sample], 0.0) for learner in (plain, other)]
        for name, value in metrics[0].items():
            assert metrics[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        for name, array in plain.policy.parameters().items():
            np.testing.assert_allclose(
                other.policy.parameters()[name], array, rtol=1e-3, atol=1e-4, err_msg=name
            )


def test_an_update_on_a_device_stays_there(monkeypatch):
    """On one without numbers, where mixing devices fails, and reading anything."""
    monkeypatch.setattr(Mirror, "pull", lambda mirror, rows=None: None)
    monkeypatch.setattr(torch.optim, "Adam", Steps)
    read = []
    monkeypatch.setattr(
        TorchLibrary,
        "to_host",
        lambda library, array: read.append(tuple(array.shape)) or np.zeros(array.shape, np.float32),
    )
    net = NETS["lstm"]
    sample = rollout(net.build(SPACES, 0), net, burn_in=2, fillers=2)
    learner = PPO(minibatch_size=16, epochs=2, chunk_steps=4).build(
        ActorCriticPolicy(net, SPACES, 0, "torch", "meta"), 0
    )
    metrics = learner.update([sample], 0.0)
    assert read == [(metrics["minibatches"], 6)]


def test_the_step_is_the_mean_over_trained_rows_whatever_chunks_hold_them():
    """One minibatch of all rows: the first step is the same for all lengths of chunks
    that begin where episodes do."""
    net, found = NETS["gru"], []
    for chunk_steps in (None, 4):
        learner = learner_of(net, chunk_steps=chunk_steps, epochs=1, minibatch_size=10**6)
        sample = rollout(learner.policy, net, T=13, ends=0)
        sample["on_reset"][::4] = True
        for name in net.state(SPACES):
            sample[name][::4] = 0
        learner.update([sample], 0.0)
        found.append(learner.loss.gradient / learner.loss.parts[-1])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_policy_without_state_are_refused():
    with pytest.raises(
        ConfigError, match=r"chunk_steps = 8: a ActorCriticPolicy has no state.*RecurrentActorCritic"
    ):
        PPO(chunk_steps=8).build(ActorCritic().build(SPACES, 0), 0)
    with pytest.raises(ConfigError, match="chunk_steps = 0 is not between 1 and"):
        PPO(chunk_steps=0)


BANDIT = {"gamma": 0.0, "minibatch_size": 64, "clip_apart": False, "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("gru", PPO(**BANDIT, epochs=4)),
        ("lstm", PPO(**BANDIT, epochs=4, chunk_steps=4)),
        ("lstm", Impala(**BANDIT, chunk_steps=8)),
    ],
    ids=["PPO", "PPO in chunks", "IMPALA"],
)
def test_it_learns_to_remember(kind, algorithm):
    """An episode's first row shows which action pays two rows later; nothing pays before,
    and the rows between are blank."""
    net = RecurrentActorCritic(cell=kind, hidden=(16,), width=16, normalise_observations=False)
    learner = algorithm.build(net.build(SPACES, 0), 0)
    share = []

    def see(rng, sample, t, age):
        # the cue, for `pay`
        sample["info.length"][t] = np.where(
            age == 0, rng.integers(0, 3, len(age)), sample["info.length"][t - 1]
        )
        return np.where((age == 0)[:, None], np.eye(3)[sample["info.length"][t]], 0)

    def pay(sample, t, age):
        return (age == 2) & (sample["action"][t] == sample["info.length"][t])

    for i in range(25 if isinstance(algorithm, PPO) else 60):
        sample = rollout(learner.policy, net, i, T=33, N=16, ends=0.2, see=see, pay=pay)
        asked = (
            sample["on_reset"][:-3]
            & ~(sample["done"] | sample["truncated"])[1:-2]
            & ~(sample["done"] | sample["truncated"])[2:-1]
        )
        share.append((sample["reward"][2:-1][asked] > 0).mean())
        learner.update([sample], 0.0)
    assert np.mean(share[:2]) < 0.55
    assert np.mean(share[-2:]) > 0.95


def test_a_resumed_learner_goes_on_exactly():
    net = NETS["lstm"]
    whole, first = (learner_of(net, chunk_steps=4) for _ in range(2))
    samples = [rollout(whole.policy, net, i) for i in range(3)]
    for learner in (whole, first):
        learner.update(samples[:2], 0.0)
    second = PPO(minibatch_size=16, learning_rate=1e-2, chunk_steps=4).build(net.build(SPACES, 7), 99)
    second.policy.load({name: array.copy() for name, array in first.policy.parameters().items()}, 2)
    second.load_state(first.state())
    for learner in (whole, second):
        learner.update(samples[2:], 0.0)
    np.testing.assert_array_equal(whole.policy.network.flat, second.policy.network.flat)
    assert torch.is_tensor(second.policy.trainable_parameters()[0])
