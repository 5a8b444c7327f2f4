"""Environments that fork themselves, and whose children go on as if they were the
worker."""

import sys
from pathlib import Path

import pytest
from tests.run.experiments import ENVIRONMENTS
from tests.run.watching import EXPERIMENTS, leftovers

from tidemill import Gymnasium, Limits
from tidemill.core.user_code_loading import load_file
from tidemill.run.events import read_events
from tidemill.training.train import train

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
experiments = load_file(EXPERIMENTS, "test")


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_fork_that_comes_back_from_a_step_is_ended(how: str, memory: bool, tmp_path: Path) -> None:
    forking = Gymnasium(make=f"{ENVIRONMENTS}:Forks", kwargs={"how": how})
    made = experiments.from_memory(forking) if memory else experiments.experiment(forking, lanes=1)
    if memory:  # else the child would fork itself in other lanes
        made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(ring=1)})
    result = train(
        made.replace(limits=Limits(steps=500)),
        launch="processes",
        layout="given",
        run_dir=tmp_path / "run",
        source=EXPERIMENTS,
        quiet=True,
    )
    assert result.summary["status"] == "completed"
    assert [event.what for event in read_events(tmp_path / "run")] == ["began", "ended"]
    (log,) = (tmp_path / "run" / "logs").glob("actor*.log")
    assert log.read_text().count("came back as if it were the worker, and was ended") == 1
    assert result.summary["episodes"] < 75  # of ten steps each
    assert leftovers(tmp_path / "run") == []
