"""Tasks of an event loop in which the lanes of environments with `async def` steps wait
at once: the loop of the thread that plays them."""

import asyncio
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from tidemill.core.asyncio_loops import Loop
from tidemill.core.thread_loop import own
from tidemill.envs.lane_threads import CLOSE_SECONDS, RaisedError

LOOK_AGAIN = 0.1


class LaneCoroutines:
    """Lane coroutines step lanes as `LaneThreads` does, but each in a task of the event
    loop of the thread that begins the first tick: what a call returns is awaited. They go
    on while that thread waits at a bell, and when it looks whether they are `ready`."""

    def __init__(self, lanes: int) -> None:
        self._loop: Loop | None = None
        self._results: list[Any] = [None] * lanes
        self._tasks: list[asyncio.Task[None] | None] = [None] * lanes
        self._left = 0
        self._wake: Callable[[], None] | None = None
        self._closed = False
        self._until = 0.0  # when those that have not ended count as hanging

    @property
    def loop(self) -> Loop:
        """The loop on which they are, this thread's from now on if they are on none."""
        if self._loop is None:
            self._loop = Loop.take()
        return self._loop

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from the loop, whenever a tick is finished."""
        self._wake = wake

    def begin(
        self,
        calls: Sequence[Callable[[Any], Any]],
        given: Sequence[Any],
        apart: Container[int] = (),
        watched: Container[int] = (),
    ) -> None:
        """Have ``calls[lane](given[lane])`` awaited in every lane, from the loop's next
        turn on; the tick before must have been taken. Which are resets, or watched, makes
        no difference here: coroutines have deadlines of their own."""
        loop, self._left = self.loop.loop, len(self._results)
        for lane, (call, value) in enumerate(zip(calls, given, strict=True)):
            self._tasks[lane] = loop.create_task(self._lane(lane, call, value))

    def ready(self) -> bool:
        """True when all lanes have answered. Where the loop has stood for a while it is
        given a turn."""
        if self._left:
            self.loop.go_on()
        return not self._left

    def take(self) -> list[Any]:
        """Return what the lanes returned, or what they raised (`RaisedError`); waits for
        the last of them."""
        while self._left:
            self.loop.run(LOOK_AGAIN)
        return self._results

    def begin_close(self) -> None:
        """Break off what is under way. In another thread than the loop's, that is left to
        `close`."""
        if not self._closed and self.loop is own.loop:
            self._closed, self._until = True, monotonic() + CLOSE_SECONDS
            for task in self._running():
                task.cancel()

    def close(self, leave: Callable[[int], object] = lambda lane: None) -> list[int]:
        """Break off what is under way, and return the lanes that did not end in time.
        Once they do, `leave` is called with each of them, in the loop's thread, as long
        as that goes on."""
        self.begin_close()
        work, seconds = (
            (self._wait(), max(LOOK_AGAIN, self._until - monotonic()))
            if self._closed
            else (self._cancel(), CLOSE_SECONDS)
        )
        self._closed = True
        with suppress(TimeoutError, RuntimeError):
            self.loop.do(work, seconds)
        stuck = [lane for lane, task in enumerate(self._tasks) if task is not None and not task.done()]
        for lane in stuck:
            task = self._tasks[lane]
            assert task is not None
            with suppress(RuntimeError):  # the loop has ended
                self.loop.loop.call_soon_threadsafe(task.add_done_callback, lambda _, lane=lane: leave(lane))
        return stuck

    def left(self, seconds: float) -> bool:
        """True: nobody can wait for tasks but by going on with their loop, which `close`
        has done."""
        return True

    def _running(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks if task is not None and not task.done()]

    async def _cancel(self) -> None:
        for task in self._running():
            task.cancel()
        await self._wait()

    async def _wait(self) -> None:
        if running := self._running():
            await asyncio.wait(running)

    async def _lane(self, lane: int, call: Callable[[Any], Any], value: Any) -> None:
        try:
            result = call(value)
            self._results[lane] = (
                await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result
            )
        except (asyncio.CancelledError, GeneratorExit) as error:
            if self._closed:
                raise
            self._results[lane] = RaisedError(
                RuntimeError(f"what it awaits was cancelled ({type(error).__name__}) {error}".rstrip())
            )
        except BaseException as error:  # a second Ctrl-C, too, is the actor's to tell
            self._results[lane] = RaisedError(error)
        finally:
            self._left -= 1
            if not self._left and not self._closed:
                self.loop.wake()
                if self._wake is not None:
                    self._wake()
