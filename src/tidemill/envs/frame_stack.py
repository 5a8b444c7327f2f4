"""Frame stacks: an environment whose agents see their newest k observations.

Each Box is stacked, the oldest frame first: images (uint8 of 3 axes) along their
channels, which are the first axis where it is no longer than the last and the last one
otherwise; everything else along a new first axis, so that [n] becomes [k, n] and [height,
width] an image of k channels. At an episode's first row the frames before it are copies
of the first (as Gymnasium's FrameStackObservation has it). Discrete and binary parts, and
``action_mask``, which says what can be done now, stay as they are.

Stacks are made between environment and agent: rows, policies, evaluation and videos see
an environment whose observations are stacks, and nothing else knows of them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.api.spaces import Box, Dict, Space, Spaces, Tuple, leaves
from tidemill.core.cut import Part
from tidemill.core.schema import Array, Arrays
from tidemill.envs.wrapper import Wrapper

NOT_STACKED = "action_mask"


class FrameStack(Wrapper):
    """A frame stack shows each agent its newest observations at once. `counts` has the
    number of frames of each agent."""

    def __init__(self, inner: Environment, counts: Sequence[int]) -> None:
        super().__init__(inner)
        self._counts = counts
        self.agents = tuple(
            AgentInfo(agent.name, Spaces(stacked(agent.spaces.observation, count), agent.spaces.action))
            for agent, count in zip(inner.agents, counts, strict=True)
        )
        self._groups: list[_Group | None] = []
        self._bare: list[Tick] = []  # what the environment fills

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._inner.bind(groups)
        counts = [self._counts[group[0]] for group in groups]
        spaces = [self._inner.agents[group[0]].spaces.observation for group in groups]
        seats = [self.lanes * len(group) for group in groups]
        self._groups = [
            _Group(*each) if each[1] > 1 else None for each in zip(spaces, counts, seats, strict=True)
        ]
        self._bare = [
            Tick.allocate(space, count, self.info, self.same_step)
            for space, count in zip(spaces, seats, strict=True)
        ]

    def _own_state(self) -> Part:
        return {str(number): group.state() for number, group in enumerate(self._groups) if group is not None}

    def _load_own_state(self, state: Part) -> None:
        for number, group in enumerate(self._groups):
            if group is not None:
                group.load_state(state[str(number)])

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        for group in self._groups:
            if group is not None:
                group.begins |= np.repeat(reset, len(group.begins) // self.lanes)
        self._inner.send(actions, reset)

    def recv(self, ticks: Sequence[Tick]) -> None:
        given = []
        for group, bare, tick in zip(self._groups, self._bare, ticks, strict=True):
            if group is not None:
                bare.reward, bare.done, bare.truncated = tick.reward, tick.done, tick.truncated
                bare.present = tick.present
                bare.restarted = tick.restarted
                bare.info = tick.info
                bare.voided = tick.voided
            given.append(tick if group is None else bare)
        self._inner.recv(given)
        for group, bare, tick in zip(self._groups, self._bare, ticks, strict=True):
            if group is not None:
                group.push(bare, tick)


class _Group:
    """The frames of the seats of one group."""

    def __init__(self, space: Space, count: int, seats: int) -> None:
        self._stacks = {
            name: _Stack(leaf, count, seats)
            for name, leaf in leaves(space, "obs").items()
            if isinstance(leaf, Box) and f".{NOT_STACKED}." not in f"{name}."
        }
        self.begins = np.ones(seats, np.bool_)
        """[N]: the next observation of the seat is the first of an episode."""

    def state(self) -> Part:
        """Return all frames."""
        return {
            "begins": self.begins,
            "frames": {name: stack.frames for name, stack in self._stacks.items()},
        }

    def load_state(self, state: Part) -> None:
        """Take back what `state` returned."""
        self.begins[:] = state["begins"]
        for name, stack in self._stacks.items():
            stack.frames[:] = state["frames"][name]

    def push(self, bare: Tick, tick: Tick) -> None:
        """Add the observations of a tick, and write what is seen then."""
        over = (bare.restarted & ~bare.voided & ~self.begins).nonzero()[0]
        every = bool(bare.present.all())
        seats = slice(None) if every else bare.present.nonzero()[0]
        if bare.restarted.any():
            self.begins |= bare.restarted
        begins = (self.begins & bare.present).nonzero()[0]
        for name, out in tick.observation.items():
            stack = self._stacks.get(name)
            if stack is None:
                out[seats] = bare.observation[name][seats]
                if len(over):
                    tick.final[name][over] = bare.final[name][over]
                continue
            if len(over):
                stack.push(over, bare.final[name])
                stack.show(over, tick.final[name])
            stack.push(seats, bare.observation[name])
            if len(begins):
                stack.fill(begins, bare.observation[name])
            stack.show(seats, out)
        np.logical_or(
            self.begins & ~bare.present, (bare.done | bare.truncated) & ~bare.restarted, out=self.begins
        )


class _Stack:
    """The newest frames of one leaf, [N, k, ...], the oldest first."""

    def __init__(self, leaf: Box, count: int, seats: int) -> None:
        self.frames = np.zeros(
            (seats, count, *leaf.shape), "float32" if leaf.dtype == "float64" else leaf.dtype
        )
        self._channels_last = _is_image(leaf) and leaf.shape[0] > leaf.shape[2]

    def push(self, seats: slice | NDArray[np.intp], frame: Array) -> None:
        """Add a newest frame."""
        frames = self.frames
        frames[seats, :-1] = frames[seats, 1:]
        frames[seats, -1] = frame[seats]

    def fill(self, seats: NDArray[np.intp], frame: Array) -> None:
        """Make all frames this one."""
        self.frames[seats] = frame[seats, None]

    def show(self, seats: slice | NDArray[np.intp], out: Array) -> None:
        """Write the stacks [n, k·c, height, width], [n, height, width, k·c] or [n, k,
        ...]."""
        frames = self.frames[seats]
        if self._channels_last:
            frames = np.moveaxis(frames, 1, -2)
        out[seats] = frames.reshape(len(frames), *out.shape[1:])


def stacked(space: Space, count: int) -> Space:
    """Return the space of `count` frames of `space`."""
    if count == 1:
        return space
    match space:
        case Dict():
            return Dict(
                {
                    name: part if name == NOT_STACKED else stacked(part, count)
                    for name, part in space.spaces.items()
                }
            )
        case Tuple():
            return Tuple(tuple(stacked(part, count) for part in space.spaces))
        case Box():
            return _stacked_box(space, count)
    return space


def _stacked_box(box: Box, count: int) -> Box:
    shape: tuple[int, ...] = (count, *box.shape)
    axis = 0
    if _is_image(box):
        axis = 2 if box.shape[0] > box.shape[2] else 0
        shape = tuple(n * count if i == axis else n for i, n in enumerate(box.shape))
    bounds = [bound if len(bound) == 1 else _repeat(box, bound, count, axis) for bound in (box.low, box.high)]
    return Box(shape, box.dtype, *bounds)


def _repeat(box: Box, bound: tuple[float, ...], count: int, axis: int) -> tuple[float, ...]:
    return tuple(np.concatenate([np.reshape(bound, box.shape or (1,))] * count, axis).reshape(-1).tolist())


def _is_image(leaf: Box) -> bool:
    return leaf.dtype == "uint8" and len(leaf.shape) == 3
