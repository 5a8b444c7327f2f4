"""One event loop in one thread, on which the lanes of all environments with `async def` steps wait at once."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, TypeVar

from tidemill.core.cores import keep
from tidemill.core.rings import Together, ring
from tidemill.envs.crew import CLOSE_SECONDS, Raised

T = TypeVar("T")


class Loop:
    """An event loop that runs in a daemon thread as long as somebody holds it: see `take`."""

    _lock = threading.Lock()
    _shared: "Loop | None" = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._holders = 0
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wakes: list[Callable[[], None]] = []
        self._told = False  # the loop has been told that there are calls
        self._thread = threading.Thread(target=self._run, name="tidemill event loop", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls) -> "Loop":
        """Return this process's loop, which `give_back` must follow."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._holders += 1
            return cls._shared

    def give_back(self) -> None:
        """End the loop if nobody else holds it."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            Loop._shared = None
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have `function` called in the loop's thread, soon. The loop is woken once for all calls that come before it gets to them."""
        self._calls.append((function, arguments))
        ring(self._tell)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self.loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        self._told = False  # before it looks: who comes now tells it again
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)

    def wake(self, wake: Callable[[], None]) -> None:
        """Call `wake` once the loop, whose thread this is, has dealt with all that has come by now."""
        self._wakes.append(wake)
        if len(self._wakes) == 1:
            self.loop.call_soon(self._wake)

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, []
        with Together():
            for wake in wakes:
                wake()

    def do(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return what `work` returns. Raises what it raises, or `TimeoutError`."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except NotYet:
            future.cancel()
            raise TimeoutError from None

    def _run(self) -> None:
        keep()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class Tasks:
    """Steps lanes as a `Crew` does, but each in a task of the event loop: what a call returns is awaited."""

    def __init__(self, lanes: int) -> None:
        self.loop = Loop.take()
        self._results: list[Any] = [None] * lanes
        self._tasks: list[asyncio.Task[None] | None] = [None] * lanes
        self._left = 0
        self._finished = threading.Event()
        self._finished.set()
        self._wake: Callable[[], None] | None = None
        self._closed = False

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from the loop's thread, whenever a tick is finished."""
        self._wake = wake

    def begin(self, calls: Sequence[Callable[[Any], Any]], given: Sequence[Any]) -> None:
        """Have ``calls[lane](given[lane])`` awaited in every lane; the tick before must have been taken."""
        self._finished.clear()
        self.loop.call(self._begin, calls, given)

    def ready(self) -> bool:
        """True when all lanes have answered."""
        return self._finished.is_set()

    def take(self) -> list[Any]:
        """Return what the lanes returned, or what they `Raised`; waits for the last of them."""
        self._finished.wait()
        return self._results

    def close(self) -> list[int]:
        """Break off what is under way, and return the lanes that did not end in time."""
        self._closed = True
        with suppress(TimeoutError, RuntimeError):
            self.loop.do(self._cancel(), CLOSE_SECONDS)
        return [lane for lane, task in enumerate(self._tasks) if task is not None and not task.done()]

    async def _cancel(self) -> None:
        running = [task for task in self._tasks if task is not None and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self, calls: Sequence[Callable[[Any], Any]], given: Sequence[Any]) -> None:
        self._left = len(self._results)
        for lane, (call, value) in enumerate(zip(calls, given, strict=True)):
            self._tasks[lane] = self.loop.loop.create_task(self._lane(lane, call, value))

    async def _lane(self, lane: int, call: Callable[[Any], Any], value: Any) -> None:
        try:
            result = call(value)
            self._results[lane] = await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result
        except asyncio.CancelledError as error:
            if self._closed:
                raise
            self._results[lane] = Raised(RuntimeError(f"what it awaits was cancelled (CancelledError) {error}".rstrip()))
        except Exception as error:
            self._results[lane] = Raised(error)
        finally:
            self._left -= 1
            if not self._left:
                self._finished.set()
                if self._wake is not None and not self._closed:
                    self.loop.wake(self._wake)
