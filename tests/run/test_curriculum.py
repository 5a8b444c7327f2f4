"""The curriculum: stages change where their conditions hold, environments read them at resets, a resumed run goes on in its stage."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import Experiment, Gymnasium, Limits, Stage
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.source import load_file
from tidemill.run.metrics import read_metrics
from tidemill.run.session import Result, resume, train

experiments = load_file(EXPERIMENTS, "test")


class Paying(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps, each paid what the reset's options said (0 without): an episode pays the same from its first step to its last."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.pay, self.steps = (options or {}).get("pay", 0.0), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), self.pay, self.steps == 5, False, {}


STAGES = (Stage(options={"pay": 1.0}, until="return/mean >= 5"), Stage(options={"pay": 2.0}, until="step >= 400"), Stage(options={"pay": 3.0}))


def paying(**changes: Any) -> Experiment:
    made: Experiment = experiments.experiment(Gymnasium(make=f"{__file__}:Paying"))
    return made.replace(**{"curriculum": STAGES, **changes})


def run(folder: Path, made: Experiment, launch: str = "inline", **limits: Any) -> Result:
    return train(made.replace(limits=Limits(window=4, **limits)), launch=launch, run_dir=folder, source=EXPERIMENTS, quiet=True)


def returns(folder: Path) -> list[float]:
    return [record["return/mean"] for record in read_metrics(folder) if "return/mean" in record]


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_stages_follow_one_another_and_are_read_at_resets(tmp_path: Path, launch: str) -> None:
    run(tmp_path, paying(), launch, steps=2000)
    records = read_metrics(tmp_path)
    stages = [record.get("curriculum/stage", 0.0) for record in records]
    assert stages == sorted(stages) and set(stages) == {0.0, 1.0, 2.0}
    assert records[stages.index(2.0) - 1]["step"] >= 400
    assert set(returns(tmp_path)[-3:]) == {15.0}
    for value in returns(tmp_path):  # whole episodes of one stage: a mean of 4 such
        assert (value * 4) % 5 == 0


def test_a_resumed_run_goes_on_in_its_stage(tmp_path: Path) -> None:
    run(tmp_path, paying(), steps=200)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 1.0
    resume(tmp_path, launch="inline", limits={"steps": 390}, quiet=True)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 1.0 and returns(tmp_path)[-1] == 10.0
    resume(tmp_path, launch="inline", limits={"steps": 900}, quiet=True)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 2.0 and returns(tmp_path)[-1] == 15.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(), Stage()), "stage 1 of 2 has no end"),
        ((Stage(until="step > 1"),), "the last stage cannot end"),
        (
            (Stage(until="return/man > 1"), Stage()),
            'until of stage 1 = "return/man > 1" waits for "return/man", which nobody .*did you mean "return/mean"',
        ),
    ],
)
def test_what_could_never_happen_is_refused_at_start(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paying(curriculum=stages).check()


@pytest.mark.parametrize("until", ["return/mean", "order by step", "step > 1 limit 3", "step > many"])
def test_an_end_that_is_no_condition_is_refused(until: str) -> None:
    with pytest.raises(ConfigError):
        Stage(until=until)


def test_a_run_ends_when_its_condition_holds(tmp_path: Path) -> None:
    result = run(tmp_path, paying(), until="return/mean >= 15 and update > 3")
    assert result.summary["status"] == "completed" and result.summary["reason"] == "return/mean >= 15 and update > 3"
    assert result.summary["mean_return"] == 15.0
    with pytest.raises(ConfigError, match=r'limits\.until = "retrun/mean > 1" waits for "retrun/mean"'):
        paying(limits=Limits(until="retrun/mean > 1")).check()


def test_an_environment_without_options_says_so_at_start(tmp_path: Path) -> None:
    from tidemill import Scripted

    with pytest.raises(RunError, match="the resets of a ScriptedEnvironment take no options"):
        run(tmp_path, experiments.experiment(Scripted()).replace(curriculum=STAGES), steps=100)
