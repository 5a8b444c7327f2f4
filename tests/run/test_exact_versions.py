"""Runs with `exact_resume` whose evaluations and populations count updates: which
versions are judged, what they reach and who goes on from whom follows from the
experiment, wherever the run is cut."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
from tests.run.cut_experiments import MANY, judged, population, training_population
from tests.run.test_cuts import differences, kill_after_a_whole_cut

from tidemill import (
    DQN,
    Experiment,
    Gymnasium,
    Limits,
    QNetwork,
    ReplayActors,
    ReplayTrainer,
    check_resume,
    resume,
    train,
)
from tidemill.api.stream import InferenceClient
from tidemill.core.errors import ConfigError
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.replay import Replay
from tidemill.store.checkpoint import read_newest
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.workers.actor import ActorWorker
from tidemill.workers.checkpoint_pace import CheckpointPace
from tidemill.workers.evaluation import EvaluationWorker
from tidemill.workers.parameter_refresh import ParameterRefresh
from tidemill.workers.trainer import TrainerWorker

UNNAMED = shutil.ignore_patterns(".*")


@pytest.mark.parametrize(("launch", "lag", "judges"), [("inline", None, 1), ("threads", 0, 2)])
def test_what_an_evaluation_finds_is_found_again(launch: str, lag: int | None, judges: int) -> None:
    found = check_resume(judged(lag, judges=judges), updates=8, launch=launch)
    assert found.exact and found.compared > 100, found


@pytest.mark.parametrize(("launch", "lag"), [("inline", None), ("threads", 0)])
def test_who_goes_on_from_whom_is_decided_again(launch: str, lag: int | None) -> None:
    found = check_resume(population(lag), updates=8, launch=launch)
    assert found.exact and found.compared > 200, found


def told(folder: Path) -> list[dict[str, float]]:
    """What evaluations and populations have told, in order."""
    return [record for record in read_metrics(folder) if not any("update" in name for name in record)]


def known(folder: Path, policies: Iterable[str]) -> list[Any]:
    """What the database knows of versions."""
    database = ParameterDatabase(folder / PARAMETERS)
    versions = (version for policy in policies for version in database.versions(policy))
    return [(each.version, each.tags, each.means) for each in versions]


def killed_everywhere(made: Experiment, folder: Path) -> list[Path]:
    """Train with a cut after each update. Return what a kill would have left when the
    update after it was done."""
    images = list[Path]()

    def cut(record: dict[str, float], control: Any) -> None:
        if any((folder / "cuts").glob("*/update-*")):
            images.append(folder.with_name(f"{folder.name}-{len(images)}"))
            shutil.copytree(folder, images[-1], ignore=UNNAMED)
        control.save()

    train(made, launch="inline", run_dir=folder, quiet=True, on_update=cut)
    return images


def stopped_everywhere(made: Experiment, folder: Path) -> int:
    """Train one update at a time. Return how often that was."""

    def at_once(record: dict[str, float], control: Any) -> None:
        control.stop()

    settings: dict[str, Any] = {"launch": "inline", "quiet": True, "on_update": at_once}
    ended, times = train(made, run_dir=folder, **settings).summary, 1
    while ended["updates"] < (made.limits.updates or 0):
        ended, times = resume(folder, trust=True, **settings).summary, times + 1
    return times


@pytest.mark.parametrize("make", [judged, population])
def test_a_run_that_is_killed_or_stopped_anywhere_finds_and_decides_the_same(
    make: Callable[[int | None], Experiment], tmp_path: Path
) -> None:
    whole, made = tmp_path / "whole", make(None)
    train(made, launch="inline", run_dir=whole, quiet=True)
    facts = told(whole)
    if make is judged:
        assert [each["evaluation/version"] for each in facts] == [0, 2, 4]
    else:
        assert sum("population/best" in each for each in facts) >= 2
        assert any(name.endswith("/from") for each in facts for name in each)
    images = killed_everywhere(made, tmp_path / "killed")[:: 1 if make is judged else 2]
    for image in images:
        resume(image, quiet=True, trust=True)
    stopped = tmp_path / "stopped"
    assert len(images) > 3 and stopped_everywhere(made, stopped) > 3
    places = [f"cuts/{path.name}" for path in (whole / "cuts").iterdir()]
    for folder in (tmp_path / "killed", *images, stopped):
        for policy in made.trained():
            assert differences(whole, folder, *places, policy=policy) == []
        assert (told(folder), known(folder, made.trained())) == (facts, known(whole, made.trained())), folder


def late_as_the_trainer_ends(patch: pytest.MonkeyPatch, version: int) -> Event:
    """Have an evaluation be within a poll, with a game of `version` to be counted, as the
    trainer ends, and go on with it once the judge rests, or has written what it has of
    the cut. Return what says that it has come to that."""
    late, ended, rests = Event(), Event(), Event()
    poll, finish = EvaluationWorker._poll, TrainerWorker._finish
    hold, save = ActorWorker._hold, ActorWorker._save_part

    def poll_late(worker: Any) -> Any:
        frozen, channels = worker._frozen, worker._consumer._channels
        if frozen is not None and frozen.version == version and any(each.waiting() for each in channels):
            late.set()
            assert rests.wait(120)
        return poll(worker)

    def finish_then(worker: Any) -> None:
        assert late.wait(120)
        finish(worker)
        ended.set()

    def rest(then: Callable[..., None]) -> Callable[..., None]:
        def rested(worker: Any, message: Any) -> None:
            then(worker, message)
            if worker.name == "judge-0" and ended.is_set():
                rests.set()

        return rested

    patch.setattr(EvaluationWorker, "_poll", poll_late)
    patch.setattr(TrainerWorker, "_finish", finish_then)
    patch.setattr(ActorWorker, "_hold", rest(hold))
    patch.setattr(ActorWorker, "_save_part", rest(save))
    patch.setattr(CheckpointPace, "due", lambda *args: False)  # no cut but the last one
    return rests


def test_what_an_evaluation_has_counted_as_its_trainer_ended_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that a trainer ends by itself, at its limit, is at rest before its last cut
    is written."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(judged(0, updates=4), launch="inline", run_dir=whole, quiet=True)
    with monkeypatch.context() as patch:
        was_late = late_as_the_trainer_ends(patch, version=2)
        train(judged(0, updates=2), launch="threads", run_dir=cut, quiet=True)
        assert was_late.is_set()
    resume(cut, launch="inline", limits={"updates": 4}, quiet=True, trust=True)
    first, second = (
        [each for each in told(folder) if each["evaluation/version"] < 4] for folder in (whole, cut)
    )
    assert [each["evaluation/version"] for each in first] == [0, 2] and first == second


KILLED = """
import sys
from pathlib import Path
from tests.run.cut_experiments import MANY, population
from tidemill import train
train(population(0, MANY), launch="processes", run_dir=Path(sys.argv[1]), quiet=True)
"""


def test_a_population_in_processes_that_is_killed_decides_the_same(tmp_path: Path) -> None:
    whole, killed, made = tmp_path / "whole", tmp_path / "killed", population(0, MANY)
    updates = kill_after_a_whole_cut(KILLED, killed, made, *made.trained())
    went_on = resume(killed, limits={"updates": updates}, quiet=True, trust=True)
    assert went_on.summary["status"] == "completed"
    train(population(0, updates), launch="threads", run_dir=whole, quiet=True)
    for policy in made.trained():
        assert differences(whole, killed, policy=policy) == []
    ends = [(read_newest(whole / "checkpoints" / policy).facts["steps"]) for policy in made.trained()]
    first, second = (
        {(each["step"], *each): each for each in told(folder) if each["step"] < min(ends)}
        for folder in (whole, killed)
    )
    assert first == second and any("population/best" in each for each in first.values())


def test_whoever_goes_on_from_another_does_so_once_its_actors_have_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late these are: what is decided at once would be before they have seen the
    version of which it is decided, by which they would play no sample then."""
    whole, late, made = tmp_path / "whole", tmp_path / "late", training_population(12)
    train(made, launch="inline", run_dir=whole, quiet=True)
    next_samples = ParameterRefresh.next_samples

    def later(self: ParameterRefresh, client: InferenceClient) -> None:
        sleep(0.1)
        next_samples(self, client)

    monkeypatch.setattr(ParameterRefresh, "next_samples", later)
    train(made, launch="threads", run_dir=late, quiet=True)
    names = [name for record in told(whole) for name in record]
    assert "population/0/from" in names or "population/1/from" in names
    assert [differences(whole, late, policy=policy) for policy in made.trained()] == [[], []]


def changed(made: Experiment, **groups: dict[str, Any]) -> Experiment:
    """Return `made` with other settings of some groups of workers."""
    new = {name.replace("_", "-"): settings for name, settings in groups.items()}
    return made.replace(
        workers={name: config.replace(**new.get(name, {})) for name, config in made.workers.items()}
    )


REFUSED: dict[str, tuple[Callable[[], Experiment], str]] = {
    "versions that are not pushed": (
        lambda: changed(judged(0), trainer={"database_updates": 4}),
        "trainer does not push these versions .*set workers.trainer.database_updates = 2, or to a divisor",
    ),
    "versions by the clock": (
        lambda: changed(judged(0), trainer={"database_updates": None}),
        "trainer does not push these versions",
    ),
    "a population by env steps": (
        lambda: changed(population(0), population={"updates": None}),
        "exact_resume = True cannot be had here: workers.population decides by env steps",
    ),
    "members that are compared by what watches": (
        lambda: changed(population(0), evaluation_0={"updates": None}),
        'workers.population.metric = "evaluation/return", which is known of versions of "policy-0" at any',
    ),
    "members that end by env steps": (
        lambda: population(0).replace(limits=Limits(steps=1000)),
        "the first member of workers.population that reaches a limit would end the run, or keep the others",
    ),
    "members of which one may end before the others": (
        lambda: population(0).replace(limits=Limits(updates=100, steps=1000)),
        "set limits.updates, which all members reach, and no limits.steps",
    ),
}


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_go_by_the_clock_is_refused_by_name(
    make: Callable[[], Experiment], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        train(make(), launch="threads", run_dir=tmp_path / "run", quiet=True)


def test_a_replay_memory_is_not_evaluated_by_updates() -> None:
    made = judged(None).replace(policies={"policy": QNetwork(hidden=(8,))}, exact_resume=False)
    trainer = ReplayTrainer(algorithm=DQN(), buffer=Replay(capacity=100, warm_up=10), batch_size=8, ratio=1)
    actor = ReplayActors(environment=Gymnasium(id="CartPole-v1"), lanes=1)
    made = made.replace(workers={**made.workers, "trainer": trainer, "actor": actor})
    with pytest.raises(ConfigError, match="trainer is a ReplayTrainer, which does not wait for it"):
        made.check()


def test_versions_are_evaluated_one_after_the_other_also_where_nothing_is_exact(tmp_path: Path) -> None:
    made = judged(None, judges=2).replace(exact_resume=False)
    train(made, launch="threads", run_dir=tmp_path / "run", quiet=True)
    each = [record["evaluation/version"] for record in told(tmp_path / "run")]
    assert each[:3] == [0, 2, 4]
