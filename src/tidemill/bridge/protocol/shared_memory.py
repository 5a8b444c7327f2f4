"""The shared memory as one side holds it: side-channel data, groups, hand-overs, and
growth by changing files."""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from tidemill.bridge.protocol.handover import Handover
from tidemill.bridge.protocol.image import (
    LARGEST,
    GroupImage,
    check_spec,
    group_bytes,
    groups_place,
    read_int,
    read_side_channel,
    write_group,
    write_int,
)
from tidemill.bridge.protocol.specs import BehaviorSpec
from tidemill.bridge.protocol.tables import MemoryLayout
from tidemill.core.errors import SimulatorError

Look = Callable[[], None]


def next_capacity(length: int) -> int:
    """Return the side channel's capacity where data of `length` bytes did not fit."""
    return 2 * length + 20


class SharedMemory(ABC):
    """One side's hold of the memory whose first file is at `path`. All but
    `hand_over(CLOSE)` is for the side whose turn it is.

    groups: what groups there are, by name in `named`
    data: the mapping in which they lie
    generation: counts the changes of these
    """

    data: mmap.mmap
    turns: Handover
    _header: dict[str, int]

    def __init__(self, layout: MemoryLayout, path: Path, side: int) -> None:
        self.layout, self.path, self._side = layout, path, side
        self.groups: tuple[GroupImage, ...] = ()
        self.named: dict[str, GroupImage] = {}
        self.generation = 0
        # where the side channel begins in `data`
        self._channel = layout.header_bytes if layout.files == 1 else 0

    @abstractmethod
    def hand_over(self, command: int) -> None:
        """Give the turn to the other side with a command: STEP, RESET, QUERY, or CLOSE,
        which may be said at any time."""

    @abstractmethod
    def receive(self, look: Look, seconds: float = inf) -> int | None:
        """Wait for the turn and return the command that came with it: STEP, RESET, QUERY
        or CLOSE; None after so many seconds.

        `look` is called while it waits, see `Handover.wait`.
        """

    @property
    @abstractmethod
    def mine(self) -> bool:
        """Whether it is this side's turn by now, so that `receive` need not wait."""

    @abstractmethod
    def _grow(self, capacity: int, more: int, groups: int, what: str) -> None:
        """Go over to a file with that capacity and `more` bytes for so many new groups;
        SimulatorError, naming `what`, where none can be made."""

    @property
    @abstractmethod
    def joined(self) -> bool:
        """Whether there are groups in it already, of a simulator that has joined."""

    @property
    @abstractmethod
    def changes(self) -> int:
        """How often its file (layouts 0.3: its body) was left for a larger one, by either
        side."""

    @abstractmethod
    def peer_closed(self) -> bool:
        """Whether the other side has closed; also where it did so out of turn."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; files stay."""

    def take_side_channel(self) -> bytes:
        """Return the data that came, and clear them."""
        if not read_int(self.data, self._channel)[0]:
            return b""
        data = read_side_channel(self.layout, self._header, self.data)
        write_int(self.data, self._channel, 0)
        return data

    def put(self, data: bytes, new: Sequence[tuple[str, BehaviorSpec]] = ()) -> None:
        """Write the side-channel data that go with the next hand-over, and add groups,
        which the other side sees after it. Once in a turn.

        What needs room gets it by one change of the body (layouts 0.3): the original
        trainer bears no second one. In layout 0 each group is a change.
        """
        for name, spec in new:
            check_spec(self.layout, name, spec)
        room = self._header["capacity"]
        capacity = room if len(data) <= room - 4 else next_capacity(len(data))
        if new or capacity > room:
            for groups in [[one] for one in new] if new and self.layout.files == 1 else [new]:
                self._add(capacity, groups, f"room for {len(data)} bytes of side-channel data")
        write_int(self.data, self._channel, len(data))
        if data:
            self.data[self._channel + 4 : self._channel + 4 + len(data)] = data

    def _add(self, capacity: int, new: Sequence[tuple[str, BehaviorSpec]], room: str) -> None:
        """Add groups, none or more, in one change."""
        more = sum(group_bytes(self.layout, name, spec) for name, spec in new)
        self._grow(capacity, more, len(new), ", ".join(f'world "{name}"' for name, _ in new) or room)
        for name, spec in new:
            self._set_groups((*self.groups, write_group(self.layout, self.data, self._end, name, spec)))

    @property
    def _end(self) -> int:
        """The offset behind the last group."""
        return self.groups[-1].end if self.groups else groups_place(self.layout, self._header)

    def _set_groups(self, groups: tuple[GroupImage, ...]) -> None:
        self.groups, self.named = groups, {group.name: group for group in groups}
        self.generation += 1


def write_header(layout: MemoryLayout, memory: mmap.mmap) -> None:
    """Write the header as it is at the start."""
    for field, place in zip(layout.header, layout.offsets.values(), strict=True):
        if field.kind == "u8":
            memory[place] = field.start
        else:
            write_int(memory, place, field.start)


def next_path(path: Path, changes: int, what: str) -> Path:
    """Return the name of the next file, which is one underscore longer; SimulatorError
    where there is none."""
    longest = os.pathconf(path.parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    if len(os.fsencode(path.name)) >= longest:
        raise SimulatorError(
            f"the shared memory cannot take {what}: each change makes its file's name a character longer, "
            f"and after {changes} changes it has {longest}, all that the file system allows. Add fewer "
            "worlds, and send large side-channel data first: room for them is made once"
        )
    return path.with_name(path.name + "_")


def check_size(size: int, what: str) -> int:
    """Return the size of a file that is to be made; SimulatorError where the layout
    cannot count it."""
    if size > LARGEST:
        raise SimulatorError(
            f"the shared memory cannot take {what}: it would have {size} bytes, and a file has at most "
            f"{LARGEST}"
        )
    return size
