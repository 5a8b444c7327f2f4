"""A thread for calls into a folder that may never come back, since a disk, or a network
share, may hang without an error. Who asks for one goes on without it."""

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from time import localtime, strftime, time
from typing import Any, TypeVar

from tidemill.core.clock import awake

LOOK = 0.1  # seconds between looks at until when a call has

T = TypeVar("T")


class Unanswered(TimeoutError):
    """A call into a folder has not come back in time."""


class _Call:
    """A call: until when its caller waits for it, since when for what it does now,
    whether that has given it up, and whether it did so since it is late."""

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self.work, self.since, self.until = work, time(), awake() + seconds
        self.given_up = self.late = False
        self.over = threading.Event()
        self.result: Any = None
        self.raised: BaseException | None = None

    def make(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.raised = error
        self.over.set()


class FolderThread:
    """A folder thread makes calls into `folder`, one at a time. A caller waits `seconds`
    for its own, and goes on without one that does not come back; until it has, no other
    one is made. Several threads may call.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._one = threading.Lock()
        self._calls = SimpleQueue[_Call | None]()
        self._thread: threading.Thread | None = None
        self._call: _Call | None = None  # the last one

    @property
    def hangs(self) -> bool:
        """True while a call has not come back in time."""
        call = self._call
        return call is not None and call.late and not call.over.is_set()

    def do(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Return what `work` returns, or raise what it raises; `Unanswered` where it does
        not come back in time, or one before has not yet. What comes of it then, nobody
        learns. `seconds`: that this one has."""
        with self._one:
            if self._call is not None:  # a signal may have come while it was waited for
                self._await(self._call)
            call = self._call = _Call(work, self._seconds if seconds is None else seconds)
            try:
                if self._begin():
                    self._calls.put(call)
                    self._await(call)
                else:
                    call.make()
            finally:
                call.given_up = not call.over.is_set()
        if call.raised is not None:
            raise call.raised
        result: T = call.result
        return result

    def _await(self, call: _Call) -> None:
        while not call.over.wait(min(max(0.0, call.until - awake()), LOOK)):
            call.late = call.late or awake() >= call.until
            if call.late:
                raise self._unanswered()

    def go_on(self, seconds: float = 0.0) -> None:
        """Called within `work`: say that what is done next may take so long, and the time
        that each has. Raises `Unanswered` where nobody waits for it any more."""
        call = self._call
        if call is not None and call.given_up:
            raise self._unanswered()
        if call is not None:
            call.since, call.until = time(), awake() + self._seconds + seconds

    def close(self) -> None:
        """Let the thread end, once it has come back."""
        if self._thread is not None:
            self._calls.put(None)
        self._thread = None

    def _begin(self) -> bool:
        """Return whether there is a thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"folder {self._folder.name}", daemon=True)
            with suppress(RuntimeError):  # no more are allowed, and a run in one thread needs none
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()

    def _unanswered(self) -> Unanswered:
        since = time() if self._call is None else self._call.since
        text = f"its disk, or share, does not answer since {strftime('%H:%M:%S', localtime(since))}"
        return Unanswered(errno.ETIMEDOUT, text, str(self._folder))
