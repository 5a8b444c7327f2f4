"""Networks of plain layers, forward and backward written out in numpy: hidden layers, of
which several of the same shapes run side by side as towers, and with a linear head.

For layers as narrow as these autograd over single operations costs more than the
arithmetic, and numpy's tanh is the fastest on a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError
from tidemill.nets.activations import OF_SUMS, activate, write_slope
from tidemill.nets.cells import Shapes
from tidemill.nets.layer_norm import LayerNorm
from tidemill.nets.scratch import Scratch
from tidemill.nets.weights import (
    Initialisation,
    add_hidden,
    begin_scales,
    draw_uniformly,
    orthogonal_weights,
    views,
)

Floats = NDArray[np.float32]


class Layer(NamedTuple):
    """A hidden layer of several towers, or the gradient's part that is of it."""

    weight: Floats
    """[towers, in, out]"""
    bias: Floats
    """[towers, 1, out]"""
    scale: Floats | None = None
    """[towers, 1, out], of the layer's normalisation; None: it has none."""
    shift: Floats | None = None
    """Likewise."""


class BatchedMLPs:
    """The hidden layers of several MLPs of the same shapes, stacked: each layer of all of
    them is one batched product. Results lie in memory that the next `forward` rewrites.

    `seen`: the first of two towers is the actor's and gets only so many of the inputs'
    first columns; None: all of them.
    """

    def __init__(self, layers: list[Layer], activation: str, seen: int | None = None) -> None:
        self._layers, self._seen = layers, seen
        self._activation = activation
        self._scratch = Scratch()
        self._norms = [LayerNorm() for layer in layers if layer.scale is not None]
        self._saved: list[Floats] = []
        self._sums: list[Floats] = []  # of each layer, where the slopes need them
        self._ones: Floats = np.ones((1, 0), np.float32)

    def forward(self, x: Floats) -> Floats:
        """Return the last layer of n rows, [towers, n, width], or [1, n, width] of the
        inputs where there is no layer. `x` [n, in] is kept."""
        self._saved, self._sums = [x], []
        for i, (weight, bias, scale, shift) in enumerate(self._layers):
            form = len(weight), x.shape[-2], weight.shape[2]
            h = sums = self._scratch(f"layer {i}", form)
            if self._activation in OF_SUMS:
                sums = self._scratch(f"sums {i}", form)
            if i or self._seen is None:
                np.matmul(x, weight, out=sums)
            else:
                np.matmul(x[:, : self._seen], weight[0, : self._seen], out=sums[0])
                np.matmul(x, weight[1], out=sums[1])
            np.add(sums, bias, out=sums)
            if scale is not None and shift is not None:
                self._norms[i].forward(sums, scale, shift)
            activate(self._activation, sums, h, self._scratch)
            self._saved.append(h)
            self._sums.append(sums)
            x = h
        return x if x.ndim == 3 else x[np.newaxis]

    def layers(self) -> list[Floats]:
        """Return what each layer gave in the last `forward`, [towers, n, width], before
        `backward` overwrites it."""
        return self._saved[1:]

    def backward(self, of_last: Floats, into: list[Layer] | None, of_input: bool = False) -> Floats:
        """Write the gradients of the weights of the last `forward` into `into` (unless
        None), `of_last` [towers, n, width] being that of its result; return, if
        `of_input`, the gradients [towers, n, in] of its inputs.

        Overwrites what `forward` returned: once only.
        """
        gradient, n = of_last, len(self._saved[0])
        if self._ones.size < n:
            self._ones = np.ones((1, n), np.float32)
        for i in reversed(range(len(self._layers))):
            below, h = self._saved[i], self._saved[i + 1]
            write_slope(self._activation, self._sums[i], h, self._scratch)
            np.multiply(h, gradient, out=h)
            if (scale := self._layers[i].scale) is not None:
                given = (None, None) if into is None else (into[i].scale, into[i].shift)
                self._norms[i].backward(h, scale, *given)
            if into is not None:
                self._differentiate(i, below, h, into[i].weight, into[i].bias)
            if i or of_input:
                gradient = self._scratch(f"gradient {i}", (len(h), n, below.shape[-1]))
                np.matmul(h, self._layers[i].weight.swapaxes(1, 2), out=gradient)
        return gradient

    def _differentiate(self, i: int, below: Floats, h: Floats, of_weight: Floats, of_bias: Floats) -> None:
        """Write the gradients of layer `i`, whose inputs were `below`, `h` being that of
        what it adds up."""
        np.matmul(self._ones[:, : h.shape[1]], h, out=of_bias)  # a fifth of what np.sum takes
        if i or self._seen is None:
            np.matmul(below.swapaxes(-1, -2), h, out=of_weight)
        else:
            np.matmul(below[:, : self._seen].T, h[0], out=of_weight[0, : self._seen])
            of_weight[0, self._seen :] = 0
            np.matmul(below.T, h[1], out=of_weight[1])


class SeparateMLPs:
    """The hidden layers of an actor and a critic of different shapes. The actor gets only
    the first `seen` columns of the inputs."""

    def __init__(self, actor: list[Layer], critic: list[Layer], activation: str, seen: int) -> None:
        self._actor, self._critic = BatchedMLPs(actor, activation), BatchedMLPs(critic, activation)
        self._seen = seen

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """See `BatchedMLPs.forward`: each last layer is [n, width]."""
        return self._actor.forward(x[:, : self._seen])[0], self._critic.forward(x)[0]

    def layers(self) -> list[Floats]:
        """See `BatchedMLPs.layers`: the actor's, then the critic's."""
        return [*self._actor.layers(), *self._critic.layers()]

    def backward(self, of_last: tuple[Floats, Floats], actor: list[Layer], critic: list[Layer]) -> None:
        """See `BatchedMLPs.backward`."""
        self._actor.backward(of_last[0][np.newaxis], actor)
        self._critic.backward(of_last[1][np.newaxis], critic)


def layers_of(named: dict[str, Floats], hidden: int, name: str = "hidden") -> list[Layer]:
    """Return so many hidden layers, or the gradient's."""
    return [
        Layer(
            named[f"{name}.{i}.weight"],
            named[f"{name}.{i}.bias"],
            named.get(f"{name}.{i}.scale"),
            named.get(f"{name}.{i}.shift"),
        )
        for i in range(hidden)
    ]


def check_hidden(hidden: tuple[int, ...], name: str = "hidden") -> None:
    """Raise `ConfigError` unless these can be the widths of hidden layers."""
    if any(width < 1 for width in hidden):
        raise ConfigError(
            f"{name} = {list(hidden)}: every width must be at least 1; leave a layer out instead"
        )


@dataclass(frozen=True)
class MLPShape:
    """`towers` networks from `inputs` numbers through `hidden` layers to `outputs`;
    `gain` is the head's first size."""

    towers: int
    inputs: int
    hidden: tuple[int, ...]
    outputs: int
    gain: float = 0.01
    activation: str = "relu"
    initialisation: Initialisation = "orthogonal"
    layer_norm: bool = False

    def weights(self) -> Shapes:
        """Return the shape and the orthogonal gain (0: see `add_hidden`) of each weight,
        in the order in which they lie."""
        shapes: Shapes = {}
        width = add_hidden(shapes, "hidden", self.towers, self.inputs, self.hidden, self.layer_norm)
        shapes["head.weight"] = ((self.towers, width, self.outputs), self.gain)
        shapes["head.bias"] = ((self.towers, 1, self.outputs), 0)
        return shapes

    def forms(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight, in the order in which they lie."""
        return {name: form for name, (form, _) in self.weights().items()}

    def begin(self, rng: np.random.Generator) -> Floats:
        """Return weights to begin with, one after the other."""
        weights = self.weights()
        flat = np.zeros(sum(int(np.prod(form)) for form, _ in weights.values()), np.float32)
        with orthogonal_weights(rng) as fill:
            for name, part in views(flat, self.forms()).items():
                if weights[name][1]:
                    fill(part, weights[name][1], True)
        if self.initialisation == "uniform":
            draw_uniformly(views(flat, self.forms()), rng)
        begin_scales(views(flat, self.forms()))
        return flat


class MLP:
    """An MLP computes with the weights in `flat`, which are the caller's. What it returns
    lies in memory that its next `forward` or `backward` rewrites."""

    def __init__(self, shape: MLPShape, flat: Floats) -> None:
        self.shape, self.flat = shape, flat
        self._forms = shape.forms()
        self.weights = views(flat, self._forms)
        self._towers = BatchedMLPs(layers_of(self.weights, len(shape.hidden)), shape.activation)
        self._scratch = Scratch()
        self._last: Floats = flat[:0]  # what the heads see
        # where `backward` wrote last, and its views
        self._gradient: tuple[Floats | None, dict[str, Floats]] = None, {}

    def forward(self, inputs: Floats) -> Floats:
        """Return [towers, n, outputs] of inputs [n, inputs], which all towers see and
        which must stay as they are until `backward`."""
        self._last = self._towers.forward(inputs)
        return self._head()

    def _head(self) -> Floats:
        """Return what the heads make of the last layers."""
        out = self._scratch("out", (self.shape.towers, self._last.shape[1], self.shape.outputs))
        np.matmul(self._last, self.weights["head.weight"], out=out)
        out += self.weights["head.bias"]
        return out

    def trace(self, inputs: Floats) -> Iterator[tuple[str, Floats, int]]:
        """Yield of each layer its name, what it gives of `inputs`, [towers, n, width],
        and the axis of the rows, computed in numpy."""
        plain = self._in_numpy()
        out = plain.forward(inputs)
        for i, layer in enumerate(plain._towers.layers()):
            yield f"hidden.{i}", layer, 1
        yield "head", out, 1

    def _in_numpy(self) -> "MLP":
        """Return the same network, computed by numpy, with memory of its own."""
        return MLP(self.shape, self.flat)

    def backward(self, of_out: Floats, into: Floats | None, of_inputs: bool = False) -> Floats | None:
        """Write the gradient of Σ of_out · out, of the last `forward`, into `into` (as
        `flat`), unless it is None; return, if `of_inputs`, that of the inputs, [n,
        inputs], summed over the towers. Once for each `forward`. Hand in the same `into`
        each time."""
        gradient: dict[str, Floats] | None = None
        if into is not None:
            if self._gradient[0] is not into:
                self._gradient = into, views(into, self._forms)
            gradient = self._gradient[1]
        of_last = self._differentiate_head(of_out, gradient)
        layers = None if gradient is None else layers_of(gradient, len(self.shape.hidden))
        below = self._towers.backward(of_last, layers, of_inputs)
        return total(below) if of_inputs else None

    def backward_chosen(self, towers: NDArray[np.int64]) -> Floats:
        """Return the gradients [n, inputs] by the inputs of Σ_i out_i, of the last
        `forward`, out_i being the only output of tower `towers` [n] of row i. Once for
        each `forward`."""
        chosen = (towers == np.arange(self.shape.towers)[:, None]).astype(np.float32)
        of_inputs = self.backward(chosen[..., None], None, of_inputs=True)
        assert of_inputs is not None
        return of_inputs

    def _differentiate_head(self, of_out: Floats, gradient: dict[str, Floats] | None) -> Floats:
        """Write the gradients of the heads' weights; return that of the last layers,
        [towers, n, width]."""
        if gradient is not None:
            np.matmul(self._last.swapaxes(1, 2), of_out, out=gradient["head.weight"])
            np.add.reduce(of_out, axis=1, out=gradient["head.bias"], keepdims=True)
        of_last = self._scratch("of last", (self.shape.towers, *self._last.shape[1:]))
        return np.matmul(of_out, self.weights["head.weight"].swapaxes(1, 2), out=of_last)


def total(towers: Floats) -> Floats:
    """Return the sum over the first axis."""
    found: Floats = towers.sum(0) if len(towers) > 1 else towers[0]
    return found
