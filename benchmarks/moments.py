"""What a run survives at each of its moments: a short run gets one fault, at a random
moment of its start-up, of an evaluation, as it writes a checkpoint, as it ends, or at
any.

    python benchmarks/moments.py                     # each fault at 20 moments
    python benchmarks/moments.py --times 1 apart/main rows/kill

Faults of workers, environments, disks, simulators and servers are to change nothing: the
run comes to its limit. One that is told to end by a signal, or whose main process is
killed, is to leave nothing but a checkpoint (after a signal that of its last update), and
the same command is to go on from there to the limit. A run that begins while its server
is away, or its disk full, is to end at once, with an error that says so, and to come to
its limit later. Of runs in slots the ratio is to be exact; of `rows` and `equal-rows`
every row that was trained on one that was played, and none trained on twice
(`identified.py`). It prints how many went so, what became of the others, and how long
those that were to end took for it. It ends with 1 where any did not go so, or was over
before its fault could come.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import floor
from pathlib import Path
from shutil import rmtree
from typing import Any

import identified
import outside
from fault_rows.runs import processes
from faulty import FAULTS, LONGEST, Run, apart, equal, in_threads, stop_for

from tidemill import Experiment
from tidemill.core.errors import TidemillError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import SUMMARY
from tidemill.store.checkpoint import read_newest

SHORT = 100  # updates of a run
MOMENTS = ("start", "evaluation", "saving", "ending", "any")
TRIES = 5  # for a moment that a run may be past when the fault comes
ENDS, GONE = 20.0, 5.0  # seconds to end: by a signal, without its main process
OFTEN = ["--set=workers.trainer.checkpoint_seconds=0.2"]
LIMITED = [f"--set=limits.updates={SHORT}", *OFTEN]
SMALL = [*LIMITED, "--set=workers.trainer.algorithm.minibatch_size=64", "--set=workers.actor.lanes=2"]
WELL = "as it is to be"
AWAY = ("nothing answers there", "is no environment server", "free space or make")
"""What a run says that begins without its server, or its disk."""


@dataclass(frozen=True)
class Work:
    """What a run does, by `function`, until its metric `unit` is `length`.

    watchers: who evaluates
    beside: function that returns what the run needs beside itself, given a folder
    check: function that returns what is wrong with a run that came to its limit
    """

    function: Callable[[], Experiment]
    words: Sequence[str] = tuple(SMALL)
    launch: str = "processes"
    unit: str = "update"
    length: int = SHORT
    watchers: tuple[str, ...] = ("judge", "evaluation")
    beside: Callable[[Path], AbstractContextManager[Any]] = nullcontext
    check: Callable[[Run], list[str]] = lambda run: []


def check_ratio(run: Run) -> list[str]:
    """Return what is wrong with the counts of a run in slots."""
    facts = read_newest(run.path / "checkpoints" / "policy").facts
    n = facts["limiter"]
    owed = 0 if n["waived"] is None else floor(max(0, n["committed"] - n["waived"]) * Fraction(1, 2))
    right = (
        n["committed"] == facts["steps"] == outside.STEPS
        and n["started"] == n["committed"] + n["voided"]
        and n["tasks"] == facts["updates"] == owed
    )
    return [] if right else [f"the counts are {n}"]


def check_rows(run: Run) -> list[str]:
    """Return what is wrong with the rows that a run has trained on."""
    rows, told = identified.found(run.folder, SHORT), run.newest()
    undone = any(event.what == "went back" for event in read_events(run.path))
    undone = undone or told["dropped"] or "was killed" in run.output.read_text()
    if rows.trained != told["step"]:
        rows.wrong.append(f"{rows.trained} steps were trained on, and {told['step']:.0f} are counted")
    if rows.gaps and not undone:
        rows.wrong.append(f"{rows.gaps} steps are missing")
    ROWS.append(rows)
    return rows.wrong


ROWS: list[identified.Rows] = []
"""Those of all runs that were looked at."""

Strike = Callable[[Run, random.Random, str], None]


def _suffer(fault: str) -> Strike:
    return lambda run, draw, whose: run.suffer(fault, draw, whose)


def _ask_for(fault: str) -> Strike:
    return lambda run, draw, whose: (run.faults / fault).touch()


def _stop(run: Run, draw: random.Random, whose: str) -> None:
    stop_for(run.process, draw.uniform(1.0, 8.0))


SUFFERED: dict[str, Strike] = {fault: _suffer(fault) for fault in FAULTS}
SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP}
ENDINGS: dict[str, Strike | None] = dict.fromkeys([*SIGNALS, "main"])
LANES = {fault: SUFFERED[fault] for fault in ("raise", "nan", "huge", "hang")}
SLOTS = Work(outside.in_slots, OFTEN, unit="step", length=outside.STEPS, watchers=("",), check=check_ratio)
SLOT_FAULTS = {fault: SUFFERED[fault] for fault in ("raise", "nan", "hang")}
SERVERS: dict[str, Strike | None] = {
    "restart": outside.restart_server,
    "stop": outside.stop_server,
    "rubbish": outside.confuse_server,
}
IDENTIFIED: dict[str, Strike | None] = {"kill": SUFFERED["kill"], "TERM": None, "main": None}
KILL, STOP = (partial(outside.strike_simulator, number=number) for number in (signal.SIGKILL, signal.SIGSTOP))
WORKS: dict[str, tuple[Work, dict[str, Strike | None]]] = {
    "apart": (Work(apart), SUFFERED | ENDINGS),
    "equal": (Work(equal), SUFFERED | ENDINGS),
    "threads": (Work(in_threads, launch="threads"), LANES | {"stop": _stop} | ENDINGS),
    "disk": (
        Work(apart, beside=outside.small_disk),
        {"full": outside.fill_disk, "read-only": outside.forbid_disk},
    ),
    "python": (
        Work(outside.in_simulators, beside=outside.python_world),
        {"kill": KILL, "stop": STOP, "close": _ask_for("close"), "keep": _ask_for("keep")},
    ),
    "c": (Work(outside.in_simulators, beside=outside.c_world), {"kill": KILL, "stop": STOP}),
    "server": (Work(outside.on_server, beside=outside.server), SERVERS),
    "slots": (SLOTS, SLOT_FAULTS | {"kill": SUFFERED["kill"]} | ENDINGS),
    "slots-threads": (replace(SLOTS, launch="threads"), SLOT_FAULTS),
    "server-slots": (replace(SLOTS, function=outside.in_slots_of_server, beside=outside.server), SERVERS),
    "rows": (Work(identified.rows_apart, LIMITED, check=check_rows), IDENTIFIED),
    "equal-rows": (Work(identified.rows_equal, LIMITED, check=check_rows), IDENTIFIED),
}
"""What a run does, and what may strike it; None: what ends it."""
KINDS = [f"{work}/{strike}" for work, (_, strikes) in WORKS.items() for strike in strikes]


def come_to(moment: str, run: Run, work: Work, draw: random.Random, at_once: bool) -> str:
    """Wait until a run is at such a moment; a start begins `at_once`, or with the first
    worker. Return whom the fault is to strike, as a part of a name."""

    def done(share: float) -> bool:
        return run.newest().get(work.unit, 0) >= share * work.length

    if moment == "start":
        if not at_once:
            run.wait_for(lambda: run.path.exists() if work.launch == "threads" else processes(run.main.pid))
        time.sleep(draw.uniform(0.0, 1.5))
    elif moment == "evaluation":
        share = draw.choice([0.2, 0.4, 0.6])  # where iterations end
        run.wait_for(lambda: done(share))
        time.sleep(draw.uniform(0.0, 0.3))
        return draw.choice(work.watchers)
    elif moment == "saving":
        share = draw.uniform(0.05, 0.5)
        run.wait_for(lambda: done(share))
        before = {*run.path.glob("checkpoints/policy/*")}
        run.wait_for(lambda: {*run.path.glob("checkpoints/policy/*")} != before)
        return "trainer"
    elif moment == "ending":
        run.wait_for(lambda: done(0.95))
        time.sleep(draw.uniform(0.0, 0.3))
    else:
        share = draw.uniform(0.1, 1.0)
        run.wait_for(lambda: done(share))
    return ""


def one(kind: str, moment: str, draw: random.Random) -> tuple[str, float | None]:
    """Have a fault of this kind at such a moment. Return what became of the run, in
    words, and the seconds that it took to end where it was to."""
    try:
        return _one(kind, moment, draw)
    except outside.LeftBehind as error:
        return str(error), None


def _one(kind: str, moment: str, draw: random.Random) -> tuple[str, float | None]:
    what, _, name = kind.partition("/")
    work, strike = WORKS[what][0], WORKS[what][1][name]
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as place, work.beside(Path(place)) as beside:
            run = Run(Path(place), work.function, *work.words, launch=work.launch, beside=beside)
            try:
                whose = come_to(moment, run, work, draw, at_once=strike is None)
                if run.main.poll() is not None:
                    continue
                if strike is not None:
                    strike(run, draw, whose)
                    return _told(goes_on(run, work)), None
                wrong, seconds = ends(run, work, name)
                over = complete(run)
                return _told(wrong or (goes_on if over else again)(run, work)), seconds
            finally:
                run.kill()
    return "was over before", None


def _told(wrong: Sequence[str]) -> str:
    return "; ".join(wrong) or WELL


def goes_on(run: Run, work: Work) -> list[str]:
    """Wait until a run comes to its limit. Return what is wrong with it."""
    status, reached = run.end(), run.newest().get(work.unit, 0)
    places = [run.path, *run.temporary.glob("tidemill-run-*")]
    at_last = max((saved(place, work) or 0 for place in places), default=0)
    for refuge in places[1:]:
        rmtree(refuge)
    wrong = [f"left {left}"] if (left := run.left()) else []
    if status == 1 and at_last == work.length and "summary.json cannot be written" in run.said():
        return wrong  # it ended on a full disk, and has its last weights
    if status == 1 and reached == 0 and any(words in run.said() for words in AWAY):
        return wrong + again(run, work)
    if (status != 0 and not complete(run)) or reached != work.length:
        return [f"status {status} at {work.unit} {reached:.0f}: {run.said()}", *wrong]
    updates = [record["update"] for record in read_metrics(run.path) if "update" in record]
    if updates != sorted(updates) or (work.unit == "update" and len(updates) > len(set(updates))):
        wrong.append("updates are told twice")
    return wrong + work.check(run)


def ends(run: Run, work: Work, strike: str) -> tuple[list[str], float]:
    """End a run. Return what is wrong with that, and the seconds that it took."""
    at, allowed = time.monotonic(), GONE if strike == "main" else ENDS
    status = run.end(signal.SIGKILL if strike == "main" else SIGNALS[strike])
    while run.processes() and time.monotonic() < at + LONGEST:
        time.sleep(0.02)
    seconds = time.monotonic() - at
    wrong = [f"it took {seconds:.0f} s to end"] if seconds > allowed else []
    if left := run.left(halves=strike != "main"):
        wrong.append(f"left {left}")
    if strike == "main" or complete(run):
        return wrong, seconds
    number, told = SIGNALS[strike], run.newest()
    if status != 128 + number and (status != -number or run.path.exists()):
        wrong.append(f"status {status}: {run.said()}")
    if told and saved(run.path, work) != told[work.unit]:
        wrong.append(f"saved at {work.unit} {saved(run.path, work)} of {told[work.unit]:.0f}")
    return wrong, seconds


def complete(run: Run) -> bool:
    """Return whether a run has told its end: what comes then ends its process as it ends
    any program, and leaves nothing to go on with."""
    summary = run.path / SUMMARY
    return summary.exists() and bool(json.loads(summary.read_text())["status"] == "completed")


def saved(path: Path, work: Work) -> int | None:
    """Return how far a run was at the newest checkpoint in its folder; None where there
    is none."""
    try:
        return int(read_newest(path / "checkpoints" / "policy").facts[f"{work.unit}s"])
    except TidemillError:
        return None


def again(run: Run, work: Work) -> list[str]:
    """Go on with a run that was ended, to its limit. Return what is wrong with that."""
    before = saved(run.path, work)
    run.begin(*["--anew"] * (before is None and run.path.exists()))
    wrong = goes_on(run, work)
    if before is not None and "goes on with this run" not in run.output.read_text():
        wrong.append(f"it did not go on from {work.unit} {before}")
    return wrong


def main() -> int:
    """Do what the command line says. Return 1 where a run was not as it is to be, else
    0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=[])
    parser.add_argument("--times", type=int, default=4, help="each fault at so many moments of each kind")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leaves no run behind
    wrong = 0
    for kind in given.kinds or KINDS:
        draw, took = random.Random(f"{given.seed} {kind}"), list[float]()
        ROWS.clear()
        for moment in MOMENTS:
            became = Counter[str]()
            for _ in range(given.times):
                what, seconds = one(kind, moment, draw)
                became[what] += 1
                took += [] if seconds is None else [seconds]
            told = "; ".join(f"{count} {what}" for what, count in became.most_common())
            print(f"{kind:<16} {moment:<10} {told}", flush=True)
            wrong += given.times - became[WELL]
        if took:
            print(f"{kind:<16} took {statistics.median(took):.1f} ({max(took):.1f}) s to end", flush=True)
        if ROWS:
            names = ("played", "trained", "failed", "tails", "gaps")
            print(f"{kind:<16} steps", {name: sum(getattr(rows, name) for rows in ROWS) for name in names})
    if wrong:
        print(f"{wrong} runs were not {WELL}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
