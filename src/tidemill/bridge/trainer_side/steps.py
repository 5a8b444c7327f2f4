"""A group's rows as the trainer reads and answers them. Nothing here hands out memory
that the simulator writes."""

import mmap
from typing import Any

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.bridge.protocol.image import GroupImage, Memory, read_int
from tidemill.bridge.protocol.specs import ActionTuple, Bools, DecisionSteps, Floats, Ints, TerminalSteps
from tidemill.bridge.protocol.tables import MemoryLayout
from tidemill.core.errors import EnvironmentFault, ImageError, SchemaError


class StepReader:
    """A step reader reads a group's rows. What depends on the group alone is worked out
    once."""

    def __init__(self, layout: MemoryLayout, group: GroupImage) -> None:
        self._group = group
        self._rows = _Block(group, "agents", "", "agent_id")
        self._ended = _Block(group, "ended", "ended_", "ended_id") if layout.files == 2 else None
        self._branches = group.spec.action_spec.branches
        self._width = sum(self._branches)
        self._obs = [np.empty((0, *spec.shape), np.float32) for spec in group.spec.observation_specs]
        self._none = np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, bool)

    def read(self, memory: Memory) -> tuple[DecisionSteps, TerminalSteps, NDArray[np.intp] | None]:
        """Return copies of the rows, and which rows ask for decisions; None where these
        are the first ones, as they come.

        Raises ImageError where a count cannot be, EnvironmentFault where an observation
        or reward is NaN or infinite.
        """
        rows, obs, reward, agent_id = self._rows.read(memory)
        masks = self._masks(memory, rows)
        if self._ended is not None:
            ended, final, last_reward, ended_id = self._ended.read(memory)
            interrupted = self._flags(memory, "interrupted", ended)
            terminals = (
                TerminalSteps(final, last_reward, ended_id, np.frombuffer(interrupted, np.uint8) != 0)
                if ended
                else self._no_terminals()
            )
            return DecisionSteps(obs, reward, agent_id, masks, self._branches), terminals, None
        done = self._flags(memory, "done", rows)
        if done.count(0) == rows:
            return DecisionSteps(obs, reward, agent_id, masks, self._branches), self._no_terminals(), None
        over = np.frombuffer(done, np.uint8) != 0
        cut = np.frombuffer(self._flags(memory, "max_step", rows), np.uint8) != 0
        asking, ended = (~over).nonzero()[0], over.nonzero()[0]
        first = len(asking)
        # the former are views of our copies
        asks, ends = (slice(first), slice(first, rows)) if ended[0] == first else (asking, ended)
        chosen = None if masks is None else masks[asks]
        decisions = DecisionSteps(
            [array[asks] for array in obs], reward[asks], agent_id[asks], chosen, self._branches
        )
        return (
            decisions,
            TerminalSteps([array[ends] for array in obs], reward[ends], agent_id[ends], cut[ends]),
            asking,
        )

    def _no_terminals(self) -> TerminalSteps:
        return TerminalSteps(list(self._obs), *self._none)

    def _flags(self, memory: Memory, name: str, rows: int) -> bytes | bytearray:
        place = self._group.places[name]
        return memory[place : place + rows]

    def _masks(self, memory: Memory, rows: int) -> Bools | None:
        if not self._branches:
            return None
        place = self._group.places["masks"]
        forbidden: Bools = np.frombuffer(memory[place : place + rows * self._width], np.uint8) != 0
        return forbidden.reshape(rows, self._width)


def count(memory: Memory, group: GroupImage, name: str) -> int:
    """Return a number of rows, checked."""
    rows = int(read_int(memory, group.places[name])[0])
    if not 0 <= rows <= group.spec.max_agents:
        raise ImageError(
            f'group "{group.name}": {rows} agents ({name}), and it has room for max_agents = '
            f"{group.spec.max_agents}"
        )
    return rows


def _copy(memory: Memory, place: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an aligned copy of numbers that may lie anywhere."""
    return np.ndarray(shape, dtype, memory, place).copy()


class _Block:
    """A block of fields whose first n rows are read; `counter` holds n."""

    def __init__(self, group: GroupImage, counter: str, prefix: str, agent_id: str) -> None:
        self._group, self._counter = group, counter
        self._reward, self._agent_id = group.places[prefix + "reward"], group.places[agent_id]
        self._obs = [(place, spec.size, spec.shape) for place, spec in group.observations(prefix)]

    def read(self, memory: Memory) -> tuple[int, list[Floats], Floats, Ints]:
        """Return n, and copies: observations, rewards, agent ids."""
        rows = count(memory, self._group, self._counter)
        reward: Floats = _copy(memory, self._reward, (rows,), np.float32)
        agent_id: Ints = _copy(memory, self._agent_id, (rows,), np.int32)
        obs: list[Floats] = []
        for place, size, shape in self._obs:
            values = _copy(memory, place, (rows, *shape), np.float32)
            if count_nonzero(np.isfinite(values)) < values.size:
                self._complain(f"observation {len(obs)}", values.reshape(rows, size), agent_id)
            obs.append(values)
        if count_nonzero(np.isfinite(reward)) < rows:
            self._complain("reward", reward.reshape(rows, 1), agent_id)
        return rows, obs, reward, agent_id

    def _complain(self, field: str, values: Floats, agent_id: Ints) -> None:
        row = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise EnvironmentFault(
            f'group "{self._group.name}": {field} of agent {agent_id[row]} is not finite: '
            f"{np.array2string(values[row], threshold=8)}. Tidemill trains on finite numbers only; find "
            "where the simulator divides by zero or overflows"
        ).telling({self._group.name: {"agent_id": agent_id, field: values}})


def write_actions(
    memory: mmap.mmap, group: GroupImage, action: ActionTuple, asks: NDArray[np.intp] | None, rows: int
) -> None:
    """Write the actions of all agents that ask; of `rows` rows those in `asks` do, where
    it is not None. The others get zeros."""
    for place, array in _placed(group, action):
        if asks is not None:
            whole = np.zeros((rows, array.shape[1]), array.dtype)
            whole[asks] = array
            array = whole
        if array.size:
            memory[place : place + array.nbytes] = array.data


def write_action(memory: mmap.mmap, group: GroupImage, action: ActionTuple, row: int) -> None:
    """Write the action of one row; `action` has arrays of one row."""
    for place, array in _placed(group, action):
        if array.size:
            memory[place + row * array.nbytes : place + (row + 1) * array.nbytes] = array.data


def clear_actions(memory: mmap.mmap, group: GroupImage) -> None:
    """Write zeros for all rows there may be now."""
    rows = count(memory, group, "agents")
    actions = group.spec.action_spec
    widths = {
        "actions": group.symbols.get("a", 0),
        "continuous_actions": actions.continuous_size,
        "discrete_actions": len(actions.branches),
    }
    for name, width in widths.items():
        if name in group.places:
            place = group.places[name]
            memory[place : place + 4 * rows * width] = bytes(4 * rows * width)


def _placed(group: GroupImage, action: ActionTuple) -> list[tuple[int, NDArray[Any]]]:
    """Return where the first row of each array lies, and the array."""
    assert action.continuous is not None and action.discrete is not None
    places = group.places
    if "actions" in places:
        return [
            (places["actions"], action.discrete if group.spec.action_spec.branches else action.continuous)
        ]
    return [(places["continuous_actions"], action.continuous), (places["discrete_actions"], action.discrete)]


def complete(group: GroupImage, agents: int, action: ActionTuple) -> ActionTuple:
    """Return the action as arrays of the right shape and type; SchemaError where it is
    not one for so many agents of the group."""
    if not isinstance(action, ActionTuple):
        raise SchemaError(
            f'group "{group.name}" takes an ActionTuple of continuous and discrete actions, and was given '
            f"{type(action).__name__}"
        )
    spec = group.spec.action_spec
    continuous = _array(group, "continuous", action.continuous, (agents, spec.continuous_size), np.float32)
    discrete = _array(group, "discrete", action.discrete, (agents, len(spec.branches)), np.int32)
    if count_nonzero(np.isfinite(continuous)) < continuous.size:
        row, column = np.argwhere(~np.isfinite(continuous))[0]
        raise SchemaError(
            f'group "{group.name}": continuous action {column} in row {row} is {continuous[row, column]}'
        )
    if spec.branches and ((discrete < 0) | (discrete >= spec.branches)).any():
        row, branch = np.argwhere((discrete < 0) | (discrete >= spec.branches))[0]
        raise SchemaError(
            f'group "{group.name}": branch {branch} has {spec.branches[branch]} actions from 0 on, and row '
            f"{row} has action {discrete[row, branch]}"
        )
    return ActionTuple(continuous, np.ascontiguousarray(discrete, np.int32))


def as_rows(action: Any) -> Any:
    """Return the action of one agent, whose arrays may have one dimension, as arrays of
    one row. What is none is returned as it is."""
    if not isinstance(action, ActionTuple):
        return action
    one = (
        None if given is None else np.atleast_2d(as_array("actions", given))
        for given in (action.continuous, action.discrete)
    )
    return ActionTuple(*one)


def as_array(what: str, given: Any) -> NDArray[Any]:
    """Return an array of what was given; SchemaError where it is none."""
    try:
        return np.asarray(given)
    except ValueError:
        raise SchemaError(
            f"{what} are to be an array, and were given {given!r:.80}, whose rows differ in length"
        ) from None


def _array(group: GroupImage, what: str, given: Any, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    if given is None:
        return np.zeros(shape, dtype)
    array = as_array(f'group "{group.name}": {what} actions', given)
    kinds = "f" if dtype is np.float32 else "iu"
    if array.shape != shape or (array.dtype.kind not in kinds and array.size):
        raise SchemaError(
            f'group "{group.name}" takes {what} actions of shape {list(shape)} and type {np.dtype(dtype)} '
            "now ([agents that ask for a decision, "
            f"{'continuous_size' if what == 'continuous' else 'branches'}]), and was given "
            f"{list(array.shape)} of {array.dtype}"
        )
    # wider integers wrap: looked at first
    return np.ascontiguousarray(array, dtype) if kinds == "f" else array
