"""What a trainer has the parameter database know of its versions."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import PPO, Limits, Query, Scripted
from tidemill.api.algorithm import AlgorithmConfig, Sample
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_file
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.training.train import train
from tidemill.workers.version_metadata import TrainingReturns, field_of, settings_of, with_settings

experiments = load_file(EXPERIMENTS, "test")


@dataclass(frozen=True, kw_only=True)
class Settings(AlgorithmConfig):
    rate: float = 1
    count: int = 10
    most: float | None = 2.5
    least: int | None = None
    far: float = float("inf")
    quick: bool = True
    how: str = "so"


def test_settings_are_the_finite_numbers() -> None:
    assert settings_of(Settings()) == {"rate": 1.0, "count": 10.0, "most": 2.5}
    assert settings_of(PPO(learning_rate=0.01))["learning_rate"] == 0.01


def test_changed_settings_are_checked_and_counts_stay_whole() -> None:
    changed = with_settings(Settings(), {"rate": 0.8, "count": 8.4, "most": 3.125})
    assert (
        changed == Settings(rate=0.8, count=8, most=3.125)
        and isinstance(changed, Settings)
        and isinstance(changed.count, int)
    )
    with pytest.raises(ConfigError, match='PPO has no number "learning_rat"; did you mean "learning_rate"'):
        with_settings(PPO(), {"learning_rat": 1.0})
    with pytest.raises(ConfigError, match="gamma = 2"):
        with_settings(PPO(), {"gamma": 2.0})


def sample(returns: dict[tuple[int, int], float], burn_in: int = 1, bootstrap: int = 1) -> Sample:
    """6 rows of 2 seats, with episodes that end at (row, seat)."""
    made = Sample(
        {
            "info_mask": np.zeros((6, 2), bool),
            "truncated": np.zeros((6, 2), bool),
            "info.return": np.full((6, 2), np.nan, np.float32),
        }
    )
    made.burn_in, made.bootstrap = burn_in, bootstrap
    for place, value in returns.items():
        made["info_mask"][place], made["info.return"][place] = True, value
    return made


def test_an_episode_counts_once_although_samples_overlap() -> None:
    returns = TrainingReturns()
    assert returns.mean() is None
    returns.add([sample({(0, 0): 100.0, (1, 0): 1.0, (4, 1): 2.0, (5, 1): 100.0}), sample({(1, 1): 6.0})])
    assert returns.mean() == 3.0
    returns.clear()
    assert returns.mean() is None


def test_an_episode_whose_next_step_was_lost_does_not_count() -> None:
    returns, lost = TrainingReturns(), sample({(2, 0): 1.0, (3, 1): 100.0})
    lost["truncated"][3, 1] = True
    returns.add([lost])
    assert returns.mean() == 1.0


def test_the_last_hundred_episodes_count() -> None:
    returns = TrainingReturns()
    for reached in range(150):
        returns.add([sample({(2, 0): float(reached)})])
    assert returns.mean() == np.mean(range(50, 150))


def test_versions_know_them(tmp_path: Path) -> None:
    made = experiments.experiment(
        Scripted(agents=2), algorithm=experiments.Recorder(seconds=0.001), database_versions=100
    )
    made = made.replace(limits=Limits(updates=40))
    train(made, launch="inline", run_dir=tmp_path, quiet=True)
    database = ParameterDatabase(tmp_path / PARAMETERS)
    first, *_, last = database.versions("policy")
    assert first.counters == {
        "env_steps": 0,
        "seconds": 0,
        "adopted": 0,
        field_of("seconds"): 0.001,
        field_of("save_seconds"): 0,
    }
    without = set(made.workers["trainer"].records()) - {"stage"}  # which versions have in a curriculum
    assert last.counters.keys() == {*first.counters, "training_return"} == without
    assert database.query("policy", Query.parse("training_return > -1000 order by -training_return limit 1"))
