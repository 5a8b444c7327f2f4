"""Cells: forward and backward through time are those of torch's own cells, reset where
episodes begin."""

import numpy as np
import pytest
import torch

from tidemill.nets.cells import CELLS

UNITS, INPUTS = 6, 5
# of our W and U, in torch's order
COLUMNS = {"lstm": ([1, 2, 3, 0], [1, 2, 3, 0]), "gru": ([1, 2, 0], [0, 1, 2])}


def made(kind, towers, inputs=INPUTS, seed=0):
    """A cell, its weights, and where their gradients go."""
    rng = np.random.default_rng(seed)
    shapes = CELLS[kind].shapes(towers, inputs, UNITS)
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) * 0.5 for name, (shape, _) in shapes.items()
    }
    return (
        CELLS[kind](weights),
        weights,
        {name: np.full_like(array, np.nan) for name, array in weights.items()},
    )


def drawn(kind, towers, length, count, shared, seed=1):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = draw(1 if shared else towers, length * count, INPUTS)
    state = {part: draw(count, towers, UNITS) for part in CELLS[kind].parts}
    return x, state, rng.random((length, count)) < 0.3, draw(towers, length * count, UNITS)


def in_order(matrix, order):
    return torch.cat([matrix[..., i * UNITS : (i + 1) * UNITS] for i in order], -1)


def by_torch(kind, weights, x, state, on_reset, of_given):
    """What nn.LSTMCell or nn.GRUCell give, unrolled, and all gradients by autograd: of
    the weights in our order, of x, and of the first state."""
    length, count = on_reset.shape
    towers = len(weights["cell.recurrent"])
    leaf = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in weights.items()
    }
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    start = {
        part: torch.tensor(array, dtype=torch.float64, requires_grad=True) for part, array in state.items()
    }
    of_inputs, of_products = COLUMNS[kind]
    results, ends = [], []
    for g in range(towers):
        cell = (torch.nn.LSTMCell if kind == "lstm" else torch.nn.GRUCell)(
            x.shape[2], UNITS, dtype=torch.float64
        )
        bias_hh = torch.zeros(len(of_inputs) * UNITS, dtype=torch.float64)
        if kind == "gru":
            bias_hh = torch.cat([bias_hh[: 2 * UNITS], leaf["cell.candidate"][g, 0]])
        parameters = {
            "weight_ih": in_order(leaf["cell.weight"][g], of_inputs).T,
            "weight_hh": in_order(leaf["cell.recurrent"][g], of_products).T,
            "bias_ih": in_order(leaf["cell.bias"][g, 0], of_inputs),
            "bias_hh": bias_hh,
        }
        rows = x[g if len(x) > 1 else 0].reshape(length, count, -1)
        now = [start[part][:, g] for part in CELLS[kind].parts]
        for t in range(length):
            keep = torch.from_numpy(~on_reset[t])[:, None]
            now = [torch.where(keep, part, 0.0) for part in now]
            found = torch.func.functional_call(
                cell, parameters, (rows[t], tuple(now) if kind == "lstm" else now[0])
            )
            now = list(found) if kind == "lstm" else [found]
            results.append(now[0])
        ends.append(now)
    given = torch.stack(results).reshape(towers, length * count, UNITS)
    (given * torch.from_numpy(of_given)).sum().backward()
    end = {part: torch.stack([tower[i] for tower in ends], 1) for i, part in enumerate(CELLS[kind].parts)}
    return (
        given,
        end,
        {name: tensor.grad for name, tensor in leaf.items()},
        x.grad,
        {part: tensor.grad for part, tensor in start.items()},
    )


def close(found, expected):
    expected = expected.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("towers", "shared"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("length", "count"), [(1, 3), (7, 4), (40, 2)])
def test_forward_and_backward_are_torch_s(kind, towers, shared, length, count):
    cell, weights, gradient = made(kind, towers)
    x, state, on_reset, of_given = drawn(kind, towers, length, count, shared)
    expected, end, of_weights, of_x, _ = by_torch(kind, weights, x, state, on_reset, of_given)
    close(cell.forward(x, state, on_reset), expected)
    for part, array in cell.state().items():
        close(array, end[part])
    found = cell.backward(of_given.copy(), gradient, True)
    for name, array in gradient.items():
        close(array, of_weights[name])
    close(found.sum(0, keepdims=True) if shared else found, of_x)


@pytest.mark.parametrize("kind", CELLS)
def test_any_shape_in_turn(kind):
    cell, weights, gradient = made(kind, 2)
    for length, count in ((3, 5), (9, 2), (1, 1), (3, 5)):
        x, state, on_reset, of_given = drawn(kind, 2, length, count, False, seed=length)
        expected, _, of_weights, _, _ = by_torch(kind, weights, x, state, on_reset, of_given)
        close(cell.forward(x, state, on_reset), expected)
        assert cell.backward(of_given.copy(), gradient, False) is None
        for name, array in gradient.items():
            close(array, of_weights[name])


@pytest.mark.parametrize("kind", CELLS)
def test_nothing_passes_from_one_episode_into_the_next_one_nor_back(kind):
    length, count, border = 8, 3, 5
    cell, _, gradient = made(kind, 2)
    x, state, on_reset, of_given = drawn(kind, 2, length, count, False)
    on_reset[:] = False
    on_reset[border] = True
    of_given.reshape(2, length, count, -1)[:, :border] = 0  # only rows of the later episode count
    found = []
    for _ in range(2):
        given = cell.forward(x, state, on_reset).reshape(2, length, count, -1)[:, border:].copy()
        of_x = cell.backward(of_given.copy(), gradient, True).reshape(2, length, count, -1)
        assert not of_x[:, :border].any() and of_x[:, border:].all()
        found.append([given, *(array.copy() for array in gradient.values())])
        x.reshape(2, length, count, -1)[:, :border] = 7  # the earlier one showed something else
        state = {part: array - 3 for part, array in state.items()}
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)  # what is added up besides are zeros
    on_reset[border] = False
    given = cell.forward(x, state, on_reset).reshape(2, length, count, -1)[:, border:]
    assert not np.allclose(given, found[0][0], atol=1e-3)


@pytest.mark.parametrize("kind", CELLS)
def test_two_halves_are_the_whole(kind):
    """The state after one stretch is what the next one begins with; an episode that
    begins there forgets it."""
    cell, _, _ = made(kind, 2)
    x, state, on_reset, _ = drawn(kind, 2, 10, 4, False)
    whole = cell.forward(x, state, on_reset).copy()
    first, second = x[:, :24], x[:, 24:]
    parts = [cell.forward(first, state, on_reset[:6]).copy()]
    after = {part: array.copy() for part, array in cell.state().items()}
    parts.append(cell.forward(second, after, on_reset[6:]).copy())
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-6, atol=1e-6)


def test_the_lstm_s_forget_gate_begins_open():
    cell, weights, _ = made("lstm", 2)
    weights["cell.bias"][:] = 0
    cell.begin(weights)
    assert weights["cell.bias"].reshape(2, 4, UNITS).any((0, 2)).tolist() == [False, False, True, False]
    for name in ("cell.weight", "cell.recurrent"):
        weights[name][:] = 0
    state = {"hidden": np.zeros((1, 2, UNITS), np.float32), "cell": np.ones((1, 2, UNITS), np.float32)}
    cell.forward(np.ones((2, 1, INPUTS), np.float32), state, np.zeros((1, 1), bool))
    np.testing.assert_allclose(cell.state()["cell"], 1 / (1 + np.exp(-1)), rtol=1e-6)
