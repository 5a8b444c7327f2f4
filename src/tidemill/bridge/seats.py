"""Which seat an agent has: simulators name agents by numbers that come and go; rows are of seats that stay."""

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import EnvironmentFault

Index = NDArray[np.intp]


class Seats:
    """The seats of one group in one simulator. An agent keeps its seat from its first row to its last; then the seat is free.

    `taken` is bool [seats]. Agents are looked up all at once; in the usual case, the same ones as in the exchange before, that is one comparison.
    """

    def __init__(self, name: str, count: int) -> None:
        """Make `count` seats for group `name`."""
        self.name, self.count = name, count
        self.taken = np.zeros(count, np.bool_)
        self._ids = np.zeros(count, np.int64)
        self._known: NDArray[np.int64] | None = None  # what was looked up last, and what was found
        self._found: Index = np.zeros(0, np.intp)

    def of(self, ids: NDArray[np.int32]) -> Index:
        """Return the seat of each agent, -1 of those that have none. The same array is returned for the same agents while nothing changes."""
        if self._known is not None and np.array_equal(ids, self._known):
            return self._found
        taken = self.taken.nonzero()[0]
        if not len(taken) or not len(ids):
            return np.full(len(ids), -1, np.intp)
        own = self._ids[taken]
        order = own.argsort()
        at = order[np.minimum(own[order].searchsorted(ids), len(own) - 1)]
        return np.where(own[at] == ids, taken[at], -1)

    def free(self, seats: Index) -> None:
        """Let these agents go."""
        if len(seats):
            self.taken[seats] = False
            self._known = None

    def seat(self, ids: NDArray[np.int32], freed: Index) -> tuple[Index, NDArray[np.bool_]]:
        """Return the seat of each agent, and which of them (bool) have just got it. Those get, in the order of their numbers, the first free seats;
        those that were `freed` in this exchange come last. Raises `EnvironmentFault` when an agent is in it twice, or seats are lacking."""
        seats = self.of(ids)
        if seats is self._found:
            return seats, np.zeros(len(ids), np.bool_)
        new = seats < 0
        known = np.sort(ids)
        if (twice := known[1:] == known[:-1]).any():
            raise EnvironmentFault(
                f'group "{self.name}": agent {known[1:][twice][0]} asks for two decisions in one exchange; request one for each agent'
            )
        if new.any():
            self.taken[freed] = True
            empty = np.concatenate([(~self.taken).nonzero()[0], np.sort(freed)])
            self.taken[freed] = False
            coming = new.nonzero()[0]
            if len(coming) > len(empty):
                alive = self.count - len(empty)
                raise EnvironmentFault(
                    f'group "{self.name}" has {alive + len(coming)} agents alive, and {self.count} seats: {alive} that have begun an episode and not '
                    f"ended it hold a seat, also while they ask for no decision. End or interrupt the episode of an agent that is removed, or "
                    f'give the group more seats: seats={{"{self.name}": {alive + len(coming)}}}'
                )
            coming = coming[ids[coming].argsort()]
            seats = seats.copy()
            seats[coming] = empty[: len(coming)]
            self._ids[seats[coming]] = ids[coming]
            self.taken[seats[coming]] = True
        self._known, self._found = ids.astype(np.int64), seats
        return seats, new

    def clear(self) -> Index:
        """Let all go, and return the seats that were taken."""
        taken = self.taken.nonzero()[0]
        self.free(taken)
        return taken
