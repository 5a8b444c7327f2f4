"""State-dependent exploration: the noise of an action is a function of the state that
stays the same for some steps. Raffin, Kober, Stulp 2021, "Smooth Exploration for Robotic
Reinforcement Learning" (gSDE).

z: the actor's last layer [n, features]; σ: standard deviations [features, actions]; ε:
standard normal matrices [n, features, actions], one for each row. Gradients do not go
through z.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.api.spaces import Box
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Field
from tidemill.nets.distributions import HALF_LOG_TWO_PI, DiagonalGaussian

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float32]

LEAST_VARIANCE = np.float32(1e-6)
"""Added to every variance, as in Stable-Baselines3."""
KEPT = 4096  # matrices that are not drawn again
STATE = {"state.noise": Field((2,), "int64")}
"""State of rows whose noise stays: see `NoiseMatrices`."""


def check_steps(steps: int) -> None:
    """Raise `ConfigError` where noise cannot stay for so many steps; 0: it does not."""
    if steps < 0:
        raise ConfigError(
            f"sde_steps = {steps}: noise stays for at least 1 step, 4 is usual; 0 draws it for each action "
            "alone"
        )


def noise_of(z: Floats, deviation: Floats, normal: Floats) -> Floats:
    """Return the noise of actions [n, actions]: (σ ε)ᵀ z (Raffin et al. 2021)."""
    noise: Floats = np.matmul(z[:, np.newaxis], deviation * normal)[:, 0]
    return noise


def variance_of(z: Floats, deviation: Floats) -> Floats:
    """Return the variance of actions [n, actions] over ε: Σ (σ z)² over the features
    (Raffin et al. 2021)."""
    variance: Floats = np.square(z) @ np.square(deviation)
    variance += LEAST_VARIANCE
    return variance


class NoiseMatrices:
    """The matrices ε of rows that act: each serves `steps` steps, or to the end of an
    episode. It follows from a seed; a row's state is [seed, steps that it has served], 0
    being no seed."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._matrices: dict[int, Floats] = {}

    def take(
        self, form: tuple[int, int], state: Array, deterministic: bool | Array, rng: Generator, out: Array
    ) -> Floats | None:
        """Return the matrices [n, *form] of rows by their `state` [n, 2], and write the
        next state into `out`; None, and nothing is drawn, where all are
        `deterministic`."""
        out[...] = state
        if deterministic is True:
            return None
        due = (state[:, 0] == 0) | (state[:, 1] >= self._steps)
        out[due, 0], out[due, 1] = rng.integers(1, 1 << 62, int(due.sum())), 0
        out[:, 1] += 1
        return np.stack([self._matrix(seed, form) for seed in out[:, 0].tolist()])

    def _matrix(self, seed: int, form: tuple[int, int]) -> Floats:
        """Return the matrix of a seed, always the same one."""
        found = self._matrices.get(seed)
        if found is None:
            if len(self._matrices) >= KEPT:
                self._matrices.clear()
            found = self._matrices[seed] = np.random.default_rng(seed).standard_normal(form, np.float32)
        return found


class StateDependentGaussian(DiagonalGaussian):
    """Independent normal distributions whose noise is drawn anew after `steps` steps, and
    where an episode begins; `features` of the network decide on it, which are to be told
    to `explore` before `sample`, and to `see` before `forward`."""

    def __init__(self, space: Box, steps: int) -> None:
        super().__init__(space)
        self._matrices = NoiseMatrices(steps)
        self._acting: tuple[Floats, Floats | None] = np.empty((0, 0), np.float32), None
        self._seen: Floats = np.empty((0, 0), np.float32)

    def explore(
        self, z: Floats, state: Array, deterministic: bool | Array, rng: Generator, out: Array
    ) -> None:
        """Take the noise of rows with `z`: see `NoiseMatrices.take`."""
        self._acting = z, self._matrices.take((z.shape[1], self.size), state, deterministic, rng, out)

    def see(self, z: Floats) -> None:
        """Take the features of the rows that `forward` is called with next."""
        self._seen = z

    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Array
    ) -> Floats:
        z, normal = self._acting
        deviation = np.exp(log_std)
        variance = variance_of(z, deviation)
        noise = np.zeros_like(variance) if normal is None else noise_of(z, deviation, normal)
        if not isinstance(deterministic, bool):
            noise[deterministic] = 0
        units = head.T + noise
        action[...] = (units * self.half + self.centre).reshape(len(units), *self._shape)
        return log_prob_of(noise, variance)

    def forward(self, head: Floats, log_std: Floats, action: Array) -> tuple[Floats, Floats]:
        deviation = np.exp(log_std)
        variance = variance_of(self._seen, deviation)
        units = ((action.reshape(len(variance), -1) - self.centre) / self.half).astype(np.float32)
        noise = units - head.T
        entropy: Floats = np.float32(0.5) * np.log(variance).sum(1)
        entropy += np.float32(self.size * (HALF_LOG_TWO_PI + 0.5))
        self._kept: Any = noise, variance, deviation
        return log_prob_of(noise, variance), entropy

    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        noise, variance, deviation = self._kept
        # with x the noise and v the variance: ∂ log p / ∂m = x / v;
        # ∂ log p / ∂v = ½ (x² / v - 1) / v;  ∂H / ∂v = ½ / v;  ∂v / ∂ log σ = 2 (z σ)²
        noise_over = noise / variance
        np.multiply(noise_over.T, of_log_prob, out=of_head)
        of_variance = (noise * noise_over - 1) * of_log_prob[:, np.newaxis]
        if of_entropy is not None:
            of_variance += of_entropy[:, np.newaxis]
        np.matmul(np.square(self._seen).T, of_variance / variance, out=of_log_std)
        of_log_std *= np.square(deviation)

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        raise _refusal()

    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: "Tensor"
    ) -> None:
        raise _refusal()


def _refusal() -> ConfigError:
    """Return what to raise where torch is to compute what numpy alone has."""
    return ConfigError(
        'state-dependent exploration is computed by numpy alone; take backend = "numpy", or sde_steps = 0'
    )


def log_prob_of(noise: Floats, variance: Floats) -> Floats:
    """Return log π [n] of actions that are `noise` [n, actions] off their means: a normal
    density with the `variance` over ε (Raffin et al. 2021)."""
    found: Floats = (np.square(noise) / variance + np.log(variance)).sum(1) * np.float32(-0.5)
    found -= np.float32(noise.shape[1] * HALF_LOG_TWO_PI)
    return found
