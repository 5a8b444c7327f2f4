"""Advantages and values' targets by the native core: `gae` and `vtrace` of
`policy_gradient_formulas`, in one call."""

from ctypes import addressof
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.policy_gradient_formulas import Bools, Floats
from tidemill.native.library import Kernels, KernelTrajectory, address


class _Rows:
    """The arrays [T, N] of a sample, held while a kernel has their addresses, and those
    that it writes."""

    def __init__(
        self, reward: Floats, value: Floats, done: Bools, truncated: Bools, acted: Bools, rho: Floats | None
    ) -> None:
        self.results: tuple[Floats, Floats] = (
            np.empty(reward.shape, np.float32),
            np.empty(reward.shape, np.float32),
        )
        floats = [np.ascontiguousarray(array, np.float32) for array in (reward, value)]
        bools = [np.ascontiguousarray(array, np.bool_) for array in (done, truncated, acted)]
        ratios = None if rho is None else np.ascontiguousarray(rho, np.float32)
        self._held: list[NDArray[Any] | None] = [*floats, *bools, ratios, *self.results]
        self._fields = KernelTrajectory(
            *reward.shape, *(None if array is None else address(array) for array in self._held)
        )
        self.address = addressof(self._fields)


def native_gae(
    kernels: Kernels,
    reward: Floats,
    value: Floats,
    done: Bools,
    truncated: Bools,
    acted: Bools,
    gamma: float,
    lam: float,
    rho: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return what `gae` does, up to rounding."""
    rows = _Rows(reward, value, done, truncated, acted, rho)
    kernels.gae(rows.address, gamma, gamma * lam)
    return rows.results


def native_vtrace(
    kernels: Kernels,
    reward: Floats,
    value: Floats,
    done: Bools,
    truncated: Bools,
    acted: Bools,
    rho: Floats,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Floats, Floats]:
    """Return what `vtrace` does, up to rounding."""
    rows = _Rows(reward, value, done, truncated, acted, rho)
    kernels.vtrace(rows.address, gamma, gamma * lam, rho_clip, c_clip)
    return rows.results
