"""Layout 0 as one side holds it: everything in one file, which is left for a larger one
where room is short."""

import mmap
from math import inf
from pathlib import Path

from tidemill.bridge.protocol.files import NEW_SUFFIX, create_file, open_file
from tidemill.bridge.protocol.handover import Handover
from tidemill.bridge.protocol.image import groups_place, read_groups, read_header, read_int, write_int
from tidemill.bridge.protocol.shared_memory import Look, SharedMemory, check_size, next_path, write_header
from tidemill.bridge.protocol.tables import CHANGE_FILE, CLOSE, COMMANDS, MemoryLayout
from tidemill.core.errors import ImageError


class OneFile(SharedMemory):
    """Layout 0. `side` is TRAINER or SIMULATOR; the one that creates the memory has the
    first turn."""

    def __init__(self, layout: MemoryLayout, path: Path, side: int, *, create: bool) -> None:
        super().__init__(layout, path, side)
        self._turn, self._command = layout.offsets["turn"], layout.offsets["command"]
        self.turns = Handover(layout.word, self._turn, side)
        self._changed = 0
        if create:
            data = create_file(path.with_name(path.name + NEW_SUFFIX), layout.header_bytes + 8)
            write_header(layout, data)
            data[self._turn] = side
            path.with_name(path.name + NEW_SUFFIX).rename(path)  # whoever finds it finds it whole
        else:
            data = open_file(path)
        self._use(path, data)
        self._stale = not create

    def _use(self, path: Path, data: mmap.mmap) -> None:
        """Take turns in this file from now on. Its groups are read once it is our
        turn."""
        self._header = read_header(self.layout, data)
        self.path, self.data = path, data
        self.turns.attach(data)
        self._still = self._fixed()
        self._count_place = groups_place(self.layout, self._header) - 4
        self._stale = True

    def _fixed(self) -> bytes:
        """The bytes of the header that never change in a file."""
        return self.data[: self._turn] + self.data[self._command + 1 : self._channel]

    def hand_over(self, command: int) -> None:
        self.data[self._command] = command
        self.data[self._turn] = 1 - self._side
        self.turns.wake()

    def receive(self, look: Look, seconds: float = inf) -> int | None:
        while True:
            if not self.turns.wait(look, seconds):
                return None
            data = self.data
            if data.size() < len(data) or self._fixed() != self._still:
                read_header(self.layout, data)  # says more where it cannot be
                raise ImageError(
                    f"the other side changed the header of {self.path}, or cut the file, where it has to "
                    "make a new one"
                )
            command = data[self._command]
            if command == CHANGE_FILE:
                self._follow()
                continue
            if command == CLOSE:
                return CLOSE
            if command >= len(COMMANDS):
                raise ImageError(
                    f"the other side gave the command {command}; there are "
                    f"{', '.join(f'{i} {name}' for i, name in enumerate(COMMANDS))}"
                )
            if self._stale or read_int(data, self._count_place)[0] != len(self.groups):
                self._know_groups()
            return command

    def _follow(self) -> None:
        """Go over to the file that the other side made."""
        old_path, old = self.path, self.data
        new = old_path.with_name(old_path.name + "_")
        self._use(new, open_file(new))
        self._changed += 1
        old.close()
        old_path.unlink(missing_ok=True)

    def _grow(self, capacity: int, more: int, groups: int, what: str) -> None:
        path = next_path(self.path, self._changed, what)
        old, start, end = self.data, self._count_place + 4, self._end
        shift = capacity - self._header["capacity"]
        size = check_size(end + shift + more, what)
        new = create_file(path, size)
        new[: self.layout.header_bytes] = old[: self.layout.header_bytes]
        write_int(new, self.layout.offsets["file_bytes"], size)
        write_int(new, self.layout.offsets["capacity"], capacity)
        if not shift:
            new[self._channel : start] = old[self._channel : start]
        new[start + shift : end + shift] = old[start:end]
        new[start + shift - 4 : start + shift] = old[start - 4 : start]
        old[self._command] = CHANGE_FILE
        old[self._turn] = 1 - self._side
        self.turns.wake()
        self._use(path, new)
        self._changed += 1
        old.close()
        self._stale = False
        if shift:
            self._know_groups()
        if groups:
            write_int(new, self._count_place, len(self.groups) + groups)

    def _know_groups(self) -> None:
        self._set_groups(read_groups(self.layout, self._header, self.data))
        self._stale = False

    @property
    def mine(self) -> bool:
        return self.data[self._turn] == self._side

    @property
    def joined(self) -> bool:
        return bool(read_int(self.data, self._count_place)[0] > 0)

    @property
    def changes(self) -> int:
        return self._changed

    def peer_closed(self) -> bool:
        return self.data[self._command] == CLOSE and self.data[self._turn] == self._side

    def close(self) -> None:
        self.data.close()
