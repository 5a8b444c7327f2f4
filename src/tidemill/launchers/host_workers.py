"""The workers of one host, and the edges to others that the wire carries for them: what
an agent and the runner have alike."""

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import finalize

from tidemill.api.edges import Edge
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job
from tidemill.api.transport import Link
from tidemill.core.descriptors import allow_descriptors
from tidemill.hosts.crossing import Crossing, GuestEnds, LinkInOrder, edges_here, guest, neighbours
from tidemill.hosts.orders import EdgeFlow
from tidemill.hosts.peer import Peer
from tidemill.hosts.wire import Wire
from tidemill.launchers.processes import HostShare, ProcessesLauncher

_HELD_S = 0.005  # seconds between two looks whether what a worker had offered is there


class HostWorkers:
    """The workers of a host's share of an experiment.

    links: the control link of each worker, by its name
    drained: see `look_whether_drained`
    sent: see `Crossing.sent`, when that was looked at
    parted: hosts that were parted with, and what had come of their samples (see
        `Crossing.came`)
    """

    drained = False
    sent: Sequence[tuple[int, int, int]] = ()

    def __init__(
        self,
        wire: Wire,
        job: Job,
        places: Mapping[str, str],
        host: str,
        agents: Mapping[str, str],
        lives: Mapping[str, int],
        logs: Path | None = None,
    ) -> None:
        """`host`: whose share it is. `agents`: who has the shares of others, of those
        that are there. `lives`: how often workers had died before. `logs`: folder of what
        workers write; None: the run's."""
        edges: list[Edge] = job.experiment.edges()
        lockstep = given_back_in_lockstep(job.experiment, edges)
        self._crossing = Crossing(wire, edges, places, host, agents, lives, lockstep)
        self._others = neighbours(edges, places, host)
        mine = [name for name, place in places.items() if place == host]
        bells = {guest(other): wire.bell.descriptor for other in self._others}
        self.launcher = ProcessesLauncher(
            HostShare(mine, edges_here(edges, places, host), bells, logs, lives)
        )
        self._wire = wire
        self._open: list[finalize[..., Any]] = []  # see `GuestEnds.open`, of all that are not gone
        self.parted = deque[tuple[str, list[tuple[int, int, int, int]]]]()
        self.links: dict[str, LinkInOrder] = {}
        self.launcher.check(job.experiment)
        try:
            links = self.launcher.launch(job)
            self._bell = os.dup(self.launcher.bell)  # the wire's thread may outlive the launcher's own
            self.links = self._join(links, self._crossing.of(places))
            self._let_in(self._others)
        except BaseException:  # nobody else holds the launcher yet
            self.launcher.close(0.0)
            raise

    def _let_in(self, others: Sequence[str]) -> None:
        """Have the wire carry edges from now on to those of the other hosts that are
        there."""
        for agent in (self._crossing.agents[other] for other in others if other in self._crossing.agents):
            self._wire.do(partial(setattr, self._wire.others[agent], "joined", True))

    def _join(self, links: Mapping[str, Link], numbers: Sequence[int]) -> dict[str, LinkInOrder]:
        """Have the wire carry these edges, by number, for the lives that begin; return
        their links."""
        names: dict[str, set[str]] = {}  # of edges, by the other host
        for number in numbers:
            for other in self._crossing.way(number).others:
                names.setdefault(other, set()).add(self._crossing.edges[number].name)
        guests = {}
        for other, carried in names.items():
            handles = self.launcher.handles(guest(other))
            count = sum(len(handles[name].descriptors) for name in carried)
            allow_descriptors(count, f"what goes to and from host {other}", "take fewer workers")
            guests[other] = GuestEnds(self._wire.bell, {name: handles[name] for name in carried})
        late = self._crossing.carry(numbers, guests)
        opened = chain(self._open, *(ends.open for ends in guests.values()))
        self._open = [close for close in opened if close.alive]
        return {name: LinkInOrder(link, late.get(name, ())) for name, link in links.items()}

    def part(self, host: str) -> str | None:
        """Have nothing more to do with the agent that has the share of another host;
        return its name, None where nobody has it, or this host has not met it."""
        agent = self._crossing.part(host)
        if agent is None or (peer := self._wire.others.get(agent)) is None:
            return None
        self._wire.do(partial(self._part, host, peer))
        return agent

    def _part(self, host: str, peer: Peer) -> None:  # in the wire's thread
        self.parted.append((host, self._crossing.came(peer)))
        peer.part()
        self.wake()

    def revive(self, workers: Sequence[str], moved: Mapping[str, str]) -> dict[str, LinkInOrder]:
        """Begin the next life of those of `workers` that live here, and have what any of
        them writes carried anew. `moved`: who has the shares of hosts now that were lost.
        Return their links."""
        met = [host for host in moved if host in self._others]
        self._crossing.agents |= moved
        numbers = self._crossing.of(workers)
        edges = [self._crossing.edges[number].name for number in numbers]
        links = self._join(self.launcher.restart(workers, edges), numbers)
        for host in met:
            self._crossing.carry_on(host, numbers)
        self._let_in(met)
        self.links |= links
        return links

    def look_whether_drained(self) -> None:
        """Have the wire look whether the other hosts have all that workers of this one
        have committed: `drained` says so, soon."""
        self.drained = False
        self._wire.do(self._look_whether_drained)

    def _look_whether_drained(self) -> None:
        self.sent, self.drained = self._crossing.sent(), self._crossing.drained()

    def sent_in_the_end(self) -> list[tuple[int, int, int]]:
        """Return `Crossing.sent` once nobody turns the wire, nor any worker lives."""
        return self._crossing.sent()

    def flows(self) -> list[EdgeFlow]:
        """See `Crossing.flows`."""
        return self._crossing.flows()

    def wait(self, seconds: float, least: float = 0.0) -> None:
        """Wait for a message of any worker (see `Launcher.wait`)."""
        held = any(link.held for link in self.links.values())
        self.launcher.wait(min(seconds, _HELD_S) if held else seconds, least)

    def wake(self) -> None:
        """End `wait`. Any thread may."""
        os.eventfd_write(self._bell, 1)

    def close_ends(self) -> None:
        """Give up the wire's ends. Nobody turns it."""
        for close in self._open:
            close()
        os.close(self._bell)


def given_back_in_lockstep(experiment: Experiment, edges: Sequence[Edge]) -> frozenset[str]:
    """Return the names of the edges whose readers train in lockstep with who sends
    samples over them."""
    found = set[str]()
    leaders: dict[str, Collection[str]] = {}  # by stream
    for edge in edges:
        kind, stream = edge.stream.split("/")
        if kind == "samples":
            if stream not in leaders:
                leaders[stream] = experiment.in_lockstep(stream)
            if edge.targets[0] in leaders[stream]:
                found.add(edge.name)
    return frozenset(found)
