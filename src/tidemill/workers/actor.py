"""The actor worker: steps environments in a ring and sends their rows as samples.

One poll turns the ring up to 16 times. At each target: begin a tick when no agent waits, and finish it when its environment has answered; then flush
the requests when enough are buffered, or when nothing can proceed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.control import Episodes, Facts, SampleFacts
from tidemill.api.edges import Port
from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.experiment import Context, WorkerConfig
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.memory import Need, available, check_memory, held
from tidemill.core.schema import Field, Schema, layout
from tidemill.core.seeding import derive_seed
from tidemill.streams.inference import ChannelInferenceClient
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.streams.samples import sample_producer
from tidemill.workers.agent import Agent
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.ring import EnvRing, EnvTarget

MAX_POLL_STEPS = 16
MANY_LANES = 256  # an actor with as many or more looks first whether they fit
TELLING = 8 << 20  # bytes by which a process must grow before it is taken for the cost of its lanes
PULL_TICKS = 128  # an actor that meets no sample boundary (or reset of a single lane) for so many ticks takes new parameters all the same

INLINE = "inline"


@dataclass(frozen=True, kw_only=True)
class AgentSpec(Config):
    """Which agents of an environment are played by which policy, and what becomes of their rows.

    match          regular expression, full match on an agent's name or index; the first spec that matches wins
    policy         name of the policy
    inference      "inline" (the actor computes) or the name of an inference stream (policy workers do)
    samples        name of the sample stream, None to keep nothing
    sample_steps   rows by which one sample advances; each holds burn_in more before them and bootstrap more behind
    deterministic  ask for the mode of the policy's distribution
    """

    match: str = ".*"
    policy: str = "policy"
    inference: str = INLINE
    samples: str | None = "samples"
    sample_steps: int = 128
    burn_in: int = 0
    bootstrap: int = 1
    deterministic: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ConfigError(f'match = "{self.match}" is not a regular expression: {error}') from None
        if self.sample_steps < 1 or self.bootstrap < 1 or self.burn_in < 0:
            raise ConfigError(
                f"sample_steps = {self.sample_steps}, bootstrap = {self.bootstrap} (both at least 1: the last row lends its value to the one before) "
                f"and burn_in = {self.burn_in} (at least 0) cannot be"
            )

    @property
    def rows(self) -> int:
        """Rows of one sample."""
        return self.burn_in + self.sample_steps + self.bootstrap


@dataclass(frozen=True, kw_only=True)
class Actors(WorkerConfig):
    """Actor workers.

    environment        what they step
    lanes              copies of the environment in one target, stepped together
    ring               targets in turn: more than 1 lets an actor step one while another waits for answers
    max_episode_steps  step limit per episode, 0 for none: episodes are cut (truncated) there
    flush_requests     requests buffered before they are sent; fewer go out when nothing else can proceed
    slots              sample slots per stream: one is filled while the others are trained on; fewer mean fresher samples
    """

    order: ClassVar[int] = 6
    owns_environment: ClassVar[bool] = True

    environment: EnvironmentConfig
    agents: tuple[AgentSpec, ...] = (AgentSpec(),)
    lanes: int = 64
    ring: int = 1
    max_episode_steps: int = 0
    flush_requests: int = 1
    slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("lanes", 1), ("ring", 1), ("max_episode_steps", 0), ("flush_requests", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least}")
        if not self.agents:
            raise ConfigError("agents is empty: an actor needs at least one AgentSpec")
        streams = [spec.samples for spec in self.agents if spec.samples]
        if len(set(streams)) < len(streams):
            raise ConfigError(f"two agent specs use one sample stream ({', '.join(streams)}); give each its own")
        asked: dict[str, str] = {}
        for spec in self.agents:
            if spec.inference != INLINE and asked.setdefault(spec.inference, spec.policy) != spec.policy:
                raise ConfigError(
                    f'inference stream "{spec.inference}" is asked for policies "{asked[spec.inference]}" and "{spec.policy}"; give each its own'
                )

    def ports(self) -> tuple[Port, ...]:
        ports = []
        for spec in self.agents:
            if spec.samples is not None:
                ports.append(Port(spec.samples, "produce", outlets=self.ring))
            ports.append(Port(spec.policy, "subscribe") if spec.inference == INLINE else Port(spec.inference, "ask", policy=spec.policy))
        return tuple(dict.fromkeys(ports))

    def build(self, context: Context) -> "ActorWorker":
        return ActorWorker(context, self)


def match_agents(agents: Sequence[AgentInfo], specs: Sequence[AgentSpec]) -> list[list[int]]:
    """Return for each spec the indices of its agents. Raises `ConfigError` for an agent or a spec without a match, or unequal spaces in one spec."""
    groups: list[list[int]] = [[] for _ in specs]
    for index, agent in enumerate(agents):
        for spec, group in zip(specs, groups, strict=True):
            if re.fullmatch(spec.match, agent.name) or re.fullmatch(spec.match, str(index)):
                group.append(index)
                break
        else:
            patterns = ", ".join(f'"{spec.match}"' for spec in specs)
            raise ConfigError(f'no agent spec ({patterns}) matches agent {index} "{agent.name}"; widen one, or add AgentSpec(match="{agent.name}")')
    for spec, group in zip(specs, groups, strict=True):
        if not group:
            hint = did_you_mean(spec.match, (a.name for a in agents))
            raise ConfigError(f'agent spec "{spec.match}" matches no agent that an earlier spec left; {hint}')
        first = agents[group[0]]
        for index in group:
            if agents[index].spaces != first.spaces:
                raise ConfigError(
                    f'agents "{first.name}" and "{agents[index].name}" have different spaces but one agent spec "{spec.match}"; give each kind a spec'
                )
    return groups


def _check(config: Actors, environment: Environment, spaces: Sequence[Spaces]) -> None:
    """Raise `ConfigError` for what only the environment tells is impossible."""
    played: dict[str, tuple[AgentSpec, Spaces]] = {}
    for spec, own in zip(config.agents, spaces, strict=True):
        other, theirs = played.setdefault(spec.policy, (spec, own))
        if own != theirs:
            raise ConfigError(
                f'agent specs "{other.match}" and "{spec.match}" play policy "{spec.policy}", but their agents have different spaces; '
                "give each kind a policy"
            )
    if config.max_episode_steps and not environment.resets_any:
        raise ConfigError(
            f"max_episode_steps = {config.max_episode_steps}: this environment resets finished lanes by itself and no others, so that we cannot cut "
            "its episodes; set the limit in the environment"
        )


def row_schema(context: Context, spec: AgentSpec, spaces: Spaces, info: Schema) -> dict[str, Field]:
    """Return the fields of a row of `spec`."""
    policy = context.experiment.policies[spec.policy]
    return {
        **schema_of_space(spaces.observation, "obs"),
        **ROW_FIELDS,
        **policy.answer(spaces),
        **policy.state(spaces),
        **{f"info.{name}": field for name, field in info.items()},
    }


def memory_needs(context: Context, config: Actors, environment: Environment) -> list[Need]:
    """Return the memory that one actor's rows will take: the slots of its streams, its own arrays, and what a trainer copies out of a sample.

    `environment` may have fewer lanes than it is going to have. Offering a slot touches none of its pages, so that this can be refused later.
    """
    needs = []
    lanes, ring = config.lanes, config.ring
    for spec, group in zip(config.agents, match_agents(environment.agents, config.agents), strict=True):
        spaces, seats = environment.agents[group[0]].spaces, lanes * len(group)
        schema = row_schema(context, spec, spaces, environment.info)
        row = sum(field.nbytes for field in schema.values())
        per_row = f"{seats:,} seats x {row:,} bytes" + f" x ring {ring}" * (ring > 1)
        kept = spec.burn_in + spec.bootstrap + 3  # rows carried over from block to block, in a tick and in a request
        if environment.same_step or spec.samples is None:
            kept += spec.rows  # a block of its own, since seats get out of step
        needs.append(Need("actors' own rows", ring * layout(schema, (kept, seats))[1], f"{kept:,} rows x {per_row}"))
        if spec.samples is not None:
            block = ring * layout(schema, (spec.rows, seats))[1]
            channels = len(context.edges(f"samples/{spec.samples}/{context.name}/0/"))
            copies = f"{channels} consumers x " * (channels > 1)
            needs.append(Need("samples", channels * config.slots * block, f"{copies}{config.slots} slots x {spec.rows:,} rows x {per_row}"))
            needs.append(Need("batches", 2 * block, f"2 copies x {spec.rows:,} rows x {per_row}"))
        if spec.inference != INLINE:
            policy = context.experiment.policies[spec.policy]
            answer, state = policy.answer(spaces), policy.state(spaces)
            slot = sum(f.nbytes for f in (*schema_of_space(spaces.observation, "obs").values(), *answer.values(), *state.values(), *state.values()))
            slots, rows = 2 * ring * len(config.agents), ring * seats * (1 + environment.same_step)
            needs.append(Need("requests and answers", slots * rows * slot, f"{slots} slots x {rows:,} rows x {slot:,} bytes"))
    return needs


def check_lanes(context: Context, config: Actors, seed: int) -> None:
    """Raise `ConfigError`, with the sums, when so many lanes cannot fit: before they are all built, which may take hours.

    A few are built and thrown away, then 8 times as many, until the process has grown by what can be told from chance.
    """
    if config.lanes < MANY_LANES:
        return
    lanes = 4
    marks: list[tuple[int, int]] = []  # lanes, bytes that the process held then
    while config.lanes >= lanes * 8:
        environment = config.environment.build(lanes, seed)
        try:
            if not marks:
                check_memory(memory_needs(context, config, environment) * config.count, available())
            marks.append((lanes, held()[0]))
        finally:
            environment.close()
            del environment
        (first, before), (last, after) = marks[0], marks[-1]
        if after - before > TELLING:
            each = (after - before) / (last - first)
            sums = f"ring {config.ring} x {config.lanes:,} lanes x {each:,.0f} bytes"
            check_memory([Need("environments", int(each * config.lanes) * config.ring, sums)] * config.count, available())
            return
        lanes *= 8


class ActorWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: Actors) -> None:
        super().__init__(context)
        self._config = config
        self._environments: list[Environment] = []
        self._ticks = self._boundary_at = 0
        self._crossed = False  # a block was committed since parameters were last taken

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        check_lanes(context, config, derive_seed(context.experiment.seed, context.name, "target", 0))
        for number in range(config.ring):
            seed = derive_seed(context.experiment.seed, context.name, "target", number)
            self._environments.append(config.environment.build(config.lanes, seed))
        first = self._environments[0]
        groups = match_agents(first.agents, config.agents)
        spaces = [first.agents[group[0]].spaces for group in groups]
        _check(config, first, spaces)
        needs = memory_needs(context, config, first)
        check_memory(needs * config.count, available())
        self._clients: dict[tuple[str, str], InferenceClient] = {}
        largest: dict[tuple[str, str], int] = {}
        for spec, group in zip(config.agents, groups, strict=True):
            key = (spec.inference, spec.policy)
            largest[key] = largest.get(key, 0) + config.ring * config.lanes * len(group) * (1 + first.same_step)
        for spec, own in zip(config.agents, spaces, strict=True):
            key = (spec.inference, spec.policy)
            if key not in self._clients:
                self._clients[key] = self._make_client(spec, own, largest[key])
        self._agents: list[tuple[int, Agent]] = []
        targets = [self._make_target(environment, groups, spaces) for environment in self._environments]
        self.ring = EnvRing(targets)
        return Facts(
            spaces={spec.policy: own for spec, own in zip(config.agents, spaces, strict=True)},
            samples={
                spec.samples: SampleFacts(len(group), spec.burn_in, spec.bootstrap)
                for spec, group in zip(config.agents, groups, strict=True)
                if spec.samples
            },
            memory=tuple(needs),
        )

    def _make_client(self, spec: AgentSpec, spaces: Spaces, rows: int) -> InferenceClient:
        context, name = self.context, spec.policy
        policy = context.experiment.policies[name]
        observation, answer, state = schema_of_space(spaces.observation, "obs"), policy.answer(spaces), policy.state(spaces)
        if spec.inference != INLINE:
            stream = f"{spec.inference}/{context.name}/{name}"
            requests, answers = context.endpoints.producer(f"requests/{stream}"), context.endpoints.consumer(f"answers/{stream}")
            return ChannelInferenceClient(requests, answers, observation, state, rows, self._config.ring * len(self._config.agents))
        built = policy.build(spaces, derive_seed(context.experiment.seed, context.name, "policy", name))
        parameters = ParameterSubscriber(context.endpoints.reader(context.edges(f"parameters/{name}/")[0].name))
        index = list(context.experiment.policies).index(name)
        return InlineInferenceClient(built, index, parameters, answer, state, observation, rows, self.clock)

    def _make_target(self, environment: Environment, groups: list[list[int]], spaces: list[Spaces]) -> EnvTarget:
        config, context = self._config, self.context
        environment.bind(groups)
        environment.on_ready(context.endpoints.bell.ring)
        agents, ticks = [], []
        for number, (spec, group, own) in enumerate(zip(config.agents, groups, spaces, strict=True)):
            client = self._clients[spec.inference, spec.policy]
            outlet = sum(1 for spec_number, _ in self._agents if spec_number == number)
            samples = None
            if spec.samples is not None:
                samples = sample_producer(context, [spec.samples], outlet)
            seats = config.lanes * len(group)
            agent = Agent(
                schema=row_schema(context, spec, own, environment.info),
                seats=seats,
                rows=spec.rows,
                overlap=spec.burn_in + spec.bootstrap,
                fillers=spec.burn_in,
                same_step=environment.same_step,
                deterministic=spec.deterministic,
                client=client,
                samples=samples,
                slots=config.slots,
                on_boundary=self._on_boundary,
            )
            agents.append(agent)
            self._agents.append((number, agent))
            ticks.append(Tick.allocate(own.observation, seats, environment.info, environment.same_step))
        return EnvTarget(environment, agents, ticks, config.max_episode_steps, self.clock)

    def start(self) -> None:
        self._refresh()
        super().start()

    def _on_boundary(self) -> None:
        self._crossed = True

    def _refresh(self) -> None:
        for client in self._clients.values():
            client.refresh()
        self._boundary_at = self._ticks
        self._crossed = False

    def _poll(self) -> PollResult:
        ticks, steps = self._ticks, sum(target.steps for target in self.ring.targets)
        for _ in range(MAX_POLL_STEPS):
            moved = False
            for target in self.ring:
                if target.all_done():
                    if self._config.lanes == 1:
                        self._refresh()
                    target.reset()
                    moved = True
                elif target.ready_to_step():
                    target.step()
                    moved = True
                if target.ready_to_observe():
                    target.observe()
                    self._ticks += 1
                    moved = True
                    if (self._crossed and self._config.lanes > 1) or self._ticks - self._boundary_at > PULL_TICKS:
                        self._refresh()  # as late as can be: an actor that was held back goes on with what came meanwhile
                self._flush(self._config.flush_requests)
            if not moved and not self._flush(1):
                break
        if self._ticks > ticks:
            self._report_episodes()
        return PollResult(sum(target.steps for target in self.ring.targets) - steps, self._ticks - ticks)

    def _flush(self, least: int) -> bool:
        """Flush where at least `least` requests are buffered. True when anything was sent."""
        sent = False
        for client in self._clients.values():
            if (buffered := client.buffered) >= least:
                client.flush()
                sent |= client.buffered < buffered
        return sent

    def _report_episodes(self) -> None:
        by_spec: dict[int, list[tuple[float, int]]] = {}
        for spec, agent in self._agents:
            if agent.episodes:
                by_spec.setdefault(spec, []).extend(agent.episodes)
                agent.episodes = []
        for spec, episodes in by_spec.items():
            returns, lengths = zip(*episodes, strict=True)
            self.report(Episodes(spec, list(returns), list(lengths)))

    def _close(self) -> None:
        for environment in self._environments:
            environment.close()
