"""What `check-env` says of the algorithms that can train an environment, and of what
cannot be trained."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from typer.testing import CliRunner

from tidemill import Gymnasium, SimulatorEnvironment
from tidemill.cli.main import app
from tidemill.presets import fitting_algorithms
from tidemill.presets.experiments import ALGORITHMS
from tidemill.presets.fitting_algorithms import training
from tidemill.testing.check_env import Finding

SIMULATORS = str(Path(__file__).parents[1] / "bridge" / "simulators.py")


def told_of(config: Any) -> Finding:
    environment = config.build(1, 0)
    try:
        (finding,) = training(config, environment)
    finally:
        environment.close()
    return finding


@pytest.mark.parametrize(
    ("name", "by"), [("CartPole-v1", "ppo and dqn and qrdqn"), ("Pendulum-v1", "ppo and sac and td3")]
)
def test_what_fits_is_named(name: str, by: str) -> None:
    assert told_of(Gymnasium(id=name)) == Finding("training", "ok", f"{by} can train it")


def test_what_any_algorithm_can_train_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: place for name, place in ALGORITHMS.items() if name != "ppo"}
    monkeypatch.setattr(fitting_algorithms, "ALGORITHMS", others)
    assert told_of(Gymnasium(id="CartPole-v1")) == Finding("training", "ok", "dqn and qrdqn can train it")


@pytest.mark.parametrize(
    ("kind", "more", "level", "message", "cure"),
    [
        ("one", {}, "ok", "ppo can train it; sac and td3 cannot", "same_step=False"),
        ("one", {"same_step": False}, "ok", "ppo and sac and td3 can train it", ""),
        ("two", {}, "ok", "ppo can train it", ""),
        (
            "after",
            {},
            "ok",
            "sac and td3 cannot: their ReplayActors go with environments of one agent",
            "without a ratio",
        ),
        (
            "hybrid",
            {"layout": "0.3.2"},
            "ok",
            "ppo can train it",
            "",
        ),
    ],
)
def test_what_simulators_cannot_have_trained_is_told(
    kind: str, more: dict[str, Any], level: str, message: str, cure: str
) -> None:
    finding = told_of(SimulatorEnvironment(path=SIMULATORS, arguments=(kind,), **more))
    assert finding.level == level and message in finding.message and cure in finding.cure


class Whole(gymnasium.Env[Any, Any]):
    """Acts by whole numbers in a Box, a part of a Dict."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Dict({"go": spaces.Discrete(2), "far": spaces.Box(0, 9, (1,), np.int32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


def test_check_env_fails_where_nothing_can_be_trained() -> None:
    result = CliRunner().invoke(app, ["check-env", f"{__file__}:Whole"])
    told = " ".join(result.output.replace("\n", " ").split())
    assert result.exit_code == 1 and "can be trained by no preset" in told
    finding = told_of(Gymnasium(make=f"{__file__}:Whole"))
    assert "its part action.far is a Box of int32 and shape (1,); use MultiDiscrete" in finding.message
    assert "Dict or Tuple" in finding.cure
