"""The experiment: all that a run is, as plain typed data. Nothing in it knows where it
will run.

An experiment names policies, groups of workers, and limits. Workers name the streams they
hold ends of; equal names are joined::

    Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=64),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=475.0, steps=600_000),
    )
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite
from numbers import Real
from typing import ClassVar, TypeVar

from tidemill.api.conditions import PROGRESS, check_condition, check_measured, episode_metrics
from tidemill.api.control_messages import Adopt
from tidemill.api.curriculum import Stage, check_curriculum
from tidemill.api.edges import Edge, Port, Role, derive_edges, group_of
from tidemill.api.policy import PolicyConfig
from tidemill.api.transport import Endpoints
from tidemill.core.config import Config, acting, check_name, check_several, layout_setting
from tidemill.core.errors import ConfigError, did_you_mean, returned
from tidemill.core.memory import Need
from tidemill.core.seeding import derive_seed
from tidemill.store.query import Query
from tidemill.store.versions import RESERVED

MOST_THREADS = 1024
MOST_WORKERS = 10_000
"""In a group: what looks at every worker, the sums of the memory that they need among it,
takes a second with so many."""


@dataclass(frozen=True, kw_only=True)
class Limits(Config):
    """The limits of a run: it ends at whichever is reached first. None means no such
    limit.

    steps: env steps that entered training
    updates: finished updates
    seconds: wall time since training began; pauses do not count
    mean_return: mean undiscounted return of the last `window` finished episodes (of each
        agent spec that plays the policy)
    return_of: whose: a policy, or POLICY/AGENTS where several agent specs play it; needed
        where several policies are trained. "any": the first that reaches it
    until: a condition on what the run measures, e.g. "evaluation/return >= 475"; what is
        measured: see `tidemill.api.conditions`
    stall_s: seconds in which no worker has done anything at all, after which the run ends
        as failed, with a checkpoint: no step, request, episode, update, evaluation, or
        writing of a checkpoint. Longer deadlines of environments and trainers
        (`deadline_s`, `ReplayTrainer.max_no_progress_s`) come first; pauses do not count
    """

    steps: int | None = None
    updates: int | None = None
    seconds: float | None = None
    mean_return: float | None = None
    return_of: str = ""
    window: int = 100
    until: str = ""
    stall_s: float | None = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until:
            check_condition("limits.until", self.until)
        for name in ("seconds", "mean_return"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and isfinite(value)):
                raise ConfigError(
                    f"limits.{name} = {value!r} is not a finite number; leave it out for no limit"
                )
        self.check_above_zero("steps", "updates", "seconds", "window", "stall_s")
        if self.return_of and self.mean_return is None:
            raise ConfigError(
                f'limits.return_of = "{self.return_of}" says whose mean return ends the run, and no '
                "limits.mean_return is set; set both"
            )


class WorkerHandle(ABC):
    """A worker handle is what the launcher's entry needs of a worker: `run` for its own
    thread or process, `run_once` to share one thread.

    attendants: those of its thread that do at once what it asks for (`attends`); of
        equal trainers that take turns in one thread the others
    """

    attendants: "Sequence[WorkerHandle]" = ()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once it is COMPLETED or FAILED."""

    @abstractmethod
    def run(self, *others: "WorkerHandle") -> None:
        """Live until told to exit, or until the other end of the control link is gone,
        taking turns with `others`, which share the thread and the bell. Never raises:
        failures go up as a status."""

    @abstractmethod
    def run_once(self) -> bool:
        """Handle what has arrived on the control link and poll once. False when nothing
        could be done."""

    @property
    def attends(self) -> bool:
        """Whether it does at once, by `attend`, what others of its thread ask for."""
        return False

    def attend(self) -> None:
        """Do what one that takes turns with it has asked for. By itself nothing: its turn
        comes."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Config):
    """The configuration of a worker group: `count` equal workers of one kind, named
    ``group-0``, ``group-1`` …

    one_core: whether each one's process keeps to one core (launched in threads: its
        thread, and those that step for it). For actors whose lanes wait in threads
        (`Gymnasium.threads`): Python's global interpreter lock lets one of these run at a
        time anyhow, and they wake one another several times quicker on one core. Not for
        steps that compute outside of that lock: they could use other cores
    restarts: deaths of the group's workers, within `restarts_within_s` seconds, after
        which they begin a new life; one more ends the run. None: the first ends it.
        Workers die where a process of theirs is killed, by hand, for want of memory or by
        a fault of what it calls; an error that a worker reports ends the run at once
    restarts_within_s: seconds in which these deaths are counted
    math_threads: threads that numeric libraries (BLAS, torch) may use in the process of
        each; workers of one process use the most of theirs. More than 1 is for wide
        networks on cores that no other worker needs
    """

    count: int = layout_setting(1)
    restarts: int | None = 5
    restarts_within_s: float = acting(
        600.0,
        lambda worker: worker.restarts is not None,
        "with restarts = None: the first death ends the run",
    )
    one_core: bool = layout_setting(False)
    math_threads: int = layout_setting(1)
    order: ClassVar[int] = 0
    """Who goes from READY to RUNNING first: trainers 1, buffers 2, policy workers 3,
    evaluation 4, population 5, actors 6."""
    owns_environment: ClassVar[bool] = False
    """Whether workers of this kind own environments: they are configured first, and
    answer with their spaces."""
    limited: ClassVar[bool] = False
    """Whether workers of this kind end by themselves, at the limits; one of any other
    kind that returns before it is told to is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(count=1, math_threads=1)
        self.check_least("; None has the first death end the run", restarts=1)
        self.check_above_zero("restarts_within_s")
        if self.math_threads > MOST_THREADS:
            raise ConfigError(
                f"math_threads = {self.math_threads:,} must be at most {MOST_THREADS:,}; more than the "
                "machine has cores is slower"
            )
        if self.count > MOST_WORKERS:
            raise ConfigError(
                f"count = {self.count:,} must be at most {MOST_WORKERS:,}; an actor steps several "
                "environments with lanes"
            )

    @property
    def watches(self) -> bool:
        """Whether the worker only watches: what it does changes nothing of what is
        learnt, and begins anew in a run that is resumed exactly."""
        return False

    @property
    def goes_on_without(self) -> str:
        """Why training goes on without the worker once it has no life left, for messages;
        "" where it cannot."""
        return "it only watches" if self.watches else ""

    @property
    def farewell_s(self) -> float:
        """Extra seconds that the worker may take to end, for instance to write a large
        checkpoint."""
        return 0.0

    def ports(self) -> tuple[Port, ...]:
        """Return the ends of streams that each worker of the group holds."""
        return ()

    def plays(self) -> dict[int, tuple[str, str]]:
        """Return, by index, the agent specs whose episodes the worker reports (as
        `Episodes`): for each its policy and its `match`."""
        return {}

    def measures(self) -> tuple[str, ...] | None:
        """Return the names of the metrics that the worker reports: as `Measured`, a
        trainer with each update. "evaluation/info/" stands for all that begin so. None:
        nobody knows before it runs."""
        return ()

    def forwards(self) -> dict[str, str]:
        """Return the sample streams that the worker fills with samples of others, as
        {filled: taken from}. It is configured when those who fill what it takes from are
        READY, and answers with what it fills (`Facts.samples`)."""
        return {}

    def records(self) -> tuple[str, ...]:
        """Return the names of what the worker has the parameter database know of
        versions."""
        return ()

    def awaited(self, policy: str) -> dict[str, int]:
        """Return what the trainer of `policy` waits for before it trains any further: the
        name of what the worker records of a version, with after how many updates each,
        beginning with the version of none."""
        return {}

    def adoption(self, policy: str, known: Mapping[str, float]) -> Adopt | None:
        """Return from which version of another policy the trainer of `policy` is to go
        on, by what was recorded of its present version; None: from its own."""
        return None

    def queries(self) -> tuple[tuple[str, Query], ...]:
        """Return what the worker asks of the parameter database, as (policy, query)."""
        return ()

    def check(self, experiment: "Experiment") -> None:
        """Raise `ConfigError` for what the worker could not do in this experiment."""

    def least_memory(self) -> Sequence[Need]:
        """Return the least memory that all workers of the group together will take, as
        far as that is known before anything is built."""
        return ()

    def build(self, context: "Context") -> WorkerHandle:
        """Return the worker, not yet configured. Imports what it needs."""
        raise TypeError(f"{type(self).__name__} has no build()")


W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True, kw_only=True)
class Experiment(Config):
    """An experiment is all that a run is, as plain typed data: policies, the workers that
    play and train them, and when the run ends. It does not know where it will run.

    name: name of the experiment; its runs' folders are called after it
    policies: configurations of the policies, by the name that workers call them by
    workers: configurations of the groups of workers, by the group's name
    limits: when the run ends
    together: names of groups whose workers share a process (or thread) and take turns in
        it: actor-0 with trainer-0, actor-1 with trainer-1, and so on; a worker whose
        number no other group has is alone. So every core both gathers and trains, or all
        gather and one trains then; and an actor that waits for its trainer's leave to
        step (`ReplayTrainer`) has it at once
    curriculum: the stages that environments go through, in order; none: their resets are
        given nothing. The last one is what is trained for: `evaluate` and `play` are in
        that
    exact_resume: whether a resumed run goes on as if it had never ended, in every bit: a
        checkpoint is a cut through all workers then, with what actors have in hand, their
        environments and random streams. For runs inline, and for those in lockstep
        (`Trainer.max_policy_lag` = 0); what cannot be cut so is refused. Layouts are as
        given then
    seed: the root of every random stream
    """

    name: str
    policies: dict[str, PolicyConfig]
    workers: dict[str, WorkerConfig]
    limits: Limits = field(default_factory=Limits)
    together: tuple[str, ...] = layout_setting(())
    curriculum: tuple[Stage, ...] = ()
    exact_resume: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("experiment", self.name)
        check_several("together", self.together)
        check_several("curriculum", self.curriculum)
        for name in self.policies:
            check_name("policy", name)
        for name in self.workers:
            check_name("worker", name)
        if self.seed < 0:
            raise ConfigError(f"seed = {self.seed} must not be negative")

    def members(self) -> Iterator[tuple[str, WorkerConfig]]:
        """Yield (name, configuration) of every single worker: ``actor-0``, ``actor-1``,
        …"""
        for group, config in self.workers.items():
            for index in range(config.count):
                yield f"{group}-{index}", config

    def math_threads(self, names: Iterable[str]) -> int:
        """Return how many threads numeric libraries may use in a process that has these
        workers."""
        members = dict(self.members())
        return max(members[name].math_threads for name in names)

    def groups(self, kind: type[W]) -> dict[str, W]:
        """Return the groups of workers of one kind, in order: name → configuration."""
        return {name: config for name, config in self.workers.items() if isinstance(config, kind)}

    def processes(self) -> list[list[str]]:
        """Return the workers that share a process, for each process, in order."""
        counts = {group: self.workers[group].count for group in self.together}
        shared = [
            [f"{group}-{i}" for group, count in counts.items() if i < count]
            for i in range(max(counts.values(), default=0))
        ]
        return [
            [name] for name, config in self.members() if name.rpartition("-")[0] not in self.together
        ] + shared

    def ends(self) -> Iterator[tuple[str, Port]]:
        """Yield the ends of streams of every single worker, as (worker, port)."""
        for name, config in self.members():
            for port in returned(config.ports(), Sequence, config.ports):
                yield name, returned(port, Port, config.ports)

    def ends_of(self, stream: str, role: Role) -> Iterator[tuple[str, Port]]:
        """Yield the ends that are `role` of `stream`, as (worker, port)."""
        return ((name, port) for name, port in self.ends() if (port.stream, port.role) == (stream, role))

    def holders(self, stream: str, role: Role) -> list[str]:
        """Return the workers that hold `role` of `stream`, in order."""
        return list(dict.fromkeys(name for name, _ in self.ends_of(stream, role)))

    def sources(self, stream: str) -> set[str]:
        """Return sample `stream` and those that are sent on into it, from whomever."""
        sent = [pair for config in self.workers.values() for pair in config.forwards().items()]
        found = {stream}
        for _ in sent:
            found |= {taken for into, taken in sent if into in found}
        return found

    def in_lockstep(self, stream: str) -> dict[str, str]:
        """Return who consumes sample `stream` in lockstep with its producers: worker →
        the policy that it trains, "" for one that trains none."""
        return {name: port.policy for name, port in self.ends_of(stream, "consume") if port.lockstep}

    def lag_bounded(self, stream: str) -> bool:
        """True when a consumer of sample `stream`, or of what it is sent on into, drops
        rows that are too many versions behind."""
        into = {
            into
            for config in self.workers.values()
            for into, taken in config.forwards().items()
            if taken == stream
        }
        return any(port.lag_bounded for _, port in self.ends_of(stream, "consume")) or any(
            map(self.lag_bounded, into)
        )

    def trained(self) -> list[str]:
        """Return the policies that are trained."""
        return list(dict.fromkeys(port.stream for _, port in self.ends() if port.role == "publish"))

    def granting(self, stream: str) -> list[Port]:
        """Return the ports by which trainers grant the producers of sample `stream` their
        steps."""
        return [port for _, port in self.ends_of(stream, "grant")]

    def edges(self) -> list[Edge]:
        """Return every channel and cell of the experiment. Raises `ConfigError` for a
        stream that lacks an end, or that cannot be shared so."""
        return derive_edges(list(self.ends()))

    def forwarders(self) -> list[list[str]]:
        """Return the workers that send samples of others on: first those who take from
        none of these, then those who take from the first, and so on. Raises `ConfigError`
        where samples would go round in a circle."""
        waiting = {name: config.forwards() for name, config in self.members() if config.forwards()}
        levels = []
        while waiting:
            filled = {into for forwards in waiting.values() for into in forwards}
            level = [name for name, forwards in waiting.items() if not filled.intersection(forwards.values())]
            if not level:
                circle = ", ".join(
                    f'{name} from "{taken}" into "{into}"'
                    for name, forwards in waiting.items()
                    for into, taken in forwards.items()
                )
                raise ConfigError(
                    f"samples are sent round in a circle ({circle}); let one of them fill a stream that "
                    "leads to a trainer"
                )
            levels.append(level)
            waiting = {name: forwards for name, forwards in waiting.items() if name not in level}
        return levels

    def samples_at_once(self, worker: str, stream: str) -> Fraction:
        """Return how many samples are filled at a time for a consumer of `stream`: one by
        each outlet of an actor, whose samples it may share with others of its group. What
        comes through workers that send samples on counts as many as they take for it."""
        configs = dict(self.members())
        edges = [edge for edge in self.edges() if edge.name.startswith("samples/")]
        takers = Counter((edge.name.rpartition("/")[0], group_of(edge.targets[0])) for edge in edges)

        def arriving(worker: str, stream: str) -> Fraction:
            total = Fraction(0)
            for edge in edges:
                if edge.name.startswith(f"samples/{stream}/") and edge.targets[0] == worker:
                    taken = configs[edge.source].forwards().get(stream)
                    filled = Fraction(1) if taken is None else arriving(edge.source, taken)
                    total += filled / takers[edge.name.rpartition("/")[0], group_of(worker)]
            return total

        return arriving(worker, stream)

    def recorded(self, policy: str) -> set[str]:
        """Return the names of all that the parameter database gets to know of versions of
        `policy`."""
        groups = {group_of(holder) for role in ("store", "draw") for holder in self.holders(policy, role)}
        return {*RESERVED, *(name for group in groups for name in self.workers[group].records())}

    def awaited(self, policy: str) -> dict[str, int]:
        """Return what must be recorded of versions of `policy` before it is trained any
        further: name → after how many updates each."""
        groups = dict.fromkeys(group_of(holder) for holder in self.holders(policy, "draw"))
        return {
            name: updates for group in groups for name, updates in self.workers[group].awaited(policy).items()
        }

    def adoption(self, policy: str, known: Mapping[str, float]) -> Adopt | None:
        """See `WorkerConfig.adoption`."""
        told = (config.adoption(policy, known) for config in self.workers.values())
        return next(filter(None, told), None)

    def players(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """Return the names under which finished episodes are counted: (group, index of
        the agent spec) → names. These are the policy ("" where there is only one) and,
        where several specs play that policy, also POLICY/AGENTS."""
        played = {
            (group, number): who
            for group, config in self.workers.items()
            for number, who in config.plays().items()
        }
        policies = {policy for policy, _ in played.values()}
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for (group, number), (policy, match) in played.items():
            agents = [_plain(other) for which, other in played.values() if which == policy]
            own = _plain(match) if agents.count(_plain(match)) == 1 else f"{group}/{number}"
            found[group, number] = (
                policy if len(policies) > 1 else "",
                *([f"{policy}/{own}"] if len(agents) > 1 else []),
            )
        return found

    def episode_names(self) -> list[str]:
        """Return the names under which episodes count (see `players`), each once."""
        return list(dict.fromkeys(who for names in self.players().values() for who in names)) or [""]

    def judged(self) -> list[str]:
        """Return those of `episode_names` that `Limits.mean_return` applies to; the first
        one that reaches it ends the run. Empty without that limit."""
        limits, names = self.limits, self.episode_names()
        if limits.mean_return is None:
            return []
        policies = [name for name in names if "/" not in name]
        if limits.return_of in names or limits.return_of not in (
            "",
            "any",
            *(policy for policy, _ in self._played()),
        ):
            return [limits.return_of]
        return policies if limits.return_of == "any" else [""]

    def _played(self) -> set[tuple[str, str]]:
        return {who for config in self.workers.values() for who in config.plays().values()}

    def check_judged(self) -> None:
        """Raise `ConfigError` for a limit of the mean return that could be of several
        policies, or is of none."""
        names = self.episode_names()
        for who in self.judged():
            if who in names:
                continue
            several = ", ".join(f'"{name}"' for name in names if name)
            if not who:
                raise ConfigError(
                    f"limits.mean_return = {self.limits.mean_return:g} (--stop-at-return) could be of "
                    f'several: {several}; say of which by limits.return_of (--return-of), or "any" for the '
                    "first that reaches it"
                )
            known = [*(name for name in names if name), *(policy for policy, _ in self._played()), "any"]
            raise ConfigError(
                f'limits.return_of = "{who}" is nobody whose episodes are counted; {did_you_mean(who, known)}'
            )

    def measured_by_several(self) -> set[str]:
        """Return the names of what several groups of workers measure, trainers aside: in
        the metrics the group stands before them."""
        told = Counter(
            name
            for config in self.workers.values()
            if not config.limited
            for name in set(config.measures() or ())
        )
        return {name for name, count in told.items() if count > 1}

    def check_conditions(self, updates: Collection[str] | None = None) -> None:
        """Raise `ConfigError` for a stage that could never end, or a condition on what
        nobody measures (see `tidemill.api.conditions`). Where nobody knows that before
        the first update, it is looked at with what `updates` return."""
        limited = [name for name, config in self.workers.items() if config.limited]
        told = {
            group: config.measures()
            for group, config in self.workers.items()
            if limited == [group] or not config.limited
        }
        several = self.measured_by_several()
        names = {
            f"{group}/{name}" if name in several else name
            for group, measures in told.items()
            for name in measures or ()
        }
        episode_names = {name for who in self.episode_names() for name in episode_metrics(who)}
        known = (
            None
            if None in told.values() and updates is None
            else {*PROGRESS, *episode_names, *(updates or ()), *names}
        )
        check_curriculum(self.curriculum, known)
        check_measured("limits.until", self.limits.until, known)

    def check(self) -> None:
        """Raise `ConfigError` for names that lead nowhere, before anything is started."""
        of_policies = ("publish", "subscribe", "sum", "store", "draw")
        for name, port in self.ends():
            if port.role in of_policies and port.stream not in self.policies:
                raise ConfigError(
                    f'{name} uses policy "{port.stream}", which the experiment lacks; '
                    f"{did_you_mean(port.stream, self.policies)}"
                )
            check_name("stream", port.stream)
        if not any(config.limited for config in self.workers.values()):
            raise ConfigError(
                "the experiment has no trainer, so nothing would ever end it; add one to workers"
            )
        for group in self.together:
            if group not in self.workers:
                raise ConfigError(
                    f'together names "{group}", which is no group of workers; '
                    f"{did_you_mean(group, self.workers)}"
                )
        if len(set(self.together)) < len(self.together):
            raise ConfigError(f"together = {self.together}: these groups must be different")
        self.check_judged()
        self.check_conditions()
        for group, config in self.workers.items():
            for policy, query in config.queries():
                try:
                    query.check(self.recorded(policy))
                except ConfigError as error:
                    cure = (
                        "An Evaluation of the policy adds NAME/return and NAME/length, and with `drawn` "
                        "NAME/win_rate, NAME/elo and NAME/beats"
                    )
                    raise ConfigError(
                        f'{group} draws versions of policy "{policy}": {error}. {cure}'
                    ) from None
        self.edges()
        self.forwarders()
        for config in self.workers.values():
            config.check(self)


def _plain(match: str) -> str:
    """Return the regular expression of an agent spec as a part of a metric's name."""
    return re.sub(r"\W+", "_", match, flags=re.ASCII).strip("_") or "all"


@dataclass
class Context:
    """A context is what a worker is given when it is built.

    name: e.g. ``actor-0``
    endpoints: its ends of edges, its bell and its control link
    folder: the run's folder, or None when nothing is to be kept
    resume: name of the checkpoint to go on from, or None
    spin: seconds to poll without sleeping when nothing can be done: 0 unless every busy
        worker has a core of its own
    math_threads: threads that numeric libraries may use in this worker's process
    life: number of the worker's life, from 0: how often it has died
    gpu: number of the GPU that it takes where its device leaves open which ("cuda",
        "auto"), of as many as there are in turn
    """

    experiment: Experiment
    name: str
    config: WorkerConfig
    endpoints: Endpoints
    folder: str | None = None
    resume: str | None = None
    spin: float = 0.0
    math_threads: int = 1
    life: int = 0
    gpu: int = 0

    def seed(self, *path: str | int) -> int:
        """Return the seed of a part of this worker that plays. Another one after a
        resume, and in each life: what was played before is not to be played again; but
        for runs that resume exactly."""
        again = () if self.resume is None else ("resume", self.resume)
        lives = ("life", self.life) if self.life and not self.experiment.exact_resume else ()
        return derive_seed(self.experiment.seed, self.name, *again, *lives, *path)

    def edges(self, prefix: str) -> list[Edge]:
        """Return the edges whose names begin with `prefix` and of which this worker holds
        an end, in order."""
        return [
            e
            for e in self.experiment.edges()
            if e.name.startswith(prefix) and (e.source == self.name or self.name in e.targets)
        ]
