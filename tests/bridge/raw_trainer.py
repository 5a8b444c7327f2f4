"""A trainer by the letter of the layouts, written apart from the package: bytes at
offsets, to check either end against, or to lie to it."""

import fcntl
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STEP, RESET, CHANGE, CLOSE = range(4)


@dataclass
class Rows:
    """Of decisions or of ends."""

    ids: list[int]
    rewards: list[float]
    obs: list[NDArray[np.float32]]
    masks: NDArray[np.uint8]
    interrupted: list[bool] = field(default_factory=list)


@dataclass
class Group:
    name: str
    max_agents: int
    shapes: list[tuple[int, ...]]
    continuous: int
    branches: list[int]
    decisions: Rows
    ends: Rows
    actions_at: int  # offset in the file that holds the groups
    end: int


class Cursor:
    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self.memory, self.at = memory, at

    def i32(self) -> int:
        self.at += 4
        return int(struct.unpack_from("<i", self.memory, self.at - 4)[0])

    def u8(self) -> int:
        self.at += 1
        return self.memory[self.at - 1]

    def array(self, kind: str, *shape: int) -> NDArray[np.generic]:
        count = int(np.prod(shape, dtype=int))
        found = np.frombuffer(self.memory[self.at : self.at + count * np.dtype(kind).itemsize], kind).reshape(
            shape
        )
        self.at += found.nbytes
        return found


class RawTrainer:
    """Layout "0", "0.3.0" or "0.3.2". `known`: makes the lock file by which simulators
    know a Tidemill trainer.

    capacity: of the side channel at the start, 4 or 20 unless it is given; 0: the header
        says 0, and the body has 4 bytes
    """

    def __init__(
        self,
        folder: Path,
        layout: str = "0",
        *,
        known: bool = True,
        name: str = "memory",
        capacity: int | None = None,
    ) -> None:
        self.path = folder / name
        self.first, self.layout, self.body_number = self.path, layout, 1
        self.process: subprocess.Popen[str] | None = None
        self.changes = 0
        if known:
            self.lock = open(f"{self.path}.trainer", "w")  # noqa: SIM115 (it is held for life)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            print(os.getpid(), file=self.lock, flush=True)
        if layout == "0":
            capacity = 4 if capacity is None else capacity
            self._make(
                self.path, struct.pack("<iiBBi", 18 + capacity, 0, 0, 0, capacity) + bytes(capacity + 4)
            )
        else:
            capacity = 20 if capacity is None else capacity
            version = [int(part) for part in layout.split(".")]
            self._make(
                self.path,
                struct.pack("<iiiBBBBiii", *version, 1, 1, 0, 0, 1, capacity, 0)
                + (b"\0" if layout == "0.3.2" else b""),
            )
            self._make(Path(f"{self.path}_"), bytes(max(4, capacity)))
        self._open()

    def _make(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        path.chmod(0o600)

    def _map(self, path: Path) -> mmap.mmap:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def _open(self) -> None:
        self.head = self._map(self.path)
        self.body = (
            self.head if self.layout == "0" else self._map(Path(f"{self.path}{'_' * self.body_number}"))
        )

    def start(self, *command: str | Path) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command] + ["--memory-path", str(self.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def i32(self, at: int, value: int | None = None) -> int:
        if value is not None:
            struct.pack_into("<i", self.head, at, value)
        return int(struct.unpack_from("<i", self.head, at)[0])

    @property
    def capacity(self) -> int:
        return self.i32(10 if self.layout == "0" else 20) or 4

    @property
    def side_at(self) -> int:
        return 14 if self.layout == "0" else 0

    @property
    def side(self) -> bytes:
        length = struct.unpack_from("<i", self.body, self.side_at)[0]
        return self.body[self.side_at + 4 : self.side_at + 4 + length]

    @side.setter
    def side(self, data: bytes) -> None:
        if len(data) > self.capacity - 4:
            self.grow(2 * len(data) + 20)
        struct.pack_into("<i", self.body, self.side_at, len(data))
        self.body[self.side_at + 4 : self.side_at + 4 + len(data)] = data

    def grow(self, capacity: int, spoil: Callable[[Path], None] = lambda path: None) -> None:
        """Change to a larger file on the trainer's own account; `spoil` may make a lie of
        it before the simulator hears of it."""
        old, groups_at = self.capacity, self.groups_at
        if self.layout == "0":
            rest = self.body[groups_at:]
            header = bytearray(self.head[:18])
            struct.pack_into("<i", header, 0, 18 + capacity + len(rest))
            struct.pack_into("<i", header, 10, capacity)
            header[8] = header[9] = 0
            count = self.body[groups_at - 4 : groups_at]
            self._make(Path(f"{self.path}_"), bytes(header) + bytes(capacity - 4) + count + rest)
            head, self.path = self.head, Path(f"{self.path}_")
            self._open()
            spoil(self.path)
            head[9] = CHANGE
            head[8] = 1
        else:
            rest = self.body[old:]
            self.body_number += 1
            self._make(Path(f"{self.path}{'_' * self.body_number}"), bytes(capacity) + rest)
            self.i32(16, self.body_number)
            self.i32(20, capacity)
            self._open()
            spoil(Path(f"{self.path}{'_' * self.body_number}"))
        self.changes += 1

    @property
    def groups_at(self) -> int:
        return 18 + self.capacity if self.layout == "0" else self.capacity

    def give(self, command: int = STEP) -> None:
        """Hand over (nobody is woken: the simulator naps)."""
        if self.layout == "0":
            self.head[9] = command
            self.head[8] = 1
        else:
            self.head[14], self.head[15], self.head[13] = command == RESET, command == CLOSE, 1
            self.head[12] = 0

    def _answered(self) -> bool:
        return self.head[8] == 0 if self.layout == "0" else self.head[13] == 0

    def wait(self, seconds: float = 120.0) -> None:
        """Wait for the simulator's answer, files that it changes included."""
        end = time.monotonic() + seconds
        while True:
            while not self._answered():
                assert time.monotonic() < end, "the simulator does not answer"
                if self.process is not None and self.process.poll() is not None and not self._answered():
                    raise AssertionError(f"the simulator ended: {self.process.communicate()}")
                time.sleep(0.0002)
            if self.layout == "0" and self.head[9] == CHANGE:
                self.changes += 1
                os.unlink(self.path)
                self.path = Path(f"{self.path}_")
                self._open()
                continue
            if self.layout != "0":
                while self.body_number < self.i32(16):
                    self.changes += 1
                    os.unlink(f"{self.path}{'_' * self.body_number}")
                    self.body_number += 1
                self._open()
            return

    @property
    def closed(self) -> bool:
        return self.head[9] == CLOSE if self.layout == "0" else bool(self.head[15])

    def groups(self) -> dict[str, Group]:
        cursor = Cursor(self.body, self.groups_at)
        if self.layout == "0":
            count = struct.unpack_from("<i", self.body, self.groups_at - 4)[0]
            found = [self._group(cursor) for _ in range(count)]
        else:
            found, end = [], self.groups_at + self.i32(24)
            while cursor.at < end:
                found.append(self._group(cursor))
            assert cursor.at == end
        return {group.name: group for group in found}

    def _group(self, cursor: Cursor) -> Group:
        length = cursor.u8()
        name = bytes(cursor.array("u1", 63 if self.layout == "0" else length))[:length].decode("ascii")
        agents = cursor.i32()
        continuous, branches, shapes = 0, [], []
        if self.layout == "0.3.2":
            for _ in range(cursor.i32()):
                shape = cursor.array("<i4", 7)[:3]
                shapes.append(tuple(int(size) for size in shape if size))
            continuous = cursor.i32()
            branches = [cursor.i32() for _ in range(cursor.i32())]
        else:
            is_continuous, size = cursor.u8(), cursor.i32()
            continuous = size if is_continuous else 0
            branches = [] if is_continuous else [cursor.i32() for _ in range(size)]
            for _ in range(cursor.i32()):
                shape = cursor.array("<i4", 3)
                shapes.append(tuple(int(size) for size in shape if size))
        n = cursor.i32()
        obs = [cursor.array("<f4", agents, *shape) for shape in shapes]
        reward = cursor.array("<f4", agents)
        done = cut = np.zeros(agents, np.uint8)
        if self.layout == "0":
            done, cut = cursor.array("u1", agents), cursor.array("u1", agents)
        ids = cursor.array("<i4", agents)
        masks = cursor.array("u1", agents, sum(branches))

        def rows(which: NDArray[np.bool_], obs: list, reward: NDArray, ids: NDArray, cut: NDArray) -> Rows:
            return Rows(
                ids[which].tolist(),
                reward[which].tolist(),
                [part[which] for part in obs],
                masks[which],
                (cut[which] == 1).tolist(),
            )

        live = np.arange(agents) < n
        if self.layout == "0":
            decisions = rows(live & (done == 0), obs, reward, ids, cut)
            ends = rows(live & (done == 1), obs, reward, ids, cut)
        else:
            decisions = rows(live, obs, reward, ids, cut)
            n = cursor.i32()
            obs = [cursor.array("<f4", agents, *shape) for shape in shapes]
            reward = cursor.array("<f4", agents)
            cut = cursor.array("u1", agents)
            ids = cursor.array("<i4", agents)
            masks = np.zeros_like(masks)  # ends have none
            ends = rows(np.arange(agents) < n, obs, reward, ids, cut)
        actions_at = cursor.at
        cursor.at += 4 * agents * (continuous + len(branches))
        return Group(name, agents, shapes, continuous, branches, decisions, ends, actions_at, cursor.at)

    def act(self, group: Group, continuous: object = None, discrete: object = None) -> None:
        """Write actions of the group's decisions; in layout 0 these are its first
        rows."""
        at = group.actions_at
        if continuous is not None:
            data = np.ascontiguousarray(continuous, "<f4").tobytes()
            self.body[at : at + len(data)] = data
        if discrete is not None:
            at += 4 * group.max_agents * group.continuous
            data = np.ascontiguousarray(discrete, "<i4").tobytes()
            self.body[at : at + len(data)] = data

    def step(self, command: int = STEP) -> dict[str, Group]:
        self.give(command)
        self.wait()
        return self.groups()

    def end(self, seconds: float = 120.0) -> tuple[int, str, str]:
        """Return how the simulator ended and what it wrote."""
        assert self.process is not None
        out, error = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, error

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
