"""What several hosts cost, and what they stand: each promise beside what was measured.
Hosts are network namespaces of this machine with processes of their own; root is needed.

    python benchmarks/cluster.py table --keep FILE   # all: an hour and a half
    python benchmarks/cluster.py table ray cut-10    # some
    python benchmarks/cluster.py speed               # CartPole and Pong beside processes
    python benchmarks/cluster.py faults --times 5    # the table of faults
    python benchmarks/cluster.py table --list

A line for each: what is promised, medians and the worst of what was seen, and whether it
holds: medians of times and figures, and each single count of what may not be. With
`--keep`, what was measured is kept in a file, and another command goes on from there.
`--short`: runs so short that figures mean nothing. Ends with 1 where something does not
hold.

    python benchmarks/cluster.py wire [--rounds 5] [--seconds 1.5] [--loopback]
    python benchmarks/cluster.py sleepers [--hosts 16] [--lanes 64] [--seconds 15]
    python benchmarks/cluster.py soak [--experiment replay] [--minutes 10]

measure the same at other sizes (`cluster_wire.py`, `cluster_runs.py`).
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import cluster_faults as faults
import cluster_runs
import cluster_slurm as slurm
import cluster_wire
from cluster_ray import cut_off, raylet_dies, start_and_end
from cluster_runs import Figures
from cluster_speed import beside_processes, best, sums_on_slow_line
from fault_rows.row import Impossible
from fault_rows.runs import BrokenPromise
from faults import machine
from networks import NotAllowed


@dataclass(frozen=True)
class Part:
    """A part of the table.

    what: it is, in words
    measure: function that yields what it found, given random numbers and whether it is
        to be short
    most: what medians may be
    least: what they must be
    never: what no single one may be more than
    times: how often it is measured
    sum_up: function that returns what follows from medians
    """

    what: str
    measure: Callable[[Random, bool], Iterator[Figures]]
    most: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    never: Mapping[str, float] = field(default_factory=dict)
    times: int = 3
    sum_up: Callable[[Mapping[str, float]], Figures] = lambda medians: {}


def wire(draw: Random, short: bool) -> Iterator[Figures]:
    """A round of the wire beside bare pyzmq."""
    yield from cluster_wire.rounds(1, 0.5 if short else 1.5)


def sleepers(draw: Random, short: bool) -> Iterator[Figures]:
    """16 hosts that sleep beside one."""
    yield dict(cluster_runs.sleepers(*((3, 8, 4.0) if short else (16, 64, 15.0))))


def soak(experiment: str) -> Callable[[Random, bool], Iterator[Figures]]:
    """Return what trains for ten minutes with faults."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        seed = draw.randrange(1 << 30)
        yield cluster_runs.soak(experiment, 0.5 if short else 10.0, (3.0, 10.0, 20.0), seed)

    return measure


ENDS = {"nothing left": 5.0}
NOTICED = {"noticed": 0.5}
HOST = {"noticed": 6.0, **ENDS}
NONE = {"env steps undone": 0.0}
WELL = {"deaths": 0.0, "samples lost": 0.0, "lag/max": 4.0}  # the most that the experiment allows
AGAIN = {"noticed": 1.0, "first update": 6.0, **ENDS}
ACCOUNTED = {"unaccounted": 0.0}
H1 = ("--place=actor=h2", "--place=server=h2")
PARTS: dict[str, dict[str, Part]] = {
    "figures": {
        "wire": Part(
            "a channel over the wire, encrypted", wire, {"added delay, µs": 300.0},
            {"of bare, slots of 1.8 MB": 0.7, "slots of 2 kB a second": 20_000.0}, times=5,
        ),
        "sleepers": Part(
            "16 hosts whose environments sleep 50 ms, 64 lanes each", sleepers,
            # a host that hands cells on says two leases a second to each neighbour: with
            # many hosts these are two on average, beside the seven messages of a lone one
            {"runner's share of a core": 0.05, "messages of a host beside one's": 1.6, **ENDS},
            {"of so many times one": 0.9},
        ),
    },
    "speed": {
        "cartpole": Part(
            "CartPole, two hosts of a core each beside processes",
            beside_processes("cartpole", 64, 10.0), least={"of processes": 0.7}, times=5, sum_up=best,
        ),
        "pong": Part(
            "Pong, one epoch, likewise",
            beside_processes("pong_one_epoch", 32, 25.0), least={"of processes": 0.85}, times=5, sum_up=best,
        ),
    },
    "sums": {
        "sums": Part(
            "sums of four trainers on two hosts, a line of 10 MB/s: per host beside by ranks",
            sums_on_slow_line(10e6), least={"per host, of by ranks": 1.0}, times=3,
        ),
    },
    "ray": {"ray": Part("a run on a Ray that is up", start_and_end, {"first update": 6.0, **ENDS}, times=1)},
    "faults": {
        "actor": Part(
            "an actor of a host dies", faults.worker_dies("apart", "h1", "--place=actor-0=h1",
            "--place=actor-1=h2", "--place=server=h2"), {**NOTICED, "lives": 2.0, **ENDS}, never=NONE,
        ),
        "server": Part(
            "a policy worker of a host dies", faults.worker_dies("apart", "h1", "--place=actor=h2",
            "--place=server=h1"), {**NOTICED, "lives": 3.0, **ENDS}, never=NONE,
        ),
        "trainer": Part(
            "the trainer dies, whose actors are on others", faults.worker_dies("apart", "", *H1,
            log="trainer-0"), {**NOTICED, "lives": 10.0, **ENDS},
        ),
        "equal": Part(
            "an equal trainer of a host dies, with its actor", faults.worker_dies("equal", "h1",
            "--place=trainer-1=h1", "--place=actor-1=h1"), {**NOTICED, "lives": 10.0, **ENDS}, never=NONE,
        ),
        "buffer": Part(
            "a buffer worker dies, whose actor is on another", faults.worker_dies("buffered", "",
            "--place=actor=h1", log="buffer-0"), {**NOTICED, **ENDS}, never=NONE,
        ),
        "host": Part("a host dies, kill -9 of all on it", faults.host_killed(faults.ROWS), HOST, never=NONE),
        "host-replay": Part("… of a replay memory's", faults.host_killed("replay"), HOST, never=ACCOUNTED),
        "cut-3": Part("a host is cut off for 3 s", faults.cut_off(3.0), ENDS, never={"samples lost": 0.0}),
        "cut-10": Part("… for 10 s", faults.cut_off(10.0), HOST, never=NONE),
        "cut-20": Part("… for 20 s", faults.cut_off(20.0), HOST, never=NONE),
        "loss": Part(
            "1 % loss", faults.slow_line(loss=0.01), ENDS, never=WELL, times=1
        ),
        "delay": Part(
            "50 ms delay", faults.slow_line(delay=0.05), ENDS, never=WELL,
            times=1,
        ),
        "rate": Part(
            "10 MB/s", faults.slow_line(rate=10e6), ENDS, never=WELL, times=1
        ),
        "runner": Part(
            "the runner's host dies, kill -9 of all on it", faults.runner_dies(False),
            {"hosts end": 20.0, **ENDS},
        ),
        "runner-silent": Part(
            "… stands still, and its line is cut", faults.runner_dies(True), {"hosts end": 20.0, **ENDS}
        ),
        "leave": Part(
            "SIGTERM to one host", faults.host_told_to_leave, {"noticed": 1.0, **ENDS},
            never={**NONE, "samples lost": 0.0},
        ),
        "preempted": Part(
            "SIGTERM to the runner", faults.runner_told_to_end, {"noticed": 1.0, **ENDS},
            never={"updates lost": 0.0},
        ),
        "raylet": Part("a raylet dies, kill -9 of it and Ray's workers", raylet_dies, HOST, never=NONE),
        "ray-cut": Part("a host that Ray has given is cut off for 10 s", cut_off, HOST, never=NONE),
        "slurm-requeue": Part(
            "a job of Slurm's is queued again (scontrol requeue)", slurm.queued_again(slurm.requeue),
            AGAIN, never={"updates lost": 0.0}, times=2,
        ),
        "slurm-told": Part(
            "… is told that its time is over (USR1)", slurm.queued_again(slurm.tell), AGAIN,
            never={"updates lost": 0.0}, times=2,
        ),
        "slurm-time": Part(
            "… has 3 minutes, and is told by Slurm itself", slurm.queued_again(slurm.wait, "--time", "3"),
            {"first update": 6.0}, {"seconds left": 60.0}, {"updates lost": 0.0}, times=1,
        ),
        "slurm-first-node": Part(
            "… loses its first node, kill -9 of all on it", slurm.first_node_dies,
            {"hosts end": 20.0, **ENDS}, times=1,
        ),
        "no-package": Part("a host without Tidemill", faults.host_lacks("NoPackage"), ENDS, times=1),
        "version": Part("a host of another numpy", faults.host_lacks("OtherVersion"), ENDS, times=1),
        "folder": Part(
            "a host that does not see the folder, and must", faults.host_lacks("BlindHost"), ENDS, times=1
        ),
        "apart": Part(
            "two hosts that do not reach each other", faults.host_lacks("Networked", apart=(1, 2),
            made=(faults.OF_FAULTS + "apart", "--place=actor=h1", "--place=server=h2")), ENDS, times=1,
        ),
        "gpus": Part(
            "fewer GPUs than are asked for", faults.host_lacks("OneGpu", "--set=workers.trainer.device=cuda",
            "--layout=given"), ENDS, times=1,
        ),
        "cores": Part(
            "fewer cores than processes: told, and goes on", faults.few_cores, ENDS, never={"deaths": 0.0},
            times=1,
        ),
    },
    "soaks": {
        "soak-rows": Part(
            "10 minutes of random faults, each row known again", soak("rows"), ENDS, {"faults": 20.0}, {}, 1
        ),
        "soak-replay": Part("… with a replay memory", soak("replay"), ENDS, {"faults": 20.0}, ACCOUNTED, 1),
        "soak-cartpole": Part(
            "… CartPole reaches its mark", soak("cartpole"), ENDS,
            {"faults": 20.0, "best mean return": 475.0}, {}, 1,
        ),
    },
}  # fmt: skip
ALL = {name: part for parts in PARTS.values() for name, part in parts.items()}
BROKEN, OUT = "broken", "left out"


def measured(name: str, part: Part, times: int, given: argparse.Namespace) -> list[Figures]:
    """Measure a part so often, of which what is kept counts; return what was found."""
    keep: Path | None = given.keep
    found: list[Figures] = []
    rounds = 0
    if keep is not None and keep.exists():
        told = [json.loads(line) for line in keep.read_text().splitlines()]
        rounds = sum(line["part"] == name and line["short"] == given.short for line in told)
        for line in told:
            if line["part"] == name and line["short"] == given.short:
                found += line["found"]
    while rounds < times and not any(OUT in each for each in found):
        draw, one = Random(f"{given.seed} {name} {rounds}"), list[Figures]()
        try:
            one += part.measure(draw, given.short)
        except Impossible as why:
            one.append({OUT: str(why)})
        except NotAllowed as why:
            raise SystemExit(str(why)) from None
        except BrokenPromise as why:
            one.append({BROKEN: str(why)})
        rounds, found = rounds + 1, found + one
        print(f"  {name}: {one}", file=sys.stderr, flush=True)
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps({"part": name, "short": given.short, "found": one}) + "\n")
    return found


def number(value: float) -> str:
    """Return a figure as it is printed."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def line_of(name: str, part: Part, found: list[Figures]) -> tuple[str, list[str]]:
    """Return a part's line of the table, and what does not hold."""
    values: dict[str, list[float]] = {}
    words: dict[str, list[str]] = {}
    for each in found:
        for what, value in each.items():
            if isinstance(value, str):
                words.setdefault(what, []).append(value)
            else:
                values.setdefault(what, []).append(value)
    medians = {what: statistics.median(those) for what, those in values.items()}
    if not {BROKEN, OUT} & words.keys():
        for what, value in part.sum_up(medians).items():
            if isinstance(value, str):
                words[what] = [value]
            else:
                medians[what], values[what] = value, [value]
    wrong = [f"{what}: {text}" for what, texts in words.items() if what == BROKEN for text in texts]
    wrong += [
        f"{what} {number(medians[what])}" for what in part.most if medians.get(what, 0) > part.most[what]
    ]
    wrong += [f"{what} {number(medians[what])}" for what in part.least if what in medians
              and medians[what] < part.least[what]]  # fmt: skip
    wrong += [f"{what} {number(max(values[what]))}" for what in part.never if what in values
              and max(values[what]) > part.never[what]]  # fmt: skip
    if not {BROKEN, OUT} & words.keys():
        promises = (*part.most, *part.least, *part.never)
        wrong += [f"{what} was not measured" for what in promises if what not in values]
    promised = [f"{what} ≤ {number(most)}" for what, most in (*part.most.items(), *part.never.items())]
    promised += [f"{what} ≥ {number(least)}" for what, least in part.least.items()]
    seen = []
    for what, those in values.items():
        worst = min(those) if what in part.least else max(those)
        seen.append(f"{what} {number(medians[what])}" + (f" ({number(worst)})" if len(those) > 1 else ""))
    seen += [f"{what}: {', '.join(dict.fromkeys(texts))[:300]}" for what, texts in words.items()]
    holds = "left out" if OUT in words else "NO" if wrong else "yes"
    return f"| {part.what} | {'; '.join(promised)} | {'; '.join(seen)} | {holds} |", [
        f"{name}: {text}" for text in wrong
    ]


def table(parts: Mapping[str, Part], given: argparse.Namespace) -> int:
    """Measure these parts, and print them."""
    if os.geteuid() != 0:
        raise SystemExit("root is needed, for network namespaces")
    began, broken = time.monotonic(), list[str]()
    print(f"{machine()}\n\n| | promised | seen: median (worst) | holds |\n|---|---|---|---|", flush=True)
    for name, part in parts.items():
        times = 1 if given.short else given.times or part.times
        text, wrong = line_of(name, part, measured(name, part, times, given))
        broken += wrong
        print(text, flush=True)
    print(f"\n{time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.1f} at the end")
    for text in broken:
        print(f"does not hold: {text}")
    return bool(broken)


def shown(found: Mapping[str, float | str]) -> None:
    """Print what was found."""
    for what, value in found.items():
        print(f"{what}: {value if isinstance(value, str) else number(value)}")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for group, parts in {"table": ALL, **{name: PARTS[name] for name in PARTS if name != "figures"}}.items():
        command = commands.add_parser(group, help=", ".join(parts) if group != "table" else "all of them")
        command.add_argument("parts", nargs="*", choices=[*parts, []], default=[], metavar="PART")
        command.add_argument("--keep", type=Path, help="file of what was measured, to go on from")
        command.add_argument("--times", type=int, help="how often each")
        command.add_argument("--short", action="store_true", help="whether it works, not how well")
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--list", action="store_true", help="print the names of all parts")
    of_wire = commands.add_parser("wire")
    of_wire.add_argument("--rounds", type=int, default=5)
    of_wire.add_argument("--seconds", type=float, default=1.5)
    of_wire.add_argument("--loopback", action="store_true")
    of_sleepers = commands.add_parser("sleepers")
    of_sleepers.add_argument("--hosts", type=int, default=16)
    of_sleepers.add_argument("--lanes", type=int, default=64)
    of_sleepers.add_argument("--seconds", type=float, default=15.0)
    of_soak = commands.add_parser("soak")
    of_soak.add_argument("--experiment", choices=list(cluster_runs.EXPERIMENTS), default="cartpole")
    of_soak.add_argument("--minutes", type=float, default=10.0)
    of_soak.add_argument("--partitions", type=float, nargs="+", default=[3.0, 10.0, 20.0])
    of_soak.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs that are under way end with it
    if given.what == "wire":
        cluster_wire.wire(given.rounds, given.seconds, given.loopback)
    elif given.what == "sleepers":
        shown(cluster_runs.sleepers(given.hosts, given.lanes, given.seconds))
    elif given.what == "soak":
        shown(cluster_runs.soak(given.experiment, given.minutes, given.partitions, given.seed))
    else:
        parts = ALL if given.what == "table" else PARTS[given.what]
        if not given.list:
            return table({name: parts[name] for name in given.parts or parts}, given)
        for name, part in parts.items():
            print(f"{name:<14} {part.what} ({given.times or part.times} times)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
