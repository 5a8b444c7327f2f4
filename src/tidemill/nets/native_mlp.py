"""Networks of plain layers that the native core computes."""

from ctypes import addressof

import numpy as np
from numpy.typing import NDArray

from tidemill.native.library import KernelLayers, Kernels, address, threads
from tidemill.nets.activations import ACTIVATIONS, OF_SUMS
from tidemill.nets.mlp import MLP, Floats, MLPShape, total


class NativeMLP(MLP):
    """An `MLP` by the native core: a call for all layers forward, and one for all
    backward."""

    def __init__(self, shape: MLPShape, flat: Floats, kernels: Kernels) -> None:
        super().__init__(shape, flat)
        self._kernels, self._widths = kernels, np.array([*shape.hidden, shape.outputs], np.int64)
        kernels.helpers(threads() - 1)
        self._net = KernelLayers(
            shape.towers,
            len(self._widths),
            shape.inputs,
            ACTIVATIONS.index(shape.activation),
            shape.layer_norm,
            address(self._widths),
            address(flat),
        )
        self.of_net, self._into = addressof(self._net), 0
        """The address of what kernels take for the network."""
        self.of_hidden = self.of_out = self.of_spare = 0
        """The addresses of what they write and work in, of calls with the rows of
        `make_room`."""
        self._out: Floats = flat[:0].reshape(shape.towers, 0, shape.outputs)
        self.make_room(0)

    def make_room(self, n: int) -> None:
        """Make the arrays of calls with `n` rows, unless those were the last: to find an
        array's address takes as long as a narrow layer."""
        shape = self.shape
        if n == self._out.shape[1] and self.of_out:
            return
        each, widest = shape.towers * n, max(shape.hidden, default=0)
        # results, slopes, and what was normalised, with the rows' factors
        kept = 1 + (shape.activation in OF_SUMS) + shape.layer_norm
        factors = each * len(shape.hidden) * shape.layer_norm
        self._hidden: Floats = np.empty(kept * each * sum(shape.hidden) + factors, np.float32)
        self._spare: Floats = np.empty(2 * each * widest, np.float32)
        self._out = np.empty((shape.towers, n, shape.outputs), np.float32)
        self._below: Floats = np.empty((shape.towers, n, shape.inputs), np.float32)
        arrays = self._hidden, self._out, self._spare, self._below
        self.of_hidden, self.of_out, self.of_spare, self._of_below = map(address, arrays)

    def forward(self, inputs: Floats) -> Floats:
        self._inputs: Floats = np.ascontiguousarray(inputs, np.float32)
        self._of_inputs, n = address(self._inputs), len(inputs)
        self.make_room(n)
        self._kernels.forward(self.of_net, self._of_inputs, n, self.of_hidden, self.of_out)
        return self._out

    def backward(self, of_out: Floats, into: Floats | None, of_inputs: bool = False) -> Floats | None:
        if into is not None and self._gradient[0] is not into:
            self._gradient, self._into = (into, {}), address(into)
        of_out = np.ascontiguousarray(of_out, np.float32)
        self._kernels.backward(
            self.of_net,
            self._of_inputs,
            len(self._inputs),
            self.of_hidden,
            address(of_out),
            self.of_spare,
            None if into is None else self._into,
            self._of_below if of_inputs else None,
        )
        return total(self._below) if of_inputs else None

    def backward_chosen(self, towers: NDArray[np.int64]) -> Floats:
        counts = np.bincount(towers, minlength=self.shape.towers)
        rows, ones = towers.argsort(kind="stable"), np.ones(len(towers), np.float32)
        self._kernels.backward_chosen(
            self.of_net,
            len(towers),
            self.of_hidden,
            address(rows),
            address(counts),
            address(ones),
            self.of_spare,
            self._of_below,
        )
        found: Floats = self._below[0]
        return found


def mlp(shape: MLPShape, flat: Floats, kernels: Kernels | None) -> MLP:
    """Return the network of weights `flat`: by the native core where its `kernels` are
    given, else in numpy."""
    return MLP(shape, flat) if kernels is None else NativeMLP(shape, flat, kernels)
