"""The trainer's end: a simulator, its groups of agents, their steps and actions."""

import atexit
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.files import SIMULATOR_SUFFIX, PeerWatch, Rendezvous, editor_path
from tidemill.bridge.protocol.image import GroupImage
from tidemill.bridge.protocol.open_memory import create_memory
from tidemill.bridge.protocol.shared_memory import SharedMemory
from tidemill.bridge.protocol.specs import (
    ActionTuple,
    BehaviorSpec,
    DecisionSteps,
    RawChannels,
    TerminalSteps,
)
from tidemill.bridge.protocol.tables import CLOSE, LAYOUTS, QUERY, RESET, STEP, TRAINER
from tidemill.bridge.trainer_side.process import SimulatorProcess, check_executable
from tidemill.bridge.trainer_side.steps import (
    StepReader,
    as_rows,
    clear_actions,
    complete,
    write_action,
    write_actions,
)
from tidemill.core.clock import awake
from tidemill.core.errors import (
    ConfigError,
    DeadlineError,
    PeerLost,
    SchemaError,
    SimulatorError,
    TidemillError,
    did_you_mean,
)
from tidemill.core.step_deadlines import StepTimes

_GRACE = 5.0  # seconds that a simulator may take to end by itself
_LINGERS = 1.0  # that one has for it which has closed the bridge itself, or left it
_TIDIES = 2.0  # that one of another make may take to see our close and to delete the files
# that one which left and is not at its end has for that, so that how and why can be told:
# which is to be within a second, of which looks and what it wrote take 0.4
_LAST_WORDS = 0.4


@dataclass
class _State:
    """A group at this step: its steps once they were read, and whether actions were
    set."""

    group: GroupImage
    reader: StepReader
    steps: tuple[DecisionSteps, TerminalSteps] | None = None
    asks: NDArray[np.intp] | None = None  # the rows that ask for decisions, where they are not the first ones
    acted: bool = False


class Simulator:
    """A simulator at the other end of the bridge. Use it as a context manager, or call
    `close`.

        with Simulator("worlds/reach") as simulator:
            simulator.reset()
            decisions, terminals = simulator.get_steps("reach")
            actions = ActionTuple(np.zeros((len(decisions), 2), np.float32))
            simulator.set_actions("reach", actions)
            simulator.step()

    path: the executable, started with `arguments` and `--memory-path PATH`; None: an
        editor or another process that joins by itself
    arguments: for it
    layout: "0", "0.3.0" or "0.3.2" (docs/simulator-memory.md)
    channels: stands for this end's side channels. Their data go with steps, resets and
        queries
    memory_path: without an executable: the file at which the two meet; None:
        "ml-agents/default" in the temporary directory
    start_seconds: how long the simulator may take until it first answers, and over the
        first reset; None: any time
    deadline_s: how long it may take over any later step, in seconds; None: any time. Its
        death is noticed within a second, whatever this is
    times: in place of that: the deadline, and what is known of its steps, also by others
        before it; its own are added
    environment: environment variables besides this process's own

    Errors: ConfigError (no such layout or executable, a second trainer at one file),
    PeerLost (it ended, with its output's tail, or closed), ImageError (what it wrote
    cannot be; another version), DeadlineError; after these the simulator is closed and
    nothing stays behind. EnvironmentFault (NaN or infinite observations or rewards) and
    SchemaError (wrong names, agents and actions) change nothing. One thread uses it at a
    time.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        arguments: Sequence[str] = (),
        *,
        layout: str = "0",
        channels: RawChannels | None = None,
        memory_path: str | Path | None = None,
        start_seconds: float | None = 60.0,
        deadline_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        times: StepTimes | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise ConfigError(f'layout "{layout}" is unknown, {did_you_mean(layout, LAYOUTS)}')
        if path is not None and memory_path is not None:
            raise ConfigError(
                f"memory_path = {memory_path} is for simulators that are started by hand; {path} is told "
                "where to look"
            )
        self._what = str(path) if path is not None else "the simulator"
        self._channels, self._start_seconds = channels, start_seconds
        self._times = times or StepTimes(inf if deadline_s is None else deadline_s)
        self._process: SimulatorProcess | None = None
        self._watch: PeerWatch | None = None
        self._states: dict[str, _State] = {}
        self._specs: dict[str, BehaviorSpec] = {}
        self._generation = -1
        self._command = STEP  # what the last hand-over asked for
        self._answer: int | None = None  # what came back
        self._failure: TidemillError | None = None
        self._exchanges = 0
        self._closed = self._waiting = self._reset = False
        if path is not None:
            check_executable(Path(path))
        self._meeting = (
            Rendezvous.own(LAYOUTS[layout].files)
            if path is not None
            else Rendezvous.at(Path(memory_path) if memory_path else editor_path())
        )
        self._memory: SharedMemory | None = None
        try:
            self._memory = create_memory(LAYOUTS[layout], self._meeting.path, TRAINER)
            atexit.register(self.close)
            self._hand_over(STEP)
            if path is not None:
                told = [*arguments, "--memory-path", self._meeting.argument]
                self._process = SimulatorProcess(Path(path), told, environment)
        except BaseException:
            self.close()
            raise
        self.finish()

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Groups by name, in the order in which they appeared. Some simulators have none
        before the first `reset`, or more later on."""
        return self._specs

    @property
    def exchanges(self) -> int:
        """How often the turn was handed over and came back."""
        return self._exchanges

    def get_steps(self, name: str) -> tuple[DecisionSteps, TerminalSteps]:
        """Return what a group's agents saw, as copies. An agent that ended and began
        again within a step is in both."""
        return self._steps(self._state(name))

    def set_actions(self, name: str, action: ActionTuple) -> None:
        """Set the actions of all agents of the group that ask for a decision, in the
        order of `DecisionSteps`. Without it they are zeros.

        Continuous actions are finite floats, discrete ones integers that count from 0.
        """
        state = self._state(name)
        decisions, terminals = self._steps(state)
        whole = complete(state.group, len(decisions), action)
        write_actions(self._open().data, state.group, whole, state.asks, len(decisions) + len(terminals))
        state.acted = True

    def set_action_for_agent(self, name: str, agent_id: int, action: ActionTuple) -> None:
        """Set the action of one agent: arrays of one row, or of one dimension."""
        state = self._state(name)
        rows = np.flatnonzero(self.get_steps(name)[0].agent_id == agent_id)
        if not len(rows):
            known = self.get_steps(name)[0].agent_id.tolist()
            raise SchemaError(
                f'group "{name}": agent {agent_id} asks for no decision at this step; those that do: '
                f"{known[:20] or 'none'}"
            )
        whole = complete(state.group, 1, as_rows(action))
        memory = self._open()
        if not state.acted:
            clear_actions(memory.data, state.group)
            state.acted = True
        write_action(
            memory.data, state.group, whole, int(rows[0] if state.asks is None else state.asks[rows[0]])
        )

    def step(self) -> None:
        """Send the actions and wait for the next steps."""
        self.begin()
        self.finish()

    def reset(self) -> None:
        """Begin all over: the next steps are the first of new episodes."""
        self.begin(RESET)
        self.finish()

    def query(self) -> None:
        """Exchange side channels without a step (layout 0.3.2); the steps stay what they
        were."""
        self.begin(QUERY)
        self.finish()

    def begin(self, command: int = STEP) -> None:
        """The first half of a step (or reset, or query): hand the turn over, with the
        actions, and do not wait."""
        memory = self._open()
        if self._waiting:
            raise SimulatorError("a step has begun already; finish it first")
        if command == QUERY and not memory.layout.queries:
            raise SimulatorError(
                f"layout {memory.layout.name} has no query; side-channel data go with the next step, or "
                "choose layout 0.3.2"
            )
        for state in self._states.values():
            if not state.acted:
                clear_actions(memory.data, state.group)
        if self._channels is not None:
            memory.put(self._channels.outgoing())
        self._hand_over(command)

    def wait(self, seconds: float = inf) -> bool:
        """Wait for the answer, at most so long; True once it is there, or the simulator
        is gone: `finish` takes it, or says why.

        A thread of its own may wait here while nobody else uses the simulator.
        """
        if not self._waiting or self._answer is not None or self._failure is not None:
            return True
        try:
            self._answer = self._open().receive(self._look, seconds)
        except TidemillError as error:
            self._failure = error
            return True
        return self._answer is not None

    def finish(self) -> None:
        """The second half of a step: wait for the answer and take it."""
        if not self._waiting:
            raise SimulatorError("no step has begun")
        try:
            self.take()
        except BaseException as error:
            self.close(grace_after(error))
            raise

    def take(self) -> None:
        """The same for who closes a simulator that fails himself, elsewhere: it may
        linger."""
        self.wait()
        if self._failure is not None:
            raise self._failure
        if self._answer == CLOSE:
            raise PeerLost(f"{self._what} closed the bridge{self._output(_LAST_WORDS)}")
        memory = self._open()
        self._exchanges += 1
        self._take(memory)

    def close(self, grace: float = _GRACE) -> None:
        """Tell the simulator, wait for its end (and end it after `grace` seconds), and
        remove the files. Does nothing the second time."""
        memory, self._memory = self._memory, None
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if memory is not None:
            memory.hand_over(CLOSE)
            if (
                self._process is None
                and self._exchanges
                and self._answer != CLOSE
                and self._gone() is None
                and self._watch is None
            ):
                self._await_deletion(memory.path, min(grace, _TIDIES))
        if self._process is not None:
            until = time.monotonic() + grace
            while memory is not None and self._process.ended(0.1) is None and time.monotonic() < until:
                # once more: where it was not our turn the simulator may have written over
                # it
                memory.hand_over(CLOSE)
            self._process.end()
        if memory is not None:
            memory.close()
        if self._watch is not None:
            self._watch.close()
        self._meeting.leave()

    def _await_deletion(self, path: Path, seconds: float) -> None:
        """Leave the files to a simulator of another make, which has not closed and so
        deletes them; what it leaves is removed after that."""
        until = time.monotonic() + seconds
        while path.exists() and time.monotonic() < until:
            time.sleep(1e-3)

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> SharedMemory:
        if self._memory is None:
            raise SimulatorError(f"{self._what} is closed")
        return self._memory

    def _state(self, name: str) -> _State:
        self._open()
        state = self._states.get(name)
        if state is None:
            raise SchemaError(f'{self._what} has no group "{name}", {did_you_mean(name, self._states)}')
        if self._waiting:
            raise SimulatorError("a step has begun; finish it before looking at steps or setting actions")
        return state

    def _steps(self, state: _State) -> tuple[DecisionSteps, TerminalSteps]:
        if state.steps is None:
            decisions, terminals, state.asks = state.reader.read(self._open().data)
            state.steps = decisions, terminals
        return state.steps

    def _hand_over(self, command: int) -> None:
        self._command, self._answer, self._waiting = command, None, True
        self._since = awake()
        self._open().hand_over(command)

    def _take(self, memory: SharedMemory) -> None:
        """Take what came with the turn."""
        self._waiting = False
        if self._command == STEP and self._exchanges > 1:
            self._times.add(awake() - self._since)
        data = memory.take_side_channel()
        if memory.generation != self._generation:
            self._generation = memory.generation
            self._states = {group.name: self._renewed(memory, group) for group in memory.groups}
            self._specs = {group.name: group.spec for group in memory.groups}
        self._reset = self._reset or self._command == RESET
        if self._command != QUERY:
            for state in self._states.values():
                state.steps, state.asks, state.acted = None, None, False
        if data and self._channels is not None:
            self._channels.incoming(data)

    def _renewed(self, memory: SharedMemory, group: GroupImage) -> _State:
        """A group of another place in memory, or a new one."""
        reader = StepReader(memory.layout, group)
        known = self._states.get(group.name)
        return _State(group, reader) if known is None else replace(known, group=group, reader=reader)

    def _look(self) -> None:
        """Look after the simulator while waiting for it."""
        gone = self._gone()
        if gone is not None:
            raise PeerLost(
                f"{self._what} {gone}{'' if self._exchanges else ' before it first answered'}{self._output()}"
            )
        waited = awake() - self._since
        starts = not self._exchanges or (self._command == RESET and not self._reset)
        limit = self._start_seconds
        if not starts:
            limit = self._times.deadline(self._command == RESET) if waited > self._times.least else None
        if limit is not None and waited > limit:
            did = "did not hand the turn back"
            if not self._exchanges:
                joined = self._watch is not None
                did = (
                    "has joined, but did not exchange"
                    if joined
                    else f"did not join at {self._meeting.path} and answer"
                )
            elif starts:
                did = "has joined, but asked for no decision after the first reset"
            setting = "start_seconds" if starts else "deadline_s"
            editor = self._process is None and not self._exchanges
            then = (
                f"press play there while this waits, or raise {setting}" if editor else "it is still running"
            )
            raise DeadlineError(
                f"{self._what} {did} within {setting} = {limit:.4g} s; {then}{self._output()}"
            )

    def _gone(self) -> str | None:
        """Return how the simulator ended; None while it lives."""
        if self._watch is None:
            self._watch = PeerWatch.find(Path(f"{self._meeting.path}{SIMULATOR_SUFFIX}"))
        if self._watch is None:
            return None if self._process is None else self._process.ended()
        if self._watch.alive():
            return None
        if self._process is None:
            return f"died (process {self._watch.owner})"
        return self._process.ended(_LAST_WORDS) or "left the bridge without a word, and its process goes on"

    def _output(self, seconds: float = 0.0) -> str:
        return "" if self._process is None else self._process.output(seconds)


def grace_after(error: BaseException) -> float:
    """Return for how many seconds a simulator that failed so may go on, to end by
    itself: one that hangs had its time."""
    if isinstance(error, DeadlineError):
        return 0.0
    return _LINGERS if isinstance(error, PeerLost) else _GRACE
