"""The reference's MLPs by the native core's kernels, called bare: nothing but their own
calls, numpy's random numbers, and a shuffled order.

No change that claims speed may touch this file (see `reference`).
"""

from ctypes import addressof

import numpy as np

from tidemill import PPO, ActorCritic
from tidemill.api.schedule import number
from tidemill.core.schema import Array, Arrays
from tidemill.native.library import (
    BUILT,
    KernelActing,
    KernelDescent,
    KernelLeaf,
    KernelLoss,
    KernelNetwork,
    KernelRows,
    Kernels,
    address,
    choices,
)

PARTS = 6  # numbers that a kernel tells of a minibatch


def best_kernels() -> Kernels | None:
    """Return the kernels of the best instruction set that may be used here, None where
    there are none."""
    best = choices()[-1]
    return None if best == "off" else Kernels(BUILT, best)


class BareKernels:
    """An actor and a critic that the `kernels` compute, for Discrete actions or for Box
    ones in units. Begins with the weights `given`, as `PlainMLPs` does."""

    def __init__(
        self, given: list[Array], config: ActorCritic, ppo: PPO, discrete: bool, kernels: Kernels
    ) -> None:
        self._kernels, self._discrete = kernels, discrete
        self._rng = np.random.default_rng(0)
        layers = len(config.hidden) + 1
        towers = [given[i : i + 2 * layers] for i in range(1, len(given), 2 * layers)]
        parts = [
            np.stack([tower[i] for tower in towers]) for i in range(2 * layers - 2)
        ]  # of all towers, layer by layer
        if len(towers) == 1:
            weight, bias = towers[0][-2:]
            heads = [weight[:, :-1], bias[:-1], weight[:, -1:], bias[-1:]]
        else:
            heads = [part for tower in towers for part in tower[-2:]]
        parts += [part.T for part in heads] + ([] if discrete else [given[0]])
        self.weights = np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
        self.gradient = np.zeros(self.weights.size + PARTS, np.float32)
        self._moments = np.zeros((2, self.weights.size), np.float32)
        outputs = len(heads[1])
        self._actions = 1 if discrete else outputs
        self._sizes = np.array(config.hidden, np.int64), np.array([outputs], np.int64)
        self._leaf = KernelLeaf(0 if discrete else 2, outputs, self._actions, address(self._sizes[1]))
        inputs = len(towers[0][0])
        self._network = KernelNetwork(
            len(towers), layers - 1, inputs, inputs, config.activation == "relu", 1, outputs, self._actions,
            0 if discrete else outputs, -1, address(self._sizes[0]), None, addressof(self._leaf),
            address(self.weights),
        )  # fmt: skip
        self._scratch = np.zeros(kernels.scratch(addressof(self._network)), np.float32)
        self._network.scratch = address(self._scratch)
        clip, of_values, bonus = map(number, (ppo.clip, ppo.value_coefficient, ppo.entropy_coefficient))
        self._loss = KernelLoss(clip, -1.0, of_values, bonus)
        limit = -1.0 if ppo.max_gradient_norm is None else ppo.max_gradient_norm
        self._descent = KernelDescent(
            self.weights.size, 0, ppo.clip_apart, address(self.weights), address(self.gradient),
            address(self._moments[0]), address(self._moments[1]), number(ppo.learning_rate), ppo.adam_epsilon,
            limit, -1.0,
        )  # fmt: skip

    def act(self, x: Array) -> None:
        """Answer n rows: values, actions and their log-probabilities."""
        rows, kind = len(x), np.int32 if self._discrete else np.float32
        noise = np.empty((self._actions, rows) if self._discrete else (rows, self._actions), np.float32)
        (self._rng.random if self._discrete else self._rng.standard_normal)(out=noise, dtype=np.float32)
        action, found = np.empty((rows, self._actions), kind), np.empty((2, rows), np.float32)
        into = (address(action), address(found[0]), address(found[1]))
        asked = KernelActing(address(x), address(noise), None, None, *into, rows, False, 1.0)
        self._kernels.act(addressof(self._network), addressof(asked))

    def epoch(self, minibatch: float, columns: Arrays) -> int:
        """Do one epoch, in minibatches of so many rows, about; return how many rows it
        has. Actions are int32, or float32."""
        rows = len(columns["advantage"])
        count = max(1, round(rows / minibatch))
        names = ("input", "action", "log_prob", "advantage", "target")
        places = [address(columns[name]) for name in names]
        given = KernelRows(places[0], None, *places[1:], places[-1])  # values are not clipped
        order = self._rng.permutation(rows)
        bounds = np.array([rows * i // count for i in range(count + 1)], np.int64)
        found = np.empty((count, PARTS), np.float32)
        network, of_rows, loss, descent = map(addressof, (self._network, given, self._loss, self._descent))
        done = self._kernels.ppo_epoch(
            network,
            of_rows,
            loss,
            address(order),
            address(bounds),
            count,
            count / rows,
            descent,
            address(found),
        )
        assert done == count  # only what is not finite ends it
        return rows
