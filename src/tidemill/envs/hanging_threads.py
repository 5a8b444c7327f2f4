"""Threads of this process that hang in environments and were left behind, since nobody
can end a thread: how many there are, and how many there may be at once."""

import threading

from tidemill.core.errors import EnvironmentHangs

LEAST_BOUND = 16
"""So many threads may hang at once, or as many as step lanes, where these are more."""


class HangingThreads:
    """The threads of a process that hang. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stepping = 0  # threads that step lanes, and were not left
        self._hanging = set[threading.Thread]()

    @property
    def count(self) -> int:
        """How many hang now."""
        return len(self._hanging)

    def step(self, threads: int) -> None:
        """Take note of so many more threads that step lanes, or fewer (below 0)."""
        with self._lock:
            self._stepping += threads

    def leave(self, thread: threading.Thread) -> None:
        """Take note of a thread that was left; see `returned`."""
        with self._lock:
            self._hanging.add(thread)

    def returned(self, thread: threading.Thread) -> None:
        """Take note that a thread has come back, whether it was left or not."""
        with self._lock:
            self._hanging.discard(thread)

    def check(self, cause: str) -> None:
        """Raise `EnvironmentHangs` where too many hang, of whom the last one did by
        `cause`."""
        if self.count > (most := max(LEAST_BOUND, self._stepping)):
            fault = EnvironmentHangs(
                f"{cause}. {self.count} threads of this process hang in their environments by now, and no "
                f"thread can be ended; more than {most} are not left behind: let the environment break off "
                "what does not come back, or step it in processes that can be ended (--launch processes, "
                "threads=0)"
            )
            fault.too_many = True
            raise fault


HANGING = HangingThreads()
"""Those of this process."""
