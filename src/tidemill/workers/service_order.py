"""The contract of an order of service: which environment of an actor is served next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from tidemill.api.environment import Environment
from tidemill.api.worker import Context
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_context import ActorContext
from tidemill.workers.agent import Agent
from tidemill.workers.sample_writers.base import Seats


class ServiceOrder(ABC):
    """An actor's environments with the agents in them, and the order in which they are
    served.

    one_target: all environments are one target, whose seats write one row
    granted: the trainer grants the steps
    agents: the agents, each with the number of its spec
    ticks: ticks so far
    called: whether a worker of this thread is to have its turn soon
    """

    one_target: ClassVar[bool] = False
    granted: ClassVar[bool] = False
    agents: list[tuple[int, Agent]]
    ticks: int = 0
    called: bool = False

    @classmethod
    @abstractmethod
    def check(cls, context: Context, config: ActorConfig, environment: Environment) -> None:
        """Raise `ConfigError` where agents of `config` cannot play so there."""

    @classmethod
    @abstractmethod
    def build(cls, parts: ActorContext) -> Self:
        """Return the order over these environments."""

    @abstractmethod
    def serve(self, rounds: int) -> None:
        """Serve so many rounds, fewer when there is nothing left that can be done now, or
        the actor is `called`. Never waits."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Env steps so far: lanes that stepped, resets and lost steps not counted."""

    @abstractmethod
    def seats(self, target: int, lane: int | None) -> Sequence[tuple[Agent, Seats]]:
        """Return of each agent spec the agent in that environment, and its seats in a
        `lane` of it; None: in any."""

    def unsent(self) -> int:
        """Return how many env steps stand in rows that are to be trained on, and that no
        sample was sent with."""
        return 0

    def finish(self, on: bool) -> bool:
        """Begin no sample any more, or (`on` False) as ever. True when none is begun that
        could still be sent; by itself always, as where each row goes as it comes."""
        return True

    def look(self) -> None:
        """Look at what may have gone wrong since the last look. Raises what ends the
        run."""

    def stats(self) -> dict[str, float]:
        """Return numbers for the actor's statistics."""
        return {}

    def rest(self) -> str:
        """Return what all environments wait for, in words, which have failed and rest; ""
        where any goes on."""
        return ""

    def end(self) -> None:
        """The actor ends: tell what was kept back until now."""

    @abstractmethod
    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        """Begin episodes in this stage of the curriculum from now on."""
