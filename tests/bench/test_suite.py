"""The suite of tasks: its table, its scores, which runs are left, and its page."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.user_code_loading import load_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
suite: Any = load_file(BENCHMARKS / "suite.py", "benchmarks")
scores: Any = load_file(BENCHMARKS / "suite_scores.py", "benchmarks")


def task_of(label: str) -> Any:
    (task,) = (task for task in suite.TASKS if task.label == label)
    return task


def test_a_score_is_0_at_random_actions_and_1_at_the_reference() -> None:
    assert scores.score(20.0, 20.0, 220.0) == 0.0
    assert scores.score(220.0, 20.0, 220.0) == 1.0
    assert scores.score(-150.0, -200.0, -100.0) == 0.5
    assert math.isnan(scores.score(5.0, 10.0, 10.0)), "a reference that learned nothing is no scale"


def test_the_interquartile_mean_is_of_the_middle_half() -> None:
    assert scores.interquartile_mean([4.0, 100.0, -100.0, 1.0, 5.0, 0.0, 2.0, 3.0]) == pytest.approx(2.5)
    # five values: a quarter of 1.25 is the lowest and a quarter of the next
    assert scores.interquartile_mean([0.0, 1.0, 2.0, 4.0, 9.0]) == pytest.approx((0.75 + 2 + 3) / 2.5)
    assert scores.interquartile_mean([1.0, 2.0, 9.0]) == 4.0, "of fewer than four it is the mean"


def test_the_interval_over_tasks_holds_the_mean_and_keeps_each_tasks_weight() -> None:
    runs = [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]
    low, high = scores.scores_interval(runs)
    assert low < scores.interquartile_mean([value for task in runs for value in task]) < high
    # drawn from all runs alike, the mean of these would vary
    assert scores.scores_interval([[0.0, 0.0], [1.0, 1.0]]) == (0.5, 0.5)


def test_the_interval_of_a_difference_says_which_of_two_is_better() -> None:
    assert scores.difference_interval([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])[0] > 0
    low, high = scores.difference_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert low < 0 < high and low == pytest.approx(-high, abs=0.4)


def test_each_kind_of_tasks_is_in_both_halves_and_no_two_have_one_file() -> None:
    halves: dict[str, set[bool]] = {}
    for task in suite.TASKS:
        halves.setdefault(task.kind, set()).add(task.chosen)
    assert all(found == {True, False} for found in halves.values()), halves
    assert len({task.label for task in suite.TASKS}) == len(suite.TASKS)


def test_what_is_tuned_by_name_is_a_preset_and_never_the_default() -> None:
    task = task_of("CartPole-v1")
    default, preset = (suite.experiment_of(task, contender) for contender in ("default", "preset"))
    assert default.workers["trainer"].algorithm != preset.workers["trainer"].algorithm
    assert suite.experiment_of(task_of("Taxi-v4"), "preset") is None


def test_random_actions_have_a_return_in_every_kind_of_environment() -> None:
    assert 10 < suite.random_return(task_of("CartPole-v1")) < 40
    assert 0 <= suite.random_return(task_of("MiniGrid-Empty-5x5-v0"), 3) < 1


def test_runs_with_todays_settings_are_done_and_failed_or_changed_ones_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    task, today = task_of("Taxi-v4"), suite.told(suite.settings_of(task_of("Taxi-v4"), "default"))
    settings = suite.digest_of(today)
    lines = {
        "1": {"settings": settings, "curve": [1.0]},
        "2": {"settings": "of before", "curve": [1.0]},
        "3": {"settings": settings, "failed": "no memory"},
    }
    suite.write(task, {"task": task.label, "runs": {"default": lines}, "settings": {settings: today}})
    assert [run.seed for run in suite.left([task], ["default"], None)] == [2, 3, 4, 5]
    assert next(suite.left([task], ["default"], None)).settings == today
    assert [run.seed for run in suite.left([task], ["default"], 2)] == [2]
    assert [run.seed for run in suite.left([task, task_of("Ant-v5")], ["default"], None)][-1] == 5


def test_a_new_setting_at_its_default_keeps_what_was_recorded_and_another_default_does_not() -> None:
    settings = suite.settings_of(task_of("Taxi-v4"), "default")

    def then() -> Any:
        return json.loads(json.dumps(suite.told(settings)))

    assert suite.unchanged(then(), settings)
    before = then()
    del before[1]["workers"]["trainer"]["algorithm"]["desired_kl"]
    assert suite.unchanged(before, settings), "it came later, and is not used"
    before[1]["workers"]["trainer"]["algorithm"]["gamma"] = 0.98
    assert not suite.unchanged(before, settings), "the default was another"
    preset = suite.settings_of(task_of("Acrobot-v1"), "preset")
    before = json.loads(json.dumps(suite.told(preset)))
    assert suite.unchanged(before, preset)
    del before[1]["workers"]["trainer"]["algorithm"]["epochs"]
    assert not suite.unchanged(before, preset), "it came later, and is used"
    before = then()
    before[1]["policies"]["policy"]["gone"] = 1
    assert not suite.unchanged(before, settings)
    assert not suite.unchanged([before[0] + 1, before[1]], settings), "another number of steps"


def test_recorded_settings_are_named_by_their_digest() -> None:
    for task in suite.TASKS:
        found = suite.read(task).get("settings", {})
        assert all(name == suite.digest_of(each) for name, each in found.items()), task.label


def test_random_agents_have_a_return_in_a_team_and_in_a_game() -> None:
    assert -200 < suite.random_return(task_of("mpe2.simple_spread_v3"), 2) < 0
    assert suite.random_return(task_of("ALE-Breakout-v5"), 2) < 10


def test_the_page_counts_tasks_that_judge_and_names_those_whose_reference_learned_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "RESULTS", tmp_path)

    def put(label: str, ours: list[float], theirs: list[float]) -> None:
        runs = {
            contender: {str(seed): {"curve": [value]} for seed, value in enumerate(values)}
            for contender, values in (("default", ours), ("sb3", theirs))
        }
        suite.write(task_of(label), {"task": label, "random": 0.0, "runs": runs})

    put("Taxi-v4", [9.0, 10.0], [10.0, 10.0])
    put("Ant-v5", [1.0, 1.0], [10.0, 10.0])
    put("MountainCar-v0", [0.0, 0.0], [0.0, 0.0])
    put("CartPole-v1", [0.0, 0.0], [10.0, 10.0])  # a task that defaults are chosen on
    page = suite.report()
    assert "on 2 tasks that judge: median score 0.53, at least 0.9 on 1 (50%)" in page
    assert "On 1 more these are no better than random actions" in page
