"""Action values of observations: a network with its backward pass, written out in numpy
(but for large images). A policy has one, an algorithm copies of it.

All weights lie in one flat array. A noisy network has as many deviations behind them;
what it computes with is then weight + deviation · noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.schema import Array
from tidemill.native.library import Kernels
from tidemill.nets.cells import Shapes
from tidemill.nets.convolution import Convolution, TorchConvolutions, Trunk
from tidemill.nets.image_networks import ROOT_TWO
from tidemill.nets.mlp import Floats, MLPShape
from tidemill.nets.native_mlp import mlp
from tidemill.nets.scratch import Scratch
from tidemill.nets.weights import (
    Initialisation,
    add_hidden,
    begin_scales,
    draw_uniformly,
    orthogonal_weights,
    views,
)


@dataclass(frozen=True)
class Shape:
    """What a network is made of. `image` is [height, width, channels] of what the
    convolutions see, (filters, kernel, stride) each; None: there are none, and `width`
    flat inputs."""

    width: int
    image: tuple[int, int, int] | None
    convolutions: tuple[tuple[int, int, int], ...]
    hidden: tuple[int, ...]
    actions: int
    atoms: int
    duelling: bool
    noise: float
    """First deviation of noisy weights, times the root of their inputs; 0: there are
    none."""
    activation: str = "relu"
    initialisation: Initialisation = "orthogonal"
    layer_norm: bool = False

    def weights(self) -> Shapes:
        """Return the shape and the orthogonal gain (0: see `add_hidden`) of each weight,
        in the order in which they lie. The convolutions' come first: they are never
        noisy."""
        shapes: Shapes = {}
        width = self.width
        if self.image is not None:
            height, across, channels = self.image
            for i, (filters, kernel, stride) in enumerate(self.convolutions):
                shapes[f"convolution.{i}.weight"] = ((kernel * kernel * channels, filters), ROOT_TWO)
                shapes[f"convolution.{i}.bias"] = ((filters,), 0)
                height = (height - kernel) // stride + 1
                across = (across - kernel) // stride + 1
                channels = filters
            width = height * across * channels
        width = add_hidden(shapes, "hidden", 1, width, self.hidden, self.layer_norm)
        outputs = (self.actions + self.duelling) * self.atoms
        shapes["head.weight"] = ((width, outputs), 0.01)
        shapes["head.bias"] = ((outputs,), 0)
        return shapes

    @property
    def plain(self) -> bool:
        """Whether it is of plain layers without noise, which tell one number of each
        action: all of it can be the native core's."""
        return self.image is None and self.atoms == 1 and not self.noise

    @cached_property
    def size(self) -> int:
        """The number of weights, deviations not counted."""
        return sum(int(np.prod(shape)) for shape, _ in self.weights().values())


def first_weights(shape: Shape, rng: np.random.Generator) -> Floats:
    """Return weights to begin with, and behind them the deviations of a noisy network,
    Fortunato et al. 2018, "Noisy Networks for Exploration", section 3.2: σ₀ / √inputs."""
    size = shape.size
    flat = np.zeros(size * (2 if shape.noise else 1), np.float32)
    sizes = shape.weights()
    named = views(flat[:size], {name: form for name, (form, _) in sizes.items()})
    with orthogonal_weights(rng) as fill:
        for name, (_, gain) in sizes.items():
            if gain:
                fill(named[name], gain, name.startswith("hidden"))
    if shape.initialisation == "uniform":
        draw_uniformly(named, rng)
    begin_scales(named)
    if shape.noise:
        deviations = views(flat[size:], {name: form for name, (form, _) in sizes.items()})
        for name, deviation in deviations.items():
            layer, _, part = name.rpartition(".")
            if part in ("weight", "bias") and not name.startswith("convolution"):
                deviation[...] = shape.noise / sqrt(sizes[f"{layer}.weight"][0][-2])
    return flat


class QFunction:
    """A Q-function computes with the weights in `flat`, which are the caller's. What it
    returns lies in memory that its next `forward` rewrites. Layers behind convolutions
    are the native core's where its `kernels` are given."""

    def __init__(self, shape: Shape, flat: Floats, kernels: Kernels | None = None) -> None:
        self.shape, self.flat = shape, flat
        self._forms = {name: form for name, (form, _) in shape.weights().items()}
        self._used = flat if not shape.noise else flat[: shape.size].copy()  # weights with their noise
        self._noise = np.zeros(shape.size if shape.noise else 0, np.float32)
        self.weights = views(self._used, self._forms)
        self._trunk = trunk_of(shape, self.weights)
        layers = [form for name, form in self._forms.items() if not name.startswith("convolution")]
        outputs = self.weights["head.bias"].size
        plain = MLPShape(
            1,
            layers[0][-2],
            shape.hidden,
            outputs,
            activation=shape.activation,
            layer_norm=shape.layer_norm,
        )
        self._first = shape.size - sum(int(np.prod(form)) for form in layers)  # weight of the layers
        self.layers = mlp(plain, self._used[self._first : shape.size], kernels)
        """Its plain layers, those behind convolutions."""
        self._scratch = Scratch()
        # where `backward` wrote last: all of it, the part of the layers, and its views
        self._gradient: tuple[Floats | None, Floats, dict[str, Floats]] = None, flat[:0], {}

    def draw_noise(self, rng: np.random.Generator) -> None:
        """Compute with new noise from now on; of a network without noise: nothing.
        Factorised, Fortunato et al. 2018, eq. 10 and 11: that of weight (i, j) is f(ε_i)
        f(ε_j), that of bias j f(ε_j), with f(x) = sign(x) √|x|, ε normal. To be called
        after the weights have changed, too."""
        if not self.shape.noise:
            return
        noise = views(self._noise, self._forms)
        for name, form in self._forms.items():
            if name.endswith("weight") and not name.startswith("convolution"):
                inputs, outputs = (_root(rng.standard_normal(n, np.float32)) for n in form[-2:])
                np.multiply(inputs[:, None], outputs, out=noise[name].reshape(form[-2:]))
                noise[name.replace("weight", "bias")].reshape(-1)[:] = outputs
        size = self.shape.size
        np.multiply(self.flat[size:], self._noise, out=self._used)
        self._used += self.flat[:size]

    def still(self) -> None:
        """Compute without noise from now on. To be called after the weights have changed,
        too."""
        if self.shape.noise:
            self._noise[:] = 0
            self._used[:] = self.flat[: self.shape.size]

    def forward(self, inputs: NDArray[Any]) -> Floats:
        """Return [n, actions, atoms] of inputs [n, width] or images [n, height, width,
        channels]. What `backward` needs is kept."""
        if self._trunk is not None:
            inputs = self._trunk.forward(inputs)
        shape, n = self.shape, len(inputs)
        parts: Floats = self.layers.forward(inputs)[0].reshape(n, -1, shape.atoms)
        if not shape.duelling:
            return parts
        # Wang et al. 2016, "Dueling Network Architectures for Deep Reinforcement
        # Learning", eq. 9: Q = V + A - mean A
        advantage: Floats = parts[:, 1:]
        # a third of what np.mean takes
        advantage += parts[:, :1] - np.add.reduce(advantage, axis=1, keepdims=True) / np.float32(
            shape.actions
        )
        return advantage

    def trace(self, inputs: NDArray[Any]) -> Iterator[tuple[str, Array, int]]:
        """Do what `forward` does, without its last step; yield what goes in, and of each
        layer its name, what it gives, and the axis of the rows."""
        if self._trunk is not None:
            inputs = self._trunk.forward(inputs)
            yield "convolutions", inputs, 0
        else:
            yield "inputs", inputs, 0
        yield from self.layers.trace(inputs)

    def backward(self, of_values: Floats, out: Floats) -> None:
        """Write the gradient of Σ of_values · values, of the last `forward`, into `out`,
        which is as `flat`. Once for each `forward`; overwrites `of_values`. Hand in the
        same `out` each time."""
        shape, size = self.shape, self.shape.size
        if self._gradient[0] is not out:
            self._gradient = out, out[self._first : size], views(out[:size], self._forms)
        _, of_layers, gradient = self._gradient
        n = len(of_values)
        if shape.duelling:
            of_head = self._scratch("of head", (n, shape.actions + 1, shape.atoms))
            total = np.add.reduce(of_values, axis=1, keepdims=True, out=of_head[:, :1])
            np.subtract(of_values, total / shape.actions, out=of_head[:, 1:])
        else:
            of_head = of_values
        below = self.layers.backward(of_head.reshape(1, n, -1), of_layers, self._trunk is not None)
        if self._trunk is not None:
            assert below is not None
            self._trunk.backward(below, gradient)
        if shape.noise:
            np.multiply(out[:size], self._noise, out=out[size:])


def trunk_of(shape: Shape, weights: dict[str, Floats]) -> Trunk | None:
    """Return what computes the features of images; None where there are none. Imports
    torch for several convolutions only."""
    if shape.image is None:
        return None
    if len(shape.convolutions) == 1:
        return Convolution(shape.convolutions[0][1], weights)
    return TorchConvolutions(shape.convolutions, weights)


def _root(x: Floats) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.sign(x) * np.sqrt(np.abs(x))
    return found
