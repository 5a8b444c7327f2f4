"""Curricula of runs with `exact_resume` in lockstep: a stage begins at a definite round,
whoever was quick, wherever the workers are and wherever the run is cut."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.run.cut_experiments import population
from tests.run.staged import STAGED, UPDATES, newest_cut, staged
from tests.run.test_cuts import differences
from tests.run.test_exact_versions import told
from tests.run.watching import log_of

from tidemill import (
    AgentSpec,
    Experiment,
    Gymnasium,
    Stage,
    check_resume,
    resume,
    train,
)
from tidemill.api.control_messages import Episodes, Measured, RoundOver
from tidemill.core.errors import ConfigError, DatabaseError
from tidemill.run import ending
from tidemill.run.events import read_events
from tidemill.run.rounds import Rounds
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase

LENGTHS = {1: (5, 6), 2: (9, 10), 3: (7, 8), 4: (5, 6)}
"""Of episodes of judges, by stage: from, to."""


def known(folder: Path) -> list[Any]:
    """What the database knows of versions, and their stages. Of the newest it may be just
    about to know more."""
    versions = ParameterDatabase(folder / PARAMETERS).versions("policy")
    return [(each.version, each.means, each.counters["stage"]) for each in versions]


def found(folder: Path) -> dict[float, dict[str, float]]:
    """What evaluations have told of versions, but of the newest, which nobody waits for;
    after a death they may tell of one again."""
    records = {record["evaluation/version"]: record for record in told(folder)}
    return {version: record for version, record in records.items() if version < UPDATES}


@pytest.fixture(autouse=True, scope="module")
def patient_end() -> Iterator[None]:
    """However busy the machine is, all come to rest for a run's last cut."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ending, "CLOSE_DEADLINE", 60.0)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in threads that was never cut."""
    folder = tmp_path_factory.mktemp("stages") / "whole"
    summary = train(staged(), launch="threads", run_dir=folder, quiet=True).summary
    assert summary["stage"] == "4 of 4"
    return folder


def same(whole: Path, other: Path) -> bool:
    return (
        differences(whole, other, "cuts/trainer-1") == []
        and known(other)[:UPDATES] == known(whole)[:UPDATES]
        and found(other) == found(whole)
    )


def test_each_version_has_its_stage_and_is_judged_in_that(whole: Path) -> None:
    assert [stage for *_, stage in known(whole)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4]
    for version, means, stage in known(whole)[:UPDATES:2]:
        assert means["evaluation/stage"].mean == stage, version
        least, most = LENGTHS[stage]
        assert least <= means["evaluation/length"].mean <= most, version


@pytest.mark.parametrize(("launch", "ends"), [("inline", (6, 9)), ("threads", (3, 4, 7))])
def test_a_run_that_ends_goes_on_in_its_stage(
    launch: str, ends: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    """Also where the next version begins a stage."""
    folder, settings = tmp_path / "ended", {"launch": launch, "quiet": True}
    train(staged(ends[0]), run_dir=folder, **settings)
    for updates in (*ends[1:], UPDATES):
        result = resume(folder, limits={"updates": updates}, trust=True, **settings)
        assert result.summary["updates"] == updates
    assert result.summary["stage"] == "4 of 4" and same(whole, folder)


def test_check_resume_finds_no_difference() -> None:
    result = check_resume(staged(), updates=8, launch="threads")
    assert result.exact and result.compared > 100, result


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.run.staged import newest_cut, staged
from tidemill import train
folder = Path(sys.argv[1])
def save(record, control):
    if newest_cut(folder) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    control.save()
train(staged(), launch="processes", run_dir=folder, quiet=True, on_update=save)
"""


def test_a_run_in_processes_that_is_killed_goes_on_in_its_stage(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=STAGED.parents[2], check=False)
    assert run.returncode == -signal.SIGKILL and newest_cut(folder) >= 3
    assert resume(folder, launch="threads", quiet=True, trust=True).summary["status"] == "completed"
    assert same(whole, folder)


def test_a_worker_that_is_killed_leads_all_back_to_the_stage_of_the_newest_cut(
    whole: Path, tmp_path: Path
) -> None:
    folder, killed = tmp_path / "killed", list[str]()

    def kill(record: dict[str, float], control: Any) -> None:
        control.save()
        if newest_cut(folder) and record["update"] >= 5 and not killed:
            killed.append("actor-1")
            log = folder / "logs" / "actor-1.log"
            (process,) = (each for each in psutil.Process().children() if log_of(each) == log)
            process.kill()

    train(staged(), launch="processes", run_dir=folder, quiet=True, on_update=kill)
    assert [event.worker for event in read_events(folder) if event.what == "died"] == killed == ["actor-1"]
    assert same(whole, folder)


def test_a_worker_that_dies_before_the_first_cut_has_all_begin_anew(whole: Path, tmp_path: Path) -> None:
    """Judges, too, though it is known already what they have found."""
    folder, made = tmp_path / "anew", staged()
    environment = Gymnasium(make=f"{STAGED}:Dies", kwargs={"folder": str(folder)})
    actor = made.workers["actor"].replace(environment=environment)
    made = made.replace(workers={**made.workers, "actor": actor})
    train(made, launch="processes", layout="given", run_dir=folder, quiet=True)
    assert len([event for event in read_events(folder) if event.what == "died"]) == 1
    assert same(whole, folder)


def test_a_version_that_was_not_kept_is_pushed_again_also_where_stages_wait_for_its_judges(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, failed = ParameterDatabase.push, list[int]()

    def fail_once(database: ParameterDatabase, policy: str, version: int, *rest: Any) -> None:
        if version == 4 and not failed:
            failed.append(version)
            raise DatabaseError("no space is left")
        push(database, policy, version, *rest)

    monkeypatch.setattr(ParameterDatabase, "push", fail_once)
    train(staged(), launch="threads", run_dir=tmp_path / "run", quiet=True)
    assert failed == [4] and same(whole, tmp_path / "run")


def test_a_round_is_over_once_all_have_told_of_it_and_counts_in_the_order_of_workers() -> None:
    rounds = Rounds(staged(trainers=1))

    def tell(name: str, *returns: float) -> None:
        assert rounds.take(name, Episodes(0, 0, [*returns], [1] * len(returns)))

    assert rounds.parties == ["actor-0", "actor-1", "trainer-0"] and not rounds.due
    rounds.take("evaluation-0", Measured(0, 0, {"evaluation/version": 0.0}))
    assert rounds.due and [*rounds.episodes()] == []
    rounds.tell(0)
    tell("actor-1", 1.0, 2.0)
    rounds.take("actor-1", RoundOver(1))
    tell("actor-1", 3.0)  # of the next one
    tell("actor-0", 4.0)
    rounds.take("trainer-0", RoundOver(1, 1))
    assert not rounds.due
    other = Rounds(staged(trainers=1))  # as in a run that was cut here
    other.load_state(rounds.state())
    for each in (rounds, other):
        each.take("actor-0", RoundOver(1))
        assert each.due
        assert [(name, told.returns) for name, told in each.episodes()] == [
            ("actor-0", [4.0]),
            ("actor-1", [1.0, 2.0]),
        ]
        each.tell(1)
        assert each.stages_for("trainer-0") == {1: 0, 2: 1} and each.stages_for("judge-0") is None
        assert not each.due
    rounds.take("actor-0", RoundOver(2))
    rounds.take("actor-1", RoundOver(2))
    rounds.take("trainer-0", RoundOver(2, 2))
    assert not rounds.due  # version 2 is still to be judged
    rounds.take("evaluation-0", Measured(9, 0, {"evaluation/version": 2.0}))
    assert rounds.due and [told.returns for _, told in rounds.episodes()] == [[3.0]]


def watched() -> Experiment:
    made = staged()
    evaluation = made.workers["evaluation"].replace(updates=None)
    return made.replace(workers={**made.workers, "evaluation": evaluation})


def idle() -> Experiment:
    made = staged()
    actor = made.workers["actor"].replace(agents=(AgentSpec(samples=None),), count=1)
    return made.replace(workers={**made.workers, "idle": actor})


def of_members() -> Experiment:
    return population(0, 20).replace(curriculum=(Stage(until="update > 2"), Stage()))


def by_the_clock() -> Experiment:
    return staged().replace(curriculum=(Stage(until="time/seconds > 3"), Stage()))


REFUSED: dict[str, tuple[Callable[[], Experiment], str]] = {
    "by the clock": (by_the_clock, 'ends by "time/seconds", a matter of time'),
    "by an evaluation that watches": (watched, 'ends by "evaluation/return", a matter of time'),
    "beside actors that nobody waits for": (idle, "a curriculum and workers.idle, whose episodes count"),
    "of a population": (of_members, "a curriculum and a Population, .*; launch inline"),
}


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_stages_that_would_begin_at_any_time_are_refused_by_name(
    make: Callable[[], Experiment], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"exact_resume = True cannot be had here: .*{match}"):
        train(make(), launch="threads", run_dir=tmp_path / "run", quiet=True)


def test_judges_by_updates_play_the_stage_of_a_version_also_where_nothing_is_exact(tmp_path: Path) -> None:
    made = staged(8, trainers=1).replace(exact_resume=False)
    first, second = Stage(options={"width": 1, "length": 5}, until="update >= 3"), made.curriculum[1]
    made = made.replace(curriculum=(first, second.replace(until="")))
    train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
    judged = {stage: means["evaluation/length"].mean for _, means, stage in known(tmp_path / "run") if means}
    assert [*judged] == [1, 2] and all(LENGTHS[i][0] <= judged[i] <= LENGTHS[i][1] for i in judged)
