"""The check whether an experiment resumes exactly, where it is broken off."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.run.cut_experiments import experiment
from typer.testing import CliRunner

from tidemill import check_resume
from tidemill.api.launcher import Job
from tidemill.cli.main import app
from tidemill.core.errors import Interrupted
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
