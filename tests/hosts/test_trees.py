"""Deep trees of hosts, through which a cell comes: what hosts behind a lost one have."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.hosts.hosts import ROW, Host, join, until

from tidemill.api.edges import Edge
from tidemill.hosts import crossing
from tidemill.hosts.crossing import Crossing, GuestEnds, edges_here, guest, neighbours
from tidemill.hosts.pumps import OutgoingChannel
from tidemill.transports.shared import SharedTransport
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter

HOSTS = [f"h{i}" for i in range(6)]
PLACES = {"t": "h0", **{f"a{i}": f"h{i}" for i in range(1, 6)}}
EDGES = [
    Edge("parameters/p/t", "cell", "t", tuple(PLACES)[1:]),
    *(Edge(f"samples/s/a{i}/0/t", "channel", f"a{i}", ("t",)) for i in range(1, 6)),
]
SLOTS = 2


class Node:
    """An agent that has a host's share of the workers, one, and what that holds."""

    def __init__(self, host: str, wire: Host, agents: dict[str, str], lives: dict[str, int]) -> None:
        self.host, self.wire = host, wire
        self.worker = next(worker for worker, place in PLACES.items() if place == host)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.others = neighbours(EDGES, PLACES, host)
        bells = {guest(other): wire.bell.descriptor for other in self.others}
        self._transport = SharedTransport(edges_here(EDGES, PLACES, host), {self.worker: self._bell, **bells})
        self._crossing = Crossing(wire, EDGES, PLACES, host, agents, lives)
        self.carry(self._crossing.of([*PLACES]))

    def carry(self, numbers: Sequence[int]) -> None:
        guests = {}
        for other in self.others:
            names = {EDGES[n].name for n in numbers if other in self._crossing.way(n).others}
            handles = self._transport.handles(guest(other))
            guests[other] = GuestEnds(self.wire.bell, {name: handles[name] for name in names})
        self._crossing.carry(numbers, guests)
        link: Any = None
        self.ends = SharedTransport.endpoints(self.wire.bell, link, self._transport.handles(self.worker))

    def part(self, host: str) -> None:
        """As `HostWorkers.part` does."""
        agent = self._crossing.part(host)
        if agent in self.wire.others:
            self.wire.do(self.wire.others[agent].part)
            self.wire.drop(agent)

    def revive(self, workers: Collection[str], moved: dict[str, str]) -> None:
        """As `HostWorkers.revive` does."""
        met = [host for host in moved if host in self.others]
        self._crossing.agents |= moved
        numbers = self._crossing.of(workers)
        self._transport.renew([], [EDGES[number].name for number in numbers])
        if numbers:
            self.carry(numbers)
        for host in met:
            self._crossing.carry_on(host, numbers)

    def close(self) -> None:
        self.wire.close()
        self._transport.close()
        os.close(self._bell)


class Tree:
    """Hosts, each with an actor but the first, which has the trainer."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._lives = dict.fromkeys(PLACES, 0)
        self.agents = {host: host for host in HOSTS}
        wires = {host: Host(host) for host in HOSTS}
        for number, host in enumerate(HOSTS):
            for other in neighbours(EDGES, PLACES, host):
                if HOSTS.index(other) > number:
                    join(wires[host], wires[other])
        for host in HOSTS:
            self.nodes[host] = Node(host, wires[host], self.agents, self._lives)
        self.version = -1
        self.writer: SlotWriter = self.nodes["h0"].ends.writer(EDGES[0].name)
        self.writer.offer(ROW)
        self.producers: dict[str, SlotProducer] = {}
        self.consumers: dict[str, SlotConsumer] = {}
        self.readers: dict[str, SlotReader] = {}
        for host in HOSTS[1:]:
            self.begin(host)
        self.hear()

    def begin(self, host: str) -> None:
        """Have an actor's life begin."""
        actor = self.nodes[host]
        self.readers[host] = actor.ends.reader(EDGES[0].name)
        for edge in EDGES:
            if edge.source == actor.worker:
                self.producers[host] = actor.ends.producer(edge.name)
                self.producers[host].offer(ROW, (1,), SLOTS)
                self.consumers[host] = self.nodes["h0"].ends.consumer(edge.name)

    @property
    def wires(self) -> list[Host]:
        return [node.wire for node in self.nodes.values()]

    def until(self, done: Callable[[], object]) -> None:
        until(done, *self.wires)

    def for_a_while(self) -> None:
        for _ in range(40):
            for wire in self.wires:
                wire.turn(0.001)

    def publish(self) -> None:
        self.version += 1
        self.writer.write({name: np.array(self.version) for name in ROW}, self.version)

    def has(self, host: str) -> int:
        reader = self.readers[host]
        return reader.newest() if reader.attach() else -1

    def hear(self) -> None:
        """Publish, and wait until all that are there have that."""
        self.publish()
        self.until(lambda: all(self.has(host) == self.version for host in self.nodes if host != "h0"))

    def fill(self, host: str) -> None:
        """Have an actor send what it may."""
        while self.producers[host].reserve() is not None:
            self.producers[host].commit()

    def until_free(self, host: str) -> None:
        """Wait until all of an actor's slots were given back."""
        self.until(lambda: self.producers[host].free() == SLOTS)

    def take(self, host: str) -> None:
        """Have the trainer take all that an actor's slots hold, publish a version, and
        give them back, as it does once it has trained."""
        consumer = self.consumers[host]
        self.until(lambda: consumer.attach() and consumer.waiting() == SLOTS)
        self.publish()
        for _ in range(SLOTS):
            assert consumer.take() is not None
            consumer.release()

    def stop(self, *hosts: str) -> None:
        """Have hosts carry nothing any more, which nobody knows yet."""
        for host in hosts:
            self.nodes.pop(host).close()

    def lose(self, *hosts: str) -> None:
        """Have all others know that hosts are lost."""
        for host in hosts:
            del self.agents[host]
            for node in self.nodes.values():
                node.part(host)

    def stand_in(self, *hosts: str) -> None:
        """Have others take the shares of lost hosts, all at the same time."""
        moved = {host: f"{host}#1" for host in hosts}
        workers = [worker for worker, place in PLACES.items() if place in hosts]
        new = {host: Host(moved[host]) for host in hosts}
        there = {host: node.wire for host, node in self.nodes.items()}
        self.agents |= moved
        for host, wire in new.items():
            for other in neighbours(EDGES, PLACES, host):
                if other in there:
                    join(there[other], wire)
            there[host] = wire
        for node in self.nodes.values():
            node.revive(workers, moved)
        for worker in workers:
            self._lives[worker] += 1
        for host, wire in new.items():
            others = {other: agent for other, agent in self.agents.items() if other != host}
            self.nodes[host] = Node(host, wire, others, self._lives)
            self.begin(host)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(crossing, "FAN_OUT", request.param)
    made = Tree()
    yield made
    made.close()


def test_what_is_given_back_waits_for_less_once_less_is_to_come() -> None:
    """A host is lost that would hand a cell on, or its writer lives again, from lower
    versions on."""
    freed = list[int]()
    slots: Any = SimpleNamespace(release_read=freed.append)
    channel, versions = OutgoingChannel(0, 1, slots), {7: 4, 9: 2}
    channel._release(2, ((7, 5), (9, 3)))
    for after in (
        ((7, 6), (9, 8)),  # what was written since the slots were given back
        ((9, 8),),  # nobody hands 7 on any more
        ((7, 9), (9, 8)),  # there is somebody again, who may have none of these for long
        ((7, 9), (9, -1)),  # the writer of 9 has died, and its next life has written nothing yet
    ):
        channel._release(2, after)
        channel.settle(versions.__getitem__)
        assert freed == []
    channel._release(2, ((7, 9), (9, 1)))  # now it has
    versions[9] = 0
    channel.settle(versions.__getitem__)
    assert freed == []
    versions[9] = 1
    channel.settle(versions.__getitem__)
    assert freed == [2]


LOST = [("h1",), ("h2",), ("h1", "h2"), ("h1", "h3"), ("h2", "h5")]


@pytest.mark.parametrize("lost", LOST)
def test_hosts_behind_lost_ones_get_the_newest_version_from_those_that_stand_in(
    tree: Tree, lost: tuple[str, ...]
) -> None:
    for _ in range(3):
        tree.hear()
    tree.stop(*lost)
    tree.publish()
    tree.for_a_while()
    tree.lose(*lost)
    tree.publish()
    tree.for_a_while()
    tree.stand_in(*lost)
    tree.until(lambda: all(tree.has(host) == tree.version for host in HOSTS[1:]))
    tree.hear()
    for host in HOSTS[1:]:
        tree.fill(host)
        tree.take(host)
        tree.until_free(host)
        assert tree.has(host) == tree.version


@pytest.mark.parametrize("lost", LOST)
def test_who_stands_in_one_after_the_other_hands_on_too(tree: Tree, lost: tuple[str, ...]) -> None:
    tree.hear()
    for host in lost:
        tree.stop(host)
        tree.lose(host)
        tree.publish()
        tree.for_a_while()
    for host in reversed(lost):
        tree.stand_in(host)
        tree.publish()
        tree.for_a_while()
    tree.until(lambda: all(tree.has(host) == tree.version for host in HOSTS[1:]))
    tree.hear()


@pytest.mark.parametrize("lost", LOST)
def test_hosts_behind_a_lost_one_go_on_without_the_versions_that_it_had_not_handed_on(
    tree: Tree, lost: tuple[str, ...]
) -> None:
    """A host is silent for a while before it is lost: all slots of those behind it are
    given back meanwhile, after versions that do not come."""
    go_on_without(tree, lost)


def test_so_do_those_behind_one_that_sends_nothing_to_the_writer_s_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That has not met it: policy workers alone are there, say."""
    monkeypatch.setattr(crossing, "FAN_OUT", 1)
    monkeypatch.setattr(sys.modules[__name__], "EDGES", [edge for edge in EDGES if edge.source != "a3"])
    with closing(Tree()) as tree:
        assert "h3" not in tree.nodes["h0"].others
        go_on_without(tree, ("h3",))


def go_on_without(tree: Tree, lost: tuple[str, ...]) -> None:
    tree.hear()
    left = [host for host in HOSTS[1:] if host not in lost]
    for host in left:
        tree.fill(host)
    tree.stop(*lost)
    for host in left:
        tree.take(host)
    tree.for_a_while()
    tree.lose(*lost)
    for host in left:
        tree.until_free(host)
    if crossing.FAN_OUT == 1:
        assert all(tree.has(host) < tree.version for host in left if host > lost[0])
    for _ in range(3):  # and on
        for host in left:
            tree.until_free(host)
            tree.fill(host)
            tree.take(host)
    tree.stand_in(*lost)
    tree.hear()
