"""Speed on two hosts of one core each beside `--launch processes` on the same two cores,
for `benchmarks/cluster.py`."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import works
from cluster_runs import ClusterRun, Figures, running
from networks import Cable

WARM = 4.0  # seconds of training that do not count
LAYOUTS = {
    "auto": "auto",
    "1 actor": "actors=1,trainers=1,lanes={lanes},sample_steps=128,ring=1,slots=2",
    "2 actors": "actors=2,trainers=1,lanes={half},sample_steps=128,ring=1,slots=2",
}
"""What each side is tried in, all with the same batches; its best one counts."""
SIDES = ("hosts", "processes")


def speed(run: ClusterRun, seconds: float) -> float:
    """Return the env steps a second that a run reaches once it is warm."""
    run.await_seconds(WARM)
    first = run.newest()
    run.await_seconds(max(WARM + seconds, first["time/seconds"] + 0.001))
    last = run.newest()
    return (last["step"] - first["step"]) / (last["time/seconds"] - first["time/seconds"])


def layout(run: ClusterRun) -> str:
    """Return how a run was laid out, in words."""
    told = run.path / "layout.json"
    return str(json.loads(told.read_text())["layout"]) if told.exists() else "as given"


def beside_processes(work: str, lanes: int, seconds: float) -> Callable[[Random, bool], Iterator[Figures]]:
    """Return what measures a work of `works.py`, of so many lanes, by turns on both
    sides, in each layout; chance says which side is first."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        cores = sorted(os.sched_getaffinity(0))
        ends = [("taskset", "-c", str(core)) for core in (cores[0], cores[-1])]
        both = ("taskset", "-c", f"{cores[0]},{cores[-1]}")
        place, found = f"{Path(works.__file__)}:{work}", dict[str, float | str]()
        found["cores"] = both[-1]
        for name, text in LAYOUTS.items():
            chosen = text.format(lanes=lanes, half=lanes // 2)
            for side in draw.sample(SIDES, 2):
                more = {"around": ends} if side == "hosts" else {"around": (both, ()), "launch": "processes"}
                with (
                    Cable() as cable,
                    running(1, place, "--layout", chosen, network=cable, **more) as (_, run),
                ):
                    found[f"{side}, {name}"] = speed(run, 1.0 if short else seconds)
                    found[f"{side}, {name}, laid out"] = layout(run)
                    run.interrupt()
        yield found

    return measure


def sums_on_slow_line(rate: float) -> Callable[[Random, bool], Iterator[Figures]]:
    """Return what measures four equal trainers, two on each of two hosts whose line
    carries so many bytes a second, by turns as they add up in the order of ranks and per
    host first."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        found = dict[str, float | str]()
        places = [f"--place={group}-{i}=h1" for group in ("trainer", "actor") for i in (2, 3)]
        for sums in draw.sample(("ranks", "hosts"), 2):
            chosen = f'--set=workers.trainer.sums="{sums}"'
            with running(1, "four_trainers", "--layout=given", *places, chosen) as (network, run):
                network.set(rate=rate)
                found[f"by {sums}, steps/s"] = speed(run, 2.0 if short else 15.0)
                run.interrupt()
        yield {**found, "per host, of by ranks": found["by hosts, steps/s"] / found["by ranks, steps/s"]}

    return measure


def best(medians: Mapping[str, float]) -> Figures:
    """Return the best layout of each side by its median, and how they compare."""
    found, reached = dict[str, float | str](), list[float]()
    for side in SIDES:
        chosen = max((f"{side}, {name}" for name in LAYOUTS), key=medians.__getitem__)
        found[f"best of {side}"] = chosen.partition(", ")[2]
        reached.append(medians[chosen])
    return {**found, "of processes": reached[0] / reached[1]}
