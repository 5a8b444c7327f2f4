"""The reference's MLPs in numpy: forward, PPO's loss and backward written out as plainly
as they are fast, all large results in memory that is kept.

No change that claims speed may touch this file (see `reference`).
"""

from math import log, pi, sqrt
from typing import NamedTuple

import numpy as np

from tidemill import PPO, ActorCritic
from tidemill.api.schedule import number
from tidemill.core.schema import Array, Arrays


class Parts(NamedTuple):
    """All weights, or all their gradients, as views of one flat array."""

    log_std: Array
    hidden: list[tuple[Array, Array]]
    """(weight [towers, in, out], bias [towers, 1, out]) of each hidden layer."""
    heads: list[tuple[Array, Array]]
    """(weight [in, outputs], bias [outputs, 1]) of each tower."""


class PlainMLPs:
    """An actor and a critic as two stacked towers, or one tower with the outputs of both.
    Begins with the weights `given`: log_std, then weight [in, out] and bias of each
    layer, the actor's before the critic's."""

    def __init__(self, given: list[Array], config: ActorCritic, ppo: PPO) -> None:
        self._ppo, self._tanh = ppo, config.activation == "tanh"
        layers = len(config.hidden) + 1
        towers = [
            [(given[i], given[i + 1]) for i in range(start, start + 2 * layers, 2)]
            for start in range(1, len(given), 2 * layers)
        ]
        shapes = [given[0].shape]
        for i in range(layers - 1):
            shapes += [(len(towers), *towers[0][i][0].shape), (len(towers), 1, *towers[0][i][1].shape)]
        for tower in towers:
            shapes += [tower[-1][0].shape, (*tower[-1][1].shape, 1)]
        size = sum(int(np.prod(shape)) for shape in shapes)
        self._flat, self._gradient, self._first, self._second, self._one, self._two = np.zeros(
            (6, size), np.float32
        )
        self.weights, self.gradients = (
            _views(array, shapes, layers - 1) for array in (self._flat, self._gradient)
        )
        self.weights.log_std[...] = given[0]
        for t, tower in enumerate(towers):
            for (weight, bias), (of_weight, of_bias) in zip(self.weights.hidden, tower[:-1], strict=True):
                weight[t], bias[t] = of_weight, of_bias
            self.weights.heads[t][0][...], self.weights.heads[t][1][:, 0] = tower[-1]
        self._steps = 0
        self._rng = np.random.default_rng(0)
        self._cache: dict[tuple[object, ...], Array] = {}

    def _memory(self, *name_and_shape: object) -> Array:
        """Return memory that is there only for what this names."""
        array = self._cache.get(name_and_shape)
        if array is None:
            array = self._cache[name_and_shape] = np.ones(name_and_shape[1:], np.float32)  # type: ignore[arg-type]
        return array

    def _forward(self, x: Array) -> tuple[list[Array], list[Array]]:
        """Return the inputs of all layers, and the heads [outputs, n] of each tower."""
        layers, rows = [x], len(x)
        for i, (weight, bias) in enumerate(self.weights.hidden):
            h = self._memory(f"hidden {i}", len(weight), rows, weight.shape[2])
            np.matmul(layers[-1], weight, out=h)
            h += bias
            np.tanh(h, out=h) if self._tanh else np.maximum(h, 0, out=h)
            layers.append(h)
        return layers, [
            weight.T @ self._tower(layers[-1], t).T + bias
            for t, (weight, bias) in enumerate(self.weights.heads)
        ]

    def _tower(self, layer: Array, tower: int) -> Array:
        found: Array = layer[tower] if layer.ndim == 3 else layer
        return found

    def _backward(self, layers: list[Array], of_heads: list[Array]) -> None:
        """Write all gradients but that of log_std, `of_heads` being those of the heads.
        Overwrites the layers."""
        rows, weights, into = len(layers[0]), self.weights, self.gradients
        ones = self._memory("ones", 1, rows)
        of_last = self._memory("of last", len(of_heads), rows, layers[-1].shape[-1])
        for t, of_head in enumerate(of_heads):
            np.matmul(self._tower(layers[-1], t).T, of_head.T, out=into.heads[t][0])
            np.matmul(of_head, ones.T, out=into.heads[t][1])
            np.matmul(of_head.T, weights.heads[t][0].T, out=of_last[t])
        for i in reversed(range(len(weights.hidden))):
            h = layers[i + 1]
            if self._tanh:  # 1 - tanh²
                np.multiply(h, h, out=h)
                np.subtract(1, h, out=h)
            else:
                np.greater(h, 0, out=h, casting="unsafe")
            h *= of_last
            np.matmul(layers[i].swapaxes(-1, -2), h, out=into.hidden[i][0])
            np.matmul(ones, h, out=into.hidden[i][1])
            if i:
                of_last = self._memory(f"of {i}", *layers[i].shape)
                np.matmul(h, weights.hidden[i][0].swapaxes(1, 2), out=of_last)

    def act(self, x: Array, discrete: bool) -> None:
        """Answer n rows: values, actions and their log-probabilities."""
        (head, *_), rows = self._forward(x)[1], len(x)
        if len(self.weights.heads) == 1:
            head = head[:-1]
        if discrete:
            head -= head.max(0)
            sums = np.exp(head).cumsum(0)
            action = (sums[:-1] <= self._rng.random(rows, np.float32) * sums[-1]).sum(0)
            head[action, np.arange(rows)] - np.log(sums[-1])
        else:
            noise = self._rng.standard_normal(head.shape, np.float32)
            head += np.exp(self.weights.log_std)[:, None] * noise
            -0.5 * (noise * noise).sum(0) - self.weights.log_std.sum()

    def gradient(self, columns: Arrays) -> None:
        """Write the gradient of one minibatch."""
        ppo = self._ppo
        action, advantage, log_std = columns["action"], columns["advantage"], self.weights.log_std
        rows = len(advantage)
        layers, heads = self._forward(columns["input"])
        head, value = heads if len(heads) == 2 else (heads[0][:-1], heads[0][-1:])
        if action.dtype.kind == "i":
            head -= head.max(0)
            p = np.exp(head)
            total = p.sum(0)
            p /= total
            logs, where = head - np.log(total), (action, np.arange(rows))
            log_prob = logs[where]
        else:
            std = np.exp(log_std)[:, None]
            noise = (action.reshape(rows, -1).T - head) / std
            log_prob = -0.5 * (noise * noise).sum(0) - (
                log_std.sum() + np.float32(len(noise) * 0.5 * log(2 * pi))
            )
        ratio = np.exp(log_prob - columns["log_prob"])
        clip, bonus = number(ppo.clip), number(ppo.entropy_coefficient)
        open_ = ratio * advantage <= np.clip(ratio, 1 - clip, 1 + clip) * advantage
        of_log_prob = open_ * ratio * advantage * np.float32(-1 / rows)
        if action.dtype.kind == "i":
            of_head = p * -of_log_prob
            of_head[where] += of_log_prob
            if bonus:
                of_head += np.float32(bonus / rows) * p * (logs - (p * logs).sum(0))
            self.gradients.log_std[...] = 0
        else:
            of_head = of_log_prob * noise / std
            self.gradients.log_std[...] = (of_log_prob * (noise * noise - 1)).sum(1) - np.float32(bonus)
        of_value = (value - columns["target"]) * np.float32(number(ppo.value_coefficient) / rows)
        self._backward(
            layers, [of_head, of_value] if len(heads) == 2 else [np.concatenate((of_head, of_value))]
        )

    def step(self, columns: Arrays) -> None:
        """Do one minibatch: its gradient, clipped, and Adam (Kingma & Ba 2015, algorithm
        1)."""
        self.gradient(columns)
        gradient, limit, one, two = self._gradient, self._ppo.max_gradient_norm, self._one, self._two
        norm = sqrt(float(gradient @ gradient))
        if limit is not None and norm > limit:
            gradient *= limit / norm
        self._steps += 1
        root = sqrt(1 - 0.999**self._steps)
        np.multiply(gradient, 0.1, out=one)
        self._first *= 0.9
        self._first += one
        np.multiply(gradient, gradient, out=two)
        two *= 0.001
        self._second *= 0.999
        self._second += two
        np.sqrt(self._second, out=two)
        two += self._ppo.adam_epsilon * root
        np.divide(self._first, two, out=two)
        two *= number(self._ppo.learning_rate) * root / (1 - 0.9**self._steps)
        self._flat -= two

    def epoch(self, minibatch: float, columns: Arrays) -> int:
        """Do one epoch, in minibatches of so many rows, about; return how many rows it
        has."""
        rows = len(columns["advantage"])
        count = max(1, round(rows / minibatch))
        order = self._rng.permutation(rows)
        shuffled = {name: column.take(order, 0) for name, column in columns.items()}
        for i in range(count):
            self.step(
                {
                    name: column[rows * i // count : rows * (i + 1) // count]
                    for name, column in shuffled.items()
                }
            )
        return rows


def _views(flat: Array, shapes: list[tuple[int, ...]], hidden: int) -> Parts:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1].tolist()
    log_std, *rest = (part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True))
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    return Parts(log_std, pairs[:hidden], pairs[hidden:])
