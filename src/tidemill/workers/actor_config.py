"""The configuration of actors: what they step, how many copies of it, and in which
order."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.edges import Port
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig, WorkerHandle
from tidemill.core.config import acting, check_several, layout_setting
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.memory import Need
from tidemill.store.query import Query
from tidemill.streams.sources import Newest
from tidemill.workers.agent_spec import INLINE, PLAYED, AgentSpec, PlayerSpec

if TYPE_CHECKING:
    from tidemill.workers.service_order import ServiceOrder


NOT_SENT = "without agents whose samples are kept"


def _sends(actors: Any) -> bool:
    return any(spec.streams for spec in actors.agents)


@dataclass(frozen=True, kw_only=True)
class ActorConfig(WorkerConfig):
    """The configuration of actor workers, which step environments: what `Actors` and
    `ReplayActors` have in common.

    environment: the environment that they step
    lanes: number of copies of the environment in one target, stepped together
    ring: number of targets, served in turn: more than 1 lets an actor step one while
        another waits for answers
    max_episode_steps: step limit per episode: episodes are cut (truncated) there. It
        comes on top of the environment's own limit (`Gymnasium.max_episode_steps`): the
        smaller one holds. 0: the environment's alone
    flush_requests: number of requests buffered before they are sent; fewer go out when
        nothing else can proceed
    slots: number of samples of each target that a stream holds at a time: one is filled
        while the others are trained on. Where a sample is an episode (`AgentSpec.mode`
        "full" and "concise"), so many of each seat
    deadline_s: seconds after which a step or reset of the environment counts as hung, in
        lanes, slots, simulators and sessions of servers alike; inf: never. A lane that
        steps in a thread of its own (`Gymnasium(threads=…)`) is left there and made anew,
        as after a fault, a simulator is ended, a server's call broken off; an actor that
        hangs itself, in a process of its own, is taken for dead and lives again. None: 20
        times the 99th percentile of what steps took, 10 s at least; 300 s as long as less
        than 100 are known, and for resets. A `deadline_s` of the environment's own comes
        first
    lane_restarts: how often an actor's lanes (slots, simulators, sessions) that raise,
        hang, die, or tell what is no number or not what their spaces say, are made anew
        within `lane_restarts_within_s` seconds: the step is void, its episode is cut
        before it. So is each further try to make what connects to something that is away
        (a server), after 5 s and twice as long each time. One more ends the run, with the
        first cause and the last; None: the first one does; "auto": 5, slots any number,
        since they rest for longer each time. An environment that cannot make a single
        lane anew makes all of them anew; one of which there is only one ends with the
        first
    lane_restarts_within_s: seconds within which restarts are counted
    lane_fault_records: how many steps that an actor's lanes lost so are kept in the run's
        folder with what led to them and what was told, the newest ones; 0: none
    min_running: share of the group's actors that must run for trainers to train: while
        fewer do, since others have died (with a host that is lost, say) and their next
        lives have not begun, all trainers pause, which counts as no time of training, and
        go on after that. Actors without whom the run goes on do not count. Inline and in
        threads nobody lives again. None: they train on what the rest sends, as far as
        that goes
    """

    order: ClassVar[int] = 6
    owns_environment: ClassVar[bool] = True
    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "min_healthy_slots": (
            1,
            "slots that fail rest and come back; a run ends when no step is stored for "
            "ReplayTrainer.max_no_progress_s seconds",
        )
    }

    environment: EnvironmentConfig
    lanes: int = layout_setting(8)
    ring: int = layout_setting(1)
    max_episode_steps: int = 0
    deadline_s: float | None = None
    lane_restarts: int | Literal["auto"] | None = "auto"
    lane_restarts_within_s: float = acting(
        600.0,
        lambda actors: actors.lane_restarts is not None,
        "without lane_restarts: the first fault ends the run",
    )
    lane_fault_records: int = 10
    min_running: float | None = acting(
        None,
        lambda actors: actors.restarts is not None,
        "with restarts = None: the first death ends the run",
    )
    flush_requests: int = acting(
        1,
        lambda actors: actors.ring * len(actors.agents) > 1,
        "with ring = 1 and one agent spec: there is one request at a time",
    )
    slots: int = acting(2, _sends, NOT_SENT, layout=True)

    @property
    @abstractmethod
    def agents(self) -> Sequence[PlayerSpec]:
        """The agents that they play, by policy."""

    def __post_init__(self) -> None:
        self.check_least(
            lanes=1, ring=1, max_episode_steps=0, flush_requests=1, slots=1, lane_fault_records=0
        )
        self.check_deadlines("deadline_s")
        self.check_above_zero("lane_restarts_within_s", "min_running")
        if self.min_running is not None:
            self.check_shares("min_running")
        if isinstance(self.lane_restarts, int):
            self.check_least("; None has the first fault end the run", lane_restarts=1)
        elif self.lane_restarts not in ("auto", None):
            raise ConfigError(
                f'lane_restarts = {self.lane_restarts!r} must be a whole number, "auto" or None'
            )
        super().__post_init__()

    @property
    def most_restarts(self) -> float:
        """How often lanes are made anew within `lane_restarts_within_s`; 0: not once,
        inf: any number of times."""
        usual = self.environment.usual_restarts
        return usual if self.lane_restarts == "auto" else self.lane_restarts or 0

    def ports(self) -> tuple[Port, ...]:
        ports = []
        for spec in self.agents:
            ports += [
                Port(stream, "produce", outlets=self.ring, lockstep=True, gathers=spec.mode == "transitions")
                for stream in spec.streams
            ]
            ports += (
                spec.parameters.ports(spec.policy)
                if spec.inference == INLINE
                else (Port(spec.inference, "ask", policy=spec.policy),)
            )
        return tuple(dict.fromkeys(ports))

    def least_memory(self) -> Sequence[Need]:
        row = sum(field.nbytes for field in ROW_FIELDS.values())
        needs = []
        for spec in self.agents:
            sums = f"{spec.sample_steps:,} rows x {self.lanes:,} lanes x {row} bytes at least"
            if spec.streams:
                needs.append(Need("samples", spec.sample_steps * self.lanes * row, sums))
        return needs * (self.count * self.ring)

    def plays(self) -> dict[int, tuple[str, str]]:
        """Return the specs that play the newest version; others are opponents, or
        evaluated elsewhere."""
        return {
            number: (spec.policy, spec.match)
            for number, spec in enumerate(self.agents)
            if spec.parameters == Newest()
        }

    def queries(self) -> tuple[tuple[str, Query], ...]:
        return tuple((spec.policy, query) for spec in self.agents for query in spec.parameters.queries())

    def check(self, experiment: Experiment) -> None:
        if experiment.exact_resume:
            self.refuse_idle(
                "min_running", "in a run with exact_resume: all of its workers begin anew together"
            )
        if self.most_restarts == inf:
            self.refuse_idle(
                "lane_restarts_within_s",
                "in slots without a number of lane_restarts: they are made anew as often as it takes",
            )
        for spec in self.agents:
            if spec.policy not in experiment.policies:
                known = did_you_mean(spec.policy, experiment.policies)
                raise ConfigError(
                    f'agent spec "{spec.match}" plays policy "{spec.policy}", which the experiment lacks; '
                    f"{known}"
                )

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: simulators had `restarts` of their own,
        so many each. See `Config.of_today`."""
        environment = data.get("environment")
        if not isinstance(environment, dict) or environment.get("kind") != "SimulatorEnvironment":
            return data
        counts = (environment.get("restarts"), data.get("lanes", cls.lanes), data.get("ring", cls.ring))
        if not all(isinstance(count, int) and count > 0 for count in counts):
            return data
        kept = {name: value for name, value in environment.items() if name != "restarts"}
        return {**data, "environment": kept, "lane_restarts": prod(counts)}

    @abstractmethod
    def service_order(self, context: Context) -> "type[ServiceOrder]":
        """Return in which order the environments are served."""

    def build(self, context: Context) -> WorkerHandle:
        from tidemill.workers.actor import ActorWorker

        return ActorWorker(context, self)


@dataclass(frozen=True, kw_only=True)
class Actors(ActorConfig):
    """Actor workers step environments and send samples of the agents' rows to trainers.

    A *target* is a vector of environments that are stepped together, each a *lane* of it;
    a *ring* is an actor's targets, served in turn. A *seat* is one agent in one lane, a
    *row* one step of one seat. A *slot* is a place for one sample in a stream. An episode
    that *ended* is terminated, one that was *cut* is truncated.

    agents: which policies play, and what becomes of their rows; of several that match an
        agent the first one plays it
    slots: as of `ActorConfig`. With 1 actors wait for the update, and act by its weights;
        with 2 they gather meanwhile, and half of the rows are an update older
    """

    agents: tuple[AgentSpec, ...] = layout_setting((AgentSpec(),))
    slots: int = acting(1, _sends, NOT_SENT, layout=True)

    def __post_init__(self) -> None:
        check_several("agents", self.agents)
        if not self.agents:
            raise ConfigError("agents is empty: an actor needs at least one AgentSpec")
        super().__post_init__()
        streams = [stream for spec in self.agents for stream in spec.streams]
        if len(set(streams)) < len(streams):
            raise ConfigError(
                f"two agent specs use one sample stream ({', '.join(streams)}); give each its own"
            )

    def service_order(self, context: Context) -> "type[ServiceOrder]":
        from tidemill.workers.ring import EnvRing

        return EnvRing

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: actors of one spec whose mode was
        "stepwise" are `ReplayActors` now, and where nobody's samples are kept the default
        that `slots` had then is left out. See `Config.of_today`."""
        data = super().of_today(data)
        specs = data.get("agents")
        sent = not isinstance(specs, list) or any(
            not isinstance(s, dict) or s.get("samples", True) for s in specs
        )
        if not sent and data.get("slots") == 2:
            data = {name: data[name] for name in data if name != "slots"}
        spec = specs[0] if isinstance(specs, list) and len(specs) == 1 else None
        if not isinstance(spec, dict) or spec.get("mode") != "stepwise":
            return data
        others = {name: value for name, value in data.items() if name != "agents"}
        played = {name: spec[name] for name in PLAYED if name in spec}
        return {**others, **played, "kind": "ReplayActors"}
