"""Whom an actor asks for actions: an inference client for all agents that play one policy
with the same parameters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from tidemill.api.control_messages import AnsweredBy
from tidemill.api.edges import inference_edges
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.api.transport import Consumer, Producer
from tidemill.api.worker import Context
from tidemill.core.clock import Clock
from tidemill.nets.weights import placeholder_weights
from tidemill.streams.inference import ChannelInferenceClient
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import Subscription
from tidemill.streams.sources import ParameterSource
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import INLINE, PlayerSpec


class ClientKey(NamedTuple):
    """What agents must have in common to be answered by one client. What is drawn is
    drawn for each target (`target`, None where nothing is)."""

    inference: str
    policy: str
    parameters: ParameterSource
    target: int | None

    @classmethod
    def of(cls, spec: PlayerSpec, target: int) -> "ClientKey":
        """Return the key of `spec` in `target`."""
        return cls(spec.inference, spec.policy, spec.parameters, target if spec.parameters.varies else None)


def make_clients(
    context: Context,
    config: ActorConfig,
    spaces: Sequence[Spaces],
    rows: Sequence[int],
    targets: int,
    clock: Clock,
) -> dict[ClientKey, InferenceClient]:
    """Return the clients of an actor that has so many `targets`. `spaces` has what the
    agents of each spec see and do, `rows` how many rows they may ask for in a tick of one
    target."""
    most: Counter[ClientKey] = Counter()
    of_key: dict[ClientKey, Spaces] = {}
    for target in range(targets):
        for spec, own, count in zip(config.agents, spaces, rows, strict=True):
            key = ClientKey.of(spec, target)
            most[key] += count
            of_key.setdefault(key, own)
    sources: dict[tuple[str, ParameterSource], Subscription] = {}
    return {key: _make(context, config, key, own, most[key], sources, clock) for key, own in of_key.items()}


def turn_to(context: Context, clients: Mapping[ClientKey, InferenceClient], message: AnsweredBy) -> None:
    """Have the client that asks for a policy on a stream ask another server."""
    for key, client in clients.items():
        if (key.inference, key.policy) == (message.stream, message.policy):
            assert isinstance(client, ChannelInferenceClient)
            client.turn_to(*_channels(context, message.stream, message.policy, message.server))


def _channels(context: Context, stream: str, policy: str, spare: str = "") -> tuple[Producer, Consumer]:
    requests, answers = inference_edges(stream, context.name, policy, spare)
    return context.endpoints.producer(requests), context.endpoints.consumer(answers)


def _make(
    context: Context,
    config: ActorConfig,
    key: ClientKey,
    spaces: Spaces,
    rows: int,
    sources: dict[tuple[str, ParameterSource], Subscription],
    clock: Clock,
) -> InferenceClient:
    name = key.policy
    policy = context.experiment.policies[name]
    observation = schema_of_space(spaces.observation, "obs")
    answer, state = policy.answer(spaces), policy.state(spaces)
    if key.inference != INLINE:
        requests, answers = _channels(context, key.inference, name)
        in_flight = config.ring * len(config.agents)
        # all of a run that resumes exactly live again together: nobody is asked any more
        life = 0 if context.experiment.exact_resume else context.life
        return ChannelInferenceClient(requests, answers, observation, state, rows, in_flight, life)
    with placeholder_weights() if key.parameters.from_start else nullcontext():
        built = policy.build(spaces, context.seed("policy", name))
    if (name, key.parameters) not in sources:
        rng = np.random.default_rng(context.seed("parameters", name))
        sources[name, key.parameters] = key.parameters.build(context, name, rng)
    index = list(context.experiment.policies).index(name)
    return InlineInferenceClient(
        built, index, sources[name, key.parameters], answer, state, observation, rows, clock
    )
