"""The rows of a world: filled by requests, written into the shared memory at an exchange, answered by actions."""

import mmap
from itertools import accumulate, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.image import Group, symbols_of, write_int
from tidemill.bridge.specs import BehaviorSpec, Floats, Ints
from tidemill.bridge.tables import LAYOUTS, Layout
from tidemill.core.errors import SchemaError, SimulatorError

_LOWEST_ID, _HIGHEST_ID = -(2**31), 2**31 - 1


class Requests:
    """Rows 0 to n − 1 are of this exchange; all others are zero, so that whoever fills a row leaves nothing of the one before.

    All of it lies as it does in the memory of layout 0, so that many rows in order are written, and cleared, at once.

    Threads take rows at once: the counter's `next` is one step of Python's. Everything else is for when they are done.
    """

    def __init__(self, name: str, spec: BehaviorSpec) -> None:
        self._name, self._most = name, spec.max_agents
        most, symbols = spec.max_agents, symbols_of(name, spec)
        fields = LAYOUTS["0"].agents[1:]
        starts = dict(zip((field.name for field in fields), accumulate((field.bytes(symbols) for field in fields), initial=0), strict=False))
        self._block = np.zeros(sum(field.bytes(symbols) for field in fields), np.uint8)

        def rows(name: str, dtype: Any, *shape: int) -> NDArray[Any]:
            made: NDArray[Any] = np.ndarray((most, *shape), dtype, self._block, starts[name])
            starts[name] += made.nbytes
            return made

        self.obs: list[Floats] = [rows("obs", np.float32, *observation.shape) for observation in spec.observation_specs]
        self.reward: Floats = rows("reward", np.float32)
        self.done, self.cut = rows("done", np.uint8), rows("max_step", np.uint8)
        self.agent_id: Ints = rows("agent_id", np.int32)
        self.masks = rows("masks", np.uint8, symbols["B"])
        self._counter = count()

    def take(self, agent_id: int, done: bool = False, cut: bool = False) -> int:
        """Take a row for an agent; SchemaError where none is left."""
        if not _LOWEST_ID <= agent_id <= _HIGHEST_ID:
            raise self._no_id(agent_id)
        row = next(self._counter)
        if row >= self._most:
            raise self._full(1)
        self.agent_id[row] = agent_id
        if done:
            self.done[row], self.cut[row] = done, cut
        return row

    def ids(self, agent_ids: Any) -> NDArray[Any]:
        """Return agent ids as an array, checked."""
        ids = np.asarray(agent_ids)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
            raise SchemaError(f'world "{self._name}": agent ids are integers, one for each agent, and not {list(ids.shape)} of {ids.dtype}')
        if ids.dtype != np.int32 and np.count_nonzero(ids.astype(np.int32) == ids) < len(ids):
            raise self._no_id(ids[(ids < _LOWEST_ID) | (ids > _HIGHEST_ID)][0])
        return ids

    def take_many(self, ids: NDArray[Any], done: bool = False) -> slice:
        """Take rows for many agents, from one thread."""
        start = self.rows()
        if start + len(ids) > self._most:
            raise self._full(len(ids))
        rows = slice(start, start + len(ids))
        self.agent_id[rows] = ids
        if done:
            self.done[rows] = True
        self._counter = count(rows.stop)
        return rows

    def _no_id(self, agent_id: Any) -> SchemaError:
        return SchemaError(f'world "{self._name}": {agent_id} cannot be an agent\'s id, which has 32 bits: {_LOWEST_ID} to {_HIGHEST_ID}')

    def _full(self, more: int) -> SchemaError:
        return SchemaError(
            f'world "{self._name}": {more} more requests in this exchange than max_agents = {self._most} leaves room for, rows of ended episodes '
            "included; make the world with a larger max_agents"
        )

    def rows(self) -> int:
        """How many rows were taken."""
        rows = next(self._counter)
        self._counter = count(min(rows, self._most))
        return min(rows, self._most)

    def clear(self) -> None:
        """Drop all requests."""
        rows = self.rows()
        if self._mostly(rows):
            self._block.fill(0)
        else:
            arrays: list[NDArray[Any]] = [self.agent_id, self.reward, *self.obs, self.done, self.cut, self.masks]
            for array in arrays:
                array[:rows] = 0
        self._counter = count()

    def _mostly(self, rows: int) -> bool:
        """Whether so many rows are most of the block."""
        return 2 * rows > self._most

    def asking(self) -> NDArray[np.intp]:
        """The rows that ask for actions, in order."""
        rows: NDArray[np.intp] = (self.done[: self.rows()] == 0).nonzero()[0]
        return rows

    def write(self, layout: Layout, memory: mmap.mmap, group: Group) -> Ints:
        """Write all rows: those that ask for actions first. Return who asks, in order."""
        rows = self.rows()
        ended = self.done[:rows].nonzero()[0]
        asking: Any = self.asking() if len(ended) else slice(0, rows)
        agents: Ints = self.agent_id[asking].copy()
        if layout.files == 1 and self._mostly(rows) and (not len(ended) or ended[0] == len(agents)):
            write_int(memory, group.places["agents"], rows)
            place = group.places["obs"]
            memory[place : place + self._block.size] = self._block.data
            return agents
        if layout.files == 2:
            self._write(memory, group, "agents", asking, {"obs": self.obs, "reward": self.reward, "agent_id": self.agent_id, "masks": self.masks})
            self._write(
                memory,
                group,
                "ended",
                ended,
                {"ended_obs": self.obs, "ended_reward": self.reward, "interrupted": self.cut, "ended_id": self.agent_id},
            )
            return agents
        order = np.concatenate([asking, ended]) if len(ended) else asking
        fields: dict[str, Any] = {"obs": self.obs, "reward": self.reward, "done": self.done, "max_step": self.cut, "agent_id": self.agent_id}
        if group.spec.action_spec.branches:
            fields["masks"] = self.masks
        self._write(memory, group, "agents", order, fields)
        return agents

    def _write(self, memory: mmap.mmap, group: Group, counter: str, rows: Any, fields: dict[str, Any]) -> None:
        write_int(memory, group.places[counter], rows.stop if isinstance(rows, slice) else len(rows))
        for name, arrays in fields.items():
            place = group.places[name]
            for array in arrays if isinstance(arrays, list) else [arrays]:
                chosen = array[rows]
                if chosen.size:
                    memory[place : place + chosen.nbytes] = chosen.data
                place += array.nbytes


def read_actions(memory: mmap.mmap, group: Group, rows: int) -> tuple[Floats, Ints]:
    """Return copies of the first rows' actions: continuous [rows, size], discrete [rows, branches]; SimulatorError where they cannot be."""
    spec, places = group.spec.action_spec, group.places
    continuous_place = places.get("continuous_actions", places.get("actions", 0))
    continuous: Floats = _read(memory, continuous_place, rows, spec.continuous_size, np.float32)
    discrete: Ints = _read(memory, places.get("discrete_actions", continuous_place), rows, len(spec.branches), np.int32)
    if np.count_nonzero(np.isfinite(continuous)) < continuous.size:
        raise SimulatorError(f'world "{group.name}": the trainer sent a continuous action that is not finite')
    if spec.branches and ((discrete < 0) | (discrete >= spec.branches)).any():
        raise SimulatorError(f'world "{group.name}": the trainer sent a discrete action outside branches of {spec.branches} actions')
    return continuous, discrete


def _read(memory: mmap.mmap, place: int, rows: int, width: int, dtype: Any) -> NDArray[Any]:
    """Return a copy of numbers; no bytes are read where the width is 0."""
    return np.frombuffer(bytearray(memory[place : place + 4 * rows * width]), dtype).reshape(rows, width)
