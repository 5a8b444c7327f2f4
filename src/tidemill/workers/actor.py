"""The actor worker: steps environments in a ring and sends their rows as samples.

One poll turns the ring up to 16 times. At each target: begin a tick when no agent waits, and finish it when its environment has answered; then flush
the requests when enough are buffered, or when nothing can proceed.
"""

from collections.abc import Sequence

from tidemill.api.control import Episodes, Facts, SampleFacts
from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Context
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.core.cores import every_core
from tidemill.core.errors import ConfigError
from tidemill.core.seeding import derive_seed
from tidemill.streams.inference import ChannelInferenceClient
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.streams.samples import sample_producer
from tidemill.workers.actor_config import INLINE, Actors, AgentSpec, match_agents
from tidemill.workers.actor_memory import check_lanes, check_rows
from tidemill.workers.agent import Agent
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.blocks import Terms, make_blocks, sizes
from tidemill.workers.frames import build_environment
from tidemill.workers.ring import EnvRing, EnvTarget
from tidemill.workers.rows import limit_of_steps, row_schema, sample_schema

__all__ = ["INLINE", "MAX_POLL_STEPS", "PULL_TICKS", "ActorWorker", "Actors", "AgentSpec", "match_agents"]

MAX_POLL_STEPS = 16
PULL_TICKS = 128  # an actor that meets no sample boundary (or reset of a single lane) for so many ticks takes new parameters all the same


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


class ActorWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: Actors) -> None:
        super().__init__(context)
        self._config = config
        self._environments: list[Environment] = []
        self._ticks = self._boundary_at = 0
        self._crossed = False  # a sample was sent since parameters were last taken

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        with every_core():
            check_lanes(context, config, derive_seed(context.experiment.seed, context.name, "target", 0))
            for number in range(config.ring):
                seed = derive_seed(context.experiment.seed, context.name, "target", number)
                self._environments.append(build_environment(config, config.lanes, seed))
        first = self._environments[0]
        groups = match_agents(first.agents, config.agents)
        spaces = [first.agents[group[0]].spaces for group in groups]
        _check(config, first, spaces)
        needs = check_rows(context, config, first)
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
                stream: SampleFacts(len(group), spec.burn_in, spec.bootstrap, spec.mode, spec.padded)
                for spec, group in zip(config.agents, groups, strict=True)
                for stream in spec.streams
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
            outlet = sum(1 for spec_number, _ in self._agents if spec_number == number)
            seats, same_step = config.lanes * len(group), environment.same_step
            row = row_schema(context, spec, own, environment.info)
            need = sizes(spec, seats, limit_of_steps(config, spec, environment), same_step, config.slots)
            samples = sample_producer(context, spec.streams, outlet)
            blocks = make_blocks(Terms(spec, sample_schema(spec, row), seats, need, same_step, samples, self._on_boundary))
            agent = Agent(row, seats, spec.deterministic, self._clients[spec.inference, spec.policy], blocks)
            agents.append(agent)
            self._agents.append((number, agent))
            ticks.append(Tick.allocate(own.observation, seats, environment.info, same_step))
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
