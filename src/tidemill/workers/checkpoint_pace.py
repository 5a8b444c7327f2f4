"""When a trainer writes checkpoints: soon while the run is young, so that a crash never
costs much of what there is, and never so often that writing them takes a notable share of
its time."""

YOUNG = 0.1
"""Share of a run's age that is lost at most while that is less than a whole interval."""
LEAST = 1.0
"""Seconds that are between two of them all the same."""
AGAIN = 5.0
"""Seconds until one that could not be written is tried again."""
LONG = 5.0
"""Seconds until the next one may be written from which on one is at once, as far as the
share allows: by then a signal's time may be over."""
SHARE = 0.02
"""Share of a run's time that writing takes, at most, the first checkpoint aside; half of
it as long as there is less than a whole interval between two. Where a run is cut for it,
that is all of the time for which everybody is held."""


class CheckpointPace:
    """The first checkpoint is due with the first update, and the next ones after a tenth
    of the run's age, `seconds` at most. Where writing one takes so long that this would
    be more than half of `share` of the time, or with `seconds` between two more than all
    of it, they are due as rarely as that asks for.

    Times are of one clock, in seconds.
    """

    def __init__(self, seconds: float, share: float = SHARE) -> None:
        self._seconds, self._share = seconds, share
        self._began: float | None = None
        self._paused: float | None = None  # when it was
        self._last = self._cost = 0.0
        self._first, self._failed = True, False

    def start(self, now: float, saved: bool) -> None:
        """Begin; `saved`: there is a checkpoint of this run. Or go on after a pause, in
        which no time has passed: what was trained before it is no less to be saved."""
        if self._began is None:
            self._began, self._last, self._first = now, now, not saved
        elif self._paused is not None:
            self._began += now - self._paused
            self._last += now - max(self._last, self._paused)  # it may have been in the pause
        self._paused = None

    def pause(self, now: float) -> None:
        """Count no time until the next `start`."""
        if self._paused is None:
            self._paused = now

    def due(self, now: float, updates: int, ahead: float = 0.0) -> bool:
        """Return whether it is time, after so many `updates`; `ahead`: seconds until it
        may be time again, as long as the next update takes, say."""
        if self._first and updates:
            return True
        began = now if self._began is None else self._began
        return now - self._last >= self.interval(now - began, bool(updates), ahead > LONG)

    def interval(self, age: float, trained: bool = True, at_once: bool = False) -> float:
        """Return how many seconds are between two at this `age` of the run; before it has
        `trained`, there is little to lose. `at_once`: there is to be one now."""
        young = max(LEAST, YOUNG * age, self._cost * (2 / self._share - 1))
        wanted = min(self._seconds, young) if trained else self._seconds
        if at_once and trained:
            wanted = 0.0
        if self._failed:
            wanted = min(wanted, AGAIN)
        return max(wanted, self._cost * (1 / self._share - 1))

    def wrote(self, began: float, ended: float) -> None:
        """Note that one was written."""
        self._last, self._cost, self._first = ended, ended - began, False
        self._failed = False

    def unchanged(self, now: float) -> None:
        """Note that there was nothing to write: the newest one is of `now`."""
        self._last = now

    def stood_still(self, began: float, ended: float) -> None:
        """Note that everybody was held for so long; it costs that where a checkpoint was
        written meanwhile, or tried."""
        if self._last >= began:
            self._last, self._cost = ended, ended - began

    def failed(self, began: float, ended: float) -> None:
        """Note that one could not be written: that is tried again soon."""
        self.wrote(began, ended)
        self._failed = True
