"""Numbers in proportion to which places are drawn: a tree of sums, 32 children to a node, all operations vectorised over the places.

A node's sum is always added up anew, from its children in their order, so that the tree follows from its leaves to the last bit, whatever was changed
when.
"""

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Places = NDArray[np.int64]

CHILDREN = 32
"""A few wide levels: each costs some calls of numpy, however many places are asked for."""
LEAST = 1e-6
"""The least priority: what was learnt exactly is still drawn now and then."""


class SumTree:
    """`size` leaves, all 0 at first; none may become negative."""

    def __init__(self, size: int) -> None:
        self._levels: list[Doubles] = []  # [nodes, CHILDREN] of the leaves, of their sums, and so on up to a single node
        nodes = size
        while not self._levels or nodes > 1:
            nodes = -(-nodes // CHILDREN)
            self._levels.append(np.zeros((nodes, CHILDREN)))
        self.leaves: Doubles = self._levels[0].reshape(-1)[:size]
        """A view: change them by `set`."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of a tree, about."""
        return 8 * size * CHILDREN // (CHILDREN - 1)

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(np.add.accumulate(self._levels[-1][0])[-1])

    def set(self, places: Places, values: Doubles | float) -> None:
        """Give leaves new values. Where a place is named twice its values must be equal."""
        self._levels[0].reshape(-1)[places] = values
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            places = places // CHILDREN
            above.reshape(-1)[places] = np.add.accumulate(below[places], axis=1)[:, -1]

    def find(self, points: Doubles) -> Places:
        """Return for each point, at least 0 and less than `total`, the place where the running sum of the leaves first exceeds it. A leaf of 0 is
        never found."""
        places = np.zeros(len(points), np.int64)
        rest = points
        row = np.arange(len(points))
        for level in reversed(self._levels):
            children = level[places]
            sums = np.add.accumulate(children, axis=1)
            child = np.minimum((sums <= rest[:, None]).sum(1), CHILDREN - 1)
            empty = children[row, child] <= 0
            if empty.any():  # rounding has put these points behind the last child that is above 0, which is meant
                last = CHILDREN - 1 - (children[:, ::-1] > 0).argmax(1)
                child = np.where(empty, last, child)
            rest = rest - np.where(child > 0, sums[row, child - 1], 0.0)
            places = places * CHILDREN + child
        return places

    def refill(self, leaves: Doubles) -> None:
        """Make these the leaves."""
        self.leaves[...] = leaves
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            above.reshape(-1)[: len(below)] = np.add.accumulate(below, axis=1)[:, -1]


class Priorities:
    """How likely places are to be drawn: in proportion to a power `alpha` of how far off the algorithm was there; new ones are as likely as the
    likeliest so far."""

    def __init__(self, places: int, alpha: float) -> None:
        self.tree, self._alpha = SumTree(places), alpha
        self.greatest = 1.0

    def admit(self, places: Places) -> None:
        """See `Watcher`."""
        self.tree.set(places, self.greatest)

    def drop(self, places: Places) -> None:
        """See `Watcher`."""
        self.tree.set(places, 0.0)

    def change(self, places: Places, priority: NDArray[np.float32]) -> None:
        """Take new priorities, before the power."""
        powers = np.maximum(priority.astype(np.float64), LEAST) ** self._alpha
        self.greatest = max(self.greatest, float(powers.max(initial=0)))
        self.tree.set(places, powers)
