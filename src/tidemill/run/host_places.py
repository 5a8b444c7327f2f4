"""Where the workers of a run on several hosts stand: what is printed at its start, kept
in its folder, and told by `tidemill status`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from tidemill.api.edges import group_of, number
from tidemill.api.launcher import HostFigures

MOST = 20
"""Hosts that have a line of their own; the others fold into one."""
_NAMED = 3  # hosts that a notice names


class HostPlace(msgspec.Struct, frozen=True):
    """What of a host is the run's, and the names of the workers that live there now."""

    cores: int
    gpus: int
    workers: list[str]


def places_of(hosts: Mapping[str, HostFigures]) -> dict[str, HostPlace]:
    """Return what each host has. Workers of a host that is lost stand on another one or,
    until they live again, nowhere."""
    living: dict[str, list[str]] = {host: [] for host in hosts}
    for figures in hosts.values():
        if figures.home:
            living[figures.home] += figures.workers
    return {host: HostPlace(figures.cores, figures.gpus, living[host]) for host, figures in hosts.items()}


def table_of_places(places: Mapping[str, HostPlace]) -> str:
    """Return a line for each host: its cores, its GPUs, and its workers."""
    shown = list(places.items())[: len(places) if len(places) <= MOST else MOST - 1]
    rest = list(places.values())[len(shown) :]
    lines = [("host", "cores", "GPUs", "workers")]
    lines += [
        (name, str(host.cores), str(host.gpus), ", ".join(_named(host.workers))) for name, host in shown
    ]
    if rest:
        cores, gpus, workers = (
            sum(counts) for counts in zip(*((h.cores, h.gpus, len(h.workers)) for h in rest), strict=True)
        )
        lines.append((f"{len(rest)} others", str(cores), str(gpus), f"{workers} workers"))
    first, second, third = (max(len(line[column]) for line in lines) for column in range(3))
    return "\n".join(
        f"{host:<{first}}   {cores:>{second}}   {gpus:>{third}}   {workers}".rstrip()
        for host, cores, gpus, workers in lines
    )


def crowded(places: Mapping[str, HostPlace], processes: Sequence[Sequence[str]]) -> str:
    """Return which hosts have more processes than cores, in words for people; "" where
    none has."""
    told = []
    for name, host in places.items():
        here = [names for names in processes if names[0] in host.workers]
        if len(here) > max(host.cores, 1):  # a runner's that has none for workers may still have a trainer
            told.append(
                f"host {name} has {host.cores} core{'s' * (host.cores != 1)} for {len(here)} processes "
                f"({', '.join(_named(host.workers))})"
            )
    if not told:
        return ""
    more = f"; so have {len(told) - _NAMED} more hosts" if len(told) > _NAMED else ""
    return (
        f"{'; '.join(told[:_NAMED])}{more}: they share its cores, and are slower than with one each; give it "
        "more cores, take fewer workers, or say where they stand (--place)"
    )


def _named(workers: Sequence[str]) -> Iterator[str]:
    """Yield workers by name, many in a row as "actor-2 … 9"."""
    for group in dict.fromkeys(map(group_of, workers)):
        numbers = sorted(number(worker) for worker in workers if group_of(worker) == group)
        for _, those in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
            row = [number for _, number in those]
            if len(row) > 2:
                yield f"{group}-{row[0]} … {row[-1]}"
            else:
                yield from (f"{group}-{number}" for number in row)
