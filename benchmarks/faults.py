"""The table of faults: each is had in real runs, and what follows is timed, beside what
is promised.

    python benchmarks/faults.py                          # all: some 20 minutes
    python benchmarks/faults.py actor equal --times 20   # some, so often each
    python benchmarks/faults.py --list

A line of the table for each fault: what is promised, and by each launcher by which it can
happen the median and the longest of the times that it took, in seconds, and the most that
was lost. Ends with 1 where a promise is broken: where what should follow does not, where
more is lost, or something is left behind, once; or where the median of a time is longer
than promised. A longest time that is longer is printed, but breaks none: a busy machine
is late by itself. How much so is said above the table. Times are promised for two cores:
with fewer, none breaks a promise.
"""

import argparse
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from fault_rows import deaths, environments, learning, shortages, signals, storage
from fault_rows.row import ANYWHERE, Impossible, Row, Seen
from fault_rows.runs import BrokenPromise

ROWS: dict[str, Row] = {
    name: row
    for part in (deaths, environments, learning, signals, storage, shortages)
    for name, row in part.ROWS.items()
}
CORES = len(os.sched_getaffinity(0))


def machine() -> str:
    """Return what the machine is, how busy, and how quickly it starts a process."""
    with open("/proc/cpuinfo") as file:
        models = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)
    took = time.perf_counter() - began
    return (
        f"{', '.join(models) or platform.machine()}, {CORES} of {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; load {os.getloadavg()[0]:.1f}; a process with numpy starts in "
        f"{took:.2f} s"
    )


def suffered(row: Row, launch: str, times: int, draw: random.Random) -> list[Seen]:
    """Have the fault so often, and return what was seen."""
    found: list[Seen] = []
    while len(found) < times:
        found += row.suffer(launch, draw)
    return found


def column(row: Row, seen: Sequence[Seen], broken: list[str]) -> str:
    """Return what was seen by one launcher, and note what was promised otherwise."""
    words = []
    for what, values in by_name([each.seconds for each in seen]).items():
        words.append(f"{what} {statistics.median(values):.2f} ({max(values):.2f})")
        if statistics.median(values) > row.promised.get(what, float("inf")) and CORES > 1:
            broken.append(f"{what}: {statistics.median(values):.2f} s")
    lost = by_name([each.lost for each in seen])
    for what, values in lost.items():
        if max(values) > row.lost.get(what, float("inf")):
            broken.append(f"{what}: {max(values):,.0f}")
    words += [f"{max(values):,.0f} {what}" for what, values in lost.items() if max(values)]
    return "; ".join(words) or "as promised"


def by_name(values: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values by their names."""
    names = dict.fromkeys(name for each in values for name in each)
    return {name: [each[name] for each in values if name in each] for name in names}


def promise(row: Row) -> str:
    """Return what is promised, in words."""
    words = [f"{what} {seconds:g}" for what, seconds in row.promised.items()]
    words += [f"at most {most:,.0f} {what}" if most else f"no {what}" for what, most in row.lost.items()]
    return "; ".join(words)


def look_at(row: Row, launches: Sequence[str], times: int | None, draw: random.Random) -> list[str]:
    """Print the line of a fault, and return which promises were broken."""
    columns, broken = [], list[str]()
    for launch in ANYWHERE:
        here: list[str] = []
        if launch not in row.launches or launch not in launches:
            columns.append("–")
            continue
        try:
            columns.append(column(row, suffered(row, launch, times or row.times, draw), here))
        except Impossible as why:
            columns.append(f"left out: {why}")
        except BrokenPromise as why:
            columns.append("BROKEN")
            here.append(str(why))
        broken += [f"{row.fault}, {launch}: {text}" for text in here]
    print(f"| {row.fault} | {promise(row)} | {' | '.join(columns)} |", flush=True)
    return broken


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of faults; none: all")
    parser.add_argument("--list", action="store_true", help="print the names of all faults")
    parser.add_argument("--times", type=int, help="how often each, with each launcher")
    parser.add_argument("--launch", nargs="*", choices=ANYWHERE, default=ANYWHERE)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if unknown := [name for name in given.rows if name not in ROWS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(ROWS)}")
    if given.list:
        for name, row in ROWS.items():
            print(f"{name:<24} {row.fault} ({', '.join(row.launches)})")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs that are under way end with it
    draw, began, broken = random.Random(given.seed), time.monotonic(), list[str]()
    print(
        f"{machine()}\n\n| fault | promised, s | {' | '.join(ANYWHERE)} |\n|---|---|---|---|---|", flush=True
    )
    for name in given.rows or ROWS:
        broken += look_at(ROWS[name], given.launch, given.times, draw)
    print(f"\n{time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.1f} at the end")
    for text in broken:
        print(f"broken: {text}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
