"""How fast is a command where another program takes one of the cores, beside the same
command kept to the free ones?

    python benchmarks/neighbour.py [WORK ...] [--runs 3] [--seconds 8] [-- --layout L]

By turns: alone on all cores, beside a busy loop on the last core, and kept to the other
cores with the loop running; env steps per second after the first 1.5 s of training,
medians (lowest … highest), the ratio of the last two in each round, and their median. A
round in which other programs took more than a tenth of a core is run again, three times
at most. What stands after `--` goes to `tidemill train`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

WARM = 1.5  # seconds of training that do not count
WORKS = Path(__file__).resolve().with_name("works.py")
WAYS = ("alone", "beside", "pinned")
OTHERS = 0.1  # cores that other programs may take
AGAIN = 3


def busy() -> float:
    """Return the seconds of processors that all programs have taken, and the host."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split()[1:9])
    return float(user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """Return the seconds of processors that programs started here have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def speed(work: str, way: str, seconds: float, more: list[str]) -> float:
    """Run `work` once, and return its env steps per second."""
    every = sorted(os.sched_getaffinity(0))
    cores = every[:-1] if way == "pinned" else every
    taskset = ["taskset", "-c", ",".join(map(str, cores))]
    with tempfile.TemporaryDirectory() as folder:
        loop = None
        if way != "alone":
            loop = subprocess.Popen(
                ["taskset", "-c", str(every[-1]), sys.executable, "-c", "while True: pass"]
            )
        try:
            words = [
                "train",
                f"{WORKS}:{work}",
                "--run-dir",
                "run",
                "--set",
                f"limits.seconds={WARM + seconds}",
            ]
            subprocess.run(
                [*taskset, sys.executable, "-m", "tidemill.cli.main", *words, *more],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        finally:
            if loop is not None:
                loop.kill()
                loop.wait()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [(record["time/seconds"], record["step"]) for record in map(json.loads, lines)]
    (began, first), (ended, last) = next(item for item in found if item[0] >= WARM), found[-1]
    return float(last - first) / float(ended - began)


def one_round(work: str, seconds: float, more: list[str]) -> tuple[list[float], float]:
    """Run `work` in each way, and return its env steps per second and how many cores
    other programs took meanwhile."""
    began, others = time.monotonic(), busy() - own()
    speeds = [speed(work, way, seconds, more) for way in WAYS]
    return speeds, (busy() - own() - others) / (time.monotonic() - began)


def main() -> None:
    """Print a line per work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("works", nargs="*", default=["cartpole", "half_cheetah"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    given, more = parser.parse_args(words[:cut]), words[cut + 1 :]
    for work in given.works:
        runs: list[list[float]] = []
        most = 0.0
        for _ in range(given.runs):
            tried = one_round(work, given.seconds, more)
            for _ in range(AGAIN):
                if tried[1] <= OTHERS:
                    break
                tried = min(tried, one_round(work, given.seconds, more), key=lambda found: found[1])
            runs.append(tried[0])
            most = max(most, tried[1])
        columns = dict(zip(WAYS, zip(*runs, strict=True), strict=True))
        told = ", ".join(
            f"{way} {median(found):,.0f} ({min(found):,.0f} … {max(found):,.0f})"
            for way, found in columns.items()
        )
        ratios = [beside / pinned for _, beside, pinned in runs]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{work}: {told}; beside / pinned {median(ratios):.2f} ({each}); others took up "
            f"to {most:.2f} cores",
            flush=True,
        )


if __name__ == "__main__":
    main()
