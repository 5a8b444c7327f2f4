"""Settings that change while a run goes on: as if the algorithm had had them before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.algorithms import test_dqn, test_ppo, test_sac, test_td3

from tidemill import DQN, PPO, QRDQN, SAC, TD3, Impala, QNetwork
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.core.blas_threads import limit_threads
from tidemill.workers.version_metadata import with_settings

SHARED = {
    "gamma": 0.5,
    "minibatch_size": 4,
    "learning_rate": 1e-4,
    "value_coefficient": 3.0,
    "entropy_coefficient": 0.3,
    "max_gradient_norm": None,
}
CHANGES: dict[type[AlgorithmConfig], dict[str, float | None]] = {
    PPO: {
        **SHARED,
        "gae_lambda": 0.1,
        "clip": 1e-3,
        "epochs": 2,
        "clip_value": 1e-3,
        "target_kl": 1e-9,
        "desired_kl": 1e-9,
    },
    Impala: {**SHARED, "trace_lambda": 0.1, "rho_clip": 1.01, "c_clip": 0.1},
    DQN: {
        "gamma": 0.5,
        "learning_rate": 1e-4,
        "max_gradient_norm": 1e-3,
        "target_steps": 0,
        "target_rate": 0.1,
        "epsilon": 0.5,
    },
    SAC: {
        "gamma": 0.5,
        "learning_rate": 1e-4,
        "critic_learning_rate": 1e-5,
        "max_gradient_norm": 1e-3,
        "target_rate": 0.1,
        "target_entropy": 3.0,
    },
    TD3: {
        "gamma": 0.5,
        "learning_rate": 1e-4,
        "critic_learning_rate": 1e-5,
        "max_gradient_norm": 1e-3,
        "target_rate": 0.1,
        "policy_delay": 3,
        "exploration_noise": 0.5,
        "target_noise": 0.1,
        "target_noise_clip": 0.05,
    },
}


CHANGES[QRDQN] = {**CHANGES[DQN], "kappa": 0.1}


def of_policy_gradient(config: Any) -> tuple[Algorithm, Callable[[int], Sample]]:
    learner = config.build(test_ppo.NET.build(test_ppo.SPACES, 0), 0)
    acting = test_ppo.NET.build(test_ppo.SPACES, 0)
    return learner, lambda seed: test_ppo.make_sample(acting, seed=seed)


MADE: dict[type[AlgorithmConfig], Callable[[Any], tuple[Algorithm, Callable[[int], Sample]]]] = {
    PPO: of_policy_gradient,
    Impala: of_policy_gradient,
    DQN: lambda config: (test_dqn.learner_of(config), test_dqn.sample_of),
    QRDQN: lambda config: (
        test_dqn.learner_of(config, QNetwork(hidden=(8,), quantiles=5)),
        test_dqn.sample_of,
    ),
    SAC: lambda config: (test_sac.learner_of(config), test_sac.sample_of),
    TD3: lambda config: (test_td3.learner_of(config), test_sac.sample_of),
}
START = {
    PPO: PPO(minibatch_size=8, learning_rate=1e-2),
    Impala: Impala(minibatch_size=8, learning_rate=1e-2, rho_clip=1.5),
    DQN: DQN(target_steps=2),
    QRDQN: QRDQN(target_steps=2),
    SAC: SAC(),
    TD3: TD3(),
}


def known(learner: Algorithm, metrics: Any) -> dict[str, Any]:
    parameters = {f"policy.{name}": array for name, array in learner.policy.parameters().items()}
    return {**metrics, **parameters, **learner.state()}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in CHANGES.items() for name in names]
)
def test_a_change_is_as_if_the_learner_were_built_so_and_had_come_so_far(
    kind: type[AlgorithmConfig], name: str
) -> None:
    limit_threads(1)
    start = START[kind]
    changed = with_settings(start, {name: CHANGES[kind][name]})
    (one, sample), (other, _), (unchanged, _) = (MADE[kind](config) for config in (start, changed, start))
    samples = [sample(seed) for seed in range(6)]
    for steps, each in enumerate(samples[:3]):
        one.update([each], steps)
    for learner in (other, unchanged):
        learner.policy.load({key: array.copy() for key, array in one.policy.parameters().items()}, 3)
        learner.load_state(one.state())
    one.config = changed.at(0, 0.0)
    for steps, each in enumerate(samples[3:], 3):
        found, built, before = (
            known(learner, learner.update([each], steps)) for learner in (one, other, unchanged)
        )
    assert found.keys() == built.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, built[key], err_msg=key)
    assert any(not np.array_equal(value, before.get(key), equal_nan=True) for key, value in found.items())


def test_all_that_may_change_is_tried_here() -> None:
    for kind, changes in CHANGES.items():
        assert set(kind.changeable) == set(changes)
