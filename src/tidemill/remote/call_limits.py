"""What holds back calls to one host, shared by all its sessions in a process: a breaker,
a budget of retries, and how long calls of a kind take."""

import random
import threading

from tidemill.core.clock import awake

FADE = 0.99  # of the slowest call, with each that follows
SHORTEST = 1.0  # seconds: an answer is not late before
UNKNOWN = 15.0  # seconds after which it is late, at most, where no call is known


class Breaker:
    """A breaker stops calls to one host that fails. After `limit` failures in a row
    nothing is sent for a while but one trial at a time; whatever answers closes it again.
    Used by many threads."""

    def __init__(self, limit: int = 5, first: float = 0.1, longest: float = 5.0) -> None:
        """A trial is made `first` seconds after it opened; each that fails doubles that,
        up to `longest`."""
        self._limit, self._first, self._longest = limit, first, longest
        self._lock = threading.Lock()
        self._failures = 0
        self._next = 0.0  # when a trial may be made
        self._trying = False
        self.opened = 0
        """How often it opened."""

    def wait(self) -> float:
        """Return 0 when a request may be sent now, which `succeeded`, `failed` or
        `gave_up` must follow, or seconds until it is worth asking."""
        with self._lock:
            if self._failures < self._limit:
                return 0.0
            left = self._next - awake()
            if left > 0 or self._trying:
                return max(left, 0.02) * random.uniform(1.0, 1.5)
            self._trying = True
            return 0.0

    def succeeded(self) -> None:
        """The host answered."""
        with self._lock:
            self._failures, self._trying = 0, False

    def failed(self) -> None:
        """The host did not answer, or only that it cannot."""
        with self._lock:
            self._failures += 1
            self._trying = False
            if self._failures >= self._limit:
                self.opened += self._failures == self._limit
                pause = min(self._longest, self._first * 2.0 ** min(30, self._failures - self._limit))
                self._next = awake() + pause * random.uniform(0.5, 1.0)

    def gave_up(self) -> None:
        """The request was broken off by whoever sent it, or took longer than its time:
        that says nothing of the host."""
        with self._lock:
            self._trying = False


class Budget:
    """A budget holds retries as a share of calls: each call earns `share` of one, up to
    `most`, with which it begins. Used by many threads."""

    def __init__(self, share: float, most: float) -> None:
        self._share, self._most, self._left = share, most, most
        self._lock = threading.Lock()
        self.spent = 0
        """Retries so far."""

    def hold(self, sessions: int) -> None:
        """So many sessions are open: each may need a retry at the same time, when the
        network fails for a moment."""
        with self._lock:
            self._left += max(0.0, sessions - self._most)
            self._most = max(self._most, sessions)

    def earn(self) -> None:
        """One more call is made."""
        with self._lock:
            self._left = min(self._most, self._left + self._share)

    def spend(self, cost: int = 1, spare: bool = False) -> bool:
        """Take a retry that costs so much; False when that is not left. One that may be
        `spare`d is taken from the upper half only: the other is for calls that fail."""
        with self._lock:
            if self._left - (self._most / 2 if spare else 0) < cost:
                return False
            self._left -= cost
            self.spent += 1
            return True


class CallTimes:
    """Call times tell how long calls of one kind take, and so when an answer is late.
    Used by many threads: what one of them loses the next tells again."""

    def __init__(self) -> None:
        self.slowest = 0.0
        """Seconds of the slowest of late."""

    def took(self, seconds: float) -> None:
        """A call took so long, or had no answer for so long."""
        self.slowest = max(seconds, FADE * self.slowest)

    def late(self, deadline: float) -> float:
        """Return after how many seconds an answer is late: twice those of the slowest
        call; where there was none yet, half the deadline, 15 at most."""
        return max(SHORTEST, 2 * self.slowest) if self.slowest else min(deadline / 2, UNKNOWN)
