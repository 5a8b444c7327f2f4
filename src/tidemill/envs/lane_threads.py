"""Persistent threads in which the lanes of an environment step: for steps that wait (for
a server, a simulator, a device) or leave Python's lock."""

import _thread
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from tidemill.core.cores import same_cores
from tidemill.core.errors import ConfigError

# how long `close` waits, for all lanes together, from `begin_close` on; less than the
# controller gives an actor
CLOSE_SECONDS = 1.0


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
    """

    def __init__(self, name: str, lanes: int, threads: int) -> None:
        count = min(threads, lanes)
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
        self._keep = same_cores()
        self._finished = _thread.allocate_lock()  # held while a tick is under way
        self._gates = [_thread.allocate_lock() for _ in range(count)]
        for gate in self._gates:
            gate.acquire()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name} {number}", daemon=True)
            for number in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self._lanes_of = self._lanes_of[: len(self._threads)]
            self.close()
            raise ConfigError(
                f"this machine lets no more threads start ({threading.active_count():,} run in this "
                "process); take fewer slots or lanes, or an environment that waits on one event loop for "
                'all of them (Asynchronous, Rest with form = "loop")'
            ) from None

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from one of the threads, whenever a tick is finished."""
        self._wake = wake

    def begin(self, calls: Sequence[Callable[[Any], Any]], given: Sequence[Any]) -> None:
        """Have ``calls[lane](given[lane])`` called in every lane; the tick before must
        have been taken."""
        self._calls, self._arguments = calls, given
        self._left = self._numbers.copy()
        self._finished.acquire()
        for gate in self._gates:
            gate.release()

    def ready(self) -> bool:
        """True when all lanes have answered."""
        return not self._finished.locked()

    def take(self) -> list[Any]:
        """Return what the lanes returned, or what they raised (`RaisedError`); waits for
        the last of them."""
        with self._finished:
            return self._results

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
            thread.join(max(0.0, self._until - monotonic()))
            with self._lock:
                if thread.is_alive() and number not in self._gone:
                    self._stuck.add(number)
                    stuck += share
        return stuck

    def left(self, seconds: float) -> bool:
        """Wait for threads to end, so many seconds at most. True when all have: closed,
        and come back from where they hung."""
        until = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        self._step(number)
        with self._lock:
            self._gone.add(number)
            stuck = number in self._stuck
        for lane in self._lanes_of[number] if stuck else ():
            with suppress(Exception):
                self._leave(lane)

    def _step(self, number: int) -> None:
        self._keep()
        opened, share, results = self._gates[number].acquire, self._lanes_of[number], self._results
        while True:
            opened()
            if self._closed:
                return
            calls, given = self._calls, self._arguments
            for lane in share:
                if self._until:  # it was closed meanwhile
                    return
                try:
                    results[lane] = calls[lane](given[lane])
                except BaseException as error:  # SystemExit, too, is the actor's to tell
                    results[lane] = RaisedError(error)
            if self._left.pop() == 0:
                self._finished.release()
                if self._wake is not None and not self._closed:
                    self._wake()
