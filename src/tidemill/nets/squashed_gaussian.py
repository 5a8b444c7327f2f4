"""Policies whose actions are normally distributed and pressed into their bounds by tanh:
the configuration. Imports no torch, and needs none."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Box, Spaces, schema_of_space
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Field
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.mlp import MLPShape


@dataclass(frozen=True, kw_only=True)
class SquashedGaussian(PolicyConfig):
    """An actor for bounded Box actions: centre + half · tanh(u), u normal, with mean and
    deviation from a network of relu layers that sees the flattened observation (Haarnoja
    et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C). For `SAC`,
    whose critics are its own.

    The log-probability in its answers is the density of tanh(u), in [-1, 1], before it is
    scaled to the bounds. It answers no value.
    """

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, each with relu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(width < 1 for width in self.hidden):
            raise ConfigError(
                f"hidden = {list(self.hidden)}: every width must be at least 1; leave a layer out instead"
            )

    def shape(self, spaces: Spaces, inputs: int) -> MLPShape:
        """Return what its network is made of, whose inputs are so many numbers."""
        return MLPShape(1, inputs, self.hidden, 2 * prod(getattr(spaces.action, "shape", ())))

    def weights(self, spaces: Spaces) -> dict[str, Field]:
        width = ObservationEncoder(spaces.observation, "mlp").width
        return {name: Field(form, "float32") for name, form in self.shape(spaces, width).forms().items()}

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action`` and ``log_prob``."""
        return {**schema_of_space(spaces.action, "action"), "log_prob": Field((), "float32")}

    def bounds(self, spaces: Spaces) -> tuple[Any, Any]:
        """Return (centre, half) of the action's range, flattened. Raises `ConfigError`
        for a space without bounds."""
        space = spaces.action
        if (
            not isinstance(space, Box)
            or space.dtype not in ("float32", "float64", "float16")
            or not np.prod(space.shape)
        ):
            raise ConfigError(
                f"SquashedGaussian chooses in a Box of floats, and the action space is {space}; take a "
                "QNetwork with DQN for Discrete"
            )
        low, high = (bound.ravel().astype(np.float32) for bound in space.bounds())
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise ConfigError(
                "SquashedGaussian needs bounds on both sides of every element, low < high, and the action "
                f"space is {space}; give it some in a "
                "wrapper (gymnasium.wrappers.RescaleAction), or take ActorCritic with PPO"
            )
        return low / 2 + high / 2, high / 2 - low / 2

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy. Weights, and what it draws when it acts, come from two
        independent streams of `seed`."""
        from tidemill.nets.squashed_gaussian_policy import SquashedGaussianPolicy

        return SquashedGaussianPolicy(self, spaces, seed)
