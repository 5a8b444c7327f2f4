"""Policies that act by the values of actions: the configuration, and the policy that it
describes, in numpy but for the convolutions of large images."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import Policy
from tidemill.api.spaces import Box, Discrete, Space, Spaces, leaves
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.activations import Activation
from tidemill.nets.encoders import ObservationEncoder, channels_last, image_of
from tidemill.nets.image_networks import NATURE
from tidemill.nets.masks import ActionMask, mask_of
from tidemill.nets.mlp import Floats, check_hidden
from tidemill.nets.native_q import NativeQ
from tidemill.nets.q_function import QFunction, Shape, first_weights
from tidemill.nets.replay_policy import ReplayNetwork, ReplayPolicy
from tidemill.nets.weights import Initialisation, valued_answer, views

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

KERNEL = 3
"""Width of the kernels of small images' convolution."""
LARGEST = 35
"""Height or width of small images, at most."""


_ONE_ATOM = "with atoms = 1: the head tells the expected return alone"


def _spread(network: Any) -> bool:
    return bool(network.atoms > 1)


@dataclass(frozen=True, kw_only=True)
class QNetwork(ReplayNetwork):
    """A Q-network computes the value of each Discrete action; its policy takes the best
    action, and with probability ε a random one (`DQN` sets ε and sends it with the
    weights). Every observation is flattened, but one that is a single image. A uint8
    image whose height and width are both at least 36 goes through the convolutions of
    Mnih et al. 2015, in torch, and takes hidden = (512,) to be that paper's network; a
    smaller one (a Box of three axes, such as MinAtar's [10, 10, channels]; channels are
    the shorter of first and last axis) through one convolution of 3 x 3, stride 1, as in
    Young and Tian 2019, "MinAtar".

    ε is a parameter of the network, so that actors explore as the version that they play.
    """

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers."""
    activation: Activation = "relu"
    """Activation after each hidden layer; gelu is its form with tanh. (Convolutions have
    relu.)"""
    initialisation: Initialisation = "orthogonal"
    """How weights begin: ``orthogonal`` with a gain for each layer, and biases of 0;
    ``uniform`` within ±1 / √inputs, as torch's layers do by default (as DQN in
    Stable-Baselines3 begins)."""
    layer_norm: bool = False
    """See `ActorCritic.layer_norm`. Convolutions have none."""
    filters: int = 16
    """Filters of the convolution of small images; 0 flattens these, too."""
    duelling: bool = True
    """Whether the head tells the state's value and each action's advantage (Wang et al.
    2016)."""
    noise: float = 0.0
    """σ₀ of noisy layers (Fortunato et al. 2018; 0.5 is usual): the noise of a layer's
    weights has the standard deviation σ₀ / √inputs at first, and learns its own from
    there. Convolutions have none. 0: no layer is noisy."""
    atoms: int = 1
    """Number of returns, evenly spaced from `least_return` to `greatest_return`, to
    each of which the head gives a probability (Bellemare et al. 2017, "A Distributional
    Perspective on Reinforcement Learning"; 51 is usual). 1: it tells the expected return
    alone."""
    least_return: float = acting(-10.0, _spread, _ONE_ATOM)
    """Return of the first of the `atoms`, discounted, in reward units."""
    greatest_return: float = acting(10.0, _spread, _ONE_ATOM)
    """Return of the last of the `atoms`."""
    quantiles: int = 0
    """Number of quantiles of each action's return, evenly spaced in probability, that the
    head tells for `QRDQN` (Dabney et al. 2018, "Distributional Reinforcement Learning
    with Quantile Regression"; 200 there). 0: it tells none."""
    action_mask: str | None = "action_mask"
    """See `ActorCritic.action_mask`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hidden(self.hidden)
        if self.filters < 0 or not (isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(
                f"filters = {self.filters} and noise = {self.noise} must be at least 0; 16 and 0 or 0.5 are "
                "usual"
            )
        if (
            self.atoms < 1
            or not self.least_return < self.greatest_return
            or not isfinite(self.greatest_return - self.least_return)
        ):
            raise ConfigError(
                f"atoms = {self.atoms} (at least 1) from least_return = {self.least_return} to "
                f"greatest_return = {self.greatest_return} cannot be; take 51 from the least to the greatest "
                "discounted return of an episode"
            )

        if self.quantiles < 0 or self.quantiles == 1 or (self.quantiles and self.atoms > 1):
            raise ConfigError(
                f"quantiles = {self.quantiles} with atoms = {self.atoms} cannot be: take at least 2 "
                "quantiles (25 to 200 are usual) with atoms = 1, or quantiles = 0"
            )

    @property
    def beside_core(self) -> str | None:
        idle = {"noise": 0, "quantiles": 0, "atoms": 1}
        added = {name: getattr(self, name) for name in idle if getattr(self, name) != idle[name]}
        return " and ".join(f"{name} = {value}" for name, value in added.items()) or None

    def weights(self, spaces: Spaces) -> dict[str, Field]:
        shape, encoder, image, _ = self.plan(spaces)
        fields = {name: Field(form, "float32") for name, (form, _) in shape.weights().items()}
        deviations = {f"deviation.{name}": field for name, field in fields.items()} if self.noise else {}
        moments = {} if image else self.moments(encoder)
        return {**fields, **deviations, **moments, "epsilon": Field((), "float32")}

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action``, ``log_prob`` (of the action, ε included) and ``value`` (of
        the best action, reward units)."""
        return valued_answer(spaces)

    def plan(self, spaces: Spaces) -> tuple[Shape, ObservationEncoder, str | None, ActionMask | None]:
        """Return the network's shape, what flattens observations, the leaf that is an
        image (None: none is), and the mask. Raises `ConfigError` where the settings do
        not go with `spaces`."""
        if not isinstance(spaces.action, Discrete) or spaces.action.n < 1:
            raise ConfigError(
                f"QNetwork chooses among Discrete actions, and the action space is {spaces.action}; take "
                "ActorCritic with PPO, or SAC with SquashedGaussian for a Box, or make the actions Discrete "
                "in a wrapper of the environment"
            )
        mask = mask_of(spaces, self.action_mask)
        seen = {
            name: leaf
            for name, leaf in leaves(spaces.observation, "obs").items()
            if mask is None or name not in mask.names
        }
        encoder = ObservationEncoder(
            spaces.observation, "mlp", mask.names if mask else (), scaled_bytes=self.scaled_bytes
        )
        (name, leaf), *others = seen.items()
        image, convolutions = (None, ()) if others else self._image(leaf)
        if others or small_image_of(leaf) is None or image_of(leaf) is not None:
            self.refuse_idle("filters", "on an observation that is no small image")
        if not self.hidden:
            self.refuse_idle("activation", "without hidden layers")
            self.refuse_idle("layer_norm", "without hidden layers")
        if image and self.normalise_observations:
            self.refuse_idle("normalise_observations", "on an image, which goes through convolutions")
        shape = Shape(
            encoder.width,
            image,
            convolutions,
            self.hidden,
            spaces.action.n,
            self.quantiles or self.atoms,
            self.duelling,
            self.noise,
            self.activation,
            self.initialisation,
            self.layer_norm,
        )
        return shape, encoder, name if image else None, mask

    def _image(self, space: Space) -> tuple[tuple[int, int, int] | None, tuple[tuple[int, int, int], ...]]:
        """Return [height, width, channels] of an observation that is an image, and the
        convolutions that it goes through; (None, ())."""
        large, small = image_of(space), small_image_of(space)
        if large is not None:
            return (large.height, large.width, large.channels), NATURE.layers
        return (small, ((self.filters, KERNEL, 1),)) if small is not None and self.filters else (None, ())

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy. Weights, and what it draws when it acts, come from two
        independent streams of `seed`."""
        return QPolicy(self, spaces, seed)


class QPolicy(ReplayPolicy):
    """The policy that `QNetwork` describes: it takes the best action, and with
    probability `epsilon` any that is allowed. A noisy network draws new noise for each
    call of `act`, the same for all of its rows; asked for the mode, it acts without noise
    and ε."""

    def __init__(self, config: QNetwork, spaces: Spaces, seed: int) -> None:
        weights_seed, acting_seed = np.random.SeedSequence(seed).spawn(2)
        self.shape, encoder, self._image, self.mask = config.plan(spaces)
        normalises = self._image is None and config.normalises(encoder)
        super().__init__(config.kernels(), encoder, normalises, np.random.default_rng(acting_seed))
        self.config = config
        self.flat = first_weights(self.shape, np.random.default_rng(weights_seed))
        """All weights, one after the other."""
        self._acting = self.function(self.flat)
        self._native: NativeQ | None = None
        if self.kernels is not None and self.shape.plain:
            self._native = NativeQ(self._acting, self.kernels)
        self.epsilon: Floats = np.ones((), np.float32)
        """Probability of exploring. A part of the parameters: whoever trains the policy
        sets it."""
        self.support: Floats = np.linspace(
            config.least_return, config.greatest_return, config.atoms, dtype=np.float32
        )
        """The returns that `atoms` stand for."""
        forms = {name: form for name, (form, _) in self.shape.weights().items()}
        self._named |= views(self.flat, forms)
        if self.shape.noise:
            self._named |= {
                f"deviation.{name}": part for name, part in views(self.flat[self.shape.size :], forms).items()
            }
        self._named["epsilon"] = self.epsilon

    def function(self, flat: Floats) -> QFunction:
        """Return a network of the policy's shape with the weights `flat`."""
        return QFunction(self.shape, flat, self.kernels)

    def inputs(self, observation: Arrays, of: str = "obs") -> Array:
        """Return what the network takes of raw observations [n], whose leaves begin with
        `of`."""
        if self._image is not None:
            image = observation[of + self._image.removeprefix("obs")]
            image = channels_last(image, self.shape.image != image.shape[1:])
            if len(self.shape.convolutions) > 1:  # which take bytes
                return image
            found: Floats = image.astype(np.float32)
            if self._image in self.encoder.scaled:
                found /= 255
            return found
        return self.features(observation, of)

    def expected(self, values: Floats) -> Floats:
        """Return the expected returns [n, actions] of what a network tells, [n, actions,
        atoms]."""
        if self.shape.atoms == 1:
            return values[..., 0]
        if self.config.quantiles:
            mean: Floats = values.mean(-1)
            return mean
        return softmax(values) @ self.support

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
        if not len(inputs):
            return
        drawn, chance = self._draw(len(inputs), forbidden)
        if self._native is not None:
            action, value, probability = self._native.explore(
                inputs, forbidden, drawn, chance, float(self.epsilon)
            )
        else:
            best, value = self._best(inputs, forbidden)
            action, probability = self._explore(best, forbidden, drawn, chance)
        with np.errstate(divide="ignore"):
            log_prob = np.log(probability)
        out["action"][rows], out["value"][rows], out["log_prob"][rows] = action, value, log_prob

    def _best(self, inputs: Array, forbidden: NDArray[np.bool_] | None) -> tuple[Integers, Floats]:
        values = self.expected(self._acting.forward(inputs))
        if forbidden is not None:
            values = np.where(forbidden, -np.inf, values)
        best = values.argmax(1)
        return best, values[np.arange(len(best)), best]

    def _draw(self, n: int, forbidden: NDArray[np.bool_] | None) -> tuple[Integers, Doubles]:
        """Return for each of n rows an action that is allowed, and a number from 0 to 1
        that says whether it is taken."""
        if forbidden is None:
            drawn = self._rng.integers(self.shape.actions, size=n)
        else:
            drawn = np.where(forbidden, -1.0, self._rng.random(forbidden.shape)).argmax(1)
        return drawn, self._rng.random(n)

    def _explore(
        self, best: Integers, forbidden: NDArray[np.bool_] | None, drawn: Integers, chance: Doubles
    ) -> tuple[Integers, Doubles]:
        """Return actions, and their probabilities."""
        epsilon = float(self.epsilon)
        allowed: int | Integers = self.shape.actions
        if forbidden is not None:
            allowed = np.maximum(np.count_nonzero(~forbidden, axis=1), 1)
        action = np.where(chance < epsilon, drawn, best)
        return action, epsilon / allowed + (1 - epsilon) * (action == best)


def softmax(values: Floats) -> Floats:
    """Return the probabilities along the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def small_image_of(space: Space) -> tuple[int, int, int] | None:
    """Return [height, width, channels] of a small image, else None."""
    if not isinstance(space, Box) or len(space.shape) != 3:
        return None
    first, middle, last = space.shape
    image = (first, middle, last) if last <= first else (middle, last, first)
    return image if min(image[:2]) >= KERNEL and max(image[:2]) <= LARGEST else None
