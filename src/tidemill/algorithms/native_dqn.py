"""DQN's loss by the native core: what the networks tell, the loss and its gradient in one
call."""

from ctypes import addressof
from operator import is_

import numpy as np

from tidemill.algorithms.action_value_formulas import Floats, discounts
from tidemill.core.schema import Array, Arrays
from tidemill.native.library import KernelTransitions, address
from tidemill.nets.native_mlp import NativeMLP
from tidemill.nets.q_function import QFunction
from tidemill.nets.q_network import QPolicy


class NativeDQN:
    """Writes into `gradient` the gradient of what `online` tells, `target` being the
    target network: functions of `policy`, whose shape is `plain`."""

    def __init__(self, policy: QPolicy, online: QFunction, target: QFunction, gradient: Floats) -> None:
        assert policy.kernels is not None
        layers = online.layers, target.layers
        self._policy, self._kernel = policy, policy.kernels.dqn
        self._layers = [each for each in layers if isinstance(each, NativeMLP)]
        shape = policy.shape
        self._taken = KernelTransitions(
            actions=shape.actions, duelling=shape.duelling, gradient=address(gradient)
        )
        self._of_taken = addressof(self._taken)
        # whose arrays are bound, with powers of this gamma
        self._batch: Arrays | None = None
        self._gamma = 0.0
        self._make_room(0)

    def _make_room(self, rows: int) -> None:
        self._inputs: Floats = np.empty((2, rows, self._policy.encoder.width), np.float32)
        self._told: Floats = np.empty((3, rows), np.float32)
        for layers in self._layers:
            layers.make_room(rows)
        online, target = self._layers
        taken, (seen, then) = self._taken, map(address, self._inputs)
        taken.n, taken.seen, taken.then, taken.spare = rows, seen, then, online.of_spare
        taken.online, taken.online_hidden, taken.online_out = online.of_net, online.of_hidden, online.of_out
        taken.target, taken.target_hidden, taken.target_out = target.of_net, target.of_hidden, target.of_out
        taken.losses, taken.error, taken.value = map(address, self._told)

    def go_back(self, batch: Arrays, gamma: float, double: bool) -> tuple[float, Floats, Floats, Floats]:
        """Do what `DQNLearner._go_back` does; the arrays that are returned are written
        again by the next call. The same `batch` must have the same arrays."""
        taken, policy, rows = self._taken, self._policy, len(batch["weight"])
        if rows != self._inputs.shape[1]:
            self._make_room(rows)
        policy.features(batch, "obs", self._inputs[0])
        policy.features(batch, "next.obs", self._inputs[1])
        if batch is not self._batch or gamma != self._gamma:
            self._bind(batch, gamma)
        taken.twice = double
        if policy.mask is not None:
            (mask,) = policy.mask.names
            forbidden = np.logical_not(batch[f"next.{mask}"])
            taken.forbidden = address(forbidden)
        loss: float = self._kernel(self._of_taken)
        if loss < 0:
            raise IndexError(
                f"a batch has actions that are not of 0 to {policy.shape.actions - 1}, or transitions of "
                f"more than {taken.reach} steps"
            )
        losses, error, value = self._told
        return loss, losses, error, value

    def _bind(self, batch: Arrays, gamma: float) -> None:
        """Take rows from the arrays of `batch` from now on, which are to stay in it."""
        powers = discounts(gamma, batch["rewards"].shape[1])
        self._held: list[Array] = [
            np.ascontiguousarray(batch["action"], np.int64),
            np.ascontiguousarray(batch["rewards"], np.float32),
            np.ascontiguousarray(batch["steps"], np.int32),
            np.ascontiguousarray(batch["done"], np.bool_),
            np.ascontiguousarray(batch["weight"], np.float32),
            powers,
        ]
        same = all(map(is_, self._held, map(batch.get, ("action", "rewards", "steps", "done", "weight"))))
        # copies are of what is there now
        self._batch, self._gamma = batch if same else None, gamma
        taken, taken.reach = self._taken, len(powers) - 1
        taken.action, taken.rewards, taken.steps, taken.done, taken.weight, taken.powers = map(
            address, self._held
        )
