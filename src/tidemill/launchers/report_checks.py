"""What a host tells of itself and of its workers is checked before the runner believes
it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from tidemill.api.edges import Edge
from tidemill.core.errors import RunError, SchemaError
from tidemill.core.own_version import own_version
from tidemill.hosts.orders import EdgeFlow, Here
from tidemill.launchers.engine import StartedAgent
from tidemill.launchers.host import versions
from tidemill.launchers.known_agents import Share
from tidemill.native.library import INSTRUCTION_SETS

MOST_CORES = 1 << 16
"""The most cores that a host is believed to have."""
MOST_GPUS = 1 << 10
"""The most GPUs that a host is believed to have."""
MOST_COUNTED = 1 << 53
"""The most samples or env steps that a host is believed to have lost: beyond it metrics,
which are floats, count no more."""
_NATIVE = {"off", *INSTRUCTION_SETS}
_MOST_SAID = 100  # characters of a version that are shown


def check_versions(host: str, found: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise `RunError` for a host that has other versions than its runner's `own`."""
    if wrong := [
        f"{name} {found.get(name, '')[:_MOST_SAID] or 'none'}, here {version}"
        for name, version in own.items()
        if found.get(name) != version
    ]:
        raise RunError(
            f"host {host} has other versions, and results could differ: {'; '.join(wrong)}; install the "
            "same there"
        )


def check_tidemill(host: str, agent: StartedAgent) -> None:
    """Raise `RunError` for a host of another Tidemill, before it is told what it may not
    understand."""
    check_versions(host, {"tidemill": agent.version}, {"tidemill": own_version()})


def check_here(host: str, here: Here) -> None:
    """Raise `RunError` for a host of other versions, or one that says what cannot be."""
    check_versions(host, here.versions, versions())
    kind, gpus = here.kind, here.gpus
    natives = kind.native and _NATIVE.issuperset(kind.native)
    if not (0 < kind.cores <= MOST_CORES and 0 <= gpus <= MOST_GPUS and natives):
        raise RunError(
            f"host {host} says that it has {kind.cores} cores, of 1 to {MOST_CORES}, and {gpus} GPUs, of 0 "
            f"to {MOST_GPUS}, and computes layers by {', '.join(kind.native)[:100]!r}, of "
            f"{', '.join(sorted(_NATIVE))}; see what answers there"
        )


@dataclass(frozen=True)
class ReportChecks:
    """Checks of what hosts tell of their workers and of edges.

    edges: of the experiment
    places: the hosts of its workers, by name
    shares: of hosts other than the runner's, by host
    hosts: names of all
    """

    edges: Sequence[Edge] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)
    hosts: Collection[str] = ()

    def lives(self, host: str, lives: Iterable[tuple[int, ...]]) -> None:
        """Raise `SchemaError` unless these lives of writers of edges, by the edges'
        numbers, were on a host, and what is counted of each can be."""
        for number, life, *counts in lives:
            if not 0 <= number < len(self.edges):
                raise SchemaError(f"it tells of edge {number}, and there are {len(self.edges)}")
            self.life(host, self.edges[number].source, life, *counts)

    def flows(self, host: str, flows: Iterable[EdgeFlow]) -> None:
        """Raise `SchemaError` unless workers of a host write these edges, or it may hand
        them on, and what is told of them can be."""
        for number, other, _, seconds in flows:
            edge = self.edges[number] if 0 <= number < len(self.edges) else None
            known = edge is not None and (edge.kind == "cell" or self.places[edge.source] == host)
            if not (known and other in self.hosts and isfinite(seconds)):
                raise SchemaError(
                    f"it tells that edge {number} from host {host[:100]!r} to {other[:100]!r} was under way "
                    f"for {seconds} s, which cannot be"
                )

    def life(self, host: str, worker: str, life: int, *counts: int) -> None:
        """Raise `SchemaError` unless this life of a worker was on a host, and what is
        counted of it can be."""
        share = self.shares.get(host)
        link = None if share is None else share.links.get(worker)
        if link is None or not 1 <= life <= link.life + 1:
            raise SchemaError(
                f"it tells of life {life} of {worker[:100]!r}, which was not on host {host[:100]!r}"
            )
        if not all(0 <= each <= MOST_COUNTED for each in counts):
            raise SchemaError(f"it counts {counts} of life {life} of {worker}, of 0 to {MOST_COUNTED:,}")
