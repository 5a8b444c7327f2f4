"""A group's rows as the trainer reads and answers them. Nothing here hands out memory that the simulator writes."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.image import Group, Memory, read_int
from tidemill.bridge.specs import ActionSpec, ActionTuple, Bools, DecisionSteps, Floats, Ints, TerminalSteps
from tidemill.bridge.tables import Layout
from tidemill.core.errors import EnvironmentFault, ImageError, SchemaError


def read_steps(layout: Layout, memory: Memory, group: Group) -> tuple[DecisionSteps, TerminalSteps, NDArray[np.intp] | None]:
    """Return copies of a group's rows, and which rows ask for decisions; None where these are the first ones, as they come.

    Raises ImageError where a count cannot be, EnvironmentFault where an observation or reward is NaN or infinite.
    """
    rows = _Block(memory, group, "agents", "")
    masks = rows.masks()
    branches = group.spec.action_spec.branches
    if layout.files == 2:
        ended = _Block(memory, group, "ended", "ended_")
        interrupted = ended.flags("interrupted")
        decisions = DecisionSteps(rows.observations, rows.reward, rows.agent_id, masks, branches)
        return decisions, TerminalSteps(ended.observations, ended.reward, ended.agent_id, np.frombuffer(interrupted, np.uint8) != 0), None
    done = rows.flags("done")
    if not any(done):
        return DecisionSteps(rows.observations, rows.reward, rows.agent_id, masks, branches), no_terminals(group), None
    over = np.frombuffer(done, np.uint8) != 0
    cut = np.frombuffer(rows.flags("max_step"), np.uint8) != 0
    asks = np.flatnonzero(~over)
    decisions = DecisionSteps(
        [array[asks] for array in rows.observations], rows.reward[asks], rows.agent_id[asks], None if masks is None else masks[asks], branches
    )
    terminals = TerminalSteps([array[over] for array in rows.observations], rows.reward[over], rows.agent_id[over], cut[over])
    return decisions, terminals, asks


def count(memory: Memory, group: Group, name: str) -> int:
    """Return a number of rows, checked."""
    rows = int(read_int(memory, group.places[name])[0])
    if not 0 <= rows <= group.spec.max_agents:
        raise ImageError(f'group "{group.name}": {rows} agents ({name}), and it has room for max_agents = {group.spec.max_agents}')
    return rows


def no_terminals(group: Group) -> TerminalSteps:
    """Return terminal steps of no agent."""
    return TerminalSteps(
        [np.empty((0, *spec.shape), np.float32) for spec in group.spec.observation_specs], np.empty(0, np.float32), np.empty(0, np.int32)
    )


class _Block:
    """Copies of the first n rows of a block of fields, whose names begin with `prefix`."""

    def __init__(self, memory: Memory, group: Group, counter: str, prefix: str) -> None:
        self._memory, self._group, self._prefix = memory, group, prefix
        self._rows = rows = count(memory, group, counter)
        self.agent_id: Ints = self._copy(group.places[prefix + "agent_id" if not prefix else prefix + "id"], rows, np.int32)
        self.reward: Floats = self._copy(group.places[prefix + "reward"], rows, np.float32)
        self.observations: list[Floats] = []
        place = group.places[prefix + "obs"]
        for spec in group.spec.observation_specs:
            values = self._copy(place, rows * spec.size, np.float32)
            self.observations.append(values.reshape(rows, *spec.shape))
            place += 4 * group.spec.max_agents * spec.size
        self._check()

    def _copy(self, place: int, items: int, dtype: Any) -> NDArray[Any]:
        return np.frombuffer(bytearray(self._memory[place : place + 4 * items]), dtype)

    def flags(self, name: str) -> bytes:
        """Return the first rows of a field of bytes."""
        place = self._group.places[name]
        return bytes(self._memory[place : place + self._rows])

    def masks(self) -> Bools | None:
        """Return the masks, branches side by side; None without branches."""
        if not self._group.spec.action_spec.branches:
            return None
        place, width = self._group.places["masks"], self._group.symbols["B"]
        forbidden: Bools = np.frombuffer(self._memory[place : place + self._rows * width], np.uint8) != 0
        return forbidden.reshape(self._rows, width)

    def _check(self) -> None:
        for index, array in (("reward", self.reward), *enumerate(self.observations)):
            if not np.isfinite(array).all():
                row = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
                field = "reward" if index == "reward" else f"observation {index}"
                raise EnvironmentFault(
                    f'group "{self._group.name}": {field} of agent {self.agent_id[row]} is not finite: {np.array2string(array[row], threshold=8)}. '
                    "Tidemill trains on finite numbers only; find where the simulator divides by zero or overflows"
                )


def write_actions(memory: mmap.mmap, group: Group, action: ActionTuple, asks: NDArray[np.intp] | None, rows: int) -> None:
    """Write the actions of all agents that ask; of `rows` rows those in `asks` do, where it is not None. The others get zeros."""
    for place, array in _placed(group, action):
        if asks is not None:
            whole = np.zeros((rows, array.shape[1]), array.dtype)
            whole[asks] = array
            array = whole
        if array.size:
            memory[place : place + array.nbytes] = array.data


def write_action(memory: mmap.mmap, group: Group, action: ActionTuple, row: int) -> None:
    """Write the action of one row; `action` has arrays of one row."""
    for place, array in _placed(group, action):
        if array.size:
            memory[place + row * array.nbytes : place + (row + 1) * array.nbytes] = array.data


def clear_actions(memory: mmap.mmap, group: Group) -> None:
    """Write zeros for all rows there may be now."""
    rows = count(memory, group, "agents")
    actions = group.spec.action_spec
    for name, width in _widths(group, actions):
        place = group.places[name]
        memory[place : place + 4 * rows * width] = bytes(4 * rows * width)


def _widths(group: Group, actions: ActionSpec) -> list[tuple[str, int]]:
    if "actions" in group.places:
        return [("actions", group.symbols["a"])]
    return [("continuous_actions", actions.continuous_size), ("discrete_actions", len(actions.branches))]


def _placed(group: Group, action: ActionTuple) -> list[tuple[int, NDArray[Any]]]:
    """Return the arrays that are written, and where the first row of each lies."""
    assert action.continuous is not None and action.discrete is not None
    places = group.places
    if "actions" in places:
        return [(places["actions"], action.discrete if group.spec.action_spec.branches else action.continuous)]
    return [(places["continuous_actions"], action.continuous), (places["discrete_actions"], action.discrete)]


def complete(group: Group, agents: int, action: ActionTuple) -> ActionTuple:
    """Return the action as arrays of the right shape and type; SchemaError where it is not one for so many agents of the group."""
    spec = group.spec.action_spec
    continuous = _array(group, "continuous", action.continuous, (agents, spec.continuous_size), np.float32)
    discrete = _array(group, "discrete", action.discrete, (agents, len(spec.branches)), np.int32)
    if not np.isfinite(continuous).all():
        row, column = np.argwhere(~np.isfinite(continuous))[0]
        raise SchemaError(f'group "{group.name}": continuous action {column} in row {row} is {continuous[row, column]}')
    if discrete.size and ((discrete < 0) | (discrete >= spec.branches)).any():
        row, branch = np.argwhere((discrete < 0) | (discrete >= spec.branches))[0]
        raise SchemaError(
            f'group "{group.name}": branch {branch} has {spec.branches[branch]} actions from 0 on, and row {row} has action {discrete[row, branch]}'
        )
    return ActionTuple(continuous, discrete)


def _array(group: Group, what: str, given: Any, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    if given is None:
        return np.zeros(shape, dtype)
    array = np.asarray(given)
    kinds = "f" if dtype is np.float32 else "iu"
    if array.shape != shape or (array.dtype.kind not in kinds and array.size):
        raise SchemaError(
            f'group "{group.name}" takes {what} actions of shape {list(shape)} and type {np.dtype(dtype)} now ([agents that ask for a decision, '
            f"{'continuous_size' if what == 'continuous' else 'branches'}]), and was given {list(array.shape)} of {array.dtype}"
        )
    return np.ascontiguousarray(array, dtype)
