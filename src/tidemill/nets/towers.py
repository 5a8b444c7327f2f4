"""The hidden layers of networks, forward and backward written out in numpy.

For layers as narrow as these autograd over single operations costs more than the
arithmetic, and numpy's tanh is the fastest on a CPU.
"""

import numpy as np
from numpy.typing import NDArray

from tidemill.nets.scratch import Scratch

Floats = NDArray[np.float32]
Layer = tuple[Floats, Floats]
"""(weight [towers, in, out], bias [towers, 1, out])."""


class Towers:
    """Layers of the same shapes, stacked: each is one batched product. Results lie in
    memory that the next `forward` rewrites.

    `seen`: the first of two towers is the actor's and gets only so many of the inputs'
    first columns; None: all of them.
    """

    def __init__(self, layers: list[Layer], activation: str, seen: int | None = None) -> None:
        self._layers, self._seen = layers, seen
        self._tanh = activation == "tanh"
        self._scratch = Scratch()
        self._kept: list[Floats] = []
        self._ones: Floats = np.ones((1, 0), np.float32)

    def forward(self, x: Floats) -> Floats:
        """Return the last layer of n rows, [towers, n, width], or [1, n, width] of the
        inputs where there is no layer. `x` [n, in] is kept."""
        self._kept = [x]
        for i, (weight, bias) in enumerate(self._layers):
            h = self._scratch(f"layer {i}", (len(weight), x.shape[-2], weight.shape[2]))
            if i or self._seen is None:
                np.matmul(x, weight, out=h)
            else:
                np.matmul(x[:, : self._seen], weight[0, : self._seen], out=h[0])
                np.matmul(x, weight[1], out=h[1])
            np.add(h, bias, out=h)
            if self._tanh:
                np.tanh(h, out=h)
            else:
                # a quarter of what it takes with a scalar
                np.maximum(h, self._scratch("zeros", h.shape), out=h)
            self._kept.append(h)
            x = h
        return x if x.ndim == 3 else x[np.newaxis]

    def backward(self, of_last: Floats, into: list[Layer] | None, of_input: bool = False) -> Floats:
        """Write the gradients of the weights of the last `forward` into `into` (unless
        None), `of_last` [towers, n, width] being that of its result; return, if
        `of_input`, the gradients [towers, n, in] of its inputs.

        Overwrites what `forward` returned: once only.
        """
        gradient, n = of_last, len(self._kept[0])
        if self._ones.size < n:
            self._ones = np.ones((1, n), np.float32)
        for i in reversed(range(len(self._layers))):
            below, h = self._kept[i], self._kept[i + 1]
            if self._tanh:  # 1 - tanh²
                np.multiply(h, h, out=h)
                np.subtract(1, h, out=h)
            else:
                np.greater(h, 0, out=h, casting="unsafe")  # np.sign branches on each element
            np.multiply(h, gradient, out=h)
            if into is not None:
                self._differentiate(i, below, h, *into[i])
            if i or of_input:
                gradient = self._scratch(f"gradient {i}", (len(h), n, below.shape[-1]))
                np.matmul(h, self._layers[i][0].swapaxes(1, 2), out=gradient)
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
