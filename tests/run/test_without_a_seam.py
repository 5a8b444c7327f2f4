"""An asynchronous run in processes that is killed goes on without a seam: its counters,
schedules and curves are those of one run. What trainers did after the main process had
died, and saved, has no record."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    LinearSchedule,
    RunControl,
    Trainer,
)
from tidemill.metrics.json_lines import read_metrics

LANES, ROWS, LAG = 8, 16, 4
STEPS, RATE = 6_000, 1e-3
MOST = LANES * ROWS  # env steps of an update
KILLED = 25  # updates after which the first life is killed


def made() -> Experiment:
    """Actor and trainer apart, of which neither waits for the other one's newest."""
    algorithm = PPO(epochs=1, minibatch_size=64, learning_rate=LinearSchedule(RATE, 0.0))
    return Experiment(
        name="seam",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=LANES, agents=(AgentSpec(sample_steps=ROWS),)
            ),
            "trainer": Trainer(
                algorithm=algorithm, max_policy_lag=LAG, checkpoint_seconds=1e-9, checkpoint_share=1
            ),
        },
        limits=Limits(steps=STEPS),
    )


def live(folder: str, killed: int = 0) -> list[dict[str, float]]:
    """Train, or go on, and return what was told of updates; kill the main process after
    so many."""
    told = list[dict[str, float]]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        told.append(metrics)
        if metrics["update"] == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    tidemill.train(made(), run_dir=folder, launch="processes", quiet=True, on_update=on_update)
    return told


def curve(record: dict[str, float]) -> list[float]:
    return [record[name] for name in ("update", "step", "episodes", "learning_rate", "time/seconds")]


def records(run: Path) -> list[dict[str, float]]:
    return [record for record in read_metrics(run) if "update" in record]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_a_run_that_is_killed_has_the_counters_schedules_and_curves_of_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = f"import sys; from {__name__} import *; live(sys.argv[1], KILLED)"
    first = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert first.returncode == -signal.SIGKILL, first.stderr
    before, later = records(run), live(str(run))
    whole, again = records(run), later[0]["update"]
    kept = [record for record in before if record["update"] < again]
    assert len(kept) > KILLED // 2 and list(map(curve, whole)) == list(map(curve, [*kept, *later]))

    # each by the rate of the step at which it began, also the first of the second life
    for one, other in pairwise(whole):
        unrecorded = other["update"] - one["update"] - 1
        began = STEPS * (1 - other["learning_rate"] / RATE)
        if unrecorded:
            assert other["update"] == again
            assert unrecorded <= began - one["step"] <= unrecorded * MOST
        else:
            assert began == pytest.approx(one["step"], abs=0.01)
        assert 0 < other["step"] - began <= MOST
        for name in ("episodes", "time/seconds", "dropped"):
            assert other[name] >= one[name], name
    assert max(record["lag/max"] for record in whole) <= LAG
    assert whole[-1]["step"] >= STEPS
