"""Numbers in proportion to which places are drawn: they lie in blocks, and each block has
its sum.

A sum is always added up anew from the numbers of its block, so that all sums follow from
the numbers to the last bit, whatever was changed when.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Places = NDArray[np.int64]

LEAST = 1e-6
"""The least priority: what was learnt exactly is still drawn now and then."""


def _width(size: int) -> int:
    """Return how many numbers a block has. A batch of n looks at the sums of all blocks
    and at n blocks: with 64 these are as many numbers."""
    return max(isqrt(size) // 8, 1)


class BlockSums:
    """Block sums hold `size` numbers, all 0 at first, and the sum of each block of them;
    none may become negative."""

    def __init__(self, size: int) -> None:
        self._width = _width(size)
        self._blocks: Doubles = np.zeros((-(-size // self._width), self._width))
        self._flat = self._blocks.reshape(-1)
        self._sums: Doubles = np.zeros(len(self._blocks))
        # the sum of all blocks before each one, as of the last draw
        self._before: Doubles = np.zeros(len(self._blocks) + 1)
        self.numbers: Doubles = self._flat[:size]
        """A view: change them by `set`."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of it, about."""
        return 8 * (size + 2 * -(-size // _width(size)))

    def set(self, places: Places, values: Doubles | float) -> None:
        """Give places new numbers. Of a place that is named twice the last one counts."""
        self._flat[places] = values
        blocks = places // self._width
        self._sums[blocks] = np.add.reduce(self._blocks.take(blocks, 0), axis=1)

    def refill(self, numbers: Doubles) -> None:
        """Make these the numbers."""
        self.numbers[...] = numbers
        self._sums[:] = np.add.reduce(self._blocks, axis=1)

    def find(self, shares: Doubles) -> tuple[Places, Doubles]:
        """Return for each share of the sum of all, at least 0 and at most 1, the place
        where the running sum of the numbers first exceeds it, and what share of the sum
        the number there is. A number of 0 is never found; one must be above 0."""
        before = self._before
        np.add.accumulate(self._sums, out=before[1:])
        total = before[-1]
        # A share that rounding puts at the end of all, or of its block, or behind that,
        # means the last number above 0 there.
        points = np.minimum(shares * total, np.nextafter(total, 0))
        blocks = before.searchsorted(points, "right") - 1
        within = np.add.accumulate(self._blocks.take(blocks, 0), axis=1)
        rest = np.minimum(points - before[blocks], np.nextafter(within[:, -1], 0))
        places = blocks * self._width + (within > rest[:, None]).argmax(1)
        return places, self.numbers[places] / total


class Priorities:
    """Priorities say how likely places are to be drawn: in proportion to a power `alpha`
    of how far off the algorithm was there; new ones are as likely as the likeliest so
    far."""

    def __init__(self, places: int, alpha: float) -> None:
        self.powers, self._alpha = BlockSums(places), alpha
        self.greatest = 1.0

    def admit(self, places: Places) -> None:
        """See `TransitionWatcher`."""
        self.powers.set(places, self.greatest)

    def drop(self, places: Places) -> None:
        """See `TransitionWatcher`."""
        self.powers.set(places, 0.0)

    def change(self, places: Places, priority: NDArray[np.float32]) -> None:
        """Take new priorities, before the power."""
        powers = np.maximum(priority.astype(np.float64), LEAST) ** self._alpha
        self.greatest = max(self.greatest, float(powers.max(initial=0)))
        self.powers.set(places, powers)
