"""The agents of a run's hosts, as the runner knows them: who is there, who has which
host's share of the workers, and who gets the share of a host that is lost.

Each share has a name, that of its host, and edges know no other. Its agent is the one
that the engine has started there or, once that is lost, another one, held by an agent
that is left, or by the runner. What such a stand-in is told differs in nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic, sleep

import msgspec

from tidemill.api.edges import Edge
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import HostKind, ProbeAnswer
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError, SchemaError
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.core.private_files import private
from tidemill.hosts.crossing import neighbours
from tidemill.hosts.orders import (
    AgentEnded,
    AgentKey,
    Ask,
    Called,
    CallHost,
    Closed,
    ForgetAgent,
    Here,
    HoldAgent,
    HungUp,
    IntroduceAgent,
    Introduction,
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
    Ports,
    Report,
    Speak,
    Traffic,
    Vacate,
    Vacated,
    WantVersion,
    Whereabouts,
    WorkerGone,
    pack,
    unpack_report,
)
from tidemill.hosts.wire import Wire, WireThread
from tidemill.launchers.engine import RUNNER, HostEngine, StartedAgent, at_most
from tidemill.launchers.host import ALONE_S
from tidemill.launchers.kinds import own_kind
from tidemill.launchers.known_agents import KnownAgent, Share
from tidemill.launchers.lost_samples import LostSamples
from tidemill.launchers.own_files import MOST_LOGGED_BYTES
from tidemill.launchers.placement import device_of, fit, needs_folder, needs_gpu
from tidemill.launchers.processes import AWAY_S
from tidemill.launchers.report_checks import ReportChecks, check_here, check_tidemill
from tidemill.launchers.stand_in import StandIn
from tidemill.launchers.versions_sent import VersionsSent
from tidemill.launchers.worker_group import log_name
from tidemill.nets.choose_device import visible_gpus
from tidemill.store.parameter_database import PARAMETERS
from tidemill.transports.shared import EventBell

JOIN_S = 60.0
"""Seconds that a host has to answer an order at the start."""
VOID_S = 6.0
"""Seconds after the last word of a host within which its workers are taken for dead. By
then it has paused them (`PAUSE_S`), though it may have begun to count a lease later."""
LATE_S = 0.3
"""Seconds of them for noticing it: the wire looks each `WATCH_S`, and the runner hears
each 0.15 s while nothing comes."""
_ANSWER_S = 1.0  # seconds to wait for where a worker's thread is
_LOOK_S = 0.005  # seconds between two looks for what is waited for
_MOST_SAID = 200  # characters of what a host says that the user is told
_NOTICE, _MOST_NOTICED = 400, 1000  # characters of a notice, and how many a host may have


class HostFull(RunError):
    """An agent can let no other one in, wherever that is started."""


class Agents:
    """All agents of a run.

    wire: the runner's
    known: those that are not gone, by name
    shares: by host, once there is an experiment
    cores, gpus: how many of each host are the run's, by its name
    kinds: of the hosts, by name
    sees: whether each host sees the run's folder, by its name
    part: function that has the runner's own workers part with the agent that has a host's
        share
    edges: of the experiment, once there is one
    lost: what was lost with hosts
    notices: what the user is to be told of them
    """

    def __init__(self, engine: HostEngine, bell: int, logs: Path | None, came: Callable[[], None]) -> None:
        """`bell`: an eventfd. `logs`: the folder of logs. `came`: function that is
        called, in any thread, when there is something to hear."""
        self._engine, self._logs = engine, logs
        self.wire = Wire(RUNNER, EventBell(bell))
        self.known: dict[str, KnownAgent] = {}
        self.shares: dict[str, Share] = {}
        self.cores: dict[str, int] = {}
        self.gpus: dict[str, int] = {}
        self.kinds: dict[str, HostKind] = {}
        self.sees = {RUNNER: True}
        self.part: Callable[[str], object] = lambda _: None
        self.lost = LostSamples()
        self.notices: list[str] = []
        self._disk = FolderThread(logs or Path(), AWAY_S)  # the share that the run's folder is on may hang
        self._versions = None if logs is None else VersionsSent(logs.parent / PARAMETERS, self._disk)
        self._unwritten: list[tuple[Path, bytes]] = []  # of logs
        self._held: dict[str, StandIn] = {}  # that the runner holds itself
        self._unmet: dict[str, StartedAgent] = {}  # that are back, and could not be let in yet
        self._refusals: set[str] = set()  # why, as the user was told
        self._on_folder: dict[str, str] = {}  # why a share's workers must see the run's folder, by host
        self.edges: Sequence[Edge] = ()
        self._places: Mapping[str, str] = {}
        self._checks = ReportChecks()
        self._processes: Sequence[Sequence[str]] = ()
        self._devices: dict[str, list[str]] = {}  # of each share's workers
        self._seating: Iterator[None] | None = None
        self._asked = self._stand_ins = 0
        self._thread = WireThread(self.wire, came)
        self._thread.start()

    # Who is there.

    def meet(self, seen: str = "") -> None:
        """Have the engine start the agents, and let each call. `seen`: see
        `Introduction`. Raises `RunError`."""
        started = self._engine.start(self._logs)
        if RUNNER in started:
            raise ConfigError(f'no host may be called "{RUNNER}", as the one is where the run was begun')
        for host, agent in started.items():
            check_tidemill(host, agent)
        for host, agent in started.items():
            self._greet(host, host, None, agent, partial(self._engine.introduce, host), seen)
        own = self._engine.own_cores
        self.cores[RUNNER] = at_most(own, cores())
        self.gpus[RUNNER] = at_most(self._engine.own_gpus, visible_gpus()) if self.cores[RUNNER] else 0
        self.kinds[RUNNER] = own_kind()
        for known in list(self.known.values()):
            self.wait_for(self._until(known, "call the runner", lambda known: known.here is not None))
            assert known.here is not None
            check_here(known.home, known.here)
            kind = known.here.kind
            self.cores[known.home] = at_most(known.started.cores, kind.cores)
            self.gpus[known.home] = at_most(known.started.gpus, known.here.gpus)
            self.kinds[known.home] = kind
            self.sees[known.home] = known.here.sees

    def measure(self, hosts: Sequence[str], order: Measure) -> dict[str, ProbeAnswer]:
        """Have hosts measure, all at the same time, and return what came of it on each.
        Raises `RunError` as soon as one of them is lost."""
        if gone := [host for host in hosts if host not in self.known]:
            raise RunError(f"host {gone[0]} is gone before the run began")
        asked = {host: self.known[host] for host in hosts}
        for agent in asked.values():
            agent.measured = None
            self.tell(agent, order)
        measured = lambda agent: agent.measured is not None  # noqa: E731
        each = [self._until(agent, "measure", measured, order.seconds + JOIN_S) for agent in asked.values()]
        self.wait_for(zip_longest(*each))
        return {host: agent.measured for host, agent in asked.items() if agent.measured is not None}

    def _greet(
        self,
        name: str,
        home: str,
        holder: str | None,
        started: StartedAgent,
        introduce: Callable[[bytes], None],
        seen: str = "",
    ) -> KnownAgent:
        """Wait for an agent that was started, and tell it how it calls the runner."""
        own, key = self._engine.own_address, self.wire.keys.public.decode()
        peer, ports = self.wire.listen(name, started.key, own, joined=False)
        agent = self.known[name] = KnownAgent(name, home, holder, started, peer)
        told = Introduction(name, started.address, RUNNER, own, ports, key, seen=seen)
        introduce(msgspec.json.encode(told))
        return agent

    def share_out(self, experiment: Experiment, places: Mapping[str, str]) -> None:
        """Give each agent the share of its host, and have those call each other whose
        workers have edges in common. Raises `RunError`."""
        self.edges, self._places = experiment.edges(), places
        self._processes = experiment.processes()
        self._checks = ReportChecks(self.edges, places, self.shares, list(self.cores))
        shares = {host: [name for name in places if places[name] == host] for host in self.cores}
        self._on_folder = {host: needs_folder(experiment, mine) for host, mine in shares.items()}
        self._devices = {host: [] for host in self.cores}
        for name, config in experiment.members():
            self._devices[places[name]].append(device_of(config))
        for host in [home for home in self.cores if home != RUNNER]:
            agent = self.known.get(host)
            if agent is None:
                raise RunError(f"host {host} is gone before the run began")
            agent.share = host
            self.shares[host] = Share(host, agent)
            self.wait_for(self._join(agent))

    def _join(self, agent: KnownAgent) -> Iterator[None]:
        """Have an agent call those that are there, and whose workers have edges in common
        with its share's, and wait until they have answered. One that is lost meanwhile is
        left out: who gets its share calls this one. Raises `RunError`."""
        called = list[tuple[KnownAgent, Ports]]()
        for host in neighbours(self.edges, self._places, agent.share):
            share = self.shares.get(host)
            if share is None or (other := share.agent) is None or other is agent:
                continue
            self.tell(other, Listen(agent.name, agent.started.key.decode()))
            listens = lambda other: other.lost or agent.name in other.listening  # noqa: E731
            yield from self._until(other, f"wait for {agent.name}", listens)
            if other.lost:
                continue
            listening, started = other.listening[agent.name], other.started
            if why := listening.error[:_MOST_SAID]:
                kind = HostFull if listening.full else RunError
                raise kind(f"host {other.home} cannot let host {agent.home} in: {why}")
            ports = listening.ports
            self.tell(agent, CallHost(other.name, started.address, ports, started.key.decode()))
            called.append((other, ports))
        for other, ports in called:
            yield from self._reaches(agent, other, ports)
        if agent.lost:  # in the very moment in which all had answered
            raise RunError(f"host {agent.name} did not join the others: {agent.lost}")

    def _reaches(self, agent: KnownAgent, other: KnownAgent, ports: Ports) -> Iterator[None]:
        """Yield until another agent has answered the call of an agent, or is lost. Raises
        `RunError`."""
        answers = lambda agent: other.lost or other.name in agent.called  # noqa: E731
        yield from self._until(agent, f"call {other.name}", answers)
        told = agent.called.get(other.name)
        if told is not None and told.error and not other.lost:
            why = told.error[:_MOST_SAID]
            if told.own:
                raise RunError(f"host {agent.home} cannot call host {other.home}: {why}")
            raise RunError(
                f"host {agent.home} does not reach host {other.home} at {other.started.address}, ports "
                f"{ports[0]} and {ports[1]}: {why}; both reach {self._engine.own_address}: let "
                "connections between the two through, or leave one of them out"
            )

    def _until(
        self, agent: KnownAgent, what: str, done: Callable[[KnownAgent], object], seconds: float = JOIN_S
    ) -> Iterator[None]:
        """Yield until the agent has done something. Raises `RunError`."""
        deadline = monotonic() + seconds
        while not done(agent):
            refused = "".join(f"; {text}" for text in list(self.wire.refused))  # the wire adds to them
            if agent.lost:
                raise RunError(f"host {agent.name} did not {what}: {agent.lost}{refused}")
            if monotonic() > deadline:
                raise RunError(
                    f"host {agent.name} did not {what} within {seconds:.0f} s; can it reach "
                    f"{self._engine.own_address}, or does something between the hosts refuse connections?"
                    f"{refused}"
                )
            yield

    def wait_for(self, steps: Iterable[object]) -> None:
        """Wait until something that takes a while is done."""
        for _ in steps:
            sleep(_LOOK_S)
            self.hear()

    def launched(self, share: Share) -> Iterator[None]:
        """Yield until the workers of a share were started. Raises `RunError`."""
        agent = share.agent
        if agent is None:
            raise RunError(f"host {share.host} did not start its workers: {share.lost}")
        yield from self._until(agent, "start its workers", lambda agent: agent.launched is not None)
        assert agent.launched is not None
        if error := agent.launched.error:
            cure = "; what is installed here must be installed there, too" * ("No module named" in error)
            raise RunError(f"host {share.host} cannot start its workers: {error}{cure}")

    # What is said.

    def tell(self, agent: KnownAgent, order: Order) -> None:
        """Order an agent to do something."""
        if agent.name in self.wire.others:
            self.wire.tell(agent.name, pack(order))

    def tell_share(self, share: Share, order: Order) -> None:
        """Tell whoever has a share, if anybody has it."""
        if share.agent is not None:
            self.tell(share.agent, order)

    def hear(self) -> None:
        """Take what the hosts have reported, and note which are lost. Raises
        `RunError`."""
        if self._thread.failed:
            raise RunError(f"the wire to other hosts has ended: {self._thread.failed}")
        for agent in list(self.known.values()):
            while agent.name in self.known and (data := agent.peer.words.read()) is not None:
                try:
                    self._take(agent, unpack_report(data))
                except SchemaError as error:
                    agent.peer.dismiss(str(error))
            if agent.name not in self.known:
                continue
            if agent.closed and agent.lost:
                self._forget(agent)
            elif not agent.closed:
                self._look_at(agent)
                if agent.launched is not None and agent.launched.draws and not agent.lost:
                    self._send_versions(agent)
        self._write_logs()
        for share in self.shares.values():
            if share.host not in self.known:
                self._greet_again(share.host)
            self._give_back(share)

    def _greet_again(self, host: str) -> None:
        """Greet the agent of a host that was lost, where there is another one."""
        kept = self._unmet.pop(host, None)
        if (started := self._engine.again(host) or kept) is None:
            return
        introduce = partial(self._engine.introduce, host)
        try:
            check_tidemill(host, started)
            self._greet(host, host, None, started, introduce)
            return
        except RunError as error:  # it was installed anew meanwhile
            why = str(error)
            introduce(b"{}")  # it ends by that, and another one may begin
        except ConfigError as error:  # for want of open files, say, of which there may be more later
            why = f"host {host} cannot be let in: {error}"
            self._unmet[host] = started
        if why not in self._refusals:
            self._refusals.add(why)
            self.notices.append(f"{why}; until then it stays away")

    def _note_unheard(self, agent: KnownAgent, unheard: Mapping[str, str]) -> None:
        """Take note, for the user, of others that a host does not hear any more, or hears
        again; not more often than it can be so."""
        homes = {other.name: other.home for other in self.known.values() if not other.lost}
        unheard = {name: why for name, why in unheard.items() if name in homes}
        changed = homes.keys() & (unheard.keys() ^ agent.unheard.keys())
        if changed and monotonic() < agent.unheard_at + ALONE_S:
            return
        for name in sorted(changed):
            if (why := unheard.get(name)) is not None:
                why = " ".join(why[:_MOST_SAID].split())
                said = f"does not hear host {homes[name]}: {why}; what goes between the two waits"
            else:
                said = f"hears host {homes[name]} again"
            self.notices.append(f"host {agent.home} {said}")
            agent.unheard_at = monotonic()
        agent.unheard = unheard

    def _send_versions(self, agent: KnownAgent) -> None:
        if self._versions is None:
            return
        # at once where one is wanted: one that is gone stands there no more
        if (news := self._versions.news(agent.name, now=agent.wanted is not None)) is not None:
            self.tell(agent, news)
        if agent.wanted is not None and (part := self._versions.part(agent.wanted)) is not None:
            agent.wanted = None
            self.tell(agent, part)

    def _look_at(self, agent: KnownAgent) -> None:
        silence, gone = agent.peer.silence_s, agent.peer.ended or self._how_it_ended(agent)
        if not agent.lost:
            if gone:
                self._lose(agent, gone)
            elif agent.here is not None and silence > VOID_S - LATE_S:
                self._lose(agent, f"it has not been heard for {silence:.1f} s")
        elif gone or silence > ALONE_S:  # by now it has ended itself
            self._forget(agent)

    def _how_it_ended(self, agent: KnownAgent) -> str:
        """Return how an agent has ended, "" as long as it is not known to have."""
        if agent.holder is None:
            return self._engine.ended(agent.name)
        if agent.holder == RUNNER:
            return self._held[agent.name].ended()
        return agent.how if agent.holder in self.known else f"host {agent.home} is gone"

    def _take(self, agent: KnownAgent, report: Report) -> None:
        share = self.shares.get(agent.share)
        links = share.links if share is not None and share.agent is agent else {}
        match report:
            case Logged():
                self._keep_log(agent, report)
            case Noticed(text):
                self._note(agent, text)
            case Traffic(edges=edges):
                self._checks.flows(agent.share, edges)
                self._note_unheard(agent, report.unheard)
                agent.traffic = report
            case Here():
                agent.here = report
                if agent.holder is None and (own := self.shares.get(agent.home)) is not None:
                    self._take_in(agent, own)
            case Listening(name) if name in self.known:
                agent.listening[name] = report
            case Called(name) if name in self.known:
                agent.called[name] = report
            case HungUp(name, why, own):
                other, said = self.known.get(name), " ".join(why[:_MOST_SAID].split())
                if other is None or other.lost or agent.lost:
                    pass  # the two have parted
                elif own:
                    self._lose(agent, f"it has hung up on host {other.home}: {said}")
                else:
                    self._lose(other, f"host {agent.home} has hung up on it: {said}")
            case ProbeAnswer():
                agent.measured = report
            case Launched(error):
                agent.launched = report
                if self._versions is not None:
                    self._versions.forget(agent.name)  # its copy begins now
                if error and share is not None and share.given:  # a stand-in: another one may
                    share.refused.add(agent.holder or agent.name)
                    self._lose(agent, f"it cannot start its workers: {error}")
            case WantVersion():
                agent.wanted = report  # the last one: who asks on and on is answered no oftener
            case Parted(host, came):
                self._checks.lives(host, came)
                self.lost.came(host, came, self.edges)
            case Vacated(sent, unsent):
                agent.lost = ""
                self._checks.lives(agent.share, sent)
                for worker, (life, steps) in unsent.items():
                    self._checks.life(agent.share, worker, life, steps)
                self.lost.sent(agent.share, sent, self.edges)
                self.lost.begun(agent.share, unsent)
            case AgentKey(name) if name in agent.held:
                agent.held[name] = report
            case AgentEnded(name, how):
                if (held := self.known.get(name)) is not None and held.holder == agent.name:
                    held.how = how
            case Whereabouts():
                agent.answer = report
            case Leaving(sent):
                self._checks.lives(agent.share, sent)
                self.lost.sent(agent.share, sent, self.edges)
                self._lose(agent, "it leaves", self._why_it_leaves(agent))
            case Closed():
                agent.closed = True
            case Speak() | WorkerGone() if agent.lost or share is None:
                pass  # its workers are void
            case Speak(worker) | WorkerGone(worker) if worker not in links:
                raise SchemaError(f"it speaks for {worker}, which does not live there")
            case Speak(worker, life) | WorkerGone(worker, life) if life != links[worker].life:
                pass  # the life before, which was ended with one that it cannot go on without
            case Speak(worker, _, message):
                links[worker].messages.append(message)
            case WorkerGone(worker, _, obituary):
                assert share is not None
                share.obituaries[worker] = obituary
                links[worker].gone = True

    def _keep_log(self, agent: KnownAgent, logged: Logged) -> None:
        """Append to a log in the run's folder what its host has told. Raises
        `SchemaError`."""
        kept = agent.logged.get(logged.log, 0) + len(logged.text)
        logs = {log_name(names) for names in self._processes if self._places[names[0]] == agent.share}
        if logged.log not in logs or kept > MOST_LOGGED_BYTES:
            raise SchemaError(f"it tells {kept} bytes of a log called {logged.log[:100]!r}")
        agent.logged[logged.log] = kept
        if self._logs is not None and logged.text:
            self._unwritten.append((self._logs / logged.log, logged.text))

    def _note(self, agent: KnownAgent, text: str) -> None:
        """Take note, for the user, of what its launcher has to tell."""
        agent.noticed += 1
        if agent.noticed < _MOST_NOTICED:
            self.notices.append(f"host {agent.home}: {' '.join(text[:_NOTICE].split())}")
        elif agent.noticed == _MOST_NOTICED:
            self.notices.append(f"host {agent.home} has had {_MOST_NOTICED} notices: no more is shown")

    def _write_logs(self) -> None:
        """Write what hosts have told of logs; while the disk does not answer, later."""
        if self._unwritten and not self._disk.hangs:
            told, self._unwritten = self._unwritten, []
            with suppress(Unanswered):  # it is written once the disk is back
                self._disk.do(partial(_append, told), anyway=True)

    def ask(self, share: Share, worker: str, stack: bool) -> Whereabouts:
        """Return how a worker of another host is, as far as it can be known."""
        self._asked += 1
        deadline = monotonic() + _ANSWER_S
        self.tell_share(share, Ask(self._asked, worker, stack))
        while (agent := share.agent) is not None and monotonic() < deadline:
            sleep(_LOOK_S)
            self.hear()
            if agent.answer is not None and agent.answer.number == self._asked:
                return agent.answer
        return Whereabouts(self._asked, [], "")

    # Who is lost, and who has its share then.

    def _lose(self, agent: KnownAgent, cause: str, told: str = "") -> None:
        """Take an agent for dead, and its workers with it. `told`: what is said of them,
        where it is not the cause, but they go to another host in order."""
        agent.lost = cause
        share = self.shares.get(agent.share)
        if share is not None and share.agent is agent:
            share.agent, share.given, share.moves = None, False, bool(told)
            share.lost = told or f"its host {share.host} is gone: {cause}"
            for link in share.links.values():
                link.gone = True
            self.part(share.host)
            for other in self.shares.values():  # it may hand on between two that have not met it
                self.tell_share(other, Part(share.host))
        if agent.holder is None:
            self.tell(agent, Vacate())
        else:
            self._forget(agent)

    def _take_in(self, agent: KnownAgent, share: Share) -> None:
        """Note whether a host that its engine has brought back may have its share
        again."""
        agent.share = share.host
        share.refused.discard(share.host)
        assert agent.here is not None
        try:
            check_here(share.host, agent.here)
        except RunError:  # the node that Ray has given in its place has another Python, say
            share.refused.add(share.host)
        else:
            self.gpus[share.host] = at_most(agent.started.gpus, agent.here.gpus)
            if not fit(self._devices[share.host], self.gpus[share.host]):
                share.refused.add(share.host)

    def _give_back(self, share: Share) -> None:
        """Have the stand-in of a share leave, once that has begun, where its own host is
        there again."""
        own, other = self.known.get(share.host), share.agent
        if other is None or other.launched is None or other.home == share.host or share.host in share.refused:
            return
        if own is not None and own.here is not None and not (own.lost or other.leaves):
            other.leaves = f"its host {share.host} is back, and has it again"
            self.tell(other, LeaveRun())

    def _why_it_leaves(self, agent: KnownAgent) -> str:
        """Return what is said of the workers of an agent that leaves in order."""
        if not agent.leaves:
            return f"its host {agent.home} was told to leave (SIGTERM)"
        own = self.known.get(agent.share)
        return (
            agent.leaves
            if own is not None and not own.lost
            else f"its host {agent.share} was back for a while"
        )

    def _forget(self, agent: KnownAgent) -> None:
        """Have no more to do with an agent that is lost."""
        del self.known[agent.name]
        self.wire.drop(agent.name)
        if self._versions is not None:
            self._versions.forget(agent.name)
        for other in self.known.values():  # also of those whom it had not met when it was lost
            other.listening.pop(agent.name, None)
            other.called.pop(agent.name, None)
            self.tell(other, ForgetAgent(agent.name))
        if agent.holder == RUNNER:
            self._held.pop(agent.name).let_go()
        elif agent.holder is not None and (holder := self.known.get(agent.holder)) is not None:
            self.tell(holder, LetGo(agent.name))

    def gone_with(self, worker: str) -> Sequence[str]:
        """Return the workers of the worker's host where that is lost."""
        share = self.shares.get(self._places[worker])
        return list(share.links) if share is not None and not share.given else ()

    def ready(self, workers: Sequence[str]) -> bool:
        """True when all of these workers have a place for their next lives. Brings that
        about, where they have lost theirs. Raises `RunError` where no host is left that
        can have them, or one that they have edges to can let no other in."""
        names = set(workers)
        lost = [share for share in self.shares.values() if not share.given and share.links.keys() & names]
        if not all(share.links.keys() <= names for share in lost):
            return False  # not all of its workers are known to be dead
        if self._seating is None:
            for share in lost:
                if share.agent is None and (holder := self._holder_for(share)):
                    self._seating = self._seat(share, holder)
                    break
        if self._seating is not None:
            try:
                next(self._seating)
            except StopIteration:
                self._seating = None
        return all(share.agent is not None for share in lost)

    def _holder_for(self, share: Share) -> str:
        """Return who is to hold the next agent of a share that is lost: its own host's
        agent, where that is back, or else whoever has most cores left, of those that have
        the GPUs that its workers need; "" as long as its own may come back. Raises
        `RunError`."""
        own = self.known.get(share.host)
        if own is not None and share.host not in share.refused:
            return "" if own.lost or own.here is None else own.name  # it may be another machine by now
        blind = self._on_folder[share.host] and [host for host, sees in self.sees.items() if not sees]
        holders = [
            a.name for a in self.known.values() if a.holder is None and not a.lost and a.home not in blind
        ]
        if self.cores[RUNNER] or self._engine.restarts:  # else it is a login node, whose allocation is over
            holders.insert(0, RUNNER)
        homes = {s.host: s.agent.home for s in self.shares.values() if s.agent is not None}
        if not (left := [n for n in holders if n not in share.refused and self._has_gpus(n, share, homes)]):
            on_gpus = needs_gpu(self._devices[share.host])
            if on_gpus and self._engine.restarts and share.host not in share.refused:
                return ""
            raise RunError(
                f"no host is left that can have the workers of host {share.host}"
                f"{', which need GPUs' * on_gpus}: {share.lost}"
            )
        busy = Counter(homes.get(host, host) for host in (self._places[n[0]] for n in self._processes))
        return max(left, key=lambda name: self.cores[name] - busy[name])

    def _has_gpus(self, holder: str, share: Share, homes: Mapping[str, str]) -> bool:
        """Return whether a host has the GPUs left that a share's workers need. `homes`:
        where shares are, of those that are not where their names say."""
        needed = self._devices[share.host]
        there = [each for host, each in self._devices.items() if homes.get(host, host) == holder]
        return not needs_gpu(needed) or fit([*chain(*there), *needed], self.gpus[holder])

    def _seat(self, share: Share, holder: str) -> Iterator[None]:
        """Have a new agent, held by `holder`, for a share that is lost. Whoever cannot
        hold it is asked no more."""
        self._stand_ins += 1
        name = f"{share.host}#{self._stand_ins}"
        agent = None
        try:
            if holder == RUNNER:
                address = self._engine.own_address
                held = self._held[name] = StandIn(name, address)
                while not (held.key or held.error):
                    yield
                if held.error:
                    raise RunError(held.error)
                introduce: Callable[[bytes], None] = held.introduce
                key = held.key
            else:
                keeper = self.known[holder]
                address = keeper.started.address
                keeper.held[name] = None
                self.tell(keeper, HoldAgent(name))
                yield from self._until(keeper, f"hold {name}", lambda keeper: keeper.held[name] is not None)
                told = keeper.held[name]
                assert told is not None
                if told.error:
                    raise RunError(told.error)
                key = told.key.encode(errors="replace")

                def hand_on(line: bytes) -> None:
                    self.tell(keeper, IntroduceAgent(name, line))

                introduce = hand_on
            agent = self._greet(name, holder, holder, StartedAgent(key, address), introduce)
            yield from self._until(agent, "call the runner", lambda agent: agent.here is not None)
            agent.share = share.host
            yield from self._join(agent)
            share.agent = agent
        except HostFull:
            raise
        except (RunError, ConfigError) as error:  # who cannot be let in, for want of open files, either
            share.refused.add(holder)
            share.lost = str(error)
            if agent is not None and agent.name in self.known:
                self._forget(agent)
            elif holder == RUNNER and name in self._held:
                self._held.pop(name).let_go()
            elif holder in self.known:  # it may have it by now, or later
                self.tell(self.known[holder], LetGo(name))
        finally:
            if holder in self.known:
                self.known[holder].held.pop(name, None)

    def tell_all(self, order: Order) -> None:
        """Order all agents that are left to do something."""
        for agent in self.known.values():
            if not agent.lost:
                self.tell(agent, order)

    def wait_closed(self, seconds: float) -> None:
        """Wait, so long at most, until all have told their end that are left."""
        deadline = monotonic() + seconds
        while monotonic() < deadline and not all(a.closed or a.lost for a in self.known.values()):
            sleep(_LOOK_S)
            with suppress(RunError):
                self.hear()

    def end(self) -> None:
        """Turn the wire no more, and end what the runner holds."""
        with ExitStack() as stack:
            stack.callback(self._engine.close)
            stack.callback(self._disk.close)
            for held in self._held.values():
                stack.callback(held.close)
            stack.callback(self.wire.close)
            self._thread.end()


def _append(texts: Iterable[tuple[Path, bytes]]) -> None:
    for path, text in texts:
        with suppress(OSError), open(path, "ab", opener=private) as file:
            file.write(text)
