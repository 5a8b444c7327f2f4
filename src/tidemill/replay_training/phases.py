"""The phases of a limited trainer: steps are granted up to the end of an iteration, or
the run's limit, where gathering stops until all that it owes is trained. Where phases end
with episodes, those that are open then are played on, and none begins.
"""

from collections.abc import Mapping
from typing import Any

from tidemill.replay.limiter import Limiter
from tidemill.replay_training.credit_grants import CreditGrants
from tidemill.replay_training.open_episodes import OpenEpisodeTracker


class Phases:
    """The phases say where the run is in its iterations, and which episodes its iteration
    has seen.

    limiter, grants: limiter and grants of the steps
    each: steps of an iteration; None: there are none
    limit: limit of the run's steps; None: there is none
    unfinished: which episodes are open, where phases end with them
    facts: where a resumed run goes on: of its checkpoint; {} for a new one
    """

    def __init__(
        self,
        limiter: Limiter,
        grants: CreditGrants,
        each: int | None,
        limit: int | None,
        unfinished: OpenEpisodeTracker | None,
        facts: Mapping[str, Any],
    ) -> None:
        self._limiter = limiter
        self._grants = grants
        self._each = each
        self._limit = limit
        self._unfinished = unfinished
        end = facts.get("iteration_end")
        self.iteration_end: int | None = (
            end if end is not None and each is not None and end % each == 0 else None
        )
        """Of the iteration that is not evaluated yet; None: it is over, and the next one
        not begun."""
        self.returns: list[float] = []
        """Of the episodes that ended in this iteration."""
        steps = int(facts.get("steps", 0))
        self.finishing = False
        """The phase is over but for open episodes."""
        self.begin(steps)
        if facts.get("finishing", False) and self.steps_reached(steps):
            self._finish()

    def begin(self, steps: int) -> None:
        """Grant up to the end. Where the lanes of a target step together more may come:
        of an iteration they count, of the run they are void (`StepsWithinLimit`)."""
        if self._each is not None and self.iteration_end is None:
            self.iteration_end = (steps // self._each + 1) * self._each
        self._end = min((end for end in (self._limit, self.iteration_end) if end is not None), default=None)
        self._limiter.begin_phase(None if self._grants.holding else self._end)
        self.finishing = False
        self._grants.keep_to(None)

    def end(self, awaiting: bool) -> None:
        """Stop granting, since the phase's steps are there; `awaiting` open episodes,
        only once nothing else is in flight, and but for them."""
        if not awaiting:
            self._limiter.drain()
        elif not self.finishing and not self._limiter.in_flight:
            self._finish()

    def _finish(self) -> None:
        assert self._unfinished is not None
        self.finishing = True
        self._limiter.begin_phase(None)
        self._grants.keep_to(self._unfinished.open)

    def end_iteration(self) -> None:
        """The iteration was evaluated; the next one is still to `begin`."""
        self.iteration_end, self.returns = None, []

    def steps_reached(self, steps: int) -> bool:
        """True when so many steps are there as the phase has."""
        return self._end is not None and steps >= self._end

    def iteration_reached(self, steps: int) -> bool:
        """True when so many steps are there as the iteration has."""
        return self.iteration_end is not None and steps >= self.iteration_end

    def open(self) -> bool:
        """True when episodes that a phase ends with are open."""
        return self._unfinished is not None and any(flags.any() for flags in self._unfinished.open)

    def quiet(self) -> bool:
        """True when no step can come. Credits of open episodes that were cut by a resume
        are used in the next phase."""
        return (self.finishing and not self.open()) or self._grants.quiet()

    def facts(self, steps: int) -> dict[str, Any]:
        """Return what checkpoints keep."""
        reached = self.iteration_reached(steps)
        facts: dict[str, Any] = {"iteration_end": self.iteration_end} if reached else {}
        return {**facts, "finishing": True} if self.finishing and (reached or self.open()) else facts
