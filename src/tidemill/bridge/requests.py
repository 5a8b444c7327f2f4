"""The rows of a world: filled by requests, written into the shared memory at an exchange, answered by actions."""

import mmap
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.image import Group, write_int
from tidemill.bridge.specs import BehaviorSpec, Floats, Ints
from tidemill.bridge.tables import Layout
from tidemill.core.errors import SchemaError, SimulatorError


class Requests:
    """Rows 0 to n − 1 are of this exchange; all others are zero, so that whoever fills a row leaves nothing of the one before.

    Threads take rows at once: the counter's `next` is one step of Python's. Everything else is for when they are done.
    """

    def __init__(self, name: str, spec: BehaviorSpec) -> None:
        self._name, self._most = name, spec.max_agents
        most, branches = spec.max_agents, spec.action_spec.branches
        self.agent_id: Ints = np.zeros(most, np.int32)
        self.reward: Floats = np.zeros(most, np.float32)
        self.obs: list[Floats] = [np.zeros((most, *observation.shape), np.float32) for observation in spec.observation_specs]
        self.done = np.zeros(most, np.uint8)
        self.cut = np.zeros(most, np.uint8)
        self.masks = np.zeros((most, sum(branches)), np.uint8)
        self._counter = count()

    def take(self, agent_id: int, done: bool = False, cut: bool = False) -> int:
        """Take a row for an agent; SchemaError where none is left."""
        row = next(self._counter)
        if row >= self._most:
            raise self._full(1)
        self.agent_id[row] = agent_id
        if done:
            self.done[row], self.cut[row] = done, cut
        return row

    def take_many(self, agent_ids: Any, done: bool = False) -> slice:
        """Take rows for many agents, from one thread."""
        ids = np.asarray(agent_ids, np.int32)
        start = self.rows()
        if start + len(ids) > self._most:
            raise self._full(len(ids))
        rows = slice(start, start + len(ids))
        self.agent_id[rows], self.done[rows] = ids, done
        self._counter = count(rows.stop)
        return rows

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
        used = slice(0, self.rows())
        arrays: list[NDArray[Any]] = [self.agent_id, self.reward, *self.obs, self.done, self.cut, self.masks]
        for array in arrays:
            array[used] = 0
        self._counter = count()

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
