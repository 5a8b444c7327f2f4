"""Environments with `async def` steps are named on the command line as others are."""

from pathlib import Path

import pytest
from tests.cli.test_cli import tidemill

from tidemill.core.config import encode
from tidemill.core.errors import ConfigError
from tidemill.envs.asynchronous import Asynchronous
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.metrics.json_lines import read_metrics
from tidemill.presets.environment_names import environment_from
from tidemill.presets.experiments import experiment_for
from tidemill.run.folder import RunFolder
from tidemill.training.iteration_runners import AsyncTrainRunner

CODE = """
import gymnasium
import numpy as np

class Count:
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    closed = 0

    def __init__(self, length=5):
        self.length = length

    async def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, np.float32), {}

    async def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, self.steps == self.length, False, {}

    async def close(self):
        Count.closed += 1

def make(length=4):
    return Count(length)

class Half(Count):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "counting.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(
    ("name", "arguments", "returned"),
    [("Count", (), 5), ("Count", ("--env-arg", "length=3"), 3), ("make", (), 4)],
)
def test_a_class_or_its_maker_is_trained_on_checked_and_evaluated(
    file: Path, name: str, arguments: tuple[str, ...], returned: int
) -> None:
    what = f"{file}:{name}"
    checked = tidemill("check-env", what, *arguments)
    assert checked.exit_code == 0 and f"the longest took {returned} steps" in checked.output, checked.output
    folder = file.parent / "run"
    slots = ("--algorithm", "dqn", "--slots", 4, "--launch", "inline", "--max-steps", 100)
    trained = tidemill("train", what, *slots, "--run-dir", folder, *arguments)
    assert trained.exit_code == 0, trained.output
    assert read_metrics(folder)[-1]["return/mean"] == returned
    config = encode(RunFolder.open(folder).experiment()[0])
    assert config["workers"]["actor"]["environment"]["environment"]["kind"] == "Asynchronous"
    evaluated = tidemill("eval", folder, "--episodes", 4)
    assert evaluated.exit_code == 0 and f"{returned}.00" in evaluated.output, evaluated.output


def test_ppo_plays_it_in_lanes(file: Path) -> None:
    lanes = ("--set", "workers.actor.lanes=4", "--set", "workers.actor.agents.0.sample_steps=16")
    trained = tidemill(
        "train",
        f"{file}:Count",
        "--launch",
        "inline",
        "--max-steps",
        128,
        "--run-dir",
        file.parent / "run",
        *lanes,
    )
    assert trained.exit_code == 0, trained.output


def test_the_asynchronous_runner_takes_it(file: Path) -> None:
    experiment = experiment_for("count", environment_from(f"{file}:Count"), "dqn")
    runner = AsyncTrainRunner(experiment, num_slots=4, num_iterations=2, training_steps=50, launch="inline")
    assert runner.run(file.parent / "run", quiet=True).summary["env_steps"] == 100


def test_what_cannot_be_made_says_so_where_it_is_made(file: Path) -> None:
    assert environment_from(f"{file}:Count", {"length": 3}) == Asynchronous(
        make=f"{file}:Count", kwargs={"length": 3}
    )
    assert environment_from("no_such.module:Env") == Gymnasium(make="no_such.module:Env")
    assert "no async def reset" in " ".join(tidemill("check-env", f"{file}:Half").output.split())
    with pytest.raises(ConfigError, match=r'its step is async def: take Asynchronous\(make=".*:Count"\)'):
        Gymnasium(make=f"{file}:Count").build(1, 0)
