"""How many threads may compute in the processes of an experiment, and how these end."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.works import cartpole_small

from tidemill.core.control_groups import MemoryKills
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.launchers import processes
from tidemill.launchers.cause_of_end import killer
from tidemill.launchers.processes import ProcessesLauncher, layer_threads
from tidemill.launchers.worker_group import WorkerGroup
from tidemill.launchers.worker_process import COMMAND
from tidemill.layouts.experiment_layout import apply, layout_of


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {"actors": 1, "trainers": 1, "together": True, "slots": 1}, [2]),
        # one learns, the other waits
        (2, {"actors": 2, "trainers": 1, "together": True, "slots": 1}, [2, 1]),
        (8, {"actors": 4, "trainers": 2, "together": True, "slots": 1}, [4, 4, 2, 2]),
        # all learn
        (2, {"actors": 2, "trainers": 2, "together": True, "slots": 1}, [1, 1]),
        # actors go on while the trainer learns
        (2, {"actors": 2, "trainers": 1, "together": True, "slots": 2}, [1, 1]),
        (2, {"actors": 1, "trainers": 1, "slots": 2}, [1, 1]),
        (2, {"actors": 2, "trainers": 1, "slots": 1}, [0, 0, 0]),
    ],
)
def test_cores_whose_workers_wait_compute_for_those_who_learn(monkeypatch, cores, settings, expected):
    monkeypatch.setattr(processes, "cores", lambda: cores)
    experiment = cartpole_small()
    laid_out = apply(experiment, replace(layout_of(experiment), lanes=2, **settings))
    groups = laid_out.processes()
    assert [layer_threads(laid_out, names, groups) for names in groups] == expected


@pytest.mark.parametrize(
    ("here", "anywhere", "told"),
    [
        (0, 0, "by hand, or by another program"),
        (1, 1, "its control group has no more"),
        (0, 1, "most likely"),
    ],
)
def test_who_sends_sigkill_is_told_by_what_the_system_counts(here: int, anywhere: int, told: str) -> None:
    assert told in killer(MemoryKills(2, 7), MemoryKills(2 + here, 7 + anywhere))


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A launcher of two processes, `first` and `second`, and what the system has killed
    (`kills`)."""
    found = SimpleNamespace(launcher=ProcessesLauncher(), kills=MemoryKills(0, 0))
    monkeypatch.setattr(processes, "memory_kills", lambda: found.kills)
    found.launcher._disk = FolderThread(tmp_path, 2.0)
    for name in ("first", "second"):
        group = WorkerGroup([name], tmp_path / f"{name}.log", None, 0.0, -1, -1, 0)
        group.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        group.pidfd = os.pidfd_open(group.process.pid)
        found.launcher._groups.append(group)
        found.launcher._group_of[name] = group
        setattr(found, name, group)
    yield found
    for group in (found.first, found.second):
        group.process.kill()
        group.process.wait()
        os.close(group.pidfd)


def test_a_kill_for_want_of_memory_explains_one_end_alone(dying: SimpleNamespace) -> None:
    for name, kills, told in [
        ("first", MemoryKills(1, 1), "out of memory"),
        ("second", MemoryKills(1, 1), "by hand"),
    ]:
        dying.kills = kills
        getattr(dying, name).process.kill()
        for _ in range(2):  # of workers that take turns each is asked for
            assert told in dying.launcher.obituary(name)


def test_one_that_struck_the_process_which_waits_explains_no_end(dying: SimpleNamespace) -> None:
    spares = dying.launcher._spares
    spares.start(["sleep", "60"], os.environ)
    (spare,) = spares.waiting
    dying.kills = MemoryKills(1, 1)
    for process in (spare.process, dying.first.process):
        process.kill()
    spare.process.wait()
    assert "by hand" in dying.launcher.obituary("first")
    assert spares.waiting == []
    dying.kills = MemoryKills(2, 2)
    dying.second.process.kill()
    assert "out of memory" in dying.launcher.obituary("second")
    spares.end()


def test_two_kills_for_want_of_memory_explain_two_ends(dying: SimpleNamespace) -> None:
    dying.kills = MemoryKills(2, 2)
    for name in ("first", "second"):
        getattr(dying, name).process.kill()
        assert "out of memory" in dying.launcher.obituary(name)


def test_who_begins_between_two_such_ends_has_counted_both(dying: SimpleNamespace) -> None:
    dying.kills = MemoryKills(2, 2)
    dying.first.process.kill()
    assert "out of memory" in dying.launcher.obituary("first")
    dying.first.kills = dying.kills  # of its next life
    dying.second.process.kill()
    assert "out of memory" in dying.launcher.obituary("second")
    assert dying.first.kills == MemoryKills(2, 2)  # so that a third one explains its end


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ({}, True),
        ({"_started": Counter({(("nice", *COMMAND), 1): 3, (COMMAND, 1): 3})}, False),
        ({"_transport": SimpleNamespace(renews=False)}, False),
        ({"_group_of": {"trainer-0": None}}, False),
    ],
)
def test_a_process_waits_for_the_next_life_where_it_can_be_of_any(
    changed: dict[str, object], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an experiment whose trainer has no second life."""
    launcher, made = ProcessesLauncher(), cartpole_small()
    mortal = made.workers["trainer"].replace(restarts=None)
    job = SimpleNamespace(experiment=made.replace(workers={**made.workers, "trainer": mortal}))
    as_ever = {
        "_job": job,
        "_started": Counter({(COMMAND, 1): 3, (COMMAND, 2): 1}),
        "_transport": SimpleNamespace(renews=True),
        "_group_of": {"trainer-0": None, "actor-0": None},
        "_logs": Path("."),
        "_disk": SimpleNamespace(do=lambda look: look()),
    }
    for name, value in {**as_ever, **changed}.items():
        monkeypatch.setattr(launcher, name, value, raising=False)
    try:
        for _ in range(2):
            launcher._have_spare()
            assert len(launcher._spares.waiting) == waits
        if waits:
            assert launcher._spares.waiting[0].environment["OMP_NUM_THREADS"] == "1"
    finally:
        launcher._spares.end()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessesLauncher]:
    """One of an actor that may live again, of whose process nothing was started."""
    made, job = ProcessesLauncher(), SimpleNamespace(experiment=cartpole_small())
    made._started[COMMAND, 1] += 1
    monkeypatch.setattr(processes, "SPARE_AFTER_S", 0.0)
    for name, value in {
        "_job": job,
        "_transport": SimpleNamespace(renews=True),
        "_group_of": {"actor-0": None},
        "_logs": Path("."),
        "_disk": SimpleNamespace(do=lambda look: look()),
        "_bell": SimpleNamespace(wait=lambda seconds: None),
    }.items():
        monkeypatch.setattr(made, name, value, raising=False)
    yield made
    made._spares.end()


def test_no_process_waits_for_the_next_life_where_the_run_ends(launcher: ProcessesLauncher) -> None:
    launcher.tell_of_end(True)
    launcher.wait(0.0)
    assert launcher._spares.waiting == []
    launcher.tell_of_end(False)  # all go back behind their limit
    launcher.wait(0.0)
    assert len(launcher._spares.waiting) == 1


def test_where_the_folder_hangs_no_process_is_started_before_it_answers(launcher: ProcessesLauncher) -> None:
    def hangs(look: object) -> None:
        raise Unanswered

    answers, launcher._disk = launcher._disk, SimpleNamespace(do=hangs)  # type: ignore[assignment]
    launcher.tell_of_end(False)
    launcher.wait(0.0)
    assert launcher._spares.waiting == []
    launcher._disk = answers
    launcher.wait(0.0)
    assert len(launcher._spares.waiting) == 1


@pytest.mark.parametrize("lacks", ["memory", "places"])
def test_where_little_is_left_no_process_waits_for_the_next_life(
    lacks: str, launcher: ProcessesLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "memory":
        monkeypatch.setattr(processes.memory, "available", lambda: 99_000_000)
    else:
        monkeypatch.setattr(processes, "free_processes", lambda: 60)
    launcher._have_spare()
    assert launcher._spares.waiting == []


def test_a_dead_process_keeps_its_number_until_it_is_forgotten(dying: SimpleNamespace) -> None:
    process = dying.first.process
    process.send_signal(signal.SIGKILL)
    assert "SIGKILL" in dying.launcher.obituary("first")
    os.killpg(process.pid, 0)  # raises where nobody has the number
    assert process.returncode is None
    assert "SIGKILL" in dying.launcher.obituary("first")


def test_a_process_that_has_hung_up_and_runs_is_told_as_that(dying: SimpleNamespace) -> None:
    assert dying.launcher.obituary("first") == "it hung up, but its process still runs"


def test_the_status_is_told_of_who_ignores_its_children(dying: SimpleNamespace) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        dying.second.process.kill()
        assert "its process ended with status 0" in dying.launcher.obituary("second")
    finally:
        signal.signal(signal.SIGCHLD, before)
