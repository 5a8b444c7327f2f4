"""A look at an environment before training on it, from Python."""

from tidemill.presets.fitting_algorithms import training
from tidemill.testing.check_env import Finding, check_environment
from tidemill.training.experiment_from import Trainable, environments_of


def check_env(environment: Trainable, seed: int = 0) -> list[Finding]:
    """Return what ``tidemill check-env`` finds out about an environment: its spaces, what
    can be trained, values, resets, determinism, speed. Each finding has a `name`, a
    `level` ("ok", "warn" or "fail"), a `message` and a `cure`. `environment` is anything
    that `tidemill.train` takes; of an experiment the environment of each group of actors
    is checked.

    seed: of the environment and of the random actions
    """
    return [
        finding
        for config in environments_of(environment)
        for finding in check_environment(config, seed, look=training)
    ]
