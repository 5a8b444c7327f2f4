"""What a run survives at each of its moments: a short run gets one fault, at a random
moment of its start-up, of an evaluation, as it writes a checkpoint, as it ends, or at
any.

    python benchmarks/moments.py                     # each fault at 20 moments
    python benchmarks/moments.py --times 1 apart/main rows/kill
    python benchmarks/moments.py --moment any --moment saving buffers population

Faults of workers, environments, memory, disks, shares, trackers, simulators and servers
are to change nothing: the run comes to its limit. Where a disk is full then, or a share
hangs, its last weights are in `$TMPDIR`; what kills for want of memory is told as that,
and a tracker has every record, or the run says that it lacks some. One that is told to
end by a signal, or whose main process is killed, is to leave nothing but a checkpoint
(after a signal that of its last update), and the same command is to go on from there to
the limit: where the newest is damaged then (`damaged`, whose `start` is with the first
checkpoint) from the one before. A run that
begins while its server is away, or its disk full, or whose simulator is killed before it
first answers, is to end at once, with an error that says so, and to come to its limit
later. Of
runs with a replay memory the ratio is to be exact; of `rows` and `equal-rows` every row
that was trained on one that was played, and none trained on twice (`identified.py`). It
prints how many went so, what became of the others, and how long those that were to end
took for it. A run whose fault did not come counts for nothing, and is done again, so
often at most (`TRIES`): which was over before, where nobody was there whom it should
strike, and no checkpoint to damage, where the system killed nobody for want of memory,
or where it still waits for somebody to take it (of environments, which look for it every
32 steps; as a run ends it may well come too late). How many these were is printed, too.
It ends with 1 where any run did not go as it is to, or no fault came.
"""

import argparse
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import floor, inf
from pathlib import Path
from shutil import rmtree
from typing import Any

import identified
import outside
from fault_rows.runs import EXPERIMENTS, processes
from fault_rows.storage import WEIGHTS, cut, flip
from fault_rows.taken import MET
from faulty import (
    DEADLINE,
    FAULTS,
    LONGEST,
    WATCHED,
    NoFault,
    Run,
    apart,
    buffered,
    equal,
    in_threads,
    population,
    stop_for,
    watched,
    watched_in_threads,
)

from tidemill import Experiment
from tidemill.core.errors import TidemillError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import SUMMARY, RunFolder
from tidemill.store.checkpoint import checkpoints, read_newest

SHORT = 100  # updates of a run
MOMENTS = ("start", "evaluation", "saving", "ending", "any")
TRIES = 10  # for a moment that a run may be past when the fault comes
ENDS, GONE = 20.0, 5.0  # seconds to end: by a signal, without its main process
TOLD = 1.0  # seconds in which what befalls somebody is told once it is noticed
OFTEN = ["--set=workers.trainer.checkpoint_seconds=0.2"]
LIMITED = [f"--set=limits.updates={SHORT}", *OFTEN]
SMALL = [*LIMITED, "--set=workers.trainer.algorithm.minibatch_size=64", "--set=workers.actor.lanes=2"]
WELL = "as it is to be"
NONE = "had no fault"
_DISK = ("free space or make",)
_SERVER = ("nothing answers there", "is no environment server")
_SIMULATOR = ("before it first answered", "and answer within start_seconds")
AWAY: dict[Any, Sequence[str]] = {
    **dict.fromkeys((outside.small_disk, outside.share), _DISK),
    outside.server: _SERVER,
    **dict.fromkeys((outside.python_world, outside.c_world), _SIMULATOR),
}
"""What a run says that begins without what it has beside itself."""
AT_LAST = (
    "summary.json cannot be written",
    "did not take the run's last checkpoint",
    "The run is complete but for that",
)
"""What one says that has its last weights, and cannot write how it ended."""
LEFT = {
    "hangs": "has not come back within .* of the run's end, and is left",
    "broken": "the tracker: no more is written there",
    "away": "the tracker lacks its last records",
}
"""What is said of a tracker that lacks records, by the file that spoils it."""


@dataclass(frozen=True)
class Work:
    """What a run does, by `function`, until its metric `unit` is `length`.

    watchers: who evaluates
    trainers: what comes before the names of metrics, of each trainer
    beside: function that returns what the run needs beside itself, given a folder
    check: function that returns what is wrong with a run that came to its limit
    came: function that returns whether the fault has come which was asked for
    """

    function: Callable[[], Experiment]
    words: Sequence[str] = tuple(SMALL)
    launch: str = "processes"
    unit: str = "update"
    length: int = SHORT
    watchers: tuple[str, ...] = ("judge", "evaluation")
    trainers: tuple[str, ...] = ("",)
    beside: Callable[[Path], AbstractContextManager[Any]] = nullcontext
    check: Callable[[Run], list[str]] = lambda run: []
    came: Callable[[Run], bool] = lambda run: not run.waiting()

    def reached(self, run: Run) -> float:
        """Return how far a run is, by its records; of several trainers that which is the
        furthest."""
        return max(
            run.newest(f"{trainer}update").get(f"{trainer}{self.unit}", 0.0) for trainer in self.trainers
        )


def check_ratio(run: Run) -> list[str]:
    """Return what is wrong with the counts of a run with a replay memory."""
    facts = read_newest(run.path / "checkpoints" / "policy").facts
    n = facts["limiter"]
    owed = 0 if n["waived"] is None else floor(max(0, n["committed"] - n["waived"]) * Fraction(1, 2))
    right = n["committed"] == facts["steps"] and n["tasks"] == facts["updates"] == owed
    return [] if right else [f"the counts are {n}, steps {facts['steps']}, updates {facts['updates']}"]


def check_slots(run: Run, held: int = 0) -> list[str]:
    """Return what is wrong with the counts of a run in slots, where every step that began
    has ended, too, but for those that are `held` at most: granted to lanes that wait for
    others of their tick."""
    n = read_newest(run.path / "checkpoints" / "policy").facts["limiter"]
    right = n["committed"] == outside.STEPS and 0 <= n["started"] - n["committed"] - n["voided"] <= held
    return check_ratio(run) if right else [f"the counts are {n}"]


def check_rows(run: Run, buffers: int = 0) -> list[str]:
    """Return what is wrong with the rows that a run has trained on, of so many buffer
    workers."""
    rows, told = identified.found(run.folder, SHORT), run.newest()
    events = read_events(run.path)
    undone = any(event.what == "went back" for event in events)
    undone = undone or told["dropped"] or "was killed" in run.output.read_text()
    if rows.trained != told["step"]:
        rows.wrong.append(f"{rows.trained} steps were trained on, and {told['step']:.0f} are counted")
    if rows.gaps > sum(event.samples for event in events) * identified.SAMPLE and not undone:
        rows.wrong.append(f"{rows.gaps} steps are missing")
    rows.wrong += identified.too_many(rows, events, told, run.commands, buffers)
    ROWS.append(rows)
    return rows.wrong


def check_watched(run: Run) -> list[str]:
    """Return what is wrong with the evaluations of a run that waits for them. What befell
    a judge just before the run's end nobody tells."""
    events = read_events(run.path)
    found = {
        int(record["evaluation/version"]): record["evaluation/return"]
        for record in read_metrics(run.path)
        if "evaluation/return" in record
    }
    wrong = [f"version {version} has {value}" for version, value in found.items() if not 0 < value <= 500]
    if missing := {*range(WATCHED, SHORT, WATCHED)} - {*found}:
        wrong.append(f"versions {sorted(missing)} were not evaluated")
    ended = max((event.time for event in events if event.what == "ended"), default=inf)
    # its folder changed last as the judge took its fault
    struck, noticed = run.judged.stat().st_mtime, DEADLINE if run.asked == "hang" else 0.0
    in_time = not run.waiting() and ended - struck > noticed + TOLD
    if in_time and not any(
        event.what in ("told", "died") and "judge-0" in event.cause + event.worker for event in events
    ):
        wrong.append("it did not tell what became of its judge")
    return wrong


def check_shortage(run: Run) -> list[str]:
    """Return what is wrong with what a run says of a kill for want of memory."""
    said = [run.output.read_text(), *(event.cause for event in read_events(run.path))]
    told = any("out of memory: its control group has no more" in text for text in said)
    return [] if told or not was_short(run) else ["it did not tell that memory was short"]


def was_short(run: Run) -> bool:
    """Return whether the system has killed any of a run for want of memory."""
    return bool(run.beside.kills)


def check_tracked(run: Run) -> list[str]:
    """Return what is wrong with what a run's tracker has been told."""
    told = [int(record["update"]) for record in read_metrics(run.path) if "update" in record]
    file = run.folder / "tracked"
    tracked = [int(line) for line in file.read_text().split()] if file.exists() else []
    met = run.folder / MET
    if tracked == told or (met.exists() and re.search(LEFT[met.read_text()], run.output.read_text())):
        return []
    return [f"the tracker has {len(tracked)} of {len(told)} records"]


ROWS: list[identified.Rows] = []
"""Those of all runs that were looked at."""

Strike = Callable[[Run, random.Random, str], None]


def _suffer(fault: str) -> Strike:
    return lambda run, draw, whose: run.suffer(fault, draw, whose)


def _kill(whose: str) -> Strike:
    """Return what kills a worker so named, once there is one."""

    def strike(run: Run, draw: random.Random, _: str) -> None:
        run.wait_for(lambda: any(whose in name for name in processes(run.main.pid)))
        run.suffer("kill", draw, whose)

    return strike


def _ask_for(fault: str) -> Strike:
    return lambda run, draw, whose: run.ask_for(fault)


def _strike_judge(run: Run, draw: random.Random, whose: str, fault: str) -> None:
    run.ask_for(fault, of_judges=True)


def _stop(run: Run, draw: random.Random, whose: str) -> None:
    stop_for(run.process, draw.uniform(1.0, 8.0))


SUFFERED: dict[str, Strike] = {fault: _suffer(fault) for fault in FAULTS}
SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP}
MAIN = ("main", "damaged")  # whose main process is killed
ENDINGS: dict[str, Strike | None] = dict.fromkeys([*SIGNALS, *MAIN])
DAMAGES = ((WEIGHTS, flip), (WEIGHTS, cut), ("manifest.json", cut))
"""What may be of a checkpoint: a file, and what is done to it."""
JUDGED: dict[str, Strike | None] = {
    fault: partial(_strike_judge, fault=fault) for fault in ("raise", "nan", "hang")
}
LANES = {fault: SUFFERED[fault] for fault in ("raise", "nan", "huge", "hang")}
SLOTS = Work(outside.in_slots, OFTEN, unit="step", length=outside.STEPS, watchers=("",), check=check_slots)
SLOT_FAULTS = {fault: SUFFERED[fault] for fault in ("raise", "nan", "hang")}
SERVERS: dict[str, Strike | None] = {
    "restart": outside.restart_server,
    "stop": outside.stop_server,
    "rubbish": outside.confuse_server,
}
TRACKER: dict[str, Strike | None] = {
    "hang": partial(outside.strike_tracker, how="hangs", longest=15.0),
    "stuck": partial(outside.strike_tracker, how="hangs"),
    "away": partial(outside.strike_tracker, how="away", longest=8.0),
    "break": partial(outside.strike_tracker, how="broken"),
}
IDENTIFIED: dict[str, Strike | None] = {
    **{fault: SUFFERED[fault] for fault in ("kill", "stop", "nan", "hang")},
    "TERM": None,
    "main": None,
}
EACH = ("actor", "server", "trainer", "judge")  # of `apart`; `kill` is of any, at a checkpoint of the trainer
KILL, STOP = (partial(outside.strike_simulator, number=number) for number in (signal.SIGKILL, signal.SIGSTOP))
WORKS: dict[str, tuple[Work, dict[str, Strike | None]]] = {
    "apart": (Work(apart), SUFFERED | ENDINGS | {whose: _kill(whose) for whose in EACH}),
    "equal": (Work(equal), SUFFERED | ENDINGS),
    "threads": (Work(in_threads, launch="threads"), LANES | {"stop": _stop} | ENDINGS),
    "judges": (Work(watched, check=check_watched), JUDGED),
    "judges-threads": (Work(watched_in_threads, launch="threads", check=check_watched), JUDGED),
    "disk": (
        Work(apart, beside=outside.small_disk),
        {"full": outside.fill_disk, "read-only": outside.forbid_disk},
    ),
    "share": (
        Work(apart, beside=outside.share),
        {"hang": outside.hang_share, "gone": outside.lose_share},
    ),
    "tracked": (
        Work(
            apart,
            [*SMALL, "--log", f"{EXPERIMENTS}:Away"],
            check=check_tracked,
            came=lambda run: (run.folder / MET).exists(),
        ),
        TRACKER,
    ),
    "group": (
        Work(apart, beside=outside.little_memory, check=check_shortage, came=was_short),
        {"eat": _ask_for("eat")},
    ),
    "equal-group": (
        Work(equal, beside=outside.little_memory, check=check_shortage, came=was_short),
        {"eat": _ask_for("eat")},
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
    "memory": (
        replace(SLOTS, function=outside.without_slots, check=partial(check_slots, held=outside.HELD)),
        {"kill": SUFFERED["kill"], "trainer": _kill("trainer")} | ENDINGS,
    ),
    "buffers": (Work(buffered), {"kill": _kill("buffers"), "stop": SUFFERED["stop"], "main": None}),
    "population": (
        Work(population, [f"--set=limits.updates={SHORT}"], trainers=("trainer-0-0/", "trainer-1-0/")),
        {"kill": _kill("population"), "trainer": _kill("trainer"), "main": None},
    ),
    "rows": (Work(identified.rows_apart, LIMITED, check=check_rows), IDENTIFIED),
    "equal-rows": (Work(identified.rows_equal, LIMITED, check=check_rows), IDENTIFIED),
    "rows-threads": (
        Work(identified.rows_apart, LIMITED, launch="threads", check=check_rows),
        {"nan": SUFFERED["nan"], "stop": _stop, "TERM": None, "main": None},
    ),
    "rows-buffers": (
        Work(identified.rows_buffered, LIMITED, check=partial(check_rows, buffers=identified.BUFFERS)),
        {"kill": _kill("buffers"), "actor": _kill("actor"), "stop": SUFFERED["stop"], "main": None},
    ),
}
"""What a run does, and what may strike it; None: what ends it."""
KINDS = {work: [f"{work}/{strike}" for strike in strikes] for work, (_, strikes) in WORKS.items()}
NAMES = {**KINDS, **{kind: [kind] for kinds in KINDS.values() for kind in kinds}}
"""What may be asked for: all that may strike a run, or one thing."""


def come_to(moment: str, run: Run, work: Work, draw: random.Random, name: str) -> str:
    """Wait until a run is at such a moment; a start begins at once for what ends it, with
    the first checkpoint where that is to be damaged, else with the first worker. Return
    whom the fault of this name is to strike, as a part of a name."""

    def begun() -> object:
        if name == "damaged":
            return to_damage(run)
        return name in ENDINGS or (run.path.exists() if work.launch == "threads" else processes(run.main.pid))

    def done(share: float) -> bool:
        return work.reached(run) >= share * work.length

    if moment == "start":
        run.wait_for(begun)
        time.sleep(draw.uniform(0.0, 1.5))
    elif moment == "evaluation":
        share = draw.choice([0.2, 0.4, 0.6])  # where iterations end
        run.wait_for(lambda: done(share))
        time.sleep(draw.uniform(0.0, 0.3))
        return draw.choice(work.watchers)
    elif moment == "saving":
        share = draw.uniform(0.05, 0.5)
        run.wait_for(lambda: done(share))
        before = {*run.path.glob("checkpoints/*/*")}
        run.wait_for(lambda: {*run.path.glob("checkpoints/*/*")} != before)
        return "trainer"
    elif moment == "ending":
        run.wait_for(lambda: done(0.95))
        time.sleep(draw.uniform(0.0, 0.3))
    else:
        share = draw.uniform(0.1, 1.0)
        run.wait_for(lambda: done(share))
    return ""


def one(kind: str, moment: str, draw: random.Random) -> tuple[str, float | None, int]:
    """Have a fault of this kind at such a moment. Return what became of the run, in
    words, the seconds that it took to end where it was to, and how many runs before it
    had no fault."""
    known = len(ROWS)
    for without in range(TRIES):
        try:
            return *_one(kind, moment, draw), without
        except NoFault:
            del ROWS[known:]
        except outside.LeftBehind as error:
            return str(error), None, without
    return NONE, None, TRIES


def _one(kind: str, moment: str, draw: random.Random) -> tuple[str, float | None]:
    """See `one`. Raises `NoFault` where a run had none."""
    what, _, name = kind.partition("/")
    work, strike = WORKS[what][0], WORKS[what][1][name]
    with tempfile.TemporaryDirectory() as place, work.beside(Path(place)) as beside:
        run = Run(Path(place), work.function, *work.words, launch=work.launch, beside=beside)
        try:
            whose = come_to(moment, run, work, draw, name)
            if run.main.poll() is not None:
                if run.main.returncode:
                    return f"ended before with {run.main.returncode}: {run.said()}", None
                raise NoFault
            if strike is not None:
                strike(run, draw, whose)
                wrong = goes_on(run, work)
                if not wrong and not work.came(run):
                    raise NoFault
                return _told(wrong), None
            wrong, seconds = ends(run, work, "main" if name in MAIN else name)
            if complete(run):
                vain = name == "damaged" or run.main.returncode == 0  # it was over by itself
                wrong = wrong or goes_on(run, work)
                if vain and not wrong:
                    raise NoFault
                return _told(wrong), seconds
            damaged = damage(run, draw) if name == "damaged" and not wrong else ""
            wrong = wrong or again(run, work)
            if damaged and not re.search(damaged, run.output.read_text()):
                wrong.append("it did not tell what was damaged")
            return _told(wrong), seconds
        finally:
            run.kill()


def _told(wrong: Sequence[str]) -> str:
    return "; ".join(wrong) or WELL


def goes_on(run: Run, work: Work, ended: bool = False) -> list[str]:
    """Wait until a run comes to its limit. Return what is wrong with it. Of one that was
    `ended` before, the last records may be missing: it was killed before it wrote them,
    and after its last checkpoint."""
    status, reached = run.end(), work.reached(run)
    places = [run.path, *run.temporary.glob("tidemill-run-*")]
    at_last = max((saved(place, work) or 0 for place in places), default=0)
    for refuge in places[1:]:
        rmtree(refuge)
    if places[1:]:
        RunFolder(run.path).tidy()  # of what was being written; a resume does the same
    wrong = [f"left {left}"] if (left := run.left()) else []
    if status == 1 and at_last == work.length and any(words in run.said() for words in AT_LAST):
        return wrong  # it ended on a full disk, or a share that hung, and has its last weights
    away = any(words in run.said() for words in AWAY.get(work.beside, ()))
    if status == 1 and reached == 0 and away:
        return wrong + again(run, work)
    if ended:
        reached = max(reached, at_last)
    if (status != 0 and not complete(run)) or reached != work.length:
        return [f"status {status} at {work.unit} {reached:.0f}: {run.said()}", *wrong]
    for name in (f"{trainer}update" for trainer in work.trainers):
        updates = [record[name] for record in read_metrics(run.path) if name in record]
        if updates != sorted(updates) or (work.unit == "update" and len(updates) > len(set(updates))):
            wrong.append(f"{name}s are told twice")
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
    is none; of several policies that which is the furthest."""
    found = []
    for folder in path.glob("checkpoints/*"):
        with suppress(TidemillError):
            found.append(int(read_newest(folder).facts[f"{work.unit}s"]))
    return max(found, default=None)


def to_damage(run: Run) -> list[Path]:
    """Return the checkpoints of a run, from old to new, of which one may be damaged."""
    return checkpoints(run.path / "checkpoints" / "policy")


def damage(run: Run, draw: random.Random) -> str:
    """Damage the newest checkpoint. Return by which words of a run's that is told, as an
    expression; "" where there is none to go back to, and it begins anew. Raises `NoFault`
    where there is no checkpoint at all."""
    found = to_damage(run)
    if not found:
        raise NoFault
    file, how = draw.choice(DAMAGES)
    how(found[-1] / file)
    return rf"{found[-1].name}\b.* (damaged|cannot be read)" if len(found) > 1 else ""


def again(run: Run, work: Work) -> list[str]:
    """Go on with a run that was ended, to its limit. Return what is wrong with that."""
    before = saved(run.path, work)
    run.begin(*["--anew"] * (before is None and run.path.exists()))
    wrong = goes_on(run, work, ended=True)
    if before is not None and "goes on with this run" not in run.output.read_text():
        wrong.append(f"it did not go on from {work.unit} {before}")
    return wrong


def main() -> int:
    """Do what the command line says. Return 1 where a run was not as it is to be, else
    0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*NAMES, []], default=[])
    parser.add_argument("--moment", choices=MOMENTS, action="append", help="such alone; may be repeated")
    parser.add_argument("--times", type=int, default=4, help="each fault at so many moments of each kind")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leaves no run behind
    wrong = none = 0
    for kind in [kind for name in given.kinds or KINDS for kind in NAMES[name]]:
        draw, took = random.Random(f"{given.seed} {kind}"), list[float]()
        ROWS.clear()
        for moment in given.moment or MOMENTS:
            became, vain = Counter[str](), 0
            for _ in range(given.times):
                what, seconds, without = one(kind, moment, draw)
                became[what] += 1
                vain += without
                took += [] if seconds is None else [seconds]
            told = "; ".join(f"{count} {what}" for what, count in became.most_common())
            told += f" (besides, no fault came in {vain} runs)" if vain else ""
            print(f"{kind:<16} {moment:<10} {told}", flush=True)
            wrong += given.times - became[WELL]
            none += became[NONE]
        if took:
            print(f"{kind:<16} took {statistics.median(took):.1f} ({max(took):.1f}) s to end", flush=True)
        if ROWS:
            names = ("played", "trained", "failed", "tails", "gaps", "undone", "most")
            print(f"{kind:<16} steps", {name: sum(getattr(rows, name) for rows in ROWS) for name in names})
    if wrong:
        print(f"{wrong} runs were not {WELL}" + f", of which {none} {NONE} in {TRIES} tries" * bool(none))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
