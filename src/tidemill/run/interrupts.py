"""Signals that end a run: the first asks for a clean end, a later one (or a clean end
that takes too long) breaks off."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from tidemill.core.clock import awake
from tidemill.core.errors import BrokenOff, HangLeft
from tidemill.launchers.worker_process import ENDING

HURRY = 6.0  # seconds from the first signal until who is in a long update is told to end it
GRACE = 18.0  # seconds from the first signal until a run that is still ending is broken off
# seconds in which signals are one: batch systems and `timeout` send it to the process and
# to its group, some send another after it
ONE = 1.0
UNHEARD = 0.5  # seconds after which it is told that one has come, where nobody acts on it yet


class Interrupts:
    """The interrupts record Ctrl-C, SIGTERM and SIGHUP while they are entered, in every
    phase of a run. Does nothing outside the main thread.

    first: the first signal, 0 while there was none
    overdue: whether the last of them came from here, `grace` seconds after the first
    heard: whether whoever leads the run has taken note of the first
    tell: function that tells the user, from another thread, that it has come, where the
        main thread is in the midst of what takes long
    suspend: whether Ctrl-Z was noted (`noting_ctrl_z`)
    armed: whether a later one raises `BrokenOff`: while workers run, not while the run's
        last files are written
    """

    def __init__(self) -> None:
        self.first = 0
        self.grace = GRACE
        self.tell: Callable[[str], None] = lambda text: None
        self.armed = self.overdue = self.heard = self.suspend = self._abrupt = False
        self._previous: dict[signal.Signals, Any] = {}
        self._at = 0.0  # when the first came
        self._timers: list[threading.Timer] = []
        self._what: Callable[[], HangLeft | None] | None = None  # see `leave`

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def urgent(self) -> bool:
        """True once a run that was told to end by a signal has taken long for that."""
        return bool(self.first) and awake() - self._at > HURRY

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Have the first signal raise `BrokenOff`: while nothing has begun that is to be
        ended well."""
        self._abrupt = True
        try:
            yield
        finally:
            self._abrupt = False

    @contextmanager
    def noting_ctrl_z(self) -> Iterator[None]:
        """Have Ctrl-Z only noted (`suspend`): whoever looks has something to do before
        this process stops (`stop_here`)."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL
        ):
            yield
            return
        signal.signal(signal.SIGTSTP, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            if self.suspend:
                self.stop_here()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.suspend = True

    def stop_here(self) -> None:
        """Stop this process as Ctrl-Z does. It returns when somebody lets it go on."""
        self.suspend = False
        noting = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, noting)

    def leave(self, what: Callable[[], HangLeft | None]) -> None:
        """Raise in the main thread, whatever it waits for there, what `what` returns
        there; None: it is to leave nothing any more. Called in another thread; does
        nothing where signals are not taken."""
        main = threading.main_thread().ident
        if main is not None and signal.SIGTERM in self._previous:
            self._what = what
            signal.pthread_kill(main, signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if (what := self._what) is not None:
            self._what = None
            if (left := what()) is not None:
                raise left
        elif not self.first:
            self.first, self._at = number, awake()
            if self._abrupt:
                raise BrokenOff
            self._after(UNHEARD, self._tell_unheard)
            self._after(self.grace, self._remind)
        elif self.armed and (self.overdue or awake() - self._at > ONE):
            self.armed = False
            raise BrokenOff

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have another thread act after so long."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers.append(timer)
        with suppress(RuntimeError):  # no more threads are allowed
            timer.start()

    def _tell_unheard(self) -> None:
        if self.armed and not self.heard:
            self.tell(
                f"{signal_name(self.first)} has come: the run ends as soon as its main thread comes back, "
                "which is in an update, an environment or a callback; another one breaks it off, without a "
                "last checkpoint"
            )

    def _remind(self) -> None:
        """Have the signal come again: only that wakes a main thread that sits in
        somebody's code (an inline environment that hangs)."""
        main = threading.main_thread().ident
        if main is None or not self.armed:
            return
        if (left := self.grace - (awake() - self._at)) > ONE:  # the process was stopped meanwhile
            self._after(left, self._remind)
            return
        self.overdue = True
        signal.pthread_kill(main, self.first)


def signal_name(number: int) -> str:
    """Return what messages call a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_status(reason: str) -> int:
    """Return the exit status that a shell expects of a run that ended by the signal of
    this name."""
    number = signal.SIGINT if reason == "Ctrl-C" else getattr(signal, reason, signal.SIGTERM)
    return 128 + int(number)
