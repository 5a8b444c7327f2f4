"""The policy that `ActorCritic` describes. MLPs act in numpy; torch is imported for images and for training only, over the same memory.

All weights lie in one flat float32 array. Layers of the actor and of the critic have the same shapes (but for the heads), so they lie stacked along a
first axis "towers" (2, or 1 when the critic shares them) and run as one batched product.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Spaces
from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.distributions import distribution_of
from tidemill.nets.encoders import Image, ObservationEncoder
from tidemill.nets.normaliser import RunningMoments
from tidemill.nets.trainable import Evaluation, TrainablePolicy

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.nets.actor_critic import ActorCritic
    from tidemill.nets.torch_actor_critic import TorchActorCritic

Floats = NDArray[np.float32]

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""(channels, kernel, stride) of Mnih et al. 2015, "Human-level control through deep reinforcement learning", Methods."""
IMAGE_FEATURES = 512  # width of the layer after them
OBSERVATION_CLIP = np.float32(10)  # deviations
ROOT_TWO = float(np.sqrt(2))


class ActorCriticPolicy(TrainablePolicy):
    """Acts for any number of rows; see `ActorCritic` for the network and `distributions` for what an action and its log-probability are."""

    def __init__(self, config: "ActorCritic", spaces: Spaces, seed: int) -> None:
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        self.encoder = ObservationEncoder(spaces.observation, config.encoder)
        self.distribution = distribution_of(spaces.action)
        self.activation = config.activation
        self.bfloat16 = config.convolutions == "bfloat16"
        shared = bool(self.encoder.images) if config.shared_critic is None else config.shared_critic
        self.towers = 1 if shared else 2
        self._rng = np.random.default_rng(sampling_seed)
        hidden = () if self.encoder.images and not self.encoder.width else config.hidden
        gains = _weight_shapes(self.encoder, self.towers, hidden, self.distribution.size, self.distribution.deviations)
        self.flat: Floats = np.zeros(sum(int(np.prod(shape)) for shape, _ in gains.values()), np.float32)
        """All weights, one after the other; `weights` are views of it."""
        self.weights: dict[str, Floats] = {}
        rng, start = np.random.default_rng(weights_seed), 0
        for name, (shape, gain) in gains.items():
            end = start + int(np.prod(shape))
            self.weights[name] = self.flat[start:end].reshape(shape)
            start = end
            if gain:
                _orthogonal(self.weights[name], gain, rng, self.towers if not name.startswith(("actor", "critic")) else 0)
        self.weights["log_std"][...] = config.log_std_init
        self.layers = [(self.weights[f"hidden.{i}.weight"], self.weights[f"hidden.{i}.bias"]) for i in range(len(hidden))]
        """(weight [towers, in, out], bias [towers, 1, out]) of each hidden layer."""
        self._observation = RunningMoments("observation", (self.encoder.width,)) if config.normalise_observations and self.encoder.width else None
        self._returns = RunningMoments("returns", ())
        self._torch: TorchActorCritic | None = None
        self._buffers: list[Floats] = []
        self._rows = -1
        self._refresh()

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """See `Policy.act`. `observation` has any number of rows n; `state` is not read."""
        n = len(observation[self.encoder.names[0]])
        if n == 0:
            return
        if n != self._rows:
            self._allocate(n)
        if self.encoder.images:
            features = self._trainer().features(self.prepare(observation))
            actor, critic = features[0], features[-1]
        else:
            actor, critic = self._mlp(observation)
        weights = self.weights
        head = np.matmul(weights["actor.weight"], actor.T)
        head += weights["actor.bias"]
        value = np.matmul(critic, weights["critic.weight"])
        value += weights["critic.bias"]
        value *= self._scale
        out["value"][:n] = value
        if not isinstance(deterministic, bool):
            some = deterministic.any()
            deterministic = deterministic if deterministic.ndim and some else bool(some)
        self.distribution.sample(head, weights["log_std"], deterministic, self._rng, out["action"][:n], out["log_prob"][:n])

    def _mlp(self, observation: Arrays) -> tuple[Floats, Floats]:
        """Return the last hidden layer (or the inputs) of actor and critic, [n, width] each, in buffers that the next call rewrites."""
        x = self._buffers[0]
        self.encoder.encode(observation, x)
        self._normalise(x)
        if not self.layers:
            return x, x
        for (weight, bias), h in zip(self.layers, self._buffers[1:], strict=True):
            np.matmul(x, weight, out=h)
            np.add(h, bias, out=h)
            if self.activation == "tanh":
                np.tanh(h, out=h)
            else:
                np.maximum(h, 0, out=h)
            x = h
        return x[0], x[-1]

    def _allocate(self, n: int) -> None:
        """Make the buffers of `act` for n rows."""
        widths = [weight.shape[2] for weight, _ in self.layers]
        self._buffers = [np.empty((n, self.encoder.width), np.float32), *(np.empty((self.towers, n, w), np.float32) for w in widths)]
        self._rows = n

    def _normalise(self, x: Floats) -> None:
        if self._observation is not None:
            x -= self._shift
            x *= self._factor
            np.minimum(x, OBSERVATION_CLIP, out=x)
            np.maximum(x, -OBSERVATION_CLIP, out=x)

    def _refresh(self) -> None:
        """Derive what acting multiplies with from the statistics."""
        self._scale = np.float32(self._returns.deviation())
        if self._observation is not None:
            boxes = self.encoder.normalised
            self._shift = np.where(boxes, self._observation.mean, 0).astype(np.float32)
            self._factor = np.where(boxes, 1 / np.sqrt(self._observation.variance + 1e-8), 1).astype(np.float32)

    def parameters(self) -> Arrays:
        """Return the weights (float32) and the statistics ``observation.*`` and ``returns.*`` (float64), as views."""
        named: dict[str, Any] = {name: weight for name, weight in self.weights.items() if weight.size}
        if self._observation is not None:
            named |= self._observation.parameters()
        return named | self._returns.parameters()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Nothing is changed when a name, shape or dtype does not fit."""
        own = self.parameters()
        if own.keys() != parameters.keys():
            missing, unknown = sorted(own.keys() - parameters.keys()), sorted(parameters.keys() - own.keys())
            raise SchemaError(
                f"these parameters are of another network: missing {missing or 'none'}, unknown {unknown or 'none'}; "
                "build the policy with the configuration and spaces that it was trained with"
            )
        for name, array in own.items():
            given = parameters[name]
            if given.shape != array.shape or given.dtype != array.dtype:
                raise SchemaError(
                    f"parameter {name} is {given.dtype}{list(given.shape)}, but this network's is {array.dtype}{list(array.shape)}; "
                    "build the policy with the configuration and spaces that it was trained with"
                )
        for name, array in own.items():
            np.copyto(array, parameters[name])
        self.version = version
        self._refresh()

    def prepare(self, observation: Arrays) -> Arrays:
        """Return ``features`` (float32 [n, width], flattened and normalised) when anything is flattened, and the images as they are."""
        inputs: Arrays = {name: observation[name] for name in self.encoder.images}
        if self.encoder.width:
            features = np.empty((len(observation[self.encoder.names[0]]), self.encoder.width), np.float32)
            self.encoder.encode(observation, features)
            self._normalise(features)
            inputs["features"] = features
        return inputs

    def _trainer(self) -> "TorchActorCritic":
        if self._torch is None:
            from tidemill.nets.torch_actor_critic import TorchActorCritic

            self._torch = TorchActorCritic(self)
        return self._torch

    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> Evaluation:
        """See `TrainablePolicy.evaluate`."""
        return self._trainer().evaluate(inputs, action["action"])

    def trainable_parameters(self) -> "list[Tensor]":
        """Return one float32 tensor: all weights, flat, with `.grad` in place."""
        return [self._trainer().flat]

    @property
    def value_scale(self) -> float:
        """The running deviation of the λ-returns: reward units per unit of the critic's head."""
        return float(self._scale)

    def fold(self, observation: Arrays, returns: Array | None) -> None:
        """See `TrainablePolicy.fold`. The critic's head is rescaled so that no value changes in reward units when the deviation does
        (van Hasselt et al. 2016, "Learning values across many orders of magnitude", eq. 2-3, without the shift)."""
        if self._observation is not None:
            features = np.empty((len(observation[self.encoder.names[0]]), self.encoder.width), np.float32)
            self.encoder.encode(observation, features)
            self._observation.fold(features)
        if returns is not None:
            before = self._returns.deviation()
            self._returns.fold(returns)
            ratio = before / self._returns.deviation()
            self.weights["critic.weight"] *= np.float32(ratio)
            self.weights["critic.bias"] *= np.float32(ratio)
        self._refresh()


def _weight_shapes(
    encoder: ObservationEncoder, towers: int, hidden: tuple[int, ...], outputs: int, deviations: int
) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return the shape and the orthogonal gain (0: starts as zeros) of each weight, in the order in which they lie."""
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}
    width = encoder.width
    for name, image in encoder.images.items():
        channels = image.channels
        for i, (filters, kernel, _) in enumerate(CONVOLUTIONS):
            shapes[f"cnn.{name}.{i}.weight"] = ((towers, filters, channels, kernel, kernel), ROOT_TWO)
            shapes[f"cnn.{name}.{i}.bias"] = ((towers, filters), 0)
            channels = filters
        shapes[f"cnn.{name}.out.weight"] = ((towers, image_size(image), IMAGE_FEATURES), ROOT_TWO)
        shapes[f"cnn.{name}.out.bias"] = ((towers, IMAGE_FEATURES), 0)
        width += IMAGE_FEATURES
    for i, units in enumerate(hidden):
        shapes[f"hidden.{i}.weight"] = ((towers, width, units), ROOT_TWO)
        shapes[f"hidden.{i}.bias"] = ((towers, 1, units), 0)
        width = units
    # A small gain makes the first policy nearly uniform: Andrychowicz et al. 2021, "What Matters in On-Policy RL", section 3.2.
    shapes["actor.weight"] = ((outputs, width), 0.01)
    shapes["actor.bias"] = ((outputs, 1), 0)
    shapes["critic.weight"] = ((width,), 1.0)
    shapes["critic.bias"] = ((1,), 0)
    shapes["log_std"] = ((deviations, 1), 0)
    return shapes


def image_size(image: Image) -> int:
    """Return the number of values that the convolutions leave of an image."""
    height, width = image.height, image.width
    for _, kernel, stride in CONVOLUTIONS:
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return height * width * CONVOLUTIONS[-1][0]


def _orthogonal(weight: Floats, gain: float, rng: np.random.Generator, towers: int) -> None:
    """Fill `weight` with `gain` × an orthogonal matrix, one for each of its towers (0: it has no such axis).

    Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks".
    """
    for part in weight if towers else (weight,):
        rows = len(part) if part.ndim > 1 else 1
        matrix = rng.standard_normal((rows, part.size // rows))
        tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        q, r = np.linalg.qr(tall)
        q *= np.sign(np.diag(r))  # makes the draw uniform
        part[...] = gain * (q if tall is matrix else q.T).reshape(part.shape)
