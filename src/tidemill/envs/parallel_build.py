"""Environments that take long to make: engines that start, sessions that are opened.
Threads make them while others go on."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic

from tidemill.api.environment import Environment
from tidemill.core.errors import EnvironmentFault, close_each, message_of
from tidemill.core.thread_stacks import stack_of, words_of
from tidemill.envs.hanging_threads import HANGING

QUICK = 0.05  # seconds: what takes no longer is made by the thread that wants it
MOST = 16  # at a time: engines that start want cores
LONGEST = 600.0  # seconds for one; at a run's start the controller's deadline comes before


class EnvironmentMaker:
    """A thread that makes an environment. First it closes the one that was `lost`, and
    waits `pause` seconds (nothing is made once `closed` is set). `wake` is called from it
    in the end. It lives on as long as what it made, since an engine may be told to end
    with the thread that started it (PR_SET_PDEATHSIG); where what it made is a mere
    connection (not `needs_maker`) it ends. One that nobody waits for any more, while it
    still closes or makes, hangs: it is counted among `HANGING` until it comes back."""

    def __init__(
        self,
        make: Callable[[], Environment],
        wake: Callable[[], None] = lambda: None,
        lost: Environment | None = None,
        pause: float = 0.0,
        closed: threading.Event | None = None,
    ) -> None:
        self._made: Environment | Exception | None = None
        self.pause = pause
        self._unwanted = self._at_work = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._arguments = make, wake, lost, closed or threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="slot")
        self._thread.start()

    def made(self) -> Environment | Exception | None:
        """Return, once, what was made, or what that raised; None before."""
        made, self._made = self._made, None
        return made

    def take(self) -> Environment:
        """Return what is made, as soon as it is. Raises what that raised, and
        `EnvironmentFault` after `LONGEST` seconds."""
        if not self._done.wait(LONGEST):
            raise EnvironmentFault(
                f"an environment was not made within {LONGEST:g} s; what its constructor waits for does not "
                "come"
            )
        made = self.made()
        if isinstance(made, Exception):
            raise made
        assert made is not None
        return made

    def give_up(self) -> None:
        """Nobody waits for it any more: what it makes is closed."""
        with self._lock:
            self._unwanted = True
            made = self.made()
            if self._at_work:
                HANGING.leave(self._thread)
        if isinstance(made, Environment):
            made.close()

    def doing(self) -> str:
        """Return where it is, in words, while it closes or makes; "" else."""
        calls = stack_of(self._thread.ident) if self._at_work else []
        inner = [call.file == __file__ for call in calls]
        return words_of(calls[: inner.index(True)]) if True in inner else ""

    def _begin(self) -> bool:
        """Begin to close or to make. False where nobody waits for that any more."""
        with self._lock:
            self._at_work = not self._unwanted
            return self._at_work

    def _end(self) -> None:
        with self._lock:
            self._at_work = False
            HANGING.returned(self._thread)

    def _work(self) -> None:
        make, wake, lost, closed = self._arguments
        if lost is not None:
            self._begin()  # it is to be closed all the same
            with suppress(BaseException):  # it ends this thread, and somebody waits
                lost.close()
            self._end()
        del lost, self._arguments
        if closed.wait(self.pause) or not self._begin():
            return
        made: Environment | Exception
        try:
            made = make()
        except Exception as error:
            made = error
        except BaseException as error:  # sys.exit, say
            made = EnvironmentFault(f"{type(error).__name__}: {message_of(error)}")
        self._end()
        with self._lock:
            unwanted = self._unwanted or closed.is_set()
            self._made = None if unwanted else made
        self._done.set()
        if unwanted:
            if isinstance(made, Environment):
                made.close()
            return
        gone = threading.Event()
        if isinstance(made, Environment) and made.needs_maker:
            weakref.finalize(made, gone.set)
        else:
            gone.set()
        wake()
        del made, make, wake, closed  # which may hold it
        gone.wait()


# for what hangs to come back and be closed: with `CLOSE_SECONDS` less than the controller
# gives an actor
LEAVE_SECONDS = 1.5


def close_all(environments: Sequence[Environment]) -> None:
    """Close all of them: what hangs is waited for once, and not once for each, that which
    hung earlier in a slot, too. What comes back later is closed then, if its process
    still is."""
    for environment in environments:
        environment.begin_close()
    close_each(environment.close for environment in environments)
    until = monotonic() + LEAVE_SECONDS
    for environment in environments:
        environment.wait_closed(max(0.0, until - monotonic()))


def make_all(make: Callable[[int], Environment], numbers: Iterable[int]) -> Iterator[Environment]:
    """Return an environment for each of `numbers`, in this order, as they get ready.
    Where the first takes long, the others are made side by side, if they are such as are
    made anew in threads anyway (`Environment.voids`). Raises what making one raised; who
    is not handed out is closed."""
    left, began = iter(numbers), monotonic()
    first = make(next(left))
    slow = first.voids and monotonic() - began > QUICK
    yield first
    if not slow:
        yield from map(make, left)
        return
    making: deque[EnvironmentMaker] = deque()
    try:
        while True:
            making += (EnvironmentMaker(partial(make, number)) for number in islice(left, MOST - len(making)))
            if not making:
                return
            made = making[0].take()  # one that nobody waits for any longer is given up, too
            making.popleft()
            yield made
    finally:
        for each in making:
            each.give_up()
