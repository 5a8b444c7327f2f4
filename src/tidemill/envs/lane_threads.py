"""Persistent threads in which the lanes of an environment step: for steps that wait (for
a server, a simulator, a device) or leave Python's lock."""

import _thread
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from tidemill.core.clock import awake
from tidemill.core.cores import same_cores
from tidemill.core.errors import ConfigError, EnvironmentHangs
from tidemill.core.step_deadlines import StepTimes
from tidemill.core.thread_stacks import stack_of, words_of
from tidemill.envs.hanging_threads import HANGING

# how long `close` waits, for all lanes together, from `begin_close` on; less than the
# controller gives an actor
CLOSE_SECONDS = 1.0
LOOK = 0.05  # seconds between looks at what hangs


class RaisedError:
    """What a call raised, in place of what it would have returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class LaneThreads:
    """Lane i is stepped by thread ``i % threads``, always the same one, so that an
    environment may keep what belongs to a thread.

    Each thread sleeps on a lock of its own, which `begin` opens. The one that finishes
    last rings, so that a tick costs one ring however many lanes it has. Those still at
    work are counted by a list from which each takes a number: whoever takes 0 was the
    last. The threads are daemons: one that hangs in its environment holds up nobody's
    end.

    Where there is a deadline (`watch`), whoever asks whether lanes are `ready`, or takes
    what they return, looks for those that hang. The lane of each call lies in a list of
    its own, from which its thread takes it afterwards, and who looks takes it when its
    time is over: whoever gets it owns the lane. One that hangs is answered for by
    `EnvironmentHangs`, its thread is left, and a new one goes on with the others of its
    share. A thread that was left closes its environment once it comes back, and ends.

    closer: function that returns what closes the environment that is a lane now
    """

    def __init__(
        self, name: str, lanes: int, threads: int, closer: Callable[[int], Callable[[], object]]
    ) -> None:
        count = min(threads, lanes)
        self._name, self._closer = name, closer
        self._lanes_of = [range(number, lanes, count) for number in range(count)]
        self._numbers = list(range(count))
        self._calls: Sequence[Callable[[Any], Any]] = ()
        self._arguments: Sequence[Any] = ()
        self._results: list[Any] = [None] * lanes
        self._left: list[int] = []
        self._wake: Callable[[], None] | None = None
        self._closed = False
        self._until = 0.0  # when those that have not ended count as hanging
        self._lock = threading.Lock()
        self._leave: Callable[[int], object] = lambda lane: None
        self._stuck: set[int] = set()  # numbers of threads that hung when it was closed,
        self._gone: set[int] = set()  # and of those that had nothing more to do
        self._times: StepTimes | None = None
        # of this tick: lanes that do something else than step, and where the time counts
        self._apart: Container[int] = ()
        self._watched: Container[int] = ()
        # by thread: since when it is in a call, and the lane, which is whose who takes it
        self._under_way: list[tuple[float, list[int]]] = [(0.0, [])] * count
        self._abandoned: dict[threading.Thread, Callable[[], object]] = {}  # and what each has to close
        self._looked_at = 0.0
        self._keep = same_cores()
        self._finished = _thread.allocate_lock()  # held while a tick is under way
        self._gates = [_thread.allocate_lock() for _ in range(count)]
        for gate in self._gates:
            gate.acquire()
        self._threads = [self._thread(number) for number in range(count)]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self._lanes_of = self._lanes_of[: len(self._threads)]
            HANGING.step(len(self._threads))
            self.close()
            raise _no_more_threads() from None
        HANGING.step(count)

    def watch(self, deadline_s: float | None) -> None:
        """Leave lanes that hang from now on: after so many seconds; None: by what steps
        take."""
        self._times = StepTimes(deadline_s)

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from one of the threads, whenever a tick is finished."""
        self._wake = wake

    def begin(
        self,
        calls: Sequence[Callable[[Any], Any]],
        given: Sequence[Any],
        apart: Container[int] = (),
        watched: Container[int] = (),
    ) -> None:
        """Have ``calls[lane](given[lane])`` called in every lane; the tick before must
        have been taken. `apart`: the lanes in which that is no step, but a reset;
        `watched`: those in which it is to come back by its deadline."""
        self._calls, self._arguments = calls, given
        self._apart, self._watched = apart, watched
        self._left = self._numbers.copy()
        self._finished.acquire()
        for gate in self._gates:
            gate.release()

    def ready(self) -> bool:
        """True when all lanes have answered. Raises `EnvironmentHangs` where more hang
        than may."""
        if self._finished.locked():
            self._look()
        return not self._finished.locked()

    def take(self) -> list[Any]:
        """Return what the lanes returned, or what they raised (`RaisedError`); waits for
        the last of them. Raises `EnvironmentHangs` where more hang than may."""
        while not self._finished.acquire(timeout=LOOK):
            self._look()
        self._finished.release()
        return self._results

    def doing(self) -> str:
        """Return where the lanes are that have not answered, in words; "" for nowhere."""
        return "; ".join(
            f"lane {lane}: {calls}"
            for thread, (_, owner) in zip(self._threads, self._under_way, strict=True)
            for lane in owner[:]
            if (calls := _calls_of(thread))
        )

    def _look(self) -> None:
        """Leave what hangs."""
        times, apart, now = self._times, self._apart, awake()
        if times is None or now - self._looked_at < LOOK:
            return
        self._looked_at = now
        for number, (began, owner) in enumerate(self._under_way):
            waited = now - began
            if waited <= times.least or not owner:
                continue
            for lane in owner[:]:  # one, or none: its thread may take it meanwhile
                if lane in self._watched and waited > times.deadline(lane in apart):
                    self._abandon(number, owner, waited, lane in apart)

    def _abandon(self, number: int, owner: list[int], waited: float, resetting: bool) -> None:
        """Leave a thread to what it hangs in, unless it has just come back."""
        thread = self._threads[number]
        calls = _calls_of(thread)
        with self._lock:
            try:
                lane = owner.pop()
            except IndexError:
                return
            self._abandoned[thread] = self._closer(lane)
            HANGING.leave(thread)
        text = (
            f"{self._name}: lane {lane} has not come back from a {'reset' if resetting else 'step'} for "
            f"{waited:.0f} s and is left with its thread, {HANGING.count} of which hang now"
            + (f": {calls}" if calls else "")
        )
        self._results[lane] = RaisedError(EnvironmentHangs(text).in_lane(lane))
        share = self._lanes_of[number]
        self._threads[number] = heir = self._thread(number, share[share.index(lane) + 1 :])
        HANGING.check(text)
        try:
            heir.start()
        except RuntimeError:
            raise _no_more_threads() from None

    def _thread(self, number: int, rest: Sequence[int] | None = None) -> threading.Thread:
        return threading.Thread(
            target=self._work, args=(number, rest), name=f"{self._name} {number}", daemon=True
        )

    def begin_close(self) -> None:
        """Tell the threads to end."""
        if not self._closed:
            self._closed, self._until = True, monotonic() + CLOSE_SECONDS
            for gate in self._gates:
                with suppress(RuntimeError):  # open already
                    gate.release()

    def close(self, leave: Callable[[int], object] = lambda lane: None) -> list[int]:
        """End the threads, and return the lanes that did not end in time: they hang in
        their environments, which nobody else may touch. Once they come back their own
        threads call `leave` with each of them."""
        self.begin_close()
        self._leave = leave
        stuck: list[int] = []
        for number, (thread, share) in enumerate(zip(self._threads, self._lanes_of, strict=True)):
            if thread.ident is None:  # of one that was left, where too many were
                continue
            thread.join(max(0.0, self._until - monotonic()))
            with self._lock:
                if thread.is_alive() and number not in self._gone:
                    self._stuck.add(number)
                    HANGING.leave(thread)
                    stuck += share
        HANGING.step(-len(self._threads))
        return stuck

    def left(self, seconds: float) -> bool:
        """Wait for threads to end, so many seconds at most. True when all have: closed,
        and come back from where they hung."""
        until = monotonic() + seconds
        with self._lock:
            every = [thread for thread in (*self._threads, *self._abandoned) if thread.ident is not None]
        for thread in every:
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in every)

    def _work(self, number: int, rest: Sequence[int] | None) -> None:
        self._step(number, rest)
        thread = threading.current_thread()
        with self._lock:
            close = self._abandoned.get(thread)
            if close is None:
                self._gone.add(number)
            stuck = close is None and number in self._stuck
        if close is not None:
            with suppress(BaseException):
                close()
            with self._lock:
                del self._abandoned[thread]
        for lane in self._lanes_of[number] if stuck else ():
            with suppress(BaseException):
                self._leave(lane)
        HANGING.returned(thread)

    def _step(self, number: int, rest: Sequence[int] | None) -> None:
        """Step the thread's lanes until it is told to end, or left. `rest`: those with
        which it begins, in the tick that is under way; None: it begins with a new
        one."""
        self._keep()
        opened, share = self._gates[number].acquire, self._lanes_of[number]
        while True:
            if rest is None:
                opened()
                if self._closed:
                    return
            if not self._do(number, share if rest is None else rest):
                return
            rest = None
            if self._left.pop() == 0:
                self._finished.release()
                if self._wake is not None and not self._closed:
                    self._wake()

    def _do(self, number: int, lanes: Iterable[int]) -> bool:
        """Do this tick's calls in these lanes. False where it was left, or closed."""
        calls, given, results = self._calls, self._arguments, self._results
        apart, under_way, times = self._apart, self._under_way, self._times
        for lane in lanes:
            if self._until:  # it was closed meanwhile
                return False
            owner, began = [lane], awake()
            under_way[number] = began, owner
            try:
                result = calls[lane](given[lane])
            except BaseException as error:  # SystemExit, too, is the actor's to tell
                result = RaisedError(error)
            try:
                owner.pop()
            except IndexError:
                return False
            if times is not None and lane not in apart:
                times.add(awake() - began)
            results[lane] = result
            del result  # a traceback holds this frame, and so the environment that is gone
        return True


def _calls_of(thread: threading.Thread) -> str:
    """Return the calls of an environment that a thread is in, in words."""
    calls = stack_of(thread.ident)
    inner = [call.file == __file__ for call in calls]
    return words_of(calls[: inner.index(True)] if True in inner else calls)


def _no_more_threads() -> ConfigError:
    return ConfigError(
        f"this machine lets no more threads start ({threading.active_count():,} run in this "
        "process); take fewer slots or lanes, or an environment that waits on one event loop for "
        'all of them (Asynchronous, Rest with form = "loop")'
    )
