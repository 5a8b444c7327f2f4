"""Which seat an agent has: simulators name agents by numbers that come and go; rows are
of seats that stay."""

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.core.errors import EnvironmentFault

Index = NDArray[np.intp]

_NEVER = 1 << 40  # the number of the agent that has had a seat which nobody had
_CACHED_LISTS = 64  # lists of agents whose seats are kept


class Seats:
    """The seats of one group in one simulator. An agent keeps its seat from its first row
    to its last; then the seat is free, and the agent's again when it comes back before
    another took it.

    `taken` is bool [seats]. Agents are looked up all at once, and what was found for a
    list of them is kept while everybody's seat is the same.
    """

    def __init__(self, name: str, count: int) -> None:
        """Make `count` seats for group `name`."""
        self.name, self.count = name, count
        self.taken = np.zeros(count, np.bool_)
        self._ids = np.full(count, _NEVER, np.int64)  # who has each seat, or had it last
        self._order = np.arange(count)  # of the seats, by these numbers
        self._sorted = self._ids
        # by the agents' numbers: seats of agents that differ and all have, or had, one
        self._found: dict[bytes, Index] = {}

    def of(self, ids: NDArray[np.int32]) -> Index:
        """Return the seat of each agent, -1 of those that have none."""
        seats = self._found.get(ids.tobytes())
        if seats is None:
            seats, had = self._look_up(ids)
            if count_nonzero(had) < len(ids):
                return np.where(had & self.taken[seats], seats, -1)
            self._keep(ids, seats)
        sat = self.taken[seats]
        return seats if count_nonzero(sat) == len(ids) else np.where(sat, seats, -1)

    def _look_up(self, ids: NDArray[np.int32]) -> tuple[Index, NDArray[np.bool_]]:
        """Return seats, and (bool) which of the agents have these, or had them last."""
        seats = self._order.take(self._sorted.searchsorted(ids), mode="clip")
        return seats, self._ids[seats] == ids

    def _keep(self, ids: NDArray[np.int32], seats: Index) -> bool:
        """Keep what was found. False where an agent is among them twice."""
        if count_nonzero(self._mask(seats)) < len(ids):
            return False
        if len(self._found) == _CACHED_LISTS:
            self._found.clear()
        self._found[ids.tobytes()] = seats
        return True

    def _mask(self, seats: Index) -> NDArray[np.bool_]:
        """Return these seats as bool [seats]."""
        mask = np.zeros(self.count, np.bool_)
        mask[seats] = True
        return mask

    def free(self, seats: Index) -> None:
        """Let these agents go."""
        self.taken[seats] = False

    def seat(self, ids: NDArray[np.int32], freed: Index) -> tuple[Index, NDArray[np.bool_]]:
        """Return the seat of each agent, and which of them (bool) have just got it.

        Those that had one before this exchange get the same again, if it is free; others,
        in the order of their numbers, the first free seats; those that were `freed` in
        this exchange come last. The same array of seats is returned for the same agents
        while nothing changes. Raises `EnvironmentFault` when an agent is in it twice, or
        seats are lacking.
        """
        found = self._found.get(ids.tobytes())
        if found is not None:
            new = ~self.taken[found]
            fresh = count_nonzero(new)
            if not fresh or not len(freed) or not count_nonzero(self._mask(freed)[found]):
                if fresh:
                    self.taken[found] = True
                return found, new
        seats, had = self._look_up(ids)
        new = ~(had & self.taken[seats])
        if len(freed) and count_nonzero(new):
            again = had & self._mask(freed)[seats]
            self._ids[seats[again]] = _NEVER  # it may get another
            had &= ~again
        self.taken[seats[had]] = True
        if count_nonzero(had) < len(ids):
            self._place(ids, seats, (~had).nonzero()[0], freed)
        if not self._keep(ids, seats):
            self._check_once(ids)
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
                f'group "{self.name}" has {alive + len(strangers)} agents alive, and {self.count} seats: '
                f"{alive} that have begun an episode and not ended it hold a seat, also while they ask for "
                "no decision. End or interrupt the episode of an agent that is removed, or give the group "
                f'more seats: seats={{"{self.name}": {alive + len(strangers)}}}'
            )
        strangers = strangers[ids[strangers].argsort()]
        seats[strangers] = order[: len(strangers)]
        self.taken[seats[strangers]] = True
        self._ids[seats[strangers]] = ids[strangers]
        self._found.clear()
        self._order = self._ids.argsort()
        self._sorted = self._ids[self._order]

    def _check_once(self, ids: NDArray[np.int32]) -> None:
        """Raise `EnvironmentFault` where an agent is among them twice."""
        known = np.sort(ids)
        if len(twice := known[1:][known[1:] == known[:-1]]):
            raise EnvironmentFault(
                f'group "{self.name}": agent {twice[0]} asks for two decisions in one exchange; request one '
                "for each agent"
            )

    def clear(self) -> Index:
        """Let all go, and return the seats that were taken."""
        taken = self.taken.nonzero()[0]
        self.free(taken)
        return taken
