"""Versions that a trainer pushes: when, of what weights, and what happens when the disk
does not take them."""

import threading
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from tests.workers.arena import SPACES
from tests.workers.test_trainer import Bench
from tests.workers.world import KnownPolicy

from tidemill.api.control_messages import Notice, State
from tidemill.api.limits import Limits
from tidemill.api.weights_header import read_header
from tidemill.core.errors import ConfigError, DatabaseAway, DatabaseError
from tidemill.core.safetensors_io import unpack
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.versions import LATEST
from tidemill.workers import version_writer
from tidemill.workers.version_writer import VersionWriter


@pytest.fixture(autouse=True)
def _the_disk_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_writer, "LAST_PUSH", 120.0)


def kept(folder: Path) -> dict[int, float]:
    """Return the weight of each version that is kept."""
    database = ParameterDatabase(folder / PARAMETERS)
    return {
        v.version: float(database.load("policy", v.version)[0]["w"][0]) for v in database.versions("policy")
    }


def train(bench: Bench, updates: int) -> None:
    """Do so many updates, each of whose versions is on the disk before the next."""
    for _ in range(updates):
        bench.send(0, bench.worker.learner.counters.updates)
        bench.poll()
        assert bench.worker.learner._versions is not None
        bench.worker.learner._versions.wait(60)


def notices(bench: Bench) -> list[str]:
    return [message.text for message in bench.heard() if isinstance(message, Notice)]


def test_the_first_version_is_there_before_anything_is_trained(tmp_path: Path) -> None:
    Bench(folder=tmp_path)
    assert kept(tmp_path) == {0: 0.0}
    database = ParameterDatabase(tmp_path / PARAMETERS)
    assert database.tags("policy") == {LATEST: 0}
    config, spaces = read_header(unpack(database.read("policy", 0)[0])[1])
    assert config["kind"] == "KnownPolicy" and spaces.action.n == 4  # type: ignore[union-attr]


def test_a_version_is_pushed_when_it_is_time_and_at_the_end(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, database_seconds=1000.0, limits=Limits(updates=5))
    train(bench, 2)
    assert kept(tmp_path) == {0: 0.0}
    bench.worker.learner._versions._last -= 1001  # type: ignore[union-attr]
    train(bench, 2)
    assert kept(tmp_path) == {0: 0.0, 3: 3.0}
    train(bench, 1)
    assert bench.worker.state is State.COMPLETED
    assert kept(tmp_path) == {0: 0.0, 3: 3.0, 5: 5.0}
    last = ParameterDatabase(tmp_path / PARAMETERS).versions("policy")[-1]
    assert (last.tags, last.counters["env_steps"]) == ((LATEST,), bench.worker.learner.counters.steps)
    assert last.counters["seconds"] == bench.worker.learner.counters.seconds


def test_the_newest_are_kept(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, database_seconds=1e-9, database_versions=3)
    train(bench, 12)
    assert kept(tmp_path) == {10: 10.0, 11: 11.0, 12: 12.0}


def test_what_is_pushed_are_the_weights_of_its_update_though_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, push = threading.Event(), ParameterDatabase.push

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        push(*arguments)

    bench = Bench(folder=tmp_path, database_seconds=1e-9)
    monkeypatch.setattr(ParameterDatabase, "push", slow)
    for update in range(4):
        bench.send(0, update)
        bench.poll()  # the disk takes its time: nobody waits for it
    assert bench.worker.learner.counters.updates == 4 and kept(tmp_path) == {0: 0.0}
    go_on.set()
    bench.worker.exit()
    assert kept(tmp_path) == {0: 0.0, 1: 1.0, 4: 4.0}


def test_by_updates_a_resumed_run_has_the_versions_of_one_that_was_not_ended(tmp_path: Path) -> None:
    """Whatever time passes, and each is on the disk once its update is done."""
    by = {"database_seconds": 1e-9, "database_updates": 3, "database_versions": None}
    bench = Bench(folder=tmp_path, **by)
    train(bench, 7)
    assert kept(tmp_path) == {0: 0.0, 3: 3.0, 6: 6.0}
    bench.worker.exit()
    assert kept(tmp_path) == {0: 0.0, 3: 3.0, 6: 6.0, 7: 7.0}
    again = Bench(folder=tmp_path, resume="update-7", **by)
    assert kept(tmp_path) == {0: 0.0, 3: 3.0, 6: 6.0}
    train(again, 2)
    assert [*kept(tmp_path)] == [0, 3, 6, 9]


def test_a_run_without_a_folder_or_without_versions_pushes_none(tmp_path: Path) -> None:
    for bench in (Bench(), Bench(folder=tmp_path, database_seconds=None)):
        bench.send(0)
        bench.poll()
        bench.worker.exit()
    assert not (tmp_path / PARAMETERS).exists()


def test_training_goes_on_when_the_disk_is_full_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(folder=tmp_path, database_seconds=1e-9)

    def full(*arguments: Any) -> None:
        raise DatabaseError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ParameterDatabase, "push", full)
        train(bench, 3)
        assert bench.worker.state is State.RUNNING and bench.worker.learner.counters.updates == 3
        assert notices(bench) == [
            "a version was not kept: no space left. It is told when they are kept again"
        ]
    bench.worker.exit()  # there is room again: what failed last is tried again
    assert notices(bench)[1:] == ["versions are kept again"]
    assert kept(tmp_path) == {0: 0.0, 3: 3.0}


def test_an_end_does_not_wait_for_ever_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    bench = Bench(folder=tmp_path, database_seconds=1e-9)
    monkeypatch.setattr(version_writer, "LAST_PUSH", 0.05)
    monkeypatch.setattr(ParameterDatabase, "push", lambda *_: hangs.wait(60))
    bench.send(0)
    bench.poll()
    bench.worker.exit()
    assert bench.worker.state is State.COMPLETED
    assert "did not take the last version" in notices(bench)[-1]
    hangs.set()


def test_while_the_process_is_stopped_its_end_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, push = Bench(folder=tmp_path, database_seconds=1e-9), ParameterDatabase.push

    def late(*arguments: Any) -> None:
        sleep(0.3)
        push(*arguments)

    monkeypatch.setattr(version_writer, "LAST_PUSH", 0.05)
    monkeypatch.setattr(version_writer, "awake", lambda: 100.0)
    monkeypatch.setattr(ParameterDatabase, "push", late)
    bench.send(0)
    bench.poll()
    bench.worker.exit()
    assert kept(tmp_path) == {0: 0.0, 1: 1.0} and notices(bench) == []


def test_a_resumed_run_makes_later_versions_anew(tmp_path: Path) -> None:
    """It was killed after version 3, and its last checkpoint is of update 1: what was
    version 2 or 3 must not be taken for what is going to be."""
    bench = Bench(folder=tmp_path, database_seconds=1e-9)
    train(bench, 1)
    bench.worker._save()
    train(bench, 2)
    database = ParameterDatabase(tmp_path / PARAMETERS)
    database.tag("policy", "best", 3)
    database.tag("policy", "first", 1)
    database.results.add("policy", 1, {"win_rate": 1.0})
    database.results.add("policy", 2, {"win_rate": 1.0})
    again = Bench(folder=tmp_path, resume="update-1", database_seconds=1e-9)
    assert kept(tmp_path) == {0: 0.0, 1: 1.0}
    assert database.tags("policy") == {"first": 1, LATEST: 1}
    (told,) = notices(again)
    assert (
        'version 3 of policy "policy", tagged best, latest, is removed' in told
        and "goes on from version 1" in told
    )
    again.algorithm.policy.parameters()["w"][:] -= 100  # it learns something else now
    train(again, 1)
    assert kept(tmp_path) == {0: 0.0, 1: 1.0, 2: -98.0}
    means = {v.version: set(v.means) for v in database.versions("policy")}
    # of those weights, not of those that bore the number before
    assert means == {0: set(), 1: {"win_rate"}, 2: set()}


def test_a_later_life_begins_while_the_database_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer died on a full disk; what is undone is removed with the next push."""
    train(Bench(folder=tmp_path, database_seconds=1e-9), 3)
    told, policy = list[str](), KnownPolicy().build(SPACES, 0)
    life = VersionWriter(tmp_path / PARAMETERS, "policy", 1e-9, None, 20, {}, {}, told.append)
    policy.version = 1

    def full(*arguments: Any) -> None:
        raise DatabaseAway("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ParameterDatabase, "rewind", full)
        with pytest.raises(DatabaseAway):
            life.begin(policy, {})
        life.begin(policy, {}, waits=True)
        life.look(policy, {})
        life.wait(60)
    policy.version = 2
    policy.parameters()["w"][:] = -98
    life.end(policy, {})
    assert kept(tmp_path) == {0: 0.0, 1: 1.0, 2: -98.0}
    assert told == [
        "a version was not kept: no space left. It is told when they are kept again",
        "versions are kept again",
    ]


def test_a_damaged_database_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / PARAMETERS).mkdir()
    (tmp_path / PARAMETERS / "index.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DatabaseError, match="is damaged"):
        Bench(folder=tmp_path)


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in (
        {"database_seconds": 0.0},
        {"database_seconds": -1.0},
        {"database_versions": 0},
        {"database_updates": 0},
    ):
        with pytest.raises(ConfigError, match="database_"):
            Bench(**changes)


def test_a_push_costs_the_trainer_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waits for the disk runs in another thread."""
    bench = Bench(folder=tmp_path, database_seconds=1e-9)
    who: set[str] = set()
    push = ParameterDatabase.push

    def noted(*arguments: Any) -> None:
        who.add(threading.current_thread().name)
        assert not np.shares_memory(arguments[3]["w"], bench.algorithm.policy.parameters()["w"])
        push(*arguments)

    monkeypatch.setattr(ParameterDatabase, "push", noted)
    train(bench, 2)
    bench.worker.exit()
    assert who == {"push"}
