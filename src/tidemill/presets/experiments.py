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
    "qrdqn": "tidemill.presets.off_policy:QRDQN_PRESETS",
    "sac": "tidemill.presets.off_policy:SAC_PRESETS",
    "td3": "tidemill.presets.off_policy:TD3_PRESETS",
}
"""The algorithms that have presets: module and name of their `Presets`. A new one is a
line here."""


def presets_of(algorithm: str) -> Presets:
    """Return the presets of an algorithm. Raises `ConfigError` where it has none."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f'no algorithm "{algorithm}" has presets; {did_you_mean(algorithm, ALGORITHMS)}')
    return cast(Presets, load_attribute(ALGORITHMS[algorithm], "presets"))


def experiment_for(name: str, environment: EnvironmentConfig, algorithm: str = "ppo") -> Experiment:
    """Return the experiment that is tuned for training `algorithm` (one of
    `ALGORITHMS`) on the environment that users call `name`, or the algorithm's general
    experiment where none is. For an environment on a server, the server is asked for the
    name. Raises `ConfigError` for an unknown algorithm, or one that does not fit."""
    name = environment.preset_name(name)
    return presets_of(algorithm).find(name, environment)(name, environment)
