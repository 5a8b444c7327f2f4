"""Control groups for memory, of version 1 or 2, which need the right to make one
(root)."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LEAVING = 60.0  # seconds in which whoever is in a group must have ended


class NoGroup(Exception):
    """A control group cannot be had on this machine."""


class MemoryGroup:
    """A control group in `folder`, of this `version`."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self._first = folder, version == 1

    def limit(self, most: int) -> None:
        """Allow it so many bytes."""
        (self.folder / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(f"{most}")
        swap = self.folder / ("memory.memsw.limit_in_bytes" if self._first else "memory.swap.max")
        if swap.exists():
            swap.write_text(f"{most if self._first else 0}")

    @property
    def used(self) -> int:
        """The bytes that it has taken."""
        return int((self.folder / ("memory.usage_in_bytes" if self._first else "memory.current")).read_text())

    @property
    def kills(self) -> int:
        """How many of its processes the system has killed for want of memory."""
        file = self.folder / ("memory.oom_control" if self._first else "memory.events")
        return sum(int(line.split()[1]) for line in file.read_text().splitlines() if "oom_kill " in line)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A control group without a limit. Raises `NoGroup`."""
    version = 1 if (ROOT / "memory").exists() else 2
    folder = (ROOT / "memory" if version == 1 else ROOT) / f"tidemill-memory-{os.getpid()}"
    try:
        (folder.parent / "cgroup.procs").stat()
        folder.mkdir()
    except OSError:
        raise NoGroup("control groups cannot be made here (that needs root)") from None
    try:
        if not (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).exists():
            raise NoGroup("control groups that are made here have no limit of memory")
        yield MemoryGroup(folder, version)
    finally:
        until = time.monotonic() + LEAVING
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # somebody in it is still ending
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)
