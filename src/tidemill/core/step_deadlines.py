"""How long a step of an environment may take before it counts as hung: what is set, or
what follows from the steps that are known."""

from collections import deque
from collections.abc import Iterable

from tidemill.core.clock import awake

LEAST, TIMES = 10.0, 20.0
"""Seconds that each step has at least, and so many times the 99th percentile."""
FIRST = 300.0
"""Seconds of a reset, and of a step as long as few are known."""
KNOWN, KEPT = 100, 1000
"""So many steps are known once these say anything, and the newest so many count."""
MORE_TIME = "set deadline_s above what a call takes (--set workers.actor.deadline_s=SECONDS)"
"""What to do where an environment is slower than that; for messages."""
_AGAIN = 1.0  # seconds for which their percentile holds: to look at all of them takes 50 µs


def deadline(given: float | None, p99: float | None, resetting: bool = False) -> float:
    """Return how many seconds a step, or a reset, may take: those that are `given`, or
    what follows from the steps' 99th percentile; None: it is not known yet."""
    if given is not None:
        return given
    return FIRST if resetting or p99 is None else max(LEAST, TIMES * p99)


class StepTimes:
    """The seconds that the newest steps took, resets not among them. `add` may be called
    by any thread. `given`: the deadline that is set, if any; inf: any time."""

    def __init__(self, given: float | None = None) -> None:
        self.given = given
        self._newest = deque[float](maxlen=KEPT)
        self._p99: float | None = None
        self._until = 0.0  # when that is looked at again
        self.add = self._newest.append
        """Take note of a step that took so many seconds."""

    def take_over(self, known: "StepTimes") -> None:
        """Know from now on what is `known` of the steps of an environment in whose place
        this one's was made."""
        self._newest.extend(known._newest.copy())
        self._p99, self._until = known._p99, known._until

    @property
    def least(self) -> float:
        """Seconds within which nothing counts as hung."""
        return LEAST if self.given is None else self.given

    def p99(self) -> float | None:
        """Return the 99th percentile, None as long as too few steps are known."""
        if len(self._newest) < KNOWN:
            return None
        newest = sorted(self._newest.copy())
        return newest[len(newest) * 99 // 100]

    def longest(self) -> float:
        """Return how long the longest of these steps took, 0 where none is known."""
        return max(self._newest.copy(), default=0.0)

    def deadline(self, resetting: bool) -> float:
        """Return how many seconds the step, or reset, under way may take."""
        if self.given is not None or resetting:
            return deadline(self.given, None, resetting)
        if self._p99 is None or awake() > self._until:
            self._p99, self._until = self.p99(), awake() + _AGAIN
        return deadline(None, self._p99)


def take_over(times: Iterable[StepTimes], known: Iterable[StepTimes]) -> None:
    """Have each of an environment's `times` take over what is `known` of the one in whose
    place it was made."""
    for own, before in zip(times, known, strict=False):
        own.take_over(before)
