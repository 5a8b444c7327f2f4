"""The built-in policy: an actor and a critic, with an MLP or Mnih et al.'s convolutions:
the configuration, and the policy that it describes. Its networks are `numpy_actor_critic`
and `torch_actor_critic`; only the second imports torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Space, Spaces, leaves
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.activations import Activation
from tidemill.nets.cells import Memory
from tidemill.nets.distributions import Distribution, distribution_of
from tidemill.nets.encoders import BytesSetting, ObservationEncoder, channels_last
from tidemill.nets.image_networks import IMAGE_NETWORKS, NATURE
from tidemill.nets.masks import mask_of
from tidemill.nets.mlp import Floats, check_hidden
from tidemill.nets.native_actor_critic import NativeActorCritic
from tidemill.nets.native_setting import NUMPY, NativeSetting
from tidemill.nets.normaliser import ObservationNormaliser, RunningMoments
from tidemill.nets.numpy_actor_critic import NumpyActorCritic
from tidemill.nets.state_dependent_exploration import STATE, StateDependentGaussian, check_steps
from tidemill.nets.trainable import Network, TrainablePolicy
from tidemill.nets.weights import ActorCriticShape, Initialisation, valued_answer


def check_deviation(policy: PolicyConfig, spaces: Spaces) -> None:
    """Raise `ConfigError` for a `log_std_init` where actions have no deviation."""
    if not any(isinstance(leaf, Box) for leaf in leaves(spaces.action, "action").values()):
        policy.refuse_idle("log_std_init", "on actions without a Box: they have no deviation")


@dataclass(frozen=True, kw_only=True)
class ActorCritic(NativeSetting, BytesSetting):
    """An actor-critic is a feed-forward policy with a value head, for every observation
    space and for Discrete, MultiDiscrete, MultiBinary and float Box actions, also as the
    parts of a Dict or Tuple, however nested. Parts are drawn independently of each other,
    so that their log-probabilities add up, and so do their entropies.

    Images go through convolutions, those of Mnih et al. 2015 (*Nature*) unless
    `encoder` names others, everything else flattened (integers as one-hot) through the
    hidden layers; an observation that has both joins them before the hidden layers. One
    that is a single image has no hidden layers.
    """

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""
    critic_hidden: tuple[int, ...] | None = None
    """Widths of the critic's hidden layers. None: as `hidden`."""
    activation: Activation = "tanh"
    """Activation after each hidden layer; gelu is its form with tanh. (Convolutions have
    relu.)"""
    initialisation: Initialisation = "orthogonal"
    """How weights begin: ``orthogonal`` with a gain for each layer, and biases of 0;
    ``uniform`` within ±1 / √inputs, as torch's layers do by default (Stable-Baselines3's
    ``ortho_init=False``; recurrent cells are orthogonal all the same)."""
    layer_norm: bool = False
    """Whether each hidden layer's sums are brought to mean 0 and deviation 1 within a
    row, and then scaled and shifted as is learnt, before the activation (Ba et al. 2016,
    "Layer Normalization"). Convolutions, heads and cells have none. The native core
    computes it for DQN, SAC and TD3; for an actor-critic numpy does."""
    encoder: Literal["auto", "mlp", "nature_cnn", "impala_cnn"] = "auto"
    """``auto`` takes the convolutions for uint8 Boxes of two or three axes of which two
    are at least 36, and flattens the rest; ``mlp`` flattens all; ``nature_cnn`` is
    ``auto`` that refuses an observation without images; ``impala_cnn`` refuses it, too,
    and takes images through the deeper, residual network of Espeholt et al. 2018
    ("IMPALA", figure 3), which costs several times as much."""
    convolutions: Literal["auto", "float32", "bfloat16"] = "float32"
    """What the convolutions compute in; weights, heads and Adam are float32 always.
    bfloat16 is up to twice as fast on a CPU that supports it, and slower on some; on one
    that does not, a run that names it is refused (one on a GPU, too, whose actors play on
    such a CPU), and playing what it trained is not.
    With ``auto`` the faster one is measured before processes start, and written into the
    run's configuration; without a measurement it is bfloat16 where that is there."""
    shared_critic: bool | None = None
    """Whether the critic shares all layers but its head with the actor. None: with images
    yes, unless the critic sees more; else no."""
    normalise_observations: bool | Literal["numbers"] | None = "numbers"
    """Whether flattened Boxes are brought to mean 0 and standard deviation 1, clipped at
    ±10, by statistics of the trained rows. ``numbers``: yes where the observation has
    such, and not of truth values alone (LunarLander-v3 returns 180 after 200 k env steps,
    and -10 without); None: yes where it has any."""
    log_std_init: float = 0.0
    """Natural logarithm of the standard deviation that Box actions are drawn with at
    first, in units of half the action's range: 0 is half the range, -0.7 a quarter. It is
    a weight, and learnt from there."""
    sde_steps: int = 0
    """Steps for which the noise of Box actions stays one function of what the actor's
    last layer tells (gSDE: Raffin et al. 2021, "Smooth Exploration for Robotic
    Reinforcement Learning"); a new one is drawn after them, and where an episode begins.
    `log_std_init` is of each feature's deviation then. Numpy computes it. 0: noise is
    drawn for each action alone."""
    action_mask: str | None = "action_mask"
    """Part of the observation that says which actions are allowed: bool or int8 [n] for
    Discrete(n), [sum of nvec] for MultiDiscrete. Of actions in a Dict or Tuple it is one
    array, too, with those of all discrete leaves side by side, or a Dict (Tuple) with the
    keys (places) of the leaves that have a mask. What is 0 there is never drawn; the
    network does not see the part. An observation without it allows everything, but a part
    of another name than this usual one must be there. None: there is no such part."""
    critic_only: tuple[str, ...] = ("global_state",)
    """Parts of the observation that the critic alone sees (a centralised critic: Yu et
    al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games"): the
    actor does not depend on them in any way. ``global_state`` is passed over where an
    observation lacks it; parts of other names must be there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hidden(self.hidden)
        check_hidden(self.critic_hidden or (), "critic_hidden")
        check_steps(self.sde_steps)
        if not isfinite(self.log_std_init) or abs(self.log_std_init) > 20:
            raise ConfigError(
                f"log_std_init = {self.log_std_init}: e to that power is the first deviation; take one "
                "between -20 and 20, such as 0"
            )
        if self.action_mask in self.critic_only:
            raise ConfigError(
                f'"{self.action_mask}" is named by action_mask and by critic_only; a mask is for the actor: '
                "take it out of critic_only"
            )

    @property
    def in_core(self) -> bool:
        return self.memory is None and super().in_core

    @property
    def beyond_core(self) -> str | None:
        return (
            f"sde_steps = {self.sde_steps}" if self.sde_steps else "layer_norm" if self.layer_norm else None
        )

    @property
    def undecided(self) -> bool:
        return super().undecided or self.convolutions == "auto"

    def alternatives(self, spaces: Spaces) -> Sequence[Self]:
        if not self.observation_encoder(spaces).images:
            return super().alternatives(spaces)
        if self.convolutions != "auto":
            return (self,)
        from tidemill.nets.torch_copies import has_bfloat16

        return [self.replace(convolutions=kind) for kind in ("float32", "bfloat16")[: 1 + has_bfloat16()]]

    def to_play(self) -> Self:
        played = super().to_play()
        return played.replace(convolutions="auto") if self.convolutions == "bfloat16" else played

    def observation_encoder(self, spaces: Spaces) -> ObservationEncoder:
        """Return what flattens the observations. Raises `ConfigError` where the settings
        do not go with `spaces`."""
        mask = mask_of(spaces, self.action_mask)
        encoder = ObservationEncoder(
            spaces.observation, self.encoder, mask.names if mask else (), self.critic_only, self.scaled_bytes
        )
        check_deviation(self, spaces)
        if not encoder.images:
            self.refuse_idle("convolutions", "on an observation without images")
        if encoder.images and not encoder.width:
            self.refuse_idle(
                "hidden", "on an observation that is images alone: their convolutions lead to the heads"
            )
        if encoder.images or self.memory is not None:
            self.refuse_idle("native", "with images or a memory, which the native core does not compute")
        if self.beyond_core:
            self.refuse_idle("native", f"with {self.beyond_core}, which the native core does not compute")
        self._check_exploration_and_critic(encoder, spaces)
        if not self._layers(encoder) and not self.critic_hidden:
            self.refuse_idle("activation", "without hidden layers")
            self.refuse_idle("layer_norm", "without hidden layers")
        if self.normalise_observations is True and not encoder.boxes:
            self.refuse_idle("normalise_observations", "on an observation without flattened Boxes")
        if encoder.critic_only:
            names = ", ".join(encoder.critic_only)
            if self.shared_critic:
                raise ConfigError(
                    f"shared_critic = True, but only the critic is to see {names}; take shared_critic = "
                    "False, or take that part out of critic_only"
                )
            if not self.hidden:
                raise ConfigError(
                    f"hidden = [], but only the critic is to see {names}, which takes a hidden layer; take "
                    "hidden = [64] or the like"
                )
        return encoder

    def _check_exploration_and_critic(self, encoder: ObservationEncoder, spaces: Spaces) -> None:
        """Raise `ConfigError` where `sde_steps` or `critic_hidden` cannot act."""
        if not isinstance(spaces.action, Box):
            self.refuse_idle(
                "sde_steps", f"on actions that are no Box by itself, and they are {spaces.action}"
            )
        if encoder.images or self.memory is not None:
            self.refuse_idle("sde_steps", "with images or a memory, which it is not written for")
        if self.towers(encoder) == 1:
            self.refuse_idle("critic_hidden", "where the critic shares the actor's layers (shared_critic)")
        if self.memory is not None:
            self.refuse_idle("critic_hidden", "with a memory: actor's and critic's cells are alike")
        if encoder.images and not encoder.width:
            self.refuse_idle("critic_hidden", "on an observation that is images alone")

    def towers(self, encoder: ObservationEncoder) -> int:
        """Return 2, or 1 where the critic shares all layers but its head with the
        actor."""
        shared = self.shared_critic
        if shared is None:
            shared = bool(encoder.images) and not encoder.critic_only
        return 1 if shared else 2

    @property
    def memory(self) -> Memory | None:
        """The cell between hidden layers and heads, in a recurrent policy."""
        return None

    def shape(self, spaces: Spaces) -> ActorCriticShape:
        """Return what the network is made of. Raises `ConfigError` where the settings do
        not go with `spaces`."""
        encoder = self.observation_encoder(spaces)
        return ActorCriticShape(
            encoder,
            self._distribution(spaces.action),
            self.towers(encoder),
            self._layers(encoder),
            None if self.critic_hidden == self.hidden else self.critic_hidden,
            self.activation,
            self.convolutions,
            self.memory,
            IMAGE_NETWORKS.get(self.encoder, NATURE),
            self.layer_norm,
        )

    def _distribution(self, space: Space) -> Distribution:
        if self.sde_steps and isinstance(space, Box):
            distribution_of(space)  # which refuses what cannot be
            return StateDependentGaussian(space, self.sde_steps)
        return distribution_of(space)

    def state(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``state.noise`` with `sde_steps`: what the noise follows from, and how
        long it has served."""
        return dict(STATE) if self.sde_steps else {}

    def _layers(self, encoder: ObservationEncoder) -> tuple[int, ...]:
        """Return the widths of the hidden layers that there are."""
        return () if encoder.images and not encoder.width else self.hidden

    def normalises(self, encoder: ObservationEncoder) -> bool:
        """Return whether observations are normalised."""
        wanted = self.normalise_observations
        if wanted == "numbers":
            return encoder.numbers
        return encoder.boxes if wanted is None else wanted and encoder.width > 0

    def weights(self, spaces: Spaces) -> dict[str, Field]:
        shape = self.shape(spaces)
        fields = {name: Field(form, "float32") for name, form in shape.forms().items() if prod(form)}
        if self.normalises(shape.encoder):
            fields |= RunningMoments.fields("observation", (shape.encoder.width,))
        return fields | RunningMoments.fields("returns", ())

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action`` (its space's own field; of a Dict or Tuple one for each leaf,
        ``action.club``), ``log_prob`` of all of it and ``value`` (float32, value in
        reward units)."""
        return valued_answer(spaces)

    def build(self, spaces: Spaces, seed: int) -> TrainablePolicy:
        """Return the policy. Weights and samples come from two independent streams of
        `seed`."""
        return self.build_on("cpu", spaces, seed)

    def build_on(self, device: str, spaces: Spaces, seed: int) -> TrainablePolicy:
        """Return the policy; its first weights are the same on every device. An MLP on a
        CPU is numpy's (the native core's where it is asked for), everything else torch's.
        """
        backend = "torch"
        if device == "cpu" and not self.observation_encoder(spaces).images:
            backend = "native" if self.kernels() is not None else "numpy"
        elif self.sde_steps:
            raise ConfigError(
                f'sde_steps = {self.sde_steps} is computed by numpy, not on the device "{device}"; '
                'take device = "cpu", or sde_steps = 0'
            )
        return ActorCriticPolicy(self, spaces, seed, backend, device)


def _torch_network(config: ActorCritic, shape: ActorCriticShape, flat: Floats, device: str) -> Network:
    from tidemill.nets.torch_actor_critic import TorchActorCritic

    return TorchActorCritic(shape, flat, device)


def _native_network(config: ActorCritic, shape: ActorCriticShape, flat: Floats, device: str) -> Network:
    kernels = config.kernels()
    assert kernels is not None
    return NativeActorCritic(shape, flat, kernels)


BACKENDS: dict[str, Callable[[ActorCritic, ActorCriticShape, Floats, str], Network]] = {
    "numpy": lambda config, shape, flat, device: NumpyActorCritic(shape, flat),
    "native": _native_network,
    "torch": _torch_network,
}
"""What makes a network of a configuration, the shape that follows from it, its first
weights (one after the other) and the name of a device. A new backend is a line here, and
chosen in `ActorCritic.build_on`."""


class ActorCriticPolicy(TrainablePolicy):
    """The policy that `ActorCritic` describes; `distributions` says what an action and
    its log-probability are."""

    def __init__(
        self, config: ActorCritic, spaces: Spaces, seed: int, backend: str = "numpy", device: str = "cpu"
    ) -> None:
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        shape = config.shape(spaces)
        self.encoder = shape.encoder
        flat = shape.begin(np.random.default_rng(weights_seed), config.log_std_init, config.initialisation)
        self._observation = (
            ObservationNormaliser(self.encoder.normalised) if config.normalises(self.encoder) else None
        )
        self._features: Floats = np.empty((0, self.encoder.width), np.float32)  # of acting
        super().__init__(
            BACKENDS[backend](config, shape, flat, device),
            mask_of(spaces, config.action_mask),
            np.random.default_rng(sampling_seed),
        )
        self.computed_by = {"numpy": NUMPY, "torch": f"torch ({device.partition(':')[0]})"}.get(backend, "")
        if isinstance(self.network, NativeActorCritic):
            self.computed_by = self.network.kernels.instruction_set

    def prepare(self, observation: Arrays) -> Arrays:
        """Return ``features`` (float32 [n, width], flattened and normalised) when
        anything is flattened, the images [n, height, width, channels] (to a GPU as they
        were observed), and where there is a mask ``forbidden`` (bool [n, actions])."""
        n = len(observation[self.encoder.names[0]])
        return self._prepare(observation, np.empty((n, self.encoder.width), np.float32))

    def _prepare_to_act(self, observation: Arrays, n: int) -> Arrays:
        if n != len(self._features):
            self._features = np.empty((n, self.encoder.width), np.float32)
        return self._prepare(observation, self._features)

    def _prepare(self, observation: Arrays, features: Floats) -> Arrays:
        inputs: Arrays = {}
        for name, image in self.encoder.images.items():
            seen, as_seen = observation[name], self.network.images_as_seen
            inputs[name] = seen if as_seen else channels_last(seen, image.channels_first)
        if self.mask is not None:
            inputs["forbidden"] = self.mask.forbidden(observation)
        if self.encoder.width:
            self.encoder.encode(observation, features)
            if self._observation is not None:
                self._observation.apply(features)
            inputs["features"] = features
        return inputs

    def _refresh(self) -> None:
        super()._refresh()
        if self._observation is not None:
            self._observation.refresh()

    def _named(self) -> Arrays:
        named = super()._named()
        return named if self._observation is None else named | self._observation.moments.parameters()

    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        of_returns = super().moments(observation, returns)
        if self._observation is None:
            return of_returns
        features = self.encoder.flat(observation) if observation else None
        return np.concatenate([of_returns, self._observation.moments.moments(features)])

    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        if self._observation is not None:
            self._observation.moments.fold(moments[3:])
        super().fold_moments(moments)
