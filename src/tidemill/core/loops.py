"""The event loop of a thread: it runs while its thread waits, and a turn at a time in between.

Whoever waits for an environment does so at a bell, and a bell lets the loop of its thread run meanwhile. So what comes to the loop is at once where
it is wanted: no thread hands anything over to another, and all that came by one look at the network is dealt with together.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

STOOD = 0.001  # seconds
LONG = 1.0  # seconds: when nobody ran the loop for longer, that is no time for deadlines

T = TypeVar("T")


class _Timed(asyncio.SelectorEventLoop):
    """Its clock leaves out the long times in which it stood still: what came meanwhile is read before a deadline breaks it off."""

    stood = 0.0

    def time(self) -> float:
        return monotonic() - self.stood


class _Of(threading.local):
    """What each thread has."""

    loop: "Loop | None" = None


_of = _Of()


class Loop:
    """An event loop of the thread that took it, as long as somebody there holds it. Of its methods, other threads may call `wake`, `do` and
    `give_back`."""

    def __init__(self) -> None:
        self.loop = _Timed()
        self._thread = threading.get_ident()
        self._holders = 0
        self._watched: set[int] = set()
        self._left = monotonic()  # when it ran last
        self._late = False

    @staticmethod
    def own() -> "Loop | None":
        """Return this thread's loop, if it has one."""
        return _of.loop

    @staticmethod
    def take() -> "Loop":
        """Return this thread's loop, a new one if there is none. `give_back` must follow."""
        loop = _of.loop = _of.loop or Loop()
        loop._holders += 1
        return loop

    def give_back(self) -> None:
        """The loop ends when nobody holds it any more."""
        if threading.get_ident() != self._thread:
            with suppress(RuntimeError):  # it has ended
                self.loop.call_soon_threadsafe(self.give_back)
            return
        self._holders -= 1
        if not self._holders and not self.loop.is_running():
            self._end()

    def watch(self, descriptors: Iterable[int]) -> None:
        """Let `run` return, too, when one of these is readable."""
        for descriptor in descriptors:
            if descriptor not in self._watched:
                self._watched.add(descriptor)
                self.loop.add_reader(descriptor, self.loop.stop)

    def run(self, seconds: float) -> bool:
        """Run until somebody stops or wakes the loop. False when that took more than so many seconds."""
        self._late = False
        alarm = self.loop.call_later(seconds, self._give_up)
        self._run()
        alarm.cancel()
        return not self._late

    def turn(self) -> None:
        """Read what has come, and let those go on who waited for it. Never waits."""
        self.loop.call_soon(self.loop.call_soon, self.loop.stop)  # at the end of its second round
        self._run()

    def go_on(self) -> None:
        """Give it a turn where it has had none for `STOOD` seconds: for those who look again and again, and wait at no bell."""
        if monotonic() - self._left > STOOD:
            self.turn()

    def wake(self) -> None:
        """Have `run` return."""
        if threading.get_ident() == self._thread:
            self.loop.stop()
            return
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def do(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return what `work` returns. Raises what it raises, `TimeoutError`, or `RuntimeError` where the loop has ended."""
        if self.loop.is_closed():
            work.close()
            raise RuntimeError("the event loop is closed")
        if threading.get_ident() != self._thread:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            try:
                return future.result(seconds)
            except NotYet:
                future.cancel()
                raise TimeoutError from None
        task, until = self.loop.create_task(work), monotonic() + seconds
        task.add_done_callback(lambda _: self.loop.stop())
        while not task.done():
            if (left := until - monotonic()) <= 0:
                task.cancel()
                raise TimeoutError
            self.run(left)
        return task.result()

    def _give_up(self) -> None:
        self._late = True
        self.loop.stop()

    def _run(self) -> None:
        away = monotonic() - self._left
        if away > LONG:
            self.loop.stood += away
        outer = asyncio._get_running_loop()  # a notebook's, say, in which all of this is a call
        asyncio._set_running_loop(None)
        try:
            self.loop.run_forever()
        finally:
            asyncio._set_running_loop(outer)
            self._left = monotonic()
        if not self._holders:
            self._end()

    def _end(self) -> None:
        _of.loop = None
        for descriptor in self._watched:
            self.loop.remove_reader(descriptor)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            with suppress(RuntimeError):  # stopped by a ring that came late
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio._set_running_loop(outer)
        self.loop.close()


def turn() -> None:
    """Give this thread's loop a turn, if it has one."""
    if _of.loop is not None:
        _of.loop.turn()
