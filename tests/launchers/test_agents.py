"""What the runner takes of agents, whatever they tell, and how they part."""

import errno
import os
import re
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from benchmarks.shares import NoShare, share_in
from tests.hosts.hosts import needs_namespaces
from tests.launchers.host_launchers import LOOPBACK, TwoHosts
from tests.run.watching import wait_until

from tidemill.api.control_messages import State, Status
from tidemill.api.control_messages import pack as pack_up
from tidemill.api.edges import Edge
from tidemill.core.errors import RunError, SchemaError, TooManyFiles
from tidemill.core.own_version import own_version
from tidemill.hosts.connections import HostConnection, Keys
from tidemill.hosts.orders import (
    AgentKey,
    Called,
    CallHost,
    ForgetAgent,
    Here,
    HungUp,
    Introduction,
    Launched,
    LeaveRun,
    Leaving,
    Listen,
    Listening,
    Logged,
    Measure,
    Noticed,
    Part,
    Parted,
    Report,
    RunEnds,
    SentExperiment,
    Speak,
    Traffic,
    Vacated,
    WantVersion,
    pack,
)
from tidemill.hosts.peer import LEASE_S, SILENCE_S, WATCH_S, now
from tidemill.hosts.wire import Wire
from tidemill.launchers import agents, host, log_files
from tidemill.launchers.agents import Agents
from tidemill.launchers.engine import CommandEngine, StartedAgent
from tidemill.launchers.host_workers import HostWorkers
from tidemill.launchers.kinds import own_kind
from tidemill.launchers.known_agents import HostLink, KnownAgent, Share
from tidemill.launchers.log_files import shorten
from tidemill.launchers.own_files import OwnFiles
from tidemill.launchers.report_checks import ReportChecks, check_here
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.transports.shared import EventBell


class Lasting(CommandEngine):
    """An engine whose agents do not end."""

    def ended(self, host: str) -> str:
        return ""


class Told:
    """The runner's agents: one, b, has the share of its host, where actor-0 lives."""

    def __init__(self, folder: Path) -> None:
        self.bell = os.eventfd(0)
        (folder / "logs").mkdir()
        self.agents = Agents(Lasting({}), self.bell, folder / "logs", lambda: None)
        self.agents.edges = [
            Edge("samples/s/actor-0/0/trainer-0", "channel", "actor-0", ("trainer-0",)),
            Edge("samples/s/actor-1/0/trainer-0", "channel", "actor-1", ("trainer-0",)),
        ]
        self.agents.cores = {"runner": 1, "b": 1}
        agents = self.agents
        agents._places = {"actor-0": "b", "actor-1": "runner", "trainer-0": "runner"}
        agents._checks = ReportChecks(agents.edges, agents._places, agents.shares, agents.cores)
        self.agent = self.meet("b", None)
        share = self.agents.shares["b"] = Share("b", self.agent, given=True)
        share.links["actor-0"] = HostLink("actor-0", lambda _: None, 1)  # of its second life

    def end(self) -> None:
        self.agents.end()
        os.close(self.bell)

    def meet(self, name: str, holder: str | None) -> KnownAgent:
        key = Keys.new().public
        peer, _ = self.agents.wire.listen(name, key, LOOPBACK, joined=False)
        agent = KnownAgent(name, "b", holder, StartedAgent(key, LOOPBACK), peer, share="b")
        self.agents.known[name] = agent
        return agent


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("how", ["its agent ended", ""])
def test_who_is_waited_for_and_has_another_key_is_told_so(told: Told, how: str) -> None:
    _, ports = told.agents.wire.listen("c", Keys.new().public, LOOPBACK, joined=False)
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()
        other.curve_serverkey = told.agents.wire.keys.public
        other.connect(f"tcp://{LOOPBACK}:{ports[0]}")
        wait_until(lambda: told.agents.wire.refused, 60, "it is refused")
    told.agent.lost = how
    waits = told.agents._until(told.agent, "call the runner", lambda _: False, 0.0)
    with pytest.raises(RunError, match=rf"{how}.*; .* wants to be c/control, and its key .* is not on the l"):
        list(waits)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (Parted("b", [(2, 1, 0, 0)]), "edge 2, and there are 2"),
        (Parted("b", [(0, 3, 0, 0)]), "life 3 of 'actor-0'"),
        (Parted("b", [(1, 1, 0, 0)]), "life 1 of 'actor-1', which was not on host 'b'"),
        (Parted("c", [(0, 1, 0, 0)]), "which was not on host 'c'"),
        (Vacated([(0, 0, 5)]), "life 0 of 'actor-0'"),
        (Vacated([], {"trainer-0": (1, 5)}), "life 1 of 'trainer-0'"),
        (Leaving([(-1, 1, 5)]), "edge -1"),
        (Leaving([(0, 1, -5)]), "counts"),
        (Parted("b", [(0, 1, 0, 1 << 60)]), "counts"),
        (Vacated([], {"actor-0": (1, -1)}), "counts"),
        (Traffic(edges=[(2, "runner", 1, 0.0)]), "edge 2 from host 'b' to 'runner'"),
        (Traffic(edges=[(1, "runner", 1, 0.0)]), "edge 1 from host 'b'"),
        (Traffic(edges=[(0, "c", 1, 0.0)]), "to 'c'"),
        (Traffic(edges=[(0, "runner", 1, float("nan"))]), "for nan s"),
    ],
)
def test_what_is_told_of_what_was_not_there_is_refused(told: Told, report: Report, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        told.agents._take(told.agent, report)
    assert told.agents.lost.take() == [] and told.agent.traffic == Traffic()
    told.agents._take(told.agent, Traffic(edges=[(0, "runner", 1, 0.5)]))
    assert told.agent.traffic.edges


@pytest.mark.parametrize(
    ("field", "value"), [("cores", 0), ("cores", 1 << 40), ("native", ()), ("native", ("off", "sse9"))]
)
def test_a_host_that_cannot_be_is_refused(field: str, value: object) -> None:
    check_here("b", Here(own_kind(), host.versions()))
    with pytest.raises(RunError, match="host b says that it has"):
        check_here("b", Here(msgspec.structs.replace(own_kind(), **{field: value}), host.versions()))
    with pytest.raises(RunError, match=r"host b says that it has .* and -1 GPUs"):
        check_here("b", Here(own_kind(), host.versions(), gpus=-1))


def test_a_host_that_is_lost_is_not_told_only_once_others_have_measured(told: Told) -> None:
    told.meet("c", None).lost = "it is gone"
    order = Measure(SentExperiment("{}", None, {}, [], {}), 600.0)
    with pytest.raises(RunError, match="host c did not measure: it is gone"):
        told.agents.measure(["b", "c"], order)


def test_a_host_is_given_up_in_time_and_has_paused_by_then(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the agent may have begun to count a lease later than the runner
    pauses = host.PAUSE_S + LEASE_S + WATCH_S + host._LOOK_S
    assert SILENCE_S < host.PAUSE_S and pauses < 6.0 - agents.LATE_S
    monkeypatch.setattr(agents, "VOID_S", 1000.0)
    told.agent.here = Here(own_kind(), host.versions())
    told.agents.hear()
    assert not told.agent.lost
    told.agent.peer.heard = now() - (1000.0 - agents.LATE_S + 0.1)
    limit = 1000.0 - agents.LATE_S
    wait_until(lambda: told.agent.peer.silence_s > limit, 60, "the wire has turned")
    told.agents.hear()
    assert told.agent.lost.startswith("it has not been heard for")


def test_what_was_not_asked_is_not_kept(told: Told) -> None:
    for report in (AgentKey("b#7", "key"), Listening("c", (1, 2))):
        told.agents._take(told.agent, report)
    assert not told.agent.held and not told.agent.listening


def test_a_stand_in_has_its_share_until_it_has_left_for_the_host_that_is_back(told: Told) -> None:
    share, own, orders = told.agents.shares["b"], told.agent, list[bytes]()
    own.here, own.share = Here(own_kind(), host.versions()), "b"
    other = share.agent = told.meet("b#1", "b")
    other.home, other.launched = "c", Launched()
    other.peer.words.tell = orders.append  # type: ignore[method-assign]
    for _ in range(3):
        told.agents.hear()
    assert orders == [pack(LeaveRun())] and share.agent is other and not share.links["actor-0"].gone
    told.agents._take(other, Leaving())
    assert share.agent is None and share.moves and share.links["actor-0"].gone
    assert share.lost == "its host b is back, and has it again"


def test_a_host_that_does_not_reach_another_one_is_named(told: Told) -> None:
    other, ports = told.meet("c", None), (5000, 5001)
    other.home = "c"
    joins = told.agents._reaches(told.agent, other, ports)
    next(joins)
    told.agents._take(told.agent, Called("c", "it hung up"))
    with pytest.raises(
        RunError, match=rf"b does not reach host c at {LOOPBACK}, ports 5000 and 5001: it hung up; both"
    ):
        next(joins)
    told.agents._take(told.agent, Called("c"))
    assert not list(told.agents._reaches(told.agent, other, ports))
    told.agents._take(told.agent, Called("x", "it hung up"))  # whom nobody knows
    assert told.agent.called.keys() == {"c"}


@pytest.fixture
def joining(told: Told) -> tuple[KnownAgent, Iterator[None]]:
    """Host c, with which b's share has an edge, and a stand-in for b that joins it."""
    agents = told.agents
    agents._places = {**agents._places, "trainer-0": "c"}
    other, stand_in = told.meet("c", None), told.meet("b#1", "b")
    other.home = other.share = "c"
    agents.shares["c"] = Share("c", other, given=True)
    joins = agents._join(stand_in)
    next(joins)
    return other, joins


@pytest.mark.parametrize("listens", [False, True])
def test_whoever_joins_a_host_that_is_lost_meanwhile_goes_on_without(
    told: Told, joining: tuple[KnownAgent, Iterator[None]], listens: bool
) -> None:
    other, joins = joining
    if listens:
        told.agents._take(other, Listening("b#1", (1, 2)))
        next(joins)
    told.agents._lose(other, "its agent ended")
    told.agents._forget(other)
    assert not list(joins)


def test_a_host_that_can_let_no_other_in_is_named_whoever_holds_that(
    told: Told, joining: tuple[KnownAgent, Iterator[None]]
) -> None:
    other, joins = joining
    why = "this needs 1,034 open files, and 1,024 are allowed; have the limit raised: ulimit -Hn"
    told.agents._take(other, Listening("b#1", error=why, full=True))
    with pytest.raises(RunError, match=f"host c cannot let host b in: {why}"):
        list(joins)
    told.agents._take(told.agent, Called("c", why, own=True))
    with pytest.raises(RunError, match=f"host b cannot call host c: {why}"):
        list(told.agents._reaches(told.agent, other, (1, 2)))


def test_where_a_host_can_let_no_other_in_no_other_holder_is_tried(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, stand_in = told.agents.shares["b"], told.meet("b#1", "runner")
    stand_in.here = Here(own_kind(), host.versions())

    def join(agent: KnownAgent) -> Iterator[None]:
        raise agents.HostFull("host c cannot let host b in: this needs more open files")
        yield

    held = SimpleNamespace(key=b"key", error="", introduce=None, ended=lambda: "", close=lambda: None)
    monkeypatch.setattr(agents, "StandIn", lambda name, address: held)
    monkeypatch.setattr(told.agents, "_greet", lambda *_: stand_in)
    monkeypatch.setattr(told.agents, "_join", join)
    with pytest.raises(RunError, match="host c cannot let host b in"):
        list(told.agents._seat(share, "runner"))
    assert not share.refused


def test_all_hosts_know_which_one_is_lost_also_those_that_have_not_met_it(told: Told) -> None:
    """It may hand something on between two of them."""
    orders = list[bytes]()
    other = told.meet("c", None)
    other.home = other.share = "c"
    other.peer.words.tell = orders.append  # type: ignore[method-assign]
    told.agents.shares["c"] = Share("c", other, given=True)
    told.agents._lose(told.agent, "its agent ended")
    assert orders == [pack(Part("b"))]
    crossing = SimpleNamespace(part=lambda host: host)
    workers: Any = SimpleNamespace(_crossing=crossing, _wire=SimpleNamespace(others={}))
    assert HostWorkers.part(workers, "b") is None


def test_who_is_lost_as_all_have_answered_has_not_joined(
    told: Told, joining: tuple[KnownAgent, Iterator[None]]
) -> None:
    other, joins = joining
    stand_in = told.agents.known["b#1"]
    told.agents._take(other, Listening("b#1", (1, 2)))
    next(joins)
    told.agents._take(stand_in, Called("c"))
    told.agents._take(stand_in, Leaving())
    with pytest.raises(RunError, match="b#1 did not join the others: it leaves"):
        list(joins)


def test_a_host_that_does_not_hear_another_one_is_told_once_and_when_it_does_again(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = told.meet("c", None)
    other.home = "c"
    for unheard in ({}, {"c": "it\nhung up"}, {"c": "it has not been heard for 16 s", "x": ""}, {}):
        told.agents._take(told.agent, Traffic(unheard=unheard))
    first = "host b does not hear host c: it hung up; what goes between the two waits"
    assert told.agents.notices == [first]  # nothing changes so soon
    monkeypatch.setattr(agents, "ALONE_S", 0.0)
    told.agents._take(told.agent, Traffic())
    assert told.agents.notices == [first, "host b hears host c again"]
    told.agents._take(told.agent, Traffic(unheard={"c": ""}))
    other.lost = "it has ended"
    told.agents._take(told.agent, Traffic())
    assert len(told.agents.notices) == 3


def test_a_host_that_is_back_has_its_share_only_once_it_has_said_what_it_is(told: Told) -> None:
    """It may be another machine: with fewer GPUs, or another numpy."""
    share = told.agents.shares["b"]
    told.agents._devices, told.agents._on_folder = {"b": ["cpu"], "runner": []}, {"b": ""}
    assert told.agents._holder_for(share) == ""
    told.agent.here = Here(own_kind(), host.versions())
    assert told.agents._holder_for(share) == "b"


@pytest.mark.parametrize(("why", "holder"), [("trainer-0 must read checkpoints", "runner"), ("", "c")])
def test_who_needs_the_runs_folder_is_given_to_nobody_who_does_not_see_it(
    told: Told, why: str, holder: str
) -> None:
    del told.agents.known["b"]
    told.meet("c", None).home = "c"
    told.agents.cores = {"runner": 1, "b": 1, "c": 64}
    told.agents.sees, told.agents._on_folder = {"b": True, "c": False}, {"b": why}
    told.agents._devices = {"b": ["cpu"], "c": [], "runner": []}
    assert told.agents._holder_for(told.agents.shares["b"]) == holder


@pytest.fixture
def back(told: Told, monkeypatch: pytest.MonkeyPatch) -> list[StartedAgent]:
    """The agents by which host b, which is lost, is back, each once."""
    del told.agents.known["b"]
    found = list[StartedAgent]()
    monkeypatch.setattr(told.agents._engine, "again", lambda host: found.pop() if found else None)
    return found


def test_a_host_that_is_back_and_cannot_be_let_in_is_tried_again(
    told: Told, back: list[StartedAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on meanwhile."""
    greeted, errors = list[StartedAgent](), [TooManyFiles("1,024 are open")] * 2

    def greet(name: str, home: str, holder: str | None, started: StartedAgent, introduce: object) -> None:
        if errors:
            raise errors.pop()
        greeted.append(started)

    monkeypatch.setattr(told.agents, "_greet", greet)
    back.append(started := StartedAgent(b"key", LOOPBACK, version=own_version()))
    for _ in range(4):
        told.agents.hear()
    assert told.agents.notices == ["host b cannot be let in: 1,024 are open; until then it stays away"]
    assert greeted == [started]


def test_a_host_that_is_back_with_another_tidemill_ends_and_may_come_again(
    told: Told, back: list[StartedAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[bytes]()
    monkeypatch.setattr(told.agents._engine, "introduce", lambda host, line: said.append(line))
    for _ in range(2):
        back.append(StartedAgent(b"key", LOOPBACK, version="0.0.1 (0123456789)"))
        told.agents.hear()
    (notice,) = told.agents.notices
    assert "host b has other versions" in notice and "tidemill 0.0.1 (0123456789), here" in notice
    assert said == [b"{}"] * 2 and "b" not in told.agents.known


def test_what_a_hosts_launcher_has_to_tell_is_told_but_not_without_end(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_MOST_NOTICED", 3)
    for number in range(5):
        told.agents._take(told.agent, Noticed(f"one\n{number}"))
    assert told.agents.notices == [
        "host b: one 0", "host b: one 1", "host b has had 3 notices: no more is shown"
    ]  # fmt: skip
    reports, bell = list[Report](), threading.Event()
    launcher = SimpleNamespace(notices=lambda: ["its log is long"])
    own: Any = SimpleNamespace(
        _report=reports.append, _tell_logs=bell.set, _tell_traffic=lambda workers: None, _mirror=None,
        _over=False,
    )  # fmt: skip
    host.HostAgent._listen(own, SimpleNamespace(launcher=launcher, parted=[], links={}))  # type: ignore[arg-type]
    assert reports == [Noticed("its log is long")] and bell.is_set()


def test_whose_share_is_seated_meanwhile_begins_with_its_own_burial_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts are lost, of which nobody's death has to do with the other's."""
    told, begun = list[tuple[str, str]](), list[list[str]]()
    launcher = TwoHosts()
    shares = {}
    for host_name, worker in (("b", "actor-0"), ("c", "actor-1")):
        agent: Any = SimpleNamespace(name=f"{host_name}#1", launched=None)
        shares[host_name] = Share(host_name, agent)
        shares[host_name].links[worker] = HostLink(worker, lambda _: None, 1)
    launcher.places = {"actor-0": "b", "actor-1": "c"}
    launcher._agents = SimpleNamespace(  # type: ignore[assignment]
        shares=shares, tell_share=lambda share, order: told.append((share.host, type(order).__name__))
    )
    launcher._own = SimpleNamespace(revive=lambda workers, moved: begun.append([*workers, *moved]) or {})  # type: ignore[assignment]
    launcher._job = SimpleNamespace(folder=None)  # type: ignore[assignment]
    monkeypatch.setattr(launcher, "_orders", lambda some, lives: [(share, RunEnds(False)) for share in some])
    assert launcher.restart(["actor-0"]).keys() == {"actor-0"}
    assert {host_name for host_name, _ in told} == {"b"} and begun == [["actor-0", "b"]]
    assert shares["b"].given and not shares["c"].given
    launcher.restart(["actor-1"])
    assert begun[1:] == [["actor-1", "c"]] and ("b", "Revive") in told


def test_a_log_whose_middle_was_taken_out_is_told_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(log_files, "MOST_BYTES", 1 << 20)
    own = OwnFiles()
    own.logs.mkdir()
    log = own.logs / "actor-0.log"
    log.write_bytes(bytes(3 << 20))
    assert [len(text) for _, text in own.written(all_of_it=True)] == [3 << 20]
    shorten([log])
    with log.open("ab") as file:
        file.write(b"and more")
    ((name, text),) = own.written(all_of_it=True)
    assert name == "actor-0.log" and b"MB that were printed here are taken out" in text
    assert text.endswith(b"and more")
    own.close()


def test_who_wants_versions_on_and_on_gets_one_part_at_a_time(told: Told, tmp_path: Path) -> None:
    database = ParameterDatabase(tmp_path / PARAMETERS)
    database.push("p", 1, {"w": np.zeros(1000, np.float32)})
    words, orders = told.agent.peer.words, list[bytes]()
    words.tell = orders.append  # type: ignore[method-assign]
    told.agents._take(told.agent, Launched(draws=True))
    for _ in range(100):
        words._told.append(pack(WantVersion("p", 1, 0)))
    told.agents.hear()
    assert len(orders) == 2  # the index, and a part
    told.agents.hear()
    assert len(orders) == 2
    told.agents._take(told.agent, Launched(draws=True))  # another share: its copy begins anew
    told.agents.hear()
    assert orders[2] == orders[0]


def test_a_share_that_hangs_holds_no_runner_up_and_gets_all_logs_once_it_answers(tmp_path: Path) -> None:
    try:
        with share_in(tmp_path) as share, ExitStack() as ends:
            told = Told(share.place)
            ends.callback(told.end)
            agents, log = told.agents, share.place / "logs" / "actor-0.log"
            agents._processes, agents._disk.seconds = [["actor-0"]], 0.1
            told.agents._take(told.agent, Launched(draws=True))
            share.stop()
            try:
                for text in (b"one ", b"two ", b"three"):
                    agents._take(told.agent, Logged("actor-0.log", text))
                    agents._take(told.agent, WantVersion("p", 1, 0))
                    agents.hear()
                assert agents._disk.hangs and told.agent.wanted is not None
            finally:
                share.go_on()
            wait_until(lambda: not agents._disk.busy, 60, "the share answers")
            agents._disk.seconds = 60.0
            agents.hear()
            assert log.read_bytes() == b"one two three" and told.agent.wanted is None
    except NoShare as error:
        needs_namespaces(str(error))


def test_what_an_agent_tells_behind_its_end_is_not_read(told: Told) -> None:
    stand_in = told.meet("b#1", "b")
    for _ in range(2):
        stand_in.peer.words._told.append(pack(Leaving()))
    told.agents.hear()
    assert told.agents.known.keys() == {"b"}


def test_whom_another_host_has_hung_up_on_is_lost_and_not_the_other_way_round(told: Told) -> None:
    other = told.meet("c", None)
    told.agents._take(told.agent, HungUp("c", f"c/data: it sends\nedge 7{'!' * 1000}"))
    assert (
        other.lost.startswith("host b has hung up on it: c/data: it sends edge 7!") and len(other.lost) < 240
    )
    told.agents._take(other, HungUp("b", "it does not answer"))
    told.agents._take(told.agent, HungUp("nobody", "it does not answer"))
    assert not told.agent.lost
    other.lost = ""
    told.agents._take(told.agent, HungUp("c", "too long a message", own=True))
    assert told.agent.lost == "it has hung up on host b: too long a message" and not other.lost


@pytest.fixture
def agent() -> Iterator[host.HostAgent]:
    """An agent whose runner nobody hears."""
    bell = EventBell(os.eventfd(0))
    wire = Wire("b", bell)
    try:
        told = Introduction("b", LOOPBACK, "runner", LOOPBACK, (1, 1), Keys.new().public.decode())
        made = host.HostAgent(wire, told, threading.Event())
        yield made
        made.close()
    finally:
        wire.close()
        os.close(bell.descriptor)


def test_an_agent_tells_whether_another_one_has_answered_its_call(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Report] = []
    monkeypatch.setattr(agent, "_report", told.append)
    bell = EventBell(os.eventfd(0))
    with closing(Wire("c", bell)) as other:
        _, ports = other.listen("b", agent._wire.keys.public, LOOPBACK)
        agent._follow(CallHost("c", LOOPBACK, ports, other.keys.public.decode()))
        agent._follow(CallHost("d", LOOPBACK, (1, 1), Keys.new().public.decode()))
        agent._calling["d"] = time.monotonic() + 0.1

        def both() -> bool:
            other.turn(0.0)
            agent._look_at_calls()
            return len(told) == 2

        wait_until(both, 60, "of both something is known")
    os.close(bell.descriptor)
    found = {each.agent: each.error for each in told if isinstance(each, Called)}
    assert found["c"] == "" and found["d"]
    assert not agent._calling


def few_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For each of two kinds of limit, have this process come to it."""
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda _: (30, 30))
        yield
    with monkeypatch.context() as patched:

        def refuse(connection: HostConnection, kind: int) -> None:
            raise zmq.ZMQError(errno.EMFILE)

        patched.setattr(HostConnection, "_make", refuse)
        yield


def test_an_agent_that_may_open_no_more_files_lets_another_one_in_once_it_may(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Report] = []
    monkeypatch.setattr(agent, "_report", told.append)
    for _ in few_files(monkeypatch):
        agent._follow(Listen("c", Keys.new().public.decode()))
        agent._join()
        assert not told and agent._wire.others.keys() == {"runner"}
        assert agent._patience_s == host._LOOK_S
        agent._follow(ForgetAgent("c"))  # it is lost meanwhile
        assert not agent._to_join
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda _: (30, 30))
        agent._follow(Listen("c", Keys.new().public.decode()))
        agent._follow(CallHost("d", LOOPBACK, (1, 1), Keys.new().public.decode()))
    agent._join()
    (listening,) = told
    assert isinstance(listening, Listening) and listening.agent == "c" and all(listening.ports)
    assert not listening.error and agent._wire.others.keys() == {"runner", "c", "d"}
    assert agent._calling.keys() == {"d"} and not agent._to_join


def test_an_agent_that_may_open_no_more_files_for_long_says_so_with_the_cure_and_lives_on(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Report] = []
    monkeypatch.setattr(agent, "_report", told.append)
    monkeypatch.setattr(host, "_FREED_S", 0.0)
    for _ in few_files(monkeypatch):
        agent._follow(Listen("c", Keys.new().public.decode()))
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda _: (30, 30))
        agent._follow(CallHost("d", LOOPBACK, (1, 1), Keys.new().public.decode()))
    first, second, third = told
    assert isinstance(first, Listening) and isinstance(second, Listening) and isinstance(third, Called)
    assert re.match("this needs .* open files .*, and 30 are allowed; .*: ulimit -Hn", first.error)
    assert re.search("no more files may be open .*; raise it: ulimit -n", second.error)
    assert third.own and "this needs" in third.error
    assert agent._wire.others.keys() == {"runner"} and not (agent._to_join or agent._calling)


def test_an_agent_tells_once_whom_it_has_hung_up_on_and_not_whom_it_could_not_call(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Report] = []
    monkeypatch.setattr(agent, "_report", told.append)
    for name in ("c", "d"):
        agent._wire.listen(name, Keys.new().public, LOOPBACK)
    agent._follow(CallHost("e", LOOPBACK, (1, 1), "no key"))
    wait_until(lambda: agent._wire.others["e"].ended, 60, "it cannot be called")
    agent._look_at_calls()
    agent._wire.others["d"].dismiss("it sends what does not fit")
    wait_until(lambda: agent._wire.others["d"].ended, 60, "it is hung up on")
    for _ in range(2):
        agent._look_at_others()
    assert isinstance(told[0], Called) and told[0].error
    assert told[1:] == [HungUp("d", "it sends what does not fit")]


def test_an_agent_that_is_told_to_end_leaves_no_run_that_ends(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CALM_S", 0.0)
    agent._follow(RunEnds(True))
    agent.terminated = True
    agent._leave(None)
    assert not agent._over
    agent._follow(RunEnds(False))
    agent._leave(None)
    assert agent._over


def test_an_agent_that_is_let_go_as_the_run_ends_leaves_in_order_where_it_does_not(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in (RunEnds(True), LeaveRun(), RunEnds(False)):
        agent._follow(order)
    assert agent.terminated and not agent._leaves_at
    agent._leave(None)
    assert agent._leaves_at > time.monotonic() and not agent._over


def test_whom_an_agent_has_had_pause_goes_on_where_the_run_ends(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CALM_S", 0.0)
    said: list[bytes] = []
    link = SimpleNamespace(send=said.append)
    told = list[bool]()
    workers: Any = SimpleNamespace(
        links={"actor-0": link},
        drained=False,
        look_whether_drained=lambda: None,
        launcher=SimpleNamespace(tell_of_end=told.append),
    )
    agent._workers, agent._running, agent.terminated = workers, {"actor-0"}, True
    try:
        agent._leave(workers)
        agent._follow(RunEnds(True))
    finally:
        agent._workers = None
    assert told == [True]  # no process waits for the next life any more
    assert said == [host._PAUSE, host._START] and not agent._over and not agent._resting


@pytest.mark.parametrize("in_time", [True, False])
def test_an_agent_that_leaves_has_actors_finish_their_samples_before_others_pause(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr(host, "_CALM_S", 0.0)
    said: list[tuple[str, bytes]] = []
    links = {
        name: SimpleNamespace(send=lambda message, name=name: said.append((name, message)))
        for name in ("actor-0", "actor-1", "server-0")
    }
    drained: list[bool] = []
    workers: Any = SimpleNamespace(
        links=links, drained=True, sent=[], look_whether_drained=lambda: drained.append(True)
    )
    agent._workers, agent._running, agent._actors = workers, {*links}, {"actor-0", "actor-1"}
    agent.terminated = True
    rests = pack_up(Status(State.PAUSED))
    try:
        for _ in range(3):
            agent._leave(workers)
        assert sorted(said) == [("actor-0", host._FINISH), ("actor-1", host._FINISH)]
        said.clear()
        agent._note("actor-1", rests)
        if in_time:
            agent._note("actor-0", rests)
            late = []
        else:
            monkeypatch.setattr(host, "_FINISH_S", 0.0)
            late = [("actor-0", host._PAUSE)]
        for _ in range(3):
            agent._leave(workers)
        assert sorted(said) == [*late, ("server-0", host._PAUSE)] and not agent._over
        for worker in ("actor-0", "server-0"):
            agent._note(worker, rests)
        for _ in range(2):
            agent._leave(workers)
        assert agent._over and drained
    finally:
        agent._workers = None


def test_a_worker_that_is_to_run_while_its_host_leaves_is_told_to_rest_again(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has the run pause, and go on, meanwhile."""
    monkeypatch.setattr(host, "_CALM_S", 0.0)
    said: list[bytes] = []
    workers: Any = SimpleNamespace(
        links={"actor-0": SimpleNamespace(send=said.append)}, drained=False, look_whether_drained=lambda: None
    )
    agent._workers, agent._running, agent._actors = workers, {"actor-0"}, {"actor-0"}
    agent.terminated = True
    try:
        agent._leave(workers)
        for order in (host._PAUSE, host._START):
            agent._follow(Speak("actor-0", 0, order))
            if order == host._PAUSE:
                agent._note("actor-0", pack_up(Status(State.PAUSED)))
        agent._leave(workers)
    finally:
        agent._workers = None
    assert said == [host._FINISH, host._PAUSE, host._START, host._FINISH] and not agent._over


def test_an_agent_waits_no_longer_for_a_runner_that_has_hung_up(
    agent: host.HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_FAREWELL_S", 60.0)
    agent._over = True
    timer = threading.Timer(0.2, agent._orphaned.set)
    timer.start()
    began = time.monotonic()
    agent.run()
    assert time.monotonic() < began + 30 and not agent._peer.words.heard_all
    timer.join()
