"""A plain network of relu layers and a linear head, forward and backward written out in
numpy. Several of the same shapes run side by side, as towers."""

from dataclasses import dataclass

import numpy as np

from tidemill.nets.scratch import Scratch
from tidemill.nets.towers import Floats, Layer, Towers
from tidemill.nets.weights import ROOT_TWO, orthogonal, views


@dataclass(frozen=True)
class MLPShape:
    """`towers` networks from `inputs` numbers through `hidden` layers to `outputs`;
    `gain` is the head's first size."""

    towers: int
    inputs: int
    hidden: tuple[int, ...]
    outputs: int
    gain: float = 0.01

    def weights(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return the shape and the orthogonal gain (0: starts as zeros) of each weight,
        in the order in which they lie."""
        shapes: dict[str, tuple[tuple[int, ...], float]] = {}
        width = self.inputs
        for name, units, gain in [
            *((f"hidden.{i}", units, ROOT_TWO) for i, units in enumerate(self.hidden)),
            ("head", self.outputs, self.gain),
        ]:
            shapes[f"{name}.weight"] = ((self.towers, width, units), gain)
            shapes[f"{name}.bias"] = ((self.towers, 1, units), 0)
            width = units
        return shapes

    def forms(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight, in the order in which they lie."""
        return {name: form for name, (form, _) in self.weights().items()}

    def begin(self, rng: np.random.Generator) -> Floats:
        """Return weights to begin with, one after the other."""
        weights = self.weights()
        flat = np.zeros(sum(int(np.prod(form)) for form, _ in weights.values()), np.float32)
        for name, part in views(flat, self.forms()).items():
            if weights[name][1]:
                orthogonal(part, weights[name][1], rng, self.towers)
        return flat


class MLP:
    """Computes with the weights in `flat`, which are the caller's. What it returns lies
    in memory that its next `forward` or `backward` rewrites."""

    def __init__(self, shape: MLPShape, flat: Floats) -> None:
        self.shape, self.flat = shape, flat
        self._forms = shape.forms()
        self.weights = views(flat, self._forms)
        self._towers = Towers(self._layers(self.weights), "relu")
        self._scratch = Scratch()
        self._last: Floats = flat[:0]  # what the heads see
        # where `backward` wrote last, and its views
        self._gradient: tuple[Floats | None, dict[str, Floats]] = None, {}

    def _layers(self, named: dict[str, Floats]) -> list[Layer]:
        return [
            (named[f"hidden.{i}.weight"], named[f"hidden.{i}.bias"]) for i in range(len(self.shape.hidden))
        ]

    def forward(self, inputs: Floats) -> Floats:
        """Return [towers, n, outputs] of inputs [n, inputs], which all towers see and
        which must stay as they are until `backward`."""
        self._last = self._towers.forward(inputs)
        out = self._scratch("out", (self.shape.towers, len(inputs), self.shape.outputs))
        np.matmul(self._last, self.weights["head.weight"], out=out)
        out += self.weights["head.bias"]
        return out

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
            np.matmul(self._last.swapaxes(1, 2), of_out, out=gradient["head.weight"])
            np.add.reduce(of_out, axis=1, out=gradient["head.bias"], keepdims=True)
        of_last = self._scratch("of last", (self.shape.towers, *self._last.shape[1:]))
        np.matmul(of_out, self.weights["head.weight"].swapaxes(1, 2), out=of_last)
        below = self._towers.backward(
            of_last, None if gradient is None else self._layers(gradient), of_inputs
        )
        return below.sum(0) if of_inputs else None
