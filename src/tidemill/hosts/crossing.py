"""The edges of an experiment whose workers are on several hosts: which of them cross, and
what they look like from one host."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import finalize

from tidemill.api.edges import Edge
from tidemill.api.transport import Bell, Handle, Link
from tidemill.hosts.orders import EdgeFlow
from tidemill.hosts.peer import Peer
from tidemill.hosts.pumps import (
    Incoming,
    IncomingCell,
    IncomingChannel,
    Outgoing,
    OutgoingCell,
    OutgoingChannel,
)
from tidemill.hosts.wire import Wire
from tidemill.transports.shared import SharedTransport
from tidemill.transports.slots import SlotConsumer, SlotEndpoints, SlotProducer, SlotReader, SlotWriter

_End = TypeVar("_End")
_GUEST = "@"  # begins no worker's name
FAN_OUT = 4
"""The most hosts to which one sends a cell."""
SAMPLES = "samples/"
"""What names of edges begin with that carry samples."""


def guest(host: str) -> str:
    """Return the name under which edges know who carries them to another host."""
    return _GUEST + host


class Way(NamedTuple):
    """How an edge goes over a host.

    before: the host from which it comes there; "" where its writer is there
    after: the hosts to which it goes from there
    """

    before: str
    after: tuple[str, ...]

    @property
    def others(self) -> list[str]:
        """The other hosts next to this one."""
        return [*filter(None, [self.before]), *self.after]


def way(edge: Edge, places: Mapping[str, str], host: str) -> Way:
    """Return how an edge goes over `host`: nowhere, where it has no end there. `places`:
    the host of each worker. The hosts of a cell are a tree, in which each sends it to
    `FAN_OUT` others, so that no host has to send it to all."""
    hosts = list(dict.fromkeys(places[worker] for worker in (edge.source, *edge.targets)))
    if host not in hosts:
        return Way("", ())
    at = hosts.index(host)
    first = FAN_OUT * at + 1
    return Way(hosts[(at - 1) // FAN_OUT] if at else "", tuple(hosts[first : first + FAN_OUT]))


def edges_here(edges: Sequence[Edge], places: Mapping[str, str], host: str) -> list[Edge]:
    """Return the edges that have an end on `host`, in order, as they are seen there: in
    place of workers on other hosts stand the guests of the hosts from which they come and
    to which they go (`way`)."""
    here = []
    for edge in edges:
        before, after = way(edge, places, host)
        readers = [target for target in edge.targets if places[target] == host]
        if places[edge.source] == host or readers:
            source = guest(before) if before else edge.source
            here.append(replace(edge, source=source, targets=(*readers, *map(guest, after))))
    return here


def neighbours(edges: Sequence[Edge], places: Mapping[str, str], host: str) -> list[str]:
    """Return the other hosts with which `host` exchanges what goes over edges, in
    order."""
    return list(dict.fromkeys(other for edge in edges for other in way(edge, places, host).others))


class _NoLink(Link):
    """Who carries edges has no control link: nobody tells it what to do."""

    def send(self, message: bytes) -> bool:
        return False

    def receive(self) -> list[bytes] | None:
        return None


class GuestEnds:
    """The ends that the wire of a host holds, of the edges to one other host, for one
    life of each. Their descriptors are copies of their own, since whoever made the edges
    may close what it has, and go with the last who holds an end.

    memory: the descriptor of each edge's, by name
    open: what closes the descriptors of each end, once: whoever calls it, at the latest
        the end itself
    """

    def __init__(self, bell: Bell, handles: Mapping[str, Handle]) -> None:
        """`bell`: the wire's."""
        self._copies = {
            name: Handle(tuple(map(os.dup, handle.descriptors))) for name, handle in handles.items()
        }
        self._ends: SlotEndpoints = SharedTransport.endpoints(bell, _NoLink(), self._copies)
        self.memory = {name: handle.descriptors[0] for name, handle in self._copies.items()}
        self.open: list[finalize[..., Any]] = []

    def _owning(self, edge: str, end: _End) -> _End:
        """Return an end of an edge, which owns its descriptors from now on."""
        self.open.append(finalize(end, _close, self._copies[edge].descriptors))
        return end

    def producer(self, edge: str) -> SlotProducer:
        """Return the end that sends over a channel."""
        return self._owning(edge, self._ends.producer(edge))

    def consumer(self, edge: str) -> SlotConsumer:
        """Return the end that takes from a channel."""
        return self._owning(edge, self._ends.consumer(edge))

    def writer(self, edge: str) -> SlotWriter:
        """Return the end that writes a cell."""
        return self._owning(edge, self._ends.writer(edge))

    def reader(self, edge: str) -> SlotReader:
        """Return the end that reads a cell."""
        return self._owning(edge, self._ends.reader(edge))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Carried(NamedTuple):
    """An edge that crosses to another host: the descriptor of its memory here, and what
    sends it there."""

    memory: int
    outgoing: Outgoing

    @property
    def is_late(self) -> bool:
        """True of what its writer has offered, and is not there yet."""
        return not self.outgoing.arrived and os.fstat(self.memory).st_size > 0


class LinkInOrder(Link):
    """The control link of a worker whose edges the wire carries. What the worker says is
    held back until all that it had offered has come to the other hosts: who is told that
    it is ready finds that, as on one machine."""

    def __init__(self, link: Link, carried: Sequence[Carried]) -> None:
        self._link, self._carried = link, list(carried)
        self.held: list[bytes] = []
        self._gone = False

    def send(self, message: bytes) -> bool:
        return self._link.send(message)

    def receive(self) -> list[bytes] | None:
        came = None if self._gone else self._link.receive()
        self._gone |= came is None
        self.held += came or ()
        if self.held and self._carried:
            self._carried = [each for each in self._carried if not each.outgoing.arrived]
            if any(each.is_late for each in self._carried):
                return []
        messages, self.held = self.held, []
        return None if self._gone and not messages else messages


class Crossing:
    """What the wire of a host carries: all edges that cross between this host and others.
    An edge's number is its place among all.

    edges: all of the experiment
    places: the host of each worker
    host: this one
    agents: who has the share of each other host, by the name under which the wire knows
        it, of those that are there
    """

    def __init__(
        self,
        wire: Wire,
        edges: Sequence[Edge],
        places: Mapping[str, str],
        host: str,
        agents: Mapping[str, str],
        lives: Mapping[str, int],
        lockstep: Collection[str] = (),
    ) -> None:
        """`lives`: how often workers had died before. `lockstep`: names of the edges
        whose readers give slots back in lockstep."""
        self._lockstep = lockstep
        self._wire, self.edges, self.places, self.host = wire, edges, places, host
        self.agents = dict(agents)
        # of each edge: on several hosts who grants credits dies with those who spend them
        self._lives = [lives.get(edge.begins_with[0], 0) for edge in edges]
        self._outgoing: dict[tuple[int, str], Outgoing] = {}  # by edge, and host to which it leads
        self._cells: dict[str, dict[int, OutgoingCell]] = {}  # by who writes them here
        self._channels: dict[int, IncomingChannel] = {}
        self._handed: dict[int, IncomingCell] = {}  # cells that come here

    def of(self, workers: Collection[str]) -> list[int]:
        """Return the numbers of the edges that begin anew with `workers`
        (`Edge.begins_with`), and that cross between this host and another one."""
        begin = {*workers}
        return [
            number
            for number, edge in enumerate(self.edges)
            if not begin.isdisjoint(edge.begins_with) and self.way(number).others
        ]

    def way(self, number: int) -> Way:
        """Return how an edge goes over this host."""
        return way(self.edges[number], self.places, self.host)

    def carry(self, numbers: Sequence[int], guests: Mapping[str, GuestEnds]) -> dict[str, list[Carried]]:
        """Have the wire carry the next lives of these edges. `guests`: the ends of each
        other host's, by the host. Return what each worker of this host writes and the
        wire carries."""
        agents, others = self.agents, self._wire.others
        carried: dict[str, list[Carried]] = {}
        for number in numbers:
            edge, (before, after) = self.edges[number], self.way(number)
            self._lives[number] += 1
            for other in after:
                ends = guests[other]
                outgoing: Outgoing
                if edge.kind == "channel":
                    outgoing = OutgoingChannel(number, self._lives[number], ends.consumer(edge.name))
                else:
                    cell = outgoing = OutgoingCell(number, self._lives[number], ends.reader(edge.name))
                    if not before:
                        self._cells.setdefault(edge.source, {})[number] = cell
                self._outgoing[number, other] = outgoing
                if other not in agents:  # lost: who has its share next is sent it (`carry_on`)
                    continue
                self._wire.do(partial(others[agents[other]].send, outgoing))
                carried.setdefault(edge.source, []).append(Carried(guests[other].memory[edge.name], outgoing))
        for number in numbers:
            edge, epoch, (other, after) = self.edges[number], self._lives[number], self.way(number)
            if not other:
                continue
            ends = guests[other]
            incoming: Incoming
            if edge.kind == "channel":
                incoming = self._channels[number] = IncomingChannel(number, epoch, ends.producer(edge.name))
            else:
                onward = partial(self._have_arrived, number, after)
                self._wire.do(partial(self._wire.expect, number))
                incoming = self._handed[number] = IncomingCell(number, epoch, ends.writer(edge.name), onward)
            if other in agents:
                self._wire.do(partial(others[agents[other]].receive, incoming))
        self._wire.do(self._order_releases)
        return carried

    def _have_arrived(self, number: int, hosts: Sequence[str]) -> bool:
        """True when these hosts have what an edge's writer offers, but for those that are
        lost."""
        return all(self._outgoing[number, host].arrived for host in hosts if host in self.agents)

    def came(self, peer: Peer) -> list[tuple[int, int, int, int]]:
        """Return what has come of samples from another host: of each edge and life of its
        writer how many have come whole, and how many it has said to have sent. For the
        wire's thread."""
        return [
            (number, life.epoch, life.whole, life.told)
            for number, lives in peer.incoming.items()
            for life in lives
            if isinstance(life, IncomingChannel) and self.edges[number].name.startswith(SAMPLES)
        ]

    def sent(self) -> list[tuple[int, int, int]]:
        """Return how many samples this host's workers have sent to others: of each edge
        and life of its writer. For the wire's thread, or while nobody turns it."""
        return [
            (number, life.epoch, life.slots)
            for peer in self._wire.others.values()
            for number, lives in peer.outgoing.items()
            for life in lives
            if isinstance(life, OutgoingChannel) and self.edges[number].name.startswith(SAMPLES)
        ]

    def flows(self) -> list[EdgeFlow]:
        """Return what has gone over each edge from here to those who have other hosts'
        shares now. Any thread may ask."""
        there = [(host, self._wire.others.get(agent)) for host, agent in list(self.agents.items())]
        return [
            (number, host, flow.sent_bytes, flow.under_way_s)
            for host, peer in there
            if peer is not None
            for number, flow in list(peer.flows.items())
        ]

    def part(self, host: str) -> str | None:
        """Carry nothing any more between this host and the agent that has the share of
        another one; return its name, None where nobody has it."""
        for (_, other), outgoing in self._outgoing.items():
            if other == host:
                outgoing.arrived = True  # no worker's word waits for it
        agent = self.agents.pop(host, None)
        self._wire.do(self._order_releases)
        return agent

    def drained(self) -> bool:
        """True when the other hosts have all that workers of this one have committed. For
        the wire's thread."""
        return all(
            outgoing.drained()
            for (number, other), outgoing in self._outgoing.items()
            if other in self.agents and not self.way(number).before  # else it is only handed on
        )

    def carry_on(self, host: str, but: Collection[int]) -> None:
        """Have the wire carry to the new agent of a host, and from it, what writers write
        who live on: all edges there but those of these numbers."""
        outgoing = [number for number, other in self._outgoing if other == host and number not in but]
        handed = [number for number in self._handed if self.way(number).before == host and number not in but]
        peer = self._wire.others[self.agents[host]]
        self._wire.do(partial(self._carry_on, host, peer, outgoing, handed))

    def _carry_on(
        self, host: str, peer: Peer, outgoing: Sequence[int], handed: Sequence[int]
    ) -> None:  # in the wire's thread
        for number in outgoing:
            life = self._outgoing[number, host] = self._outgoing[number, host].anew()
            written = self._cells.get(self.edges[number].source, {})
            if isinstance(life, OutgoingCell) and number in written:
                written[number] = life
            peer.send(life)
        for number in handed:  # by whoever stands in for a host between this one and the writer's
            cell = self._handed[number] = self._handed[number].anew()
            peer.receive(cell)
        self._order_releases()

    def _order_releases(self) -> None:
        """Have no release overtake the cells that its worker wrote before. Where it is
        not in lockstep, it does not wait for those that a lost host hands on."""
        for number, channel in self._channels.items():
            edge = self.edges[number]
            reader = next(target for target in edge.targets if self.places[target] == self.host)
            there, lockstep = self.places[edge.source], edge.name in self._lockstep
            channel.after = [
                cell
                for written, cell in self._cells.get(reader, {}).items()
                if any(self.places[target] == there for target in self.edges[written].targets)
                and (lockstep or self._reaches(written, there))
            ]

    def _reaches(self, number: int, host: str) -> bool:
        """Return whether none of the hosts next to this one is lost that hand a cell on
        to a host."""
        before = way(self.edges[number], self.places, host).before
        while before and before != self.host:
            if before not in self.agents:
                return False
            before = way(self.edges[number], self.places, before).before
        return True
