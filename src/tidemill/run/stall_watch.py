"""A run in which nothing progresses, told apart from one whose trainer takes long for an
update."""

from collections.abc import Callable, Iterable

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.run.run_state import RunState
from tidemill.run.silence import in_update
from tidemill.run.stall_report import SILENT, explain_stall, stall_limit, waits_for_pause

STALL = 30.0  # seconds without an update, everything alive, before the run says so

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


class Stalls:
    """The stalls of a run: that no update comes is told, and one in which nothing at all
    has progressed for too long ends.

    watch: for how long nothing has progressed
    """

    def __init__(self, experiment: Experiment, launcher: Launcher, state: RunState) -> None:
        self._experiment, self._launcher, self._state = experiment, launcher, state
        self.watch = StallWatch(stall_limit(experiment), lambda: any(map(self.trains, self._state.members)))
        self._told = False  # that no update comes

    def note_update(self) -> None:
        """Take note that an update has come: the next stall is told anew."""
        self._told = False

    def look(self) -> None:
        """Tell that no update comes. Raises `RunError` where nothing has progressed for
        too long."""
        if not self._told and (why := self.why()):
            self._told = True
            self._state.report.notify(why)
        state = self._state
        counts = state.running and not (state.paused or state.reason)
        if counts and any(member.pauses for member in state.members.values()):
            # who waits for that waits for a known time, within a budget
            counts = not waits_for_pause(self._experiment, state.members)
        if still := self.watch.look(counts):
            raise RunError(
                f"nothing has progressed for {still:.0f} s (limits.stall_s = "
                f"{self._experiment.limits.stall_s:g}): {self._state.report.mask(self._explain())}"
            )

    def why(self) -> str:
        """Return why there is no update, "" as long as one may come."""
        silent = awake() - self._state.progress.last_update
        if self._state.paused or not self._state.running or silent < STALL:
            return ""
        return f"no update for {silent:.0f} s: {self._explain()}"

    def _explain(self) -> str:
        return explain_stall(self._experiment, self._state.members, self._launcher.condition)

    def trains(self, name: str) -> bool:
        """True of a silent trainer that writes a checkpoint, or is in an update, for less
        than an hour."""
        member = self._state.members[name]
        silent = awake() - member.heard
        if not member.config.limited or member.buried or silent > LONGEST_WORK:
            return False
        return member.saving or (
            silent > SILENT and not self._launcher.condition(name) and in_update(self._launcher.stack(name))
        )

    def works(self, name: str) -> bool:
        """True of a trainer that `trains`, or has told that it did since it told so
        before: equal ones speak in an update."""
        return self.trains(name) or self._state.members[name].shares.get("train", 0.0) > 0

    def conditions_of(self, names: Iterable[str]) -> str:
        """Return which of these workers something keeps still that they cannot tell
        themselves, to follow a message."""
        return "".join(
            f".\n{name} {condition}" for name in names if (condition := self._launcher.condition(name))
        )
