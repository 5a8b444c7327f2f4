"""Signals that end a run, in each of its phases."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from random import Random

from fault_rows.row import Row, Seen
from fault_rows.runs import BrokenPromise, Run, started

ENDING = {"noticed": 1.0, "ended": 20.0}


def starts(run: Run, draw: Random) -> None:
    """Until environments are being made."""
    run.wait_for(run.path.exists, "it starts")
    time.sleep(draw.uniform(1.0, 3.0))


def warms_up(run: Run, draw: Random) -> None:
    """Until a replay memory fills."""
    run.wait_for(lambda: run.status().get("steps", 0) > 500 or run.events("began"), "it steps")
    time.sleep(draw.uniform(0.5, 2.0))


def updates(run: Run, draw: Random) -> None:
    """Until the first update, which takes minutes, is under way."""
    run.event("began")
    time.sleep(draw.uniform(2.0, 4.0))


def trains(run: Run, draw: Random) -> None:
    """Until many updates are done."""
    run.wait_for_updates()
    time.sleep(draw.uniform(0.5, 3.0))


def evaluates(run: Run, draw: Random) -> None:
    """Until a replay trainer evaluates."""
    run.wait_for(lambda: run.status().get("steps", 0) >= 1000, "an iteration is over")
    time.sleep(draw.uniform(0.5, 2.0))


def judges(run: Run, draw: Random) -> None:
    """Until an evaluation has told its first result."""
    file = run.path / "metrics.jsonl"
    run.wait_for(lambda: file.exists() and b"evaluation/" in file.read_bytes(), "an evaluation")
    time.sleep(draw.uniform(0.5, 2.0))


def saves(run: Run, draw: Random) -> None:
    """Until a checkpoint is being written."""
    run.wait_for(run.checkpoints, "a checkpoint")
    folder = run.path / "checkpoints" / "policy"
    run.wait_for(lambda: [*folder.glob(".update-*")], "another one is written")


def signalled(
    experiment: str, phase: Callable[[Run, Random], None], kept: bool = True
) -> Callable[[str, Random], Iterator[Seen]]:
    """Return what tells a run to end in a phase, once by SIGTERM to its main process and
    once by SIGINT to all of its session, as Ctrl-C does; `kept`: it has something to
    keep."""

    def suffer(launch: str, draw: Random) -> Iterator[Seen]:
        for number in (signal.SIGTERM, signal.SIGINT):
            with started(experiment, launch) as run:
                phase(run, draw)
                at = time.time()
                (os.kill if number == signal.SIGTERM else os.killpg)(run.main.pid, number)
                run.wait_for(lambda run=run: says_so(run), "it says that it ends", alive=False)
                noticed = time.time()
                status = run.ended()
                ended = time.time()
                if status != 128 + number:
                    raise BrokenPromise(f"{number.name}: status {status}: {run.output[-400:]}")
                seconds = {"noticed": noticed - at, "ended": ended - at}
                if not kept:
                    yield Seen(seconds)
                    continue
                done = max([*run.updates_told(), 0]) if (run.path / "metrics.jsonl").exists() else 0
                yield Seen(seconds, {"finished updates lost": done - int(run.checkpoint().facts["updates"])})

    return suffer


def says_so(run: Run) -> bool:
    """True once a run says that it ends, or has."""
    if run.main.poll() is not None or run.events("ended") or run.events("told", " has come: "):
        return True
    return bool(run.status().get("state") == "ending")


NOTHING = {"finished updates lost": 0}

ROWS = {
    "signal-at-start": Row(
        "SIGTERM, Ctrl-C while environments are made, in 8 s", signalled("slow_to_make", starts, kept=False),
        ENDING,
    ),
    "signal-in-warm-up": Row(
        "… while a replay memory warms up", signalled("warming_up", warms_up), ENDING, NOTHING
    ),
    "signal-in-training": Row("… between updates", signalled("apart", trains), ENDING, NOTHING),
    "signal-in-update": Row(
        "… in an update that takes minutes", signalled("long_update", updates), ENDING, NOTHING
    ),
    "signal-in-evaluation": Row(
        "… while a replay trainer evaluates", signalled("evaluating", evaluates), ENDING, NOTHING
    ),
    "signal-beside-judges": Row("… beside an evaluation", signalled("judged", judges), ENDING, NOTHING),
    "signal-in-saving": Row("… while a checkpoint is written", signalled("large", saves), ENDING, NOTHING),
}  # fmt: skip
