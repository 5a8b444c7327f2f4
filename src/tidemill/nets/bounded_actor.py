"""What policies have in common that press actions into their bounds by tanh: the base of
their configurations, and of what these describe, in numpy."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.api.spaces import Box, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.activations import Activation
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.mlp import MLP, Floats, MLPShape, check_hidden
from tidemill.nets.native_mlp import mlp
from tidemill.nets.replay_policy import ReplayNetwork, ReplayPolicy
from tidemill.nets.weights import Initialisation, views


@dataclass(frozen=True, kw_only=True)
class BoundedActor(ReplayNetwork):
    """The base of policies that act in bounded Box spaces by centre + half · tanh(u), u
    from a network that sees the flattened observation. Their critics belong to the
    algorithm that trains them, and are made as the settings here say."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    critic_hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers of the critics. None: as `hidden`."""
    activation: Activation = "relu"
    """Activation after each hidden layer, of the critics, too. gelu is its form with
    tanh."""
    initialisation: Initialisation = "orthogonal"
    """How weights begin: ``orthogonal`` with a gain for each layer, and biases of 0;
    ``uniform`` within ±1 / √inputs, as torch's layers do by default. The critics'
    begin likewise."""

    layer_norm: bool = False
    """See `ActorCritic.layer_norm`; of the critics, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hidden(self.hidden)
        check_hidden(self.critic_hidden or (), "critic_hidden")

    def encoder(self, spaces: Spaces) -> ObservationEncoder:
        """Return what flattens observations."""
        return ObservationEncoder(spaces.observation, "mlp", scaled_bytes=self.scaled_bytes)

    @property
    def outputs(self) -> int:
        """Numbers that the network's head tells of each element of the action."""
        return 1

    def shape(self, spaces: Spaces, inputs: int) -> MLPShape:
        """Return what its network is made of, whose inputs are so many numbers."""
        if not self.hidden and not self.critic_hidden:
            self.refuse_idle("activation", "without hidden layers")
            self.refuse_idle("layer_norm", "without hidden layers")
        return self._of(1, inputs, self.hidden, self.outputs * self.bounds(spaces)[0].size, 0.01)

    def critics(self, inputs: int) -> MLPShape:
        """Return what the two critics are made of, which see so many numbers."""
        hidden = self.hidden if self.critic_hidden is None else self.critic_hidden
        return self._of(2, inputs, hidden, 1, 1.0)

    def _of(self, towers: int, inputs: int, hidden: tuple[int, ...], outputs: int, gain: float) -> MLPShape:
        return MLPShape(
            towers, inputs, hidden, outputs, gain, self.activation, self.initialisation, self.layer_norm
        )

    def weights(self, spaces: Spaces) -> dict[str, Field]:
        encoder = self.encoder(spaces)
        forms = self.shape(spaces, encoder.width).forms()
        return {name: Field(form, "float32") for name, form in forms.items()} | self.moments(encoder)

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
                f"{type(self).__name__} chooses in a Box of floats, and the action space is {space}; take "
                "ActorCritic with PPO, or QNetwork with DQN for Discrete"
            )
        low, high = (bound.ravel().astype(np.float32) for bound in space.bounds())
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise ConfigError(
                f"{type(self).__name__} needs bounds on both sides of every element, low < high, and the "
                f"action space is {space}; give it some in a wrapper (gymnasium.wrappers.RescaleAction), or "
                "take ActorCritic with PPO"
            )
        return low / 2 + high / 2, high / 2 - low / 2


class BoundedPolicy(ReplayPolicy):
    """The base of policies that a `BoundedActor` describes."""

    def __init__(self, config: BoundedActor, spaces: Spaces, seed: int) -> None:
        weights_seed, acting_seed = np.random.SeedSequence(seed).spawn(2)
        self.centre, self.half = config.bounds(spaces)
        assert isinstance(spaces.action, Box)
        self._bounds = spaces.action.bounds()
        encoder = config.encoder(spaces)
        super().__init__(
            config.kernels(), encoder, config.normalises(encoder), np.random.default_rng(acting_seed)
        )
        self.actions, self._form = len(self.half), spaces.action.shape
        self.shape = config.shape(spaces, self.encoder.width)
        self.config = config
        self.flat = self.shape.begin(np.random.default_rng(weights_seed))
        """All weights, one after the other."""
        self._acting = self.network(self.flat)
        self._named |= views(self.flat, self.shape.forms())

    def network(self, flat: Floats) -> MLP:
        """Return a network of the policy's shape with the weights `flat`."""
        return mlp(self.shape, flat, self.kernels)

    @abstractmethod
    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None: ...

    def _noise(self, form: tuple[int, ...], deterministic: bool | Array) -> Floats:
        """Return normal noise [n, actions], 0 in rows that are asked for the mode."""
        if deterministic is True:
            return np.zeros(form, np.float32)
        noise = self._rng.standard_normal(form, np.float32)
        if deterministic is not False:
            noise *= ~np.broadcast_to(deterministic, form[0])[:, None]
        return noise

    def scaled(self, action: Floats) -> Array:
        """Return actions [n, actions] in [-1, 1] as the environment's [n, ...]."""
        scaled = (action * self.half + self.centre).reshape(len(action), *self._form)
        # rounding may lead out of them by a last bit
        found: Array = np.clip(scaled, *self._bounds)
        return found

    def unscaled(self, action: Array) -> Floats:
        """Return actions [n, ...] of the environment as [n, actions] in [-1, 1]."""
        flat: Floats = ((action.reshape(len(action), -1) - self.centre) / self.half).astype(
            np.float32, copy=False
        )
        return flat
