"""Is a run that is killed at every update, and goes on each time, the one that was never
cut, in every bit? Short runs of every kind that resumes exactly say, by each launcher.

    python benchmarks/exact_kills.py                         # all of it
    python benchmarks/exact_kills.py equal judged --launch processes --cut kill trainer

Each run saves after every update, and is cut at each of them: by kill -9 of its main
process at the update (`kill`) or at a random moment until the next but one (`later`), or
by SIGTERM (`stop`); then the same command goes on with it, to be cut an update later. In
processes it is also cut by kill -9 of single workers of a group (`actor`, say),
by turns at the update and at a random moment after it, in two runs of which each has half
of the updates; these go on by themselves. In the end all arrays and facts of the newest
checkpoints and of trainers' parts of cuts are compared with those of a run that goes
straight through (elsewhere than inline: in threads), and the metrics of all updates and
evaluations; inline, where it is no matter of time how far each worker was and what the
runner has heard, the parts of all workers and all metrics but times. Then the run is
resumed once more, for two updates beyond its limit, and compared likewise with one that
goes straight through to there: what workers held at the last cut shows in what comes of
it. With a replay memory that alone is compared, since steps that no update waits for are
done or not, as the run is cut before its end or not.

A line for each: how many cuts (a run may be over before the last ones, since elsewhere
than inline it goes on while its main process hears of an update), how many of them came
before there was anything to go on from (the run began anew), how many things were
compared, and whether all were equal, or what differs first. Since a run that begins anew
leaves the same bits whatever a resume does, it may do so only where no whole cut is
there, after the first four cuts by `kill` and `later` (an update takes milliseconds
here, and a busy disk longer), and never once it was told to end, or has lost single
workers alone. Ends with 1 where something differs, or began anew otherwise.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from exact_experiments import KINDS
from fault_rows.runs import processes

from tidemill import Experiment, ReplayTrainer, resume, train
from tidemill.core.errors import CheckpointError, RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.cuts import can_go_on
from tidemill.run.events import read_events
from tidemill.run.folder import SUMMARY, RunFolder
from tidemill.run.run_control import RunControl
from tidemill.training.check_resume import BEYOND, compare_runs

UPDATES = 8
LAUNCHES = ("inline", "threads", "processes")
WHOLE = ("kill", "later", "stop")
"""What all of a run ends by."""
LONGEST = 300.0  # seconds of a life, however busy the machine is
COMPLETED, INTERRUPTED, ANEW = 0, 3, "anew"
EARLY = {"kill": 4, "later": 4}
"""Which cut is the last that may come before there is a whole cut to go on from."""
Strikes = Sequence[tuple[int, float]]
"""At which updates something is cut, and seconds after these."""


def live(folder: Path, kind: str, launch: str, updates: int, cut: str, strikes: Strikes) -> int:
    """Begin a run, or go on with it by the same command. Return what it ended with.
    Raises what that raises, unless it may begin anew."""
    left = list(strikes)
    cuts = strikes[0][0] - 1 if strikes else updates  # of all of it, before this life

    def on_update(record: dict[str, float], control: RunControl) -> None:
        control.save()
        if left and record["update"] >= left[0][0]:
            if seconds := left.pop(0)[1]:
                timer = threading.Timer(seconds, strike, [cut])
                timer.daemon = True
                timer.start()
            else:
                strike(cut)

    made = KINDS[kind](launch == "inline", updates)
    settings: dict[str, Any] = {"launch": launch, "layout": "given", "quiet": True, "log": ""}
    settings |= {"run_dir": folder, "on_update": on_update}
    try:
        result = train(made, **settings)
    except (RunError, CheckpointError):
        if (folder / SUMMARY).exists() or not may_begin_anew(folder, made, cut, cuts):
            raise
        with (folder.parent / ANEW).open("a") as file:
            file.write(".")
        result = train(made, anew=True, **settings)
    return COMPLETED if result.summary["status"] == "completed" else INTERRUPTED


def may_begin_anew(folder: Path, experiment: Experiment, cut: str, cuts: int) -> bool:
    """Return whether a run that was cut so, and so often, may have nothing to go on from:
    the last of these was early, and its folder has no whole cut."""
    if not folder.exists() or can_go_on(RunFolder(folder), experiment):
        return False
    return 0 < cuts <= EARLY.get(cut, 0)


def begun_anew(folder: Path) -> int:
    """Return how often the run in `folder` began anew."""
    with suppress(FileNotFoundError):
        return len((folder.parent / ANEW).read_text())
    return 0


def live_on(folder: Path, launch: str, updates: int) -> int:
    """Go on with a run that is complete to so many updates. Return what it ended with."""
    result = resume(folder, launch=launch, limits={"updates": updates}, quiet=True, trust=True, log="")
    return COMPLETED if result.summary["status"] == "completed" else INTERRUPTED


def strike(cut: str) -> None:
    """Cut the run that this process leads."""
    if cut in WHOLE:
        os.kill(os.getpid(), signal.SIGTERM if cut == "stop" else signal.SIGKILL)
        return
    for name, process in processes(os.getpid()).items():
        if any(worker.startswith(cut) for worker in name.split("+")):
            with suppress(psutil.Error):
                process.kill()
            return


def life(lived: Callable[..., int], *arguments: Any) -> int:
    """Return the status, or the signal below 0, with which a life in a process of its own
    ends: a call of `lived`."""
    if not (child := os.fork()):
        status = 1
        try:
            status = lived(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    until = time.monotonic() + LONGEST
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def cut_all(
    folder: Path, kind: str, launch: str, updates: int, cut: str, delay: Callable[[], float]
) -> tuple[int, str]:
    """Cut a whole run at every update. Return how often it was, and how that ended
    otherwise than it is to."""
    expected = INTERRUPTED if cut == "stop" else -signal.SIGKILL
    for at in range(1, updates + 1):
        status = life(live, folder, kind, launch, updates, cut, [(at, delay() if cut == "later" else 0.0)])
        if status not in (COMPLETED, expected):
            return at - 1, f"the life that was to be cut at update {at} ended with {status}"
        if status == COMPLETED or is_over(folder):  # before it was cut
            return at - 1, ""
    status = life(live, folder, kind, launch, updates, cut, [])
    return updates, "" if status == COMPLETED else f"the last life ended with {status}"


def is_over(folder: Path) -> bool:
    """Return whether a run has come to its limit, and written so."""
    with suppress(FileNotFoundError):
        status = json.loads((folder / SUMMARY).read_text())["status"]
        return bool(status == "completed")
    return False


def cut_workers(
    folder: Path, kind: str, updates: int, cut: str, first: int, delay: Callable[[], float]
) -> str:
    """Kill a worker at every other update, from the `first` one on. Return how that ended
    otherwise than it is to."""
    strikes = [(at, delay() if number % 2 else 0.0) for number, at in enumerate(range(first, updates + 1, 2))]
    status = life(live, folder, kind, "processes", updates, cut, strikes)
    if status != COMPLETED:  # who dies as the run ends leaves it to the next one
        status = life(live, folder, kind, "processes", updates, cut, [])
    return "" if status == COMPLETED else f"it ended with {status}"


def curves(folder: Path) -> list[dict[str, float]]:
    """Return all that the run has told of its updates, but for times, and for `dropped`,
    of which trainers tell with an update of their own."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/") and name != "dropped"}
        for record in read_metrics(folder)
        if "update" in record and "limiter/started" not in record  # which is told by time
    ]


def told(records: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the updates that were told of, in their order: by trainer where there are
    several, of whom another one may be ahead each time."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name in [name for name in record if name.endswith("/update")] or ["update"]:
            found.setdefault(name, []).append(record[name])
    return found


def differences(kind: str, launch: str, updates: int, straight: Path, cut: Path) -> tuple[int, str]:
    """Return how many things were compared, and what differs first."""
    inline = launch == "inline"
    made = KINDS[kind](inline, updates)
    compared, differing, first = compare_runs(made, straight, cut, inline)
    ours, theirs = curves(straight), curves(cut)
    if first:
        differing.append(first[1])
    if inline:
        differing += filter(None, map(other, ours, theirs))
        compared += sum(map(len, ours))
    if told(ours) != told(theirs):
        differing.append(f"updates {told(ours)} and {told(theirs)} are told")
    return compared, differing[0] if differing else ""


def other(one: dict[str, float], two: dict[str, float]) -> str:
    """Return which number of two records differs first, and how."""
    for name in sorted(one.keys() | two.keys()):
        ours, theirs = one.get(name), two.get(name)
        if ours != theirs and not (ours != ours and theirs != theirs):
            return f"metric {name} of env step {one['step']:.0f}: {ours} and {theirs}"
    return ""


def rows(kind: str, launch: str, given: argparse.Namespace) -> Iterator[bool]:
    """Cut runs of a kind in all ways, print a line for each, and yield whether all was
    equal."""
    draw = random.Random(f"{given.seed} {kind} {launch}")
    with tempfile.TemporaryDirectory(prefix="tidemill-exact-kills-") as place:
        straight, beyond = Path(place) / "straight", Path(place) / "beyond"
        by, further = "inline" if launch == "inline" else "threads", given.updates + BEYOND
        for folder, updates in ((straight, given.updates), (beyond, further)):
            if status := life(live, folder, kind, by, updates, "", []):
                raise SystemExit(f"{kind}, straight through, in {by} ended with {status}")
        times = [record["time/seconds"] for record in read_metrics(straight) if "update" in record]
        pace = statistics.median(after - before for before, after in pairwise(times))

        def delay() -> float:
            return draw.uniform(0.0, 2 * pace)

        for cut in ways(kind, launch, given):
            wrong, cuts, anew, compared = "", 0, 0, 0
            for first in (1,) if cut in WHOLE else (1, 2):
                folder = Path(place) / f"{cut}-{first}" / "run"
                folder.parent.mkdir()
                if cut in WHOLE:
                    cuts, wrong = cut_all(folder, kind, launch, given.updates, cut, delay)
                else:
                    wrong = wrong or cut_workers(folder, kind, given.updates, cut, first, delay)
                    cuts += sum(event.what == "went back" for event in read_events(folder))
                anew += begun_anew(folder)
                if not wrong and not KINDS[kind](False, further).groups(ReplayTrainer):
                    count, wrong = differences(kind, launch, given.updates, straight, folder)
                    compared += count
                if not wrong and (status := life(live_on, folder, launch, further)):
                    wrong = f"resumed once more it ended with {status}"
                if not wrong:
                    count, wrong = differences(kind, launch, further, beyond, folder)
                    compared += count
                    wrong = wrong and f"resumed once more: {wrong}"
            print(
                f"| {kind} | {launch} | {cut} | {cuts} | {anew} | {compared:,} | {wrong or 'equal'} |",
                flush=True,
            )
            yield not wrong


def ways(kind: str, launch: str, given: argparse.Namespace) -> list[str]:
    """Return in what ways runs of a kind are cut."""
    groups = KINDS[kind](False, given.updates).workers if launch == "processes" else ()
    return [cut for cut in (*WHOLE, *groups) if cut in given.cut or not given.cut]


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "kinds", nargs="*", choices=[*KINDS, []], default=[], metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--launch", nargs="*", choices=LAUNCHES, default=LAUNCHES)
    parser.add_argument("--cut", nargs="*", default=(), help="kill, later, stop, or groups of workers")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("| run | launch | cut by | cuts | anew | compared | |\n|---|---|---|---|---|---|---|", flush=True)
    equal = [
        each for launch in given.launch for kind in given.kinds or KINDS for each in rows(kind, launch, given)
    ]
    print(f"\n{sum(equal)} of {len(equal)} are equal to the run that was not cut")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
