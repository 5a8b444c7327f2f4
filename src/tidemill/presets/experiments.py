"""Experiments that the library ships: tuned ones for well-known environments, and a sound
start for every other."""

from typing import cast

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.user_code_loading import load_attribute
from tidemill.presets.base import Presets

ALGORITHMS = {
    "ppo": "tidemill.presets.ppo:PRESETS",
    "dqn": "tidemill.presets.off_policy:DQN_PRESETS",
    "sac": "tidemill.presets.off_policy:SAC_PRESETS",
}
"""The algorithms that have presets: module and name of their `Presets`. A new one is a
line here."""


def presets_of(algorithm: str) -> Presets:
    """Return the presets of an algorithm. Raises `ConfigError` where it has none."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f'no algorithm "{algorithm}" has presets; {did_you_mean(algorithm, ALGORITHMS)}')
    return cast(Presets, load_attribute(ALGORITHMS[algorithm], "presets"))


def experiment_for(name: str, environment: EnvironmentConfig, algorithm: str = "ppo") -> Experiment:
    """Return the experiment of `algorithm` that is tuned for the environment that users
    call `name`, or the general one. A server is asked what it plays. Raises
    `ConfigError`."""
    name = environment.preset_name(name)
    return presets_of(algorithm).find(name, environment)(name, environment)
