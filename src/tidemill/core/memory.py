"""Memory segments: sized once by the side that knows the size, mapped by the other.
Anonymous, so that nothing outlives its processes.

And the memory of the machine: what is needed, what there is, and the refusal, with the
sums, of what cannot fit.
"""

import mmap
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from tidemill.core.control_groups import free_memory
from tidemill.core.errors import ConfigError, SchemaError

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
# bytes free at the end of the heap: more go back. Minibatches of 2,048 images of Atari
# need no more new pages than with 2 GB
TRIM_BYTES = 512 << 20
LIMIT = 64 << 30  # bytes; a size beyond it is a corrupt header, not a plan


class Segment(ABC):
    """A piece of memory that two or more workers see."""

    @abstractmethod
    def create(self, nbytes: int) -> memoryview:
        """Give the segment its size (once) and return it, zeroed and writable."""

    @abstractmethod
    def attach(self) -> memoryview | None:
        """Return the memory once its creator has sized it, else None."""

    def close(self) -> None:
        """Give up what this end reaches it by. What is mapped already stays."""


class LocalSegment(Segment):
    """Memory of this process, for workers in threads. Both ends hold the same object."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def create(self, nbytes: int) -> memoryview:
        self._memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))
        return self._memory

    def attach(self) -> memoryview | None:
        return self._memory


class MemfdSegment(Segment):
    """Shared memory behind an inherited descriptor (Linux memfd): it has no name, and is
    freed with the last process that holds it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def create(self, nbytes: int) -> memoryview:
        if not 0 < nbytes <= LIMIT:
            raise SchemaError(
                f"a shared segment of {nbytes} bytes was asked for; at most {LIMIT} are allowed"
            )
        os.ftruncate(self.descriptor, nbytes)
        return memoryview(mmap.mmap(self.descriptor, nbytes))

    def attach(self) -> memoryview | None:
        size = os.fstat(self.descriptor).st_size
        return memoryview(mmap.mmap(self.descriptor, size)) if size else None

    def close(self) -> None:
        os.close(self.descriptor)


class Need(msgspec.Struct, frozen=True):
    """A need is memory that is going to be filled: `nbytes` for `what`, and the factors
    that make it ("2 slots x 129 rows x …"). `shared`: it lies in slots, or is mapped so
    that it may be shared, and is not in `own_bytes`, as arrays of numpy are."""

    what: str
    nbytes: int
    factors: str = ""
    shared: bool = False


def own_of(needs: Iterable[Need]) -> int:
    """Return the bytes of those needs that are not shared."""
    return sum(need.nbytes for need in needs if not need.shared)


def check_memory(needs: Iterable[Need], free: int) -> None:
    """Raise `ConfigError`, with the sums, when `needs` are more than the `free` bytes."""
    counted = Counter(needs)
    total = sum(need.nbytes * count for need, count in counted.items())
    if total > free:
        lines = [
            f"  {need.what}: {size(need.nbytes * count)}"
            + (f" = {f'{count:,} x ' * (count > 1)}{need.factors}" if need.factors else "")
            for need, count in sorted(counted.items(), key=lambda item: -item[0].nbytes * item[1])
        ]
        raise ConfigError(
            f"this needs {size(total)} of memory, and {size(free)} are available; make sample_steps, lanes, "
            "slots, ring or count smaller:\n" + "\n".join(lines)
        )


def size(nbytes: float) -> str:
    """Return bytes for people: "0.1 MB", "66 MB", "21.3 GB"."""
    if nbytes < 999.5e6:
        return f"{nbytes / 1e6:.0f} MB" if nbytes >= 9.95e6 else f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:,.1f} GB"


def available() -> int:
    """Return the bytes that can still be filled here: what the machine has left, or this
    process's control groups where that is less."""
    groups = free_memory()
    return _machine() if groups is None else min(_machine(), groups)


def _machine() -> int:
    with suppress(OSError, StopIteration):  # Linux: as psutil reads it, without the time to import that
        return next(
            int(line.split()[1]) << 10
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
    with suppress(OSError, ImportError):
        import psutil

        return int(psutil.virtual_memory().available)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # Linux without /proc


def keep_freed() -> None:
    """Let this process use again what it frees, in place of giving it back and asking for
    it anew (glibc; elsewhere nothing happens).

    The large arrays of a network that sees images live for a moment each. Without this
    the kernel clears all of their pages in every minibatch, 60,000 a second: a sixth of
    what training on Atari's images takes, and what is cleared has left the cache.
    """
    _malloc("mallopt", _MMAP_MAX, 0)
    _malloc("mallopt", _TRIM_THRESHOLD, TRIM_BYTES)


def give_back() -> None:
    """Give back what this process has freed (glibc; elsewhere nothing happens): what it
    grows by from now on is what it needs more."""
    _malloc("malloc_trim", 0)


def _malloc(name: str, *arguments: int) -> None:
    import ctypes

    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def kinds_of_memory() -> dict[str, int]:
    """Return the bytes that this process holds, by kind; {} where the system does not
    tell (other than Linux). It costs one small file."""
    kinds = {"RssAnon": "private memory", "RssShmem": "shared memory", "RssFile": "mapped files"}
    with suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
        return {kinds[key]: int(value.split()[0]) << 10 for key, _, value in lines if key in kinds}
    return {}


def own_bytes(pid: int) -> int | None:
    """Return the bytes that a process holds and shares with no other: what it has
    allocated, without files and shared memory. None where the system does not tell (other
    than Linux), or there is no such process. It costs one small file."""
    with suppress(OSError, ValueError, IndexError):
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return None


def resident_bytes(children: bool = False) -> list[int]:
    """Return the bytes that this process holds, and each of those that it started: its
    own and its share of what it shares (Linux: PSS)."""
    import psutil

    found = []
    with suppress(psutil.Error, OSError):  # OSError: there is no /proc
        me = psutil.Process()
        for process in (me, *(me.children(recursive=True) if children else ())):
            with suppress(psutil.Error):
                info = process.memory_full_info()
                found.append(int(getattr(info, "pss", info.rss)))
    return found
