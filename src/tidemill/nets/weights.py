"""The weights of the built-in networks: their shapes, how they lie in one flat array, and
their first values."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import check_parameters
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.cores import cores
from tidemill.core.schema import Array, Arrays, Field, schema_of, zeros
from tidemill.nets.cells import Memory, Shapes
from tidemill.nets.distributions import Distribution
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.image_networks import ROOT_TWO, ImageNetwork
from tidemill.nets.state_dependent_exploration import StateDependentGaussian

Floats = NDArray[np.float32]

Initialisation = Literal["orthogonal", "uniform"]
"""orthogonal: Saxe et al. 2014, with a gain for each layer and biases of 0. uniform: what
torch's layers begin with."""
LARGE = 1 << 18  # values of a matrix that takes longer to make orthogonal than a thread to start
_placeholders = ContextVar("placeholders", default=False)


def views(flat: Floats, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Return arrays of `shapes` that lie in `flat` one after the other."""
    named, start = {}, 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        named[name] = flat[start:end].reshape(shape)
        start = end
    return named


def valued_answer(spaces: Spaces) -> dict[str, Field]:
    """Return the fields of an answer that tells a value: the action's leaves,
    ``log_prob`` and ``value``."""
    number = Field((), "float32")
    return {**schema_of_space(spaces.action, "action"), "log_prob": number, "value": number}


def load_parameters(own: Arrays, parameters: Mapping[str, Array]) -> None:
    """Copy `parameters` into a network's `own`. Raises `SchemaError` when a name, shape
    or dtype does not fit; nothing is changed then."""
    if own.keys() != parameters.keys() or any(
        array.shape != parameters[name].shape or array.dtype != parameters[name].dtype
        for name, array in own.items()
    ):  # a schema takes ten times as long, in each version that is taken
        check_parameters(schema_of(own), parameters)
    for name, array in own.items():
        np.copyto(array, parameters[name])


@dataclass(frozen=True)
class ActorCriticShape:
    """What an actor-critic network is made of, whatever computes it."""

    encoder: ObservationEncoder
    distribution: Distribution
    towers: int
    """2, or 1 where the critic shares all layers but its head with the actor."""
    hidden: tuple[int, ...]
    critic_hidden: tuple[int, ...] | None
    """The critic's hidden layers where they are unlike the actor's; None: the layers of
    both lie stacked."""
    activation: str
    convolutions: str
    """What the convolutions compute in."""
    memory: Memory | None
    """The cell between hidden layers and heads, in a recurrent policy."""
    image_network: ImageNetwork
    """What images go through."""
    layer_norm: bool = False
    """Whether the sums of hidden layers are normalised."""

    def weights(self) -> Shapes:
        """Return the shape and the orthogonal gain (0: see `add_hidden`) of each weight,
        in the order in which they lie."""
        shapes: Shapes = {}
        towers, width, norm = self.towers, self.encoder.width, self.layer_norm
        for name, image in self.encoder.images.items():
            network = self.image_network
            for i, ((filters, channels, kernel), gain) in enumerate(network.convolutions(image.channels)):
                shapes[f"cnn.{name}.{i}.weight"] = ((towers, filters, channels, kernel, kernel), gain)
                shapes[f"cnn.{name}.{i}.bias"] = ((towers, filters), 0)
            left = network.values(image.height, image.width)
            shapes[f"cnn.{name}.out.weight"] = ((towers, left, network.features), ROOT_TWO)
            shapes[f"cnn.{name}.out.bias"] = ((towers, network.features), 0)
            width += network.features
        seen = width - self.encoder.width + self.encoder.seen
        if self.critic_hidden is None:
            width = of_critic = add_hidden(shapes, "hidden", towers, width, self.hidden, norm)
        else:
            all_seen, width = width, add_hidden(shapes, "hidden", 1, seen, self.hidden, norm)
            of_critic = add_hidden(shapes, "critic_hidden", 1, all_seen, self.critic_hidden, norm)
        if self.memory is not None:
            shapes |= self.memory.cell.shapes(towers, width, self.memory.units)
            width = of_critic = self.memory.units
        # A small gain makes the first policy nearly uniform: Andrychowicz et al. 2021,
        # "What Matters in On-Policy RL", section 3.2.
        shapes["actor.weight"] = ((self.distribution.size, width), 0.01)
        shapes["actor.bias"] = ((self.distribution.size, 1), 0)
        shapes["critic.weight"] = ((of_critic,), 1.0)
        shapes["critic.bias"] = ((1,), 0)
        deviations = self.distribution.deviations
        explored = isinstance(self.distribution, StateDependentGaussian)
        shapes["log_std"] = ((width, deviations) if explored else (deviations, 1), 0)
        return shapes

    def forms(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight, in the order in which they lie."""
        return {name: form for name, (form, _) in self.weights().items()}

    def places(self) -> list[list[slice]]:
        """Return where the weights of each tower lie among all weights: the actor's and
        the critic's, or of one tower all."""
        if self.towers == 1:
            return [[slice(None)]]
        towers: list[list[slice]] = [[], []]
        start = 0
        for name, form in self.forms().items():
            end = start + prod(form)
            if name.startswith(("critic.", "critic_hidden.")):
                towers[1].append(slice(start, end))
            elif name.startswith("actor.") or name == "log_std" or self.critic_hidden is not None:
                towers[0].append(slice(start, end))
            else:  # stacked
                middle = (start + end) // 2
                towers[0].append(slice(start, middle))
                towers[1].append(slice(middle, end))
            start = end
        return towers

    def begin(
        self, rng: np.random.Generator, log_std: float, initialisation: Initialisation = "orthogonal"
    ) -> Floats:
        """Return weights to begin with, one after the other."""
        weights, encoder = self.weights(), self.encoder
        flat = zeros(sum(prod(form) for form, _ in weights.values()), "float32")
        named = views(flat, self.forms())
        with orthogonal_weights(rng) as fill:
            for name, (_, gain) in weights.items():
                # the actor's are 0 where it does not see, and stay so
                if gain and encoder.critic_only and name == "hidden.0.weight" and len(named[name]) == 2:
                    actor, critic = named[name]
                    for part in (actor[: len(actor) - encoder.width + encoder.seen], critic):
                        fill(part, gain, False)
                elif gain:
                    fill(named[name], gain, not name.startswith(("actor.", "critic.")))
        if initialisation == "uniform":
            unseen = encoder.width - encoder.seen if self.critic_hidden is None else 0
            draw_uniformly(named, rng, unseen)
        begin_scales(named)
        named["log_std"][...] = log_std
        if self.memory is not None:
            self.memory.cell.begin(named)
        return flat


def add_hidden(
    shapes: Shapes, name: str, towers: int, width: int, hidden: tuple[int, ...], layer_norm: bool
) -> int:
    """Add hidden layers above `width` numbers to `shapes`; return the width of the last.
    What has a gain of 0 starts as zeros, but scales, which start as ones."""
    for i, units in enumerate(hidden):
        shapes[f"{name}.{i}.weight"] = ((towers, width, units), ROOT_TWO)
        for part in ("bias", "scale", "shift") if layer_norm else ("bias",):
            shapes[f"{name}.{i}.{part}"] = ((towers, 1, units), 0)
        width = units
    return width


def begin_scales(named: dict[str, Floats]) -> None:
    """Begin the scales of normalised layers as ones."""
    for name, array in named.items():
        if name.endswith(".scale"):
            array.fill(1)


@contextmanager
def placeholder_weights() -> Iterator[None]:
    """Within it networks begin with weights that are quick to draw: for policies that are
    given others before they act, or that are only timed."""
    before = _placeholders.set(True)
    try:
        yield
    finally:
        _placeholders.reset(before)


@contextmanager
def orthogonal_weights(rng: np.random.Generator) -> Iterator[Callable[[Floats, float, bool], None]]:
    """Within it what is yielded fills a `weight` with `gain` × an orthogonal matrix, or,
    of a `stacked` one, one along its first axis each: Saxe et al. 2014, "Exact solutions
    to the nonlinear dynamics of learning in deep linear neural networks".

    They are drawn from `rng` in turn; then large ones are made orthogonal in threads, so
    that they are all there at the end only.
    """
    quickly, begun = _placeholders.get(), []

    def fill(weight: Floats, gain: float, stacked: bool) -> None:
        for part in weight if stacked else (weight,):
            rows = len(part) if part.ndim > 1 else 1
            form = rows, part.size // rows
            if quickly:  # as large as those of an orthogonal one are on average
                drawn = rng.standard_normal(form, np.float32)
                part[...] = (np.float32(gain / sqrt(max(form))) * drawn).reshape(part.shape)
            elif part.size < LARGE:
                _make_orthogonal(part, gain, rng.standard_normal(form))
            else:
                begun.append(threads.submit(_make_orthogonal, part, gain, rng.standard_normal(form)))

    with ThreadPoolExecutor(cores()) as threads:
        yield fill
        for each in begun:
            each.result()


def draw_uniformly(named: dict[str, Floats], rng: np.random.Generator, unseen: int = 0) -> None:
    """Fill weights and biases of all layers but recurrent cells uniformly within ±1 /
    √inputs, as torch's layers do by default. The first of two towers does not see the
    last `unseen` inputs, and has no weight for them."""
    for name, weight in named.items():
        layer, _, part = name.rpartition(".")
        if part != "weight" or layer == "cell":
            continue
        if layer in ("actor", "critic"):
            inputs = weight.shape[-1]
        else:  # of convolutions in torch's order all axes but those of towers and filters
            inputs = prod(weight.shape[2:]) if weight.ndim == 5 else weight.shape[-2]
        for array in (weight, named[f"{layer}.bias"]):
            array[...] = rng.uniform(-1, 1, array.shape) / sqrt(inputs)
    if unseen:
        named["hidden.0.weight"][0, -unseen:] = 0


def _make_orthogonal(weight: Floats, gain: float, matrix: NDArray[np.float64]) -> None:
    """Fill `weight` with `gain` × an orthogonal matrix made of a normal one."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    if len(tall) < 2 * tall.shape[1]:
        q, r = np.linalg.qr(tall)
        q *= np.sign(np.diag(r))  # makes the draw uniform
    else:  # far from singular: Cholesky's way to the same Q takes less than half the time
        q = tall @ np.linalg.inv(np.linalg.cholesky(tall.T @ tall).T)
    weight[...] = gain * (q if tall is matrix else q.T).reshape(weight.shape)
