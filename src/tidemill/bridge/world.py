"""The simulator's end in Python: worlds in which agents request decisions, and the bridge that exchanges them for actions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import ArrayLike

from tidemill.bridge.specs import ActionTuple, Floats, Ints, ObservationSpec, RawChannels


@dataclass(frozen=True)
class ActionEvent:
    """The action of one agent. continuous: float32 [continuous_size]; discrete: int32 [branches]. Copies, of the receiver's own."""

    agent_id: int
    continuous: Floats
    discrete: Ints


class Request:
    """A row of a world that is being filled. All methods return it, so that calls chain."""

    def set_reward(self, reward: float) -> "Request":
        """Set the reward since the agent's last decision; 0 without it."""
        raise NotImplementedError

    def set_observation(self, index: int, values: ArrayLike) -> "Request":
        """Set an observation, as numbers or an array of its shape or size; zeros without it."""
        raise NotImplementedError

    def set_action_mask(self, branch: int, forbidden: ArrayLike) -> "Request":
        """Forbid actions of a branch: a bool per action, or the numbers of the forbidden ones. All are allowed without it."""
        raise NotImplementedError


class World:
    """A group of agents. Threads may request decisions at once; `Bridge.exchange` is called when they are done.

    name          at most 63 ASCII characters
    max_agents    rows per exchange, those of ended episodes included
    observations  shapes, of one to three numbers each
    continuous_size, branches  what an agent does; both at once need a trainer with layout 0.3.2
    heuristic     without a trainer: given (agent_ids, observations) of n agents it returns their `ActionTuple`; None: zeros
    """

    def __init__(
        self,
        name: str,
        max_agents: int,
        observations: Sequence[tuple[int, ...] | ObservationSpec],
        continuous_size: int = 0,
        branches: Sequence[int] = (),
        heuristic: Callable[[Ints, list[Floats]], ActionTuple] | None = None,
    ) -> None:
        raise NotImplementedError

    def request_decision(self, agent_id: int) -> Request:
        """Ask for an action; the row's other values follow by the request's methods."""
        raise NotImplementedError

    def end_episode(self, agent_id: int) -> Request:
        """Say that the agent's episode ended; final reward and observation follow by the request's methods. No action comes."""
        raise NotImplementedError

    def interrupt_episode(self, agent_id: int) -> Request:
        """Say that the agent's episode was cut, by a limit of steps; likewise."""
        raise NotImplementedError

    def request_decisions(
        self, agent_ids: ArrayLike, rewards: ArrayLike, observations: Sequence[ArrayLike], masks: Sequence[ArrayLike] | None = None
    ) -> None:
        """Ask for the actions of n agents at once: ids [n], rewards [n], observations [n, *shape] each, masks bool [n, branch size] each."""
        raise NotImplementedError

    def end_episodes(self, agent_ids: ArrayLike, rewards: ArrayLike, observations: Sequence[ArrayLike], interrupted: ArrayLike = False) -> None:
        """End n episodes at once."""
        raise NotImplementedError

    def actions(self) -> Iterator[ActionEvent]:
        """Yield the actions that the last exchange brought, in the order of the requests; none after a reset."""
        raise NotImplementedError

    def action_arrays(self) -> tuple[Ints, Floats, Ints]:
        """Return them as arrays: agent ids [n], continuous [n, size], discrete [n, branches]."""
        raise NotImplementedError


class Bridge:
    """Joins worlds and a trainer, where there is one.

    memory_path  the file at which the two meet; None: what follows `--memory-path` on the command line, else the editor's default file if a
                 trainer waits there, else no trainer: heuristics act
    channels     stands for this end's side channels
    on_reset     called when the trainer resets; pending requests of all worlds were dropped
    """

    def __init__(
        self,
        memory_path: str | Path | None = None,
        *,
        channels: RawChannels | None = None,
        on_reset: Callable[[], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer acts, and not heuristics."""
        raise NotImplementedError

    def add(self, world: World) -> World:
        """Register a world; the trainer sees it at the next exchange. At any time."""
        raise NotImplementedError

    def world(self, name: str) -> World:
        """Return the world of that name."""
        raise NotImplementedError

    def exchange(self) -> bool:
        """Hand all requests over, wait for the actions. Without any request it returns at once, and the trainer goes on waiting.

        Returns False once the trainer has closed or died; `reason` says which. Heuristics act from then on.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Tell the trainer that this simulator ends."""
        raise NotImplementedError
