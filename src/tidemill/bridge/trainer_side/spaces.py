"""From what a group of agents sees and does to Tidemill's spaces, and rows from the one
to the other.

An observation is a Box; several are a Dict of ``observation_0``, ``observation_1``, …;
beside an action mask one alone is called ``observation``. A mask is part ``action_mask``,
int8, 1: allowed (the simulator's are 1: forbidden), the branches side by side. Actions
are a Box of -1 … 1, a Discrete (one branch), a MultiDiscrete (several), or a Dict of
``continuous`` and ``discrete``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Spaces
from tidemill.bridge.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DecisionSteps,
    ObservationSpec,
    TerminalSteps,
)
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays

MASK = "obs.action_mask"


@dataclass(frozen=True, kw_only=True)
class Group(Config):
    """A group of agents that is declared beforehand, and so may appear at any later step.

    name: what the simulator calls it
    max_agents: how many rows it may have in an exchange
    observations: the shape of each observation
    continuous: number of continuous actions
    branches: number of choices in each branch of the discrete actions
    """

    name: str
    max_agents: int
    observations: tuple[tuple[int, ...], ...]
    continuous: int = 0
    branches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_agents < 1 or not self.observations:
            raise ConfigError(
                f'group "{self.name}": max_agents = {self.max_agents} must be at least 1, and there must be '
                "an observation"
            )

    def spec(self) -> BehaviorSpec:
        """Return it as the bridge has it."""
        return BehaviorSpec(
            tuple(ObservationSpec(tuple(shape)) for shape in self.observations),
            ActionSpec(self.continuous, tuple(self.branches)),
            self.max_agents,
        )

    @classmethod
    def of(cls, name: str, spec: BehaviorSpec) -> "Group":
        """Return what declares a group of this spec."""
        action = spec.action_spec
        shapes = tuple(tuple(seen.shape) for seen in spec.observation_specs)
        return cls(
            name=name,
            max_agents=spec.max_agents,
            observations=shapes,
            continuous=action.continuous_size,
            branches=tuple(action.branches),
        )


@dataclass
class Form:
    """How the rows of one group are written and its actions are read. `observations`
    names the leaf of each observation."""

    spaces: Spaces
    observations: list[str]
    branches: tuple[int, ...]
    continuous: int

    def __post_init__(self) -> None:
        self.hybrid = bool(self.branches) and self.continuous > 0

    def observe(self, steps: DecisionSteps | TerminalSteps, which: Any, target: Arrays, rows: Any) -> None:
        """Write the observations of these rows of `steps` (an index) into `target`
        [rows]. What is over may do anything."""
        for name, seen in zip(self.observations, steps.obs, strict=True):
            target[name][rows] = seen[which]
        if not self.branches:
            return
        if isinstance(steps, TerminalSteps) or steps.forbidden is None:
            target[MASK][rows] = 1
        else:
            target[MASK][rows] = ~steps.forbidden[which]

    def empty(self, agents: int) -> ActionTuple:
        """Return actions of so many agents, zeros."""
        return ActionTuple(
            np.zeros((agents, self.continuous), np.float32) if self.continuous else None,
            np.zeros((agents, len(self.branches)), np.int32) if self.branches else None,
        )

    def act(self, actions: Arrays, rows: Any, which: Any, out: ActionTuple) -> None:
        """Read these rows of a policy's `actions` into `out` [which]."""
        if out.continuous is not None:
            given = actions["action.continuous" if self.hybrid else "action"][rows]
            out.continuous[which] = np.maximum(np.minimum(given, 1), -1)
        if out.discrete is not None:
            chosen: NDArray[Any] = actions["action.discrete" if self.hybrid else "action"][rows]
            out.discrete[which] = chosen.reshape(len(chosen), len(self.branches))


def form_of(spec: BehaviorSpec) -> Form:
    """Return the form, and in it the spaces, of a group."""
    action = spec.action_spec
    continuous, branches = action.continuous_size, tuple(action.branches)
    if not continuous and not branches:
        raise ConfigError("a group without any action cannot be trained; give its agents one")
    if not spec.observation_specs:
        raise ConfigError("a group without any observation cannot be trained; let its agents see something")
    boxes: list[Space] = [Box(tuple(seen.shape), "float32") for seen in spec.observation_specs]
    names = [f"observation_{number}" for number in range(len(boxes))] if len(boxes) > 1 else ["observation"]
    parts = dict(zip(names, boxes, strict=True))
    if branches:
        parts["action_mask"] = Box((sum(branches),), "int8", (0.0,), (1.0,))
    plain = len(parts) == 1
    moves: list[Space] = []
    if continuous:
        moves.append(Box((continuous,), "float32", (-1.0,), (1.0,)))
    if branches:
        moves.append(Discrete(branches[0]) if len(branches) == 1 else MultiDiscrete(branches))
    acts = moves[0] if len(moves) == 1 else Dict(dict(zip(("continuous", "discrete"), moves, strict=True)))
    return Form(
        spaces=Spaces(boxes[0] if plain else Dict(parts), acts),
        observations=["obs"] if plain else [f"obs.{name}" for name in names],
        branches=branches,
        continuous=continuous,
    )


def describe(specs: Sequence[tuple[str, BehaviorSpec]]) -> str:
    """Return groups in words, for messages."""
    return "; ".join(repr(Group.of(name, spec)) for name, spec in specs) or "none"
