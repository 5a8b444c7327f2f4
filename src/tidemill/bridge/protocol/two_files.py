"""Layouts 0.3.0 and 0.3.2 as one side holds them: a header that stays, and a body that is
left for a larger one where room is short."""

import time
from math import inf
from pathlib import Path

from tidemill.bridge.protocol.files import NEW_SUFFIX, create_file, open_file
from tidemill.bridge.protocol.handover import Handover
from tidemill.bridge.protocol.image import groups_place, read_groups, read_header, write_int
from tidemill.bridge.protocol.shared_memory import Look, SharedMemory, check_size, next_path, write_header
from tidemill.bridge.protocol.tables import CLOSE, QUERY, RESET, SIMULATOR, STEP, TRAINER, MemoryLayout
from tidemill.core.errors import ImageError

_SETTLE = 0.5  # seconds that a simulator which joined has until it first waits


class TwoFiles(SharedMemory):
    """Layouts 0.3.0 and 0.3.2. `side` is TRAINER or SIMULATOR; the one that creates the
    memory has the first turn."""

    def __init__(self, layout: MemoryLayout, path: Path, side: int, *, create: bool) -> None:
        super().__init__(layout, path, side)
        self._at = layout.offsets
        self._query = layout.offsets.get("query")
        self._mine, self._theirs = self._at["trainer_blocked"], self._at["simulator_blocked"]
        if side == SIMULATOR:
            self._mine, self._theirs = self._theirs, self._mine
        self.turns = Handover(layout.word, self._mine, 0, self._at["closed"])
        self._settled = side == SIMULATOR
        if create:
            self._first = create_file(path.with_name(path.name + NEW_SUFFIX), layout.header_bytes)
            write_header(layout, self._first)
            self._first[self._theirs] = 1
        else:
            self._first = open_file(path)
        self._header = read_header(layout, self._first)
        if create:
            self.data = create_file(self._body_path(self._header["body"]), self._header["capacity"])
            path.with_name(path.name + NEW_SUFFIX).rename(path)  # whoever finds it finds all whole
        else:
            self._open_body()
        self._still = self._fixed()
        self.turns.attach(self._first)

    def _body_path(self, number: int) -> Path:
        return self.path.with_name(self.path.name + "_" * number)

    def _fixed(self) -> bytes:
        """The bytes of the header that change only with the body."""
        return (
            self._first[: self.layout.word] + self._first[self.layout.word + 4 : self._at["groups_bytes"] + 4]
        )

    def hand_over(self, command: int) -> None:
        first = self._first
        if command == CLOSE:
            first[self._at["closed"]] = 1
        elif command == RESET:
            first[self._at["reset"]] = 1
        elif command == QUERY and self._query is not None:
            first[self._query] = 1
        first[self._mine] = 1
        first[self._theirs] = 0
        self.turns.wake()

    def receive(self, look: Look, seconds: float = inf) -> int | None:
        if not self.turns.wait(look, seconds):
            return None
        first = self._first
        if first[self._at["closed"]]:
            return CLOSE
        if not self._settled:
            self._settle()
        if first.size() < len(first) or self.data.size() < len(self.data):
            raise ImageError(f"the other side cut a file of {self.path}")
        if self._fixed() != self._still:
            self._follow()
        if self._side == TRAINER:
            return STEP
        if first[self._at["reset"]]:
            first[self._at["reset"]] = 0
            return RESET
        if self._query is not None and first[self._query]:
            first[self._query] = 0
            return QUERY
        return STEP

    def _settle(self) -> None:
        """Wait until the simulator waits. Some say that they joined, and wait a little
        later; some never do before a reset."""
        until = time.monotonic() + _SETTLE
        while not self._first[self._theirs] and time.monotonic() < until:
            time.sleep(1e-3)
        self._settled = True

    def _follow(self) -> None:
        """Go over to the body that the other side made."""
        header = read_header(self.layout, self._first)
        number = self._header["body"]
        if header["body"] < number or header["body"] - number > 255:
            raise ImageError(f"the header's body was {number} and is {header['body']} now")
        self._header = header
        if header["body"] != number:
            self.data.close()
            self._open_body()
            for old in range(number, header["body"]):
                self._body_path(old).unlink(missing_ok=True)
        self._know_groups()

    def _open_body(self) -> None:
        self.data = open_file(self._body_path(self._header["body"]))
        if len(self.data) < self._header["capacity"]:
            raise ImageError(
                f"a side channel of {self._header['capacity']} bytes does not fit a body of {len(self.data)}"
            )

    def _know_groups(self) -> None:
        self._set_groups(read_groups(self.layout, self._header, self.data))
        self._still = self._fixed()

    def _grow(self, capacity: int, more: int, groups: int, what: str) -> None:
        old, old_path = self.data, self._body_path(self._header["body"])
        path = next_path(old_path, self.changes, what)
        start = groups_place(self.layout, self._header)
        end = self._end
        shift = capacity - self._header["capacity"]
        size = check_size(end + shift + more, what)
        new = create_file(path, size)
        if not shift:
            new[:start] = old[:start]
        new[start + shift : end + shift] = old[start:end]
        for name, value in (("body", self._header["body"] + 1), ("capacity", capacity)):
            write_int(self._first, self._at[name], value)
        self._header = read_header(self.layout, self._first)
        self.data = new
        old.close()
        if shift:
            self._know_groups()
        write_int(self._first, self._at["groups_bytes"], end - start + more)
        self._header["groups_bytes"] = end - start + more
        self._still = self._fixed()

    @property
    def mine(self) -> bool:
        # neither waits: a trainer that has not given a turn yet
        return self._first[self._mine] == 0 and self._first[self._theirs] != 0

    @property
    def joined(self) -> bool:
        return self._header["groups_bytes"] > 0

    @property
    def changes(self) -> int:
        return self._header["body"] - 1

    def peer_closed(self) -> bool:
        return self._first[self._at["closed"]] != 0

    def close(self) -> None:
        self.data.close()
        self._first.close()
