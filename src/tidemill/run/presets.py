"""Experiments that the library ships: tuned ones for well-known environments, and a sound start for every other."""

import re
from collections.abc import Callable
from typing import Any

from tidemill.algorithms.ppo import PPO
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment, Limits
from tidemill.nets.actor_critic import ActorCritic
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.trainer import Trainer


def ppo(
    name: str,
    environment: EnvironmentConfig,
    *,
    lanes: int = 64,
    sample_steps: int = 128,
    actors: int = 1,
    policy: ActorCritic | None = None,
    algorithm: PPO | None = None,
    **limits: Any,
) -> Experiment:
    """Return PPO with inline inference on `environment`: one policy, `actors` actor workers, one trainer."""
    return Experiment(
        name=re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-")[:48] or "run",
        policies={"policy": policy or ActorCritic()},
        workers={
            "actor": Actors(environment=environment, count=actors, lanes=lanes, agents=(AgentSpec(sample_steps=sample_steps),)),
            "trainer": Trainer(algorithm=algorithm or PPO()),
        },
        limits=Limits(**limits),
    )


def cartpole(environment: EnvironmentConfig) -> Experiment:
    """CartPole-v1."""
    return ppo("CartPole-v1", environment, lanes=64, sample_steps=64, algorithm=PPO(learning_rate=2e-3, minibatch_size=1024), steps=600_000)


TUNED: dict[str, Callable[[EnvironmentConfig], Experiment]] = {"CartPole-v1": cartpole}


def experiment_for(name: str, environment: EnvironmentConfig) -> Experiment:
    """Return the tuned experiment for the environment that users call `name`, or the general one."""
    make = TUNED.get(name)
    return make(environment) if make is not None else ppo(name, environment, steps=1_000_000)
