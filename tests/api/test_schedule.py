"""Settings that change with the env steps of a run."""

import re
from dataclasses import dataclass
from typing import Any

import pytest

import tidemill
from tidemill import DQN, PPO, SAC, LinearSchedule
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel
from tidemill.api.schedule import number
from tidemill.core.config import brought_up_to_date, decode, encode
from tidemill.core.errors import ConfigError
from tidemill.replay_training.trainer_config import ReplayTrainer


def test_a_schedule_is_a_straight_line_between_its_steps_and_level_beside_it() -> None:
    schedule = LinearSchedule(1.0, 0.2, from_step=100, to_step=500)
    told = [schedule.at(steps, 0.9) for steps in (0, 100, 200, 300, 500, 10_000)]
    assert told == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.2, 0.2])
    rising = LinearSchedule(0.0, 3.0)
    assert [rising.at(7, share) for share in (0.0, 0.5, 1.0)] == [0.0, 1.5, 3.0]


def test_a_configuration_of_now_has_numbers_in_place_of_schedules() -> None:
    config = PPO(learning_rate=LinearSchedule(1e-3, 0), clip=LinearSchedule(0.2, 0.1, to_step=1_000))
    now = config.at(500, 0.25)
    assert (now.learning_rate, now.clip) == (pytest.approx(7.5e-4), pytest.approx(0.15))
    assert not now.schedules and set(config.schedules) == {"learning_rate", "clip"}
    assert now == config.replace(learning_rate=now.learning_rate, clip=now.clip)
    assert PPO().at(500, 0.25) is not None and number(0.5) == 0.5 and number(None) is None
    with pytest.raises(TypeError, match=r"ask AlgorithmConfig\.at first"):
        number(config.clip)


@pytest.mark.parametrize(
    "config",
    [
        PPO(learning_rate=LinearSchedule(1e-3, 0), entropy_coefficient=LinearSchedule(0.01, 0, to_step=9)),
        DQN(epsilon=LinearSchedule(1, 0.1, from_step=5, to_step=9)),
        SAC(critic_learning_rate=LinearSchedule(1e-3, 1e-4)),
    ],
)
def test_a_schedule_is_saved_with_its_run(config: AlgorithmConfig) -> None:
    assert decode(AlgorithmConfig, encode(config)) == config


def test_a_table_on_the_command_line_is_a_schedule_and_anything_else_a_number() -> None:
    data = encode(PPO())
    found = decode(PPO, {**data, "clip": {"start": 0.2, "end": 0.1}})
    assert found.clip == LinearSchedule(0.2, 0.1)
    with pytest.raises(ConfigError, match=r"clip = 'lin_0\.2'.*or a table of LinearSchedule \(start, end"):
        decode(PPO, {**data, "clip": "lin_0.2"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"from_step": 10, "to_step": 5}, "from step 10 to step 5 ends before it begins"),
        ({"from_step": 10, "to_step": 10}, "ends before it begins"),
        ({"from_step": 10}, "from_step = 10 has no effect without to_step"),
        ({"from_step": -1, "to_step": 5}, "from_step = -1 must be at least 0"),
        ({"start": float("nan")}, "start = nan of a LinearSchedule must be a number"),
        ({"end": "0"}, "end = '0' of a LinearSchedule must be a number"),
        ({"end": 10**400}, "of a LinearSchedule must be a number"),
        ({"to_step": "5"}, "to_step = '5' of a LinearSchedule must be a whole number of env steps"),
        ({"to_step": 2.5}, "to_step = 2.5 of a LinearSchedule must be a whole number"),
        ({"to_step": 5, "from_step": None}, "from_step = None of a LinearSchedule must be a whole number"),
    ],
)
def test_what_is_no_line_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LinearSchedule(**{"start": 1.0, "end": 0.0, **settings})


def test_steps_may_be_written_as_whole_floats() -> None:
    assert LinearSchedule(3e-4, 0, 1e5) == LinearSchedule(3e-4, 0, 100_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["lin_3e-4", "3e-4", {"start": 1}, lambda share: share])
def test_what_is_neither_number_nor_schedule_is_told_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate = .* is no number; .* LinearSchedule\("):
        PPO(learning_rate=value)


def test_a_schedule_without_an_end_is_told_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="a LinearSchedule needs end; it has start"):
        decode(PPO, {**encode(PPO()), "clip": {"start": 0.2}})


def test_a_schedules_parts_are_no_settings_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nothing here has a setting end\b"):
        tidemill.train("CartPole-v1", end=0.5)


def test_both_ends_must_be_in_range_and_a_run_without_an_end_has_no_schedule_to_there() -> None:
    with pytest.raises(ConfigError, match="clip = -1 is not between"):
        PPO(clip=LinearSchedule(0.2, -1))
    PPO(clip=LinearSchedule(0.2, 0.1, to_step=100)).check_endless()
    with pytest.raises(ConfigError, match=r"clip = LinearSchedule.*set one of them, or its to_step"):
        PPO(clip=LinearSchedule(0.2, 0.1)).check_endless()


def test_an_algorithm_that_waits_for_a_share_of_the_run_is_told_of_schedules() -> None:
    with pytest.raises(ConfigError, match="take a LinearSchedule"):

        class Old(Algorithm):
            def update(self, samples: Any, progress: float) -> dict[str, float]:  # type: ignore[override]
                return {}

    with pytest.raises(ConfigError, match=r"parallel_update\(samples, progress\)"):

        class OldParallel(DataParallel):
            def parallel_update(self, samples: Any, progress: float) -> Any:  # type: ignore[override]
                return {}


@dataclass(frozen=True, kw_only=True)
class Fixed(AlgorithmConfig):
    """One that has no schedules."""

    learning_rate: float = 1.0


def test_only_what_is_declared_so_can_be_a_schedule() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate of Fixed cannot be a schedule; .* none"):
        Fixed(learning_rate=LinearSchedule(1, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ReplayTrainer", "Trainer"])  # what it was called before that
def test_what_was_counted_in_updates_is_counted_in_env_steps(kind: str) -> None:
    """At a ratio of 1/4, 1,000 steps of warm-up first."""
    saved: dict[str, Any] = {
        "kind": kind,
        "ratio": "1/4",
        "buffer": {"kind": "Replay", "warm_up": 1_000},
        "algorithm": {
            "kind": "DQN",
            "learning_rate": 1e-3,
            "learning_rate_schedule": "linear",
            "target_every": 500,
            "epsilon_start": 0.9,
            "epsilon_end": 0.1,
            "epsilon_updates": 10_000,
        },
    }
    data, told = brought_up_to_date(saved)
    assert told == []
    algorithm = decode(DQN, data["algorithm"])
    assert algorithm.target_steps == 2_000
    assert algorithm.epsilon == LinearSchedule(0.9, 0.1, from_step=1_000, to_step=41_000)
    assert algorithm.learning_rate == LinearSchedule(1e-3, 0.0)
    for odd in ({"epsilon_updates": "many"}, {"learning_rate_schedule": "linear"}, {"target_every": None}):
        brought_up_to_date({**saved, "algorithm": {"kind": "DQN", **odd}, "buffer": {"warm_up": None}})
    part = ReplayTrainer.of_today({**saved, "algorithm": {"kind": "DQN", "epsilon_end": 0.2}})["algorithm"]
    assert decode(DQN, part).epsilon == LinearSchedule(1.0, 0.2, from_step=1_000, to_step=41_000)
    each = {**saved, "algorithm": {**saved["algorithm"], "target_every": 1}}
    assert ReplayTrainer.of_today(each)["algorithm"]["target_steps"] == 0
    assert brought_up_to_date(
        {"kind": "PPO", "learning_rate": 0.1, "learning_rate_schedule": "constant"}
    ) == (
        {"kind": "PPO", "learning_rate": 0.1},
        [],
    )
