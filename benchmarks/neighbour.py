"""How fast is a command where another program takes one of the cores, beside the same
command kept to the free ones?

    python benchmarks/neighbour.py [WORK ...] [--runs 3] [--seconds 8] [-- --layout L]

By turns: alone on all cores, beside a busy loop on the last core, and kept to the other
cores with the loop running; env steps per second after the first 1.5 s of training,
medians (lowest … highest), and the ratios of the medians. What stands after `--` goes to
`tidemill train`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

WARM = 1.5  # seconds of training that do not count
WORKS = Path(__file__).resolve().with_name("works.py")
WAYS = ("alone", "beside", "pinned")


def speed(work: str, way: str, seconds: float, more: list[str]) -> float:
    """Run `work` once, and return its env steps per second."""
    every = sorted(os.sched_getaffinity(0))
    own = every[:-1] if way == "pinned" else every
    taskset = ["taskset", "-c", ",".join(map(str, own))]
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
    return (last - first) / (ended - began)


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
        runs = [[speed(work, way, given.seconds, more) for way in WAYS] for _ in range(given.runs)]
        columns = dict(zip(WAYS, zip(*runs, strict=True), strict=True))
        middle = {way: median(found) for way, found in columns.items()}
        told = ", ".join(
            f"{way} {middle[way]:,.0f} ({min(found):,.0f} … {max(found):,.0f})"
            for way, found in columns.items()
        )
        ratio = middle["beside"] / middle["pinned"]
        print(f"{work}: {told}; beside / pinned {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
