"""What orders of service of a replay memory's actors have in common: the trainer grants
the steps, and slots may fail."""

from abc import abstractmethod
from typing import ClassVar

from tidemill.api.environment import Environment, EnvironmentConfig
from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError
from tidemill.replay_training.slot_fault_notices import SlotFaults
from tidemill.streams.credits import Credits
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec
from tidemill.workers.service_order import ServiceOrder


class GrantedOrder(ServiceOrder):
    """What the orders of service have in common whose steps the trainer grants:
    environments of one agent."""

    granted: ClassVar[bool] = True
    faults: SlotFaults
    """What went wrong in the slots."""

    @property
    @abstractmethod
    def waited(self) -> float:
        """Seconds so far, on average over its lanes, in which a lane could have stepped
        and was held back by the trainer."""

    def look(self) -> None:
        self.faults.look()

    def stats(self) -> dict[str, float]:
        return {**self.faults.stats(), "slots/waited": self.waited}

    def rest(self) -> str:
        return self.faults.rest()

    def end(self) -> None:
        self.faults.end()

    @classmethod
    def check(cls, context: Context, config: ActorConfig, environment: Environment) -> None:
        (spec,) = config.agents
        cause, cure = replay_obstacle(config.environment, environment)
        if cause:
            raise ConfigError(f"{type(config).__name__} {cause}; {cure}")
        if sum(len(context.experiment.granting(stream)) for stream in spec.streams) > 1:
            raise ConfigError(
                f"samples = {spec.streams}: two trainers with a ratio would hold the steps of one actor "
                "back; let one of them do"
            )


def replay_obstacle(config: EnvironmentConfig, environment: Environment) -> tuple[str, str]:
    """Return why no replay memory can be filled from `environment`, which `config` built,
    and what to do, after "ReplayActors"; ("", "") where one can."""
    if len(environment.agents) > 1:
        return (
            f"go with environments of one agent, and this one has {len(environment.agents)}: a ratio counts "
            "steps of the environment, and none says how many transitions of several agents are one",
            "train several agents by an algorithm without a ratio (PPO, IMPALA) and Actors, or take an "
            "environment of one agent",
        )
    if environment.same_step:
        cause = (
            "send one row in a tick, and this environment may end an episode and begin the next within one, "
            "which are two"
        )
        return cause, config.bare().one_row
    return "", ""


def credits_of(context: Context, spec: PlayerSpec) -> Credits | None:
    """Return the credits of this actor for the steps of `spec`, None where nobody limits
    them."""
    for stream in spec.streams:
        for edge in context.edges(f"credits/{stream}/"):
            return Credits(context.endpoints.reader(edge.name))
    return None


def in_turn(context: Context, spec: PlayerSpec) -> bool:
    """True when the steps of `spec` are granted in turn."""
    return any(port.in_turn for stream in spec.streams for port in context.experiment.granting(stream))
