"""Policies whose actions are normally distributed and pressed into their bounds by tanh:
the configuration, and the policy that it describes, in numpy."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field
from tidemill.native.library import Kernels, address
from tidemill.nets.bounded_actor import BoundedActor, BoundedPolicy
from tidemill.nets.exploring_mlp import ExploringMLP, ExploringShape
from tidemill.nets.mlp import MLP, Floats, MLPShape
from tidemill.nets.state_dependent_exploration import STATE, NoiseMatrices, check_steps

LOG_STD = -20.0, 2.0
"""Least and greatest logarithm of the standard deviation; beyond them it is clipped, and
its gradient is 0, as in Haarnoja et al. 2018's own code."""
HALF_LOG_TWO_PI = np.float32(0.5 * np.log(2 * np.pi))
LOG_TWO = np.float32(np.log(2))


def _explores(network: Any) -> bool:
    return bool(network.sde_steps)


@dataclass(frozen=True, kw_only=True)
class SquashedGaussian(BoundedActor):
    """A squashed Gaussian acts in bounded Box spaces: centre + half · tanh(u), u normal,
    with mean and standard deviation from a network that sees the flattened observation
    (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C).
    It is for `SAC`, whose critics are its own.

    The log-probability in its answers is the density of tanh(u), in [-1, 1], before it is
    scaled to the bounds. It answers no value.
    """

    sde_steps: int = 0
    """Steps for which exploration's noise stays one function of what the actor's last
    layer tells (gSDE: Raffin et al. 2021, "Smooth Exploration for Robotic Reinforcement
    Learning"); a new one is drawn after them, and where an episode begins. Numpy computes
    the actor then, and the critics stay the native core's. 0: noise is drawn for each
    action alone, and the network tells its deviation."""
    log_std_init: float = acting(-3.0, _explores, "without sde_steps: the network tells deviations")
    """Natural logarithm of the deviation of the noise of each feature, at first; it is a
    weight, and learnt from there."""

    @property
    def beside_core(self) -> str | None:
        return f"sde_steps = {self.sde_steps}" if self.sde_steps else None

    @property
    def outputs(self) -> int:
        return 1 if self.sde_steps else 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.sde_steps)
        if not -20 <= self.log_std_init <= 20:
            raise ConfigError(
                f"log_std_init = {self.log_std_init}: e to that power is the first deviation; take one "
                "between -20 and 20, such as -3"
            )

    def shape(self, spaces: Spaces, inputs: int) -> MLPShape:
        plain = super().shape(spaces, inputs)
        if not self.sde_steps:
            return plain
        settings = {each.name: getattr(plain, each.name) for each in fields(plain)}
        return ExploringShape(**settings, log_std=self.log_std_init)

    def state(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``state.noise`` with `sde_steps`: what the noise follows from, and how
        long it has served."""
        return dict(STATE) if self.sde_steps else {}

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

    def __init__(self, config: SquashedGaussian, spaces: Spaces, seed: int) -> None:
        self._matrices = NoiseMatrices(config.sde_steps)
        super().__init__(config, spaces, seed)

    def network(self, flat: Floats) -> MLP:
        if isinstance(self.shape, ExploringShape):
            return ExploringMLP(self.shape, flat)
        return super().network(flat)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        inputs = self.features(observation)
        n = len(inputs)
        if n == 0:
            return
        mean, log_std, _ = split(self._acting.forward(inputs)[0])
        if isinstance(self._acting, ExploringMLP):
            form, next_state = (self._acting.features.shape[1], self.actions), out["state.noise"][:n]
            matrices = self._matrices.take(form, state["state.noise"], deterministic, self._rng, next_state)
            noise = self._acting.noise(matrices, deterministic) * np.exp(-log_std)
        else:
            noise = self._noise(mean.shape, deterministic)
        action, log_prob = squash(mean, log_std, noise)
        out["log_prob"][:n], out["action"][:n] = log_prob, self.scaled(action)


class DrawnActions(NamedTuple):
    """Actions drawn for n observations, in [-1, 1], and what their gradients need."""

    action: Floats
    log_prob: Floats
    spread: Floats
    """Standard deviation times noise."""
    uncut: Floats
    """1 where the log-deviation was not cut, else 0."""


def draw(head: Floats, noise: Floats, kernels: Kernels | None) -> DrawnActions:
    """Return what the network's outputs [n, 2 · actions] and normal `noise` [n, actions]
    make; by the native core where its `kernels` are given."""
    if kernels is None:
        mean, log_std, uncut = split(head)
        return DrawnActions(*squash(mean, log_std, noise), np.exp(log_std) * noise, uncut)
    n, actions = noise.shape
    # what each element adds to the log-probability, too
    parts, log_prob = np.empty((4, n, actions), np.float32), np.empty(n, np.float32)
    action, spread, uncut, _ = parts
    held = np.ascontiguousarray(head), np.ascontiguousarray(noise), *parts, log_prob
    kernels.squash(n, actions, *map(address, held))
    return DrawnActions(action, log_prob, spread, uncut)


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
