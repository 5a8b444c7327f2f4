"""The hosts of a run as they are now: what views show of them, and what is recorded."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.api.edges import Edge
from tidemill.api.launcher import HostFigures
from tidemill.core.clock import awake
from tidemill.run.host_places import HostPlace, places_of
from tidemill.run.member import Member
from tidemill.workers.actor_config import ActorConfig

EVERY = 1.0  # seconds between two looks
AWAITED = 0.5
"""From this share of the time on others wait for an edge: it may be the bottleneck."""
_MB = 1e6


@dataclass(frozen=True)
class EdgeView:
    """What goes from a host to another one, of one stream.

    stream: its kind and its name: "samples/experience"
    to: the other host
    sent: MB/s
    awaited: share of the time in which something of it was under way, and both who writes
        and who reads waited, at most: of that worker's edge for which this is most
    """

    stream: str
    to: str
    sent: float
    awaited: float

    @property
    def rank(self) -> tuple[float, float]:
        """Of two edges the one that holds up more, or else the busier one, has more."""
        return (self.awaited if self.awaited >= AWAITED else 0.0), self.sent


@dataclass(frozen=True)
class HostView:
    """A host of a run.

    workers, cores: how many of either are the run's there
    steps_per_second: env steps of its actors
    sent, received: MB/s to and from other hosts
    said: messages per second that it says to other hosts besides data
    round_trip_ms: from the runner's host and back; None of that itself
    lag: how many versions of what trainers publish it is behind, of the policy that is
        furthest; None of the runner's host
    lost: why it is not there; "" as long as it is
    edges: what goes from there to other hosts
    elsewhere: the host where its workers live, "" where that is this one
    """

    workers: int
    cores: int
    steps_per_second: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    said: float = 0.0
    round_trip_ms: float | None = None
    lag: int | None = None
    lost: str = ""
    edges: tuple[EdgeView, ...] = ()
    elsewhere: str = ""


class _Rates(NamedTuple):
    """What goes out of a host and comes in, as `HostView` has it; and over each of its
    edges: MB/s, and the share of the time in which something was under way."""

    sent: float
    received: float
    said: float
    edges: Mapping[tuple[Edge, str], tuple[float, float]]


class HostWatch:
    """A host watch looks at the hosts of a run now and then.

    each_host: function that returns what is known of them (see `Launcher.each_host`)
    hosts: each as it was when it was last looked at, the runner's first; empty where a
        run has this machine alone
    places: what each has, and who lived there then
    """

    def __init__(self, each_host: Callable[[], Mapping[str, HostFigures]]) -> None:
        self._each_host = each_host
        self.hosts: dict[str, HostView] = {}
        self.places: dict[str, HostPlace] = {}
        self._told: dict[str, HostFigures] = {}
        self._rates: dict[str, _Rates] = {}
        self._at = float("-inf")

    def look(self, members: Mapping[str, Member]) -> None:
        """Look at all of them, if it is time."""
        if awake() < self._at + EVERY:
            return
        self._at, told = awake(), self._each_host()
        for name, figures in told.items():
            before = self._told.get(name, figures)
            if name not in self._rates or figures.at != before.at:  # else it has told nothing since
                self._rates[name], self._told[name] = _rates(figures, before), figures
        self.hosts = {
            name: _view(name, figures, self._rates[name], told, members) for name, figures in told.items()
        }
        self.places = places_of(told)

    def metrics(self) -> dict[str, float]:
        """Return what is recorded of them, by metric name."""
        found: dict[str, float] = {}
        for name, host in self.hosts.items():
            told = {
                "workers": host.workers,
                "cores": host.cores,
                "steps_per_second": host.steps_per_second,
                "sent_mb_per_second": host.sent,
                "received_mb_per_second": host.received,
                "messages_per_second": host.said,
                "round_trip_ms": host.round_trip_ms,
                "lag": host.lag,
            }
            found |= {f"host/{name}/{k}": float(v) for k, v in told.items() if v is not None}
            for edge in host.edges:
                place = f"edge/{edge.stream}/{name}/{edge.to}"
                found |= {f"{place}/mb_per_second": edge.sent, f"{place}/awaited": edge.awaited}
        return found


def _rates(now: HostFigures, before: HostFigures) -> _Rates:
    seconds = now.at - before.at

    def per_second(count: float, earlier: float) -> float:
        return max(count - earlier, 0) / seconds if seconds > 0 else 0.0  # a new agent of a host begins at 0

    edges = {}
    for edge, flow in now.edges.items():
        earlier = before.edges.get(edge, flow)
        under_way = per_second(flow.under_way_s, earlier.under_way_s)
        edges[edge] = per_second(flow.sent_bytes, earlier.sent_bytes) / _MB, min(under_way, 1.0)
    return _Rates(
        per_second(now.sent_bytes, before.sent_bytes) / _MB,
        per_second(now.received_bytes, before.received_bytes) / _MB,
        per_second(now.said, before.said),
        edges,
    )


def _view(
    name: str,
    figures: HostFigures,
    rates: _Rates,
    hosts: Mapping[str, HostFigures],
    members: Mapping[str, Member],
) -> HostView:
    def waits(workers: Iterable[str]) -> float:
        """Return for which share of its time one of these waits, of whom that is most."""
        shares = (members[worker].shares for worker in workers if worker in members)
        return max((each.get("wait", 0.0) for each in shares), default=0.0)

    edges: dict[tuple[str, str], EdgeView] = {}
    for (edge, other), (sent, under_way) in rates.edges.items():
        readers = hosts[other].workers if other in hosts else ()
        awaited = min(under_way, waits([edge.source]), waits(set(edge.targets).intersection(readers)))
        known = edges.get((edge.stream, other), EdgeView(edge.stream, other, 0.0, 0.0))
        edges[edge.stream, other] = EdgeView(
            edge.stream, other, known.sent + sent, max(known.awaited, awaited)
        )
    living = [members[worker] for worker in figures.workers if worker in members]
    return HostView(
        workers=len(figures.workers),
        cores=figures.cores,
        steps_per_second=sum(m.rate for m in living if isinstance(m.config, ActorConfig)),
        sent=rates.sent,
        received=rates.received,
        said=rates.said,
        round_trip_ms=None if figures.round_trip_s is None else figures.round_trip_s * 1000,
        lag=figures.lag,
        lost=figures.lost,
        edges=tuple(edges.values()),
        elsewhere=figures.home if figures.home != name else "",
    )
