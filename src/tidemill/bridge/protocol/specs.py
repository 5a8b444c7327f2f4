"""What groups of agents are, and what goes to and fro: the words that both ends share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import SchemaError

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class RawChannels(Protocol):
    """What stands at an end of the bridge for its side channels: bytes out before each
    hand-over, bytes in after each. See `channels` for framing."""

    def outgoing(self) -> bytes:
        """Return all data to be sent with the hand-over that comes next, and forget them;
        b"" if there are none."""

    def incoming(self, data: bytes) -> None:
        """Take the data that came with a hand-over; not called where none came."""


@dataclass(frozen=True)
class ObservationSpec:
    """One observation: its shape, one to three numbers (a vector is (n,), an image
    (height, width, channels)).

    properties: a number per dimension, as layout 0.3.2 has them (0: unspecified); others
        have none
    kind: 0 default, 1 goal; likewise
    """

    shape: tuple[int, ...]
    properties: tuple[int, ...] = ()
    kind: int = 0

    @cached_property
    def size(self) -> int:
        """Floats of one agent's observation."""
        return prod(self.shape)


@dataclass(frozen=True)
class ActionSpec:
    """Actions of one agent: `continuous_size` floats and one choice per branch, of
    `branches[i]` each. Both at once need layout 0.3.2."""

    continuous_size: int = 0
    branches: tuple[int, ...] = ()

    def zeros(self, agents: int) -> "ActionTuple":
        """Return zeros for as many agents."""
        return ActionTuple(
            np.zeros((agents, self.continuous_size), np.float32),
            np.zeros((agents, len(self.branches)), np.int32),
        )


@dataclass(frozen=True)
class BehaviorSpec:
    """What a group of agents sees and does, and how many rows it may have in a step."""

    observation_specs: tuple[ObservationSpec, ...]
    action_spec: ActionSpec
    max_agents: int


@dataclass
class ActionTuple:
    """Actions of n agents. continuous: float32 [n, continuous_size]; discrete: int32 [n,
    branches]. None where a group has none, or for zeros."""

    continuous: Floats | None = None
    discrete: Ints | None = None


@dataclass(frozen=True)
class DecisionStep:
    """The row of one agent that asks for a decision; `action_mask`: what is forbidden, by
    branch, bool [branch size] each."""

    obs: Sequence[Floats]
    reward: float
    agent_id: int
    action_mask: list[Bools] | None


@dataclass(frozen=True)
class TerminalStep:
    """The row of one agent whose episode is over."""

    obs: Sequence[Floats]
    reward: float
    agent_id: int
    interrupted: bool


class _Rows:
    agent_id: Ints

    def __len__(self) -> int:
        return len(self.agent_id)

    def __iter__(self) -> Iterator[int]:
        """Yield the agents' ids, in the order of the rows."""
        return iter(self.agent_id.tolist())

    def _row(self, agent_id: int) -> int:
        rows = np.flatnonzero(self.agent_id == agent_id)
        if not len(rows):
            raise SchemaError(
                f"agent {agent_id} has no row in this step; those that have: "
                f"{self.agent_id[:20].tolist() or 'none'}"
            )
        return int(rows[0])

    @property
    def agent_id_to_index(self) -> Mapping[int, int]:
        """Rows by agent id."""
        return {int(agent): row for row, agent in enumerate(self.agent_id)}


@dataclass
class DecisionSteps(_Rows):
    """Agents of a group that ask for a decision. Every array is a copy of the caller's
    own.

    obs: per observation float32 [n, *shape]
    reward: float32 [n], since the agent's last decision
    agent_id: int32 [n]
    forbidden: bool [n, sum of the branch sizes], branches side by side; None without
        branches
    branches: their sizes
    """

    obs: Sequence[Floats]
    reward: Floats
    agent_id: Ints
    forbidden: Bools | None = None
    branches: tuple[int, ...] = ()

    @property
    def action_mask(self) -> list[Bools] | None:
        """What is forbidden, by branch: bool [n, branch size] each; None without
        branches."""
        return (
            None
            if self.forbidden is None
            else np.split(self.forbidden, np.cumsum(self.branches)[:-1], axis=1)
        )

    def __getitem__(self, agent_id: int) -> DecisionStep:
        """Return one agent's row."""
        row, masks = self._row(agent_id), self.action_mask
        one = None if masks is None else [mask[row] for mask in masks]
        return DecisionStep([seen[row] for seen in self.obs], float(self.reward[row]), agent_id, one)


@dataclass
class TerminalSteps(_Rows):
    """Agents of a group whose episode is over. Every array is a copy of the caller's own.

    obs, reward, agent_id: as in `DecisionSteps`, the last of the episode
    interrupted: bool [n]: cut (by a limit of steps) and not ended
    """

    obs: Sequence[Floats]
    reward: Floats
    agent_id: Ints
    interrupted: Bools = field(default_factory=lambda: np.zeros(0, bool))

    def __getitem__(self, agent_id: int) -> TerminalStep:
        """Return one agent's row."""
        row = self._row(agent_id)
        return TerminalStep(
            [seen[row] for seen in self.obs], float(self.reward[row]), agent_id, bool(self.interrupted[row])
        )
