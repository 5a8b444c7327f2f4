"""Lanes that are made anew after a fault, within a budget: `ActorConfig.lane_restarts`.

The step that failed is void. What it would have told is not known, so that its episode is
cut after the observation from which it started, and the next one begins in the same tick
(`Tick.voided`). Environments that can make single lanes anew do so themselves
(`Environment.restart_lanes`), simulators and slots among them; of all others all are made
anew (`RestartedTogether`).

What fails again as it is made anew, or reset then, because a connection does (its server
is away), is tried again after pauses that grow (`Remaking`), each try a fault of the
budget. Whatever else keeps it from being made ends the run at once: it would come again.
"""

import errno
import re
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, NotReady, Tick
from tidemill.core.clock import awake
from tidemill.core.cores import every_core
from tidemill.core.cut import Part
from tidemill.core.errors import (
    DeadlineError,
    EnvironmentAway,
    EnvironmentFault,
    EnvironmentHangs,
    ProtocolFault,
    RemoteTimeout,
    RemoteUnavailable,
    ReplyLost,
    SessionLost,
    fault_of,
    foreign,
    forgiving,
    message_of,
    place,
)
from tidemill.core.schema import Arrays
from tidemill.core.step_deadlines import take_over
from tidemill.core.tally import TallyEntry
from tidemill.core.thread_loop import run_ready
from tidemill.envs.parallel_build import EnvironmentMaker
from tidemill.envs.wrapper import Wrapper

SEEDS_APART = 1_000_003
"""Distance between the seeds of an environment and of the one that takes its place."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds before what connects to something that is away is tried again; they double."""
_VARIED = 1.25  # most times that, so that what failed together does not come back together
_CONNECTIONS = (
    *(ConnectionError, TimeoutError, socket.gaierror),
    *(RemoteTimeout, RemoteUnavailable, ReplyLost, SessionLost, EnvironmentAway),
)
_UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_DEEPEST = 16  # causes of causes
_chance = Random()
# numbers and what holds one, what is left of printed arrays, and words that were cut off
_NUMBERED = re.compile(r"\b(?:\w*\d[\w.]*|(?:nan|inf|True|False|array|dtype)\b|\w*…)|[\W_]+")
_FIRST_WORDS = 120  # characters of a text by which its cause is known
_SHOWN = 500  # characters of a fault in a notice


def cause_of(text: str) -> str:
    """Return the first words that a fault says, in whichever lane, slot, step or session
    it was, and whatever numbers and arrays it prints."""
    return " ".join(_NUMBERED.sub(" ", text).split())[:_FIRST_WORDS]


def may_come_back(fault: BaseException) -> bool:
    """Return whether a connection has failed, or no answer has come: what is at its other
    end may be there again later."""
    return _comes_from(fault, _CONNECTIONS)


def is_nobody(fault: BaseException) -> bool:
    """Return whether there is nobody at the address that was to be connected to."""
    return _comes_from(fault, (ConnectionRefusedError, socket.gaierror))


def _comes_from(fault: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Return whether a fault, or one of its causes, is of these kinds, or says that a
    network or host is not reached."""
    error: BaseException | None = fault
    for _ in range(_DEEPEST):
        if error is None:
            break
        if isinstance(error, kinds) or getattr(error, "errno", None) in _UNREACHABLE:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class LaneRestarts:
    """The restarts of an actor's lanes: at most `most` within `within_s` seconds; 0: the
    first fault ends the run, inf: any number. Several lanes, or targets, of one server
    fail together while that is away, which is one fault: so are those of connections that
    come within `FIRST_PAUSE` seconds after one that counted, or within its pause.

    tell: function that takes a text for the user
    count: number of restarts so far
    before: number of those before the cut that a run goes on from; they count in the
        number of a restart alone, from which its environment's seed follows
    known: whether what they connect to was there before: where nobody is there at a
        run's start, an address is wrong
    tries: how many of them came after a pause, since what they connect to is away
    away: by target, how a connection has failed there last, "" where something else has
        failed since
    """

    def __init__(self, most: float, within_s: float, tell: Callable[[str], None]) -> None:
        self._most, self._within_s, self._tell = most, within_s, tell
        self._lately: deque[tuple[float, str]] = deque()
        # by target and cause: faults that were not told, and the text that was
        self._again: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}
        self._away_until = -inf
        # who lost what they connect to, and wait for it since then
        self._waiting = set[tuple[str, int | None]]()
        self._try_at = -inf  # second of `awake` at which the newest try begins
        self.count = self.before = self.tries = 0
        self.known = True
        self.away: dict[str, str] = {}

    def pauses(self, seconds: float) -> bool:
        """Return whether a pause is made before what is away is tried again, or that try
        lasts, for which there are so many `seconds`."""
        return awake() < self._try_at + seconds

    def __call__(self, fault: Exception, where: str = "") -> int:
        """Permit one restart for `fault`, and return its number; `where`: in which target
        of several. Raises `EnvironmentFault` with the first cause and the last where
        there were too many."""
        if not self._most:
            raise fault
        if isinstance(fault, ProtocolFault) and fault.first:
            raise fault
        if not self.known and is_nobody(fault):
            raise EnvironmentFault(
                f"{where}{text_of(fault)}. Nobody has answered there since the run began, so that it is not "
                "tried again: start what it connects to, or mend the address"
            ) from fault
        if isinstance(fault, EnvironmentHangs) and fault.too_many:
            raise fault
        now, text = awake(), where + text_of(fault)
        while self._lately and now - self._lately[0][0] > self._within_s:
            self._lately.popleft()
        away, pause = may_come_back(fault), fault.pause if isinstance(fault, EnvironmentAway) else 0.0
        who = where, getattr(fault, "lane", None)
        # several that lose the same server are one fault; one that had it back and fails
        # again is another
        again = not isinstance(fault, EnvironmentAway) and who in self._waiting
        if not (away and now < self._away_until) or again:
            if len(self._lately) >= self._most:
                raise self._spent(text) from fault
            self._lately.append((now, text))
            self._waiting.clear()
            self._away_until = now + max(FIRST_PAUSE, pause) if away else self._away_until
        self._waiting.add(who)
        self.away[where] = text.partition("\n")[0] if away else ""
        self._try_at = max(self._try_at, now + pause)
        self.tries += pause > 0
        self.count += 1
        if (cause := (where, cause_of(text))) in self._first:
            self._again[cause] += 1
        else:
            text = self._first[cause] = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            then = (
                f"it is tried again in {pause:.0f} s, and later after longer pauses"
                if pause
                else "the step is void, its episode is cut before it, and the environment is made anew"
            )
            self._tell(f"{text}; {then} ({self._budget()}later ones of this cause are counted)")
        return self.before + self.count

    def _budget(self) -> str:
        if self._most == inf:
            return ""
        most = f"{self._most:g} within {self._within_s:g} s, lane_restarts"
        return f"restart {len(self._lately)} of at most {most}; "

    def _spent(self, text: str) -> EnvironmentFault:
        first = self._lately[0][1]
        other = f"; the last fault: {text}" if cause_of(text) != cause_of(first) else ""
        return EnvironmentFault(
            f"{first}. Its actor's lanes were made anew {self._most:g} times within {self._within_s:g} s "
            f"already, which is all that lane_restarts = {self._most:g} allows{other}. Mend the environment, "
            "or allow more (--set workers.actor.lane_restarts=N)"
        )

    def stats(self) -> dict[str, float]:
        """Return how many restarts there were, where there were any."""
        return {"lanes/restarts": float(self.count)} if self.count else {}

    def end(self) -> None:
        """Tell how often what was told once happened again."""
        for cause, count in self._again.items():
            self._tell(f"{count} more of: {self._first[cause]}")
        self._again.clear()


def text_of(fault: Exception) -> str:
    """Return what a fault says, with its lane where that is known, an exception of
    somebody else's with its type."""
    if not isinstance(fault, (EnvironmentFault, DeadlineError)):
        return f"{type(fault).__name__}: {message_of(fault)}"
    text, lane = message_of(fault), getattr(fault, "lane", None)
    return text if lane is None or f"lane {lane}" in text else f"lane {lane}: {text}"


def made_again(make: Callable[[], Any], who: str, fault: Exception) -> Any:
    """Return what `make` returns, in place of `who`, which failed by `fault`. Raises
    `EnvironmentAway` where a connection fails, and `EnvironmentFault` where it cannot be
    made a second time."""
    try:
        with every_core():  # a simulator that it starts is no part of this process
            return make()
    except BaseException as error:
        fault_of(error)  # raises what is none
        cause = f"{type(error).__name__}: {message_of(error)}"
        if may_come_back(error):
            raise EnvironmentAway(f"{who} cannot be made anew now ({cause})") from error
        raise EnvironmentFault(
            f"{who} failed, and cannot be made a second time ({cause}{place(foreign(error))}); let its "
            "close() free what the next one needs, see whether what it connects to is there, or end runs "
            "with the first fault (lane_restarts=None). "
            f"It failed by this: {text_of(fault)}{place(foreign(fault))}"
        ) from error


class Remaking:
    """What becomes of an environment, or of a lane, from its fault until it answers
    again: it is made anew at once; where a connection fails then, later.

    fault: the newest one
    number: number of the newest restart
    due: second of `awake` from which on it may be made
    """

    def __init__(self, permit: Callable[[Exception], int], fault: Exception, anew: bool = True) -> None:
        """`permit` is asked for each restart (see `Environment.restart_lanes`). `anew`:
        there was one before; else `fault` is of making the first one."""
        self._permit, self._pause = permit, FIRST_PAUSE
        self.fault, self.due = fault, awake()
        if anew:
            self.number = permit(fault)
        else:
            self.failed(fault)

    def failed(self, fault: Exception) -> None:
        """Take note that it has failed again, before it answered. Raises what `permit`
        does."""
        pause = 0.0
        if may_come_back(fault):
            away = EnvironmentAway(text_of(fault))
            away.__cause__ = fault
            away.pause = pause = self._pause * _chance.uniform(1.0, _VARIED)
            self._pause, fault = min(2 * self._pause, LONGEST_PAUSE), away
        self.fault, self.due = fault, awake() + pause
        self.number = self._permit(fault)


class RestartedTogether(Wrapper):
    """An environment whose lanes are all made anew when one of them fails. A mere
    connection (not `needs_maker`) is made in a thread: whom it connects to may be away,
    and who plays has others to serve, and its runner to hear."""

    def __init__(
        self,
        inner: Environment,
        build: Callable[[int], Environment],
        permit: Callable[[Exception], int],
        seed: int = 0,
    ) -> None:
        """`build` returns another such environment, given what is to be added to its
        `seed`; `permit` is asked before (see `Environment.restart_lanes`)."""
        super().__init__(inner)
        self._name = str(getattr(inner, "name", type(inner).__name__))
        self._build, self._permit = build, permit
        self._seed = self._first_seed = seed  # this life's, and, in exact runs, that of the first
        self._groups: Sequence[Sequence[int]] = ()
        self._wake: Callable[[], None] | None = None
        self._options: list[Mapping[str, Any]] = []  # of all stages so far
        self._sent: Sequence[Arrays] = ()
        self._reset: NDArray[np.bool_] = np.ones(self.lanes, np.bool_)
        # the tick under way is the first of an environment that was made anew
        self._anew = self._flagged = False
        self._keeps = False
        self._remaking: Remaking | None = None  # from a fault until a tick is over
        self._gone = False  # the one that failed is closed, and no other is there
        self._maker: EnvironmentMaker | None = None
        self._closed = threading.Event()

    @property
    def away(self) -> bool:  # type: ignore[override]
        """See `Environment`: until it has answered, too."""
        return self._remaking is not None

    def keep_episodes(self) -> None:
        self._keeps = True
        super().keep_episodes()

    def _own_state(self) -> Part:
        return {"flagged": self._flagged, "seed": self._first_seed}

    def _load_own_state(self, state: Part) -> None:
        self._flagged, self._first_seed = state["flagged"], state["seed"]

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        super().bind(groups)

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        super().on_ready(wake)

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options.append(options)
        if not self._gone:
            super().enter_stage(options)

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._sent, self._anew = actions, False
        self._reset[:] = reset
        try:
            self._inner.send(actions, reset)
            return
        except BaseException as error:
            fault = fault_of(error)
        self._restart(fault)  # out there: what is raised by then has no part in what comes of it
        del fault  # whose traceback holds this frame, and so what is gone

    def ready(self) -> bool:
        if self._gone:
            run_ready()  # the one that failed may be on this thread's loop, and be closed elsewhere
            if not self._restart_due():
                return False
        try:
            return self._inner.ready()
        except BaseException as error:
            fault = fault_of(error)
        self._restart(fault)
        del fault
        return False

    def recv(self, ticks: Sequence[Tick]) -> None:
        while True:
            if self._remaking is not None and not self.ready():
                raise NotReady
            try:
                self._inner.recv(ticks)
                break
            except BaseException as error:
                fault = fault_of(error)
            self._restart(fault)
            del fault
        self._remaking = None
        if self._anew or self._flagged:
            for tick in ticks:
                lost = np.repeat(~self._reset & self._anew, len(tick.reward) // self.lanes)
                tick.voided[:] = lost
                tick.restarted |= lost
            self._flagged = self._anew

    def statistics(self) -> dict[str, TallyEntry]:
        return {} if self._gone else super().statistics()

    def render(self) -> NDArray[np.uint8] | None:
        return None if self._gone else super().render()

    def doing(self) -> str:
        return super().doing() if self._maker is None else self._maker.doing()

    def begin_close(self) -> None:
        self._closed.set()
        if not self._gone:
            super().begin_close()

    def close(self) -> None:
        self._closed.set()
        if self._maker is not None:
            self._maker.give_up()
        if not self._gone:
            super().close()

    # ---- faults ------------------------------------------------------------------------

    def _restart(self, fault: Exception) -> None:
        """Have the environment made anew, which begins the tick again, once it is there,
        with a reset of all lanes."""
        self._lose(fault)
        self._restart_due()

    def _lose(self, fault: Exception) -> None:
        if self._remaking is None:
            self._remaking = Remaking(self._permit, fault)
        else:
            self._remaking.failed(fault)
        lost, self._gone = self._inner, True
        if self.needs_maker:
            with forgiving():
                lost.close()
        else:
            self._begin_to_make(lost)

    def _begin_to_make(self, lost: Environment | None = None) -> None:
        if self.needs_maker:
            return
        assert self._remaking is not None
        pause, wake = max(0.0, self._remaking.due - awake()), self._wake or (lambda: None)
        self._maker = EnvironmentMaker(
            partial(self._make_anew, self._remaking), wake, lost, pause, self._closed
        )

    def _make_anew(self, remaking: Remaking) -> Environment:
        added = self._first_seed - self._seed + SEEDS_APART * remaking.number
        made: Environment = made_again(partial(self._build, added), self._name, remaking.fault)
        return made

    def _made(self) -> Environment | Exception | None:
        """Return what was made, or what that raised; None where it is not time yet."""
        if self._maker is not None:
            return self._maker.made()
        assert self._remaking is not None
        if awake() < self._remaking.due:
            return None
        try:
            return self._make_anew(self._remaking)
        except BaseException as error:
            return fault_of(error)

    def _restart_due(self) -> bool:
        """Go on with another environment, once that is made. False where it is not."""
        while self._gone:
            made = self._made()
            if made is None:
                return False
            self._maker = None
            if isinstance(made, Environment):
                if (fault := self._begin_again(made)) is not None:
                    self._lose(fault)
                continue
            if not isinstance(made, EnvironmentAway):
                raise made
            assert self._remaking is not None
            self._remaking.failed(made)
            self._begin_to_make()
        return True

    def _begin_again(self, made: Environment) -> Exception | None:
        """Begin the tick again in this environment. Return what that raised."""
        assert self._remaking is not None
        if made.agents != self.agents:
            made.close()
            raise EnvironmentFault(
                f"{self._name} came back with other spaces than it had: it is another environment, or "
                f"another version of it, now. It failed by this: {text_of(self._remaking.fault)}"
            )
        made.bind(self._groups)
        if self._wake is not None:
            made.on_ready(self._wake)
        if self._keeps:
            made.keep_episodes()
        for options in self._options if self._keeps else self._options[-1:]:
            made.enter_stage(options)  # what is played again is told by their order
        take_over(made.times, self._inner.times)
        self._inner, self._anew, self._gone = made, True, False
        try:
            made.send(self._sent, np.ones(self.lanes, np.bool_))
            return None
        except BaseException as error:
            return fault_of(error)
