"""A trained policy as a torch module, from observations to the actions that the
environment takes: to be exported, or to go on from in torch."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array
from tidemill.nets.actor_critic import OBSERVATION_CLIP, ActorCritic
from tidemill.nets.q_network import QNetwork
from tidemill.nets.recurrent import RecurrentActorCritic
from tidemill.nets.squashed_gaussian import SquashedGaussian


class TorchPolicy(nn.Module):
    """The likeliest action of each observation [n, ...]: the network with its trained
    weights, what normalises observations, and what scales actions."""

    def __init__(self, layers: nn.Sequential, mean: Tensor, factor: Tensor, limit: float) -> None:
        super().__init__()
        self.layers, self.limit = layers, limit
        self.register_buffer("mean", mean)
        self.register_buffer("factor", factor)

    def head(self, observation: Tensor) -> Tensor:
        """Return what the network gives, [n, outputs]: logits, values of actions, or
        means."""
        inputs = (observation.float() - cast(Tensor, self.mean)) * cast(Tensor, self.factor)
        return cast(Tensor, self.layers(inputs.clamp(-self.limit, self.limit).flatten(1)))


class ChoosingPolicy(TorchPolicy):
    """Of Discrete actions, the one of the largest number."""

    def __init__(self, *parts: Any, actions: int, start: int) -> None:
        super().__init__(*parts)
        self.actions, self.start = actions, start

    def forward(self, observation: Tensor) -> Tensor:
        """Return actions [n]."""
        return self.head(observation)[:, -self.actions :].argmax(-1) + self.start


class ContinuousPolicy(TorchPolicy):
    """Of Box actions, the mean, squashed by tanh or not, scaled and cut to the bounds."""

    def __init__(self, *parts: Any, space: Box, squashed: bool) -> None:
        super().__init__(*parts)
        low, high = (torch.from_numpy(np.array(bound, np.float32)) for bound in space.bounds())
        bounded = low.isfinite() & high.isfinite()
        self.shape, self.squashed = low.shape, squashed
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("centre", torch.where(bounded, low / 2 + high / 2, 0.0))
        self.register_buffer("half_range", torch.where(bounded, high / 2 - low / 2, 1.0))

    def forward(self, observation: Tensor) -> Tensor:
        """Return actions [n, ...]."""
        head = self.head(observation)[:, : self.shape.numel()].reshape(-1, *self.shape)
        action = (head.tanh() if self.squashed else head) * cast(Tensor, self.half_range) + cast(
            Tensor, self.centre
        )
        return action.clamp(cast(Tensor, self.low), cast(Tensor, self.high))


def torch_policy(config: PolicyConfig, spaces: Spaces, weights: Mapping[str, Array]) -> TorchPolicy:
    """Return the module of a policy with these weights. Raises `ConfigError` for one that
    remembers, is a class of one's own, or sees more than a vector or a flattened Box."""
    known = (ActorCritic, SquashedGaussian, QNetwork)
    plain = isinstance(config, known) and not isinstance(config, RecurrentActorCritic)
    special = ("cnn", "convolution", "deviation")
    layered = "hidden.0.weight" in weights and not any(name.startswith(special) for name in weights)
    if (
        not (plain and layered and isinstance(spaces.observation, Box))
        or getattr(config, "atoms", 1) > 1
        or not isinstance(spaces.action, (Box, Discrete))
    ):
        raise ConfigError(
            f"a {type(config).__name__} that sees {spaces.observation} and does {spaces.action} has no torch "
            "module yet; an ActorCritic, a SquashedGaussian and a QNetwork have one where they are hidden "
            "layers alone, without memory, images or noise, from a Box to a Box or Discrete"
        )
    activation = getattr(config, "activation", "relu")
    layers: list[nn.Module] = []
    count = sum(name.startswith("hidden.") and name.endswith(".weight") for name in weights)
    for number in range(count):
        weight, bias = weights[f"hidden.{number}.weight"][0], weights[f"hidden.{number}.bias"][0]
        layers += [_linear(weight.T, bias), nn.Tanh() if activation == "tanh" else nn.ReLU()]
    if isinstance(config, ActorCritic):
        layers.append(_linear(weights["actor.weight"], weights["actor.bias"]))
    else:
        head = weights["head.weight"]
        layers.append(_linear(head.reshape(head.shape[-2:]).T, weights["head.bias"]))
    shape = spaces.observation.shape
    mean, factor = np.zeros(shape), np.ones(shape)
    if spaces.observation.dtype == "uint8":
        factor /= 255
    if normalised := "observation.mean" in weights:
        mean = weights["observation.mean"].reshape(shape) / factor
        factor = factor / np.sqrt(weights["observation.variance"].reshape(shape) + 1e-8)
    limit = OBSERVATION_CLIP if normalised else np.inf
    parts = nn.Sequential(*layers), _tensor(mean), _tensor(factor), float(limit)
    if isinstance(spaces.action, Discrete):
        return ChoosingPolicy(*parts, actions=spaces.action.n, start=spaces.action.start)
    return ContinuousPolicy(*parts, space=spaces.action, squashed=isinstance(config, SquashedGaussian))


def _linear(weight: Array, bias: Array) -> nn.Linear:
    """Return a layer with copies of `weight` [outputs, inputs] and `bias`."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(_tensor(weight))
        layer.bias.copy_(_tensor(bias.reshape(-1)))
    return layer


def _tensor(array: Array) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array, np.float32))
