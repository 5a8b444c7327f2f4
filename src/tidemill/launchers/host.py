"""The agent of a host: what every host of a run but the runner's runs. It starts its
share of the workers as the runner would on its own machine, carries their messages, and
ends with the runner.

It tells its public key on standard output, is introduced to the runner on standard input
(`Introduction`), calls it, and from then on hears orders over the wire.
"""

import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep

import msgspec

from tidemill.api.edges import Edge
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job
from tidemill.api.transport import Link
from tidemill.core.clock import noticing_stops
from tidemill.core.config import decode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, SchemaError, TidemillError, place
from tidemill.core.user_code_loading import (
    begin_to_work,
    expect,
    file_digest,
    load_file,
    travel,
    with_files_moved,
)
from tidemill.hosts.crossing import Crossing, GuestEnds, LinkInOrder, edges_here, guest, neighbours
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
    Whereabouts,
    Work,
    WorkerGone,
    pack,
    unpack_order,
)
from tidemill.hosts.peer import LEASE_S, now
from tidemill.hosts.wire import Wire, WireThread
from tidemill.launchers.examination import serve
from tidemill.launchers.processes import HostShare, ProcessesLauncher
from tidemill.launchers.worker_process import ENDING
from tidemill.transports.shared import EventBell
from tidemill.workers.trainer_config import TrainerConfig

ALONE_S = 15.0
"""Seconds without a word of the runner after which an agent ends its workers, and
itself."""
_HELD_S = 0.005  # seconds between two looks whether what a worker had offered is there
MOST_LOGGED_BYTES = 10 << 20
"""The most bytes of a log that are told to the runner."""
_LOG_S = 0.5  # seconds between two looks into logs
_TRAFFIC_S = 1.0  # seconds between two reports of what goes over the wire
_LOG_BYTES = 1 << 16  # that are told at once
_FAREWELL_S = 2.0  # seconds for the last report to be heard


def versions() -> dict[str, str]:
    """Return what must be the same on all hosts, since results depend on it."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {name: importlib.metadata.version(name) for name in ("tidemill", "numpy")}
    return {"python": python, **packages}


class HostWorkers:
    """The workers of one host, and the wire that carries their edges to others: what an
    agent and the runner have alike.

    links: the control link of each worker, by its name
    """

    def __init__(self, wire: Wire, job: Job, places: Mapping[str, str], logs: Path | None = None) -> None:
        """`logs`: folder of what workers write; None: the run's."""
        edges: list[Edge] = job.experiment.edges()
        self._crossing = Crossing(wire, edges, places)
        others = neighbours(edges, places, wire.name)
        mine = [name for name, host in places.items() if host == wire.name]
        bells = {guest(other): wire.bell.descriptor for other in others}
        self.launcher = ProcessesLauncher(HostShare(mine, edges_here(edges, places, wire.name), bells, logs))
        self._wire = wire
        self._guests: list[GuestEnds] = []  # of all lives
        self.links: dict[str, LinkInOrder] = {}
        self._thread: WireThread | None = None
        self.launcher.check(job.experiment)
        try:
            links = self.launcher.launch(job)
            self._bell = os.dup(self.launcher.bell)  # the thread may outlive the launcher's own
            self.links = self._join(links, self._crossing.of(places))
            for other in others:
                wire.do(partial(setattr, wire.others[other], "joined", True))
        except BaseException:  # nobody else holds the launcher yet
            self.launcher.close(0.0)
            raise

    def _join(self, links: Mapping[str, Link], numbers: Sequence[int]) -> dict[str, LinkInOrder]:
        """Have the wire carry these edges, by number, for the lives that begin; return
        their links."""
        names: dict[str, set[str]] = {}  # of edges, by the other host
        for number in numbers:
            for other in self._crossing.others(number):
                names.setdefault(other, set()).add(self._crossing.edges[number].name)
        guests = {}
        for other, carried in names.items():
            handles = self.launcher.handles(guest(other))
            guests[other] = GuestEnds(self._wire.bell, {name: handles[name] for name in carried})
        self._guests += guests.values()
        late = self._crossing.carry(numbers, guests)
        return {name: LinkInOrder(link, late.get(name, ())) for name, link in links.items()}

    def revive(self, workers: Sequence[str]) -> dict[str, LinkInOrder]:
        """Begin the next life of those of `workers` that live here, and have what any of
        them writes carried anew. Return their links."""
        numbers = self._crossing.of(workers)
        edges = [self._crossing.edges[number].name for number in numbers]
        links = self._join(self.launcher.restart(workers, edges), numbers)
        self.links |= links
        return links

    def wait(self, seconds: float, least: float = 0.0) -> None:
        """Wait for a message of any worker (see `Launcher.wait`)."""
        held = any(link.held for link in self.links.values())
        self.launcher.wait(min(seconds, _HELD_S) if held else seconds, least)

    def begin(self) -> None:
        """Let the wire be turned by a thread of its own from now on."""
        self._thread = WireThread(self._wire, lambda: os.eventfd_write(self._bell, 1))
        self._thread.start()

    @property
    def failed(self) -> str:
        """What went wrong with the wire, "" as long as nothing has."""
        error = self._thread.error if self._thread is not None else None
        return f"{type(error).__name__}: {error}{place(error)}" if error is not None else ""

    def end_wire(self) -> None:
        """Turn the wire no more, and give up its ends."""
        if self._thread is not None:
            self._thread.end()
        for ends in self._guests:
            ends.close()
        os.close(self._bell)


def has_files(code: Mapping[str, bytes]) -> bool:
    """True where this host has all these files, each as it is given."""
    return all(file_digest(Path(path)) == sha256(data).hexdigest() for path, data in code.items())


class OwnFiles:
    """The files that a host keeps for a run whose own it does not see: the user's code,
    and what workers write. They are in a folder of the agent's, and go with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tidemill-host-")
        self.logs = Path(self._folder.name, "logs")
        self._told: dict[Path, int] = {}
        self._next = 0.0

    def carry(self, order: Work) -> Work:
        """Write down the user's files, and return the order with their new places."""
        root = Path(self._folder.name, "code")
        moved = {path: str(root / Path(path).relative_to("/")) for path in order.code}
        for path, data in order.code.items():
            Path(moved[path]).parent.mkdir(parents=True, exist_ok=True)
            Path(moved[path]).write_bytes(data)
        experiment = json.dumps(with_files_moved(json.loads(order.experiment), moved))
        places = [str(root / Path(place).relative_to("/")) for place in order.path]
        return msgspec.structs.replace(
            order,
            experiment=experiment,
            source=None if order.source is None else moved.get(order.source, order.source),
            path=[*filter(os.path.isdir, places), *order.path],
            files={os.path.realpath(moved.get(path, path)): digest for path, digest in order.files.items()},
        )

    def written(self, all_of_it: bool) -> Iterator[tuple[str, bytes]]:
        """Yield what workers have written since the last call, by the log's name: now and
        then, and some of it, unless `all_of_it` is asked for."""
        if (monotonic() < self._next and not all_of_it) or not self.logs.is_dir():
            return
        self._next = monotonic() + _LOG_S
        for path in self.logs.iterdir():
            told = self._told.get(path, 0)
            most = MOST_LOGGED_BYTES if all_of_it else told + _LOG_BYTES
            with suppress(OSError), path.open("rb") as file:
                file.seek(told)
                if text := file.read(min(most, MOST_LOGGED_BYTES) - told):
                    self._told[path] = told + len(text)
                    yield path.name, text

    def close(self) -> None:
        """Remove them."""
        self._folder.cleanup()


class HostAgent:
    """The agent of a host, once it is introduced. `orphaned`: set when whoever started it
    is gone."""

    def __init__(self, wire: Wire, introduction: Introduction, orphaned: threading.Event) -> None:
        self._wire, self._orphaned = wire, orphaned
        self._runner, self._address = introduction.runner, introduction.address
        self._peer = wire.call(
            introduction.runner,
            introduction.key.encode(),
            introduction.runner_address,
            introduction.ports,
            joined=False,
        )
        self._workers: HostWorkers | None = None
        self._own: OwnFiles | None = None
        self._lives = Counter[str]()  # begun anew, of each worker
        self._over = False
        self._next_traffic = 0.0

    def run(self) -> None:
        """Do what the runner orders until it is over, or the runner is gone."""
        self._report(Here(cores(), versions()))
        while self._workers is None and not self._over and not self._lost():
            self._wire.turn(LEASE_S)
            self._hear()
        while not self._over and not self._lost():
            assert self._workers is not None
            self._workers.wait(LEASE_S)
            self._hear()
            self._listen()
        if self._over:
            self._report(Closed())
            deadline = monotonic() + _FAREWELL_S
            while not self._peer.words.heard_all and monotonic() < deadline and not self._peer.ended:
                sleep(0.01) if self._workers is not None else self._wire.turn(0.05)

    def close(self) -> None:
        """End whatever still lives."""
        if self._workers is not None:
            self._workers.launcher.close(0.0)
            self._workers.end_wire()
        if self._own is not None:
            self._own.close()

    def _lost(self) -> bool:
        failed = self._workers is not None and self._workers.failed
        if failed:
            print(failed, file=sys.stderr, flush=True)
        silent = now() - self._peer.heard > ALONE_S
        if self._peer.ended:
            print(f"the runner: {self._peer.ended}", file=sys.stderr, flush=True)
        elif silent:
            print(f"the runner has not been heard for {ALONE_S:.0f} s", file=sys.stderr, flush=True)
        return bool(failed or silent or self._peer.ended or self._orphaned.is_set())

    def _report(self, report: Report) -> None:
        self._wire.tell(self._runner, pack(report))

    def _hear(self) -> None:
        for peer in self._wire.others.values():
            if peer is not self._peer and peer.words.unread:
                peer.dismiss("it tells something, and only the runner gives orders")
        while not self._over and (order := self._peer.words.read()) is not None:
            self._follow(unpack_order(order))

    def _follow(self, order: Order) -> None:
        match order:
            case Listen(host, key):
                _, ports = self._wire.listen(host, key.encode(), self._address, joined=False)
                self._report(Listening(host, ports))
            case CallHost(host, address, ports, key):
                self._wire.call(host, key.encode(), address, ports, joined=False)
            case Work():
                self._report(Launched(self._launch(order)))
            case Close(seconds):
                if self._workers is not None:
                    self._workers.launcher.close(seconds)
                self._tell_logs(all_of_it=True)
                self._over = True
            case Revive(workers):
                if self._workers is not None:
                    self._workers.revive(workers)
                    self._lives.update(workers)
            case Speak(worker, life, message):
                if (
                    self._workers is not None
                    and worker in self._workers.links
                    and life == self._lives[worker]
                ):
                    self._workers.links[worker].send(message)
            case Ask(number, worker, stack):
                if self._workers is not None and worker in self._workers.links:
                    launcher = self._workers.launcher
                    calls = launcher.stack(worker) if stack else ()
                    told = [(call.name, call.file, call.line) for call in calls]
                    self._report(Whereabouts(number, told, launcher.condition(worker)))

    def _launch(self, order: Work) -> str:
        """Start the workers; return why that cannot be, or ""."""
        sees = order.folder is None or os.path.isfile(order.seen)
        logs = None
        try:
            begin_to_work()
            if not has_files(order.code):
                self._own = self._own or OwnFiles()
                order = self._own.carry(order)
            travel(order.path)
            expect(order.files)
            if order.source is not None:
                load_file(Path(order.source), "experiment file")
            experiment = decode(Experiment, json.loads(order.experiment))
            if not sees:
                self._refuse_unseen(experiment, order)
                self._own = self._own or OwnFiles()
                logs = self._own.logs
            folder = order.folder if sees else None
            job = Job(experiment, order.source, folder, order.resume, order.files)
            self._workers = HostWorkers(self._wire, job, order.places, logs)
            self._workers.begin()
        except Exception as error:
            said = str(error) if isinstance(error, TidemillError) else f"{error}{place(error)}"
            return f"{type(error).__name__}: {said}"
        return ""

    def _refuse_unseen(self, experiment: Experiment, order: Work) -> None:
        """Raise `ConfigError` where workers of this host need the run's folder."""
        members = dict(experiment.members())
        mine = {name: members[name] for name, host in order.places.items() if host == self._wire.name}
        trainers = [name for name, config in mine.items() if isinstance(config, TrainerConfig)]
        draw = [name for name, config in mine.items() if any(port.role == "draw" for port in config.ports())]
        why = {
            "with exact_resume all workers save there": experiment.exact_resume,
            f"{', '.join(trainers)} must read checkpoints": trainers,  # also in later lives
            f"{', '.join(draw)} must draw versions from it": draw,
        }
        for reason, needed in why.items():
            if needed:
                raise ConfigError(
                    f"the run's folder {order.folder} is not seen there, and {reason}; put it where all "
                    "hosts see it (--run-dir)"
                )

    def _tell_logs(self, all_of_it: bool = False) -> None:
        for name, text in self._own.written(all_of_it) if self._own is not None else ():
            self._report(Logged(name, text))

    def _tell_traffic(self) -> None:
        if monotonic() >= self._next_traffic:
            self._next_traffic = monotonic() + _TRAFFIC_S
            self._report(self._wire.traffic)

    def _listen(self) -> None:
        """Report what workers say, and which are gone."""
        assert self._workers is not None
        self._tell_logs()
        self._tell_traffic()
        for worker, link in list(self._workers.links.items()):
            messages = link.receive() if not self._over else []
            if messages is None:
                del self._workers.links[worker]
                obituary = self._workers.launcher.obituary(worker)
                self._report(WorkerGone(worker, self._lives[worker], obituary))
            for message in messages or ():
                self._report(Speak(worker, self._lives[worker], message))


def main(name: str) -> None:
    """Be the agent of host `name`."""
    for number in ENDING:  # the runner handles what ends a run
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    bell = EventBell(os.eventfd(0))
    wire = Wire(name, bell)
    with ExitStack() as stack:
        stack.callback(wire.close)
        print(json.dumps({"key": wire.keys.public.decode()}), flush=True)
        os.dup2(2, 1)  # what the user's code prints is for the log
        line = sys.stdin.buffer.readline(1 << 16)
        if not line:
            return
        try:
            introduction = msgspec.json.decode(line, type=Introduction)
        except msgspec.DecodeError as error:
            raise SystemExit(f"this is no introduction: {error}") from None
        orphaned = threading.Event()
        threading.Thread(target=_wait_for_end, args=(orphaned,), name="lifeline", daemon=True).start()
        if introduction.examined:
            serve(wire, introduction, versions(), orphaned.is_set)
            return
        agent = HostAgent(wire, introduction, orphaned)
        stack.callback(agent.close)
        try:
            with noticing_stops():
                agent.run()
        except SchemaError as error:
            raise SystemExit(f"the runner: {error}") from None


def _wait_for_end(orphaned: threading.Event) -> None:
    """Wait until whoever holds this process's standard input is gone."""
    while os.read(0, 1 << 10):
        pass
    orphaned.set()


if __name__ == "__main__":
    main(sys.argv[1])
