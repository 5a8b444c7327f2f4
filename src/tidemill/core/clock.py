"""Time: without that in which this process was stopped (`awake`), and where a worker's
goes (`Clock`).

Deadlines, limits of seconds and steps/s go by `awake`: no time passes for a process that
is stopped (SIGSTOP, a paused container). A gap between two looks in which the process did
not compute either is left out; a thread looks twice a second, since all others may wait
for an environment.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, perf_counter, process_time

TICK = 0.5  # seconds between looks at the time
LATE = 2.0  # seconds by which a look may be late, on a busy machine
PLACES = ("environment", "inference", "train", "copy", "wait", "python")


class _Stops:
    """What was left out so far. A look that is late, though the process has not computed
    meanwhile, was kept by a stop: SIGSTOP, a debugger, a container or a virtual machine
    that is paused."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.seen = 0.0  # when somebody was awake last, by a look or by reading the time
        self.used = 0.0  # seconds on processors by then
        self.noticing = 0  # how many do
        self.lock = threading.Lock()

    def look(self) -> None:
        """Note that the process is awake, and how long it was not."""
        with self.lock:
            now, used = monotonic(), process_time()
            gap = now - self.seen
            if gap > TICK + LATE and used - self.used < gap / 4:
                self.seconds += gap - TICK
            self.seen, self.used = now, used


_stops = _Stops()


def awake() -> float:
    """Return the seconds since some moment, as `time.monotonic` does, but for those in
    which this process was stopped, as far as that is noticed (`noticing_stops`): what
    runs out while nobody can do anything about it is no deadline, and no training."""
    now = monotonic()
    if _stops.noticing:
        if now - _stops.seen > TICK + LATE:
            _stops.look()
        else:
            _stops.seen = now
    return now - _stops.seconds


def stopped() -> float:
    """Return the seconds that `awake` has left out so far."""
    return _stops.seconds


@contextmanager
def noticing_stops() -> Iterator[None]:
    """Notice meanwhile when this process is stopped: a thread looks at the time, since
    all others may wait for long."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK):
            _stops.look()

    thread = threading.Thread(target=tick, name="noticing stops", daemon=True)
    with suppress(RuntimeError):  # no more threads are allowed: stops count as time
        thread.start()
    if not thread.is_alive():
        yield
        return
    with _stops.lock:
        _stops.noticing += 1
        if _stops.noticing == 1:
            _stops.seen, _stops.used = monotonic(), process_time()
    try:
        yield
    finally:
        with _stops.lock:
            _stops.noticing -= 1
        over.set()
        thread.join()


class Clock:
    """A clock adds up seconds by place. `enter` costs about 0.1 µs; whatever nobody
    claimed is ``python``."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PLACES, 0.0)
        self._place, self.since = "python", perf_counter()
        """Second of `perf_counter` in which the current place was entered."""
        self.last = 0.0
        """Seconds in the place that was left last, this time."""
        self._stopped = stopped()

    def enter(self, place: str) -> str:
        """Stop the current place, start `place`, and return the one that was left, to
        come back to."""
        now, left = perf_counter(), self._place
        self.last = now - self.since
        self.seconds[left] += self.last
        self._place, self.since = place, now
        return left

    def time_shares(self) -> dict[str, float]:
        """Return each place's share of the time since the last call, and begin anew. A
        stop of the process is nobody's time: it is far longer than all else between two
        calls."""
        self.enter(self._place)
        before, self._stopped = self._stopped, stopped()
        longest = max(self.seconds, key=lambda place: self.seconds[place])
        self.seconds[longest] = max(0.0, self.seconds[longest] - (self._stopped - before))
        total = sum(self.seconds.values()) or 1.0
        time_shares = {place: seconds / total for place, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(PLACES, 0.0)
        return time_shares
