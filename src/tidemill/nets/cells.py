"""Recurrent cells, LSTM and GRU: forward over sequences and backward through time,
written out in numpy.

G towers (of actor and critic, stacked as in `mlp`), L rows in time, m sequences, w
units. A part of the state is [m, G, w], as rows hold it. All that does not depend on the
state is done for all L rows at once (the inputs' share of the gates, the slopes, the
gradients of the weights), so that a row costs a product with the recurrent weights and a
handful of elementwise operations.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import SchemaError
from tidemill.nets.scratch import Scratch

Floats = NDArray[np.float32]
Shapes = dict[str, tuple[tuple[int, ...], float]]
"""Shape and orthogonal gain (0: starts as zeros) of weights, by name."""

HALF, ONE = np.float32(0.5), np.float32(1)  # σ(x) = ½ + ½ tanh(½x)


class Cell(ABC):
    """A cell of `weights`, which stay where they are and are read anew by each `forward`.
    Results lie in memory that the next one rewrites."""

    parts: ClassVar[tuple[str, ...]]
    """What a state consists of. The first one is also what the cell gives."""
    gates: ClassVar[int]
    """Products with the inputs and with the state, in units."""

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        self._weight, self._recurrent, self._bias = (
            weights[f"cell.{name}"] for name in ("weight", "recurrent", "bias")
        )
        self.towers, self.units = self._recurrent.shape[:2]
        self._scratch = Scratch()
        self._resets: list[NDArray[np.intp] | None] = []

    @classmethod
    def shapes(cls, towers: int, inputs: int, units: int) -> Shapes:
        """Return the weights of a cell."""
        size = cls.gates * units
        return {
            "cell.weight": ((towers, inputs, size), 1.0),
            "cell.recurrent": ((towers, units, size), 1.0),
            "cell.bias": ((towers, 1, size), 0),
        }

    @classmethod
    def begin(cls, weights: Mapping[str, Floats]) -> None:
        """Give new weights the first values that are not as `shapes` says."""

    def forward(self, x: Floats, state: Mapping[str, Floats], on_reset: NDArray[np.bool_]) -> Floats:
        """Return what the cell gives for every row, [G, L·m, w], rows time first.

        x: inputs [G, L·m, in], or [1, L·m, in] where the towers share them; kept for
            `backward`
        state: part → [m, G, w]: before the first row
        on_reset: [L, m]: the rows that begin an episode, before which the state is the
            default one, zeros
        """
        length, count = on_reset.shape
        self._x = x
        inputs = self._scratch("inputs", (self.towers, length * count, self._bias.shape[2]))
        np.matmul(x, self._weight, out=inputs)
        inputs += self._bias
        self._before = before = self._scratch("before", (self.towers, length, count, self.units))
        outputs = self._scratch("outputs", before.shape)
        before[:, 0] = state[self.parts[0]].swapaxes(0, 1)
        some: NDArray[np.bool_] = np.logical_or.reduce(on_reset, axis=1)
        self._resets = [on_reset[t].nonzero()[0] if some[t] else None for t in range(length)]
        self._unroll(inputs.reshape(self.towers, length, count, -1), state, outputs)
        return outputs.reshape(self.towers, length * count, self.units)

    @abstractmethod
    def state(self) -> dict[str, Floats]:
        """Return the state after the last row of the last `forward`, part → [m, G, w];
        views."""

    @abstractmethod
    def backward(self, of_outputs: Floats, into: Mapping[str, Floats], of_inputs: bool) -> Floats | None:
        """Write the gradients of the weights of the last `forward` into `into`,
        `of_outputs` [G, L·m, w] (overwritten) being that of its result, and return that
        of its inputs [G, L·m, in] where it is asked for. Nothing flows back from one
        episode into the one before it, nor into the state before the first row. Once for
        each `forward`."""

    @abstractmethod
    def _unroll(self, inputs: Floats, state: Mapping[str, Floats], outputs: Floats) -> None:
        """Write `outputs` [G, L, m, w] from the inputs' share of the gates [G, L, m,
        gates·w], which is overwritten and kept."""

    def _reset(self, row: int, *parts: Floats) -> None:
        """Clear the columns of `parts` [G, m, w] whose episodes begin at `row`."""
        columns = self._resets[row]
        if columns is not None:
            for part in parts:
                part[:, columns] = 0

    def _of_weights(
        self, of_inputs: Floats, of_products: Floats, into: Mapping[str, Floats], wanted: bool
    ) -> Floats | None:
        """Write the gradients of the weights that all cells have from those of the gates'
        shares [G, L·m, gates·w]; return that of x if wanted."""
        x, rows = self._x, of_inputs.shape[1]
        np.matmul(x.swapaxes(1, 2), of_inputs, out=into["cell.weight"])
        np.matmul(
            self._before.reshape(self.towers, rows, self.units).swapaxes(1, 2),
            of_products,
            out=into["cell.recurrent"],
        )
        np.matmul(self._ones(rows), of_inputs, out=into["cell.bias"])
        if not wanted:
            return None
        return np.matmul(
            of_inputs,
            self._weight.swapaxes(1, 2),
            out=self._scratch("of x", (self.towers, rows, self._weight.shape[1])),
        )

    def _ones(self, rows: int) -> Floats:
        """Return ones [1, rows]: a product with them is a fifth of what np.sum takes."""
        ones = self._scratch("ones", (1, rows))
        ones.fill(1)
        return ones


class LSTM(Cell):
    """Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of
    Gers et al. 2000, "Learning to Forget", eq. 3-7:

    (o, i, f, g) = (σ, σ, σ, tanh)(x W + h U + b);  c' = f c + i g;  h' = o tanh(c')
    """

    parts = "hidden", "cell"
    gates = 4

    @classmethod
    def begin(cls, weights: Mapping[str, Floats]) -> None:
        """Open the forget gate: Jozefowicz et al. 2015, "An Empirical Exploration of
        Recurrent Network Architectures", section 2.2."""
        bias = weights["cell.bias"]
        units = bias.shape[-1] // 4
        bias[..., 2 * units : 3 * units] = 1

    def state(self) -> dict[str, Floats]:
        return {"hidden": self._outputs[:, -1].swapaxes(0, 1), "cell": self._cells[:, -1].swapaxes(0, 1)}

    def _unroll(self, inputs: Floats, state: Mapping[str, Floats], outputs: Floats) -> None:
        towers, length, count, _ = inputs.shape
        units, before = self.units, self._before
        gates = inputs.reshape(towers, length, count, 4, units)
        cells = self._scratch("cells", (towers, length + 1, count, units))
        squashed = self._scratch("squashed", outputs.shape)
        product = self._scratch("product", (towers, count, 4 * units))
        added = self._scratch("added", (towers, count, units))
        cells[:, 0] = state["cell"].swapaxes(0, 1)
        self._reset(0, before[:, 0], cells[:, 0])
        for t in range(length):
            row, cell = inputs[:, t], cells[:, t + 1]
            np.matmul(before[:, t], self._recurrent, out=product)
            row += product
            sigmoids = row[..., : 3 * units]
            sigmoids *= HALF
            np.tanh(row, out=row)
            sigmoids *= HALF
            sigmoids += HALF
            gate = gates[:, t]
            np.multiply(gate[:, :, 2], cells[:, t], out=cell)
            cell += np.multiply(gate[:, :, 1], gate[:, :, 3], out=added)
            np.multiply(gate[:, :, 0], np.tanh(cell, out=squashed[:, t]), out=outputs[:, t])
            if t + 1 < length:
                before[:, t + 1] = outputs[:, t]
                self._reset(t + 1, before[:, t + 1], cell)
        self._gates, self._cells, self._squashed, self._outputs = gates, cells, squashed, outputs

    def backward(self, of_outputs: Floats, into: Mapping[str, Floats], of_inputs: bool) -> Floats | None:
        gates, squashed, cells = self._gates, self._squashed, self._cells
        towers, length, count, _, units = gates.shape
        # All that of_gates and of_cell are multiplied by, for all rows: o' tanh(c), i' g,
        # f' c, g' i and o tanh'(c).
        slopes = self._scratch("slopes", gates.shape)
        of_sigmoids = np.subtract(ONE, gates[..., :3, :], out=slopes[..., :3, :])
        of_sigmoids *= gates[..., :3, :]
        _one_minus_square(gates[..., 3, :], slopes[..., 3, :])
        for gate, factor in enumerate((squashed, gates[..., 3, :], cells[:, :-1], gates[..., 1, :])):
            slope = slopes[..., gate, :]
            slope *= factor
        into_cell = _one_minus_square(squashed, self._scratch("into cell", squashed.shape))
        into_cell *= gates[..., 0, :]

        of_outputs = of_outputs.reshape(towers, length, count, units)
        of_hidden = self._scratch("of hidden", (towers, count, units))
        of_cell = self._scratch("of cell", (towers, count, units))
        added, back = self._scratch("added", of_cell.shape), self._recurrent.swapaxes(1, 2)
        of_hidden.fill(0)
        of_cell.fill(0)
        of_gates = slopes.reshape(towers, length, count, 4 * units)
        for t in reversed(range(length)):
            of_row, slope = of_outputs[:, t], slopes[:, t]
            of_row += of_hidden
            of_cell += np.multiply(of_row, into_cell[:, t], out=added)
            np.multiply(slope[:, :, 0], of_row, out=slope[:, :, 0])
            np.multiply(slope[:, :, 1:], of_cell[:, :, np.newaxis], out=slope[:, :, 1:])
            if t:
                np.matmul(of_gates[:, t], back, out=of_hidden)
                of_cell *= gates[:, t, :, 2]
                self._reset(t, of_hidden, of_cell)
        flat = of_gates.reshape(towers, length * count, 4 * units)
        return self._of_weights(flat, flat, into, of_inputs)


class GRU(Cell):
    """Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for
    Statistical Machine Translation", eq. 5-8, with the reset gate after the product, as
    libraries have it, so that a row needs only one:

    (r, z) = σ(x W + h U + b);  n = tanh(x W + b + r (h U + d));  h' = z h + (1 - z) n

    W and b have the columns n, r, z; U has r, z, n, so that in memory [n, r, z, the
    product in n] each takes three neighbours.
    """

    parts = ("hidden",)
    gates = 3

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        super().__init__(weights)
        self._candidate = weights["cell.candidate"]

    @classmethod
    def shapes(cls, towers: int, inputs: int, units: int) -> Shapes:
        return {**super().shapes(towers, inputs, units), "cell.candidate": ((towers, 1, units), 0)}

    def state(self) -> dict[str, Floats]:
        return {"hidden": self._outputs[:, -1].swapaxes(0, 1)}

    def _unroll(self, inputs: Floats, state: Mapping[str, Floats], outputs: Floats) -> None:
        towers, length, count, _ = inputs.shape
        units, before = self.units, self._before
        gates = inputs.reshape(towers, length, count, 3, units)
        products, change = self._scratch("products", outputs.shape), self._scratch("change", outputs.shape)
        product = self._scratch("product", (towers, count, 3 * units))
        added = self._scratch("added", (towers, count, units))
        self._reset(0, before[:, 0])
        for t in range(length):
            row, gate = inputs[:, t], gates[:, t]
            new, reset, keep = gate[:, :, 0], gate[:, :, 1], gate[:, :, 2]
            np.matmul(before[:, t], self._recurrent, out=product)
            sigmoids = row[..., units:]
            sigmoids += product[..., : 2 * units]
            sigmoids *= HALF
            np.tanh(sigmoids, out=sigmoids)
            sigmoids *= HALF
            sigmoids += HALF
            np.add(product[..., 2 * units :], self._candidate, out=products[:, t])
            new += np.multiply(reset, products[:, t], out=added)
            np.tanh(new, out=new)
            row = np.multiply(keep, np.subtract(before[:, t], new, out=change[:, t]), out=outputs[:, t])
            row += new
            if t + 1 < length:
                before[:, t + 1] = outputs[:, t]
                self._reset(t + 1, before[:, t + 1])
        self._gates, self._products, self._change, self._outputs = gates, products, change, outputs

    def backward(self, of_outputs: Floats, into: Mapping[str, Floats], of_inputs: bool) -> Floats | None:
        gates = self._gates
        towers, length, count, _, units = gates.shape
        new, reset, keep = (gates[..., gate, :] for gate in range(3))
        # All that of_given is multiplied by, for all rows: n' (1 - z), r' (h U + d) n' (1
        # - z), z' (h - n), r n' (1 - z).
        slopes = self._scratch("slopes", (towers, length, count, 4, units))
        of_new = _one_minus_square(new, slopes[..., 0, :])
        of_new *= np.subtract(ONE, keep, out=slopes[..., 3, :])
        of_sigmoids = np.subtract(ONE, gates[..., 1:, :], out=slopes[..., 1:3, :])
        of_sigmoids *= gates[..., 1:, :]
        of_reset, of_keep = slopes[..., 1, :], slopes[..., 2, :]
        of_reset *= self._products
        of_reset *= of_new
        of_keep *= self._change
        np.multiply(of_new, reset, out=slopes[..., 3, :])

        of_outputs = of_outputs.reshape(towers, length, count, units)
        of_hidden = self._scratch("of hidden", (towers, count, units))
        added = self._scratch("added", (towers, count, units))
        back = self._recurrent.swapaxes(1, 2)
        of_hidden.fill(0)
        of_gates = slopes.reshape(towers, length, count, 4 * units)
        for t in reversed(range(length)):
            of_row, slope = of_outputs[:, t], slopes[:, t]
            of_row += of_hidden
            slope *= of_row[:, :, np.newaxis]
            if t:
                np.matmul(of_gates[:, t, :, units:], back, out=of_hidden)
                of_hidden += np.multiply(of_row, keep[:, t], out=added)
                self._reset(t, of_hidden)
        flat = of_gates.reshape(towers, length * count, 4 * units)
        np.matmul(self._ones(length * count), flat[..., 3 * units :], out=into["cell.candidate"])
        return self._of_weights(flat[..., : 3 * units], flat[..., units:], into, of_inputs)


def _one_minus_square(x: Floats, out: Floats) -> Floats:
    """Write 1 - x², the slope of tanh where it is x, into `out`."""
    np.multiply(x, x, out=out)
    return np.subtract(ONE, out, out=out)


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


class Memory(NamedTuple):
    """A cell yet to be made."""

    cell: type[Cell]
    units: int


def check_stretches(inputs: Mapping[str, Any]) -> None:
    """Raise `SchemaError` for the inputs of rows without their order in time."""
    if "on_reset" not in inputs:
        raise SchemaError(
            "a policy that remembers is trained on stretches of rows: besides what prepare() gives, its "
            "inputs hold on_reset, state.* and rows (see tidemill.nets.trainable), as PPO hands them in; an "
            "algorithm that takes rows one by one trains ActorCritic"
        )
