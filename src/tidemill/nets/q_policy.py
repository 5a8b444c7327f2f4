"""The policy that `QNetwork` describes: all in numpy, but for the convolutions of large
images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays
from tidemill.nets.encoders import channels_last
from tidemill.nets.q_function import QFunction, first_weights
from tidemill.nets.towers import Floats
from tidemill.nets.weights import load_parameters, views

if TYPE_CHECKING:
    from tidemill.nets.q_network import QNetwork

Integers = NDArray[np.int64]


class QPolicy(Policy):
    """Takes the best action, and with probability `epsilon` any that is allowed. A noisy
    network draws new noise for each call of `act`, the same for all of its rows; asked
    for the mode, it acts without noise and ε."""

    def __init__(self, config: "QNetwork", spaces: Spaces, seed: int) -> None:
        weights_seed, acting_seed = np.random.SeedSequence(seed).spawn(2)
        self.shape, self._encoder, self._image, self.mask = config.plan(spaces)
        self.config = config
        self.flat = first_weights(self.shape, np.random.default_rng(weights_seed))
        """All weights, one after the other."""
        self._acting = QFunction(self.shape, self.flat)
        self._rng = np.random.default_rng(acting_seed)
        self.epsilon: Floats = np.ones((), np.float32)
        """Probability of exploring. A part of the parameters: whoever trains the policy
        sets it."""
        self.support: Floats = np.linspace(
            config.least_return, config.greatest_return, config.atoms, dtype=np.float32
        )
        """The returns that `atoms` stand for."""
        forms = {name: form for name, (form, _) in self.shape.weights().items()}
        self._named: Arrays = dict(views(self.flat, forms))
        if self.shape.noise:
            self._named |= {
                f"deviation.{name}": part for name, part in views(self.flat[self.shape.size :], forms).items()
            }
        self._named["epsilon"] = self.epsilon

    def twin(self) -> QFunction:
        """Return a network of the same shape with a copy of the weights."""
        return QFunction(self.shape, self.flat.copy())

    def inputs(self, observation: Arrays, of: str = "obs") -> Array:
        """Return what the network takes of raw observations [n], whose leaves begin with
        `of`."""
        if self._image is not None:
            image = observation[of + self._image.removeprefix("obs")]
            image = channels_last(image, self.shape.image != image.shape[1:])
            if len(self.shape.convolutions) > 1:  # which take bytes
                return image
            found: Floats = image.astype(np.float32)
            if image.dtype == np.uint8:
                found /= 255
            return found
        return self._encoder.flat(observation, of)

    def expected(self, values: Floats) -> Floats:
        """Return the expected returns [n, actions] of what a network tells, [n, actions,
        atoms]."""
        if self.shape.atoms == 1:
            return values[..., 0]
        return softmax(values) @ self.support

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        inputs = self.inputs(observation)
        n = len(inputs)
        if n == 0:
            return
        forbidden = None if self.mask is None else self.mask.forbidden(observation)
        if isinstance(deterministic, np.ndarray) and not deterministic.any():
            deterministic = False
        if deterministic is not False:
            self._acting.still()
            best, value = self._best(inputs, forbidden)
            out["action"][:n], out["value"][:n], out["log_prob"][:n] = best, value, 0
            if isinstance(deterministic, bool):
                return
        rows: slice | Integers = (
            slice(n) if deterministic is False else np.flatnonzero(~np.broadcast_to(deterministic, n))
        )
        self._acting.draw_noise(self._rng)
        if deterministic is not False:
            inputs, forbidden = inputs[rows], None if forbidden is None else forbidden[rows]
        if len(inputs):
            best, value = self._best(inputs, forbidden)
            action, log_prob = self._explore(best, forbidden)
            out["action"][rows], out["value"][rows], out["log_prob"][rows] = action, value, log_prob

    def _best(self, inputs: Array, forbidden: NDArray[np.bool_] | None) -> tuple[Integers, Floats]:
        values = self.expected(self._acting.forward(inputs))
        if forbidden is not None:
            values = np.where(forbidden, -np.inf, values)
        best = values.argmax(1)
        return best, values[np.arange(len(best)), best]

    def _explore(self, best: Integers, forbidden: NDArray[np.bool_] | None) -> tuple[Integers, Floats]:
        n, epsilon = len(best), float(self.epsilon)
        if forbidden is None:
            drawn, allowed = self._rng.integers(self.shape.actions, size=n), np.full(n, self.shape.actions)
        else:
            drawn = np.where(forbidden, -1.0, self._rng.random(forbidden.shape)).argmax(1)
            allowed = np.maximum(np.count_nonzero(~forbidden, axis=1), 1)
        action = np.where(self._rng.random(n) < epsilon, drawn, best)
        with np.errstate(divide="ignore"):
            log_prob = np.log(epsilon / allowed + (1 - epsilon) * (action == best))
        return action, log_prob

    def parameters(self) -> Arrays:
        """Return the weights (and ``deviation.*``, where they are noisy) and ``epsilon``,
        as views."""
        return self._named

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        load_parameters(self._named, parameters)
        self.version = version


def softmax(values: Floats) -> Floats:
    """Return the probabilities along the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found
