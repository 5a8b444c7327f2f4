"""What surrounds a run is poor: the working directory is gone, there is no /proc, no
thread, file or memory more is allowed."""

import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.core.test_control_groups import limited_group
from tests.run.watching import EXPERIMENTS, ended_well

from tidemill.api.experiment import Experiment
from tidemill.core.errors import RunError
from tidemill.core.memory import resident_bytes
from tidemill.core.user_code_loading import load_file
from tidemill.layouts.memory_plan import MemoryPlan
from tidemill.run.events import read_events
from tidemill.training.train import train

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
experiments = load_file(EXPERIMENTS, "test")
TRAIN = [
    sys.executable,
    "-m",
    "tidemill.cli.main",
    "train",
    f"{EXPERIMENTS}:cartpole",
    "--layout",
    "given",
    "--set",
    "limits.updates=3",
]


def run(
    words: list[str], cwd: Path, before: Callable[[], Any] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, preexec_fn=before, timeout=240)


def completed(done: "subprocess.CompletedProcess[str]") -> bool:
    """True of a command that ended well, and had nothing to tell but of workers that a
    busy machine kept still."""
    still = re.compile(r"note: .* (is silent|speaks again) ")
    return done.returncode == 0 and not [line for line in done.stderr.splitlines() if not still.match(line)]


def test_a_working_directory_that_was_removed_stops_no_run_with_a_path_of_its_own(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run([*TRAIN, "--run-dir", str(tmp_path / "run")], gone, lambda: os.rmdir(gone))
    assert completed(done), done.stderr
    ended_well(tmp_path / "run", "completed", "3 updates")
    assert f"tidemill eval {tmp_path / 'run'}" in done.stdout
    gone.mkdir()
    done = run([*TRAIN, "--run-dir", "run"], gone, lambda: os.rmdir(gone))
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: ")
        and "the working directory was removed; go to another one" in done.stderr
    )
    assert "Traceback" not in done.stderr
    gone.mkdir()
    done = run([*TRAIN[:3], "bench", "CartPole-v1", "--json", "file.json"], gone, lambda: os.rmdir(gone))
    assert (done.returncode, done.stderr) == (
        1,
        "error: the working directory was removed; go to another one\n",
    )


def test_without_proc_a_run_goes_on(tmp_path: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/proc"], capture_output=True
        ).returncode
    ):
        pytest.skip("/proc cannot be hidden here")
    words = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs none /proc; exec "$@"',
        "sh",
        *TRAIN,
        "--run-dir",
        "run",
    ]
    done = run(words, tmp_path)
    assert completed(done), done.stderr
    ended_well(tmp_path / "run", "completed", "3 updates")


def test_a_system_that_does_not_tell_what_processes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/nowhere", raising=False)
    assert resident_bytes(children=True) == []
    assert str(MemoryPlan({}, (), 5_000_000_000)) == "memory: little; 5.0 GB available"


def test_a_limit_of_files_too_small_for_shared_memory_is_one_error(tmp_path: Path) -> None:
    limit = (10_240, 10_240)
    words = [*TRAIN, "--set", "workers.actor.lanes=64", "--run-dir", "run"]
    done = run(words, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "no file or piece of shared memory may be larger (the limit is 10,240 bytes); raise it: ulimit -f "
        "unlimited" in done.stderr
    )


def test_a_worker_that_the_system_kills_for_want_of_memory_lives_again_and_the_cause_is_told(
    tmp_path: Path,
) -> None:
    """Where a control group can be made."""
    with limited_group(768 << 20) as group:
        words = [*TRAIN[:3], "train", f"{EXPERIMENTS}:hoards", "--layout", "given", "--run-dir", "run"]
        done = run(words, tmp_path, lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    assert done.returncode == 0, done.stdout + done.stderr
    ended_well(tmp_path / "run", "completed", "40 updates")
    events = {event.what: event for event in read_events(tmp_path / "run") if event.worker == "actor-0"}
    assert events["lives"].life == 2
    assert "out of memory: its control group has no more; make lanes, slots" in events["died"].cause


def no_threads(*_: Any) -> None:
    """What Python does where the system allows none."""
    raise RuntimeError("can't start new thread")


@pytest.fixture
def made() -> Experiment:
    made: Experiment = experiments.cartpole()
    return made.replace(limits=made.limits.replace(updates=3))


def test_threads_that_cannot_be_started_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Experiment
) -> None:
    monkeypatch.setattr(threading, "_start_new_thread", no_threads)
    with pytest.raises(
        RunError,
        match=r"the workers cannot be started: can't start new thread: no more processes or threads are "
        r"allowed.*ulimit -u",
    ):
        train(made, launch="threads", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True)


def test_in_one_thread_a_run_needs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Experiment
) -> None:
    monkeypatch.setattr(threading, "_start_new_thread", no_threads)
    result = train(made, launch="inline", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True)
    ended_well(result.folder, "completed", "3 updates")
