"""A run in processes, in lockstep, whose workers and whose main process are killed by
SIGKILL, each after another cut, leaves the bits of one that goes straight through."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.slow_lockstep import SLOW, newest_cut, slow
from tests.run.test_cuts import differences, newest_update

from tidemill import resume, train
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it needs processes")


def test_kills_of_workers_and_of_all_leave_the_bits_of_a_run_without(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for log in ("served-0.log", "actor-0+trainer-0.log"):
        words = [sys.executable, "-m", "tests.run.slow_lockstep", str(killed), log]
        run = subprocess.run(words, cwd=SLOW.parents[2], capture_output=True, text=True, timeout=240)
        assert run.returncode == -signal.SIGKILL, run.stderr
    died = [event.worker for event in read_events(killed) if event.what == "died"]
    assert died == ["served-0", "actor-0", "trainer-0"] and newest_cut(killed) >= 6
    updates = newest_update(killed) + 5
    settings = {"launch": "threads", "quiet": True}
    resume(killed, limits={"updates": updates}, trust=True, **settings)
    train(slow(updates), run_dir=whole, **settings)
    assert differences(whole, killed) == []
    one, other = ([record["update"] for record in read_metrics(path)] for path in (whole, killed))
    assert one == other == list(range(1, updates + 1))
