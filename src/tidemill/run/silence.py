"""Workers that fall silent while they run: one whose poll takes far longer than any
before is stuck, in its environment most likely. It is told with where its thread is, and
where an environment holds it for too long, its process counts as dead. Where workers take
turns in the main thread, another one tells of an environment that hangs, and has one left
that does not let itself be closed, or does not come back once a signal is to end the run
(`TurnWatch`), and of whatever else the run's main thread does not come back from, with
any launcher: a callback, say."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from types import FrameType

from tidemill.api.control_messages import State
from tidemill.api.launcher import DEBUGGED, Call
from tidemill.core.clock import awake
from tidemill.core.errors import HangLeft
from tidemill.core.step_deadlines import deadline
from tidemill.core.thread_stacks import stack_of, whereabouts
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.interrupts import Interrupts
from tidemill.run.member import Member
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.buffer_worker import Buffers
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.population_config import Population

LEAST = 5.0  # seconds of silence that are told
FIRST = 30.0  # while a trainer of its process has finished no update: it may be a long one
TIMES = 5.0  # so many times the longest poll so far
# seconds after which one of these hangs that is neither in its environment, nor in an
# update, nor at a share, and whatever is stopped. What a trainer calls of others' code is
# in its update, which may take long: where it takes too long its run ends
HUNG = 300.0
REPLACED = (ActorConfig, PolicyWorkers, Buffers, Evaluation, Population)
# of these that are at the run's database all the time: the kernel holds a process that
# waits for a share in a way in which it cannot be asked, either
AT_SHARE = (Evaluation, Population)
ASK_EVERY = 10.0  # seconds of one silence: to ask for a stack takes a moment
LOOK = 0.5  # seconds between two looks at the main thread
CLOSING = 30.0  # seconds that an environment may take to be closed at the end: to encode a video, say
STEP_LEFT = 10.0  # that a step may take once a signal came
BRIEF = 1.0  # that it has where another one hung, or a signal came long ago
# who is called by a worker's poll where it is in its environment
# on whichever host
_LANES, _RING = "/tidemill/envs/lane_threads.py", "/tidemill/workers/ring.py"
_MAKING = "/tidemill/envs/parallel_build.py"
_ACTOR = "/tidemill/workers/actor.py"
_EVALUATION = "/tidemill/replay_training/iteration_evaluation.py"
_STORE = "/tidemill/store/"
_TURNS = "/tidemill/workers/base.py"
_TRAINERS = ("/tidemill/workers/trainer.py", "/tidemill/replay_training/trainer.py")
_ENVIRONMENTS = tuple(f"/tidemill/{room}/" for room in ("envs", "bridge", "remote", "testing"))


class SilenceWatch:
    """A silence watch tells of each process that falls silent, once, and when it speaks
    again. What counts is for how long it was silent at the look before, since what had
    come by then is read in between: a callback may have taken long.

    processes: the workers that share each process or thread
    stack: function that returns where a worker's thread is (see `Launcher.stack`)
    condition: function that returns what keeps a worker still that its environment has
        nothing to do with, or ""
    tell: function that tells the user of a worker
    hangs: function that is called with a worker that something holds for too long, its
        environment most likely, and why it counts as gone
    """

    def __init__(
        self,
        processes: Sequence[Sequence[str]],
        stack: Callable[[str], Sequence[Call]],
        condition: Callable[[str], str],
        tell: Callable[[str, str], None],
        hangs: Callable[[str, str], None],
    ) -> None:
        self._processes, self._stack, self._condition = processes, stack, condition
        self._tell, self._hangs = tell, hangs
        self._looked = -inf  # last
        self._silent: dict[str, float] = {}  # since when, by first worker
        self._asked: dict[str, float] = {}  # when for its stack, once its deadline was over

    def look(self, members: Mapping[str, Member]) -> None:
        """Look at all of them, as they are now."""
        before, self._looked = self._looked, awake()
        for names in self._processes:
            group = {name: members[name] for name in names}
            # trainers of a run that goes on may pause, until enough actors run
            those = [m for m in group.values() if not (m.config.limited and m.state is State.PAUSED)]
            running = bool(those) and all(m.state is State.RUNNING and not m.buried for m in those)
            saves = any(member.saving for member in group.values())
            if not running or (saves and not self._condition(names[0])):  # one that is stopped saves nothing
                self._silent.pop(names[0], None)
                continue
            self._look_at(names[0], group, members, before)

    def _look_at(
        self, first: str, group: Mapping[str, Member], members: Mapping[str, Member], before: float
    ) -> None:
        heard = max(member.heard for member in group.values())
        silent, whose = before - heard, ", ".join(group)
        if first in self._silent and heard > self._silent[first]:
            self._tell(first, f"{whose} speaks again, after {heard - self._silent.pop(first):.0f} s")
        longest = max(member.statistics.get("longest_poll", 0.0) for member in group.values())
        begins = any(m.config.limited and not m.update.update for m in group.values())
        if first not in self._silent and silent > max(FIRST if begins else LEAST, TIMES * longest):
            self._silent[first] = heard
            if not (why := self._condition(first)):
                why = whereabouts(self._stack(first))
                for member in group.values():
                    member.where = why
            self._tell(
                first,
                f"{whose} is silent for {silent:.0f} s (no poll took longer than {longest:.2g} s before)"
                + (f": {why}" if why else ""),
            )
        asked = self._asked.get(first, 0.0)
        if heard < asked and awake() - asked < ASK_EVERY:  # not of a silence before, or another life's
            return
        for name, member in group.items():
            config, p99 = member.config, member.statistics.get("tick_p99")
            given: float | None = HUNG
            if isinstance(config, ActorConfig):
                given = config.deadline_s
            elif isinstance(config, ReplayTrainer):  # it evaluates in environments of its actors
                actors = (each.config for each in members.values() if isinstance(each.config, ReplayActors))
                given = next((each.deadline_s for each in actors if gathers_for(each, config)), None)
            if silent <= min(deadline(given, p99), HUNG):
                continue
            self._asked[first] = awake()
            if (condition := self._condition(name)).startswith(DEBUGGED):
                return  # somebody looks into it, for as long as that takes
            calls = () if condition else self._stack(name)
            # an environment of one's own may be all that there is to see
            most = max(HUNG, TIMES * longest, deadline(given, p99))
            where = whereabouts(calls) or "where it is cannot be seen"
            if condition:
                what, where = "its process", condition.partition(";")[0]
                hung = silent > most
            elif in_environment(calls):
                # for as long as its settings say, which are for steps and resets
                what = "its environment"
                plays = isinstance(config, ActorConfig) or in_evaluation(calls)
                least = HUNG if makes(calls) else 0.0
                hung = plays and silent > max(deadline(given, p99, resetting(calls)), least)
            else:
                what = "its thread"
                hung = isinstance(config, REPLACED) and silent > most
                # a trainer that shares it may be in an update
                shows = not any(m.config.limited or isinstance(m.config, AT_SHARE) for m in group.values())
                hung = hung and (bool(calls) or shows)
                hung = hung and not (in_update(calls) or waits_for_lanes(calls) or in_store(calls))
            if hung:
                self._silent.pop(first, None)
                self._hangs(name, f"{what} has not come back for {silent:.0f} s: {where}")
                return


def gathers_for(actors: ReplayActors, trainer: ReplayTrainer) -> bool:
    """True of those whose samples the trainer is sent."""
    return any(trainer.samples in spec.streams for spec in actors.agents)


def in_environment(calls: Sequence[Call]) -> bool:
    """True of a worker's calls where it is in its environment, but for one that waits for
    what has deadlines of its own."""
    return not waits_for_lanes(calls) and any(room in call.file for call in calls for room in _ENVIRONMENTS)


def waits_for_lanes(calls: Sequence[Call]) -> bool:
    """True of an actor's calls where it waits for lanes in threads, or for an environment
    whose turn it is."""
    return any(
        call.file.endswith(_LANES) or (call.name == "wait" and call.file.endswith(_RING)) for call in calls
    )


def in_update(calls: Sequence[Call]) -> bool:
    """True of a silent worker's calls where it is a trainer that trains: its poll waits
    for nobody."""
    polls = any(call.name == "_poll" and call.file.endswith(_TRAINERS) for call in calls)
    return polls and not in_environment(calls)


def in_store(calls: Sequence[Call]) -> bool:
    """True where the run's folder is read or written. What holds a worker there, a share
    that does not answer, say, would hold its next life, too, and whoever starts it."""
    return any(_STORE in call.file for call in calls)


def in_evaluation(calls: Sequence[Call]) -> bool:
    """True of a replay trainer's calls where it evaluates."""
    return any(call.file.endswith(_EVALUATION) for call in calls)


def makes(calls: Sequence[Call]) -> bool:
    """True where environments are made, all that are to be there."""
    return any(call.name == "make_all" and call.file.endswith(_MAKING) for call in calls)


def resetting(calls: Sequence[Call]) -> bool:
    """True where one of the calls resets an environment, or makes it anew."""
    return any("reset" in call.name or "restart" in call.name for call in calls)


def who_closes(calls: Sequence[Call]) -> str:
    """Return the worker that closes its environments, for good, by the calls of the
    thread in which it has its turn; "" of all others."""
    closes = any(call.name == "_close" and call.file.endswith(_ACTOR) for call in calls)
    return next((call.about for call in calls if closes and call.name == "_turn"), "")


def call_of_environment(thread: int) -> tuple[FrameType | None, str]:
    """Return the call into an environment that a thread is in, and the worker that has
    its turn there; None where it is in none, or closes one. The next call is another
    one."""
    call, frame = None, sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if any(room in code.co_filename for room in _ENVIRONMENTS):
            call = frame
        elif code.co_name == "_close" and code.co_filename.endswith(_ACTOR):
            return None, ""
        elif code.co_name == "_turn" and code.co_filename.endswith(_TURNS):
            return call, str(frame.f_locals["self"].name)
        frame = frame.f_back
    return None, ""


class TurnWatch:
    """A turn watch tells where the main thread of a run hangs: from another one, since
    nobody else is there to tell it. Where workers take turns in it, environments that
    hang as they are closed at their worker's end it has left, and those that hang in a
    step once a signal is to end the run. Use it as a context manager.

    alarm: function that tells the user at once, from that thread
    look: function that is called there now and then
    turns: function that returns whether workers have turns by now: before, environments
        are made
    ends: function that returns whether the run is to end, which may take long
    interrupts: who has the main thread leave what hangs
    spares: function that returns whether the run's end can do without such a worker
    """

    def __init__(
        self,
        alarm: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
        turns: Callable[[], bool] = lambda: True,
        interrupts: Interrupts | None = None,
        spares: Callable[[str], bool] = lambda worker: False,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        self._alarm, self._look, self._turns, self._spares = alarm, look, turns, spares
        self._ends = ends
        self._interrupts = interrupts or Interrupts()
        self._thread = threading.get_ident()
        self._since, self._longest = awake(), 0.0
        self._told = ""  # who has not come back
        self._call: FrameType | None = None  # into an environment, once a signal came
        self._called_at, self._left_one = 0.0, False
        self._over, self._leaving = threading.Event(), threading.Lock()

    def __enter__(self) -> "TurnWatch":
        with suppress(RuntimeError):  # a run in one thread goes on where there can be no other
            threading.Thread(target=self._watch, name="turn watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._leaving:  # from now on nothing is left
            self._over.set()

    def turn(self) -> str:
        """Take note that a turn is over. Return what there is to tell of it: where it was
        told that it lasted, how long it did; else ""."""
        now = awake()
        seconds, self._since = now - self._since, now
        self._longest = max(self._longest, seconds)
        told, self._told = self._told, ""
        return f"{told} has come back, after {seconds:.0f} s" if told else ""

    def _watch(self) -> None:
        closing, begun, left = "", 0.0, set[str]()
        while not self._over.wait(LOOK):
            self._look()
            silent = awake() - self._since
            calls = stack_of(self._thread) if silent > LOOK else []
            if (who := who_closes(calls)) != closing:
                closing, begun = who, awake()
            if closing:
                most = min(CLOSING, BRIEF) if left or self._interrupts.urgent else CLOSING
                if closing not in left and (seconds := awake() - begun) > most:
                    left.add(closing)
                    self._leave(seconds, calls)
                continue
            if self._interrupts.first:
                self._leave_step()
            if self._told or silent <= max(LEAST, TIMES * self._longest):
                continue
            made = self._turns()
            if not in_environment(calls):
                if made and silent > FIRST and not self._ends():
                    self._told = "the run's main thread"
                    self._alarm(
                        f"{self._told} has not come back for {silent:.0f} s: {whereabouts(calls)}; until "
                        "it has, no worker is heard, nothing recorded, and no command answered"
                    )
            elif silent > FIRST or (made and not resetting(calls)):
                self._told = "the environment"
                what = "an environment has not come back for" if made else "environments are still made, for"
                self._alarm(
                    f"{what} {silent:.0f} s: {whereabouts(calls)}; nobody can break it off where workers "
                    "take turns in one thread (--launch processes can)"
                )

    def _leave_step(self) -> None:
        """Have the main thread leave an environment's step that lasts too long after a
        signal, where the run's end can do without its worker: a second one sooner, so
        that who saves what was trained has its turn in time."""
        call, worker = call_of_environment(self._thread)
        if call is not self._call:
            self._call, self._called_at = call, awake()
        seconds, most = awake() - self._called_at, BRIEF if self._left_one else STEP_LEFT
        if call is None or seconds < most or not (self._turns() and self._spares(worker)):
            return
        self._called_at, self._left_one = inf, True  # once
        self._tell_left(f"has not come back for {seconds:.0f} s", stack_of(self._thread))

        def left() -> HangLeft | None:
            return HangLeft(worker) if call_of_environment(self._thread)[0] is call else None

        self._have_left(left)

    def _leave(self, seconds: float, calls: Sequence[Call]) -> None:
        self._tell_left(f"does not let itself be closed, for {seconds:.0f} s", calls)
        self._have_left(lambda: HangLeft() if who_closes(stack_of(self._thread)) else None)

    def _tell_left(self, what: str, calls: Sequence[Call]) -> None:
        self._alarm(
            f"an environment {what}: {whereabouts(calls)}; it is left as it is, and the run ends without it "
            "(where it is not in Python's code, or the run not in the main thread, only kill -9 does that)"
        )

    def _have_left(self, what: Callable[[], HangLeft | None]) -> None:
        with self._leaving:
            if not self._over.is_set():
                self._interrupts.leave(what)
