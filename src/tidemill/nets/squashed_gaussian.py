"""Policies whose actions are normally distributed and pressed into their bounds by tanh:
the configuration, and the policy that it describes, in numpy."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.bounded_actor import BoundedActor, BoundedPolicy
from tidemill.nets.mlp import Floats

LOG_STD = -20.0, 2.0
"""Least and greatest logarithm of the standard deviation; beyond them it is clipped, and
its gradient is 0, as in Haarnoja et al. 2018's own code."""
HALF_LOG_TWO_PI = np.float32(0.5 * np.log(2 * np.pi))
LOG_TWO = np.float32(np.log(2))


@dataclass(frozen=True, kw_only=True)
class SquashedGaussian(BoundedActor):
    """A squashed Gaussian acts in bounded Box spaces: centre + half · tanh(u), u normal,
    with mean and standard deviation from a network that sees the flattened observation
    (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C).
    It is for `SAC`, whose critics are its own.

    The log-probability in its answers is the density of tanh(u), in [-1, 1], before it is
    scaled to the bounds. It answers no value.
    """

    outputs: ClassVar[int] = 2

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action`` and ``log_prob``."""
        return {**schema_of_space(spaces.action, "action"), "log_prob": Field((), "float32")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy. Weights, and what it draws when it acts, come from two
        independent streams of `seed`."""
        return SquashedGaussianPolicy(self, spaces, seed)


class SquashedGaussianPolicy(BoundedPolicy):
    """The policy that `SquashedGaussian` describes. Asked for the mode it takes tanh of
    the mean."""

    config: SquashedGaussian

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        inputs = self.features(observation)
        n = len(inputs)
        if n == 0:
            return
        mean, log_std, _ = split(self._acting.forward(inputs)[0])
        action, log_prob = squash(mean, log_std, self._noise(mean.shape, deterministic))
        out["log_prob"][:n], out["action"][:n] = log_prob, self.scaled(action)


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
