"""Taking turns: wait until the other side has handed over, without burning a core while
it thinks.

A wait spins briefly, where that mostly pays, and then sleeps on a futex on the four bytes
that hold the turn. A peer that never woke us (it does not know of the futex) is waited
for in naps. Between sleeps somebody looks whether the other side still lives and whether
time is up.

Two sides that share a core learn within two waits not to spin.
"""

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from math import inf
from typing import Any

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None
_WAIT, _WAKE = 0, 1  # of futex(2), shared between processes
_SHORTEST_SPIN, _LONGEST_SPIN = 50e-6, 300e-6  # seconds
# a spin that did not pay costs so much of the trust that each one that did adds 1 to
_FEE, _MOST_TRUST = 8, 16
_TRY_AGAIN, _RAREST = 64, 4096  # without trust one is tried after so many waits, twice as many each time
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3
_LOOK = 0.2  # seconds between looks at the other side


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The four aligned bytes at `offset` of a mapping, to sleep on and to wake who
    sleeps. Use it only while the mapping is open."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        held = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(held) + offset)
        del held  # it would keep the mapping from being closed
        self._expected = ctypes.c_uint32()
        self._timeout = _Timespec()
        number, none = ctypes.c_long(_SYSCALL or 0), ctypes.c_void_p()
        # Two views of one function: sleeping releases Python's lock, waking, which is
        # short, does not.
        self._wait = ctypes.CDLL(None).syscall
        self._wake = ctypes.PyDLL(None).syscall

        def arguments(operation: int, value: Any, timeout: Any) -> tuple[Any, ...]:
            return number, address, ctypes.c_int(operation), value, timeout, none, ctypes.c_int()

        self._wait_arguments = arguments(_WAIT, self._expected, ctypes.byref(self._timeout))
        self._wake_arguments = arguments(_WAKE, ctypes.c_int(1), none)

    def sleep(self, expected: int, seconds: float) -> bool:
        """Sleep until somebody wakes us (True), at most so long; return at once where the
        four bytes are not `expected` (or not any more)."""
        if _SYSCALL is None:
            time.sleep(min(seconds, _LONGEST_NAP))
            return False
        self._expected.value = expected
        self._timeout.seconds = int(seconds)
        self._timeout.nanoseconds = int(seconds % 1 * 1e9)
        return bool(self._wait(*self._wait_arguments) == 0)

    def wake(self) -> None:
        """Wake who sleeps on it."""
        if _SYSCALL is not None:
            self._wake(*self._wake_arguments)


class Handover:
    """One side's waiting and handing over; it learns from wait to wait whether spinning
    pays.

    word: offset of the futex's four bytes
    turn: offset of the byte, one of the four, that is `mine` when it is this side's turn
    closed: offset of the byte among them that says that the other side has closed; None:
        there is none
    """

    def __init__(self, word: int, turn: int, mine: int, closed: int | None = None) -> None:
        self._word, self._turn, self._mine, self._closed = word, turn, mine, closed
        self._woken = False  # whether the other side ever woke us
        self._next_look = 0.0
        self._spin = _LONGEST_SPIN  # a good while longer than the other side took lately
        self._trust = _MOST_TRUST  # that spinning pays
        self._idle, self._pause = 0, _TRY_AGAIN  # waits without a spin, and how many there may be

    def attach(self, memory: mmap.mmap) -> None:
        """Take turns in this mapping from now on; it may be closed once another is
        attached, or none is used any more."""
        self._memory = memory
        self._futex = Futex(memory, self._word)

    def wake(self) -> None:
        """Wake the other side; after the turn byte was written."""
        self._futex.wake()

    def wait(self, look: Callable[[], None], seconds: float = inf) -> bool:
        """Return once it is this side's turn, or the other side has closed; False where
        so many seconds were not enough.

        `look` is called every 0.2 s, and raises to end the wait.
        """
        memory, turn, mine = self._memory, self._turn, self._mine
        if memory[turn] == mine:
            return True
        clock = time.perf_counter
        begun = clock()
        if self._spins():
            end = begun + self._spin
            while (now := clock()) < end:
                if (
                    memory[turn] == mine
                    or memory[turn] == mine
                    or memory[turn] == mine
                    or memory[turn] == mine
                ):
                    self._trust, self._pause = min(self._trust + 1, _MOST_TRUST), _TRY_AGAIN
                    self._spin += (min(_SHORTEST_SPIN + 2 * (now - begun), _LONGEST_SPIN) - self._spin) / 8
                    return True
            self._trust, self._spin = max(self._trust - _FEE, 0), min(2 * self._spin, _LONGEST_SPIN)
        return self._sleep(look, begun, seconds)

    def _spins(self) -> bool:
        """Whether to spin this time. Not where that often did not pay: the other side
        thinks long, or needs our core; but now and then once more."""
        if self._trust:
            return True
        self._idle += 1
        if self._idle < self._pause:
            return False
        self._idle, self._pause = 0, min(2 * self._pause, _RAREST)
        return True

    def _sleep(self, look: Callable[[], None], begun: float, seconds: float) -> bool:
        memory, word, clock = self._memory, self._word, time.perf_counter
        nap = _SHORTEST_NAP
        while True:
            seen = memory[word : word + 4]
            if seen[self._turn - word] == self._mine or (
                self._closed is not None and seen[self._closed - word]
            ):
                return True
            now = clock()
            if now - begun > seconds:
                return False
            if now >= self._next_look:
                look()
                self._next_look = now + _LOOK
            longest = min(_LOOK if self._woken else nap, seconds)
            if self._futex.sleep(int.from_bytes(seen, "little"), longest):
                self._woken = True
            nap = min(nap * 1.5, _LONGEST_NAP)
