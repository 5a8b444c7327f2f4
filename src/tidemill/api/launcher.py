"""The launcher contract: where the workers of an experiment live. Nothing in an
experiment or a worker knows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidemill.api.edges import Edge, group_of, number
from tidemill.api.experiment import Experiment
from tidemill.api.transport import Endpoints, Link
from tidemill.api.worker import Context, WorkerHandle
from tidemill.core.errors import returned
from tidemill.core.thread_stacks import Call as Call

DEBUGGED = "is held by a debugger"
"""How the condition of a worker begins that somebody looks into."""


@dataclass(frozen=True)
class Job:
    """A job is an experiment that is to be launched, and what its workers need to be
    built.

    source: the file that defines the experiment's own classes, or None; workers load it
        before they read the experiment
    folder: the run's folder, or None
    resume: name of the checkpoint to go on from, or None
    files: digests of files that workers may run only as they are, by path (see
        `core.user_code.expect`)
    epoch: that of the run's folder (`store/fence.py`); 0: nobody else leads the run
    paces: seconds in which an actor does an env step on a core of a host, by the digest
        of the host's kind, of those that were measured
    gpus: see `Context.gpu`, by worker; those that are not named take that of their number
        in their group
    places: hosts of workers, by name; none: all are on one
    """

    experiment: Experiment
    source: str | None = None
    folder: str | None = None
    resume: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    paces: Mapping[str, float] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def places_of_equals(self, worker: str) -> dict[str, str]:
        """Return the hosts of those that a worker sums with, itself among them, by name:
        see `Context.places`."""
        ports = self.experiment.workers[group_of(worker)].ports()
        equals = [
            name
            for port in ports
            if port.role == "sum"
            for name in self.experiment.holders(port.stream, "sum")
        ]
        return {name: self.places[name] for name in equals if name in self.places}

    def build(
        self, worker: str, endpoints: Endpoints, math_threads: int, spin: float = 0.0, life: int = 0
    ) -> WorkerHandle:
        """Return one of the experiment's workers, not yet configured. See `Context` for
        what it is given."""
        config = self.experiment.workers[group_of(worker)]
        folder, resume, gpu = self.folder, self.resume, self.gpus.get(worker, number(worker))
        context = Context(
            self.experiment,
            worker,
            config,
            endpoints,
            folder,
            resume,
            spin,
            math_threads,
            life,
            gpu,
            self.places_of_equals(worker),
        )
        return returned(config.build(context), WorkerHandle, config.build)


class HostKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the costs of work on a host's cores depend on: they are equal on all hosts of
    a kind.

    processor: its name
    instructions: what numeric libraries choose their kernels by
    native: who may compute plain layers there, the best one last (`native.library`)
    cores: how many a process may use
    python: its version
    packages: versions of packages, None of one that is not there
    """

    processor: str
    instructions: tuple[str, ...]
    native: tuple[str, ...]
    cores: int
    python: str
    packages: dict[str, str | None]

    @property
    def digest(self) -> str:
        """A name for it."""
        return sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class GivenHost(NamedTuple):
    """A host that a run may have: its name, how many of its cores are the run's, its
    kind, and whether it sees the run's folder."""

    name: str
    cores: int
    kind: HostKind
    sees: bool = True


class ProbeAnswer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What came of a measurement of costs: what its process answered, and the status with
    which that ended, or the error for which there is neither."""

    answer: bytes = b""
    status: int = 0
    error: str = ""


class EdgeFigures(NamedTuple):
    """What has gone over an edge to another host: bytes, and for how many seconds
    something that its writer had committed had not come there."""

    sent_bytes: int
    under_way_s: float


class HostFigures(NamedTuple):
    """A host of a run as it is now.

    workers: names of those that are its share
    cores: how many of its are the run's
    sent_bytes, received_bytes: of data, to and from other hosts, so far
    said: messages to other hosts besides data, so far
    round_trip_s: from the runner's host and back; None of that itself, and before it is
        known
    lag: how many versions of a cell it is behind that the runner's host writes, of that
        which is furthest; None of the runner's host
    lost: why it is not there, "" as long as it is
    edges: what has gone from there over each edge to each other host, so far
    at: second of the host's clock at which bytes and messages were counted
    gpus: how many of its are the run's
    home: the host where its share lives: another one where it was lost, "" for none
    """

    workers: Sequence[str]
    cores: int
    sent_bytes: int = 0
    received_bytes: int = 0
    said: int = 0
    round_trip_s: float | None = None
    lag: int | None = None
    lost: str = ""
    edges: Mapping[tuple[Edge, str], EdgeFigures] = {}
    at: float = 0.0
    gpus: int = 0
    home: str = ""


class Loss(NamedTuple):
    """What is known to be lost of a life of a worker whose host was lost.

    life: its number, from 1
    samples: that it had sent, and that have not come to who was to read them
    steps: env steps that it had begun other samples with, exactly; None: not known better
        than it had told itself
    """

    worker: str
    life: int
    host: str
    samples: int = 0
    steps: int | None = None


class Launcher(ABC):
    """A launcher starts the workers of a job, all at once, and ends them. The runner
    speaks to each over its control link.

    It is made before anything is measured or written: what it needs of the machine and
    does not find raises a `TidemillError` then. A new launcher is one file with a
    subclass, and a line in `launchers/table.py`; or a user's own, named as
    ``--launch FILE.py:NAME``.
    """

    processes = False
    """Whether workers have processes of their own. Then their code must be where another
    process finds it, each process takes memory, and how many there are may follow from
    what the work costs (`layouts/`)."""
    takes_turns = False
    """Whether workers take turns in one thread, so that what they do does not depend on
    how long anything takes."""
    outlives_stops = False
    """Whether workers go on while the runner's process is stopped (SIGSTOP, Ctrl-Z), so
    that it has to pause them first."""

    def check(self, experiment: Experiment) -> None:
        """Raise `ConfigError` for an experiment that this launcher cannot launch here:
        for want of memory or open files, say. Called when the experiment is laid out.
        Nobody else compares the memory of processes with what the machine has."""

    def hosts(self, folder: str) -> Sequence[GivenHost]:
        """Return the hosts of the run, the runner's first; () for this machine alone.
        What that takes is begun, and ended by `close`. `folder`: the run's. Raises
        `TidemillError`."""
        return ()

    def measure(
        self, hosts: Sequence[str], experiment: Experiment, source: Path | None, seconds: float
    ) -> Mapping[str, ProbeAnswer]:
        """Have each of these hosts, none of them the runner's, measure what the parts of
        an experiment cost there, all at the same time, in so many seconds at most.
        `source`: the experiment's file. Raises `TidemillError`."""
        raise TypeError(f"{type(self).__name__} has no measure()")

    @abstractmethod
    def launch(self, job: Job) -> dict[str, Link]:
        """Start every worker and return the runner's end of its control link, by worker
        name."""

    @abstractmethod
    def wait(self, seconds: float, least: float = 0.0) -> None:
        """Wait for a message of any worker, `seconds` at most. Where workers have threads
        or processes of their own, first sleep for `least` seconds, whatever comes: to be
        woken by each message would cost more. Else give each worker a turn."""

    @abstractmethod
    def obituary(self, worker: str) -> str:
        """Say how a worker whose link is gone ended (exit status or signal, the tail of
        its output)."""

    def condition(self, worker: str) -> str:
        """Return why a worker makes no progress, where it cannot say so itself ("is
        stopped …", `DEBUGGED` …); "" where nothing is known."""
        return ""

    def stack(self, worker: str) -> "Sequence[Call]":
        """Return where the thread of a worker is, the innermost call first; () where that
        cannot be known."""
        return ()

    def own_bytes(self, worker: str) -> int | None:
        """Return the bytes that a worker's process holds for itself alone, which without
        `processes` is that of all; None where nobody knows."""
        return None

    def each_host(self) -> Mapping[str, HostFigures]:
        """Return the hosts of the run by their names, the runner's first; none where it
        has this machine alone."""
        return {}

    @property
    def lays_spare_edges(self) -> bool:
        """True when it has joined workers by the experiment's `spare_edges`, too, so that
        a policy worker can answer for another one that has no life left."""
        return False

    @property
    def restarts(self) -> bool:
        """True when it can begin new lives of workers; else a death ends the run."""
        return False

    def gone_with(self, worker: str) -> Sequence[str]:
        """Return all workers that are gone since the host of `worker`, which is gone, is;
        () where it is not for want of its host."""
        return ()

    def tell_of_end(self, ends: bool) -> None:
        """Know that the run is to end (`ends`), or is not any more, as all go back, and
        have other hosts know it: one that is told to leave then ends with the run, and
        moves no worker."""

    def moves(self, worker: str) -> bool:
        """True when the host of `worker` is gone in order: it was told to leave, or its
        workers go back to their own."""
        return False

    def losses(self) -> Sequence[Loss]:
        """Return what is known by now to be lost with hosts, of all that was not returned
        before."""
        return ()

    def notices(self) -> Sequence[str]:
        """Return what the user should read of what it has done: whom it has ended that an
        environment had left, say; of all that was not returned before."""
        return ()

    def ready(self, workers: Sequence[str]) -> bool:
        """True when there is a place for the next lives of `workers`. Where their host is
        gone, another one is found meanwhile; where the share hangs that the run's folder
        is on, there is one once it answers. Raises `RunError` where there is none."""
        return True

    def restart(self, workers: Sequence[str]) -> dict[str, Link]:
        """Begin a new life of `workers`, which are all of those that share their threads
        or processes. What is left of the life before is ended, with all that it started.
        Others that read what they write are told by `Renew`. Return the runner's ends of
        their new control links, by worker. Raises `OSError` where the system refuses
        them: none has begun then, and it is called again."""
        raise TypeError(f"{type(self).__name__} has no restart()")

    @abstractmethod
    def close(self, seconds: float) -> None:
        """End what still lives: workers that were told to exit have `seconds` left.
        Afterwards nothing is left behind."""
