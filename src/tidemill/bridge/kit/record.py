"""Recording what a simulator and its trainer exchange."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.bridge.kit.recording import Actions, Exchange, RecordingWriter, group_spec, rows_of
from tidemill.bridge.kit.trial_trainer import Program, draw_actions
from tidemill.bridge.protocol.specs import ActionTuple, RawChannels
from tidemill.bridge.protocol.tables import QUERY, STEP
from tidemill.bridge.trainer_side.simulator import Simulator
from tidemill.bridge.trainer_side.steps import complete


class _Tap(RawChannels):
    """Side channels of which a copy is kept of what went through since the last
    `take`."""

    def __init__(self, channels: RawChannels | None) -> None:
        self._channels = channels
        self._sent = self._came = b""

    def outgoing(self) -> bytes:
        self._sent = b"" if self._channels is None else self._channels.outgoing()
        return self._sent

    def incoming(self, data: bytes) -> None:
        self._came = data
        if self._channels is not None:
            self._channels.incoming(data)

    def take(self) -> tuple[bytes, bytes]:
        found, self._sent, self._came = (self._sent, self._came), b"", b""
        return found


class RecordedSimulator(Simulator):
    """A `Simulator` whose exchanges are recorded; the file `out` appears when it is
    closed, or the simulator is gone.

    Rows with numbers that are not finite are not recorded: they are an error here as they
    are there.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        arguments: Sequence[str] = (),
        *,
        out: str | Path,
        replace: bool = False,
        layout: str = "0",
        **more: Any,
    ) -> None:
        self._tap = _Tap(more.pop("channels", None))
        self._actions: dict[str, ActionTuple] = {}
        self._command = STEP
        self._seen: set[str] = set()
        program = arguments[0] if arguments and str(arguments[0]).endswith((".py", ".exe")) else path
        self._writer = RecordingWriter(Path(out), layout, Path(program).name if program else "", replace)
        try:
            super().__init__(path, arguments, layout=layout, channels=self._tap, **more)
        except BaseException:
            self._writer.close()
            raise

    def set_actions(self, name: str, action: ActionTuple) -> None:
        """See `Simulator.set_actions`."""
        super().set_actions(name, action)
        state = self._state(name)
        self._actions[name] = complete(state.group, len(self.get_steps(name)[0]), action)

    def set_action_for_agent(self, name: str, agent_id: int, action: ActionTuple) -> None:
        """See `Simulator.set_action_for_agent`."""
        super().set_action_for_agent(name, agent_id, action)
        decisions = self.get_steps(name)[0]
        row = decisions.agent_id_to_index[agent_id]
        whole = self._actions.setdefault(name, self.behavior_specs[name].action_spec.zeros(len(decisions)))
        for target, given in ((whole.continuous, action.continuous), (whole.discrete, action.discrete)):
            if target is not None and given is not None:
                target[row] = given

    def begin(self, command: int = STEP) -> None:
        """See `Simulator.begin`."""
        super().begin(command)
        self._command = command

    def finish(self) -> None:
        """See `Simulator.finish`."""
        super().finish()
        sent, came = self._tap.take()
        actions, specs = {}, self.behavior_specs
        if self._command == STEP:
            actions = {name: _packed(action) for name, action in self._actions.items()}
        if self._command != QUERY:
            self._actions = {}
        new = tuple(group_spec(name, spec) for name, spec in specs.items() if name not in self._seen)
        self._seen |= specs.keys()
        steps = {} if self._command == QUERY else {name: self.get_steps(name) for name in specs}
        rows = {
            name: (rows_of(decisions), rows_of(terminals)) for name, (decisions, terminals) in steps.items()
        }
        self._writer.add(Exchange(self._command, sent, actions, came, new, rows))

    def close(self, *arguments: Any) -> None:
        """See `Simulator.close`."""
        super().close(*arguments)
        self._writer.close()


def _packed(action: ActionTuple) -> Actions:
    parts = (action.continuous, action.discrete)
    return Actions(*(b"" if part is None else part.tobytes() for part in parts))


def record(program: Program, out: Path, steps: int = 1000, seed: int = 0, replace: bool = False) -> int:
    """Play a simulator with allowed actions drawn at random, record so many steps after a
    reset, and return how many exchanges there were.

    A simulator that breaks off is an error, but what came before is recorded.
    """
    rng = np.random.default_rng(seed)
    with RecordedSimulator(out=out, replace=replace, **program.settings()) as simulator:
        simulator.reset()
        for _ in range(steps):
            for name, spec in simulator.behavior_specs.items():
                simulator.set_actions(
                    name, draw_actions(simulator.get_steps(name)[0], spec.action_spec.continuous_size, rng)
                )
            simulator.step()
    return simulator.exchanges
