"""The launcher of several hosts: the runner's own and those that an engine brings. Each
other host has an agent (`launchers/host.py`) that starts its share of the workers; here
the runner speaks to all of them as if they were its own.
"""

import json
import os
import sys
import tempfile
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Call, HostFigures, Job, Launcher
from tidemill.api.transport import Link
from tidemill.core.config import encode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError, SchemaError
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import read_plain
from tidemill.core.user_code_loading import (
    is_installed,
    named_files,
    named_modules,
    own_code,
    own_path,
    with_files_moved,
)
from tidemill.hosts.crossing import neighbours
from tidemill.hosts.orders import (
    Ask,
    CallHost,
    Close,
    Closed,
    Here,
    Introduction,
    Launched,
    Listen,
    Listening,
    Logged,
    Order,
    Report,
    Revive,
    Speak,
    Traffic,
    Whereabouts,
    Work,
    WorkerGone,
    pack,
    unpack_report,
)
from tidemill.hosts.peer import Peer, now
from tidemill.hosts.wire import Wire, WireThread
from tidemill.launchers.engine import RUNNER, HostEngine, StartedAgent
from tidemill.launchers.host import MOST_LOGGED_BYTES, HostWorkers, versions
from tidemill.launchers.placement import place
from tidemill.launchers.processes import log_name
from tidemill.transports.shared import EventBell

MOST_CODE_BYTES = 16 << 20
"""The most bytes of the user's own code that are sent to hosts."""
JOIN_S = 60.0
"""Seconds that a host has to answer an order at the start."""
VOID_S = 6.0
"""Seconds without a word of a host after which its workers are taken for dead."""
_ANSWER_S = 1.0  # seconds to wait for where a worker's thread is
_FAREWELL_S = 3.0  # seconds beyond those of its workers that an agent has to end


@dataclass
class KnownHost:
    """A host and its agent, as the runner knows them.

    here: what its host has, once it has told
    links: of its workers, by name
    obituaries: how its workers ended
    lost: why it is given up, "" as long as it is not
    logged: bytes of each log that it has told
    traffic: what it has told other hosts and heard of them
    """

    host: str
    started: StartedAgent
    peer: Peer
    here: Here | None = None
    links: "dict[str, HostLink]" = field(default_factory=dict)
    obituaries: dict[str, str] = field(default_factory=dict)
    listening: dict[str, Listening] = field(default_factory=dict)
    answer: Whereabouts | None = None
    launched: Launched | None = None
    closed: bool = False
    lost: str = ""
    logged: dict[str, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


class HostLink(Link):
    """The runner's end of the control link of a life of a worker on another host. `tell`:
    tells the host's agent an order."""

    def __init__(self, worker: str, tell: Callable[[Order], None], life: int = 0) -> None:
        self.worker, self.life, self._tell = worker, life, tell
        self.messages = deque[bytes]()
        self.gone = False

    def send(self, message: bytes) -> bool:
        if not self.gone:
            self._tell(Speak(self.worker, self.life, message))
        return not self.gone

    def receive(self) -> list[bytes] | None:
        messages = list(self.messages)
        self.messages.clear()
        return None if self.gone and not messages else messages


def order_of(job: Job, places: dict[str, str], seen: str) -> Work:
    """Return the order to start workers, with the user's own files in it (see `Work`).
    Raises `ConfigError`."""
    config = encode(job.experiment)
    whole = {file: os.path.realpath(file) for file in named_files(config)}
    named = [*filter(None, [job.source]), *whole.values(), *named_modules(config)]
    files = [file for file in own_code(named) if not is_installed(file)]
    code = {str(file): read_plain(file, links=True) for file in files}
    if (size := sum(map(len, code.values()))) > MOST_CODE_BYTES:
        raise ConfigError(
            f"the user's own code has {size:,} bytes in {len(code)} files, and hosts are sent "
            f"{MOST_CODE_BYTES:,} at most; install what is large on each of them"
        )
    return Work(
        json.dumps(with_files_moved(config, whole)),
        places,
        None if job.source is None else os.path.realpath(job.source),
        job.folder,
        job.resume,
        seen,
        dict(job.files),
        own_path(),
        code,
    )


@contextmanager
def seen_file(folder: Path | None) -> Iterator[str]:
    """Keep a file in a folder by which hosts know that they see the same one; its path,
    or "" without a folder."""
    if folder is None:
        yield ""
        return
    with tempfile.NamedTemporaryFile(prefix="seen-", dir=folder) as file:
        yield os.path.realpath(file.name)


def _listens(other: str, agent: KnownHost) -> bool:
    return other in agent.listening


def check_hosts(hosts: object) -> None:
    """Raise `ConfigError` unless it is a number of hosts, or None."""
    if hosts is not None and (type(hosts) is not int or hosts < 1):
        raise ConfigError(f"--hosts {hosts!r}: it must be a whole number of at least 1")


class HostsLauncher(Launcher):
    """The launcher of several hosts starts a process per worker, or per group of workers
    that take turns, on the hosts that its engine brings and on the runner's. A subclass
    says which engine, and is named as ``--launch FILE.py:NAME``."""

    processes = True
    outlives_stops = True

    def __init__(self, place: Mapping[str, str] | None = None) -> None:
        """`place`: the hosts of workers and groups that the user has chosen, by name."""
        self._chosen = dict(place or {})
        if not sys.platform.startswith("linux"):
            raise RunError(f"several hosts need Linux (memfd, eventfd), and this is {sys.platform}")
        self._engine: HostEngine | None = None
        self._wire: Wire | None = None
        self._bell = -1
        self._own: HostWorkers | None = None
        self._agents: dict[str, KnownHost] = {}
        self._asked = 0
        self._heart: WireThread | None = None  # before there is one of workers
        self._logs: Path | None = None
        self._processes: list[list[str]] = []

    @abstractmethod
    def engine(self) -> HostEngine:
        """Return what brings the other hosts."""

    def hosts(self, folder: str) -> Sequence[int]:
        try:
            self._meet(folder)
        except BaseException:  # a Ctrl-C, too
            self.close(0.0)
            raise
        assert self._wire is not None
        # what is measured meanwhile takes longer than hosts wait for a word of the runner
        self._heart = WireThread(self._wire, lambda: None)
        self._heart.start()
        return list(self._cores().values())

    def launch(self, job: Job) -> dict[str, Link]:
        if self._heart is not None:
            self._heart.end()
            if self._heart.error is not None:
                raise RunError(f"the wire to other hosts has ended: {self._heart.error}")
            self._heart = None
        if self._wire is None:
            self._meet(job.folder)
        assert self._wire is not None
        experiment = job.experiment
        self.places, self._processes = place(experiment, self._cores(), self._chosen), experiment.processes()
        if self._logs is not None:
            for names in self._processes:
                (self._logs / log_name(names)).unlink(missing_ok=True)  # of the run that is resumed
        self._join_agents(experiment)
        self._own = HostWorkers(self._wire, job, self.places)
        links: dict[str, Link] = dict(self._own.links)
        with seen_file(self._logs) as seen:
            work = order_of(job, self.places, seen)
            for agent in self._agents.values():
                for worker, host in self.places.items():
                    if host == agent.host:
                        links[worker] = agent.links[worker] = HostLink(worker, self._teller(host))
                self._tell(agent.host, work)
            for agent in self._agents.values():
                self._await(agent, "start its workers", lambda agent: agent.launched is not None)
                assert agent.launched is not None
                if agent.launched.error:
                    raise RunError(f"host {agent.host} cannot start its workers: {agent.launched.error}")
        self._own.begin()
        return {name: links[name] for name, _ in experiment.members()}

    def _keep_log(self, agent: KnownHost, logged: Logged) -> None:
        """Append to a log in the run's folder what its host has told. Raises
        `SchemaError`."""
        kept = agent.logged.get(logged.log, 0) + len(logged.text)
        logs = {log_name(names) for names in self._processes if self.places[names[0]] == agent.host}
        if logged.log not in logs or kept > MOST_LOGGED_BYTES:
            raise SchemaError(f"it tells {kept} bytes of a log called {logged.log[:100]!r}")
        agent.logged[logged.log] = kept
        if self._logs is not None:
            with suppress(OSError), open(self._logs / logged.log, "ab", opener=private) as file:
                file.write(logged.text)

    def _cores(self) -> dict[str, int]:
        """Return how many cores of each host are the run's."""
        assert self._engine is not None
        own = self._engine.own_cores
        found = {RUNNER: cores() if own is None else min(own, cores())}
        for agent in self._agents.values():
            assert agent.here is not None
            given = agent.started.cores
            found[agent.host] = agent.here.cores if given is None else min(given, agent.here.cores)
        return found

    def _meet(self, folder: str | None) -> None:
        """Have the engine start the agents, and let each call."""
        self._bell = os.eventfd(0)
        self._wire = Wire(RUNNER, EventBell(self._bell))
        self._logs = Path(folder) / "logs" if folder is not None else None
        if self._logs is not None:
            self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._engine = self.engine()
        started = self._engine.start(self._logs)
        own, key = self._engine.own_address, self._wire.keys.public.decode()
        for host, agent in started.items():
            peer, ports = self._wire.listen(host, agent.key, own, joined=False)
            self._agents[host] = KnownHost(host, agent, peer)
            introduction = Introduction(host, agent.address, RUNNER, own, ports, key)
            self._engine.introduce(host, msgspec.json.encode(introduction))
        ours = versions()
        for known in self._agents.values():
            self._await(known, "call the runner", lambda known: known.here is not None)
            assert known.here is not None
            if wrong := [
                f"{name} {known.here.versions.get(name, 'none')}, here {version}"
                for name, version in ours.items()
                if known.here.versions.get(name) != version
            ]:
                raise RunError(
                    f"host {known.host} has other versions, and results could differ: {'; '.join(wrong)}; "
                    "install the same there"
                )

    def _join_agents(self, experiment: Experiment) -> None:
        """Have those agents call each other whose workers have edges in common."""
        edges = experiment.edges()
        for host, agent in self._agents.items():
            for other in neighbours(edges, self.places, host):
                if other <= host or other == RUNNER:
                    continue
                caller = self._agents[other]
                self._tell(host, Listen(other, caller.started.key.decode()))
                self._await(
                    agent,
                    f"wait for {other}",
                    partial(_listens, other),
                )
                ports, started = agent.listening[other].ports, agent.started
                self._tell(other, CallHost(host, started.address, ports, started.key.decode()))

    def _teller(self, host: str) -> Callable[[Order], None]:
        return lambda order: self._tell(host, order)

    def _tell(self, host: str, order: Order) -> None:
        assert self._wire is not None
        self._wire.tell(host, pack(order))

    def _await(self, agent: KnownHost, what: str, done: Callable[[KnownHost], bool]) -> None:
        """Turn the wire until the agent has done something. Raises `RunError`."""
        assert self._wire is not None and self._engine is not None
        deadline = monotonic() + JOIN_S
        while not done(agent):
            self._wire.turn(0.1)
            self._hear()
            if agent.lost:
                raise RunError(f"host {agent.host} did not {what}: {agent.lost}")
            if monotonic() > deadline:
                raise RunError(
                    f"host {agent.host} did not {what} within {JOIN_S:.0f} s; can it reach "
                    f"{self._engine.own_address}, or does something between the hosts refuse connections? "
                    f"{self._strangers()}"
                )

    def _strangers(self) -> str:
        assert self._wire is not None
        return "; ".join(self._wire.refused)

    def _hear(self) -> None:
        """Take what the hosts have reported."""
        assert self._engine is not None
        for agent in self._agents.values():
            while (data := agent.peer.words.read()) is not None:
                try:
                    self._take(agent, unpack_report(data))
                except SchemaError as error:
                    agent.peer.dismiss(str(error))
            if agent.lost or agent.closed:
                continue
            cause = agent.peer.ended or self._engine.ended(agent.host)
            if not cause and agent.here is not None and now() - agent.peer.heard > VOID_S:
                cause = f"it has not been heard for {VOID_S:.0f} s"
            if cause:
                agent.lost = cause
                for link in agent.links.values():
                    link.gone = True

    def _take(self, agent: KnownHost, report: Report) -> None:
        match report:
            case Logged():
                self._keep_log(agent, report)
            case Traffic():
                agent.traffic = report
            case Here():
                agent.here = report
            case Listening(host):
                agent.listening[host] = report
            case Launched():
                agent.launched = report
            case Whereabouts():
                agent.answer = report
            case Closed():
                agent.closed = True
            case Speak(worker) | WorkerGone(worker) if worker not in agent.links:
                raise SchemaError(f"it speaks for {worker}, which does not live there")
            case Speak(worker, life) | WorkerGone(worker, life) if life != agent.links[worker].life:
                pass  # the life before, which was ended with one that it cannot go on without
            case Speak(worker, _, message):
                agent.links[worker].messages.append(message)
            case WorkerGone(worker, _, obituary):
                agent.obituaries[worker] = obituary
                agent.links[worker].gone = True

    def wait(self, seconds: float, least: float = 0.0) -> None:
        assert self._own is not None
        self._own.wait(seconds, least)
        self._hear()
        if failed := self._own.failed:
            raise RunError(f"the wire to other hosts has ended: {failed}")

    def _agent_of(self, worker: str) -> KnownHost | None:
        return self._agents.get(self.places[worker])

    @property
    def restarts(self) -> bool:
        return self._own is not None and self._own.launcher.restarts

    def restart(self, workers: Sequence[str]) -> dict[str, Link]:
        assert self._own is not None
        links: dict[str, Link] = {}
        for worker in workers:
            if (agent := self._agent_of(worker)) is None:
                continue
            if agent.lost:
                raise RunError(f"{worker} cannot live again: its host {agent.host} is gone: {agent.lost}")
            life = agent.links[worker].life + 1
            links[worker] = agent.links[worker] = HostLink(worker, self._teller(agent.host), life)
            agent.obituaries.pop(worker, None)
        for host in self._agents:
            self._tell(host, Revive(list(workers)))
        return {**links, **self._own.revive(workers)}

    def obituary(self, worker: str) -> str:
        assert self._own is not None
        if (agent := self._agent_of(worker)) is None:
            return self._own.launcher.obituary(worker)
        found = agent.obituaries.get(worker)
        return f"{found or f'its host is gone: {agent.lost}'} (on host {agent.host})"

    def _ask(self, agent: KnownHost, worker: str, stack: bool) -> Whereabouts:
        """Return how a worker of another host is, as far as it can be known."""
        self._asked += 1
        deadline = monotonic() + _ANSWER_S
        self._tell(agent.host, Ask(self._asked, worker, stack))
        while not agent.lost and monotonic() < deadline:
            sleep(0.005)
            self._hear()
            if agent.answer is not None and agent.answer.number == self._asked:
                return agent.answer
        return Whereabouts(self._asked, [], "")

    def stack(self, worker: str) -> Sequence[Call]:
        assert self._own is not None
        if (agent := self._agent_of(worker)) is None:
            return self._own.launcher.stack(worker)
        return [Call(*call) for call in self._ask(agent, worker, stack=True).calls]

    def own_bytes(self, worker: str) -> int | None:
        assert self._own is not None
        return self._own.launcher.own_bytes(worker) if self._agent_of(worker) is None else None

    def condition(self, worker: str) -> str:
        assert self._own is not None
        if (agent := self._agent_of(worker)) is None:
            return self._own.launcher.condition(worker)
        condition = self._ask(agent, worker, stack=False).condition
        return f"{condition} (on host {agent.host})" if condition else ""

    def each_host(self) -> dict[str, HostFigures]:
        if self._wire is None or self._own is None:
            return {}
        workers: dict[str, list[str]] = {}
        for worker, host in self.places.items():
            workers.setdefault(host, []).append(worker)
        cores, own = self._cores(), self._wire.traffic
        found = {
            RUNNER: HostFigures(workers.get(RUNNER, ()), cores[RUNNER], own.sent, own.received, own.said)
        }
        for host, agent in self._agents.items():
            peer, told = agent.peer, agent.traffic
            found[host] = HostFigures(
                workers.get(host, ()),
                cores[host],
                told.sent,
                told.received,
                told.said,
                peer.round_trip_s,
                peer.lag,
                agent.lost,
            )
        return found

    def close(self, seconds: float) -> None:
        with ExitStack() as stack:
            if self._bell >= 0:
                stack.callback(os.close, self._bell)
                self._bell = -1
            if self._engine is not None:
                stack.callback(self._engine.close)
            if self._wire is not None:
                stack.callback(self._wire.close)
            if self._own is not None:
                stack.callback(self._own.end_wire)
            if self._heart is not None:
                self._heart.end()
                self._heart = None
            self._close_workers(seconds)
        self._engine = self._wire = self._own = None

    def _close_workers(self, seconds: float) -> None:
        if self._wire is None or self._engine is None:
            return
        for agent in self._agents.values():
            self._tell(agent.host, Close(seconds))
        if self._own is not None:
            self._own.launcher.close(seconds)
        deadline = monotonic() + seconds + _FAREWELL_S
        while monotonic() < deadline and not all(a.closed or a.lost for a in self._agents.values()):
            sleep(0.01) if self._own is not None else self._wire.turn(0.05)
            self._hear()
