"""The edges of an experiment whose workers are on several hosts: which of them cross, and
what they look like from one host."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidemill.api.edges import Edge
from tidemill.api.transport import Bell, Handle, Link
from tidemill.hosts.pumps import IncomingCell, IncomingChannel, OutgoingCell, OutgoingChannel
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
    its own: whoever made the edges may close what it has. `bell`: the wire's."""

    def __init__(self, bell: Bell, handles: Mapping[str, Handle]) -> None:
        copies = {name: Handle(tuple(map(os.dup, handle.descriptors))) for name, handle in handles.items()}
        self._descriptors = [d for handle in copies.values() for d in handle.descriptors]
        self.ends: SlotEndpoints = SharedTransport.endpoints(bell, _NoLink(), copies)

    def close(self) -> None:
        """Give them up, once the wire turns no more."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def join(
    wire: Wire,
    edges: Sequence[Edge],
    places: Mapping[str, str],
    guests: Mapping[str, GuestEnds],
) -> None:
    """Have the wire carry all edges that cross between its host and others. `guests`:
    the ends of each other host's edges, by the host. An edge's number is its place among
    all."""
    host = wire.name
    cells: dict[tuple[str, str], list[OutgoingCell]] = {}  # by who writes and to which host
    for number, edge in enumerate(edges):
        if places[edge.source] != host:
            continue
        for other in dict.fromkeys(places[target] for target in edge.targets):
            if other == host:
                continue
            if edge.kind == "channel":
                wire.others[other].send(
                    OutgoingChannel(number, _EPOCH, guests[other].ends.consumer(edge.name))
                )
            else:
                cell = OutgoingCell(number, _EPOCH, guests[other].ends.reader(edge.name))
                wire.others[other].send(cell)
                cells.setdefault((edge.source, other), []).append(cell)
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
