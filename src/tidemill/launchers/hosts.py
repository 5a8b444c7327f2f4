"""The launcher of several hosts: the runner's own and those that an engine brings. Each
other host has an agent (`launchers/host.py`) that starts its share of the workers; here
the runner speaks to all of them as if they were its own (`launchers/agents.py`).
"""

import json
import os
import sys
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Call, EdgeFigures, GivenHost, HostFigures, Job, Launcher, Loss, ProbeAnswer
from tidemill.api.transport import Link
from tidemill.core.config import encode
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.resource_shortage import cause_of
from tidemill.core.untrusted_files import read_plain
from tidemill.core.user_code_loading import (
    is_installed,
    named_files,
    named_modules,
    own_code,
    own_path,
    with_files_moved,
)
from tidemill.hosts.orders import Close, Measure, Revive, RunEnds, SentExperiment, Traffic, Work
from tidemill.hosts.peer import now
from tidemill.launchers.agents import Agents
from tidemill.launchers.engine import RUNNER, HostEngine
from tidemill.launchers.host_workers import HostWorkers
from tidemill.launchers.known_agents import HostLink, Share
from tidemill.launchers.placement import gpu_numbers, place
from tidemill.launchers.worker_group import log_name
from tidemill.store.fence import take_lives

MOST_CODE_BYTES = 16 << 20
"""The most bytes of the user's own code that are sent to hosts."""
_FAREWELL_S = 3.0  # seconds beyond those of its workers that an agent has to end


def sent(experiment: Experiment, source: str | None, files: Mapping[str, str]) -> SentExperiment:
    """Return an experiment as hosts are sent it, with the user's own files in it. Raises
    `ConfigError`."""
    config = encode(experiment)
    whole = {file: os.path.realpath(file) for file in named_files(config)}
    named = [*filter(None, [source]), *whole.values(), *named_modules(config)]
    own = [file for file in own_code(named) if not is_installed(file)]
    code = {str(file): read_plain(file, links=True) for file in own}
    if (size := sum(map(len, code.values()))) > MOST_CODE_BYTES:
        raise ConfigError(
            f"the user's own code has {size:,} bytes in {len(code)} files, and hosts are sent "
            f"{MOST_CODE_BYTES:,} at most; install what is large on each of them"
        )
    return SentExperiment(
        json.dumps(with_files_moved(config, whole)),
        None if source is None else os.path.realpath(source),
        dict(files),
        own_path(),
        code,
    )


def order_of(
    job: Job, places: dict[str, str], host: str, agents: dict[str, str], lives: dict[str, int], seen: str
) -> Work:
    """Return the order to start workers (see `Work`). Raises `ConfigError`."""
    given = sent(job.experiment, job.source, job.files)
    gpus = {worker: number for worker, number in job.gpus.items() if places[worker] == host}
    return Work(host, agents, lives, given, places, job.folder, job.epoch, job.resume, seen, gpus)


@contextmanager
def seen_file(folder: Path | None) -> Iterator[str]:
    """Keep a file in a folder by which hosts know that they see the same one; its path,
    or "" without a folder."""
    if folder is None:
        yield ""
        return
    with tempfile.NamedTemporaryFile(prefix="seen-", dir=folder) as file:
        yield os.path.realpath(file.name)


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
        self._bell = -1
        self._own: HostWorkers | None = None
        self._agents: Agents | None = None
        self._logs: Path | None = None
        self._lives = Counter[str]()  # begun anew, of each worker
        self._ends = False  # hosts were told that the run is to end
        self._seen = ExitStack()  # while hosts look whether they see the run's folder

    @abstractmethod
    def engine(self) -> HostEngine:
        """Return what brings the other hosts."""

    def hosts(self, folder: str) -> Sequence[GivenHost]:
        try:
            agents = self._meet(folder)
        except BaseException:  # a Ctrl-C, too
            self.close(0.0)
            raise
        return [
            GivenHost(host, count, agents.kinds[host], agents.sees[host])
            for host, count in agents.cores.items()
        ]

    def measure(
        self, hosts: Sequence[str], experiment: Experiment, source: Path | None, seconds: float
    ) -> dict[str, ProbeAnswer]:
        assert self._agents is not None
        order = Measure(sent(experiment, None if source is None else str(source), {}), seconds)
        return self._agents.measure(hosts, order)

    def launch(self, job: Job) -> dict[str, Link]:
        agents = self._agents or self._meet(job.folder)
        experiment = job.experiment
        paces = {
            host: job.paces[kind.digest] for host, kind in agents.kinds.items() if kind.digest in job.paces
        }
        self.places = place(experiment, agents.cores, self._chosen, paces, agents.gpus)
        gpus = gpu_numbers(experiment, self.places)
        job = self._job = replace(job, gpus=gpus, places=self.places)
        if self._logs is not None:
            for names in experiment.processes():
                (self._logs / log_name(names)).unlink(missing_ok=True)  # of the run that is resumed
        agents.share_out(experiment, self.places)
        for share in agents.shares.values():  # those that the others have been waited for
            if share.agent is None:
                raise RunError(f"host {share.host} is gone before the run began: {share.lost}")
        hosts = {host: host for host in agents.cores}
        self._own = HostWorkers(agents.wire, job, self.places, RUNNER, hosts, {})
        agents.part = self._own.part
        links: dict[str, Link] = dict(self._own.links)
        for worker, host in self.places.items():
            if host != RUNNER:
                links[worker] = self._link(agents.shares[host], worker)
        for share, order in self._orders(list(agents.shares.values()), self._lives):
            agents.tell_share(share, order)
        for share in agents.shares.values():
            agents.wait_for(agents.launched(share))
        for share in agents.shares.values():
            share.given = True
        return {name: links[name] for name, _ in experiment.members()}

    def _meet(self, folder: str | None) -> Agents:
        """Have the engine start the agents, and let each call."""
        self._bell = os.eventfd(0)
        self._logs = Path(folder) / "logs" if folder is not None else None
        if self._logs is not None:
            self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._agents = Agents(self.engine(), self._bell, self._logs, self._wake)
        with seen_file(self._logs) as seen:
            self._agents.meet(seen)
        return self._agents

    def _wake(self) -> None:
        if (own := self._own) is not None:
            own.wake()

    def _link(self, share: Share, worker: str) -> HostLink:
        """Return the link of a life that begins of a worker of a share."""
        assert self._agents is not None
        link = HostLink(worker, partial(self._agents.tell_share, share), self._lives[worker])
        share.links[worker] = link
        share.obituaries.pop(worker, None)
        return link

    def _orders(self, shares: Sequence[Share], lives: Mapping[str, int]) -> list[tuple[Share, Work]]:
        """Return, of each share, the order to its agent to start its workers, whose
        `lives` are those. Raises `OSError` where the run's folder, or a file of the
        user's, is not there."""
        if not shares:
            return []
        assert self._agents is not None
        there = {host: share.agent.name for host, share in self._agents.shares.items() if share.agent}
        there[RUNNER] = RUNNER
        self._number_gpus([share.host for share in shares])
        seen = self._seen.enter_context(seen_file(self._logs))
        orders = []
        for share in shares:
            others = {host: agent for host, agent in there.items() if host != share.host}
            order = order_of(self._job, self.places, share.host, others, dict(lives), seen)
            orders.append((share, order))
        return orders

    def _number_gpus(self, begin: Collection[str]) -> None:
        """Number the GPUs anew that the workers of shares take which `begin`, wherever
        these are: others have some there."""
        assert self._agents is not None
        homes = {share.host: share.agent.home for share in self._agents.shares.values() if share.agent}
        homes[RUNNER] = RUNNER
        living = {worker: homes[host] for worker, host in self.places.items() if host in homes}
        taken = {
            worker: number
            for worker, number in self._job.gpus.items()
            if worker in living and self.places[worker] not in begin
        }
        self._job = replace(self._job, gpus=gpu_numbers(self._job.experiment, living, taken))

    def wait(self, seconds: float, least: float = 0.0) -> None:
        assert self._own is not None and self._agents is not None
        self._own.wait(seconds, least)
        self._agents.hear()
        if all(share.agent is None or share.agent.launched for share in self._agents.shares.values()):
            self._seen.close()

    def _share_of(self, worker: str) -> Share | None:
        """Return the share of another host that a worker is of."""
        assert self._agents is not None
        return self._agents.shares.get(self.places[worker])

    @property
    def restarts(self) -> bool:
        return self._own is not None and self._own.launcher.restarts

    def gone_with(self, worker: str) -> Sequence[str]:
        assert self._agents is not None
        return self._agents.gone_with(worker)

    def tell_of_end(self, ends: bool) -> None:
        assert self._agents is not None and self._own is not None
        self._ends = ends
        self._own.launcher.tell_of_end(ends)
        self._agents.tell_all(RunEnds(ends))

    def moves(self, worker: str) -> bool:
        share = self._share_of(worker)
        return share is not None and not share.given and share.moves

    def losses(self) -> Sequence[Loss]:
        if self._agents is None or self._own is None:
            return ()
        while self._own.parted:
            self._agents.lost.came(*self._own.parted.popleft(), self._agents.edges)
        return self._agents.lost.take()

    def notices(self) -> Sequence[str]:
        if self._own is None or self._agents is None:
            return ()
        told, self._agents.notices = self._agents.notices, []
        return [*told, *self._own.launcher.notices()]

    def ready(self, workers: Sequence[str]) -> bool:
        assert self._own is not None and self._agents is not None
        return self._agents.ready(workers) and self._own.launcher.ready(workers)

    def restart(self, workers: Sequence[str]) -> dict[str, Link]:
        assert self._own is not None and self._agents is not None
        shares = self._agents.shares
        # another one may be seated, too, whose workers begin with somebody else's
        anew = [
            s for s in shares.values() if s.agent and not s.given and not s.links.keys().isdisjoint(workers)
        ]
        # what may fail, and is tried again then, comes before anybody is told
        lives = self._lives + Counter(workers)
        orders = self._orders(anew, lives)
        if anew and self._job.folder is not None and self._job.epoch:  # else who died is dead for sure
            moving = {name: lives[name] for name in workers if self._share_of(name) in anew}
            take_lives(Path(self._job.folder), self._job.epoch, moving)
        self._lives = lives
        links: dict[str, Link] = {
            worker: self._link(share, worker)
            for worker in workers
            if (share := self._share_of(worker)) is not None
        }
        moved = {share.host: share.agent.name for share in anew if share.agent is not None}
        for share in shares.values():
            if share.given:
                self._agents.tell_share(share, Revive(list(workers), moved))
        for share, order in orders:
            self._agents.tell_share(share, order)
            self._agents.tell_share(share, RunEnds(self._ends))
            share.given = True
        try:
            return {**links, **self._own.revive(workers, moved)}
        except OSError as error:  # other hosts have begun
            text = f"next lives of {', '.join(workers)} cannot be started here: {cause_of(error)}"
            raise RunError(text) from error

    def obituary(self, worker: str) -> str:
        assert self._own is not None
        if (share := self._share_of(worker)) is None:
            return self._own.launcher.obituary(worker)
        if not share.given:
            return share.lost
        return f"{share.obituaries.get(worker, 'it hung up')} (on host {share.host})"

    def stack(self, worker: str) -> Sequence[Call]:
        assert self._own is not None and self._agents is not None
        if (share := self._share_of(worker)) is None:
            return self._own.launcher.stack(worker)
        return self._agents.ask(share, worker, stack=True).calls

    def own_bytes(self, worker: str) -> int | None:
        assert self._own is not None
        return self._own.launcher.own_bytes(worker) if self._share_of(worker) is None else None

    def condition(self, worker: str) -> str:
        assert self._own is not None and self._agents is not None
        if (share := self._share_of(worker)) is None:
            return self._own.launcher.condition(worker)
        condition = self._agents.ask(share, worker, stack=False).condition
        return f"{condition} (on host {share.host})" if condition else ""

    def each_host(self) -> dict[str, HostFigures]:
        if self._agents is None or self._own is None:
            return {}
        workers: dict[str, list[str]] = {}
        for worker, host in self.places.items():
            workers.setdefault(host, []).append(worker)
        cores, gpus, own = self._agents.cores, self._agents.gpus, self._agents.wire.traffic
        edges = self._agents.edges

        def figures(host: str, told: Traffic, **more: Any) -> HostFigures:
            flows = {(edges[n], other): EdgeFigures(sent, s) for n, other, sent, s in told.edges}
            return HostFigures(
                workers.get(host, ()), cores[host], told.sent, told.received, told.said,
                edges=flows, at=told.at, gpus=gpus[host], **more,
            )  # fmt: skip

        own = structs.replace(own, edges=self._own.flows(), at=now())
        found = {RUNNER: figures(RUNNER, own, home=RUNNER)}
        for host, share in self._agents.shares.items():
            if (agent := share.agent) is None:
                found[host] = figures(host, Traffic(), lost=share.lost)
            else:
                trip, lag = agent.peer.round_trip_s, agent.peer.lag
                found[host] = figures(host, agent.traffic, round_trip_s=trip, lag=lag, home=agent.home)
        return found

    def close(self, seconds: float) -> None:
        with ExitStack() as stack:
            stack.callback(self._seen.close)
            if self._bell >= 0:
                stack.callback(os.close, self._bell)
                self._bell = -1
            if self._own is not None:
                stack.callback(self._own.close_ends)
            if self._agents is not None:
                stack.callback(self._agents.end)
                self._agents.tell_all(Close(seconds))
            if self._own is not None:
                self._own.launcher.close(seconds)
            if self._agents is not None:
                self._agents.wait_closed(seconds + _FAREWELL_S)
        self._agents = self._own = None
