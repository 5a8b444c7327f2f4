"""The experiment: all that a run is, as plain typed data. Nothing in it knows where it will run.

An experiment names policies, groups of workers, and limits. Workers name the streams they hold ends of; equal names are joined::

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, Literal

from tidemill.api.policy import PolicyConfig
from tidemill.api.transport import Endpoints
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

Role = Literal["produce", "consume", "ask", "serve", "publish", "subscribe", "sum"]


def check_name(what: str, name: str) -> None:
    """Raise `ConfigError` unless `name` may name a run, a policy, a worker or a stream."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f'{what} "{name}" is not a name: use 1 to 64 of letters, digits, ".", "_" and "-", not beginning with a dot')


@dataclass(frozen=True)
class Port:
    """One end of a stream that a worker holds. Roles: a sample stream is produced and consumed, an inference stream asked and served, a
    policy's parameter stream published and subscribed to; equal trainers of a policy sum what they share. A worker that fills several blocks at a
    time has that many `outlets`. The ends of an inference stream say which `policy` they mean."""

    stream: str
    role: Role
    outlets: int = 1
    policy: str = ""


@dataclass(frozen=True)
class Edge:
    """One channel or cell between workers: `source` writes, `targets` read (one for a channel)."""

    name: str
    kind: Literal["channel", "cell"]
    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Limits(Config):
    """When a run ends, whichever comes first. None means no such limit.

    steps         env steps that entered training
    updates       finished updates
    seconds       wall time since training began
    mean_return   mean undiscounted return of the last `window` finished episodes
    """

    steps: int | None = None
    updates: int | None = None
    seconds: float | None = None
    mean_return: float | None = None
    window: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "updates", "seconds", "window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"limits.{name} = {value} must be above 0; leave it out for no limit")
        for name in ("seconds", "mean_return"):
            value = getattr(self, name)
            if value is not None and not isfinite(value):
                raise ConfigError(f"limits.{name} = {value} is not a finite number; leave it out for no limit")


class WorkerHandle(ABC):
    """What the launcher's entry needs of a worker: `run` for its own thread or process, `turn` to share one thread."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once it is COMPLETED or FAILED."""

    @abstractmethod
    def run(self, *others: "WorkerHandle") -> None:
        """Live until told to exit, or until the other end of the control link is gone, taking turns with `others`, which share the thread and
        the bell. Never raises: failures go up as a status."""

    @abstractmethod
    def turn(self) -> bool:
        """Handle what has arrived on the control link and poll once. False when nothing could be done."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Config):
    """Family of worker groups: `count` equal workers named ``group-0`` … of one kind."""

    count: int = 1
    order: ClassVar[int] = 0
    """Who goes from READY to RUNNING first: parameter store 0, trainers 1, buffers 2, policies 3, evaluation 4, population 5, actors 6."""
    owns_environment: ClassVar[bool] = False
    """Such workers are configured first and answer with their spaces."""
    limited: ClassVar[bool] = False
    """Such workers end by themselves, at the limits; any other that returns before it is told to is an error."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"count = {self.count} must be at least 1")

    def ports(self) -> tuple[Port, ...]:
        """Return the ends of streams that each worker of the group holds."""
        return ()

    def build(self, context: "Context") -> WorkerHandle:
        """Return the worker, not yet configured. Imports what it needs."""
        raise TypeError(f"{type(self).__name__} has no build()")


@dataclass(frozen=True, kw_only=True)
class Experiment(Config):
    """See the module's text.

    together   names of worker groups of one `count` whose members of one number take turns in one process: with equal trainers and an actor beside
               each, every core gathers and trains. Launchers without processes of their own take no notice
    seed       the root of every random stream
    """

    name: str
    policies: dict[str, PolicyConfig]
    workers: dict[str, WorkerConfig]
    limits: Limits = field(default_factory=Limits)
    together: tuple[str, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        check_name("experiment", self.name)
        for name in self.policies:
            check_name("policy", name)
        for name in self.workers:
            check_name("worker", name)
        if self.seed < 0:
            raise ConfigError(f"seed = {self.seed} must not be negative")

    def members(self) -> Iterator[tuple[str, WorkerConfig]]:
        """Yield (name, configuration) of every single worker: ``actor-0``, ``actor-1``, …"""
        for group, config in self.workers.items():
            for index in range(config.count):
                yield f"{group}-{index}", config

    def processes(self) -> list[list[str]]:
        """Return the workers that share a process, for each process, in order."""
        shared = [[f"{group}-{i}" for group in self.together] for i in range(self.workers[self.together[0]].count)] if self.together else []
        return [[name] for name, config in self.members() if name.rpartition("-")[0] not in self.together] + shared

    def holders(self, stream: str, role: Role) -> list[str]:
        """Return the workers that hold `role` of `stream`, in order."""
        return [name for name, config in self.members() if any((p.stream, p.role) == (stream, role) for p in config.ports())]

    def edges(self) -> list[Edge]:
        """Return every channel and cell of the experiment. Raises `ConfigError` for a stream that lacks an end."""
        ports = [(name, port) for name, config in self.members() for port in config.ports()]
        streams: dict[tuple[str, str], None] = {(_FAMILY[p.role], p.stream): None for _, p in ports}
        edges: list[Edge] = []
        for family, stream in streams:
            source_role, target_role = _ENDS[family]
            sources, targets = self.holders(stream, source_role), self.holders(stream, target_role)
            if family == "sums":
                edges += [Edge(f"sums/{stream}/{a}/{b}", "channel", a, (b,)) for a in sources for b in sources if a != b]
                continue
            if not sources or not targets:
                missing, present, held = (source_role, target_role, targets) if not sources else (target_role, source_role, sources)
                if family == "parameters" and not targets:
                    continue  # a trainer whose policy nobody plays: legal
                known = [s for f, s in streams if f == family and self.holders(s, missing)]
                raise ConfigError(
                    f'{family} stream "{stream}": {", ".join(held)} {present}s it, but nobody {missing}s it; '
                    + (did_you_mean(stream, known) if known else f'add a worker that {missing}s "{stream}"')
                )
            if family == "parameters":  # equal trainers publish the same weights, each to its share of those who play them
                groups = {worker.rpartition("-")[0] for worker in sources}
                if len(groups) > 1:
                    raise ConfigError(f'policy "{stream}" is published by {", ".join(sources)}; one group of trainers per policy')
                for i, source in enumerate(sources):
                    if players := tuple(target for target in targets if number(target) % len(sources) == i):
                        edges.append(Edge(f"parameters/{stream}/{source}", "cell", source, players))
            elif family == "samples":
                groups = {worker.rpartition("-")[0] for worker in targets}
                if len(groups) > 1:
                    raise ConfigError(f'sample stream "{stream}" is consumed by {", ".join(targets)}; one group of consumers per sample stream')
                if len(sources) < len(targets):
                    raise ConfigError(
                        f'sample stream "{stream}" has {len(sources)} producers ({", ".join(sources)}) for {len(targets)} consumers '
                        f"({', '.join(targets)}), so that some would never get a sample; let there be at least as many"
                    )
                share = {source: targets[i % len(targets)] for i, source in enumerate(sources)}
                edges += [
                    Edge(f"samples/{stream}/{name}/{outlet}", "channel", name, (share[name],))
                    for name, port in ports
                    if (port.stream, port.role) == (stream, "produce")
                    for outlet in range(port.outlets)
                ]
            else:
                for i, client in enumerate(sources):  # each client is assigned one server
                    server = targets[i % len(targets)]
                    edges.append(Edge(f"requests/{stream}/{client}", "channel", client, (server,)))
                    edges.append(Edge(f"answers/{stream}/{client}", "channel", server, (client,)))
        return edges

    def check(self) -> None:
        """Raise `ConfigError` for names that lead nowhere, before anything is started."""
        for name, config in self.members():
            for port in config.ports():
                if port.role in ("publish", "subscribe", "sum") and port.stream not in self.policies:
                    raise ConfigError(f'{name} uses policy "{port.stream}", which the experiment lacks; {did_you_mean(port.stream, self.policies)}')
                check_name("stream", port.stream)
        if not any(config.limited for config in self.workers.values()):
            raise ConfigError("the experiment has no trainer, so nothing would ever end it; add one to workers")
        counts = {}
        for group in self.together:
            if group not in self.workers:
                raise ConfigError(f'together names "{group}", which is no group of workers; {did_you_mean(group, self.workers)}')
            counts[group] = self.workers[group].count
        if len(set(counts.values())) > 1 or len(counts) < len(self.together):
            raise ConfigError(f"together = {self.together}: these groups must be different and have one count, and they have {counts}")
        self.edges()
        for name, config in self.members():
            for port in config.ports():
                if port.role == "ask":
                    servers = ((server, p.policy) for server, c in self.members() for p in c.ports() if (p.stream, p.role) == (port.stream, "serve"))
                    for server, policy in servers:
                        if policy != port.policy:
                            raise ConfigError(f'{name} asks stream "{port.stream}" for policy "{port.policy}", but {server} serves "{policy}" there')


_FAMILY: dict[Role, str] = {
    "produce": "samples", "consume": "samples", "ask": "inference", "serve": "inference", "publish": "parameters", "subscribe": "parameters",
    "sum": "sums",
}  # fmt: skip
_ENDS: dict[str, tuple[Role, Role]] = {
    "samples": ("produce", "consume"), "inference": ("ask", "serve"), "parameters": ("publish", "subscribe"), "sums": ("sum", "sum"),
}  # fmt: skip


def number(worker: str) -> int:
    """Return a worker's number in its group."""
    return int(worker.rpartition("-")[2])


@dataclass
class Context:
    """What a worker is given at birth.

    name         e.g. ``actor-0``
    endpoints    its ends of edges, its bell and its control link
    folder       the run's folder, or None when nothing is to be kept
    resume       name of the checkpoint to go on from, or None
    spin         seconds to poll without sleeping when nothing can be done: 0 unless every busy worker has a core of its own
    threads      threads that numeric libraries may use in this worker
    """

    experiment: Experiment
    name: str
    config: WorkerConfig
    endpoints: Endpoints
    folder: str | None = None
    resume: str | None = None
    spin: float = 0.0
    threads: int = 1

    def edges(self, prefix: str) -> list[Edge]:
        """Return the edges whose names begin with `prefix` and of which this worker holds an end, in order."""
        return [e for e in self.experiment.edges() if e.name.startswith(prefix) and (e.source == self.name or self.name in e.targets)]
