"""The network of a policy whose deviations follow from what its last layer tells (gSDE),
in numpy: Raffin, Kober, Stulp 2021, "Smooth Exploration for Robotic Reinforcement
Learning". Gradients go through these features, as in Stable-Baselines3's SAC."""

from dataclasses import dataclass

import numpy as np

from tidemill.core.schema import Array
from tidemill.nets.cells import Shapes
from tidemill.nets.mlp import MLP, Floats, MLPShape
from tidemill.nets.state_dependent_exploration import noise_of, variance_of
from tidemill.nets.weights import views

GREATEST_MEAN = 2.0
"""Means are clipped to ± this, before they are squashed, as in Stable-Baselines3's SAC:
features would grow, and with them the noise."""


@dataclass(frozen=True)
class ExploringShape(MLPShape):
    """An MLP whose head tells means, and deviations of the noise of each feature, whose
    logarithms begin at `log_std`."""

    log_std: float = -3.0

    def weights(self) -> Shapes:
        shapes = super().weights()
        width = shapes["head.weight"][0][1]
        return {**shapes, "log_std": ((width, self.outputs), 0)}

    def begin(self, rng: np.random.Generator) -> Floats:
        flat = super().begin(rng)
        views(flat, self.forms())["log_std"][...] = self.log_std
        return flat


class ExploringMLP(MLP):
    """Tells means m and logarithms of deviations, ½ log Σ (σ z)², of features z: [1, n, 2
    · actions]."""

    def _in_numpy(self) -> MLP:
        return ExploringMLP(self.shape, self.flat)

    @property
    def features(self) -> Floats:
        """What the last layer told in the last `forward`, [n, width]."""
        features: Floats = self._last[0]
        return features

    def noise(self, normal: Floats | None, deterministic: bool | Array) -> Floats:
        """Return the noise of the last `forward`'s rows, [n, actions], by the matrices
        `normal` [n, width, actions]; 0 where it is `deterministic`."""
        if normal is None:
            return np.zeros((len(self.features), self.shape.outputs), np.float32)
        found = noise_of(self.features, np.exp(self.weights["log_std"]), normal)
        if not isinstance(deterministic, bool):
            found[np.broadcast_to(deterministic, len(found))] = 0
        return found

    def _head(self) -> Floats:
        self._means = means = super()._head()
        self._variance = variance_of(self.features, np.exp(self.weights["log_std"]))
        log_std = np.float32(0.5) * np.log(self._variance)
        return np.concatenate([means.clip(-GREATEST_MEAN, GREATEST_MEAN), log_std[np.newaxis]], 2)

    def _differentiate_head(self, of_out: Floats, gradient: dict[str, Floats] | None) -> Floats:
        of_mean, of_log_std = np.split(of_out, 2, axis=2)
        of_mean = of_mean * (np.abs(self._means) < GREATEST_MEAN)
        of_last = super()._differentiate_head(of_mean, gradient)
        # of ½ log v, v = Σ (σ z)²: (σ z)² / v by log σ, and σ² z / v by z
        shares, square = of_log_std[0] / self._variance, np.exp(2 * self.weights["log_std"])
        of_last[0] += self.features * (shares @ square.T)
        if gradient is not None:
            np.matmul(np.square(self.features).T, shares, out=gradient["log_std"])
            gradient["log_std"] *= square
        return of_last
