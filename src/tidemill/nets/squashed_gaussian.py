"""Policies whose actions are normally distributed and pressed into their bounds by tanh:
the configuration, and the policy that it describes, in numpy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.api.policy import Policy
from tidemill.api.spaces import Box, Spaces, schema_of_space
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.mlp import Floats, MLPShape, check_hidden
from tidemill.nets.native_mlp import mlp
from tidemill.nets.native_setting import NativeSetting
from tidemill.nets.weights import load_parameters, views

LOG_STD = -20.0, 2.0
"""Least and greatest logarithm of the standard deviation; beyond them it is clipped, and
its gradient is 0, as in Haarnoja et al. 2018's own code."""
HALF_LOG_TWO_PI = np.float32(0.5 * np.log(2 * np.pi))
LOG_TWO = np.float32(np.log(2))


@dataclass(frozen=True, kw_only=True)
class SquashedGaussian(NativeSetting):
    """A squashed Gaussian acts in bounded Box spaces: centre + half · tanh(u), u normal,
    with mean and standard deviation from a network of relu layers that sees the flattened
    observation (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications",
    appendix C). It is for `SAC`, whose critics are its own.

    The log-probability in its answers is the density of tanh(u), in [-1, 1], before it is
    scaled to the bounds. It answers no value.
    """

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, each with relu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hidden(self.hidden)

    def shape(self, spaces: Spaces, inputs: int) -> MLPShape:
        """Return what its network is made of, whose inputs are so many numbers."""
        return MLPShape(1, inputs, self.hidden, 2 * self.bounds(spaces)[0].size)

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
                f"space is {space}; give it some in a wrapper (gymnasium.wrappers.RescaleAction), or take "
                "ActorCritic with PPO"
            )
        return low / 2 + high / 2, high / 2 - low / 2

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy. Weights, and what it draws when it acts, come from two
        independent streams of `seed`."""
        return SquashedGaussianPolicy(self, spaces, seed)


class SquashedGaussianPolicy(Policy):
    """The policy that `SquashedGaussian` describes. Asked for the mode it takes tanh of
    the mean."""

    def __init__(self, config: SquashedGaussian, spaces: Spaces, seed: int) -> None:
        weights_seed, acting_seed = np.random.SeedSequence(seed).spawn(2)
        self.centre, self.half = config.bounds(spaces)
        assert isinstance(spaces.action, Box)
        self._bounds = spaces.action.bounds()
        self.encoder = ObservationEncoder(spaces.observation, "mlp")
        self.actions, self._form = len(self.half), spaces.action.shape
        self.shape = config.shape(spaces, self.encoder.width)
        self.hidden = config.hidden
        self.flat = self.shape.begin(np.random.default_rng(weights_seed))
        """All weights, one after the other."""
        self.kernels = config.kernels()
        self._acting = mlp(self.shape, self.flat, self.kernels)
        self._rng = np.random.default_rng(acting_seed)
        self._named: Arrays = dict(views(self.flat, self.shape.forms()))

    def inputs(self, observation: Arrays, of: str = "obs") -> Floats:
        """Return what the network takes of raw observations [n], whose leaves begin with
        `of`: a new array."""
        return self.encoder.flat(observation, of)

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        inputs = self.inputs(observation)
        n = len(inputs)
        if n == 0:
            return
        mean, log_std, _ = split(self._acting.forward(inputs)[0])
        if deterministic is True:
            noise = np.zeros_like(mean)
        else:
            noise = self._rng.standard_normal(mean.shape, np.float32)
            if deterministic is not False:
                noise *= ~np.broadcast_to(deterministic, n)[:, None]
        action, log_prob = squash(mean, log_std, noise)
        out["log_prob"][:n] = log_prob
        scaled = (action * self.half + self.centre).reshape(n, *self._form)
        out["action"][:n] = np.clip(scaled, *self._bounds)  # rounding may lead out of them by a last bit

    def unscaled(self, action: Array) -> Floats:
        """Return actions [n, ...] of the environment as [n, actions] in [-1, 1]."""
        flat: Floats = ((action.reshape(len(action), -1) - self.centre) / self.half).astype(
            np.float32, copy=False
        )
        return flat

    def parameters(self) -> Arrays:
        """Return the weights, as views."""
        return self._named

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        load_parameters(self._named, parameters)
        self.version = version


def split(head: Floats) -> tuple[Floats, Floats, Floats]:
    """Return (mean, log-deviation, 1 where that was not cut and else 0), each [n,
    actions], of the network's outputs [n, 2 · actions]."""
    mean, raw = np.split(head, 2, axis=1)
    log_std = np.clip(raw, *LOG_STD)
    return mean, log_std, (log_std == raw).astype(np.float32)


def squash(mean: Floats, log_std: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return (a = tanh(u) [n, actions], log π(a) [n]) of u = mean + e^log_std · noise.

    Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", eq. 26: log
    π(a) = log N(u) - Σ log(1 - tanh² u); the last term as 2 (log 2 - u - log(1 + e^-2u)),
    which is exact where tanh u is 1 already.
    """
    u = mean + np.exp(log_std) * noise
    normal = noise * noise * np.float32(-0.5) - log_std - HALF_LOG_TWO_PI
    log_slope = 2 * (LOG_TWO - u - np.logaddexp(np.float32(0), -2 * u))
    log_prob: Floats = (normal - log_slope).sum(1)
    return np.tanh(u), log_prob
