"""What is written and counted of seats that are all at the same row: by the native core,
where it is there, in one call for each half of a tick, else by numpy. Both ways leave the
same bits."""

from collections.abc import Sequence
from ctypes import addressof
from operator import is_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.stream import Answer
from tidemill.core.schema import Array, Arrays
from tidemill.native.library import KernelCopy, KernelCounted, Kernels, address

# pairs of a block and the arrays of answers whose addresses are kept: both come from few
# slots; of more, numpy copies
MOST_PAIRS = 64


class _Pair(NamedTuple):
    """A block and an answer's fields, these as they were, and how they are copied into a
    row of it; None where that takes more than copying."""

    block: Arrays
    fields: Arrays
    arrays: tuple[Array, ...]
    copies: tuple[Any, int] | None


class StepBooks:
    """The books of an agent's N seats while these are in step.

    returns: float32 or float64 [N], length: int32 [N]: what they count
    answers: names of the fields of an answer that rows hold
    kept: those of them that are kept besides, [N, ...]: actions, states
    kernels: None: numpy
    """

    def __init__(
        self,
        returns: NDArray[Any],
        length: NDArray[np.int32],
        answers: Sequence[str],
        kept: Arrays,
        kernels: Kernels | None,
    ) -> None:
        self._returns, self._length, self._answers, self._kept = returns, length, answers, kept
        self._one = np.ones_like(length)  # an array: numpy takes three times as long with a number
        self._kernels = kernels
        self._counted: Any = None
        self._ticked: tuple[Array, ...] = ()  # the tick's arrays that `_counted` has the addresses of
        self._block: Arrays = {}
        self._rewards = 0  # where those of `_block` lie
        self._pairs = dict[tuple[int, int], _Pair]()
        self._played = -1, -1
        self._players: Arrays = {
            "version": np.full(len(length), -1, np.int64),
            "policy": np.full(len(length), -1, np.int16),
        }

    def count(self, tick: Tick, block: Arrays, row: int) -> bool | None:
        """Count a tick, and write its rewards into the block's row `row`, if that is any
        (>= 0). Return whether an episode ends. None, with nothing done, where the seats
        are not in step."""
        if self._kernels is not None and self._points_at(tick):
            if block is not self._block:
                self._block, self._rewards = block, address(block["reward"])
            place = self._rewards + row * tick.reward.nbytes if row >= 0 else None
            ends: int = self._kernels.count_tick(self._of_counted, place)
            return None if ends < 0 else ends > 0
        if 1 in tick.restarted.tobytes() or 0 in tick.present.tobytes():
            return None
        if row >= 0:
            block["reward"][row] = tick.reward
        self._returns += tick.reward
        self._length += self._one
        return 1 in tick.done.tobytes() or 1 in tick.truncated.tobytes()

    def _points_at(self, tick: Tick) -> bool:
        """Have the core count this tick's arrays. False where an environment has put
        others in their place that it cannot read."""
        arrays = tick.reward, tick.done, tick.truncated, tick.present, tick.restarted
        if not self._ticked or not all(map(is_, arrays, self._ticked)):
            self._ticked, self._counted = arrays, None
            forms = [(array.dtype.char, array.shape, array.flags.c_contiguous) for array in arrays]
            if forms == [(kind, self._length.shape, True) for kind in "f????"]:
                held = map(address, (*arrays, self._returns, self._length))
                self._counted = KernelCounted(len(self._length), self._returns.dtype == np.float64, *held)
                self._of_counted = addressof(self._counted)
        return self._counted is not None

    def complete(self, answer: Answer, block: Arrays, row: int) -> None:
        """Write an answer for all seats, in order, into the block's row `row`, and keep
        what is kept of it."""
        fields = answer.fields
        pair = self._pairs.get((id(block), id(fields)))
        if pair is None and self._kernels is not None and len(self._pairs) < MOST_PAIRS:
            pair = _Pair(block, fields, tuple(fields.values()), self._copies(block, fields))
            self._pairs[id(block), id(fields)] = pair
        if pair is not None and pair.copies is not None and all(map(is_, fields.values(), pair.arrays)):
            if self._played != (answer.version, answer.policy):
                self._played = answer.version, answer.policy
                self._players["version"].fill(answer.version)
                self._players["policy"].fill(answer.policy)
            self._kernels.copy_rows(*pair.copies, row)  # type: ignore[union-attr]
            return
        count = len(self._length)
        for name in self._answers:
            block[name][row] = fields[name][:count]
        block["version"][row], block["policy"][row] = answer.version, answer.policy
        for name, array in self._kept.items():
            array[...] = fields[name][:count]

    def _copies(self, block: Arrays, fields: Arrays) -> tuple[Any, int] | None:
        """Return all copies of an answer as the core takes them, or None where types or
        shapes differ, or an array has gaps."""
        found = []
        given = {**{name: fields[name] for name in self._answers}, **self._players}
        pairs = [(array, block[name], block[name][0].nbytes) for name, array in given.items()]
        pairs += [(fields[name], array, 0) for name, array in self._kept.items()]
        for source, array, step in pairs:
            row = array[0] if step else array
            whole = source.flags.c_contiguous and array.flags.c_contiguous and source.dtype == array.dtype
            if not whole or source[: len(row)].shape != row.shape:
                return None
            found.append(KernelCopy(row.nbytes, step, address(source), address(array)))
        return (KernelCopy * len(found))(*found), len(found)
