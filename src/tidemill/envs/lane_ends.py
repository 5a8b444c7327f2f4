"""What a tick tells of lanes that step together, from their ends and their counts: by the
native core, where it is there, in one call, else by numpy."""

from ctypes import addressof
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.core.schema import Array
from tidemill.native.library import Kernels, KernelStepped, address


class LaneEnds:
    """Who of L lanes is present, has come to the limit, and waits to be reset.

    counts: int64 [L]: env steps of each in its episode; limits: int64 [L]: how many it
        may have; idle: bool [L]: finished and not yet reset
    kernels: None: numpy
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        limits: NDArray[np.int64],
        idle: NDArray[np.bool_],
        kernels: Kernels | None,
    ) -> None:
        self._counts, self._limits, self._idle, self._kernels = counts, limits, idle, kernels
        self._stepped: Any = None
        self._ticked: tuple[Array, ...] = ()  # the tick's arrays that `_stepped` has the addresses of

    def tell(self, tick: Tick) -> None:
        """Complete a tick that has rewards and `done` already, also of lanes that wait,
        of which nothing comes. Lanes that finish wait from now on."""
        if self._kernels is not None:
            arrays = tick.done, tick.truncated, tick.present, tick.restarted, tick.reward
            if not self._ticked or not all(map(is_, arrays, self._ticked)):
                own = self._counts, self._limits, self._idle
                self._stepped = KernelStepped(len(self._idle), *map(address, (*own, *arrays)))
                self._ticked, self._of_stepped = arrays, addressof(self._stepped)
            self._kernels.end_lanes(self._of_stepped)
            return
        np.greater_equal(self._counts, self._limits, tick.truncated)
        tick.restarted.fill(False)
        np.logical_not(self._idle, tick.present)
        if 1 in self._idle.tobytes():
            tick.reward[self._idle] = 0
            tick.done[self._idle] = tick.truncated[self._idle] = False
        np.greater(tick.truncated, tick.done, tick.truncated)  # an end is an end, even at the limit
        self._idle |= tick.done
        self._idle |= tick.truncated
