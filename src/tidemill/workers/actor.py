"""The actor worker: steps environments and sends their rows as samples.

One poll serves its environments up to 16 times, in the order (`ServiceOrder`) that its
configuration asks for: round robin (`EnvRing`); of a replay memory, all that have
answered by now, or strictly in turn (`replay_training`). A target whose agents have their
answers begins a tick, unless its `gate` is closed; a tick whose environment has answered
is stored as rows, by the writer of its mode of samples (`sample_writers`). Requests are
flushed when enough are buffered, or when nothing can proceed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from tidemill.api.control_messages import (
    AnsweredBy,
    EnterStage,
    EnvironmentStatistics,
    Episodes,
    Facts,
    Notice,
    RoundOver,
    SampleFacts,
    State,
    WorkerStatistics,
)
from tidemill.api.environment import Environment
from tidemill.api.spaces import Spaces
from tidemill.api.worker import Context
from tidemill.core.clock import awake
from tidemill.core.cores import every_core
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.forks import end_in_fork
from tidemill.core.step_deadlines import FIRST, StepTimes
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.hanging_threads import HANGING
from tidemill.envs.lane_restarts import LaneRestarts, text_of
from tidemill.envs.parallel_build import close_all, make_all
from tidemill.workers.actor_config import ActorConfig, Actors
from tidemill.workers.actor_context import ActorContext
from tidemill.workers.actor_environments import EnvironmentsAgain, build_environment
from tidemill.workers.actor_limits import check_lanes, check_most_lanes, check_rows
from tidemill.workers.agent import Episode
from tidemill.workers.agent_spec import INLINE, AgentSpec, PlayerSpec, match_agents
from tidemill.workers.base import HEARTBEAT, PollResult, Worker
from tidemill.workers.cut_files import has_cut, has_part, own_part
from tidemill.workers.evaluation import judge_of
from tidemill.workers.inference_clients import make_clients, turn_to
from tidemill.workers.info_numbers import InfoReader
from tidemill.workers.lockstep import check_lockstep
from tidemill.workers.parameter_refresh import ParameterRefresh
from tidemill.workers.ring import EnvRing
from tidemill.workers.stages import ActorStages
from tidemill.workers.step_faults import StepFaults

__all__ = ["INLINE", "MAX_POLL_STEPS", "ActorWorker", "Actors", "AgentSpec", "match_agents"]

MAX_POLL_STEPS = 16
TELL = 5.0  # seconds between notices of how many environments are made
CONNECTS_TO = "what its environment connects to, which is away: {}"  # and how that failed last


def _check(config: ActorConfig, spaces: Sequence[Spaces]) -> None:
    """Raise `ConfigError` for what only the environment tells is impossible."""
    played: dict[str, tuple[PlayerSpec, Spaces]] = {}
    for spec, own in zip(config.agents, spaces, strict=True):
        other, theirs = played.setdefault(spec.policy, (spec, own))
        if own != theirs:
            raise ConfigError(
                f'agent specs "{other.match}" and "{spec.match}" play policy "{spec.policy}", but their '
                "agents have different spaces; give each kind a policy"
            )


class ActorWorker(Worker):
    """The actor worker: it steps its environments and sends the rows that its agents
    write."""

    def __init__(self, context: Context, config: ActorConfig) -> None:
        super().__init__(context)
        self._config = config
        self._environments: list[Environment] = []
        self._restarts: LaneRestarts | None = None
        self._times = StepTimes()  # of ticks
        self._beat_at = self.clock.since
        self._counted = (0, 0)  # env steps and ticks of polls that have ended
        self._ring: EnvRing | None = None  # what is cut, in runs that resume exactly
        self._stages = ActorStages(
            context,
            judge_of(context.experiment, config.agents) is not None,
            self._tell_round,
            lambda stage, options: self.order.enter_stage(stage, options),
        )
        self._slots = isinstance(config.environment, Slots)
        # of slots every fault is told (`replay_training.slot_fault_notices`)
        tell = (lambda text: None) if self._slots else self._tell
        self._budget = LaneRestarts(config.most_restarts, config.lane_restarts_within_s, tell)
        # a server has said what it is as the environment was made
        self._budget.known = self._slots or config.environment.bare().remote
        if config.most_restarts or self._slots:
            self._restarts = self._budget
        self._again: EnvironmentsAgain | None = None
        if context.life or context.resume is not None:
            # what was there before may be there again later; what never was is named
            self._budget.known = True
            self._again = EnvironmentsAgain(
                self._make_environments,
                partial(self._make_environment, 0) if config.environment.bare().remote else None,
                self._permit_again,
                context.endpoints.bell.ring,
            )
        self._faults = StepFaults(context, config, self.clock, self._tell)
        self._finishing = False  # it begins no sample any more, and pauses then

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        check_lockstep(context.experiment, config)
        if not self._environments:
            self._make_environments()
        first = self._environments[0]
        for number, other in enumerate(self._environments):
            if other.agents != first.agents:
                raise ConfigError(
                    f"{self._where(number)}the environment has other agents, or spaces, than that of the "
                    f"first: {other.agents}, not {first.agents}. Let them follow from its arguments alone"
                )
        groups = match_agents(first.agents, config.agents)
        spaces = [first.agents[group[0]].spaces for group in groups]
        _check(config, spaces)
        order = config.service_order(context)
        order.check(context, config, first)
        needs = check_rows(context, config, first)
        lanes, targets = (config.ring * config.lanes, 1) if order.one_target else (config.lanes, config.ring)
        rows = [lanes * len(group) * (1 + first.same_step) for group in groups]
        self._clients = make_clients(context, config, spaces, rows, targets, self.clock)
        self._refresh = ParameterRefresh(context.experiment, config, first, self._clients, order.granted)
        self._reported = config.plays()
        self.order = order.build(
            ActorContext(
                context,
                config,
                self._environments,
                groups,
                spaces,
                self._clients,
                self._refresh,
                self._flush,
                self.clock,
                InfoReader(self._tell),
                self._tell,
                self._stages,
                self._ticked,
                self._faults.ends,
            )
        )
        if context.experiment.exact_resume and has_part(context.experiment, context.name):
            assert isinstance(self.order, EnvRing)  # where steps are granted, trainers keep what is open
            self._ring = self.order
            self._ring.keep_episodes()  # from the first stage on
        self._faults.watch(self.order, self._environments, groups, self._ring is not None)
        self._stages.begin()
        self._go_on_from_cut()
        self._counted = self.order.steps, self.order.ticks
        return Facts(
            spaces={spec.policy: own for spec, own in zip(config.agents, spaces, strict=True)},
            samples={
                stream: SampleFacts(
                    len(group),
                    spec.burn_in,
                    spec.bootstrap,
                    spec.mode,
                    spec.padded,
                    config.lanes * len(group) if spec.writer().by_seat else 1,
                )
                for spec, group in zip(config.agents, groups, strict=True)
                for stream in spec.streams
            },
            memory=tuple(needs),
        )

    def _go_on_from_cut(self) -> None:
        """Be where the actor was when the run was cut, if it was."""
        if self._ring is None:
            return
        for client in self._clients.values():
            client.state()  # so that a policy which cannot tell its random stream is refused now
        if has_cut(self.context):
            with own_part(self.context) as part:
                self._stages.load_state(part)
                for number, client in enumerate(self._clients.values()):
                    client.load_state(part["clients"][str(number)])
                self._refresh.load_state(part["refresh"])
                if self._restarts is not None:
                    self._restarts.before = part["restarts"]
                lost = self._ring.load_state(part["ring"])
            for target, lanes in lost.items():
                for why in sorted(set(lanes.values())):
                    cut = [lane for lane in lanes if lanes[lane] == why]
                    self._tell(
                        f"target {target}: the open episodes of {len(cut)} of {self._config.lanes} lanes "
                        f"(lane {cut[0]} first) are cut, so that the run does not go on exactly as it would "
                        f"have: {why}"
                    )

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        if self._ring is None:
            return
        part = {
            "clients": {str(number): client.state() for number, client in enumerate(self._clients.values())},
            "refresh": self._refresh.state(),
            "ring": self._ring.state(),
            "restarts": 0 if self._restarts is None else self._restarts.before + self._restarts.count,
            **self._stages.state(),
        }
        self._parts.write(part, self.cut, checkpoints)

    def _tell(self, text: str) -> None:
        self.report(Notice(text))

    def _there(self) -> bool:
        """Make environments that were there before, as soon as they are there again."""
        again = self._again
        if again is None or ((self._tries or not again.tries) and again.made()):
            self._again = None  # its last fault holds what has failed
            return True
        if (again.pauses or not self._tries) and awake() - self._last_beat > HEARTBEAT:
            self._last_beat = awake()
            away = CONNECTS_TO.format(again.away) if again.away else ""
            self.report(WorkerStatistics(self.polls, progress=again.tries, away=away, pauses=True))
        return False

    def _permit_again(self, fault: Exception) -> int:
        if not self._config.most_restarts:
            raise EnvironmentFault(
                f"{text_of(fault)}. It was there before, but is not tried again, since lane_restarts = None; "
                "with a number of them it is (--set workers.actor.lane_restarts=N)"
            ) from fault
        number = self._budget(fault)
        if self._slots and number == 1:  # of which nothing else tells it
            text = text_of(fault).partition("\n")[0]
            self._tell(f"{text}; it is tried again, after pauses that grow")
        return number

    def _make_environments(self, first: Environment | None = None) -> None:
        """Make all targets' environments, but for the `first`, where that is given."""
        config, context, told_at = self._config, self.context, monotonic()
        close_all(self._environments)  # of a try before
        self._environments[:] = [] if first is None else [first]  # is closed, whatever comes
        with every_core():
            check_lanes(context, config, context.seed("target", 0))

        def make(number: int) -> Environment:
            return first if first is not None and number == 0 else self._make_environment(number)

        for environment in make_all(make, range(config.ring)):
            if environment is not first:
                self._environments.append(environment)
            if len(self._environments) == 1:
                check_most_lanes(context, config, environment)
            if (now := monotonic()) - told_at > TELL and len(self._environments) < config.ring:
                told_at = now
                self._tell(f"{len(self._environments)} of {config.ring} environments are made")

    def _make_environment(self, number: int) -> Environment:
        config, seed = self._config, self.context.seed("target", number)
        # in whichever thread: what it starts is no part of this process, and who steps
        # for it keeps to this one's core
        try:
            with every_core():
                return build_environment(config, config.lanes, seed, permit=self._permit(number))
        finally:
            end_in_fork(self._forks)

    def _permit(self, number: int) -> Callable[[Exception], int] | None:
        """Return what a target's environment asks before it makes a lane anew."""
        restarts, where = self._restarts, self._where(number)
        if restarts is None:
            return None

        def permit(fault: Exception) -> int:
            record = self._faults.note(number, fault)
            try:
                return restarts(fault, where)
            finally:
                if not self._slots:  # whose faults are told now and then, by themselves
                    self._faults.tell(record)

        return permit

    def _where(self, number: int) -> str:
        """Return in which target a fault was, in words; "" where there is one alone."""
        return f"{'slot' if self._slots else 'target'} {number}: " * (self._config.ring > 1)

    def start(self) -> None:
        self._refresh.start()
        self._finishing = False
        self.order.finish(False)
        super().start()

    def _finish(self) -> None:
        # where all is cut, and gone back to, what is begun is void in any case
        self._finishing = self.state is State.RUNNING and self._ring is None
        if not self._finishing:
            self.pause()

    def _enter_stage(self, message: EnterStage) -> None:
        self._stages.hear(message)

    def _turn_to(self, message: AnsweredBy) -> None:
        turn_to(self.context, self._clients, message)

    def _tell_round(self, number: int) -> None:
        """Tell that the actor's part of a round is done, after the episodes that ended in
        it: all of them then, by targets, whenever they were polled."""
        self._report_episodes()
        self.report(RoundOver(number))

    def _poll(self) -> PollResult:
        order = self.order
        if self._finishing and order.finish(True):
            self.pause()
            return PollResult()
        steps, ticks = self._counted = order.steps, order.ticks
        order.called = False
        order.serve(MAX_POLL_STEPS)
        if order.ticks > ticks and self._stages.rounds is None:
            self._report_episodes()
        self.order.look()
        self._counted = order.steps, order.ticks
        return PollResult(order.steps - steps, order.ticks - ticks)

    def _counts(self) -> tuple[int, int]:
        steps, ticks = self._counted
        return self._samples + self.order.steps - steps, self._batches + self.order.ticks - ticks

    def _flush(self, least: int) -> bool:
        """Flush where at least `least` requests are buffered. True when anything was
        sent."""
        sent = False
        for client in self._clients.values():
            if (buffered := client.buffered) >= least:
                self._refresh.before_actions(client)
                client.flush()
                sent |= client.buffered < buffered
        if sent and self.attendants:
            left = self.clock.enter("wait")
            for worker in self.attendants:
                worker.attend()
            self.clock.enter(left)
        return sent

    def _stats(self) -> dict[str, float]:
        for environment in self._environments:
            if told := environment.statistics():
                self.report(EnvironmentStatistics(told))
        restarts = {} if self._restarts is None else self._restarts.stats()
        hanging = {"lanes/hanging": float(HANGING.count)} if HANGING.count else {}
        return self.order.stats() | restarts | hanging | self._faults.stats()

    def _progress(self) -> int:
        tries = 0 if self._restarts is None else self._restarts.tries
        return self.order.ticks + self.order.steps + tries

    def _away(self) -> tuple[str, bool]:
        restarts = self._restarts
        gone = {self._where(n): each for n, each in enumerate(self._environments) if each.away}
        if restarts is None or not gone:
            return self.order.rest(), False
        # a try may take as long as one makes such an environment, and resets it
        longest = max(
            (each.deadline(resetting=True) for every in gone.values() for each in every.times), default=0.0
        )
        away = next(filter(None, (restarts.away.get(where, "") for where in gone)), "")
        return away and CONNECTS_TO.format(away), restarts.pauses(longest + max(FIRST, longest))

    def _unsent(self) -> int:
        return self.order.unsent()

    def _unfilled(self) -> int:
        return sum(agent.writer.unfilled() for _, agent in self.order.agents)

    def _paces(self) -> dict[str, float]:
        p99, longest = self._times.p99(), self._times.longest()
        return {"tick_longest": longest} if p99 is None else {"tick_p99": p99}

    def _ticked(self, seconds: float, resets: bool) -> None:
        """Take note of a tick, and let the runner know that the actor is alive, and
        others of its thread have their turn where they are called: one poll has many."""
        self._budget.known = True
        if not resets:
            self._times.add(seconds)
        if (since := self.clock.since) - self._beat_at > HEARTBEAT:
            self._beat_at = since
            self._beat()
            self.order.called = self._hurry or any(each.called() for each in (self, *self.company))

    def _report_episodes(self) -> None:
        by_spec = dict[int, list[Episode]]()
        for spec, agent in self.order.agents:
            if agent.episodes:
                if spec in self._reported:
                    by_spec.setdefault(spec, []).extend(agent.episodes)
                agent.episodes.clear()
        for spec, episodes in by_spec.items():
            for stage in {stage for _, _, stage, _ in episodes}:
                returns, lengths, _, infos = zip(
                    *(each for each in episodes if each[2] == stage), strict=True
                )
                self.report(
                    Episodes(spec, stage, list(returns), list(lengths), list(infos) if any(infos) else [])
                )

    def _on_exit(self) -> None:
        self.order.end()
        self._faults.end()
        self._budget.end()

    def _close(self) -> None:
        if self._again is not None:
            self._again.give_up()
        close_all(self._environments)
