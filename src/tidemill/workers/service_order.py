"""The contract for orders of service: which of an actor's environments is served next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tidemill.workers.actor_parts import ActorParts
from tidemill.workers.agent import Agent


class ServiceOrder(ABC):
    """An actor's environments with the agents in them, and the order in which they are
    served.

    one_target: all environments are one target, whose seats write one row
    agents: the agents, each with the number of its spec
    ticks: ticks so far
    """

    one_target: ClassVar[bool] = False
    agents: list[tuple[int, Agent]]
    ticks: int = 0

    @classmethod
    @abstractmethod
    def build(cls, parts: ActorParts) -> Self:
        """Return the order over these environments."""

    @abstractmethod
    def serve(self, rounds: int) -> None:
        """Serve so many rounds, fewer when there is nothing left that can be done now.
        Never waits."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Env steps so far: lanes that stepped, resets and lost steps not counted."""

    @property
    def waited(self) -> float | None:
        """Seconds so far, on average over its lanes, in which a lane could have stepped
        and was held back by the trainer; None where no trainer limits steps."""
        return None

    @abstractmethod
    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        """Begin episodes in this stage of the curriculum from now on."""
