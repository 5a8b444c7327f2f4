"""The rows of a world: filled by requests, written into the shared memory at an exchange,
answered by actions."""

import mmap
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.image import GroupImage, symbols_of, write_int
from tidemill.bridge.protocol.specs import BehaviorSpec, Floats, Ints
from tidemill.bridge.protocol.tables import LAYOUTS, MemoryLayout, places_of
from tidemill.core.errors import SchemaError, SimulatorError

_LOWEST_ID, _HIGHEST_ID = -(2**31), 2**31 - 1


class AgentRows:
    """The rows of agents that ask, or of agents that end. Rows 0 to n − 1 are of this
    exchange; all others are zero, so that whoever fills a row leaves nothing of the one
    before.

    All of it lies as it does in the memory of layout 0, so that many rows in order are
    written, and cleared, at once.

    Threads take rows at once: the counter's `next` is one step of Python's. Everything
    else is for when they are done.
    """

    def __init__(self, name: str, spec: BehaviorSpec) -> None:
        self.most, symbols = spec.max_agents, symbols_of(name, spec)
        starts, end = places_of(LAYOUTS["0"].agents[1:], symbols)
        self.block = np.zeros(end, np.uint8)
        self.parts: list[tuple[int, NDArray[Any]]] = []  # where each array begins in the block, and the array

        def rows(name: str, dtype: Any, *shape: int) -> NDArray[Any]:
            made: NDArray[Any] = np.ndarray((self.most, *shape), dtype, self.block, starts[name])
            self.parts.append((starts[name], made))
            starts[name] += made.nbytes
            return made

        self.obs: list[Floats] = [
            rows("obs", np.float32, *observation.shape) for observation in spec.observation_specs
        ]
        self.reward: Floats = rows("reward", np.float32)
        self.done, self.cut = rows("done", np.uint8), rows("max_step", np.uint8)
        self.agent_id: Ints = rows("agent_id", np.int32)
        self.masks = rows("masks", np.uint8, symbols["B"])
        self._counter = count()

    def take(self) -> int:
        """Take a row; the number of one that is not there where none is left."""
        return next(self._counter)

    def take_many(self, rows: int) -> slice:
        """Take so many rows, which must be there, from one thread."""
        start = len(self)
        self._counter = count(start + rows)
        return slice(start, start + rows)

    def __len__(self) -> int:
        """How many rows were taken."""
        rows = min(next(self._counter), self.most)
        self._counter = count(rows)
        return rows

    def clear(self) -> None:
        """Forget all rows."""
        rows = len(self)
        if not rows:
            return
        if self.mostly(rows):
            self.block.fill(0)
        else:
            for _, array in self.parts:
                array[:rows] = 0
        self._counter = count()

    def mostly(self, rows: int) -> bool:
        """Whether so many rows are most of the block."""
        return 2 * rows > self.most


class WorldRequests:
    """What a world tells in an exchange: `asks`, the rows of agents that ask, and `ends`,
    of those whose episode is over.

    shared: both have room for max_agents together, as in layout 0, and not each for as
        many
    """

    def __init__(self, name: str, spec: BehaviorSpec) -> None:
        self._name, self._most = name, spec.max_agents
        self.asks, self.ends = AgentRows(name, spec), AgentRows(name, spec)
        self.shared = False
        self._taken = count()  # rows of both, where they share

    def share(self) -> None:
        """Have both share their room from now on."""
        self.shared = True
        self._taken = count(len(self))

    def take(self, agent_id: int, rows: AgentRows) -> int:
        """Take one of these rows for an agent; SchemaError where none is left."""
        if not _LOWEST_ID <= agent_id <= _HIGHEST_ID:
            raise self._no_id(agent_id)
        if self.shared and next(self._taken) >= self._most:
            raise self._full(1, rows)
        row = rows.take()
        if row >= self._most:
            raise self._full(1, rows)
        rows.agent_id[row] = agent_id
        rows.done[row] = rows is self.ends
        return row

    def ids(self, agent_ids: Any) -> NDArray[Any]:
        """Return agent ids as an array, checked."""
        ids = np.asarray(agent_ids)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
            raise SchemaError(
                f'world "{self._name}": agent ids are integers, one for each agent, and not '
                f"{list(ids.shape)} of {ids.dtype}"
            )
        if ids.dtype != np.int32 and np.count_nonzero(ids.astype(np.int32) == ids) < len(ids):
            raise self._no_id(ids[(ids < _LOWEST_ID) | (ids > _HIGHEST_ID)][0])
        return ids

    def take_many(self, ids: NDArray[Any], rows: AgentRows) -> slice:
        """Take such rows for many agents, from one thread."""
        taken = len(self) if self.shared else len(rows)
        if taken + len(ids) > self._most:
            raise self._full(len(ids), rows)
        found = rows.take_many(len(ids))
        self._taken = count(taken + len(ids))
        rows.agent_id[found] = ids
        rows.done[found] = rows is self.ends
        return found

    def __len__(self) -> int:
        """How many rows were taken."""
        return len(self.asks) + len(self.ends)

    def _no_id(self, agent_id: Any) -> SchemaError:
        return SchemaError(
            f'world "{self._name}": {agent_id} cannot be an agent\'s id, which has 32 bits: {_LOWEST_ID} to '
            f"{_HIGHEST_ID}"
        )

    def _full(self, more: int, rows: AgentRows) -> SchemaError:
        what = "requests" if rows is self.asks else "ends of episodes"
        full = (
            f'world "{self._name}": {more} more {what} in this exchange than max_agents = {self._most} '
            "leaves room for"
        )
        if not self.shared:
            return SchemaError(
                f"{full}; make the world with a larger max_agents, or tell of each agent once in an exchange"
            )
        return SchemaError(
            f"{full}: in layout 0 those that ask and those that end share it. Make the world with a larger "
            f'max_agents, and tell the trainer how many agents live at a time, seats={{"{self._name}": …}}; '
            "or choose layout 0.3.2 in the trainer, where the two are counted apart"
        )

    def clear(self) -> None:
        """Drop all requests."""
        self.asks.clear()
        self.ends.clear()
        self._taken = count()

    def write(self, layout: MemoryLayout, memory: mmap.mmap, group: GroupImage) -> Ints:
        """Write all rows; in layout 0 those that ask come first. Return who asks, in
        order. Errors: SchemaError where there are more than fit."""
        asks, ends = self.asks, self.ends
        asking, ended = len(asks), len(ends)
        agents: Ints = asks.agent_id[:asking].copy()
        if layout.files == 2:
            asked: dict[str, list[Any]] = {
                "obs": [*asks.obs],
                "reward": [asks.reward],
                "agent_id": [asks.agent_id],
                "masks": [asks.masks],
            }
            last: dict[str, list[Any]] = {
                "ended_obs": [*ends.obs],
                "ended_reward": [ends.reward],
                "interrupted": [ends.cut],
            }
            last["ended_id"] = [ends.agent_id]
            for counter, rows, parts in (("agents", asking, asked), ("ended", ended, last)):
                write_int(memory, group.places[counter], rows)
                for name, arrays in parts.items():
                    place = group.places[name]
                    for array in arrays:
                        _write(memory, place, array[:rows])
                        place += array.nbytes
            return agents
        if asking + ended > self._most:  # made before the layout was known
            raise self._full(asking + ended - self._most, ends)
        write_int(memory, group.places["agents"], asking + ended)
        base = group.places["obs"]
        whole = asks.mostly(asking + ended)
        if whole:
            memory[base : base + asks.block.size] = asks.block.data
        if ended or not whole:
            for (start, first), (_, then) in zip(asks.parts, ends.parts, strict=True):
                if not whole:
                    _write(memory, base + start, first[:asking])
                _write(memory, base + start + first.strides[0] * asking, then[:ended])
        return agents


def _write(memory: mmap.mmap, place: int, array: NDArray[Any]) -> None:
    if array.size:
        memory[place : place + array.nbytes] = array.data


def read_actions(memory: mmap.mmap, group: GroupImage, rows: int) -> tuple[Floats, Ints]:
    """Return copies of the first rows' actions: continuous [rows, size], discrete [rows,
    branches]; SimulatorError where they cannot be."""
    spec, places = group.spec.action_spec, group.places
    continuous_place = places.get("continuous_actions", places.get("actions", 0))
    continuous: Floats = _read(memory, continuous_place, rows, spec.continuous_size, np.float32)
    discrete: Ints = _read(
        memory, places.get("discrete_actions", continuous_place), rows, len(spec.branches), np.int32
    )
    if np.count_nonzero(np.isfinite(continuous)) < continuous.size:
        raise SimulatorError(f'world "{group.name}": the trainer sent a continuous action that is not finite')
    if spec.branches and ((discrete < 0) | (discrete >= spec.branches)).any():
        raise SimulatorError(
            f'world "{group.name}": the trainer sent a discrete action outside branches of {spec.branches} '
            "actions"
        )
    return continuous, discrete


def _read(memory: mmap.mmap, place: int, rows: int, width: int, dtype: Any) -> NDArray[Any]:
    """Return a copy of numbers; no bytes are read where the width is 0."""
    return np.frombuffer(bytearray(memory[place : place + 4 * rows * width]), dtype).reshape(rows, width)
