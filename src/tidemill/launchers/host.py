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
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec

from tidemill.api import control_messages
from tidemill.api.control_messages import Finish, Pause, Start, State, Status, WorkerStatistics
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, ProbeAnswer
from tidemill.core.clock import noticing_stops
from tidemill.core.config import decode
from tidemill.core.errors import ConfigError, SchemaError, TidemillError, TooManyFiles, place
from tidemill.core.own_version import own_version
from tidemill.core.user_code_loading import (
    begin_to_work,
    expect,
    load_file,
    travel,
)
from tidemill.hosts.orders import (
    AgentEnded,
    AgentKey,
    Ask,
    Called,
    CallHost,
    Close,
    Closed,
    ForgetAgent,
    Here,
    HoldAgent,
    HungUp,
    IntroduceAgent,
    Introduction,
    KnownVersions,
    Launched,
    LeaveRun,
    Leaving,
    LetGo,
    Listen,
    Listening,
    Logged,
    Measure,
    Noticed,
    Order,
    Part,
    Parted,
    Report,
    Revive,
    RunEnds,
    SentExperiment,
    Speak,
    Vacate,
    Vacated,
    VersionPart,
    WantVersion,
    Whereabouts,
    Work,
    WorkerGone,
    pack,
    unpack_order,
)
from tidemill.hosts.peer import LEASE_S, SILENCE_S, now
from tidemill.hosts.wire import Wire, WireThread
from tidemill.launchers.engine import LEFT
from tidemill.launchers.examination import serve
from tidemill.launchers.host_workers import HostWorkers
from tidemill.launchers.kinds import own_kind
from tidemill.launchers.measuring import Measurement, MeasurementOrder
from tidemill.launchers.own_files import OwnFiles, has_files
from tidemill.launchers.placement import draws, needs_folder
from tidemill.launchers.stand_in import StandIn
from tidemill.launchers.worker_process import ENDING
from tidemill.nets.choose_device import visible_gpus
from tidemill.store.database_mirror import DatabaseMirror
from tidemill.store.parameter_database import PARAMETERS
from tidemill.transports.shared import EventBell
from tidemill.workers.actor_config import ActorConfig

PAUSE_S = 5.0
"""Seconds without a word of the runner after which an agent pauses its workers."""
ALONE_S = 15.0
"""Seconds without a word of the runner after which an agent ends its workers, and
itself."""
_CALL_S = 30.0  # seconds in which another agent is to answer a call
_FREED_S = 20.0  # and in which files are closed that belong to a lost one, which is forgotten after `ALONE_S`
_CALM_S = 0.5  # seconds after SIGTERM in which the runner, which may get one, too, says that the run ends
_LEAVE_S = 10.0  # and in which workers pause, and what they have sent arrives
_FINISH_S = 5.0  # of these, in which actors may finish the samples that they have begun
_LOOK_S = 0.05  # seconds between two looks where nothing wakes this
_CALLED_LOOK_S = 0.01  # and while another agent is called
_TRAFFIC_S = 1.0  # seconds between two reports of what goes over the wire
_FAREWELL_S = 2.0  # seconds for the last report to be heard


def versions() -> dict[str, str]:
    """Return what must be the same on all hosts, since results depend on it."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "tidemill": own_version(), "numpy": importlib.metadata.version("numpy")}


_PAUSE, _START, _FINISH = (control_messages.pack(each) for each in (Pause(), Start(), Finish()))


class HostAgent:
    """The agent of a host, once it is introduced. It has the share of a host: its own or,
    where it stands in for one that is lost, that one's. `orphaned`: set when whoever
    started it is gone.

    terminated: whether it was told to leave the run, by SIGTERM or the runner
    """

    def __init__(self, wire: Wire, introduction: Introduction, orphaned: threading.Event) -> None:
        self._wire, self._orphaned, self.terminated = wire, orphaned, False
        self._runner, self._address = introduction.runner, introduction.address
        self._seen = introduction.seen
        self._peer = wire.call(
            introduction.runner,
            introduction.key.encode(),
            introduction.runner_address,
            introduction.ports,
            joined=False,
        )
        self._workers: HostWorkers | None = None
        self._own: OwnFiles | None = None
        self._measurement: Measurement | None = None
        self._mirror: DatabaseMirror | None = None  # of the run's parameter database
        self._lives = Counter[str]()  # begun anew, of each worker
        self._running: set[str] = set()  # workers that the runner has told to run
        self._actors: set[str] = set()  # of the experiment
        self._paused = False  # for want of its word
        self._run_ends = False  # so that nobody leaves it
        self._leaves_at = 0.0  # when its workers are to have paused, 0: it does not leave
        self._resting: set[str] = set()  # workers that have paused since
        self._to_rest: dict[str, bytes] = {}  # what workers were told for that
        self._rested = False  # all had, when it was looked whether what they have sent is there
        self._leaves_unsaid = False  # that it leaves, to the user
        self._unsent: dict[str, tuple[int, int]] = {}  # see `Vacated`
        self._to_join: dict[str, tuple[Listen | CallHost, float]] = {}  # of each agent, and until when
        self._calling: dict[str, float] = {}  # agents, and until when each is to answer
        self._hung_up: set[str] = set()  # those of whom the runner was told that it is so
        self._held: dict[str, StandIn] = {}  # by name
        self._told: set[str] = set()  # those of them of which the runner was told
        self._over = False
        self._next_traffic = 0.0
        self._woken = threading.Event()
        self._thread = self._turn_wire()

    def _turn_wire(self) -> WireThread:
        thread = WireThread(self._wire, self._wake)
        thread.start()
        return thread

    def _wake(self) -> None:
        self._woken.set()
        if (workers := self._workers) is not None:
            workers.wake()

    def terminate(self) -> None:
        """Begin to leave the run. For a signal's handler: it takes no lock."""
        self.terminated = True
        if (workers := self._workers) is not None:
            workers.wake()

    def run(self) -> None:
        """Do what the runner orders until it is over, or the runner is gone."""
        sees = bool(self._seen) and os.path.isfile(self._seen)
        self._report(Here(own_kind(), versions(), visible_gpus(), sees))
        while not self._over and not self._lost():
            if self._workers is not None:
                self._workers.wait(self._patience_s)
            elif self._woken.wait(self._patience_s):
                self._woken.clear()
            self._hear()
            self._pause_alone()
            self._look_at_measurement()
            self._join()
            self._look_at_calls()
            self._look_at_others()
            self._look_at_held()
            if self._workers is not None:
                self._listen(self._workers)
            self._leave(self._workers)
        if self._over:
            self._report(Closed())
            deadline = monotonic() + _FAREWELL_S
            # who has read that hangs up, and says no more that it has
            while not (self._peer.words.heard_all or self._peer.ended or self._orphaned.is_set()):
                if monotonic() > deadline:
                    break
                sleep(0.01)

    @property
    def _patience_s(self) -> float:
        """Seconds until it is looked again at what nobody is woken by: versions that are
        wanted, an agent that is called or being started, a runner that is silent, what is
        to arrive before this one leaves."""
        waits = self._peer.silence_s > SILENCE_S or self.terminated or self._mirror is not None
        if self._calling:  # the run's begin waits for it
            return _CALLED_LOOK_S
        return _LOOK_S if waits or self._to_join or self._held.keys() - self._told else LEASE_S

    def close(self) -> None:
        """End whatever still lives."""
        workers, self._workers = self._workers, None  # a signal wakes nobody any more
        with ExitStack() as stack:
            if self._own is not None:
                stack.callback(self._own.close)
            for held in self._held.values():
                stack.callback(held.close)
            if self._measurement is not None:
                stack.callback(self._measurement.close)
            if workers is not None:
                stack.callback(workers.close_ends)
            stack.callback(self._thread.end)
            if workers is not None:
                workers.launcher.close(0.0)

    def _lost(self) -> bool:
        failed = self._thread.failed
        if failed:
            print(failed, file=sys.stderr, flush=True)
        silent = self._peer.silence_s > ALONE_S
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
            case Listen(agent) | CallHost(agent):
                self._to_join[agent] = order, monotonic() + _FREED_S
                self._join()
            case RunEnds(ends):
                self._run_ends = ends
                if self._workers is not None:
                    self._workers.launcher.tell_of_end(ends)
                if ends:
                    self._stay()
            case Part(host):
                if self._workers is not None and (lost := self._workers.part(host)) is not None:
                    self._wire.drop(lost)
            case Vacate():
                self._vacate()
            case HoldAgent(agent) if self.terminated:
                self._report(AgentKey(agent, error="it was told to leave (SIGTERM)"))
            case HoldAgent(agent):
                self._held[agent] = StandIn(agent, self._address)
            case IntroduceAgent(agent, introduction):
                if agent in self._held:
                    self._held[agent].introduce(introduction)
            case LetGo(agent):
                if agent in self._held:
                    self._let_go(agent)
            case ForgetAgent(agent):
                self._to_join.pop(agent, None)
                if agent in self._wire.others:
                    self._wire.drop(agent)
            case Measure():
                self._measure(order)
            case Work():
                self._report(Launched(self._launch(order), self._mirror is not None))
            case KnownVersions(index):
                if self._mirror is not None:
                    self._mirror.take_index(index)
            case VersionPart(policy, version, data, whole):
                if self._mirror is not None:
                    self._want(self._mirror.take_part(policy, version, data, whole))
            case LeaveRun():
                self.terminated = True
                if not self._run_ends:  # else as upon SIGTERM, once it does not end any more
                    self._leaves_at = monotonic() + _LEAVE_S
            case Close(seconds):
                if self._workers is not None:
                    self._workers.launcher.close(seconds)
                self._tell_logs(all_of_it=True)
                self._over, self.terminated = True, False
            case Revive(workers, moved):
                if self._workers is not None:
                    self._workers.revive(workers, moved)
                    self._lives.update(workers)
                    self._running -= set(workers)
            case Speak(worker, life, message):
                if (
                    self._workers is not None
                    and worker in self._workers.links
                    and life == self._lives[worker]
                ):
                    self._tell(self._workers, worker, message)
                    if message == _START:
                        self._running.add(worker)
                    elif message == _PAUSE:
                        self._running.discard(worker)
            case Ask(number, worker, stack):
                if self._workers is not None and worker in self._workers.links:
                    launcher = self._workers.launcher
                    calls = list(launcher.stack(worker)) if stack else []
                    self._report(Whereabouts(number, calls, launcher.condition(worker)))

    def _here(self, sent: SentExperiment) -> SentExperiment:
        """Return the experiment with the user's files where this host has them."""
        if has_files(sent.code):
            return sent
        self._own = self._own or OwnFiles()
        return self._own.carry(sent)

    def _measure(self, order: Measure) -> None:
        """Have a process measure what the experiment's parts cost here."""
        try:
            sent = self._here(order.sent)
            told = MeasurementOrder(json.loads(sent.experiment), sent.source, os.getpid(), sent.path)
            self._measurement = Measurement(told.pack(), order.seconds, self._wake)
        except (OSError, ValueError, RuntimeError) as error:  # no room for files, a process or a thread
            self._report(ProbeAnswer(error=str(error)))

    def _look_at_measurement(self) -> None:
        if self._measurement is not None and self._measurement.measured is not None:
            self._report(self._measurement.measured)
            self._measurement = None

    def _join(self) -> None:
        """Let those agents in, and call those, that it was told to. While no more files
        may be open it is tried again: what belongs to a lost host is closed soon."""
        for agent, (order, deadline) in list(self._to_join.items()):
            key = order.key.encode()
            try:
                if isinstance(order, Listen):
                    _, ports = self._wire.listen(agent, key, self._address, joined=False)
                    self._report(Listening(agent, ports))
                else:
                    self._wire.call(agent, key, order.address, order.ports, joined=False)
                    self._calling[agent] = monotonic() + _CALL_S
            except ConfigError as error:
                if (full := isinstance(error, TooManyFiles)) and monotonic() < deadline:
                    continue
                told = Listening(agent, error=str(error), full=full) if isinstance(order, Listen) else None
                self._report(told or Called(agent, str(error), own=True))
            del self._to_join[agent]

    def _look_at_calls(self) -> None:
        """Report which agents have answered, and which have not in time."""
        for name, deadline in list(self._calling.items()):
            peer = self._wire.others.get(name)
            if peer is not None and not (peer.hellos or peer.ended) and monotonic() < deadline:
                continue
            del self._calling[name]
            if peer is not None:
                silent = peer.ended or peer.lost or f"it does not answer within {_CALL_S:.0f} s"
                self._report(Called(name, "" if peer.hellos else silent))
                self._hung_up |= {name} if peer.ended and not peer.hellos else set()

    def _look_at_others(self) -> None:
        """Report which agents the wire has hung up on. What goes over edges between the
        two waits until the runner has them part."""
        others = self._wire.others
        self._hung_up &= others.keys()
        for name, peer in others.items():
            if peer is not self._peer and peer.ended and name not in self._hung_up | self._calling.keys():
                self._hung_up.add(name)
                self._report(HungUp(name, peer.ended, peer.by_own_fault))

    def _launch(self, order: Work) -> str:
        """Start the workers; return why that cannot be, or ""."""
        sees = order.folder is None or os.path.isfile(order.seen)
        logs = None
        try:
            begin_to_work()
            sent = self._here(order.sent)
            travel(sent.path)
            expect(sent.files)
            if sent.source is not None:
                load_file(Path(sent.source), "experiment file")
            experiment = decode(Experiment, json.loads(sent.experiment))
            self._actors = {name for name, config in experiment.members() if isinstance(config, ActorConfig)}
            folder = order.folder
            if not sees:
                self._refuse_unseen(experiment, order)
                self._own = self._own or OwnFiles()
                logs, folder = self._own.logs, None
                if self._who_draws(experiment, order):
                    self._mirror = DatabaseMirror(self._own.run / PARAMETERS)
                    folder = str(self._own.run)
            job = Job(
                experiment,
                sent.source,
                folder,
                order.resume,
                sent.files,
                order.epoch,
                gpus=order.gpus,
                places=order.places,
            )
            self._lives.update(order.lives)
            self._workers = HostWorkers(
                self._wire, job, order.places, order.host, order.agents, order.lives, logs
            )
        except Exception as error:
            said = str(error) if isinstance(error, TidemillError) else f"{error}{place(error)}"
            return f"{type(error).__name__}: {said}"
        return ""

    @staticmethod
    def _who_draws(experiment: Experiment, order: Work) -> list[str]:
        """Return the workers of the share that read the run's parameter database."""
        return [
            name
            for name, config in experiment.members()
            if order.places[name] == order.host and draws(config)
        ]

    def _want(self, wanted: tuple[str, int, int] | None) -> None:
        if wanted is not None:
            self._report(WantVersion(*wanted))

    def _refuse_unseen(self, experiment: Experiment, order: Work) -> None:
        """Raise `ConfigError` where workers of this host need the run's folder."""
        mine = [name for name, host in order.places.items() if host == order.host]
        if reason := needs_folder(experiment, mine):
            raise ConfigError(
                f"the run's folder {order.folder} is not seen there, and {reason}; put it where all hosts "
                "see it (--run-dir)"
            )

    def _tell_logs(self, all_of_it: bool = False) -> None:
        for name, text in self._own.written(all_of_it) if self._own is not None else ():
            self._report(Logged(name, text))

    def _tell_traffic(self, workers: HostWorkers) -> None:
        if monotonic() >= self._next_traffic:
            self._next_traffic = monotonic() + _TRAFFIC_S
            unheard = {
                name: f"it has not been heard for {peer.silence_s:.0f} s"
                for name, peer in self._wire.others.items()
                if peer.silence_s > ALONE_S
            }
            traffic = self._wire.traffic
            self._report(msgspec.structs.replace(traffic, edges=workers.flows(), at=now(), unheard=unheard))

    def _pause_alone(self) -> None:
        """Pause what runs while nothing is heard of the runner: it may take this host for
        lost."""
        alone = self._peer.silence_s > PAUSE_S
        if alone is not self._paused and self._workers is not None:
            self._paused = alone
            for worker in self._running & self._workers.links.keys():
                self._tell(self._workers, worker, _PAUSE if alone else _START)

    def _tell(self, workers: HostWorkers, worker: str, message: bytes) -> None:
        """Tell a worker something. One that is to run rests no more."""
        workers.links[worker].send(message)
        if message == _START:
            self._resting.discard(worker)
            self._to_rest.pop(worker, None)

    def _leave(self, workers: HostWorkers | None) -> None:
        """Once this agent is told to end, and the run goes on: have whom it holds leave,
        actors finish the samples that they have begun, then all workers pause, and what
        they have sent arrive, and leave."""
        if not self.terminated or self._run_ends or self._over:
            return
        if not self._leaves_at:
            self._leaves_at, self._leaves_unsaid = monotonic() + _CALM_S + _LEAVE_S, workers is not None
            for held in self._held.values():
                held.terminate()
        if (left := self._leaves_at - monotonic()) > _LEAVE_S:
            return
        if self._leaves_unsaid:
            self._leaves_unsaid = False
            self._report(Noticed("it was told to leave: its workers are to live again elsewhere"))
        if workers is None:
            if not self._held or left <= 0:
                self._report(Leaving())
                self._over = True
            return
        running = self._running & workers.links.keys() - self._resting
        playing = running & self._actors if left > _LEAVE_S - _FINISH_S else set[str]()
        # actors may still ask the others, and wait for room
        told = _FINISH if playing else _PAUSE
        for worker in playing or running:
            if self._to_rest.get(worker) != told:
                self._to_rest[worker] = told
                self._tell(workers, worker, told)
        resting = not running
        if left > 0 and (self._held or not (resting and self._rested and workers.drained)):
            self._rested = resting  # only a look from now on has seen all that they have sent
            workers.look_whether_drained()
            return
        self._report(Leaving(list(workers.sent)))
        self._over = True

    def _stay(self) -> None:
        """Leave no more, where that had begun: whom it has had pause goes on."""
        if self._workers is not None and 0 < self._leaves_at < monotonic() + _LEAVE_S and not self._paused:
            for worker in self._running & self._workers.links.keys() & self._to_rest.keys():
                self._tell(self._workers, worker, _START)
        self._leaves_at, self._rested, self._leaves_unsaid = 0.0, False, False
        self._resting.clear()
        self._to_rest.clear()

    def _vacate(self) -> None:
        """Give up the share."""
        sent: list[tuple[int, int, int]] = []
        if self._workers is not None:
            for worker, link in self._workers.links.items():
                for message in link.receive() or ():
                    self._note(worker, message)
            self._workers.launcher.close(0.0)
            self._thread.end()
            self._wire.turn(0.0)  # what was to be done is, as long as there is what it is done to
            sent = self._workers.sent_in_the_end()
            for other, peer in self._wire.others.items():
                peer.part() if peer is self._peer else self._wire.drop(other)
            self._wire.turn(0.0)
            workers, self._workers = self._workers, None
            workers.close_ends()
            self._running, self._paused = set(), False
            self._mirror = None
            self._lives.clear()
            self._tell_logs(all_of_it=True)
            self._thread = self._turn_wire()
        self._report(Vacated(sent, self._unsent))
        self._unsent = {}

    def _look_at_held(self) -> None:
        for name, held in list(self._held.items()):
            if name not in self._told and (held.key or held.error):
                self._told.add(name)
                self._report(AgentKey(name, held.key.decode(), held.error))
            if how := held.ended():
                self._let_go(name)
                self._report(AgentEnded(name, how))

    def _let_go(self, agent: str) -> None:
        """End an agent that this one holds."""
        self._told.discard(agent)
        self._held.pop(agent).let_go()

    def _listen(self, workers: HostWorkers) -> None:
        """Report what workers say, and which are gone."""
        self._tell_logs()
        self._tell_traffic(workers)
        for text in workers.launcher.notices():
            self._report(Noticed(text))
        while workers.parted:
            self._report(Parted(*workers.parted.popleft()))
        if self._mirror is not None:
            self._want(self._mirror.wanted())
        for worker, link in list(workers.links.items()):
            messages = link.receive() if not self._over else []
            if messages is None:
                del workers.links[worker]
                obituary = workers.launcher.obituary(worker)
                self._report(WorkerGone(worker, self._lives[worker], obituary))
            for message in messages or ():
                self._report(Speak(worker, self._lives[worker], message))
                self._note(worker, message)

    def _note(self, worker: str, message: bytes) -> None:
        """Take note of what a worker says that would have to be known if this host were
        lost."""
        with suppress(SchemaError):  # the runner says so
            told = control_messages.unpack_up(message, worker)
            if isinstance(told, WorkerStatistics):
                self._unsent[worker] = self._lives[worker] + 1, told.unsent
            elif self._leaves_at and isinstance(told, Status) and told.state is State.PAUSED:
                self._resting.add(worker)


def main(name: str) -> None:
    """Be the agent of host `name`."""
    for number in ENDING:  # the runner handles what ends a run
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    bell = EventBell(os.eventfd(0))
    wire = Wire(name, bell)
    with ExitStack() as stack:
        stack.callback(wire.close)
        print(json.dumps({"key": wire.keys.public.decode(), "tidemill": own_version()}), flush=True)
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
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
        stack.callback(agent.close)
        try:
            with noticing_stops():
                agent.run()
            if agent.terminated:
                raise SystemExit(LEFT)
        except SchemaError as error:
            raise SystemExit(f"the runner: {error}") from None
        except TidemillError as error:
            raise SystemExit(str(error)) from None


def _wait_for_end(orphaned: threading.Event) -> None:
    """Wait until whoever holds this process's standard input is gone."""
    while os.read(0, 1 << 10):
        pass
    orphaned.set()


if __name__ == "__main__":
    main(sys.argv[1])
