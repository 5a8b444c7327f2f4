"""A worker: what its group is configured by, what one of them is given, and what whoever
runs it needs of it::

    worker = config.build(Context(experiment, "actor-0", config, endpoints))
    worker.run()
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from tidemill.api.control_messages import Adopt
from tidemill.api.edges import Edge, Port
from tidemill.api.transport import Endpoints
from tidemill.core.config import Config, acting, layout_setting
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need
from tidemill.core.seeding import derive_seed
from tidemill.store.query import Query

if TYPE_CHECKING:
    from tidemill.api.experiment import Experiment

MOST_THREADS = 1024
MOST_WORKERS = 10_000
"""In a group: what looks at every worker, the sums of the memory that they need among it,
takes a second with so many."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Config):
    """The configuration of a worker group: `count` equal workers of one kind, named
    ``group-0``, ``group-1`` …

    one_core: whether each one's process keeps to one core (launched in threads: its
        thread, and those that step for it). For actors whose lanes wait in threads
        (`Gymnasium.threads`): Python's global interpreter lock lets one of these run at a
        time anyhow, and they wake one another several times quicker on one core. Not for
        steps that compute outside of that lock: they could use other cores
    restarts: deaths of each worker of the group, within `restarts_within_s` seconds,
        after which it begins a new life; one more ends the run. None: the first ends it.
        Of lives that had run for less than a minute so many deaths within a minute are
        allowed to the whole group: what all die of is one error. Workers die where a
        process of theirs is killed, by hand, for want of memory or by a fault of what it
        calls; an error that a worker reports ends the run at once
    restarts_within_s: seconds in which a worker's deaths are counted
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

    def build(self, context: "Context") -> "WorkerHandle":
        """Return the worker, not yet configured. Imports what it needs."""
        raise TypeError(f"{type(self).__name__} has no build()")


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
    places: hosts of those that it sums with, itself among them, by name; none: all are on
        one
    """

    experiment: "Experiment"
    name: str
    config: WorkerConfig
    endpoints: Endpoints
    folder: str | None = None
    resume: str | None = None
    spin: float = 0.0
    math_threads: int = 1
    life: int = 0
    gpu: int = 0
    places: Mapping[str, str] = field(default_factory=dict)

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


class WorkerHandle(ABC):
    """A worker handle is what the launcher's entry needs of a worker: `run` for its own
    thread or process, `run_once` to share one thread.

    company: the others that have turns in its thread, whom it lets have them sooner where
        they are `called`; inline none, where turns depend on no clock
    attendants: those of its thread that do at once what it asks for (`attends`); of
        equal trainers that take turns in one thread the others
    """

    company: "Sequence[WorkerHandle]" = ()
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

    def called(self) -> bool:
        """Return whether it is to have its next turn soon, as it was told something, say:
        for who has a long one in its thread."""
        return False

    @property
    def attends(self) -> bool:
        """Whether it does at once, by `attend`, what others of its thread ask for."""
        return False

    def attend(self) -> None:
        """Do what one that takes turns with it has asked for. By itself nothing: its turn
        comes."""
