"""A run in which nothing progresses, told apart from one whose trainer takes long for an
update."""

from collections.abc import Callable

from tidemill.core.clock import awake

# seconds between two looks for progress; more are not counted: a callback or a cut took
# them
UNWATCHED = 1.0
LONGEST_WORK = 3600.0
"""Seconds in which a trainer that writes a checkpoint, or is in an update, counts as
doing something."""
ASK_EVERY = 10.0  # seconds: to ask for a stack takes a moment


class StallWatch:
    """A stall watch counts for how long nothing has progressed.

    most: seconds from which on that is too long, None: never
    works: function that returns whether a trainer is in something that may take longer
    """

    def __init__(self, most: float | None, works: Callable[[], bool]) -> None:
        self._most, self._works = most, works
        self._moved = self._looked = awake()
        self._excused = 0.0  # until which second of `awake` nobody asks again

    def move(self) -> None:
        """Take note that a worker has done something."""
        self._moved = awake()

    def look(self, counts: bool) -> float:
        """Return for how many seconds nothing has progressed, where that is too long,
        else 0. `counts`: whether anything is to progress now."""
        now = awake()
        if (unwatched := now - self._looked) > UNWATCHED:  # nobody has heard what was done meanwhile
            self._moved = min(now, self._moved + unwatched)
        self._looked = now
        if not counts or self._most is None:
            self._moved = now
        still = now - self._moved
        if self._most is None or still <= self._most or now < self._excused:
            return 0.0
        if still <= LONGEST_WORK and self._works():
            self._excused = now + ASK_EVERY
            return 0.0
        return still
