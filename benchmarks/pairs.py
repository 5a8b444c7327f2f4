"""Two checkouts by turns: whether a change costs speed.

    python benchmarks/pairs.py --before ../before cartpole slots --pairs 15 --seconds 6

Each checkout has a `.venv` of its own (`make test` makes it) and its own `works.py`. A
work runs for `--seconds` in one, then in the other; the next pair begins with the other
one. Told are steps per second (by the records' own times) and steps per processor second
of the whole run after its start, medians, and the ratio after / before: its median over
the pairs and the interval that has the true median with 95 % (by order statistics, David
& Nagaraja 2003, section 7.1). Ends with 1 if the interval of either lies below `--least`
for any work.
"""

import argparse
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

WORKS = (
    "cartpole",
    "cartpole_vector",
    "half_cheetah",
    "pong",
    "pong_one_epoch",
    "cartpole_served",
    "slots",
)
WARM = 1.5  # seconds of training that do not count
LOOK = 0.5  # seconds between two looks then: one takes 2 to 3 ms of a core
TAIL = 1 << 16  # bytes of the records that are read: many of them
TICK = 1 / os.sysconf("SC_CLK_TCK")


def interval(ratios: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval that has the true median with `confidence` at least, as far as
    so few values can tell: the smallest and the greatest for fewer than six."""
    ordered, count = sorted(ratios), len(ratios)
    below, outside = 0, 0.0
    while below < count // 2:
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        below += 1
    place = max(below - 1, 0)
    return ordered[place], ordered[count - 1 - place]


def processor_seconds(root: int) -> float:
    """Return the processor seconds so far of process `root` and all that descend from
    it."""
    parents, used = dict[int, int](), dict[int, float]()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            used[pid] = TICK * sum(map(int, fields[11:15]))
    total = 0.0
    for pid, seconds in used.items():
        above = pid
        while above not in (root, 0, 1) and above in parents:
            above = parents[above]
        total += seconds * (above == root)
    return total


def so_far(folder: Path) -> tuple[int, float]:
    """Return the env steps of a run's last record of an update, and after how many
    seconds of training it was made; zeros before the first."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0, 0.0
    for line in reversed(lines):
        try:
            record = json.loads(line)
            return int(record["step"]), float(record["time/seconds"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0, 0.0


def one(work: str, seconds: float) -> dict[str, float]:
    """Run `work` of the checkout in the working directory; return its two speeds."""
    import tidemill

    works = Path("benchmarks/works.py").resolve()
    made = runpy.run_path(str(works))[work]()
    if work.startswith("pong"):  # whose updates of 32 lanes take longer than a run here
        trainer = made.workers["trainer"]
        smaller = trainer.replace(algorithm=trainer.algorithm.replace(minibatch_size=256))
        actors = made.workers["actor"].replace(lanes=8)
        made = made.replace(workers={"actor": actors, "trainer": smaller})
    limits = tidemill.Limits(seconds=WARM + seconds, updates=10**12)
    seen: list[tuple[float, float, int, float]] = []

    with tempfile.TemporaryDirectory(prefix="tidemill-pairs-") as root:
        folder, done = Path(root) / "run", threading.Event()

        def look() -> None:
            began = 0.0
            while not done.wait(LOOK if seen else 0.05):
                steps, seconds = so_far(folder)
                if steps:
                    now = time.perf_counter()
                    began = began or now
                    used = processor_seconds(os.getpid()) if now - began >= WARM else 0.0
                    # less: workers have ended
                    if used and (not seen or (steps > seen[-1][2] and used > seen[-1][1])):
                        seen.append((now, used, steps, seconds))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        settings: dict[str, Any] = {"quiet": True, "layout": "given", "source": works, "run_dir": folder}
        tidemill.train(made.replace(limits=limits), **settings)
        done.set()
        watcher.join()
    if len(seen) < 2:
        raise SystemExit(
            f"{work} finished fewer than two updates after its start; give it longer: --seconds N"
        )
    first, last = seen[0], seen[-1]
    wall, used, steps, seconds = (b - a for a, b in zip(first, last, strict=True))
    speed = steps / seconds
    return {"steps/s": speed, "steps/cpu-s": speed * wall / used}


def run(checkout: Path, work: str, seconds: float) -> dict[str, float]:
    """Run `work` in `checkout`, in a process of its own."""
    command = [
        checkout / ".venv/bin/python",
        Path(__file__).resolve(),
        "--one",
        work,
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "works", nargs="*", metavar="WORK", help=f"functions of works.py; none: {', '.join(WORKS)}"
    )
    parser.add_argument("--before", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--least", type=float, default=0.98, help="the ratio that must not be excluded")
    parser.add_argument("--json", type=Path, help="append every pair to this file, and take up what it has")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.seconds)))
        return 0
    if options.before is None:
        parser.error("--before DIR: name the checkout to compare with")
    before, after = options.before.resolve(), Path(__file__).resolve().parent.parent
    worse = []
    for work in options.works or WORKS:
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        if options.json and options.json.exists():
            told = map(json.loads, options.json.read_text().splitlines())
            pairs = [(line["before"], line["after"]) for line in told if line["work"] == work]
        while len(pairs) < options.pairs:
            order = (before, after) if len(pairs) % 2 == 0 else (after, before)
            found = {checkout: run(checkout, work, options.seconds) for checkout in order}
            pairs.append((found[before], found[after]))
            if options.json:
                with options.json.open("a") as file:
                    file.write(
                        json.dumps({"work": work, "before": found[before], "after": found[after]}) + "\n"
                    )
        for unit in ("steps/s", "steps/cpu-s"):
            ratios = [after_[unit] / before_[unit] for before_, after_ in pairs]
            low, high = interval(ratios)
            one_, other = (median(found[unit] for found in side) for side in zip(*pairs, strict=True))
            print(
                f"{work:<16} {unit:<12} {one_:>10,.0f} -> {other:>10,.0f}   ratio {median(ratios):.3f} "
                f"[{low:.3f}, {high:.3f}], {len(pairs)} pairs",
                flush=True,
            )
            if high < options.least:
                worse.append(f"{work} ({unit})")
    if worse:
        print(f"slower: {', '.join(worse)}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
