"""The simulator's end in Python: worlds, in which agents request decisions, and their
answers.

Rows are written into arrays of its own and copied over at the exchange: filled in place,
each would be fetched from the other core's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tidemill.bridge.protocol.image import check_spec
from tidemill.bridge.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    Floats,
    Ints,
    ObservationSpec,
)
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.bridge.world_side.requests import AgentRows, WorldRequests
from tidemill.core.errors import SchemaError

Heuristic = Callable[[Ints, list[Floats]], ActionTuple]


@dataclass(frozen=True)
class ActionEvent:
    """The action of one agent. continuous: float32 [continuous_size]; discrete: int32
    [branches]."""

    agent_id: int
    continuous: Floats
    discrete: Ints


class Request:
    """A row of a world that is being filled. Its methods return it, so that calls chain;
    what is not set is zero, and nothing is forbidden."""

    __slots__ = ("_row", "_rows", "_world")

    def __init__(self, world: "World", rows: AgentRows, agent_id: int) -> None:
        self._world, self._rows, self._row = world, rows, world.requests.take(agent_id, rows)

    def set_reward(self, reward: float) -> "Request":
        """Set the reward since the agent's last decision."""
        self._rows.reward[self._row] = reward
        return self

    def set_observation(self, index: int, values: ArrayLike) -> "Request":
        """Set an observation, by numbers or an array of its shape or size."""
        target = _at(self._rows.obs, index, self._world.name, "observation")[self._row]
        try:
            target[...] = np.asarray(values, np.float32).reshape(target.shape)
        except ValueError:
            raise SchemaError(
                f'world "{self._world.name}": observation {index} takes numbers of shape '
                f"{list(target.shape)}, not {list(np.shape(values))}"
            ) from None
        return self

    def set_action_mask(self, branch: int, forbidden: ArrayLike) -> "Request":
        """Forbid actions of a branch: a bool per action."""
        world = self._world
        size = _at(world.spec.action_spec.branches, branch, world.name, "branch")
        flags = np.asarray(forbidden, bool)
        if flags.shape != (size,):
            raise SchemaError(
                f'world "{world.name}": the mask of branch {branch} is a bool for each of {size} actions, '
                f"not {list(flags.shape)}"
            )
        start = sum(world.spec.action_spec.branches[:branch])
        self._rows.masks[self._row, start : start + size] = flags
        return self


def _at(items: Sequence[Any], index: int, world: str, what: str) -> Any:
    if not 0 <= index < len(items):
        raise SchemaError(f'world "{world}" has no {what} {index}; it has {len(items)}, counted from 0')
    return items[index]


class World:
    """A group of agents. Threads may make requests at once; `Bridge.exchange` is called
    when they are done.

    name: 1 to 63 ASCII characters
    max_agents: requests per exchange, and as many ends of episodes; in layout 0 those
        included
    observations: shapes, of one to three numbers each
    continuous_size, branches: what an agent does: floats, and a choice per branch; both
        at once need a trainer with layout 0.3.2
    heuristic: acts where there is no trainer: given agent ids [n] and observations [n,
        *shape] each, it returns n agents' actions; None: zeros
    on_action: function that is called with every `ActionEvent` at the end of an exchange
    """

    def __init__(
        self,
        name: str,
        max_agents: int,
        observations: Sequence[tuple[int, ...] | ObservationSpec],
        continuous_size: int = 0,
        branches: Sequence[int] = (),
        heuristic: Heuristic | None = None,
        on_action: Callable[[ActionEvent], None] | None = None,
    ) -> None:
        specs = tuple(
            one if isinstance(one, ObservationSpec) else ObservationSpec(tuple(one)) for one in observations
        )
        self.name = name
        self.spec = BehaviorSpec(specs, ActionSpec(continuous_size, tuple(branches)), max_agents)
        check_spec(LAYOUTS["0.3.2"], name, self.spec)
        self.requests = WorldRequests(name, self.spec)
        self._heuristic, self._on_action = heuristic, on_action
        self._none()

    def request_decision(self, agent_id: int) -> Request:
        """Ask for an action; the row's other values follow by the request's methods."""
        return Request(self, self.requests.asks, agent_id)

    def end_episode(self, agent_id: int) -> Request:
        """Say that the agent's episode ended; its last reward and observation follow by
        the request's methods. No action comes."""
        return Request(self, self.requests.ends, agent_id)

    def interrupt_episode(self, agent_id: int) -> Request:
        """Say that the agent's episode was cut, by a limit of steps; likewise."""
        request = Request(self, self.requests.ends, agent_id)
        self.requests.ends.cut[request._row] = True
        return request

    def request_decisions(
        self,
        agent_ids: ArrayLike,
        rewards: ArrayLike,
        observations: Sequence[ArrayLike],
        masks: Sequence[ArrayLike] = (),
    ) -> None:
        """Ask for the actions of n agents: ids [n], rewards [n], observations [n, *shape]
        each, masks bool [n, branch size] each, or none.

        One thread at a time.
        """
        ids = self.requests.ids(agent_ids)
        flags = [np.asarray(mask, bool) for mask in masks]
        wanted = [(len(ids), size) for size in self.spec.action_spec.branches]
        if flags and [mask.shape for mask in flags] != wanted:
            raise SchemaError(
                f'world "{self.name}": masks of {len(ids)} agents are of shapes {wanted}, not '
                f"{[mask.shape for mask in flags]}"
            )
        rows = self._fill(ids, rewards, observations, self.requests.asks)
        if flags:
            self.requests.asks.masks[rows] = np.concatenate(flags, axis=1)

    def end_episodes(
        self,
        agent_ids: ArrayLike,
        rewards: ArrayLike,
        observations: Sequence[ArrayLike],
        interrupted: ArrayLike = False,
    ) -> None:
        """End the episodes of n agents; `interrupted` is a bool for all or one for each.
        One thread at a time."""
        ids, cut = self.requests.ids(agent_ids), np.asarray(interrupted, bool)
        if cut.shape not in ((), ids.shape):
            raise SchemaError(
                f'world "{self.name}": interrupted is a bool for all agents, or one for each, and not of '
                f"shape {list(cut.shape)}"
            )
        self.requests.ends.cut[self._fill(ids, rewards, observations, self.requests.ends)] = cut

    def actions(self) -> Iterator[ActionEvent]:
        """Yield what the last exchange brought, agents in the order of their requests;
        nothing after a reset."""
        for agent, continuous, discrete in zip(
            self._agents.tolist(), self._continuous, self._discrete, strict=True
        ):
            yield ActionEvent(agent, continuous, discrete)

    def action_arrays(self) -> tuple[Ints, Floats, Ints]:
        """Return it as arrays: agent ids [n], continuous [n, size], discrete [n,
        branches]."""
        return self._agents, self._continuous, self._discrete

    def _fill(
        self, ids: NDArray[Any], rewards: ArrayLike, observations: Sequence[ArrayLike], rows: AgentRows
    ) -> slice:
        if len(observations) != len(rows.obs):
            raise SchemaError(
                f'world "{self.name}" has {len(rows.obs)} observations, not {len(observations)}'
            )
        agents = len(ids)
        given = [
            values if isinstance(values, np.ndarray) else np.asarray(values, np.float32)
            for values in (rewards, *observations)
        ]
        wanted = [(agents,), *((agents, *target.shape[1:]) for target in rows.obs)]
        for number, (values, shape) in enumerate(zip(given, wanted, strict=True)):
            if values.shape != shape:
                what = f"observation {number - 1}" if number else "the rewards"
                raise SchemaError(
                    f'world "{self.name}": {what} of {agents} agents must be of shape {list(shape)}, not '
                    f"{list(values.shape)}"
                )
        taken = self.requests.take_many(ids, rows)
        for target, values in zip((rows.reward, *rows.obs), given, strict=True):
            target[taken] = values
        return taken

    # What the bridge does with it.

    def act_alone(self) -> None:
        """Answer all requests without a trainer."""
        asks, rows = self.requests.asks, len(self.requests.asks)
        agents = asks.agent_id[:rows].copy()
        action = ActionTuple()
        if self._heuristic is not None and rows:
            action = self._heuristic(agents, [array[:rows].copy() for array in asks.obs])
        spec, given = self.spec.action_spec, (action.continuous, action.discrete)
        shapes = (rows, spec.continuous_size), (rows, len(spec.branches))
        kinds: tuple[Any, Any] = (np.float32, np.int32)
        continuous, discrete = (
            np.zeros(shape, kind) if one is None else np.asarray(one, kind)
            for one, shape, kind in zip(given, shapes, kinds, strict=True)
        )
        if (continuous.shape, discrete.shape) != shapes:
            raise SchemaError(
                f'world "{self.name}": its heuristic returned actions of shapes {list(continuous.shape)} and '
                f"{list(discrete.shape)}, not {list(shapes[0])} and {list(shapes[1])}"
            )
        self.answer(agents, continuous, discrete)

    def answer(self, agents: NDArray[Any], continuous: Floats, discrete: Ints) -> None:
        """Take the actions, and be ready for new requests."""
        self.requests.clear()
        self._agents, self._continuous, self._discrete = agents, continuous, discrete
        if self._on_action is not None:
            for event in self.actions():
                self._on_action(event)

    def drop(self) -> None:
        """Drop all requests and actions."""
        self.requests.clear()
        self._none()

    def _none(self) -> None:
        spec = self.spec.action_spec
        self.answer(
            np.zeros(0, np.int32),
            np.zeros((0, spec.continuous_size), np.float32),
            np.zeros((0, len(spec.branches)), np.int32),
        )
