"""A trainer's end of the bridge that writes what a test tells it to, byte by byte, right or wrong."""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path


class RawTrainer:
    """Makes the memory of a layout in `folder` and has the first turn. `marked`: with PATH.trainer, locked, as Tidemill's trainers have it."""

    def __init__(self, folder: Path, layout: str, *, marked: bool = True) -> None:
        self.path, self.layout = folder / "memory", layout
        self.lock = -1
        if marked:
            self.lock = os.open(f"{self.path}.trainer", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            os.write(self.lock, b"%d\n" % os.getpid())
        if layout == "0":
            self.path.write_bytes(struct.pack("<iiBBiii", 22, 0, 0, 0, 4, 0, 0))
        else:
            patch = int(layout[-1])
            Path(f"{self.path}_").write_bytes(bytes(4))
            self.path.write_bytes(struct.pack("<iii4Biii", 0, 3, patch, 1, 0, 0, 0, 1, 4, 0) + bytes(patch == 2))
        self.current = self.path
        self.memory = self._map(self.path)

    @staticmethod
    def _map(path: Path) -> mmap.mmap:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def write(self, offset: int, form: str, *values: int) -> None:
        """Write numbers into the first file, or the one that took its place."""
        struct.pack_into("<" + form, self.memory, offset, *values)

    def give(self, command: int = 0) -> None:
        """Hand over with a command: 0 step, 1 reset, 3 close; in layout 0 any other number, too."""
        if self.layout == "0":
            self.memory[9] = command
            self.memory[8] = 1
            return
        self.memory[14] = command == 1
        self.memory[15] = command == 3
        self.memory[13] = 1
        self.memory[12] = 0

    def wait(self, alive: Callable[[], bool]) -> bool:
        """Wait for the turn, or the simulator's end (False). It goes over to larger files."""
        while True:
            while self.memory[8] == 1 if self.layout == "0" else self.memory[13] and not self.memory[15]:
                if not alive():
                    return False
                time.sleep(1e-3)
            if self.layout != "0":
                for old in range(1, self.memory[16]):
                    Path(f"{self.path}{'_' * old}").unlink(missing_ok=True)
            if self.layout != "0" or self.memory[9] != 2:
                return True
            self.current.unlink()
            self.current = Path(f"{self.current}_")
            self.memory = self._map(self.current)
