"""A trainer that nothing brings on, told apart from one that takes long for an update;
and who evaluates or decides beside training, and lacks what is due to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tidemill.api.control_messages import ENDED, State
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.core.thread_stacks import whereabouts
from tidemill.run.run_state import RunState
from tidemill.run.silence import LEAST, in_update
from tidemill.run.stall_report import (
    SILENT,
    concerns,
    explain_stall,
    stall_limit,
    waits_for_pause,
    who_explains,
)
from tidemill.run.waiting import Waiting, trainers_of

STALL = 30.0  # seconds without an update, everything alive, before the run says so
LOOK = 0.25  # seconds between two looks: workers report as often

# seconds between two looks for progress; more are not counted: a callback or a cut took
# them
UNWATCHED = 1.0
LONGEST_WORK = 3600.0
"""Seconds in which a trainer that writes a checkpoint, or is in an update, counts as
doing something."""
ASK_EVERY = 10.0  # seconds: to ask for a stack takes a moment
TIMES = 2.0  # so many times as long as it lacked something, until it is told again


class StallWatch:
    """A stall watch counts for how long a trainer has made no update, and for how long
    nothing has progressed that could bring it to one.

    most: seconds from which on that is too long, None: never
    works: function that returns whether somebody is in something that may take longer
    """

    def __init__(self, most: float | None, works: Callable[[], bool]) -> None:
        self._most, self._works = most, works
        self._moved = self._updated = self._looked = awake()
        self._excused = 0.0  # until which second of `awake` nobody asks again

    @property
    def idle(self) -> float:
        """Seconds without an update, at the last look."""
        return self._looked - self._updated

    def move(self, updated: bool = False) -> None:
        """Take note that something was done that brings the trainer on, or that it has
        `updated`."""
        self._moved = awake()
        if updated:
            self._updated = self._moved

    def look(self, counts: bool) -> float:
        """Return for how many seconds nothing has progressed, where that is too long,
        else 0. `counts`: whether anything is to progress now."""
        now = awake()
        if (unwatched := now - self._looked) > UNWATCHED:  # nobody has heard what was done meanwhile
            self._moved = min(now, self._moved + unwatched)
            self._updated = min(now, self._updated + unwatched)
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
    """The stalls of a run, of each trainer by itself: that it makes no update is told,
    and the run ends where nothing that could bring it to one has progressed for too long.
    A trainer that waits for another one, which makes updates, has not stalled, as a
    population's members do. An evaluation for which nobody waits, or a population, to
    which something is due (`WorkerStatistics.due`), and nothing brings it, is told
    likewise; it ends no run.

    watches: for how long, by trainer
    """

    def __init__(self, experiment: Experiment, launcher: Launcher, state: RunState) -> None:
        self._experiment, self._launcher, self._state = experiment, launcher, state
        self._processes = experiment.processes()
        self._waiting = Waiting(experiment, state.who_answers.edges)
        self.watches = {
            name: StallWatch(stall_limit(experiment), partial(self._excused, name))
            for name in trainers_of(experiment)
        }
        self._done, self._updated = set[str](), set[str]()  # since the last look, by whom
        self._concerns: dict[str, set[str]] = {}  # whose work may bring on whom, as they were then
        self._stalled: list[str] = []
        self._beside: dict[str, StallWatch] = {}  # by worker to which something was due so far
        self._lacking: dict[str, float] = {}  # for how many seconds, of whom that is told
        self._patience: dict[str, float] = {}  # seconds that it may lack it for
        self._told: dict[str, str] = {}  # of whom, with who explained it
        self._looked = 0.0

    def begin(self) -> None:
        """Count from now on: the run begins, or goes on after a pause."""
        for watch in self.watches.values():
            watch.move(updated=True)

    def note(self, name: str, update: bool = False) -> None:
        """Take note that a worker has done something, or has made an `update`."""
        self._done.add(name)
        if update:
            self._updated.add(name)

    def look(self) -> None:
        """Tell that no update comes, or nothing that is due. Raises `RunError` where
        nothing that could bring a trainer to one has progressed for too long."""
        if (now := awake()) - self._looked < LOOK:
            return
        self._looked, state, members = now, self._state, self._state.members
        running = state.running and not state.paused
        living = [name for name in self.watches if members[name].state not in ENDED]
        # by what was known when it was done: who has just updated was waited for so far
        awaited = self._awaited()
        self._concerns = {name: concerns(name, members, awaited) - self._waiting.servers for name in living}
        for name in living:
            if name in self._updated or self._done & self._concerns[name]:
                self.watches[name].move(updated=name in self._updated)
        self._look_at_what_is_due(awaited)
        self._done.clear()
        self._updated.clear()
        pauses = any(member.pauses for member in members.values())
        still = dict[str, float]()
        for name in living:
            # who waits for a pause waits for a known time, within a budget
            counts = running and not (state.reason or (pauses and waits_for_pause(name, members, awaited)))
            if seconds := self.watches[name].look(counts):
                still[name] = seconds
        updating = {name for name in living if self.watches[name].idle < STALL}
        self._stalled = [
            name
            for name in living
            if running and name not in updating and not self._concerns[name] & updating
        ]
        if still:
            self._end(still)
        self._tell()

    def _look_at_what_is_due(self, awaited: Mapping[str, Mapping[str, str]]) -> None:
        """See who lacks what is due to it, though its loop turns: one that is silent is
        told as that."""
        state, before, self._lacking = self._state, self._lacking, {}
        for name, member in state.members.items():
            if member.due and name not in self._beside:
                self._beside[name], self._patience[name] = (
                    StallWatch(STALL, partial(self._held_up, name)),
                    STALL,
                )
        for name, watch in self._beside.items():
            member = state.members[name]
            self._concerns[name] = concerns(name, state.members, awaited) - self._waiting.servers
            if self._done & self._concerns[name]:
                watch.move()
                # what takes so long may do so again
                self._patience[name] = max(self._patience[name], TIMES * before.get(name, 0.0))
            turns = member.state is State.RUNNING and awake() - member.heard <= LEAST
            counts = turns and state.running and not (state.paused or state.reason)
            seconds = watch.look(counts and bool(member.due and awaited[name]))
            if seconds > self._patience[name]:
                self._lacking[name] = seconds

    def _held_up(self, name: str) -> bool:
        """True where a trainer that shares a process with whom `name` waits for is in
        something that may take long."""
        mates = {mate for names in self._processes if self._concerns[name] & {*names} for mate in names}
        return any(self.trains(mate) for mate in mates)

    def _end(self, still: dict[str, float]) -> None:
        name = max(still, key=lambda each: still[each])
        what = "nothing" if len(self.watches) == 1 else f"nothing that {name} waits for"
        names = [name, *(other for other in self._stalled if other != name)]
        members = self._state.members
        found = dict.fromkeys(self._see(names).values())
        # of those that are silent the chain itself says it
        seen = [who for who in found if members[who].where and awake() - members[who].heard <= SILENT]
        at = "".join(f".\n{who} is in {members[who].where}" for who in seen)
        raise RunError(
            f"{what} has progressed for {still[name]:.0f} s (limits.stall_s = "
            f"{self._experiment.limits.stall_s:g}): {self._state.report.mask(self._explain(names) + at)}"
        )

    def _tell(self) -> None:
        """Tell of those that have stalled since the last look, but for those that wait
        for one who was told."""
        stalled = [*self._stalled, *self._lacking]
        self._told = {name: who for name, who in self._told.items() if name in stalled}
        if not (new := [name for name in stalled if name not in self._told]):
            return
        found = self._see(new)
        untold = [name for name in new if found[name] not in self._told.values()]
        self._told |= found
        if untold:
            self._state.report.notify_of(untold[0], self._words(untold))

    def _see(self, names: Iterable[str]) -> dict[str, str]:
        """Return who explains why nothing comes of each of these, once it is known where
        those are."""
        awaited, members = self._awaited(), self._state.members
        conditions = {name: self._launcher.condition(name) for name in members}
        found = {name: who_explains(name, members, awaited, conditions.__getitem__) for name in names}
        for who in {*found.values()}:
            if not (members[who].buried or conditions[who]):
                members[who].where = whereabouts(self._launcher.stack(who))
        return found

    def why(self) -> str:
        """Return why trainers make no update, and who lacks what is due to it, "" as long
        as one may come of each."""
        names = [*self._stalled, *self._lacking]
        return self._words(names) if names and not self._state.paused else ""

    def _words(self, names: Sequence[str]) -> str:
        trainers = [name for name in names if name in self.watches]
        told = [
            f"no progress of {name} for {self._lacking[name]:.0f} s"
            for name in names
            if name in self._lacking
        ]
        if trainers:
            idle = max(self.watches[name].idle for name in trainers)
            whose = "" if len(trainers) == len(self.watches) else f" of {', '.join(trainers)}"
            told.insert(0, f"no update{whose} for {idle:.0f} s")
        return f"{', '.join(told)}: {self._explain(names)}"

    def _explain(self, names: Iterable[str]) -> str:
        return explain_stall(names, self._state.members, self._awaited(), self._launcher.condition)

    def awaited(self) -> dict[str, dict[str, str]]:
        """Return whom each worker may wait for now, and for what; who answers, for
        requests."""
        found = self._awaited()
        return {name: each | self._waiting.asked.get(name, {}) for name, each in found.items()}

    def _awaited(self) -> dict[str, dict[str, str]]:
        if self._waiting.edges is not self._state.who_answers.edges:
            self._waiting = Waiting(self._experiment, self._state.who_answers.edges)
        updating = {name for name, watch in self.watches.items() if watch.idle < STALL}
        return self._waiting.now(self._state.members, updating, self._state.progress.rounds)

    def _excused(self, name: str) -> bool:
        """True where `name`, or a trainer that it waits for, is in something that may
        take long."""
        return any(self.trains(each) for each in self._concerns[name] if each in self.watches)

    def trains(self, name: str) -> bool:
        """True of a silent trainer that writes a checkpoint, or is in an update, for less
        than an hour."""
        member = self._state.members[name]
        silent = awake() - member.heard
        if not member.config.limited or member.buried or silent > LONGEST_WORK:
            return False
        if not (member.saving or silent > SILENT) or self._launcher.condition(name):
            return False
        return member.saving or in_update(self._launcher.stack(name))

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
