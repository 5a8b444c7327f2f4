"""The hosts of a run as a table: in the live view, and where `tidemill status` tells."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from tidemill.run.host_places import MOST
from tidemill.run.host_watch import AWAITED, HostView
from tidemill.run.snapshot import short

_COLUMNS = ("host", "workers", "cores", "steps/s", "MB/s in", "out", "round trip", "lag")
_EDGE = "busiest edge"


def table_of_hosts(hosts: Mapping[str, HostView], most: int = MOST) -> Table:
    """Return a line for each host, or for `most` of them and one for all others."""
    table = Table.grid(padding=(0, 3, 0, 0))
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    table.add_column()  # or why it is gone: the one that a narrow terminal cuts
    named = [_EDGE] if any(host.edges for host in hosts.values()) else []
    table.add_row(*(Text(column, "bright_black") for column in (*_COLUMNS, *named)))
    shown = len(hosts) if len(hosts) <= most else max(most - 1, 0)
    for name, host in list(hosts.items())[:shown]:
        table.add_row(*_line(name, host))
    if folded := list(hosts.values())[shown:]:
        table.add_row(*_line(f"{len(folded)} others" if shown else f"{len(folded)} hosts", _together(folded)))
    return table


def _line(name: str, host: HostView) -> list[Text]:
    if host.lost:
        cause = host.lost.partition("\n")[0].partition(";")[0]
        return [
            Text(name),
            *[Text()] * (len(_COLUMNS) - 1),
            Text(f"gone: {cause}", "red", no_wrap=True, overflow="ellipsis"),
        ]
    values = [
        str(host.workers),
        str(host.cores),
        short(host.steps_per_second),
        short(host.received),
        short(host.sent),
        "–" if host.round_trip_ms is None else f"{short(host.round_trip_ms)} ms",
        "–" if host.lag is None else str(host.lag),
    ]
    return [
        Text(f"{name}, on {host.elsewhere}" if host.elsewhere else name),
        *map(Text, values),
        *_edge(host),
    ]


def _edge(host: HostView) -> list[Text]:
    """Return the edge from a host that others wait for most or, where they wait for none,
    over which most goes."""
    if not host.edges:
        return []
    edge = max(host.edges, key=lambda edge: edge.rank)
    text = f"{edge.stream} → {edge.to} {short(edge.sent)} MB/s"
    waits = edge.awaited >= AWAITED
    return [
        Text(
            text + f", awaited {edge.awaited:.0%}" * waits,
            "yellow" if waits else "",
            no_wrap=True,
            overflow="ellipsis",
        )
    ]


def _together(hosts: list[HostView]) -> HostView:
    """Return hosts as one: what they do together, and the largest of what each waits
    for."""
    trips = [host.round_trip_ms for host in hosts if host.round_trip_ms is not None]
    gone = sum(bool(host.lost) for host in hosts)
    return HostView(
        workers=sum(host.workers for host in hosts),
        cores=sum(host.cores for host in hosts),
        steps_per_second=sum(host.steps_per_second for host in hosts),
        sent=sum(host.sent for host in hosts),
        received=sum(host.received for host in hosts),
        round_trip_ms=max(trips, default=None),
        lag=max((host.lag for host in hosts if host.lag is not None), default=None),
        lost=f"{gone} of them" if gone == len(hosts) else "",
        edges=tuple(edge for host in hosts for edge in host.edges),
    )
