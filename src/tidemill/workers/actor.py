"""The actor worker: steps environments in a ring and sends their rows as samples.

One poll turns the ring up to 16 times. At each target: begin a tick when no agent waits,
and finish it when its environment has answered; then flush the requests when enough are
buffered, or when nothing can proceed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from tidemill.api.control import Episodes, Facts, Notice, SampleFacts, Tallied
from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Context
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.core.cores import every_core
from tidemill.core.errors import ConfigError
from tidemill.core.rings import Together
from tidemill.core.seeding import derive_seed
from tidemill.envs.parallel_build import close_all, make_all
from tidemill.streams.inference import ChannelInferenceClient
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import Subscription
from tidemill.streams.samples import sample_producer
from tidemill.streams.sources import ParameterSource
from tidemill.workers.actor_config import (
    INLINE,
    ActorConfig,
    Actors,
    AgentSpec,
    PlayerSpec,
    match_agents,
)
from tidemill.workers.actor_memory import check_lanes, check_most_lanes, check_rows
from tidemill.workers.agent import Agent, Episode
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.blocks import Terms, make_blocks, sizes
from tidemill.workers.environments import build_environment
from tidemill.workers.exact import ExactAgent, ExactRing, ExactTarget, chosen_fields
from tidemill.workers.gang import Gang
from tidemill.workers.lockstep import (
    LockstepAgent,
    LockstepTarget,
    check_lockstep,
    in_lockstep,
    lockstep_blocks,
)
from tidemill.workers.open_episodes import newest_slots
from tidemill.workers.ring import EnvRing, EnvTarget
from tidemill.workers.rows import limit_of_steps, row_schema, sample_schema
from tidemill.workers.said import Listener
from tidemill.workers.slot_faults import SlotFaults
from tidemill.workers.stepwise import StepwiseAgent, check_stepwise, credits_of, exact

__all__ = ["INLINE", "MAX_POLL_STEPS", "PULL_TICKS", "ActorWorker", "Actors", "AgentSpec", "match_agents"]

MAX_POLL_STEPS = 16
TELL = 5.0  # seconds between notices of how many environments are made
# an actor that meets no sample boundary for so many ticks takes new parameters all the
# same: the timed pull
PULL_TICKS = 128
# so many it leaves alone targets of one lane, which take parameters before resets, where
# episodes may never end
ENDLESS_TICKS = 10_000


def _check(config: ActorConfig, spaces: Sequence[Spaces]) -> None:
    """Raise `ConfigError` for what only the environment tells is impossible."""
    played: dict[str, tuple[PlayerSpec, Spaces]] = {}
    for spec, own in zip(config.agents, spaces, strict=True):
        other, theirs = played.setdefault(spec.policy, (spec, own))
        if own != theirs:
            raise ConfigError(
                f'agent specs "{other.match}" and "{spec.match}" play policy "{spec.policy}", but their '
                "agents have different spaces; "
                "give each kind a policy"
            )


class _Player(NamedTuple):
    """Whose requests are answered by one client: all agents that play one policy with the
    same parameters. What is drawn is drawn for each target."""

    inference: str
    policy: str
    parameters: ParameterSource
    target: int | None

    @classmethod
    def of(cls, spec: PlayerSpec, target: int) -> "_Player":
        return cls(spec.inference, spec.policy, spec.parameters, target if spec.parameters.varies else None)


class ActorWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: ActorConfig) -> None:
        super().__init__(context)
        self._config = config
        self._environments: list[Environment] = []
        self._sources: dict[tuple[str, ParameterSource], Subscription] = {}
        self._ticks = self._boundary_at = 0
        self._crossed = False  # a sample was sent since parameters were last taken

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        check_lockstep(context.experiment, config)
        with every_core():
            check_lanes(context, config, context.seed("target", 0))
        self._make_environments()
        first = self._environments[0]
        groups = match_agents(first.agents, config.agents)
        spaces = [first.agents[group[0]].spaces for group in groups]
        _check(config, spaces)
        check_stepwise(context, config, first)
        needs = check_rows(context, config, first)
        self._clients: dict[_Player, InferenceClient] = {}
        largest: Counter[_Player] = Counter()
        in_turn = exact(context, config.agents[0])
        together = config.agents[0].mode == "transitions" and not in_turn
        for number in range(config.ring):
            for spec, group in zip(config.agents, groups, strict=True):
                largest[_Player.of(spec, 0 if together else number)] += (
                    config.lanes * len(group) * (1 + first.same_step)
                )
        for number in range(1 if together else config.ring):
            for spec, own in zip(config.agents, spaces, strict=True):
                if (player := _Player.of(spec, number)) not in self._clients:
                    self._clients[player] = self._make_client(player, own, largest[player])
        self._agents: list[tuple[int, Agent]] = []
        targets = (
            [] if together else [self._make_target(number, groups, spaces) for number in range(config.ring)]
        )
        # for lanes that begin again by themselves there is no time before a reset
        at_resets = config.lanes == 1 and not first.same_step
        own_ones = [player for player in self._clients if at_resets and player.target is not None]
        self._at_reset = {
            target: [c for p, c in self._clients.items() if p.target in (number, None)]
            for number, target in enumerate(targets)
        }
        self._at_boundary = [client for player, client in self._clients.items() if player not in own_ones]
        # A lane that plays alone keeps its episode's version, unless the samples would
        # come too late for who takes them.
        self._timed = [
            self._clients[player]
            for player in self._pulled(at_resets and not first.independent)
            if player not in own_ones
        ]
        self._endless = not first.max_episode_steps
        self.ring = EnvRing(targets)
        if in_turn:
            self.ring = self._exact_ring([target for target in targets if isinstance(target, ExactTarget)])
        self._granted = config.agents[0].mode == "transitions"
        self._gang = self._make_gang(spaces[0]) if together else None
        listener = Listener(lambda text: self.report(Notice(text)))
        for member in [self._gang] if self._gang is not None else self.ring.targets:
            member.listener = listener
        self._slot_faults = SlotFaults(self._environments, in_turn, lambda text: self.report(Notice(text)))
        return Facts(
            spaces={spec.policy: own for spec, own in zip(config.agents, spaces, strict=True)},
            samples={
                stream: SampleFacts(
                    len(group),
                    spec.burn_in,
                    spec.bootstrap,
                    spec.mode,
                    spec.padded,
                    config.lanes * len(group) if spec.mode == "full" else 1,
                )
                for spec, group in zip(config.agents, groups, strict=True)
                for stream in spec.streams
            },
            memory=tuple(needs),
        )

    def _pulled(self, at_resets: bool) -> list["_Player"]:
        """Return whose parameters the timed pull takes. With `at_resets`, those whose
        samples are dropped when they lag behind."""
        experiment = self.context.experiment
        specs = [
            spec
            for spec in self._config.agents
            if not at_resets or any(map(experiment.lag_bounded, spec.streams))
        ]
        return list(
            dict.fromkeys(
                _Player.of(spec, number)
                for number in range(self._config.ring)
                for spec in specs
                if _Player.of(spec, number) in self._clients
            )
        )

    def _make_environments(self) -> None:
        config, context, told_at = self._config, self.context, monotonic()

        def make(number: int) -> Environment:
            # in whichever thread: what it starts is no part of this process, and who
            # steps for it keeps to this one's core
            with every_core():
                return build_environment(config, config.lanes, context.seed("target", number))

        for environment in make_all(make, range(config.ring)):
            self._environments.append(environment)
            if len(self._environments) == 1:
                check_most_lanes(context, config, environment)
            if (now := monotonic()) - told_at > TELL and len(self._environments) < config.ring:
                told_at = now
                self.report(Notice(f"{len(self._environments)} of {config.ring} environments are made"))

    def _exact_ring(self, targets: list[ExactTarget]) -> ExactRing:
        context, spec = self.context, self._config.agents[0]
        credits = credits_of(context, spec)
        assert credits is not None
        ring = ExactRing(targets, credits)
        if context.resume is not None and context.folder is not None:
            (policy,) = {
                port.policy for stream in spec.streams for port in context.experiment.granting(stream)
            }
            if (found := newest_slots(Path(context.folder) / "checkpoints" / policy)) is not None:
                ring.resume(*found)
        return ring

    def _make_gang(self, spaces: Spaces) -> Gang:
        config, context, environments = self._config, self.context, self._environments
        (spec,), first, seats = config.agents, environments[0], config.ring * config.lanes
        for environment in environments:
            environment.bind([[0]])
        row, samples = row_schema(context, spec, spaces, first.info), sample_producer(context, spec.streams)
        need = sizes(spec, seats, limit_of_steps(spec, first), first.same_step, config.slots)
        samples.offer(sample_schema(spec, row, 0), need.rows, need.columns, need.slots)
        agent = StepwiseAgent(
            row, seats, spec.deterministic, self._clients[_Player.of(spec, 0)], samples, first.voids
        )
        self._agents.append((0, agent))
        tick = Tick.allocate(spaces.observation, seats, first.info, False)
        gang = Gang(environments, agent, tick, self.clock, credits_of(context, spec))
        for number, environment in enumerate(environments):
            environment.on_ready(gang.waker(number, context.endpoints.bell.ring))
        return gang

    def _make_client(self, player: "_Player", spaces: Spaces, rows: int) -> InferenceClient:
        context, name = self.context, player.policy
        policy = context.experiment.policies[name]
        observation = schema_of_space(spaces.observation, "obs")
        answer = policy.answer(spaces)
        state = policy.state(spaces)
        if player.inference != INLINE:
            stream = f"{player.inference}/{context.name}/{name}"
            requests = context.endpoints.producer(f"requests/{stream}")
            answers = context.endpoints.consumer(f"answers/{stream}")
            return ChannelInferenceClient(
                requests, answers, observation, state, rows, self._config.ring * len(self._config.agents)
            )
        built = policy.build(spaces, context.seed("policy", name))
        key = name, player.parameters
        if key not in self._sources:
            rng = np.random.default_rng(context.seed("parameters", name))
            self._sources[key] = player.parameters.build(context, name, rng)
        index = list(context.experiment.policies).index(name)
        return InlineInferenceClient(
            built, index, self._sources[key], answer, state, observation, rows, self.clock
        )

    def _make_target(self, target: int, groups: list[list[int]], spaces: list[Spaces]) -> EnvTarget:
        config, context, environment = self._config, self.context, self._environments[target]
        environment.bind(groups)
        environment.on_ready(context.endpoints.bell.ring)
        agents, ticks = [], []
        for number, (spec, group, own) in enumerate(zip(config.agents, groups, spaces, strict=True)):
            seats, same_step = config.lanes * len(group), environment.same_step
            row = row_schema(context, spec, own, environment.info)
            need = sizes(spec, seats, limit_of_steps(spec, environment), same_step, config.slots)
            samples = sample_producer(context, spec.streams, target)
            schema = sample_schema(spec, row, len(environment.agents) - len(group))
            terms = Terms(spec, schema, seats, need, same_step, samples, self._on_boundary)
            client = self._clients[_Player.of(spec, target)]
            if spec.mode == "transitions":  # of an exact run
                samples.offer(chosen_fields(row, schema), need.rows, need.columns, need.slots)
                assert isinstance(client, InlineInferenceClient)
                client.reseed(0)  # so that a policy which cannot be is refused now
                # the same after a resume
                slot = derive_seed(context.experiment.seed, context.name, "slot", target)
                agent: Agent = ExactAgent(row, spec.deterministic, client, samples, environment.voids, slot)
            elif in_lockstep(context.experiment, spec):
                agent = LockstepAgent(row, seats, spec.deterministic, client, lockstep_blocks(terms))
            else:
                agent = Agent(row, seats, spec.deterministic, client, make_blocks(terms))
            agents.append(agent)
            self._agents.append((number, agent))
            ticks.append(Tick.allocate(own.observation, seats, environment.info, same_step))
        for spec, agent in zip(config.agents, agents, strict=True):
            agent.meet(agents, config.lanes, spec.parameters.numbered)
        in_turn = [agent for agent in agents if isinstance(agent, ExactAgent)]
        if in_turn:
            return ExactTarget(
                environment,
                in_turn,
                ticks,
                self.clock,
                lambda text: self.report(Notice(text)),
            )
        kind = LockstepTarget if any(isinstance(agent, LockstepAgent) for agent in agents) else EnvTarget
        return kind(environment, agents, ticks, self.clock)

    def start(self) -> None:
        self._refresh(self._clients.values())
        super().start()

    def _enter_stage(self, options: Mapping[str, Any]) -> None:
        for member in [self._gang] if self._gang is not None else self.ring.targets:
            member.enter_stage(self.stage, options)

    def _on_boundary(self) -> None:
        self._crossed = True

    def _refresh(self, clients: Iterable[InferenceClient]) -> None:
        for client in clients:
            client.refresh()
        self._boundary_at = self._ticks
        self._crossed = False

    def _poll(self) -> PollResult:
        if self._gang is not None:
            return self._poll_gang(self._gang)
        ticks, steps = self._ticks, sum(target.steps for target in self.ring.targets)
        for _ in range(MAX_POLL_STEPS):
            moved = False
            for target in self.ring:
                if target.all_done():
                    if self._config.lanes == 1:
                        self._refresh(self._at_reset[target])
                    target.reset()
                    moved = True
                elif target.ready_to_step():
                    target.step()
                    moved = True
                if target.ready_to_observe():
                    target.observe()
                    self._ticks += 1
                    moved = True
                    self._take_parameters()
                moved = self._flush(self._config.flush_requests) or moved
            if not moved and not self._flush(1):
                break
        if self._ticks > ticks:
            self._report_episodes()
        self._slot_faults.look()
        return PollResult(sum(target.steps for target in self.ring.targets) - steps, self._ticks - ticks)

    def _take_parameters(self) -> None:
        """Take parameters between resets, as late as can be: an actor that was held back
        goes on with what came meanwhile."""
        ticks = self._ticks - self._boundary_at
        if (self._crossed and self._config.lanes > 1) or (self._endless and ticks > ENDLESS_TICKS):
            self._refresh(self._at_boundary)
        elif ticks > PULL_TICKS and self._timed:
            self._refresh(self._timed)

    def _poll_gang(self, gang: Gang) -> PollResult:
        ticks, steps = gang.ticks, gang.steps
        with Together():
            self._go_on(gang)  # who has waited for credits goes before others are received
        for _ in range(MAX_POLL_STEPS):
            with Together():  # who is woken finds the whole turn done
                moved = gang.receive()
                moved = self._go_on(gang) or moved
            if not moved:
                break
        if gang.ticks > ticks:
            self._report_episodes()
        self._slot_faults.look()
        return PollResult(gang.steps - steps, gang.ticks - ticks)

    def _go_on(self, gang: Gang) -> bool:
        """Send on their way all that may go on. False when nothing could be done."""
        moved = gang.begin()
        moved = self._flush(self._config.flush_requests) or moved
        return gang.send() or moved or self._flush(1)

    def _flush(self, least: int) -> bool:
        """Flush where at least `least` requests are buffered. True when anything was
        sent."""
        sent = False
        for client in self._clients.values():
            if (buffered := client.buffered) >= least:
                if self._granted:
                    client.refresh()  # their steps were granted: they act by the newest version
                client.flush()
                sent |= client.buffered < buffered
        return sent

    def _stats(self) -> dict[str, float]:
        for environment in self._environments:
            if told := environment.statistics():
                self.report(Tallied(told))
        stats = self._slot_faults.stats()
        if self._granted:
            stats["slots/waited"] = self._gang.waited if self._gang is not None else self.ring.waited
        return stats

    def _report_episodes(self) -> None:
        reported, by_spec = self._config.plays(), dict[int, list[Episode]]()
        for spec, agent in self._agents:
            if agent.episodes and spec in reported:
                by_spec.setdefault(spec, []).extend(agent.episodes)
            agent.episodes.clear()
        for spec, episodes in by_spec.items():
            for stage in {stage for _, _, stage, _ in episodes}:
                returns, lengths, _, said = zip(*(each for each in episodes if each[2] == stage), strict=True)
                self.report(
                    Episodes(spec, stage, list(returns), list(lengths), list(said) if any(said) else [])
                )

    def _on_exit(self) -> None:
        self._slot_faults.end()

    def _close(self) -> None:
        close_all(self._environments)
