"""The configuration of actors that fill a replay memory."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import INLINE, PLAYED, PlayerSpec

if TYPE_CHECKING:
    from tidemill.workers.sample_writers.base import SampleWriter
    from tidemill.workers.service_order import ServiceOrder


@dataclass(frozen=True, kw_only=True)
class TransitionSpec(PlayerSpec):
    """A transition spec says how actors of a replay memory play their one agent."""

    def writer(self) -> "type[SampleWriter]":
        from tidemill.replay_training.transitions import Transitions

        return Transitions


@dataclass(frozen=True, kw_only=True)
class ReplayActors(ActorConfig):
    """Actor workers for a replay memory step environments of one agent, and send each
    step of each lane as soon as the environment has answered, whatever the others do. The
    trainer grants the steps (`ReplayTrainer.ratio`), and each is taken by its newest
    policy. One whose environment keeps failing *rests*: it is tried again after longer
    and longer pauses (`Slots`).

    policy: name of the policy that plays
    inference: "inline" (the actor computes) or the name of an inference stream (policy
        workers do)
    samples: name of the sample stream, or several names: each gets every step
    frame_stack: the policy sees, and rows hold, so many of the newest observations; 1:
        the newest. A `Replay` of the same frame_stack keeps them as single frames
    """

    policy: str = "policy"
    inference: str = INLINE
    samples: str | tuple[str, ...] = "samples"
    frame_stack: int = 1

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("samples is empty: name the stream that the replay memory takes steps from")
        super().__post_init__()

    @property
    def agents(self) -> tuple[TransitionSpec]:
        return (
            TransitionSpec(
                policy=self.policy,
                inference=self.inference,
                samples=self.samples,
                frame_stack=self.frame_stack,
            ),
        )

    def service_order(self, context: Context) -> "type[ServiceOrder]":
        from tidemill.replay_training.exact import ExactRing
        from tidemill.replay_training.granted_order import in_turn
        from tidemill.replay_training.ready_environments import ReadyBatch

        return ExactRing if in_turn(context, self.agents[0]) else ReadyBatch

    @classmethod
    def like(cls, actors: ActorConfig, spec: PlayerSpec) -> Self:
        """Return actors that step as `actors` do and play as `spec` says."""
        settings = {field.name: getattr(actors, field.name) for field in fields(ActorConfig)}
        return cls(**settings, **{name: getattr(spec, name) for name in PLAYED})
