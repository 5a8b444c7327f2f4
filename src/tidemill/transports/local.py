"""The transport of one process: workers are threads, or take turns in one thread."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tidemill.api.edges import Edge, ends_by_worker
from tidemill.api.transport import Bell, Link
from tidemill.core.memory import LocalSegment
from tidemill.core.thread_loop import own
from tidemill.transports.slots import SlotEndpoints

if TYPE_CHECKING:
    from tidemill.core.asyncio_loops import Loop


class LocalBell(Bell):
    """A bell between threads: a lock that is held as long as nobody has rung since the
    last wait. Ringing again costs a look, waiting one call."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()
        self._loop: Loop | None = None  # of whoever waits

    def ring(self) -> None:
        if self._silent.locked():
            with suppress(RuntimeError):  # somebody else rang just now
                self._silent.release()
        if (loop := self._loop) is not None:
            loop.wake()

    def wait(self, seconds: float) -> bool:
        loop = own.loop
        if loop is None:
            return self._silent.acquire(timeout=max(seconds, 0.0))
        self._loop = loop  # before a last look: who rings later wakes it
        came = self._silent.acquire(blocking=False) or (
            loop.run(seconds) | self._silent.acquire(blocking=False)
        )
        self._loop = None
        return came


class LocalLink(Link):
    """One end of an in-process control link."""

    def __init__(self, inbox: deque[bytes], bell: Bell) -> None:
        self.bell = bell  # of this end's owner
        self.peer: LocalLink
        self._inbox = inbox
        self._closed = False

    @classmethod
    def pair(cls, first: Bell, second: Bell) -> "tuple[LocalLink, LocalLink]":
        """Return two connected ends; `first` and `second` are the bells of their
        owners."""
        a, b = cls(deque(), first), cls(deque(), second)
        a.peer, b.peer = b, a
        return a, b

    def send(self, message: bytes) -> bool:
        if self.peer._closed:
            return False
        self.peer._inbox.append(message)
        self.peer.bell.ring()
        return True

    def receive(self) -> list[bytes] | None:
        closed = self.peer._closed
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return None if closed and not messages else messages

    def close(self) -> None:
        """Hang up: the other end reads what is left, then None."""
        self._closed = True
        self.peer.bell.ring()


def local_endpoints(
    workers: Sequence[str], edges: Sequence[Edge], together: Sequence[Sequence[str]] = ()
) -> dict[str, tuple[SlotEndpoints, LocalLink]]:
    """Return for each worker its ends, and the runner's end of its control link (all of
    these share the runner's bell). `together`: those of the workers that share a bell,
    since they take turns in one thread."""
    bells = {worker: LocalBell() for worker in workers}
    for names in together:
        bells |= dict.fromkeys(names, bells[names[0]])
    segments = {edge.name: LocalSegment() for edge in edges}
    held, runner = ends_by_worker(edges), LocalBell()
    ends = {}
    for worker in workers:
        up, down = LocalLink.pair(bells[worker], runner)
        edge_ends = {
            name: (segments[name], [bells[other] for other in others])
            for name, others in held[worker].items()
        }
        ends[worker] = SlotEndpoints(bells[worker], up, edge_ends), down
    return ends
