"""Which seat an agent has: simulators name agents by numbers that come and go; rows are of seats that stay."""

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.core.errors import EnvironmentFault

Index = NDArray[np.intp]

_NEVER = 1 << 40  # the number of the agent that has had a seat which nobody had


class Seats:
    """The seats of one group in one simulator. An agent keeps its seat from its first row to its last; then the seat is free, and the agent's again
    when it comes back before another took it.

    `taken` is bool [seats]. Agents are looked up all at once; in the usual case, the same ones as in the exchange before, that is one comparison.
    """

    def __init__(self, name: str, count: int) -> None:
        """Make `count` seats for group `name`."""
        self.name, self.count = name, count
        self.taken = np.zeros(count, np.bool_)
        self._ids = np.full(count, _NEVER, np.int64)  # who has each seat, or had it last
        self._order = np.arange(count)  # of the seats, by these numbers
        self._sorted = self._ids
        self._known = b""  # what `seat` was asked last, and what it found
        self._found: Index = np.zeros(0, np.intp)
        self._none = np.zeros(0, np.bool_)

    def of(self, ids: NDArray[np.int32]) -> Index:
        """Return the seat of each agent, -1 of those that have none."""
        seats, had = self._look_up(ids)
        return np.where(had & self.taken[seats], seats, -1)

    def _look_up(self, ids: NDArray[np.int32]) -> tuple[Index, NDArray[np.bool_]]:
        """Return seats, and (bool) which of the agents have these, or had them last."""
        seats = self._order.take(self._sorted.searchsorted(ids), mode="clip")
        return seats, self._ids[seats] == ids

    def free(self, seats: Index) -> None:
        """Let these agents go."""
        self.taken[seats] = False
        self._known = b""

    def seat(self, ids: NDArray[np.int32], freed: Index) -> tuple[Index, NDArray[np.bool_]]:
        """Return the seat of each agent, and which of them (bool) have just got it.

        Those that had one before this exchange get the same again, if it is free; others, in the order of their numbers, the first free seats; those
        that were `freed` in this exchange come last. The same array of seats is returned for the same agents while nothing changes. Raises
        `EnvironmentFault` when an agent is in it twice, or seats are lacking.
        """
        asked = ids.tobytes()
        if asked == self._known and len(ids) == len(self._none):
            return self._found, self._none
        seats, had = self._look_up(ids)
        new = ~(had & self.taken[seats])
        if len(freed) and count_nonzero(new):
            again = had & np.isin(seats, freed)
            self._ids[seats[again]] = _NEVER  # it may get another
            had &= ~again
        self.taken[seats[had]] = True
        if count_nonzero(had) < len(ids):
            self._place(ids, seats, (~had).nonzero()[0], freed)
        seen = np.zeros(self.count, np.bool_)
        seen[seats] = True
        if count_nonzero(seen) < len(ids):
            self._check_once(ids)
        self._known, self._found, self._none = asked, seats, np.zeros(len(ids), np.bool_)
        return seats, new

    def _place(self, ids: NDArray[np.int32], seats: Index, strangers: Index, freed: Index) -> None:
        """Give these rows, agents that have no seat, one."""
        self._check_once(ids)
        last = freed[~self.taken[freed]]
        empty = ~self.taken
        empty[last] = False
        order = np.concatenate([empty.nonzero()[0], np.sort(last)])
        if len(strangers) > len(order):
            alive = self.count - len(order)
            raise EnvironmentFault(
                f'group "{self.name}" has {alive + len(strangers)} agents alive, and {self.count} seats: {alive} that have begun an episode and not '
                f"ended it hold a seat, also while they ask for no decision. End or interrupt the episode of an agent that is removed, or "
                f'give the group more seats: seats={{"{self.name}": {alive + len(strangers)}}}'
            )
        strangers = strangers[ids[strangers].argsort()]
        seats[strangers] = order[: len(strangers)]
        self.taken[seats[strangers]] = True
        self._ids[seats[strangers]] = ids[strangers]
        self._order = self._ids.argsort()
        self._sorted = self._ids[self._order]

    def _check_once(self, ids: NDArray[np.int32]) -> None:
        """Raise `EnvironmentFault` where an agent is among them twice."""
        known = np.sort(ids)
        if len(twice := known[1:][known[1:] == known[:-1]]):
            raise EnvironmentFault(f'group "{self.name}": agent {twice[0]} asks for two decisions in one exchange; request one for each agent')

    def clear(self) -> Index:
        """Let all go, and return the seats that were taken."""
        taken = self.taken.nonzero()[0]
        self.free(taken)
        return taken
