"""What the parts of one actor share: its targets, their agents, and who serves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.api.environment import Environment
from tidemill.api.spaces import Spaces
from tidemill.api.stream import InferenceClient
from tidemill.api.worker import Context
from tidemill.core.clock import Clock
from tidemill.streams.samples import sample_producer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec
from tidemill.workers.inference_clients import ClientKey
from tidemill.workers.info_numbers import InfoReader
from tidemill.workers.parameter_refresh import ParameterRefresh
from tidemill.workers.row_schema import limit_of_steps, row_schema, sample_schema
from tidemill.workers.sample_writers.base import WriterTerms
from tidemill.workers.stages import ActorStages


@dataclass(frozen=True)
class ActorContext:
    """What the parts of one actor share.

    environments: one per target
    groups: the agents of each spec
    spaces: what these see and do
    clients: who answers their requests
    refresh: says when these take new parameters
    flush: function that sends (or, inline, computes) the requests where at least so many
        are buffered; True when any was sent
    info_reader: takes what environments say of episodes
    tell: takes a text for the user
    stages: says in which stage of the curriculum episodes begin
    ticked: takes how many seconds of the actor's thread an environment has taken for a
        tick, and whether any lane was reset in it
    failed: takes the fault that an environment, by the number of its target, is about to
        end the actor with
    """

    context: Context
    config: ActorConfig
    environments: Sequence[Environment]
    groups: Sequence[Sequence[int]]
    spaces: Sequence[Spaces]
    clients: Mapping[ClientKey, InferenceClient]
    refresh: ParameterRefresh
    flush: Callable[[int], bool]
    clock: Clock
    info_reader: InfoReader
    tell: Callable[[str], None]
    stages: ActorStages
    ticked: Callable[[float, bool], None]
    failed: Callable[[int, Exception], None]

    def client(self, spec: PlayerSpec, target: int) -> InferenceClient:
        """Return who answers the requests of `spec` in `target`."""
        return self.clients[ClientKey.of(spec, target)]

    def terms(self, number: int, seats: int, target: int) -> WriterTerms:
        """Return what the rows of spec `number` are written by, `seats` of them in a tick
        of `target`."""
        context, config, environment = self.context, self.config, self.environments[target]
        spec, own = config.agents[number], self.spaces[number]
        row = row_schema(context, spec, own, environment.info)
        limit, same_step = limit_of_steps(spec, environment), environment.same_step
        return WriterTerms(
            spec,
            row,
            sample_schema(spec, row, len(environment.agents) - len(self.groups[number])),
            seats,
            spec.writer().sizes(spec, seats, limit, same_step, config.slots),
            same_step,
            sample_producer(context, spec.streams, target),
            self.refresh.sample_sent,
        )
