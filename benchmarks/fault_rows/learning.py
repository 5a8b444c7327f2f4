"""NaN and infinity: in an observation, in a reward, and in what learning computes."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
from fault_rows.row import Row, Seen
from fault_rows.runs import BrokenPromise, Run, run_of

from tidemill.store.checkpoint import read_checkpoint

GOES_ON = 20  # updates that follow, none of which is left out


def check_finite(run: Run) -> None:
    """Raise where a checkpoint has a number that is not finite."""
    for path in run.checkpoints():
        arrays, _ = read_checkpoint(path)
        for part in ("policy", "algorithm"):
            for name, array in arrays[part].items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise BrokenPromise(f"{path.name}: {part}.{name} is not finite")


def told_by_the_environment(fault: str) -> Callable[[str, Random], Iterator[Seen]]:
    """Return what has an environment tell NaN: its step is void, and nothing of it is
    learnt."""

    def suffer(launch: str, draw: Random) -> Iterator[Seen]:
        with run_of("lanes", launch) as run:
            time.sleep(draw.uniform(0.5, 2.0))
            at = run.suffer(fault)
            noticed = run.event("told", "lane \\d.*the step is void", at).time
            run.wait_for_updates(GOES_ON)
            if run.newest().get("skipped", 0):
                raise BrokenPromise("an update was left out: a number that was told came into it")
        check_finite(run)
        yield Seen({"noticed": noticed - at})

    return suffer


def in_learning(launch: str, draw: Random) -> Iterator[Seen]:
    """A reward of which the numbers of one update become infinite: the update is left
    out, recorded, and found again by a command."""
    with run_of("lanes", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = run.suffer("huge reward")
        told = run.event("told", "update \\d+ was (cut short|left out)", at)
        number = int(re.findall(r"update (\d+)", told.cause)[0])
        run.wait_for(lambda: run.newest()["update"] >= number + GOES_ON, "updates after it")
        skipped = run.newest()["skipped"]
        run.end()
        records = [path.name for path in (run.path / "faults" / "trainer-0").iterdir()]
        if records != [f"update-{number}"] or skipped != 1:
            raise BrokenPromise(f"{skipped:.0f} updates were left out, and the records are {records}")
        check_finite(run)
        words = [sys.executable, "-m", "tidemill.cli.main", "replay-fault", str(run.path), "--trust"]
        found = subprocess.run(words, capture_output=True, text=True).stdout
        if not re.search(r"first: .*(inf|nan)", found):
            raise BrokenPromise(f"replay-fault does not say where: {found[-300:]}")
        yield Seen({"noticed": told.time - at}, {"updates left out": skipped})


def three_in_a_row(launch: str, draw: Random) -> Iterator[Seen]:
    """Such rewards in each of three samples: the trainer goes back to a checkpoint."""
    with run_of("lanes", launch) as run:
        run.wait_for(lambda: len(run.checkpoints()) > 1, "a second checkpoint")
        time.sleep(draw.uniform(0.0, 2.0))
        at = run.suffer("huge rewards")
        back = run.event("told", "with the weights of checkpoint update-", at)
        went, skipped = run.newest()["update"], run.newest()["skipped"]
        kept = int(re.findall(r"checkpoint update-(\d+)", back.cause)[0])
        run.wait_for(lambda: run.newest()["update"] >= went + 3 * GOES_ON, "updates after it")
        if run.newest()["skipped"] > skipped + 2:  # of what was on its way
            raise BrokenPromise("updates are left out still")
        if run.events("told", "with the weights of checkpoint update-", at)[1:]:
            raise BrokenPromise("it has gone back more than once")
        run.end()
        check_finite(run)
        yield Seen({"gone back": back.time - at}, {"updates since that checkpoint": went - kept})


ROWS = {
    "nan-observation": Row(
        "NaN in an observation", told_by_the_environment("nan observation"), {"noticed": 1.0}
    ),
    "nan-reward": Row("NaN in a reward", told_by_the_environment("nan reward"), {"noticed": 1.0}),
    "nan-learning": Row(
        "infinity in loss and gradient", in_learning, {"noticed": 2.0}, {"updates left out": 1}
    ),
    "three-in-a-row": Row("three such updates in a row", three_in_a_row),
}  # fmt: skip
