"""Runs with `exact_resume` that are killed by SIGKILL at every update, each time in the
midst of something else that they write, leave the bits of one that goes straight
through."""

import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.run.test_cuts import FILE, differences, waiting_in_stages

from tidemill import Experiment
from tidemill.core.errors import CheckpointError, RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.training.train import resume, train

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="lives are forked")
WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


UPDATES = 8


def made() -> Experiment:
    """Equal trainers that lag, with copies of samples, and a curriculum: of a cut there
    are a checkpoint and parts of three actors, a trainer and the runner."""
    staged = waiting_in_stages()
    return staged.replace(limits=staged.limits.replace(updates=UPDATES))


class Life:
    """A life of a run in `folder`, inline: it saves after each update, and kills itself
    as it is about to write for the `write`-th time after it has done update `at`; 0: for
    the `write`-th time at all, as it goes on with what it finds, say.

    writes: how often it wrote after each update, and before the first one
    """

    def __init__(self, folder: Path, at: int | None = None, write: int = 0) -> None:
        self._folder, self._at, self._write = os.fspath(folder.resolve()), at, write
        self._update, self.writes = 0, [0]

    def note(self, what: str, arguments: tuple[Any, ...]) -> None:
        """Count what this process is about to do (see `sys.addaudithook`)."""
        if what not in WRITES or not str(arguments[0]).startswith(self._folder):
            return
        if what == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if self._at is not None and self._update >= self._at and self.writes[-1] >= self._write:
            os.kill(os.getpid(), signal.SIGKILL)
        self.writes[-1] += 1

    def on_update(self, record: dict[str, float], control: Any) -> None:
        """Note that one more update is done."""
        self._update = int(record["update"])
        if self._at is None or self._update <= self._at:
            self.writes.append(0)
        control.save()


def forked(live: Callable[[], None]) -> int:
    """Return the status, or the signal below 0, with which `live` ends in a process of
    its own."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        live()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def kill_at_every_update(folder: Path) -> None:
    """Train in ``folder/whole``, and in ``folder/killed`` by lives of which each is
    killed an update later than the one before, or as it goes on with what that has left.
    Print how they ended."""
    settings: dict[str, Any] = {"launch": "inline", "quiet": True}
    straight = Life(folder / "whole")
    sys.addaudithook(straight.note)
    train(made(), run_dir=folder / "whole", source=FILE, on_update=straight.on_update, **settings)
    draw = random.Random(1)

    def live(update: int, at: int | None, write: int) -> None:
        life = Life(folder / "killed", at, write)
        sys.addaudithook(life.note)
        settings["on_update"] = life.on_update
        try:
            resume(folder / "killed", trust=True, **settings)
        except (RunError, CheckpointError):
            if update > 2:  # one cut was whole by then
                raise
            train(made(), run_dir=folder / "killed", source=FILE, anew=True, **settings)

    ends = []
    for update in range(1, UPDATES):
        if update % 3 == 0:
            ends.append(forked(partial(live, update, 0, draw.randrange(straight.writes[0]))))
        ends.append(forked(partial(live, update, update, draw.randrange(straight.writes[update]))))
    print(json.dumps({"killed": ends, "last": forked(partial(live, UPDATES, None, 0))}))


def test_a_run_that_is_killed_at_every_update_leaves_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    words = "from tests.run.test_kills import *; kill_at_every_update(Path(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", words, str(tmp_path)], cwd=FILE.parents[2], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told == {"killed": [-signal.SIGKILL] * 9, "last": 0}, run.stderr
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert differences(whole, killed, *(f"cuts/{path.name}" for path in (whole / "cuts").iterdir())) == []
    one, other = ([record.get("update") for record in read_metrics(path)] for path in (whole, killed))
    assert one == other
