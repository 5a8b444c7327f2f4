"""What the edges of an experiment look like from each of its hosts, and what a worker's
word waits for."""

import os
from types import SimpleNamespace
from typing import Any

from tidemill.api.edges import Edge
from tidemill.api.transport import Link
from tidemill.hosts.crossing import Carried, Crossing, LinkInOrder, edges_here, neighbours, way

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
    ends = SimpleNamespace(writer=lambda name: None, consumer=lambda name: None)
    crossing = Crossing(wire, EDGES, PLACES, "b", {}, {})
    guests: Any = {"runner": SimpleNamespace(ends=ends, memory={})}
    assert crossing.carry(crossing.of(["a-1", "t-0"]), guests) == {} and expected == [2]


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
