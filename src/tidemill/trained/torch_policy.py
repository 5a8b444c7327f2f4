"""A trained policy as a torch module, from observations to the actions that the
environment takes: to be exported, or to go on from in torch."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, takewhile
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import (
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    Spaces,
    Tuple,
    field_of,
    flat_width,
    leaves,
)
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array
from tidemill.envs.spaces import nest, paths
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.bounded_actor import BoundedActor
from tidemill.nets.cells import LSTM
from tidemill.nets.exploring_mlp import GREATEST_MEAN
from tidemill.nets.image_networks import ImageNetwork, PlainConvolutions
from tidemill.nets.layer_norm import EPSILON
from tidemill.nets.masks import ActionMask, mask_of
from tidemill.nets.normaliser import OBSERVATION_CLIP
from tidemill.nets.q_function import Shape
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}
"""Those of `activations`."""

State = Tensor | tuple[Tensor, Tensor]
"""What a cell keeps, [n, width]: of a GRU h, of an LSTM (h, c), as in torch."""
Weights = Mapping[str, Array]
Path = tuple[str | int, ...]


class TorchPolicy(nn.Module):
    """The likeliest action of each observation: the actor with its trained weights, what
    normalises observations and forbids actions, and what scales actions.

    cell: the recurrent cell; None in a feed-forward policy
    ways: the keys that lead to each leaf of an observation
    """

    def __init__(
        self,
        encoder: "Encoder",
        layers: nn.Sequential,
        cell: nn.GRUCell | nn.LSTMCell | None,
        outputs: nn.Module,
        mask: ActionMask | None,
        ways: Mapping[str, Path],
        choose: nn.Module,
    ) -> None:
        super().__init__()
        self.encoder, self.layers, self.cell = encoder, layers, cell
        self.outputs, self.choose = outputs, choose
        self._mask, self._ways = mask, ways

    def head(self, observation: Any, state: State | None = None) -> tuple[Tensor, State | None]:
        """Return what the network gives, [n, outputs] (logits, values of actions, or
        means), and the state after it."""
        x = self.layers(self.encoder(observation))
        if self.cell is not None:
            state = self.cell(x, state)
            x = state if isinstance(state, Tensor) else cast(tuple[Tensor, Tensor], state)[0]
        head = cast(Tensor, self.outputs(x))
        if self._mask is not None:
            parts = {name: _part(observation, self._ways[name]) for name in self._mask.names}
            head = self._mask.taken_out(head, parts)
        return head, state

    def forward(self, observation: Any, state: State | None = None) -> Any:
        """Return actions [n, ...] of observations [n, ...], in the form of their space;
        of a recurrent policy also the state after them, to be handed in with the
        next ones. None, and rows of zeros, begin an episode."""
        head, state = self.head(observation, state)
        action = self.choose(head)
        return action if self.cell is None else (action, state)


class Encoder(nn.Module):
    """What the layers see: images through convolutions of their own, all else flattened
    (integers as one-hot) and normalised."""

    def __init__(
        self,
        images: list[tuple[Path, bool, nn.Module]],
        flattened: list[tuple[Path, Space, bool]],
        mean: Array,
        factor: Array,
        limit: float,
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions for _, _, convolutions in images)
        self._images = [(path, channels_first) for path, channels_first, _ in images]
        self._flattened, self._limit = flattened, limit
        self.register_buffer("mean", _tensor(mean))
        self.register_buffer("factor", _tensor(factor))

    def forward(self, observation: Any) -> Tensor:
        """Return [n, width] of observations [n, ...]."""
        parts = []
        for (path, channels_first), convolutions in zip(self._images, self.convolutions, strict=True):
            image = _part(observation, path)
            image = image.unsqueeze(1) if image.ndim == 3 else image
            parts.append(convolutions(image if channels_first else image.permute(0, 3, 1, 2)))
        if self._flattened:
            rows = torch.cat(
                [_flat(_part(observation, path), leaf, scaled) for path, leaf, scaled in self._flattened], -1
            )
            rows = (rows - cast(Tensor, self.mean)) * cast(Tensor, self.factor)
            parts.append(rows.clamp(-self._limit, self._limit))
        return torch.cat(parts, -1)


def _part(observation: Any, path: Path) -> Tensor:
    for key in path:
        observation = observation[key]
    return cast(Tensor, observation)


def _flat(value: Tensor, leaf: Space, scaled: bool) -> Tensor:
    """Return the columns of a leaf [n, ...], as `ObservationEncoder` has them."""
    match leaf:
        case Discrete():
            return functional.one_hot(value.long() - leaf.start, leaf.n).float()
        case MultiDiscrete():
            branches = zip(value.long().unbind(-1), leaf.nvec, strict=True)
            return torch.cat([functional.one_hot(branch, n) for branch, n in branches], -1).float()
    flat = value.float().flatten(1)
    return flat / 255 if scaled else flat


class Divided(nn.Module):
    """Divides the pixels of images by a number: 255, or 1."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self._divisor = divisor

    def forward(self, image: Tensor) -> Tensor:
        """Return float32 of the same shape."""
        return image.float() / self._divisor


class ResidualBlock(nn.Module):
    """Adds to its input what two convolutions make of it, each behind a relu."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, channels, height, width] of the same."""
        return x + cast(Tensor, self.inner(x))


class FlattenChannelsLast(nn.Module):
    """Flattens features as the networks here do: the channels of a place side by side."""

    def forward(self, features: Tensor) -> Tensor:
        """Return [n, height · width · channels] of [n, channels, height, width]."""
        return features.permute(0, 2, 3, 1).flatten(1)


class ActionValues(nn.Module):
    """The expected returns of actions: of a head that may spread them over atoms or
    quantiles, and tell the state's value and each action's advantage."""

    def __init__(self, head: nn.Linear, config: QNetwork) -> None:
        super().__init__()
        self.head, self.duelling, self.quantiles = head, config.duelling, config.quantiles
        self.outputs = self.quantiles or config.atoms
        self.register_buffer(
            "support", torch.linspace(config.least_return, config.greatest_return, config.atoms)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, actions]."""
        values: Tensor = self.head(x).unflatten(-1, (-1, self.outputs))
        if self.duelling:
            advantage = values[:, 1:]
            values = values[:, :1] + advantage - advantage.mean(1, keepdim=True)
        if self.quantiles or self.outputs == 1:
            return values.mean(-1)
        return torch.matmul(values.softmax(-1), cast(Tensor, self.support))


class Largest(nn.Module):
    """Chooses of each branch's actions the one of the largest number."""

    def __init__(self, space: Discrete | MultiDiscrete) -> None:
        super().__init__()
        self._space = space

    def forward(self, head: Tensor) -> Tensor:
        """Return actions [n], or [n, branches]."""
        if isinstance(self._space, Discrete):
            return head.argmax(-1) + self._space.start
        return torch.stack([part.argmax(-1) for part in torch.split(head, list(self._space.nvec), -1)], -1)


class LikelyBits(nn.Module):
    """Chooses of each bit the likelier value."""

    def forward(self, head: Tensor) -> Tensor:
        """Return int8 [n, bits]."""
        return (head > 0).to(torch.int8)


class ScaledMean(nn.Module):
    """Scales means, squashed by tanh or not, to a Box, and cuts them to its bounds."""

    def __init__(self, space: Box, squashed: bool) -> None:
        super().__init__()
        low, high = (torch.from_numpy(np.array(bound, np.float32)) for bound in space.bounds())
        bounded = low.isfinite() & high.isfinite()
        self._shape, self._squashed = low.shape, squashed
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("centre", torch.where(bounded, low / 2 + high / 2, 0.0))
        self.register_buffer("half_range", torch.where(bounded, high / 2 - low / 2, 1.0))

    def forward(self, head: Tensor) -> Tensor:
        """Return actions [n, ...]."""
        head = head.reshape(-1, *self._shape)
        action = (head.tanh() if self._squashed else head) * cast(Tensor, self.half_range) + cast(
            Tensor, self.centre
        )
        return action.clamp(cast(Tensor, self.low), cast(Tensor, self.high))


class Nested(nn.Module):
    """Chooses for each leaf of a Dict or Tuple by its share of the numbers."""

    def __init__(self, space: Dict | Tuple) -> None:
        super().__init__()
        found = leaves(space, "action").values()
        self.choosers = nn.ModuleList(_chooser(leaf, squashed=False) for leaf in found)
        self._space, self._widths = space, [flat_width(leaf) for leaf in found]

    def forward(self, head: Tensor) -> Any:
        """Return actions, of each leaf [n, ...], nested as the space is."""
        shares = torch.split(head, self._widths, -1)
        chosen = [choose(share) for choose, share in zip(self.choosers, shares, strict=True)]
        return nest(self._space, iter(chosen))


def torch_policy(config: PolicyConfig, spaces: Spaces, weights: Weights) -> TorchPolicy:
    """Return the module of a policy with these weights. Raises `ConfigError` for one of a
    class that is not built in."""
    seen = leaves(spaces.observation, "obs")
    ways = dict(zip(seen, paths(spaces.observation), strict=True))
    images: list[tuple[Path, bool, nn.Module]] = []
    cell, mask = None, None
    match config:
        case ActorCritic():
            shape = config.shape(spaces)
            encoder, mask = shape.encoder, mask_of(spaces, config.action_mask)
            for name, image in encoder.images.items():
                images.append(
                    (ways[name], image.channels_first, _of_image(shape.image_network, name, weights))
                )
            if shape.memory is not None:
                cell = _cell(shape.memory.cell is LSTM, weights)
            outputs: nn.Module = _linear(weights["actor.weight"].T, weights["actor.bias"])
        case QNetwork():
            plan, encoder, single, mask = config.plan(spaces)
            if single is not None:
                leaf = field_of(seen[single])
                convolutions = _of_values(plan, 255 if single in encoder.scaled else 1, weights)
                images.append((ways[single], plan.image != leaf.shape, convolutions))
            outputs = ActionValues(_linear(weights["head.weight"], weights["head.bias"]), config)
        case BoundedActor():
            encoder = config.encoder(spaces)
            means = len(config.bounds(spaces)[0])  # deviations, if any, follow them
            outputs = _linear(weights["head.weight"][0, :, :means], weights["head.bias"][..., :means])
            if isinstance(config, SquashedGaussian) and config.sde_steps:
                outputs = nn.Sequential(outputs, nn.Hardtanh(-GREATEST_MEAN, GREATEST_MEAN))
        case _:
            raise ConfigError(
                f"a {type(config).__name__} has no torch module that is made of its weights; an ActorCritic, "
                "a RecurrentActorCritic, a SquashedGaussian, a DeterministicActor and a QNetwork have one"
            )
    flattened = [] if isinstance(config, QNetwork) and images else encoder.names[len(encoder.images) :]
    flattened = [name for name in flattened if name not in encoder.critic_only]
    mean, factor, limit = np.zeros(encoder.seen), np.ones(encoder.seen), float("inf")
    if "observation.mean" in weights:
        boxes, variance = encoder.normalised[: encoder.seen], weights["observation.variance"][: encoder.seen]
        mean = np.where(boxes, weights["observation.mean"][: encoder.seen], 0)
        factor, limit = np.where(boxes, 1 / np.sqrt(variance + 1e-8), 1), float(OBSERVATION_CLIP)
    separate = "critic_hidden.0.weight" in weights
    return TorchPolicy(
        Encoder(
            images,
            [(ways[name], seen[name], name in encoder.scaled) for name in flattened],
            mean,
            factor,
            limit,
        ),
        _hidden(0 if separate else encoder.width - encoder.seen, ACTIVATIONS[config.activation], weights),
        cell,
        outputs,
        mask,
        ways,
        _chooser(spaces.action, isinstance(config, BoundedActor)),
    )


def _chooser(space: Space, squashed: bool) -> nn.Module:
    """Return what makes actions of what the network gives."""
    match space:
        case Dict() | Tuple():
            return Nested(space)
        case Discrete() | MultiDiscrete():
            return Largest(space)
        case Box():
            return ScaledMean(space, squashed)
    return LikelyBits()


def _hidden(unseen: int, activation: Callable[[], nn.Module], weights: Weights) -> nn.Sequential:
    """Return the actor's hidden layers. It does not see the last `unseen` inputs, which
    are for the critic alone."""
    layers: list[nn.Module] = []
    for i in takewhile(lambda i: f"hidden.{i}.weight" in weights, count()):
        weight, bias = (weights[f"hidden.{i}.{part}"][0] for part in ("weight", "bias"))
        layers.append(_linear(weight if i else weight[: len(weight) - unseen], bias))
        if f"hidden.{i}.scale" in weights:
            layers.append(norm := nn.LayerNorm(weight.shape[1], EPSILON))
            _fill(norm.weight, weights[f"hidden.{i}.scale"][0])
            _fill(norm.bias, weights[f"hidden.{i}.shift"][0])
        layers.append(activation())
    return nn.Sequential(*layers)


def _of_image(network: ImageNetwork, name: str, weights: Weights) -> nn.Sequential:
    """Return the actor's convolutions of the image `name`, and the layer behind them."""
    layers: list[nn.Module] = [Divided(255)]
    numbers = takewhile(lambda i: f"cnn.{name}.{i}.weight" in weights, count())
    named = ([weights[f"cnn.{name}.{i}.{part}"][0] for part in ("weight", "bias")] for i in numbers)
    if isinstance(network, PlainConvolutions):
        for (weight, bias), (_, _, stride) in zip(named, network.layers, strict=True):
            layers += [_convolution(weight, bias, stride), nn.ReLU()]
    else:
        convolutions = (_convolution(weight, bias, padding=1) for weight, bias in named)
        for _ in network.sections:
            layers += [next(convolutions), nn.MaxPool2d(3, 2, 1)]
            layers += [ResidualBlock(next(convolutions), next(convolutions)) for _ in range(network.blocks)]
        layers.append(nn.ReLU())
    out = _linear(weights[f"cnn.{name}.out.weight"][0], weights[f"cnn.{name}.out.bias"][0])
    return nn.Sequential(*layers, FlattenChannelsLast(), out, nn.ReLU())


def _of_values(shape: Shape, divisor: int, weights: Weights) -> nn.Sequential:
    """Return the convolutions of a network that tells the values of actions."""
    layers: list[nn.Module] = [Divided(divisor)]
    for i, (filters, size, stride) in enumerate(shape.convolutions):
        weight = weights[f"convolution.{i}.weight"].reshape(size, size, -1, filters).transpose(3, 2, 0, 1)
        layers += [_convolution(weight, weights[f"convolution.{i}.bias"], stride), nn.ReLU()]
    return nn.Sequential(*layers, FlattenChannelsLast())


def _cell(is_lstm: bool, weights: Weights) -> nn.LSTMCell | nn.GRUCell:
    """Return the actor's cell. Its gates stand in torch's order, of an LSTM i, f, g, o,
    of a GRU r, z, n; see `tidemill.nets.cells` for the orders here."""
    inputs, recurrent, bias = (weights[f"cell.{part}"][0] for part in ("weight", "recurrent", "bias"))
    units = len(recurrent)
    into, back = ([1, 2, 3, 0], [1, 2, 3, 0]) if is_lstm else ([1, 2, 0], [0, 1, 2])
    of_state = np.zeros(bias.size, np.float32)
    if not is_lstm:
        of_state[2 * units :] = weights["cell.candidate"][0, 0]
    cell = (nn.LSTMCell if is_lstm else nn.GRUCell)(len(inputs), units)

    def ordered(array: Array, gates: list[int]) -> Array:
        return np.concatenate([array[:, gate * units : (gate + 1) * units] for gate in gates], 1).T

    _fill(cell.weight_ih, ordered(inputs, into))
    _fill(cell.weight_hh, ordered(recurrent, back))
    _fill(cell.bias_ih, ordered(bias, into))
    _fill(cell.bias_hh, of_state)
    return cell


def _convolution(weight: Array, bias: Array, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """Return a convolution of `weight` [filters, channels, height, width]."""
    filters, channels, *sides = weight.shape
    layer = nn.Conv2d(channels, filters, (sides[0], sides[1]), stride, padding)
    _fill(layer.weight, weight)
    _fill(layer.bias, bias)
    return layer


def _linear(weight: Array, bias: Array) -> nn.Linear:
    """Return a layer of `weight` [inputs, outputs]."""
    layer = nn.Linear(*weight.shape)
    _fill(layer.weight, weight.T)
    _fill(layer.bias, bias)
    return layer


def _fill(parameter: Tensor | None, values: Array) -> None:
    """Copy `values` into a parameter, which may have fewer axes."""
    assert parameter is not None
    with torch.no_grad():
        parameter.copy_(_tensor(values).view_as(parameter))


def _tensor(array: Array) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array, np.float32))
