"""Observations are normalised by the moments of what has entered the replay memory: when
that counts, by what, and that players, resumed learners and targets have the same."""

import numpy as np
import pytest
from tests.algorithms.test_sac import BATCH, CENTRE, HALF

from tidemill import DQN, QRDQN, SAC, TD3, DeterministicActor, QNetwork, SquashedGaussian
from tidemill.api.algorithm import Sample
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Dict, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate

VIEW = Dict({"place": Discrete(2), "view": Box((3,), "float32")})
PUSH = Box((2,), "float32", tuple(CENTRE - HALF), tuple(CENTRE + HALF))
CASES = {
    "dqn": (DQN(), QNetwork(hidden=(8,), normalise_observations=True), Discrete(3)),
    "qrdqn": (QRDQN(), QNetwork(hidden=(8,), quantiles=3, normalise_observations=None), Discrete(3)),
    "sac": (SAC(), SquashedGaussian(hidden=(8,), normalise_observations=None), PUSH),
    "td3": (TD3(), DeterministicActor(hidden=(8,), normalise_observations=True), PUSH),
}


def rows(n, rng, of=""):
    view = (rng.standard_normal((n, 3)) * (3, 1, 40) + (1, -5, 300)).astype(np.float32)
    return {f"{of}obs.view": view, f"{of}obs.place": rng.integers(0, 2, n)}


def arrival(rng, version=(0, 0, -1, -1), begins=(False, False, True, False)):
    """Four seats: two acted, one begins an episode, one has nothing."""
    sample = Sample({name: array[None] for name, array in rows(4, rng).items()})
    sample["version"], sample["on_reset"] = np.array([version]), np.array([begins])
    return sample


def batch(rng, action):
    acted = (
        rng.integers(0, 3, BATCH)
        if isinstance(action, Discrete)
        else (rng.uniform(-1, 1, (BATCH, 2)) * HALF + CENTRE).astype(np.float32)
    )
    fields = {
        **rows(BATCH, rng),
        **rows(BATCH, rng, "next."),
        "action": acted,
        "rewards": rng.standard_normal((BATCH, 1)).astype(np.float32),
        "steps": np.ones(BATCH, np.int32),
        "done": rng.random(BATCH) < 0.3,
        "weight": np.ones(BATCH, np.float32),
        "version": np.zeros(BATCH, np.int64),
    }
    return Sample({name: array[None] for name, array in fields.items()})


def learner_of(case, seed=0):
    algorithm, policy, action = CASES[case]
    return algorithm.build(policy.build(Spaces(VIEW, action), seed), seed), Spaces(VIEW, action)


def test_rows_count_once_and_from_the_next_fold_on():
    rng, (learner, _) = np.random.default_rng(0), learner_of("dqn")
    policy, told = learner.policy, [arrival(rng) for _ in range(30)]
    for i, each in enumerate(told):
        policy.take_in(each)
        if i % 7 == 3:
            policy.fold()
    found = policy.parameters()
    assert found["observation.count"] == 3 * 25
    policy.fold()
    policy.fold()
    seen = np.concatenate([each["obs.view"][0, :3] for each in told]).astype(np.float64)
    assert found["observation.count"] == 90
    np.testing.assert_allclose(found["observation.mean"][-3:], seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["observation.variance"][-3:], seen.var(0), rtol=1e-5)
    # one-hot columns of the choice stay; 10 deviations are the most
    far = (seen.mean(0) + (2, -1, 100) * seen.std(0)).astype(np.float32)
    features = policy.features({"obs.place": np.array([1]), "obs.view": far[None]})
    np.testing.assert_allclose(features[0], [0, 1, 2, -1, 10], atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_arrivals_change_a_version_only_with_the_next_update(case):
    rng, (learner, spaces) = np.random.default_rng(1), learner_of(case)
    before = {name: array.copy() for name, array in learner.policy.parameters().items()}
    for _ in range(20):
        learner.take_in(arrival(rng))
    for name, array in learner.policy.parameters().items():
        np.testing.assert_array_equal(array, before[name])
    learner.update([batch(rng, spaces.action)], 0)
    assert learner.policy.parameters()["observation.count"] == 60
    # and players have them: far observations are near for them, too
    player = learner.policy.config.build(spaces, 5)
    player.load({name: array.copy() for name, array in learner.policy.parameters().items()}, 1)
    seen, outs = rows(9, rng), []
    for policy in (learner.policy, player):
        outs.append(allocate(policy.config.answer(spaces), (9,)))
        policy.act(seen, {}, True, outs[-1])
        assert np.abs(policy.features(seen)).max() < 6
    for name in outs[0]:
        np.testing.assert_array_equal(outs[0][name], outs[1][name])


@pytest.mark.parametrize("case", CASES)
def test_a_learner_that_is_restored_goes_on_with_what_has_arrived(case):
    (one, spaces), (other, _) = learner_of(case), learner_of(case, 1)
    rng = np.random.default_rng(2)

    def go_on(learner, seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            learner.take_in(arrival(rng))
        return learner.update([batch(rng, spaces.action)], 0)

    go_on(one, 0)
    one.take_in(arrival(rng))
    other.policy.load({name: array.copy() for name, array in one.policy.parameters().items()}, 5)
    other.load_state(one.state())
    assert go_on(one, 1) == go_on(other, 1)
    for name, array in one.policy.parameters().items():
        np.testing.assert_array_equal(array, other.policy.parameters()[name])


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_a_plain_policy_on_normalised_rows(case):
    """Both observations are normalised, for online and target networks alike."""
    rng, (learner, spaces) = np.random.default_rng(3), learner_of(case)
    plain = learner.policy.config.replace(normalise_observations=False).build(spaces, 0)
    again = CASES[case][0].build(plain, 0)
    for _ in range(30):
        learner.take_in(arrival(rng))
    learner.policy.fold()
    sample = batch(rng, spaces.action)
    scaled, moments = Sample(sample), learner.policy.parameters()
    for name in ("obs.view", "next.obs.view"):
        off = (sample[name] - moments["observation.mean"][-3:].astype(np.float32)) * (
            1 / np.sqrt(moments["observation.variance"][-3:] + 1e-8)
        ).astype(np.float32)
        scaled[name] = off.clip(-10, 10)
    told, expected = learner.update([sample], 0), again.update([scaled], 0)
    assert told == pytest.approx(expected, rel=1e-5)


IMAGE = Spaces(Box((10, 10, 4), "float32", (0.0,), (1.0,)), Discrete(3))
REFUSED: dict[str, tuple[PolicyConfig, Spaces]] = {
    "has no effect on an image": (QNetwork(normalise_observations=True), IMAGE),
    "has no effect on an observation without flattened Boxes": (
        SquashedGaussian(normalise_observations=True),
        Spaces(Discrete(4), Box((2,), "float32", (-1.0,), (1.0,))),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_where_nothing_could_be_normalised_it_is_refused(message: str) -> None:
    config, spaces = REFUSED[message]
    with pytest.raises(ConfigError, match=message):
        config.build(spaces, 0)
    assert "observation.mean" not in QNetwork(normalise_observations=None).weights(IMAGE)
