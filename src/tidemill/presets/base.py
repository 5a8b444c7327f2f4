"""What the presets of an algorithm are: experiments for environments."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.api.policy import PolicyConfig

Preset = Callable[[str, EnvironmentConfig], Experiment]
"""Returns the experiment for an environment that users call so."""


class Presets(NamedTuple):
    """The experiments by which one algorithm trains.

    general: the preset for what nobody tuned
    tuned: the presets of environments, by name or, ending in "/", by the beginning of one
    kinds: the presets of kinds of environments, which come before names
    policies: the policies that act in them; an environment fits where each has weights
        for its spaces
    replay: whether it trains from a replay memory
    """

    general: Preset
    tuned: Mapping[str, Preset]
    kinds: Mapping[type[EnvironmentConfig], Callable[[str, Any], Experiment]]
    policies: tuple[PolicyConfig, ...]
    replay: bool = False

    def find(self, name: str, environment: EnvironmentConfig) -> Preset:
        """Return the preset for `environment`, which users call `name`."""
        for kind, preset in self.kinds.items():
            if isinstance(environment, kind):
                return preset
        return self.tuned.get(name) or self.tuned.get(f"{name.partition('/')[0]}/") or self.general


def run_name(name: str) -> str:
    """Return `name` (say "ALE/Pong-v5") as one that a run may have ("ALE-Pong-v5")."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-")[:48] or "run"
