"""The edges of an experiment whose workers are on several hosts: which of them cross, and
what they look like from one host."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tidemill.api.edges import Edge
from tidemill.api.transport import Bell, Handle, Link
from tidemill.hosts.pumps import IncomingCell, IncomingChannel, Outgoing, OutgoingCell, OutgoingChannel
from tidemill.hosts.wire import Wire
from tidemill.transports.shared import SharedTransport
from tidemill.transports.slots import SlotEndpoints

_GUEST = "@"  # begins no worker's name
_EPOCH = 1  # of the writers' first lives


def guest(host: str) -> str:
    """Return the name under which edges know who carries them to another host."""
    return _GUEST + host


def edges_here(edges: Sequence[Edge], places: Mapping[str, str], host: str) -> list[Edge]:
    """Return the edges that have an end on `host`, in order, as they are seen there: in
    place of workers on other hosts stands the guest of each of these hosts. `places`: the
    host of each worker."""

    def seen(worker: str) -> str:
        return worker if places[worker] == host else guest(places[worker])

    here = []
    for edge in edges:
        if places[edge.source] == host:
            here.append(replace(edge, targets=tuple(dict.fromkeys(map(seen, edge.targets)))))
        elif readers := tuple(target for target in edge.targets if places[target] == host):
            here.append(replace(edge, source=seen(edge.source), targets=readers))
    return here


def neighbours(edges: Sequence[Edge], places: Mapping[str, str], host: str) -> list[str]:
    """Return the other hosts that `host` has edges with, in order."""
    found: dict[str, None] = {}
    for edge in edges:
        ends = dict.fromkeys(places[worker] for worker in (edge.source, *edge.targets))
        if places[edge.source] == host:
            found |= ends
        elif host in ends:
            found[places[edge.source]] = None
    return [other for other in found if other != host]


class _NoLink(Link):
    """Who carries edges has no control link: nobody tells it what to do."""

    def send(self, message: bytes) -> bool:
        return False

    def receive(self) -> list[bytes] | None:
        return None


class GuestEnds:
    """The ends that the wire of a host holds, of the edges to one other host. They are
    its own: whoever made the edges may close what it has. `bell`: the wire's. `memory`
    has the descriptor of each edge's, by name."""

    def __init__(self, bell: Bell, handles: Mapping[str, Handle]) -> None:
        copies = {name: Handle(tuple(map(os.dup, handle.descriptors))) for name, handle in handles.items()}
        self._descriptors = [d for handle in copies.values() for d in handle.descriptors]
        self.memory = {name: handle.descriptors[0] for name, handle in copies.items()}
        self.ends: SlotEndpoints = SharedTransport.endpoints(bell, _NoLink(), copies)

    def close(self) -> None:
        """Give them up, once the wire turns no more."""
        while self._descriptors:
            os.close(self._descriptors.pop())


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


def join(
    wire: Wire,
    edges: Sequence[Edge],
    places: Mapping[str, str],
    guests: Mapping[str, GuestEnds],
) -> dict[str, list[Carried]]:
    """Have the wire carry all edges that cross between its host and others. `guests`:
    the ends of each other host's edges, by the host. An edge's number is its place among
    all. Return what each worker of this host writes and the wire carries."""
    host = wire.name
    carried: dict[str, list[Carried]] = {}
    cells: dict[tuple[str, str], list[OutgoingCell]] = {}  # by who writes and to which host
    for number, edge in enumerate(edges):
        if places[edge.source] != host:
            continue
        for other in dict.fromkeys(places[target] for target in edge.targets):
            if other == host:
                continue
            ends = guests[other].ends
            outgoing: Outgoing
            if edge.kind == "channel":
                outgoing = OutgoingChannel(number, _EPOCH, ends.consumer(edge.name))
            else:
                outgoing = OutgoingCell(number, _EPOCH, ends.reader(edge.name))
                cells.setdefault((edge.source, other), []).append(outgoing)
            wire.others[other].send(outgoing)
            carried.setdefault(edge.source, []).append(Carried(guests[other].memory[edge.name], outgoing))
    for number, edge in enumerate(edges):
        other = places[edge.source]
        readers = [target for target in edge.targets if places[target] == host]
        if other == host or not readers:
            continue
        if edge.kind == "channel":
            after = cells.get((readers[0], other), [])
            incoming = IncomingChannel(number, _EPOCH, guests[other].ends.producer(edge.name), after)
            wire.others[other].receive(incoming)
        else:
            wire.others[other].receive(IncomingCell(number, _EPOCH, guests[other].ends.writer(edge.name)))
    for peer in wire.others.values():
        peer.joined = True
    return carried
