"""Environment targets and the ring that an actor turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import sleep
from typing import Any, Self, cast

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.api.environment import Environment, NotReady, Tick
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.forks import end_in_fork, forks
from tidemill.core.step_deadlines import FIRST, deadline
from tidemill.envs.step_limit import cut
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_context import ActorContext
from tidemill.workers.agent import Agent
from tidemill.workers.agent_spec import in_lockstep
from tidemill.workers.block_agent import BlockAgent
from tidemill.workers.evaluation import judge_of
from tidemill.workers.info_numbers import InfoReader, Numbers
from tidemill.workers.judge_rounds import RoundGate
from tidemill.workers.lockstep import LockstepGate, lockstep_writer
from tidemill.workers.sample_writers.base import Columns, Seats
from tidemill.workers.sample_writers.fixed import AlignedBlock
from tidemill.workers.service_order import ServiceOrder

LOOK = 0.0002  # seconds between two looks at an environment that is waited for
GRACE = 5.0  # seconds by which that ends after what the environment breaks off itself


def patience_of(config: ActorConfig) -> float:
    """Return for how many seconds an actor waits for a tick of an environment that it
    serves strictly in turn: lanes in threads may hang one after another, and settings of
    the environment's own come before."""
    own = getattr(config.environment, "deadline_s", None)
    longest = deadline(config.deadline_s if own is None else own, None)
    longest = max(longest, getattr(config.environment, "start_seconds", 0.0))  # another simulator's
    return float(longest) * (config.lanes if getattr(config.environment, "threads", 0) else 1) + GRACE


class RoomGate:
    """Lets a target step only where the rows of the tick have a place to go, so that no
    tick is ever under way between two polls (of an environment that answers at once)."""

    waits = False

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents = agents

    def opens(self) -> bool:
        """True when the target may step. Asked when no agent waits for an answer."""
        for agent in self._agents:
            agent.get_action()  # completes the newest rows, and sends what is full
        return all(agent.has_room() for agent in self._agents)


class EnvTarget:
    """One environment (one lane or many) and the agents in it. A tick is `step` and, once
    the environment is ready, `observe`.

    number: which one of the ring
    gate: what must open besides before a step begins; None: nothing
    patience: seconds that `wait` waits at most
    ticked: see `ActorContext`
    """

    def __init__(
        self,
        environment: Environment,
        agents: Sequence[Agent],
        ticks: Sequence[Tick],
        clock: Clock,
        info_reader: InfoReader,
        number: int = 0,
        gate: LockstepGate | RoundGate | RoomGate | None = None,
        ticked: Callable[[float, bool], None] = lambda seconds, resets: None,
        patience: float = FIRST,
    ) -> None:
        self._patience = patience
        self._environment, self.agents, self._ticks = environment, list(agents), list(ticks)
        self._pairs = list(zip(self.agents, self._ticks, strict=True))
        for group, agent in enumerate(self.agents):
            agent.hear = partial(self._hear, group)
        self._clock, self._info_reader = clock, info_reader
        self.number, self._gate, self._ticked = number, gate, ticked
        self._forks = forks()
        self._sending = 0.0  # seconds that the tick has taken when it began
        self._stage = 0
        self._stepping = False  # sent and not yet received
        self._reset: NDArray[np.bool_] = np.ones(environment.lanes, np.bool_)
        self._forced = False  # cut every open episode at the next observation
        self.sending: list[BlockAgent] = []
        """Those of the agents whose rows are sent to somebody."""
        self.elsewhere = False
        """The environment was not ready when it was asked: it steps in a thread or a
        process of its own."""
        self.steps = 0
        """Env steps so far: lanes that stepped, resets and lost steps not counted."""
        self.finishing = False
        """It begins no sample any more."""

    def _hear(self, group: int, seats: Sequence[int]) -> list[Numbers]:
        return [self._info_reader.numbers(info) for info in self._environment.episode_infos(group, seats)]

    def all_done(self) -> bool:
        """True when every lane is finished: the next tick resets all of them."""
        return 0 not in self._reset.tobytes()  # `all` takes ten times as long

    def unmask_all_info(self) -> None:
        """Cut the episodes still open now: the next observations are their final ones,
        and their info is shown."""
        self._forced = True

    def ready_to_step(self) -> bool:
        """True when no agent waits for an answer, and the last tick was received."""
        return not self._stepping and self._may_step()

    def _may_step(self) -> bool:
        for agent in self.agents:
            if not agent.is_ready():
                return False
        if self.finishing and self._has_finished():
            return False
        return self._gate is None or self._gate.opens()

    def _has_finished(self) -> bool:
        """True when what was begun of samples was sent. Needs that no agent waits for an
        answer."""
        if self._gate is None:  # else that sends what is full
            for agent in self.sending:
                agent.get_action()
        elif self._gate.waits:  # behind the end of one, where some seats may be ahead
            return True
        return self.unsent() == 0

    def has_finished(self) -> bool:
        """True when the target was to finish its samples, and has."""
        answered = not self._stepping and all(agent.is_ready() for agent in self.agents)
        return self.finishing and answered and self._has_finished()

    def reset(self) -> None:
        """Begin a tick that resets every lane. Where episodes are open it is their last:
        they are cut, and the tick after it resets their lanes."""
        if not self._reset.all():
            self.unmask_all_info()
        self.step()

    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        """Begin episodes in this stage of the curriculum from the next tick on."""
        self._environment.enter_stage(options)
        self._stage = stage

    def step(self) -> None:
        """Begin a tick: take the actions from the agents and send them; lanes whose seats
        are all finished are reset instead."""
        actions = [agent.get_action() for agent in self.agents]
        left = self._clock.enter("environment")
        self._environment.send(actions, self._reset)
        self._clock.enter(left)
        self._sending = self._clock.last
        for agent in self.agents:
            agent.stage = self._stage
        self._stepping = True
        self.elsewhere = False

    def ready_to_observe(self) -> bool:
        """True when a tick was begun, its answer has come, and there is room for its
        rows."""
        if not self._stepping:
            return False
        if not self._environment.ready():
            self.elsewhere = True
            return False
        return all(agent.has_room() for agent in self.agents)

    def observe(self) -> bool:
        """Finish the tick: receive it, store its rows, post the requests. False where its
        answer is lost: it is to be finished once it is ready again."""
        for agent, tick in self._pairs:
            agent.next_observation(tick)
        left = self._clock.enter("environment")
        try:
            self._environment.recv(self._ticks)
        except NotReady:
            self._clock.enter(left)
            return False
        end_in_fork(self._forks)
        self._clock.enter(left)
        self._stepping = False
        seconds = self._sending + self._clock.last
        lanes = self._environment.lanes
        resets = int(count_nonzero(self._reset)) if 1 in self._reset.tobytes() else 0
        self.steps += lanes - resets
        begins = self._reset if resets else None
        if 1 in self._ticks[0].restarted.tobytes():
            # lanes that were made anew began another episode in place of a step
            lost = (self._ticks[0].restarted & self._ticks[0].voided).reshape(lanes, -1).any(axis=1)
            self.steps -= int(count_nonzero(lost))
            begins = self._reset | lost
        for agent in self.agents if begins is not None and len(self.agents) > 1 else ():
            agent.acting.reshape(lanes, -1)[begins] = -1
        if self._forced:
            every, before = np.ones(lanes, np.bool_), [agent.finished for agent in self.agents]
            cut(self._ticks, before, every, self._reset, self._environment.same_step)
            self._forced = False
        for agent, tick in self._pairs:
            agent.observe(tick)
        self._reset = self._finished(lanes)
        self._ticked(seconds, resets > 0)
        return True

    def seats(self, lane: int | None) -> list[tuple[Agent, Seats]]:
        """See `ServiceOrder`."""
        every = [(agent, np.arange(len(agent.finished))) for agent in self.agents]
        if lane is None:
            return every
        lanes = self._environment.lanes
        return [(agent, seats.reshape(lanes, -1)[lane]) for agent, seats in every]

    def unsent(self) -> int:
        """See `ServiceOrder`; of the agents that are furthest."""
        lanes = self._environment.lanes
        return max((a.writer.unsent() * lanes // len(a.finished) for a in self.sending), default=0)

    # ---- a cut -------------------------------------------------------------------------

    def keep_episodes(self) -> None:
        """See `Environment.keep_episodes`."""
        self._environment.keep_episodes()

    def waits_for_others(self) -> bool:
        """True when a policy worker is still to answer one of its agents, or an
        evaluation to take the episodes of its round."""
        if isinstance(self._gate, RoundGate) and not self._stepping and self._gate.lacks_room():
            return True
        return any(agent.waits_for_others() for agent in self._block_agents())

    def wait(self) -> bool:
        """Wait until the environment has answered, if a tick is under way. False where it
        is away. Raises `EnvironmentFault` where it does not answer."""
        if not self._stepping or self._environment.ready():
            return True
        until = awake() + self._patience
        while not self._environment.ready():
            if self._environment.away:
                return False
            if awake() > until:
                doing = self._environment.doing()
                raise EnvironmentFault(
                    f"the environment of target {self.number} has not answered for {self._patience:.3g} s"
                    f"{f': {doing}' * bool(doing)}; runs with exact_resume wait for each in its turn, and "
                    "deadline_s of the actor sets for how long"
                )
            sleep(LOOK)
        return True

    def _block_agents(self) -> list[BlockAgent]:
        return cast("list[BlockAgent]", self.agents)  # only a ring's targets are cut

    def state(self) -> Part:
        """Return where the target is: its agents, its environment, its gate. In the midst
        of a tick only where its environment is away, whose open episodes are cut then."""
        assert not self._stepping or self._environment.away
        environment = None if self._stepping else self._environment.state()
        return {
            "agents": {str(number): agent.state() for number, agent in enumerate(self._block_agents())},
            "environment": {} if environment is None else {"state": environment},
            "reset": self._reset,
            "stage": self._stage,
            "forced": self._forced,
            "steps": self.steps,
            "waits": self._gate is not None and self._gate.waits,
        }

    def load_state(self, state: Part) -> dict[int, str]:
        """Be as the target was whose state this is. Return of each lane whose open
        episode was cut why."""
        for number, agent in enumerate(self._block_agents()):
            agent.load_state(state["agents"][str(number)])
        self._reset, self._stage = state["reset"], state["stage"]
        self._forced, self.steps = state["forced"], state["steps"]
        if self._gate is not None:
            self._gate.waits = state["waits"]
        lanes = self._environment.lanes
        if held := state["environment"]:
            lost = dict(self._environment.load_state(held["state"]))
        else:
            why = "it could not tell the state of its episodes"
            lost = dict.fromkeys(range(lanes), why)
        gone = np.zeros(lanes, np.bool_)
        gone[[*lost]] = True
        cut = {lane: why for lane, why in lost.items() if not self._reset[lane]}
        for agent in self._block_agents():
            agent.abort(np.repeat(gone & ~self._reset, len(agent.finished) // lanes) & ~agent.finished)
        self._reset = self._reset | gone
        return cut

    def _finished(self, lanes: int) -> NDArray[np.bool_]:
        """Return bool [L]: all of the lane's seats are between two episodes."""
        if len(self.agents) == 1 and len(alone := self.agents[0].finished) == lanes:
            return alone
        finished: NDArray[np.bool_] = np.logical_and.reduce(
            [agent.finished.reshape(lanes, -1).all(axis=1) for agent in self.agents]
        )
        return finished


def build_target(parts: ActorContext, number: int, gates: list[Any]) -> EnvTarget:
    """Return target `number` of an actor, its agents with it; its gate is one of
    `gates`."""
    environment, config = parts.environments[number], parts.config
    environment.bind(parts.groups)
    environment.on_ready(parts.context.endpoints.bell.ring)
    agents, ticks, lockstep, rounds = [], [], [], list[tuple[BlockAgent, int]]()
    for index, (spec, group) in enumerate(zip(config.agents, parts.groups, strict=True)):
        terms = parts.terms(index, config.lanes * len(group), number)
        waits = in_lockstep(parts.context.experiment, spec)
        terms.offer(terms.schema)
        own = cast("type[AlignedBlock | Columns]", spec.writer())  # other writers go with other orders
        writer = lockstep_writer(terms) if waits else own(terms)
        agent = BlockAgent(terms.row, terms.seats, spec.deterministic, parts.client(spec, number), writer)
        agents.append(agent)
        lockstep += [agent] if waits else []
        if judge := judge_of(parts.context.experiment, [spec]):
            rounds.append((agent, judge.rounds(parts.context.experiment, len(group))))
        space = parts.spaces[index].observation
        ticks.append(Tick.allocate(space, terms.seats, environment.info, environment.same_step))
    for spec, agent in zip(config.agents, agents, strict=True):
        agent.meet(agents, config.lanes, spec.parameters.numbered)
    gate: LockstepGate | RoundGate | RoomGate | None = None
    if lockstep:
        gate = LockstepGate(lockstep, parts.refresh, parts.stages, gates)
    elif rounds:
        ((judged, games),) = rounds
        gate = RoundGate(judged, agents, games, parts.refresh, parts.stages, gates)
    elif parts.context.experiment.exact_resume:
        gate = RoomGate(agents)
    target = EnvTarget(
        environment,
        agents,
        ticks,
        parts.clock,
        parts.info_reader,
        number,
        gate,
        parts.ticked,
        patience_of(config),
    )
    target.sending = [agent for spec, agent in zip(config.agents, agents, strict=True) if spec.streams]
    return target


class EnvRing(ServiceOrder):
    """Targets in turn, round robin. One that is not ready holds up no other."""

    def __init__(self, targets: Sequence[EnvTarget], parts: ActorContext) -> None:
        self.targets = list(targets)
        self.agents = [pair for target in targets for pair in enumerate(target.agents)]
        self._at = 0
        # A tick is over before the next target's turn, however long its environment
        # takes: then all is drawn in one order, and none is under way between two polls
        # but where its environment is away.
        self._strict = parts.context.experiment.exact_resume and not self.granted
        self._flush, self._least = parts.flush, parts.config.flush_requests
        self._refresh, self._failed = parts.refresh, parts.failed

    @classmethod
    def check(cls, context: Context, config: ActorConfig, environment: Environment) -> None:
        if environment.voids:
            raise ConfigError(
                f"{type(config.environment).__name__}: lanes of this environment wait after a fault, which "
                "only a replay memory can bear; take ReplayActors and a replay memory, or the environment "
                "itself, whose lanes are made anew at once (lane_restarts)"
            )

    @classmethod
    def build(cls, parts: ActorContext) -> Self:
        gates: list[Any] = []
        return cls([build_target(parts, number, gates) for number in range(parts.config.ring)], parts)

    @property
    def steps(self) -> int:
        return sum(target.steps for target in self.targets)

    def seats(self, target: int, lane: int | None) -> Sequence[tuple[Agent, Seats]]:
        return self.targets[target].seats(lane)

    def unsent(self) -> int:
        return sum(target.unsent() for target in self.targets)

    def finish(self, on: bool) -> bool:
        for target in self.targets:
            target.finishing = on
        return all(target.has_finished() for target in self.targets)

    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        for target in self.targets:
            target.enter_stage(stage, options)

    def serve(self, rounds: int) -> None:
        flush, least, refresh = self._flush, self._least, self._refresh
        for _ in range(rounds):
            moved = False
            for target in self:
                if self._strict and target.waits_for_others():
                    self._at = target.number  # nobody is served before it: so all ask in one order
                    return
                try:
                    if target.ready_to_step():  # asked once: a gate may open between two looks
                        if target.all_done():
                            refresh.before_episodes(target.number)
                            target.reset()
                        else:
                            target.step()
                        moved = True
                    if self._strict and not target.wait():
                        self._at = target.number
                        return
                    if target.ready_to_observe():
                        if target.observe():
                            self.ticks += 1
                            moved = True
                            refresh.after_tick()
                        elif self._strict:  # it is away, as it turns out now
                            self._at = target.number
                            return
                except EnvironmentFault as fault:
                    self._failed(target.number, fault)
                    raise
                moved = flush(least) or moved
                if self.called:
                    return  # the next target's turn comes with the next poll
            if not moved and not flush(1):
                return

    def keep_episodes(self) -> None:
        """See `Environment.keep_episodes`."""
        for target in self.targets:
            target.keep_episodes()

    def state(self) -> Part:
        """Return where all targets are, and whose turn it is."""
        targets = {str(target.number): target.state() for target in self.targets}
        return {"targets": targets, "at": self._at, "ticks": self.ticks}

    def load_state(self, state: Part) -> dict[int, dict[int, str]]:
        """Be as the ring was whose state this is. Return of each target the lanes whose
        open episodes were cut, and why."""
        self._at, self.ticks = state["at"], state["ticks"]
        saved = state["targets"]
        return {target.number: target.load_state(saved[str(target.number)]) for target in self.targets}

    def __iter__(self) -> Iterator[EnvTarget]:
        """Yield each target once, beginning with the one whose turn it is; the turn moves
        on with each. One whose environment steps elsewhere, and would now idle while the
        others are served, is yielded again, to be sent its next actions: its requests
        were answered at once."""
        for _ in self.targets:
            target = self.targets[self._at]
            self._at = (self._at + 1) % len(self.targets)
            yield target
            if target.elsewhere and target.ready_to_step():
                yield target
