"""PPO's minibatches by the native core: rows are picked, the network evaluated and
differentiated in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.minibatches import Floats, Integers
from tidemill.core.schema import Array
from tidemill.native.library import KernelLoss, KernelRows, address
from tidemill.nets.native_actor_critic import NativeActorCritic


class NativePPO:
    """Writes the gradient and the measured parts of minibatches into `shared`, as
    `PolicyGradientLoss` has it.

    columns: of the batch that was bound last
    """

    def __init__(self, network: NativeActorCritic, shared: Floats) -> None:
        self.columns: Sequence[Mapping[str, Any]] = ()
        self._network, self._kernel = network, network.kernels.ppo
        self._loss = KernelLoss()
        self._rows = KernelRows()
        self._kept: list[Array] = []  # what `_rows` has the addresses of
        self._of_weights, self._parts = address(shared), address(shared[network.size :])

    def bind(
        self, loss: KernelLoss, inputs: Mapping[str, Array], columns: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take minibatches from the rows of these `inputs` from now on, with this `loss`;
        columns: as of `PolicyGradientLoss`."""
        self._loss, self.columns = loss, columns
        scalars = columns[1]["scalars"]
        kept = [
            np.ascontiguousarray(inputs["features"], np.float32),
            self._network.encode(columns[0]),
        ]
        kept += [scalars, *([inputs["forbidden"]] if "forbidden" in inputs else [])]
        forbidden = address(kept[3]) if len(kept) > 3 else None
        each = [address(column) for column in scalars]
        self._rows, self._kept = KernelRows(address(kept[0]), forbidden, address(kept[1]), *each), kept

    def epoch(
        self, descent: int, picked: Integers, bounds: NDArray[np.int64], weight: float, found: Floats
    ) -> int:
        """Do all minibatches of an epoch by the descent at this address, and write into
        `found` what is measured; return how many were."""
        done: int = self._network.kernels.ppo_epoch(
            *(addressof(each) for each in (self._network.training, self._rows, self._loss)),
            picked.ctypes.data,
            address(bounds),
            len(bounds) - 1,
            weight,
            descent,
            address(found),
        )
        return done

    def differentiate(self, picked: Integers, weight: float) -> None:
        """Write gradient and parts, times `weight`, of the `picked` rows."""
        self._kernel(
            addressof(self._network.training),
            addressof(self._rows),
            addressof(self._loss),
            picked.ctypes.data,
            len(picked),
            weight,
            self._of_weights,
            self._parts,
        )
