"""Hosts whose network is slow, loses what it carries, and breaks: nothing is lost,
nothing comes twice, and a run learns what it learns on one machine. Strangers are kept
out."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from benchmarks.networked import Networked, settings
from benchmarks.networks import Network
from tests.hosts.hosts import Cell, Channel, Host, join, networked, until
from tests.launchers.test_hosts import experiment, weights
from tests.run.watching import Run, wait_until

from tidemill.core.schema import Field
from tidemill.hosts.connections import Keys
from tidemill.launchers import agents
from tidemill.metrics.json_lines import read_metrics
from tidemill.training.check_resume import compare

LAUNCHER = Path(__file__).parents[2] / "benchmarks" / "networked.py"


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with networked(request.param) as network:
        yield network


class Joined:
    """Two hosts in a network, with channels of small and large slots and a cell each way,
    and words."""

    def __init__(self, network: Network, stack: ExitStack) -> None:
        self.hosts = []
        for number, name in enumerate(("here", "there")):
            with network.on(number):  # ZeroMQ's threads are there, too, from then on
                self.hosts.append(stack.enter_context(contextlib.closing(Host(name))))
        here, there = self.hosts
        with network.on(0):
            self.peers = at_here, at_there = join(here, there, address=network.addresses[0])
        ends = (at_here, at_there, (here, there)), (at_there, at_here, (there, here))
        self.channels = [Channel(*ends[i % 2], number=i) for i in range(4)]
        for channel, rows in zip(self.channels, (64, 64, 20_000, 20_000), strict=True):  # 1 kB, 320 kB
            channel.offer(rows)
        self.cells = [Cell(*end, number=4 + i) for i, end in enumerate(ends)]
        for cell in self.cells:
            cell.writer.offer({"step": Field((1000,), "int64")})
        self.version = self.told = 0
        self.heard = [0, 0]

    def work(self, seconds: float) -> None:
        """Write and read all that can be, for so long."""
        end, next_word = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            self.version += 1
            for cell in self.cells:
                cell.writer.write({"step": np.full(1000, self.version)}, self.version)
            for channel in self.channels:
                channel.put()
            if time.monotonic() > next_word:
                next_word = time.monotonic() + 0.02
                for host, other in (("here", "there"), ("there", "here")):
                    self.hosts[host == "there"].tell(other, str(self.told).encode())
                self.told += 1
            self.turn()

    def work_until_taken(self, marks: list[int]) -> None:
        """Go on until so many slots of each channel have come."""
        end = time.monotonic() + 60
        while any(channel.taken < mark for channel, mark in zip(self.channels, marks, strict=True)):
            assert time.monotonic() < end
            self.work(0.05)

    def turn(self) -> None:
        for channel in self.channels:
            channel.get()
        for i, peer in enumerate(self.peers):
            while (word := peer.words.read()) is not None:
                assert int(word) == self.heard[i]  # once, and in order
                self.heard[i] += 1
        for host in self.hosts:
            host.turn(0.001)

    def settled(self) -> bool:
        """All that was put in has come out, and its writer knows."""
        self.turn()
        return (
            all(channel.drained() for channel in self.channels)
            and all(cell.reader.attach() and cell.reader.newest() == self.version for cell in self.cells)
            and self.heard == [self.told, self.told]
        )

    def settle(self) -> None:
        until(self.settled)
        assert [peer.ended for peer in self.peers] == ["", ""]


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_line_that_is_slow_and_loses_frames_loses_nothing_of_what_is_said(network: Network) -> None:
    network.set(delay=0.05, loss=0.01, rate=10e6)
    with ExitStack() as stack:
        joined = Joined(network, stack)
        small, _, large, _ = joined.channels
        for _ in range(30):
            joined.work(2.0)
            measured = joined.peers[0].round_trip_s is not None
            if measured and min(small.taken, large.taken) > 2 and network.set()["lost"] > 3:
                break
        joined.settle()
        assert network.set()["lost"] > 3 and min(small.taken, large.taken) > 2
        round_trip = joined.peers[0].round_trip_s
        assert round_trip is not None and round_trip >= 0.1


@pytest.mark.parametrize("network", [2], indirect=True)
def test_hosts_that_are_cut_off_for_a_while_go_on_where_they_were(network: Network) -> None:
    with ExitStack() as stack:
        joined = Joined(network, stack)
        joined.work(0.3)
        before = [channel.taken for channel in joined.channels]
        network.set(cut=[1])
        joined.work(3.0)
        for _ in range(100):  # until the one who calls has noticed
            if any(peer.lost for peer in joined.peers):
                break
            joined.work(0.3)
        cut = [channel.taken for channel in joined.channels]
        network.set(cut=[])
        joined.work_until_taken([taken + 9 for taken in cut])
        assert max(b - a for a, b in zip(before, cut, strict=True)) < 200  # what was under way
        joined.settle()
        assert joined.peers[1].hellos >= 4  # it had called anew


@pytest.fixture
def launcher(network: Network, monkeypatch: pytest.MonkeyPatch) -> type[Networked]:
    """A launcher whose hosts have these networks; the runner is on the first."""
    for name, value in settings(network).items():
        monkeypatch.setenv(name, value)
    return Networked


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_run_over_a_line_that_loses_frames_and_breaks_learns_what_one_machine_learns(
    network: Network, launcher: type[Networked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "VOID_S", 60.0)  # of a machine that is busy
    network.set(delay=0.005, loss=0.01, rate=10e6)
    made, folder = experiment(updates=60), tmp_path / "together"
    breaks = threading.Thread(target=break_for_3_s, args=(network, folder / "metrics.jsonl"))
    breaks.start()
    try:
        with network.on(0):
            together = weights(made, launcher, folder)
    finally:
        breaks.join()
    compared, differing = compare("policy", weights(made, "processes", tmp_path / "alone"), together)
    assert compared > 15 and differing == []
    records = list(read_metrics(folder))
    assert max(np.diff([record["time/seconds"] for record in records])) > 2.5  # it waited
    told = [record for record in records if "host/h1/round_trip_ms" in record]
    assert all(record["host/h1/workers"] >= 1 and "host/runner/lag" not in record for record in told)
    assert max(record["host/h1/received_mb_per_second"] for record in told) > 0
    assert max(record["host/runner/sent_mb_per_second"] for record in told) > 0
    assert told[-1]["host/h1/round_trip_ms"] >= 10
    edges = {
        name: max(record[name] for record in told if name in record) for name in told[-1] if "edge" in name
    }
    samples, parameters = "edge/samples/samples/h1/runner", "edge/parameters/policy/runner/h1"
    assert edges[f"{samples}/mb_per_second"] > 0 and edges[f"{parameters}/mb_per_second"] > 0
    assert 0 < edges[f"{samples}/awaited"] <= 1  # both wait in lockstep
    assert told[-1]["host/h1/lag"] <= 2  # of what was to be said in lockstep


def break_for_3_s(network: Network, begun: Path) -> None:
    """Cut a host off, once this file is there."""
    wait_until(lambda: begun.exists() and begun.stat().st_size, 60, "the first update")
    network.set(cut=[1])
    time.sleep(3.0)
    network.set(cut=[])


def ports(network: Network, run: Run) -> dict[psutil.Process, list[tuple[str, int]]]:
    """Return the addresses and TCP ports at which processes of a run listen on any
    host."""
    found: dict[psutil.Process, list[tuple[str, int]]] = {}
    for host in range(len(network.addresses)):
        with network.on(host):  # whose sockets alone are told
            for process in run.processes():
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.setdefault(process, []).append(
                            (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
                        )
    return found


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # of ZMTP
NOISE = {
    "garbage": os.urandom(100_000),
    "of the web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a frame of 16 EB": GREETING + b"\x02" + b"\xff" * 8 + bytes(100_000),
    "a command of 16 EB": GREETING + b"\x06" + b"\xff" * 8 + bytes(100_000),
    "a greeting alone": GREETING,
}


class Strangers:
    """Those who call a port of a host and say what nobody has asked for."""

    def __init__(self, stack: ExitStack, where: tuple[str, int]) -> None:
        for said in NOISE.values():
            line = stack.enter_context(socket.create_connection(where, timeout=60))
            with contextlib.suppress(OSError):  # hung up on meanwhile
                line.sendall(said)
        context = stack.enter_context(zmq.Context())
        for keys in (None, Keys.new()):
            line = stack.enter_context(context.socket(zmq.DEALER))
            line.linger = 0
            if keys is not None:
                line.curve_publickey, line.curve_secretkey = keys
                line.curve_serverkey = Keys.new().public
            line.connect(f"tcp://{where[0]}:{where[1]}")
            with contextlib.suppress(zmq.Again):  # hung up on meanwhile
                line.send(bytes(4 << 20), zmq.NOBLOCK)


@pytest.mark.parametrize("network", [3], indirect=True)
def test_whoever_calls_an_open_port_of_a_run_is_kept_out(
    network: Network, launcher: type[Networked], tmp_path: Path
) -> None:
    counts = [f"--set=workers.{group}.count=3" for group in ("actor", "trainer")]
    with network.on(0):
        run = Run(tmp_path, "equal", "--layout", "given", *counts, launch=f"{LAUNCHER}:{launcher.__name__}")
    try:
        run.wait_for_updates()
        listening = ports(network, run)
        found = [where for each in listening.values() for where in each]
        assert sorted(len(each) for each in listening.values()) == [2, 4]  # h1 for h2, the runner for both
        assert {host for host, _ in found} == set(network.addresses[:2])
        memory = {process: process.memory_info().rss for process in listening}
        with ExitStack() as stack, network.on(2):
            for where in found:
                Strangers(stack, where)
            lines = len((run.path / "metrics.jsonl").read_text().splitlines())
            wait_until(lambda: len(read_metrics(run.path)) > lines + 20, 60, "the run goes on")
        for process, before in memory.items():
            assert process.memory_info().rss < before + (64 << 20)
        run.signal_group(signal.SIGINT)
        status, text = run.ended()
        assert status == 130, text
        run.nothing_is_left()
    finally:
        run.kill_all()
