"""The asyncio event loop of a thread: it runs while its thread waits, and a turn at a
time in between.

Whoever waits for an environment does so at a bell, and a bell lets the loop of its thread
run meanwhile. So what comes to the loop is at once where it is wanted: no thread hands
anything over to another, and all that came by one look at the network is dealt with
together.

While its thread computes the loop stands still. Sockets keep what comes meanwhile, it is
read before any alarm rings, and the loop's clock leaves out what took longer than a
second, so that no deadline passes while nobody looks. The loop ends with the last
environment on it; one that is closed in another thread, as a failed slot's is, is closed
by the loop's own.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

from tidemill.core.thread_loop import own

STOOD = 0.001  # seconds
LONG = 1.0  # seconds: when nobody ran the loop for longer, that is no time for deadlines
BUSY = 10.0  # seconds that another thread waits besides for the loop's own to run it

T = TypeVar("T")


class _Timed(asyncio.SelectorEventLoop):
    """Its clock leaves out the long times in which it stood still: what came meanwhile is
    read before a deadline breaks it off."""

    stood = 0.0

    def time(self) -> float:
        return monotonic() - self.stood


class _Threads(ThreadPoolExecutor):
    """A thread for each call (`asyncio.to_thread`, the look-up of a host's name): none
    waits for others, and one that hangs holds up no end, not even the program's."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # whoever awaits it is told
                    future.set_exception(error)

        threading.Thread(target=call, name="call of an event loop", daemon=True).start()
        return future


class Loop:
    """An event loop of the thread that took it, as long as somebody there holds it. Of
    its methods, other threads may call `wake`, `do` and `give_back`."""

    def __init__(self) -> None:
        self.loop = _Timed()
        self._thread = threading.get_ident()
        self._holders = 0
        self._watched: set[int] = set()
        self._left = monotonic()  # when it ran last
        self._late = False
        self._raised: BaseException | None = None
        self._second: asyncio.Handle | None = None
        self.loop.set_exception_handler(self._take)
        self.loop.set_default_executor(_Threads())

    @staticmethod
    def take() -> "Loop":
        """Return this thread's loop, a new one if there is none. `give_back` must
        follow."""
        loop = own.loop = own.loop or Loop()
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
        """Run until somebody stops or wakes the loop. False when that took more than so
        many seconds."""
        self._catch_up()
        self._late = False
        alarm = self.loop.call_later(seconds, self._give_up)
        try:
            self._run()
        finally:
            alarm.cancel()
        return not self._late

    def run_ready(self) -> None:
        """Read what has come, and let those go on who waited for it. Never waits."""
        self._catch_up()
        self.loop.call_soon(self._stop_next)
        self._run()
        if self._second is not None:  # something else may have ended the first round
            self._second.cancel()

    def go_on(self) -> None:
        """Give it a turn where it has had none for `STOOD` seconds: for those who look
        again and again, and wait at no bell."""
        if monotonic() - self._left > STOOD:
            self.run_ready()

    def wake(self) -> None:
        """Have `run` return."""
        if threading.get_ident() == self._thread:
            self.loop.stop()
            return
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def do(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return what `work` returns. Raises what it raises, `TimeoutError`, or
        `RuntimeError` where the loop has ended."""
        if self.loop.is_closed():
            work.close()
            raise RuntimeError("the event loop is closed")
        if threading.get_ident() != self._thread:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            try:
                return future.result(BUSY + seconds)
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

    def _stop_next(self) -> None:
        """End the run with the round after this one."""
        self._second = self.loop.call_soon(self.loop.stop)

    def _take(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what a callback raised: what is no `Exception`, a second Ctrl-C say, is
        meant for whoever runs the loop."""
        error = context.get("exception")
        if error is None or isinstance(error, Exception):
            loop.default_exception_handler(context)
        else:
            self._raised = error
            loop.stop()

    def _catch_up(self) -> None:
        """Leave a long time in which the loop stood still out of its clock."""
        now = monotonic()
        if now - self._left > LONG:
            self.loop.stood += now - self._left
        self._left = now

    def _give_up(self) -> None:
        self._late = True
        self.loop.stop()

    def _run(self) -> None:
        with _alone():
            self.loop.run_forever()
        self._left = monotonic()
        if not self._holders:
            self._end()
        if (raised := self._raised) is not None:
            self._raised = None
            raise raised

    def _end(self) -> None:
        if own.loop is self:  # else its thread is over, and another one has its number
            own.loop = None
        for descriptor in self._watched:
            self.loop.remove_reader(descriptor)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with _alone(), suppress(RuntimeError):  # stopped before that was complete
            self.loop.stop()
            self.loop.run_forever()  # a ring that came late, and the tasks' ends
            self.loop.run_until_complete(self._end_generators())
        self.loop.close()

    async def _end_generators(self) -> None:
        """End what generators have begun, for `LONG` seconds at most. All of them have
        begun to end before that is over, however late it is."""
        self.loop.call_later(LONG, self.loop.stop)
        await self.loop.shutdown_asyncgens()


@contextmanager
def _alone() -> Iterator[None]:
    """Set aside the loop in which all of this is a call, a notebook's say, with its task:
    a thread can run only one."""
    if (outer := asyncio._get_running_loop()) is None:
        yield
        return
    task = asyncio.current_task(outer)
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)
