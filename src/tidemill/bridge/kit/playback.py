"""Playing a recording back in the place of the simulator."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.bridge.kit.recording import Exchange, Recording
from tidemill.bridge.protocol.specs import DecisionSteps, RawChannels, TerminalSteps
from tidemill.bridge.protocol.tables import QUERY, RESET, STEP
from tidemill.bridge.world_side.bridge import Bridge
from tidemill.bridge.world_side.requests import WorldRequests, read_actions
from tidemill.core.errors import PeerLost, SimulatorError


@dataclass
class PlaybackResult:
    """How a recording was played back.

    exchanges, recorded: how many were played, of how many
    differing: steps whose actions were others than the recorded ones
    reason: why it ended
    """

    exchanges: int
    recorded: int
    differing: int
    reason: str


class RecordedSideChannels(RawChannels):
    """Side channels that hand out what they are given, and hear nothing."""

    def __init__(self) -> None:
        self.data = b""

    def outgoing(self) -> bytes:
        data, self.data = self.data, b""
        return data

    def incoming(self, data: bytes) -> None:
        pass


class Playback(Bridge):
    """A recording in the place of the simulator: the recorded answers, whatever the
    trainer does. Any layout will do.

    A reset goes on at the next recorded one, after the last at the first. The bridge is
    closed where the recording ends, or the recorded trainer reset and this one steps on.
    """

    def __init__(self, recording: Recording, memory_path: str | Path | None = None) -> None:
        super().__init__(memory_path)
        if self._memory is None:
            raise SimulatorError(
                "no trainer waits for this recording; let one start `tidemill simulator replay FILE` in the "
                "place of the simulator"
            )
        self._recording = recording
        self._numbers = [number for number, command in enumerate(recording.commands) if command != QUERY]
        self._commands = [recording.commands[number] for number in self._numbers]
        self._resets = [place for place, command in enumerate(self._commands) if command == RESET]
        self.played = PlaybackResult(0, len(self._numbers), 0, "")

    def play(self) -> PlaybackResult:
        """Play until the trainer closes, or nothing is left."""
        memory = self._memory
        assert memory is not None
        try:
            command, at = self._receive(memory), -1
            while (following := self._after(at, command)) is not None:
                at = following
                asked = self._show(self._recording[self._numbers[at]])
                memory.hand_over(STEP)
                command = self._receive(memory)
                if command == STEP:
                    self._compare(at, asked)
            if command == RESET:
                self.played.reason = "the trainer reset, and nothing in the recording answers that"
            elif at + 1 == len(self._numbers):
                self.played.reason = "the recording is over"
            else:
                self.played.reason = "the recorded trainer reset here, and this one stepped"
            print(f"{self._recording.path}: {self.played.reason}", flush=True)  # the trainer quotes it
        except PeerLost as error:
            self._lose(str(error))
            self.played.reason = self.reason
        finally:
            self.close()
        return self.played

    def _after(self, at: int, command: int | None) -> int | None:
        """Return the place of the exchange that answers a command after the one at
        `at`."""
        if command == RESET:
            return next(
                (place for place in self._resets if place > at), self._resets[0] if self._resets else None
            )
        return at + 1 if at + 1 < len(self._commands) and (self._commands[at + 1] == STEP or at < 0) else None

    def _show(self, exchange: Exchange) -> dict[str, DecisionSteps]:
        """Write an exchange's rows; return who asks."""
        memory, recording = self._memory, self._recording
        assert memory is not None
        asked = {}
        # in their order
        memory.put(
            exchange.came,
            [(name, recording.specs[name]) for name in exchange.steps if name not in memory.named],
        )
        for group in memory.groups:
            decisions, terminals = recording.steps(exchange, group.name)
            _filled(group.name, recording, decisions, terminals).write(memory.layout, memory.data, group)
            asked[group.name] = decisions
        self.played.exchanges += 1
        return asked

    def _compare(self, at: int, asked: dict[str, DecisionSteps]) -> None:
        """Count a step whose actions are others than those recorded."""
        memory = self._memory
        if memory is None or at + 1 == len(self._numbers):
            return
        following = self._recording[self._numbers[at + 1]]
        for group in memory.groups:
            n = len(asked[group.name])
            continuous, discrete = read_actions(memory.data, group, n)
            expected = self._recording.actions(following, group.name, n)
            assert expected.continuous is not None and expected.discrete is not None
            if not np.array_equal(continuous, expected.continuous) or not np.array_equal(
                discrete, expected.discrete
            ):
                self.played.differing += 1
                return


def _filled(
    name: str, recording: Recording, decisions: DecisionSteps, terminals: TerminalSteps
) -> WorldRequests:
    """Return a group's rows."""
    requests = WorldRequests(name, recording.specs[name])
    for steps, rows in ((decisions, requests.asks), (terminals, requests.ends)):
        taken = requests.take_many(steps.agent_id, rows)
        rows.reward[taken] = steps.reward
        for target, values in zip(rows.obs, steps.obs, strict=True):
            target[taken] = values
        if isinstance(steps, TerminalSteps):
            rows.cut[taken] = steps.interrupted
        elif steps.forbidden is not None:
            rows.masks[taken] = steps.forbidden
    return requests


def replay(file: Path, memory_path: str | None = None) -> PlaybackResult:
    """Play a recording in the place of a simulator; RecordingError where it cannot be
    read, or not be played in the trainer's layout."""
    with Recording(file) as recording:
        return Playback(recording, memory_path).play()
