"""A trainer for trying simulators out: it sees the memory itself, acts at random within
what is allowed, and can be made to misbehave.

To see rows that were not written it overwrites what the simulator has to write, which no
other trainer does.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.files import TRAINER_SUFFIX, Rendezvous
from tidemill.bridge.protocol.image import GroupImage, read_header, write_int
from tidemill.bridge.protocol.open_memory import create_memory, join_memory
from tidemill.bridge.protocol.specs import ActionTuple, DecisionSteps
from tidemill.bridge.protocol.tables import CLOSE, LAYOUTS, STEP, TRAINER
from tidemill.bridge.trainer_side.process import SimulatorProcess, command_of
from tidemill.bridge.trainer_side.steps import complete, write_actions
from tidemill.core.errors import ConfigError, DeadlineError, PeerLost, SimulatorError, did_you_mean

_GRACE = 5.0  # seconds that a simulator may take to end by itself
_LAST_WORDS = _GRACE  # that one which closed has for ending, so that why can be told
# as a shell reports them
_CRASHES = {
    128 + number for number in (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
}


@dataclass(frozen=True)
class Program:
    """A simulator as it is started: the executable (FILE.py and FILE.exe as well) with
    its arguments, in a layout.

    deadline: seconds that it may take for an answer
    """

    path: str
    arguments: Sequence[str] = ()
    layout: str = "0"
    deadline: float = 30.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f'layout "{self.layout}" is unknown, {did_you_mean(self.layout, LAYOUTS)}')
        if not self.deadline > 0:
            raise ConfigError(f"deadline = {self.deadline} must be above 0")

    def settings(self) -> dict[str, Any]:
        """Return the arguments of a `Simulator` that runs it."""
        path, first = command_of(self.path)
        return {
            "path": path,
            "arguments": (*first, *self.arguments),
            "layout": self.layout,
            "start_seconds": self.deadline,
            "deadline_s": self.deadline,
        }


class SimulatorPlay:
    """One start of a simulator. A context manager; at its end the simulator is ended, and
    no file stays.

    other: play a trainer of another make: one without a companion file, whose side
        channel begins as such trainers' may
    changed: how often the simulator changed the file (layouts 0.3: the body) in its last
        turn
    """

    def __init__(self, program: Program, other: bool = False) -> None:
        self._program, self.layout = program, LAYOUTS[program.layout]
        path, first = command_of(program.path)
        self._meeting = Rendezvous.own(self.layout.files)
        self._closed, self.changed = False, 0
        try:
            self.memory = create_memory(self.layout, self._meeting.path, TRAINER)
            if other:
                self._become_another()
            self.memory.hand_over(STEP)
            told = [*first, *program.arguments, "--memory-path", self._meeting.argument]
            self.process = SimulatorProcess(Path(path), told)
        except BaseException:
            self.close()
            raise

    def _become_another(self) -> None:
        """Have no companion file, and another capacity of the side channel: 24; in
        layouts 0.3 a body of 4 bytes, and a header that says 0."""
        path, place = self._meeting.path, self.layout.offsets["capacity"]
        Path(f"{path}{TRAINER_SUFFIX}").unlink()
        self.memory.close()
        header = bytearray(path.read_bytes())
        if self.layout.files == 1:
            write_int(header, place, 24)
            header += bytes(20)
            write_int(header, self.layout.offsets["file_bytes"], len(header))
        else:
            write_int(header, place, 0)
            os.truncate(path.with_name(path.name + "_"), 4)
        path.write_bytes(header)
        self.memory = join_memory(path, TRAINER)

    def answer(self, seconds: float | None = None) -> bytes:
        """Wait for the simulator and return the side-channel data that came; PeerLost,
        DeadlineError or ImageError where it does not do its part."""
        self._still = self._fixed()
        self._end = time.monotonic() + (seconds or self._program.deadline)
        before = self.memory.changes
        command = self.memory.receive(self._look)
        self.changed = self.memory.changes - before
        if command == CLOSE:
            raise PeerLost(f"it closed the bridge{self.process.output(_LAST_WORDS)}")
        return self.memory.take_side_channel()

    def exchange(self, command: int = STEP, side_channel: bytes = b"") -> bytes:
        """Hand over, and wait for the answer."""
        self.memory.put(side_channel)
        self.memory.hand_over(command)
        return self.answer()

    def _look(self) -> None:
        if how := self.process.ended():
            raise PeerLost(f"it {how}{self.process.output()}")
        if time.monotonic() > self._end:
            raise DeadlineError(
                f"it has not answered within {self._program.deadline:g} s, and still "
                f"runs{self.process.output()}"
            )

    def _fixed(self) -> tuple[Path, bytes]:
        return self.memory.path, self.memory.data[:8] + self.memory.data[10:14]

    @property
    def changed_in_place(self) -> bool:
        """Whether numbers in the header of layout 0 are others than at the hand-over, in
        the same file."""
        path, before = self._still
        return self.layout.files == 1 and path == self.memory.path and self._fixed()[1] != before

    def header(self) -> dict[str, int]:
        """Return the header as it is now."""
        return read_header(self.layout, self.memory.path.read_bytes())

    def snapshot(self) -> bytes:
        """Return all that lies in memory now."""
        return self.memory.path.read_bytes() + self.memory.data[:]

    def act(
        self,
        group: GroupImage,
        decisions: DecisionSteps,
        asks: NDArray[np.intp] | None,
        rows: int,
        rng: np.random.Generator,
    ) -> ActionTuple:
        """Write allowed actions drawn at random, and return them."""
        action = draw_actions(decisions, group.spec.action_spec.continuous_size, rng)
        write_actions(self.memory.data, group, complete(group, len(decisions), action), asks, rows)
        return action

    def leaves(self) -> str | None:
        """Say CLOSE, and return how the simulator ended; None where it did not by
        itself."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            # once more: where it was not our turn the simulator may have written over it
            self.memory.hand_over(CLOSE)
            if how := self.process.ended(0.1):
                return how
        return None

    @property
    def crashed(self) -> bool:
        """Whether a signal ended the simulator."""
        code = self.process.returncode()
        return code is not None and (code < 0 or code in _CRASHES)

    def left(self) -> list[str]:
        """Return the names of the memory's files that are there still."""
        path = self._meeting.path
        return sorted(
            entry.name for entry in path.parent.iterdir() if not entry.name.removeprefix(path.name).strip("_")
        )

    def close(self) -> None:
        """End the simulator and remove all files."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "memory"):
            with contextlib.suppress(SimulatorError):
                self.memory.hand_over(CLOSE)
        if hasattr(self, "process"):
            self.process.ended(0.2)
            self.process.end()
        if hasattr(self, "memory"):
            self.memory.close()
        self._meeting.leave()

    def __enter__(self) -> "SimulatorPlay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def draw_actions(decisions: DecisionSteps, continuous_size: int, rng: np.random.Generator) -> ActionTuple:
    """Return random actions for those who ask: floats in [-1, 1], and choices that are
    not forbidden (0 where all are)."""
    continuous = rng.uniform(-1, 1, (len(decisions), continuous_size)).astype(np.float32)
    chosen = [
        np.argmax(rng.random(forbidden.shape) * ~forbidden, axis=1)
        for forbidden in decisions.action_mask or ()
    ]
    return ActionTuple(continuous, np.stack(chosen, axis=1).astype(np.int32) if chosen else None)
