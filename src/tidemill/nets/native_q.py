"""Acting by action values by the native core, in one call."""

from ctypes import addressof

import numpy as np
from numpy.typing import NDArray

from tidemill.native.library import KernelChosen, Kernels, address
from tidemill.nets.mlp import Floats
from tidemill.nets.native_mlp import NativeMLP
from tidemill.nets.q_function import QFunction


class NativeQ:
    """Acts by `function`, whose shape is `plain`."""

    def __init__(self, function: QFunction, kernels: Kernels) -> None:
        assert isinstance(function.layers, NativeMLP)
        shape = function.shape
        self._layers, self._kernel = function.layers, kernels.explore
        self._taken = KernelChosen(layers=self._layers.of_net, actions=shape.actions, duelling=shape.duelling)
        self._of_taken = addressof(self._taken)
        self._make_room(0)

    def _make_room(self, rows: int) -> None:
        self._action = np.empty(rows, np.int64)
        self._value: Floats = np.empty(rows, np.float32)
        self._probability = np.empty(rows, np.float64)
        taken = self._taken
        taken.n, taken.action, taken.value = rows, address(self._action), address(self._value)
        taken.probability = address(self._probability)

    def explore(
        self,
        inputs: Floats,
        forbidden: NDArray[np.bool_] | None,
        drawn: NDArray[np.int64],
        chance: NDArray[np.float64],
        epsilon: float,
    ) -> tuple[NDArray[np.int64], Floats, NDArray[np.float64]]:
        """Return [n] each, for `inputs` [n, width]: the best action that is not
        `forbidden` [n, actions], or the one `drawn` where `chance` is below `epsilon`;
        what the network tells of the best one; the probability of the action. The next
        call writes them again."""
        taken, layers = self._taken, self._layers
        if len(inputs) != taken.n:
            self._make_room(len(inputs))
        layers.make_room(len(inputs))
        inputs = np.ascontiguousarray(inputs, np.float32)
        taken.hidden, taken.out, taken.seen = layers.of_hidden, layers.of_out, address(inputs)
        if forbidden is not None:
            forbidden = np.ascontiguousarray(forbidden)
            taken.forbidden = address(forbidden)
        taken.drawn, taken.chance, taken.epsilon = address(drawn), address(chance), epsilon
        self._kernel(self._of_taken)
        return self._action, self._value, self._probability
