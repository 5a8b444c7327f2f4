"""Evaluation in whole runs: what is told is of the version that it names, a run can end
by it, and goes on with it."""

from pathlib import Path
from typing import Any

import pytest
from tests.run import telling_policy
from tests.run.telling_policy import Tells
from tests.run.watching import EXPERIMENTS

from tidemill import Actors, AgentSpec, Drawn, Evaluation, Experiment, Limits, Scripted
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder
from tidemill.training.train import Result, resume, train

experiments = load_file(EXPERIMENTS, "test")


def evaluated(agents: int = 1, **limits: Any) -> Experiment:
    """Episodes of 4 steps. Two lanes are evaluated: in episode k lane l is paid
    ``reward_of``, which tells the action in its last two bits."""
    environment = Scripted(agents=agents, shortest=4, longest=4, truncations=False)
    made: Experiment = experiments.experiment(environment, database_seconds=1e-9)
    rest = (AgentSpec(parameters=Drawn(), samples=None),) if agents > 1 else ()
    own = AgentSpec(match="red_0", parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    actor = made.workers["actor"].replace(agents=(AgentSpec(match="red_0", sample_steps=16), *rest))
    judge = Actors(environment=environment, lanes=2, agents=(own, *rest))
    drawn = 0.0 if agents > 1 else None
    workers = {**made.workers, "actor": actor, "judge": judge, "evaluation": Evaluation(games=6, drawn=drawn)}
    return made.replace(policies={"policy": Tells()}, workers=workers, limits=Limits(**limits))


def run(folder: Path, made: Experiment, launch: str) -> Result:
    return train(made, launch=launch, run_dir=folder, source=telling_policy.__file__, quiet=True)


def measured(folder: Path) -> list[dict[str, float]]:
    return [record for record in read_metrics(folder) if "evaluation/return" in record]


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_what_is_told_of_a_version_was_played_by_it(tmp_path: Path, launch: str) -> None:
    made = evaluated(until="evaluation/version >= 40")
    result = run(tmp_path, made, launch)
    assert result.summary["status"] == "completed" and result.summary["reason"] == "evaluation/version >= 40"
    records = measured(tmp_path)
    updates = {0: 0.0, **{r["update"]: r["step"] for r in read_metrics(tmp_path) if "update" in r}}
    versions = [record["evaluation/version"] for record in records]
    # in processes the first one may be as new as that
    assert len(records) >= (2 if launch == "inline" else 1)
    assert versions == sorted(set(versions)) and versions[-1] >= 40
    for record in records:
        version = int(record["evaluation/version"])
        # a record of updates may stand for several
        before = max(step for update, step in updates.items() if update <= version)
        assert before <= record["step"] <= min(step for update, step in updates.items() if update >= version)
        assert record["evaluation/games"] == 6 and record["evaluation/length"] == 4
        assert record["evaluation/return"] * 6 % 32 == version % 4 * 4 * 6 % 32, (
            "of each action the reward's last bits are the action"
        )
        assert (
            record["evaluation/return_low"] < record["evaluation/return"] < record["evaluation/return_high"]
        )
    database = RunFolder.open(tmp_path).database()
    kept = {v.version: v.means for v in database.versions("policy")}
    for record in records[-3:]:
        if (means := kept.get(int(record["evaluation/version"]))) is not None:
            assert (
                means["evaluation/return"].mean == record["evaluation/return"]
                and means["evaluation/return"].count == 6
            )
    best = max(records, key=lambda record: record["evaluation/return"])
    assert database.tags("policy")["best"] == best["evaluation/version"]


def test_a_run_ends_when_the_evaluation_says_so(tmp_path: Path) -> None:
    first = run(tmp_path / "a", evaluated(until="evaluation/version >= 1"), "inline")
    reached = measured(tmp_path / "a")[-1]["evaluation/return"]
    assert first.summary["reason"] == "evaluation/version >= 1"
    until = f"evaluation/return >= {reached:g}"
    assert run(tmp_path / "b", evaluated(until=until), "inline").summary["reason"] == until
    *before, last = measured(tmp_path / "b")
    assert (
        last["evaluation/return"]
        >= reached
        > max((record["evaluation/return"] for record in before), default=-1)
    )


def test_a_resumed_run_goes_on_evaluating_and_no_version_is_evaluated_twice(tmp_path: Path) -> None:
    run(tmp_path, evaluated(until="evaluation/version >= 10"), "inline")
    before = [record["evaluation/version"] for record in measured(tmp_path)]
    best = max(measured(tmp_path), key=lambda record: record["evaluation/return"])["evaluation/return"]
    resume(tmp_path, launch="inline", limits={"until": "evaluation/version >= 30"}, quiet=True)
    versions = [record["evaluation/version"] for record in measured(tmp_path)]
    assert versions[: len(before)] == before and len(set(versions)) == len(versions) and versions[-1] >= 30
    database = RunFolder.open(tmp_path).database()
    (found,) = (v for v in database.versions("policy") if "best" in v.tags)
    assert found.means["evaluation/return"].mean == max(
        best, *(r["evaluation/return"] for r in measured(tmp_path))
    )


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_what_opponents_and_evaluated_versions_reach_is_not_the_run_s_return(
    tmp_path: Path, launch: str
) -> None:
    summary = run(tmp_path, evaluated(agents=2, until="evaluation/version >= 20"), launch).summary
    # at the end all is told; an episode has 4 steps
    assert 0.5 < summary["episodes"] / (summary["env_steps"] / 4) < 1.5, "some are played ahead of training"
    records = measured(tmp_path)
    assert {record["evaluation/win_rate"] for record in records} == {1.0}
    ratings = [record["evaluation/elo"] for record in records if "evaluation/elo" in record]
    assert ratings[0] == 1000 and all(rating > 1000 for rating in ratings[1:])
    beaten = [
        v.means["evaluation/beats"].mean
        for v in RunFolder.open(tmp_path).database().versions("policy")
        if "evaluation/beats" in v.means
    ]
    assert set(beaten) == {0.0}
