"""What follows from a worker's death: who dies with it, how often a group lives again,
and what is said."""

import errno
import io
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.run.watching import EXPERIMENTS, leftovers, log_of, wait_until

import tidemill
from tidemill import Experiment, Gymnasium, populate
from tidemill.api.control_messages import State
from tidemill.core.errors import Overtaken, RunError
from tidemill.core.folder_thread import FolderThread
from tidemill.core.user_code_loading import load_file
from tidemill.run.events import Event, EventLog, read_events
from tidemill.run.run_control import RunControl
from tidemill.run.supervisor import live_together
from tidemill.store.fence import let_go, take
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")


def test_who_dies_with_whom() -> None:
    assert live_together(experiments.cartpole(), outlive=True) == {
        name: [name] for name in ("actor-0", "server-0", "trainer-0")
    }
    # equal trainers, each with the actor of its process; the others wait for it
    equal = live_together(experiments.equal(), outlive=True)
    assert equal["actor-0"] == equal["trainer-0"] == ["actor-0", "trainer-0"]
    assert equal["actor-1"] == equal["trainer-1"] == ["actor-1", "trainer-1"]
    # nobody goes back with a replay memory
    memory = experiments.numbered_memory(slots=True)
    everybody = ["actor-0", "actor-1", "server-0", "trainer-0"]
    assert live_together(memory, outlive=True) == {name: [name] for name in everybody}
    # but on several hosts, and where it keeps single frames of stacked ones: who gathers
    # for it, or plays its policy, and with it alone
    trainer = memory.workers["trainer"].replace(buffer=tidemill.Replay(capacity=1000, frame_stack=4))
    stacked = memory.replace(workers={**memory.workers, "trainer": trainer})
    for limited in (live_together(memory, outlive=False), live_together(stacked, outlive=True)):
        assert limited.pop("trainer-0") == everybody
        assert limited == {name: [name] for name in everybody[:-1]}
    # where steps are granted in turn they do with whomever
    exact = experiments.slots()
    trainer = exact.workers["trainer"].replace(exact=True)
    limited = live_together(exact.replace(workers={**exact.workers, "trainer": trainer}), outlive=True)
    assert list(limited) == limited["actor-0"] == limited["trainer-0"] == ["actor-0", "trainer-0"]


def process_of(path: Path, worker: str) -> psutil.Process | None:
    """Return the process of a worker of this process's run in `path`, None where there is
    none."""
    log = path / "logs" / f"{worker}.log"
    return next((process for process in psutil.Process().children() if log_of(process) == log), None)


def lives(path: Path) -> list[str]:
    """Return the workers that live again, as far as that is written down."""
    return sorted(event.worker for event in read_events(path) if event.what == "lives")


def dying(environment: str, restarts: int | None) -> Experiment:
    made: Experiment = experiments.dies(environment)
    actors = made.workers["actor"].replace(restarts=restarts)
    return made.replace(workers={**made.workers, "actor": actors})


def end_of(made: Experiment, path: Path) -> str:
    with pytest.raises(RunError) as caught:
        train(made, run_dir=path, source=EXPERIMENTS, quiet=True)
    return str(caught.value)


def test_a_run_goes_on_without_who_only_watches_and_dies_too_often(tmp_path: Path) -> None:
    path, said = tmp_path / "run", "the run goes on without judge-0"

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if any(said in event.cause for event in read_events(path)):
            control.stop()

    made = experiments.judged("DiesInStep")
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert result.summary["status"] == "completed"
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == ["judge-0"] * 2
    (told,) = [event.cause for event in events if said in event.cause]
    assert "death 2 of judge-0 within 600 s; 1 are allowed" in told
    assert leftovers(path) == []
    # one that never ran is no loss of a run that goes on
    assert "death 2 of judge-0" in end_of(experiments.judged("DiesAtOnce"), tmp_path / "other")


@pytest.mark.parametrize("updates", [None, 2])
def test_members_go_on_without_a_population_for_which_they_do_not_wait(
    tmp_path: Path, updates: int | None
) -> None:
    """Where they do, the run ends."""
    path, said, killed = tmp_path / "run", "the run goes on without population-0", list[int]()
    one = experiments.experiment(Gymnasium(id="CartPole-v1"), database_updates=updates)
    members = populate(one, [{}, {}], explore={}, updates=updates, restarts=1)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        population = control._controller.state.members["population-0"]
        if any(said in event.cause for event in read_events(path)):
            control.stop()
        elif population.state is State.RUNNING and population.life == len(killed) < 2:
            process = process_of(path, "population-0")
            assert process is not None
            killed.append(process.pid)
            process.kill()

    if updates is not None:
        with pytest.raises(RunError, match="death 2 of population-0 within 600 s; 1 are allowed") as caught:
            train(members, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
        assert "Training waits for what it decides" in str(caught.value)
        assert re.search(r"the run has all lives again.*\n.*go on from the last one by: ", str(caught.value))
        return
    result = train(members, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert result.summary["status"] == "completed"
    (told,) = [event.cause for event in read_events(path) if said in event.cause]
    assert "death 2 of population-0" in told and "Its members go on with what they have" in told
    assert leftovers(path) == []


def test_a_group_that_dies_too_often_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    said = end_of(dying("DiesInStep", 2), tmp_path / "run")
    assert re.search(r"actor-0 is gone: its process was killed by SIGKILL", said)
    assert re.search(r"death 3 of actor-0 within 600 s; 2 are allowed \(restarts, restarts_within_s\)", said)
    events = read_events(tmp_path / "run")
    assert [(event.worker, event.life) for event in events if event.what == "died"] == [
        ("actor-0", 1),
        ("actor-0", 2),
        ("actor-0", 3),
    ]
    assert [event.life for event in events if event.what == "lives"] == [2, 3]
    assert events[-1].what == "ended" and events[-1].cause.startswith("failed: actor-0 is gone")


def test_none_has_the_first_death_end_the_run(tmp_path: Path) -> None:
    said = end_of(dying("DiesInStep", None), tmp_path / "run")
    assert "restarts = None of actor: the first death ends the run" in said


def test_actors_that_all_die_as_they_begin_are_one_error(tmp_path: Path) -> None:
    made = dying("DiesAtOnce", 5)
    actors = made.workers["actor"].replace(count=3)
    said = end_of(made.replace(workers={**made.workers, "actor": actors}), tmp_path / "run")
    assert re.search(
        r"actor-\d is gone, death 3 within 60 s of actor \(.*\), of which none has run yet, .* SIGKILL", said
    )
    assert not (tmp_path / "run" / "events.jsonl").exists()  # it never began


def test_those_that_die_together_die_one_death(tmp_path: Path) -> None:
    """As where a host is lost: equal trainers, each with its actor."""
    made = experiments.equal()
    workers = {name: config.replace(restarts=1) for name, config in made.workers.items()}
    made = made.replace(workers=workers)
    path, killed, since = tmp_path / "run", list[psutil.Process](), list[float]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killed:
            killed.extend(p for p in psutil.Process().children() if log_of(p).parent == path / "logs")
            for process in killed:
                process.kill()
        elif len(lives(path)) == 4:
            since.append(metrics["update"])
            if len(since) == 10:
                control.stop("it goes on")

    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    events = read_events(path)
    assert sorted((event.worker, event.life) for event in events if event.what == "died") == [
        ("actor-0", 1), ("actor-1", 1), ("trainer-0", 1), ("trainer-1", 1)
    ]  # fmt: skip
    assert sum(event.what == "went back" for event in events) == 1


def test_a_buffer_worker_waits_for_those_who_fill_it_to_live_again(tmp_path: Path) -> None:
    path, killers, since = tmp_path / "run", list[threading.Thread](), list[float]()

    def kill_both() -> None:
        actor, buffers = process_of(path, "actor-0"), process_of(path, "buffers-0")
        actor.kill()
        wait_until(
            lambda: process_of(path, "actor-0") not in (None, actor), 60, "the actor's next life begins"
        )
        buffers.kill()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killers:
            killers.append(threading.Thread(target=kill_both))
            killers[0].start()
        elif "buffers-0" in lives(path):
            since.append(metrics["update"])
            if len(since) == 10:
                control.stop("it goes on")

    made = experiments.forwarded()
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    killers[0].join()
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    assert lives(path) == ["actor-0", "buffers-0"]


def test_who_dies_after_a_signal_dies_as_the_run_ends(tmp_path: Path) -> None:
    """Also where its death is heard of before the signal is looked at: a batch system
    ends all processes at once."""
    path, killed = tmp_path / "run", list[psutil.Process]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killed and (actor := process_of(path, "actor-0")) is not None:
            killed.append(actor)
            actor.kill()
            signal.raise_signal(signal.SIGTERM)
            control._controller._deaths.bury("actor-0")

    result = train(experiments.cartpole(), run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["reason"]) == ("interrupted", "SIGTERM")
    assert [event for event in read_events(path) if event.what == "died"] == []
    assert [True for event in read_events(path) if "actor-0 is gone, as the run ended" in event.cause]


def test_events_are_read_back_but_for_torn_lines(tmp_path: Path) -> None:
    told = [Event(time.time(), "died", "actor-0", 1, cause="it was killed"), Event(1.0, "ended", cause="…")]
    thread = FolderThread(tmp_path, 60.0)
    log = EventLog(tmp_path, thread)
    log.write(told[:1])
    log.write([])
    log.write(told[1:])
    path = tmp_path / "events.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(tmp_path / "away")
    path.mkdir()  # nothing can be written there
    log.write([Event(2.0, "told", cause="later")])
    path.rmdir()
    (tmp_path / "away").rename(path)
    log.write([])  # what had to wait
    told.append(Event(2.0, "told", cause="later"))
    with path.open("ab") as file:
        file.write(b'{"time":2.0,"wh')
    thread.close()
    assert read_events(tmp_path) == told
    assert read_events(tmp_path / "nowhere") == []


def test_events_that_fail_late_cut_off_none_that_another_runner_has_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(io.FileIO):
        def write(self, data: object) -> int:
            (tmp_path / "epochs/2").touch()
            with path.open("ab") as other:
                other.write(b"another runner's\n")
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    def late(path: Path, mode: str, buffering: int, opener: Any) -> io.FileIO:
        return Late(path, mode, opener=opener)

    path, thread = tmp_path / "events.jsonl", FolderThread(tmp_path, 60.0)
    take(tmp_path)
    log = EventLog(tmp_path, thread)
    monkeypatch.setattr("tidemill.run.events.open", late, raising=False)
    with pytest.raises(Overtaken):
        log.write([Event(1.0, "told", cause="…")])
    thread.close()
    let_go(tmp_path)
    assert path.read_bytes() == b"another runner's\n"
