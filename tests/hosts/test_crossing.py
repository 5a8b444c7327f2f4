"""What the edges of an experiment look like from each of its hosts, and what a worker's
word waits for."""

import gc
import os
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.hosts.hosts import ROW, Host, join, until

from tidemill.api.edges import Edge
from tidemill.api.transport import Link
from tidemill.hosts.crossing import (
    Carried,
    Crossing,
    GuestEnds,
    LinkInOrder,
    edges_here,
    guest,
    neighbours,
    way,
)
from tidemill.transports.shared import SharedTransport

EDGES = [
    Edge("samples/x/a-0/0/t-0", "channel", "a-0", ("t-0",)),
    Edge("samples/x/a-1/0/t-0", "channel", "a-1", ("t-0",)),
    Edge("parameters/p/t-0", "cell", "t-0", ("a-0", "a-1", "a-2", "t-1")),
]
PLACES = {"a-0": "runner", "a-1": "b", "a-2": "b", "t-0": "runner", "t-1": "c"}


def test_in_place_of_workers_elsewhere_stand_the_guests_of_their_hosts() -> None:
    assert edges_here(EDGES, PLACES, "runner") == [
        EDGES[0],
        Edge("samples/x/a-1/0/t-0", "channel", "@b", ("t-0",)),
        Edge("parameters/p/t-0", "cell", "t-0", ("a-0", "@b", "@c")),  # once for each host
    ]
    assert edges_here(EDGES, PLACES, "b") == [
        Edge("samples/x/a-1/0/t-0", "channel", "a-1", ("@runner",)),
        Edge("parameters/p/t-0", "cell", "@runner", ("a-1", "a-2")),
    ]
    assert edges_here(EDGES, PLACES, "c") == [Edge("parameters/p/t-0", "cell", "@runner", ("t-1",))]
    assert neighbours(EDGES, PLACES, "runner") == ["b", "c"]
    assert neighbours(EDGES, PLACES, "b") == neighbours(EDGES, PLACES, "c") == ["runner"]


def test_the_hosts_of_a_cell_are_a_tree() -> None:
    hosts = [f"h{i}" for i in range(23)]
    places = {"t": "h0", **{f"a{i}": host for i, host in enumerate(hosts)}}
    cell = Edge("parameters/p/t", "cell", "t", tuple(f"a{i}" for i in range(23)))
    ways = {host: way(cell, places, host) for host in hosts}
    assert ways["h0"] == ("", ("h1", "h2", "h3", "h4"))
    assert ways["h2"] == ("h0", ("h9", "h10", "h11", "h12"))
    assert ways["h5"] == ("h1", ("h21", "h22")) and ways["h22"] == ("h5", ())
    assert way(cell, places, "elsewhere") == ("", ())
    # each but the first is handed it once, by the host that says so
    assert sorted(host for _, after in ways.values() for host in after) == sorted(hosts[1:])
    assert all(host in ways[ways[host].before].after for host in hosts[1:])
    assert edges_here([cell], places, "h5") == [Edge("parameters/p/t", "cell", "@h1", ("a5", "@h21", "@h22"))]
    assert neighbours([cell], places, "h5") == ["h1", "h21", "h22"]


def test_a_cell_is_expected_while_nobody_has_the_share_that_hands_it_on() -> None:
    """Else what its writer's host says of it, once there is somebody, is no edge's."""
    expected = list[int]()
    wire: Any = SimpleNamespace(do=lambda task: task(), expect=expected.append, others={})
    crossing = Crossing(wire, EDGES, PLACES, "b", {}, {})
    guests: Any = {"runner": SimpleNamespace(writer=lambda name: None, consumer=lambda name: None, memory={})}
    assert crossing.carry(crossing.of(["a-1", "t-0"]), guests) == {} and expected == [2]


def test_a_host_that_leaves_does_not_wait_for_what_others_write() -> None:
    wire: Any = SimpleNamespace()
    places = {f"a{i}": f"h{i}" for i in range(7)}
    edges = [
        Edge("parameters/p/a0", "cell", "a0", tuple(places)[1:]),  # h1 hands it on
        Edge("samples/s/a1/0/a0", "channel", "a1", ("a0",)),
    ]
    crossing = Crossing(wire, edges, places, "h1", {host: host for host in places.values()}, {})
    sent = SimpleNamespace(drained=lambda: True)
    never = SimpleNamespace(drained=lambda: False)
    crossing._outgoing = {(0, "h5"): never, (1, "h0"): sent}  # type: ignore[dict-item]
    assert crossing.way(0).before == "h0" and crossing.drained()
    sent.drained = lambda: False
    assert not crossing.drained()


def test_what_is_given_back_waits_for_no_cell_that_a_lost_host_hands_on_but_in_lockstep() -> None:
    """Else all hosts behind it would stand still until another one does."""
    cell: Any = SimpleNamespace()
    wire: Any = SimpleNamespace(do=lambda task: task())
    places = {f"a{i}": f"h{i}" for i in range(7)}
    edges = [
        Edge("parameters/p/a0", "cell", "a0", tuple(places)[1:]),
        *(Edge(f"samples/s/a{i}/0/a0", "channel", f"a{i}", ("a0",)) for i in (2, 5)),
    ]
    for lockstep, after in (([], []), ([edge.name for edge in edges[1:]], [cell])):
        crossing = Crossing(wire, edges, places, "h0", {h: h for h in places.values()}, {}, lockstep)
        near, behind = SimpleNamespace(after=None), SimpleNamespace(after=None)
        crossing._channels, crossing._cells = {1: near, 2: behind}, {"a0": {0: cell}}  # type: ignore[dict-item]
        crossing._order_releases()
        assert near.after == behind.after == [cell]
        assert crossing.way(2).before == "h5" and way(edges[0], places, "h5").before == "h1"
        crossing.part("h1")
        assert near.after == [cell] and behind.after == after


class Side:
    """A host of which one worker lives here, and what it has of the edges to another."""

    def __init__(self, host: str, other: str, wire: Host, worker: str) -> None:
        self.wire, self.worker, self._other = wire, worker, other
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        here = edges_here(TWO, HOMES, host)
        self.transport = SharedTransport(here, {worker: self._bell, guest(other): wire.bell.descriptor})
        self._crossing = Crossing(wire, TWO, HOMES, host, {other: other}, {})

    def live(self, worker: str) -> None:
        """Carry the next life of a worker, of this host or the other one."""
        numbers = self._crossing.of([worker])
        self.transport.renew([worker], [TWO[number].name for number in numbers])
        handles = self.transport.handles(guest(self._other))
        carried = {TWO[number].name: handles[TWO[number].name] for number in numbers}
        self._crossing.carry(numbers, {self._other: GuestEnds(self.wire.bell, carried)})

    def close(self) -> None:
        self.transport.close()
        os.close(self._bell)


TWO = [
    Edge("samples/s/a-0/0/t-0", "channel", "a-0", ("t-0",)),
    Edge("parameters/p/t-0", "cell", "t-0", ("a-0",)),
]
HOMES = {"t-0": "here", "a-0": "there"}


def test_what_the_wire_holds_of_a_life_goes_with_the_next_one() -> None:
    """Else days of deaths take all descriptors, and memory."""
    held = list[int]()
    link: Any = None
    with ExitStack() as stack:
        here, there = (stack.enter_context(closing(Host(name))) for name in ("here", "there"))
        join(here, there)
        trainer = stack.enter_context(closing(Side("here", "there", here, "t-0")))
        actor = stack.enter_context(closing(Side("there", "here", there, "a-0")))
        for life in range(10):
            for side in (trainer, actor):
                side.live("a-0")
                side.live("t-0")
            ends = [
                SharedTransport.endpoints(side.wire.bell, link, side.transport.handles(side.worker))
                for side in (trainer, actor)
            ]
            slots, cell = ends[1].producer(TWO[0].name), ends[0].writer(TWO[1].name)
            slots.offer(ROW, (1,), 2)
            cell.offer(ROW)
            slots.reserve()
            slots.commit()
            cell.write({name: np.array(7) for name in ROW}, life + 1)
            taken, read = ends[0].consumer(TWO[0].name), ends[1].reader(TWO[1].name)
            until(lambda: taken.attach() and taken.take() is not None, here, there)  # noqa: B023
            until(lambda: read.attach() and read.newest() > 0, here, there)  # noqa: B023
            gc.collect()
            held.append(len(os.listdir("/proc/self/fd")))
    assert held[2:] == held[2:3] * 8, held


class Said(Link):
    """A link whose worker says what it is told to."""

    def __init__(self) -> None:
        self.said: list[bytes] | None = []

    def send(self, message: bytes) -> bool:
        return True

    def receive(self) -> list[bytes] | None:
        said, self.said = self.said, [] if self.said is not None else None
        return said


def test_a_worker_s_word_waits_for_what_it_had_offered() -> None:
    outgoing: Any = SimpleNamespace(arrived=False)
    memory = os.memfd_create("test")
    worker = Said()
    link = LinkInOrder(worker, [Carried(memory, outgoing)])
    try:
        worker.said = [b"before it has offered"]
        assert link.receive() == [b"before it has offered"]
        os.ftruncate(memory, 64)
        worker.said = [b"ready"]
        assert link.receive() == [] and link.held == [b"ready"]
        worker.said = [b"more"]
        assert link.receive() == []
        worker.said = None  # it dies meanwhile: its last words are not lost
        assert link.receive() == []
        outgoing.arrived = True
        assert link.receive() == [b"ready", b"more"]
        assert link.receive() is None
    finally:
        os.close(memory)
