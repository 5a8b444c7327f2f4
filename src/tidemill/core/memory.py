"""Memory segments: sized once by the side that knows the size, mapped by the other. Anonymous, so that nothing outlives its processes."""

import mmap
import os
from abc import ABC, abstractmethod

from tidemill.core.errors import SchemaError

LIMIT = 64 << 30  # bytes; a size beyond it is a corrupt header, not a plan


class Segment(ABC):
    """A piece of memory that two or more workers see."""

    @abstractmethod
    def create(self, nbytes: int) -> memoryview:
        """Give the segment its size (once) and return it, zeroed and writable."""

    @abstractmethod
    def attach(self) -> memoryview | None:
        """Return the memory once its creator has sized it, else None."""


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
    """Shared memory behind an inherited descriptor (Linux memfd): it has no name, and is freed with the last process that holds it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def create(self, nbytes: int) -> memoryview:
        if not 0 < nbytes <= LIMIT:
            raise SchemaError(f"a shared segment of {nbytes} bytes was asked for; at most {LIMIT} are allowed")
        os.ftruncate(self.descriptor, nbytes)
        return memoryview(mmap.mmap(self.descriptor, nbytes))

    def attach(self) -> memoryview | None:
        size = os.fstat(self.descriptor).st_size
        return memoryview(mmap.mmap(self.descriptor, size)) if size else None
