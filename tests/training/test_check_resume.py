"""The check whether an experiment resumes exactly, where it is broken off."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.run.cut_experiments import experiment
from typer.testing import CliRunner

from tidemill import check_resume
from tidemill.api.launcher import Job
from tidemill.cli.main import app
from tidemill.core.errors import Interrupted
from tidemill.core.temporary_folders import folders_left
from tidemill.run.examine_machine import examine_machine
from tidemill.run.run_lifecycle import RunLifecycle
from tidemill.training import check_resume as check


@pytest.mark.parametrize(
    ("name", "resumed", "launch"),
    [
        ("straight", False, "inline"),
        ("resumed", False, "inline"),
        ("resumed", True, "inline"),
        ("straight", True, "threads"),
    ],
)
def test_a_signal_in_any_of_its_runs_breaks_it_off(
    name: str, resumed: bool, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = RunLifecycle.lead

    def signalled(life: RunLifecycle, job: Job, *others: Any) -> dict[str, Any]:
        if (Path(str(job.folder)).name, job.resume is not None) == (name, resumed):
            os.kill(os.getpid(), signal.SIGTERM)
        return lead(life, job, *others)

    monkeypatch.setattr(RunLifecycle, "lead", signalled)
    with pytest.raises(Interrupted, match="interrupted by SIGTERM: the check was broken off") as raised:
        check_resume(experiment(0), updates=8, launch=launch)
    assert raised.value.reason == "SIGTERM"


@pytest.mark.parametrize(
    ("number", "said", "status"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_the_command_that_a_signal_ends_gives_no_verdict(
    number: int, said: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = check.train

    def signalled(*words: Any, **settings: Any) -> Any:
        return train(*words, **settings, on_update=lambda *_: os.kill(os.getpid(), number))

    monkeypatch.setattr(check, "train", signalled)
    told = CliRunner().invoke(app, ["check-resume", "CartPole-v1", "--set", "workers.actor.lanes=8"])
    assert told.exit_code == status, told.output
    assert told.output.endswith(
        f"interrupted by {said}: the check was broken off, and nothing was found out\n"
    )
    assert "exact" not in told.output


KILLED = """
import os
from tests.run.cut_experiments import experiment
from tidemill.training import check_resume as check
check._cut_short = lambda *_: os.kill(os.getpid(), 9)
check.check_resume(experiment())
"""


def test_files_of_one_that_was_killed_are_named_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (left,) = tmp_path.iterdir()
    assert (left / "straight" / "checkpoints").is_dir() and folders_left() == [left]
    assert f"rm -r {left}" in [found.cure for found in examine_machine() if found.name == "temporary files"]
