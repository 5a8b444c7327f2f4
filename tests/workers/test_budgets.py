"""Budgets, deadlines and shares that cannot be are refused by name."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from tidemill import DQN, PPO, Actors, Limits, Replay, ReplayTrainer, Scripted, Trainer
from tidemill.core.errors import ConfigError

MAKE: dict[str, Callable[..., Any]] = {
    "actor": lambda **settings: Actors(environment=Scripted(), **settings),
    "trainer": lambda **settings: Trainer(algorithm=PPO(), **settings),
    "memory": lambda **settings: ReplayTrainer(
        algorithm=DQN(), buffer=Replay(capacity=2000), batch_size=8, **settings
    ),
    "limits": Limits,
}
NO_BUDGET: tuple[Any, ...] = (0, -1, nan, inf, 1.5, "5")
NO_SECONDS: tuple[Any, ...] = (0, -1, nan, inf, "5")
REFUSED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("actor", "restarts"): NO_BUDGET,
    ("actor", "restarts_within_s"): NO_SECONDS,
    ("actor", "lane_restarts"): NO_BUDGET,
    ("actor", "lane_restarts_within_s"): NO_SECONDS,
    ("actor", "deadline_s"): (0, -1, nan, "5"),
    ("trainer", "fault_records"): (-1, nan, inf, 1.5, "5"),
    ("trainer", "fault_rate_factor"): (0, -1, 1, nan, inf, "5"),
    ("trainer", "checkpoint_share"): (0, -1, 1.5, nan, inf, "5"),
    ("trainer", "checkpoint_seconds"): NO_SECONDS,
    ("trainer", "checkpoints"): NO_BUDGET,
    ("memory", "max_no_progress_s"): NO_SECONDS,
    ("limits", "stall_s"): NO_SECONDS,
    ("limits", "seconds"): NO_SECONDS,
    ("limits", "updates"): (0, -1, nan, inf, "5"),
}


@pytest.mark.parametrize(
    ("what", "setting", "value"),
    [(what, setting, value) for (what, setting), values in REFUSED.items() for value in values],
)
def test_a_budget_that_cannot_be_is_refused_by_name(what: str, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} = '?{value}'? "):
        MAKE[what](**{setting: value})


@pytest.mark.parametrize(("setting", "first"), [("restarts", "death"), ("lane_restarts", "fault")])
def test_who_wants_no_restart_is_told_how_to_say_so(setting: str, first: str) -> None:
    with pytest.raises(ConfigError, match=f"None has the first {first} end the run"):
        MAKE["actor"](**{setting: 0})
    assert getattr(MAKE["actor"](**{setting: None}), setting) is None
