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
    """A call: since when it does what it does now, and how many seconds that may take
    besides, whether its caller has given it up, and whether it did so since it is
    late."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.given_up = self.late = False
        self.over = threading.Event()
        self.result: Any = None
        self.raised: BaseException | None = None
        self.begin()

    def begin(self, seconds: float = 0.0) -> None:
        self.since, self.began, self.besides = time(), awake(), seconds

    def make(self) -> None:
        self.begin()
        try:
            self.result = self.work()
        except BaseException as error:
            self.raised = error
        self.over.set()


class FolderThread:
    """A folder thread makes calls into `folder`, one at a time. A caller waits for its
    own, and goes on without one that does not come back; until it has, no other one is
    made. Several threads may call.

    seconds: that what a call does may take. It may be changed meanwhile
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self.seconds = folder, seconds
        self._one = threading.Lock()
        self._calls = SimpleQueue[_Call | None]()
        self._thread: threading.Thread | None = None
        self._call: _Call | None = None  # the last one

    @property
    def hangs(self) -> bool:
        """True while a call has not come back in time."""
        call = self._call
        return call is not None and call.late and not call.over.is_set()

    @property
    def busy(self) -> bool:
        """True while a call that was given up, in time or not, has not come back."""
        call = self._call
        return call is not None and call.given_up and not call.over.is_set()

    def do(self, work: Callable[[], T], anyway: bool = False) -> T:
        """Return what `work` returns, or raise what it raises; `Unanswered` where it does
        not come back in time, or one before has not yet. What comes of it then, nobody
        learns. `anyway`: it is made all the same, once the one before has come back."""
        with self._one:
            before, call = self._call, _Call(work)
            if before is not None:  # a signal may have come while it was waited for
                try:
                    self._await(before)
                except Unanswered:
                    if not anyway:
                        raise
                    call.since, call.late = before.since, True
            self._call = call
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
        while not call.over.wait(min(max(0.0, self._left(call)), LOOK)):
            call.late = call.late or self._left(call) <= 0.0
            if call.late:
                raise self._unanswered()

    def _left(self, call: _Call) -> float:
        return call.began + self.seconds + call.besides - awake()

    def go_on(self, seconds: float = 0.0) -> None:
        """Called within `work`: say that what is done next may take so many seconds
        besides. Raises `Unanswered` where nobody waits for it any more."""
        call = self._call
        if call is not None and call.given_up:
            raise self._unanswered()
        if call is not None:
            call.begin(seconds)

    def close(self) -> None:
        """Let the thread end, once it has come back."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            if not self.busy:
                thread.join(self.seconds)

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
