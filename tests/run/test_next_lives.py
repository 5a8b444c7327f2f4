"""Next lives that do not come to run: the system refuses them, or they hang as they
begin. That is one more death."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.run.cut_experiments import experiment
from tests.run.test_supervisor import lives, process_of
from tests.run.watching import EXPERIMENTS, leftovers, wait_until

from tidemill.api.control_messages import State
from tidemill.core.errors import RunError
from tidemill.core.user_code_loading import load_file
from tidemill.launchers import processes
from tidemill.run import supervisor
from tidemill.run.deaths import Deaths
from tidemill.run.events import Event, read_events
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.run.status import RunStatus, read_status
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")


class Refusal:
    """The system refuses what takes a descriptor, or a process, once that has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._times = monkeypatch, 0

    def begin(self, times: int) -> None:
        """Refuse the next calls."""
        self._times = times

    def of(self, place: Any, name: str, number: int) -> None:
        """Have calls of this name, of an object that has it, refused with that error."""
        ours = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._times:
                self._times -= 1
                raise OSError(number, os.strerror(number))
            return ours(*args, **kwargs)

        self._monkeypatch.setattr(place, name, call)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Refusal:
    monkeypatch.setattr(processes, "SPARE_AFTER_S", inf)  # it would be taken
    return Refusal(monkeypatch)


def killing(path: Path, names: list[str], first: Callable[[], object]) -> Any:
    """Return what kills workers' processes once all run, does something `first`, and
    stops the run some updates after all live again."""
    killed, since = list[psutil.Process](), list[float]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        members = control._controller.state.members.values()
        if not killed and all(member.state is State.RUNNING for member in members):
            killed.extend(found for name in names if (found := process_of(path, name)) is not None)
            first()
            for process in killed:
                process.kill()
        elif len(lives(path)) == len(names):
            since.append(metrics["update"])
            if len(since) == 10:
                control.stop("it goes on")

    return on_update


def deaths(path: Path) -> list[Event]:
    return [event for event in read_events(path) if event.what == "died"]


@pytest.mark.parametrize(
    ("place", "name", "number", "said"),
    [
        (os, "memfd_create", errno.EMFILE, "no more files may be open"),
        (processes, "WorkerProcess", errno.EAGAIN, "no more processes or threads are allowed"),
        (os, "pidfd_open", errno.EMFILE, "no more files may be open"),
    ],
)
def test_a_next_life_that_the_system_refuses_begins_later(
    tmp_path: Path, refusal: Refusal, place: Any, name: str, number: int, said: str
) -> None:
    """Another one that begins meanwhile, and is to be read by it, does not wait."""
    path = tmp_path / "run"
    refusal.of(place, name, number)
    on_update = killing(path, ["actor-0", "server-0"], lambda: refusal.begin(1))
    result = train(experiments.cartpole(), run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    assert sorted(lives(path)) == ["actor-0", "server-0"]
    (refused,) = [event for event in deaths(path) if "cannot be started" in event.cause]
    assert refused.life == 2 and said in refused.cause
    assert leftovers(path) == []


def test_one_that_the_system_goes_on_refusing_ends_the_run_with_both_causes(
    tmp_path: Path, refusal: Refusal
) -> None:
    path, made = tmp_path / "run", experiments.cartpole()
    refusal.of(processes, "WorkerProcess", errno.ENOMEM)
    actors = made.workers["actor"].replace(restarts=2)
    made = made.replace(workers={**made.workers, "actor": actors})
    on_update = killing(path, ["actor-0"], lambda: refusal.begin(100))
    with pytest.raises(RunError) as caught:
        train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    said = str(caught.value)
    assert said.startswith("actor-0 is gone: its process was killed by SIGKILL")
    assert "its next life cannot be started: Cannot allocate memory: no more memory is given" in said
    assert "death 3 of actor-0 within 600 s; 2 are allowed (restarts, restarts_within_s)" in said
    assert "go on from the last one by: " in said
    assert [event.life for event in deaths(path)] == [1, 2, 3]
    assert leftovers(path) == []


def test_of_those_that_live_together_the_one_that_died_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    """And no other one has died, however often; it is named where all go back."""
    path, killed = tmp_path / "run", list[psutil.Process]()
    refusal.of(processes, "WorkerProcess", errno.ENOMEM)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killed and (process := process_of(path, "trainer-0")) is not None:
            killed.append(process)
            refusal.begin(2)
            process.kill()
        elif lives(path) == ["actor-0", "actor-1", "trainer-0"]:
            control.stop("it goes on")

    made = experiment(0, 100_000, count=2)
    result = train(made, launch="processes", run_dir=path, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    assert [(event.worker, event.life) for event in deaths(path)] == [
        ("trainer-0", life) for life in (1, 2, 3)
    ]
    (back,) = [event for event in read_events(path) if event.what == "went back"]
    assert back.worker == "trainer-0" and back.seconds > 0.5
    assert leftovers(path) == []


def test_a_next_life_whose_log_cannot_be_opened_begins_without(tmp_path: Path) -> None:
    path = tmp_path / "run"
    on_update = killing(path, ["actor-0"], lambda: shutil.rmtree(path / "logs"))
    result = train(experiments.cartpole(), run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    assert lives(path) == ["actor-0"]
    (told,) = [e.cause for e in read_events(path) if "prints is lost" in e.cause]
    log = path / "logs" / "actor-0.log"
    assert told.startswith(f"{log} cannot be written: No such file or directory; what life 2 of actor-0")
    assert leftovers(path) == [] and Path(os.devnull).exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[threading.Thread]:
    """Have who hangs as it begins be late at once: from when it does until it counts as
    dead."""
    flag, patience, bury = tmp_path / "flag", supervisor.READY_DEADLINE, Deaths.bury

    def bury_then(deaths: Deaths, name: str, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(supervisor, "READY_DEADLINE", patience)
        bury(deaths, name, *args, **kwargs)

    def watch() -> None:
        wait_until(lambda: flag.exists() and flag.read_text(), 240, "it hangs as it begins")
        if flag.with_suffix(".stop").exists():
            process = process_of(tmp_path / "run", "actor-0")
            assert process is not None
            process.suspend()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 60, "it is stopped")
        monkeypatch.setattr(supervisor, "READY_DEADLINE", 0.0)

    monkeypatch.setattr(Deaths, "bury", bury_then)
    watcher = threading.Thread(target=watch)
    watcher.start()
    yield watcher
    watcher.join()


@pytest.mark.parametrize("least", [None, 0.6])
def test_trainers_wait_while_fewer_actors_run_than_must(tmp_path: Path, least: float | None) -> None:
    """One of two actors takes long to live again. The trainer trains on what the other
    one sends or, where more than one must run, waits."""
    path, flag = tmp_path / "run", tmp_path / "flag"
    made = experiments.hangs_as_it_begins(str(flag), always=False)
    actor, trainer = made.workers["actor"], made.workers["trainer"]
    workers = {  # a sample of any actor is a batch
        "actor": actor.replace(count=2, min_running=least),
        "trainer": trainer.replace(batch_size=1),
    }

    def look() -> None:
        wait_until(flag.exists, 100, "its next life begins")
        folder = RunFolder.open(path)

        def status() -> RunStatus:
            found = read_status(folder)
            assert found is not None
            return found

        if least is None:
            before = status().updates
            wait_until(lambda: status().updates > before + 3, 100, "updates go on without it")
        else:
            states = lambda: {each.name: each.state for each in status().workers}  # noqa: E731
            wait_until(lambda: states()["trainer-0"] == "paused", 100, "the trainer pauses")
            before = status().updates
            assert [status().updates for _ in range(20)] == [before] * 20
            assert lives(path) == []
        flag.with_suffix(".over").touch()

    again = killing(path, ["actor-0"], flag.with_suffix(".again").touch)
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        result = train(
            made.replace(workers=workers), run_dir=path, source=EXPERIMENTS, quiet=True, on_update=again
        )
        looked.result()
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    told = [event.cause for event in read_events(path) if "actors" in event.cause]
    assert len(told) == (0 if least is None else 2)
    if told:
        said = "1 of 2 actors of actor run, and 2 must (min_running = 0.6): trainers wait until they do"
        assert told[0] == said and told[1].startswith("enough actors run again: trainers go on, after ")
    assert leftovers(path) == []


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_next_life_that_hangs_as_it_begins_is_one_more_death(tmp_path: Path, stopped: bool) -> None:
    path, flag = tmp_path / "run", tmp_path / "flag"
    if stopped:
        flag.with_suffix(".stop").touch()
    on_update = killing(path, ["actor-0"], flag.with_suffix(".again").touch)
    made = experiments.hangs_as_it_begins(str(flag), always=False)
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    killed, hung = deaths(path)
    assert (killed.worker, killed.life, hung.worker, hung.life) == ("actor-0", 1, "actor-0", 2)
    assert hung.cause.startswith("it did not become ready, and said nothing for 0 s: ")
    assert not stopped or hung.cause.endswith(": its process is stopped (by SIGSTOP, or from a terminal)")
    assert [event.life for event in read_events(path) if event.what == "lives"] == [3]
    assert leftovers(path) == []


def test_one_that_hangs_each_time_as_it_begins_ends_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flag = tmp_path / "run", tmp_path / "flag"

    def first() -> None:
        flag.with_suffix(".again").touch()
        monkeypatch.setattr(supervisor, "READY_DEADLINE", 0.0)

    made = experiments.hangs_as_it_begins(str(flag), always=True)
    with pytest.raises(
        RunError,
        match=r"actor-0 is gone, death 3 before it ran, whatever .*: it did not become ready, and said",
    ) as caught:
        train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=killing(path, ["actor-0"], first))
    assert "go on from the last one by: " in str(caught.value)
    assert leftovers(path) == []
