"""Policies that learn from a replay memory, with normalised observations."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.algorithms import test_dqn, test_sac, test_td3
from tests.algorithms.restoring import check_restored

from tidemill import DQN, QRDQN, SAC, TD3, DeterministicActor, QNetwork, SquashedGaussian
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import allocate

MADE: dict[str, tuple[Callable[[int], Algorithm], Callable[[int], Sample]]] = {
    "dqn": (
        lambda seed: DQN().build(
            QNetwork(hidden=(8,), normalise_observations=True).build(test_dqn.SPACES, seed), 0
        ),
        test_dqn.sample_of,
    ),
    "qrdqn": (
        lambda seed: QRDQN().build(
            QNetwork(hidden=(8,), normalise_observations=None, quantiles=5).build(test_dqn.SPACES, seed), 0
        ),
        test_dqn.sample_of,
    ),
    "sac": (
        lambda seed: SAC().build(
            SquashedGaussian(hidden=(8,), normalise_observations=True).build(test_sac.SPACES, seed), 0
        ),
        test_sac.sample_of,
    ),
    "td3": (
        lambda seed: TD3().build(
            DeterministicActor(hidden=(8,), normalise_observations=None).build(test_td3.SPACES, seed), 0
        ),
        test_sac.sample_of,
    ),
}


def scaled(sample: Sample, by: float = 50.0, off: float = 7.0) -> Sample:
    """Return a batch whose observations are `by` times as large, and `off`."""
    for name in ("obs", "next.obs"):
        sample[name] = (sample[name] * by + off).astype(np.float32)
    return sample


@pytest.mark.parametrize("name", MADE)
def test_the_moments_are_those_of_the_batches_that_were_drawn(name: str) -> None:
    make, sample_of = MADE[name]
    learner, batches = make(0), [scaled(sample_of(seed)) for seed in range(5)]
    for step, batch in enumerate(batches):
        learner.update([batch], step)
    seen = np.concatenate([batch["obs"][0] for batch in batches]).astype(np.float64)
    known = learner.policy.parameters()
    assert known["observation.count"] == len(seen)
    np.testing.assert_allclose(known["observation.mean"], seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(known["observation.variance"], seen.var(0), rtol=1e-6)
    expected = (seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
    found = learner.policy.features({"obs": seen.astype(np.float32)})  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", MADE)
def test_it_learns_as_from_observations_that_came_so(name: str) -> None:
    """An update by scaled observations is that by plain ones, since the moments are of
    the first batch."""
    make, sample_of = MADE[name]
    told = []
    for change in (lambda sample: sample, scaled):
        learner = make(0)
        for step in range(3):
            learner.update([change(sample_of(0))], step)
        parameters = learner.policy.parameters()
        told.append({key: array.copy() for key, array in parameters.items() if "observation" not in key})
    for key, array in told[0].items():
        np.testing.assert_allclose(told[1][key], array, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", MADE)
def test_a_restored_learner_goes_on_exactly(name: str) -> None:
    make, sample_of = MADE[name]
    check_restored(make(0), make(5), sample_of)


def test_who_loads_the_weights_acts_by_the_moments_that_came_with_them() -> None:
    make, sample_of = MADE["dqn"]
    learner, other = make(0), make(3)
    learner.update([scaled(sample_of(0))], 0)
    other.policy.load({key: array.copy() for key, array in learner.policy.parameters().items()}, 1)
    rows = scaled(sample_of(1))["obs"][0]
    answers = []
    for policy in (learner.policy, other.policy):
        out = allocate(policy.config.answer(test_dqn.SPACES), (len(rows),))  # type: ignore[attr-defined]
        policy.act({"obs": rows}, {}, True, out)
        answers.append(out["value"])
    np.testing.assert_array_equal(*answers)


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
