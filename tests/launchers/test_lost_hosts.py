"""Hosts that are lost: their workers are many deaths at once, and live again on a host
that is left, or on their own once that is back."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.networked import NETWORK
from tests.launchers.host_launchers import (
    LOOPBACK,
    PATIENT,
    ActorOnB,
    BufferOnB,
    OneTellsNonsense,
    ServerOnB,
    SixHosts,
    ThreeHosts,
)
from tests.launchers.test_hosts import LAUNCHERS, agents_of, events, experiment, weights, worker_of
from tests.run.experiments import ENVIRONMENTS
from tests.run.test_deaths import acted_rows
from tests.run.watching import EXPERIMENTS, Run, wait_until

from tidemill import AgentSpec, Experiment, Gymnasium, train
from tidemill.core.user_code_loading import load_attribute
from tidemill.launchers.stand_in import StandIn
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.run.status import read_status
from tidemill.store.checkpoint import checkpoints, read_newest
from tidemill.store.fence import EPOCHS
from tidemill.training.check_resume import compare

NETWORKED = Path(__file__).parents[2] / "benchmarks" / "networked.py"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(
        function: str,
        launcher: str,
        restarts: int = 5,
        file: Path = LAUNCHERS,
        code: str = PATIENT,
        settings: Sequence[str] = (),
    ) -> Run:
        words = [f"--set=workers.{group}.restarts={restarts}" for group in ("actor", "trainer")]
        words += [f"--set=workers.{setting}" for setting in settings]
        launch = f"{file}:{launcher}"
        runs.append(Run(tmp_path, function, "--layout", "given", *words, launch=launch, code=code))
        runs[-1].wait_for_updates()
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def agents(run: Run) -> dict[str, psutil.Process]:
    """Return the processes of agents, by their names."""
    return agents_of(run.processes())


def lost(run: Run) -> tuple[int, int]:
    """Return what events tell to be lost: samples, and env steps of others."""
    samples, begun = 0, dict[tuple[str, int], int]()
    for event in (*events(run, "died"), *events(run, "lost")):
        samples += event.samples
        begun[event.worker, event.life] = event.steps
    return samples, sum(begun.values())


def homes(run: Run) -> dict[str, str]:
    """Return where each worker lives, as its status tells."""
    status = read_status(RunFolder.open(run.path))
    assert status is not None
    return {worker.name: worker.host for worker in status.workers}


def goes_on(run: Run) -> None:
    lines = lambda: len((run.path / "metrics.jsonl").read_text().splitlines())  # noqa: E731
    before = lines()
    wait_until(lambda: lines() > before + 2, 120, "updates go on")


def ends_cleanly(run: Run) -> None:
    os.killpg(run.main.pid, signal.SIGINT)
    status, text = run.ended()
    assert status == 130, text
    assert run.summary()["status"] == "interrupted"
    last = read_metrics(run.path)[-1]
    assert (last.get("lost/samples", 0), last.get("lost/steps", 0)) == lost(run)
    run.nothing_is_left()


def test_a_share_goes_on_from_host_to_host(start: Callable[..., Run]) -> None:
    run = start("cartpole", "ThreeHosts")
    there = agents(run)
    there["b"].kill()
    wait_until(lambda: len(events(run, "lives")) >= 2, 120, "its workers live again")
    assert agents(run)["b#1"].parent() == there["c"]  # nobody is busy there
    goes_on(run)
    wait_until(
        lambda: homes(run) == {"trainer-0": "runner", "actor-0": "c", "server-0": "c"}, 60, "it is told"
    )
    there["c"].kill()  # and what it holds goes with it
    wait_until(lambda: len(events(run, "lives")) >= 4, 120, "they live again with the runner")
    wait_until(lambda: agents(run).keys() == {"b#2"}, 120, "what the lost host held has ended")
    goes_on(run)
    assert {event.worker for event in events(run, "died")} == {"actor-0", "server-0"}
    wait_until(lambda: set(homes(run).values()) == {"runner"}, 60, "it is told")
    ends_cleanly(run)
    # whoever they were may write no more into the run's folder, if they saw it
    assert {path.name for path in (run.path / EPOCHS).iterdir()} == {"1", "1.actor-0.2", "1.server-0.2"}
    kept = RunFolder.open(run.path).read("placement.json")
    assert [len(kept[host]["workers"]) for host in ("runner", "b", "c")] == [3, 0, 0]


@pytest.mark.parametrize("function", ["equal", "equal_by_torch"])
def test_a_trainer_waits_for_an_equal_one_whose_host_is_lost(
    start: Callable[..., Run], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run = start(function, "TwoHosts")
    agents(run)["b"].kill()
    wait_until(lambda: len(events(run, "lives")) == 2, 120, "the workers of that host live again")
    goes_on(run)
    assert events(run, "went back") == [] and len(events(run, "lives")) == 2
    assert [*run.path.glob("sums-*")] == []
    ends_cleanly(run)


def test_sums_per_host_go_on_once_one_lives_again_for_which_others_wait_by_way_of_another(
    start: Callable[..., Run],
) -> None:
    settings = ("trainer.count=4", "actor.count=4", 'trainer.sums="hosts"')
    run = start("equal", "FourTrainers", settings=settings)
    run.wait_for_worker("actor-1+trainer-1").kill()  # of whose death nobody on the other host has to know
    wait_until(lambda: len(events(run, "lives")) == 2, 120, "it lives again, and its actor")
    goes_on(run)
    agents(run)["b"].kill()
    wait_until(lambda: len(events(run, "lives")) == 6, 120, "the workers of that host live again")
    goes_on(run)
    assert events(run, "went back") == [] and len(events(run, "lives")) == 6
    ends_cleanly(run)


def test_trainers_wait_while_too_few_actors_run_since_their_host_is_lost(start: Callable[..., Run]) -> None:
    run = start("cartpole", "ActorOnB", settings=("actor.min_running=1.0",))
    agents(run)["b"].kill()
    wait_until(lambda: len(events(run, "lives")) == 1, 120, "the actor of that host lives again")
    goes_on(run)
    ends_cleanly(run)
    told = [event.cause for event in events(run, "told") if "actors" in event.cause]
    assert told[0] == "0 of 1 actors of actor run, and 1 must (min_running = 1): trainers wait until they do"
    assert len(told) == 2 and told[1].startswith("enough actors run again: trainers go on, after ")


def test_a_trainer_whose_host_is_lost_goes_on_from_its_newest_checkpoint(start: Callable[..., Run]) -> None:
    run = start("cartpole", "TrainerOnB")
    saved = run.path / "checkpoints" / "policy"
    wait_until(lambda: bool(checkpoints(saved)), 60, "its first checkpoint")
    agents(run)["b"].kill()
    wait_until(lambda: len(events(run, "lives")) == 1, 120, "it lives again, on the runner's host")
    goes_on(run)
    wait_until(lambda: homes(run)["trainer-0"] == "runner", 60, "it is told where")
    (back,) = events(run, "went back")
    assert back.worker == "trainer-0"
    ends_cleanly(run)


def test_a_host_that_another_one_hangs_up_on_begins_anew(tmp_path: Path, monkeypatch: Any) -> None:
    """Else both would wait for each other for ever, and be heard by the runner."""
    nonsense = tmp_path / "nonsense"
    monkeypatch.setenv("NONSENSE", str(nonsense))

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] == 5:
            nonsense.touch()

    made = experiment(updates=60, trainers=2, actors=2)
    run = tmp_path / "run"
    result = train(
        made, launch=OneTellsNonsense, layout="given", run_dir=run, quiet=True, on_update=on_update
    )
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 60)
    assert not nonsense.exists()
    causes = {event.cause for event in read_events(run) if event.what == "died"}
    told = [cause for cause in causes if "host b has hung up on it: c/data: " in cause]
    assert len(told) == 1 and "its host c is gone" in told[0], causes


def test_a_host_that_is_back_in_time_keeps_its_share_until_it_is_told_to_leave(
    start: Callable[..., Run],
) -> None:
    run = start("cartpole", "TwoHosts", restarts=1, code="")  # to leave is no death
    own = agents(run)["b"]
    before = {p.pid for p in own.children(recursive=True)}
    own.suspend()
    wait_until(lambda: events(run, "died"), 120, "its workers are taken for dead")
    own.resume()
    wait_until(lambda: len(events(run, "lives")) >= 2, 120, "its workers live again")
    goes_on(run)
    # what its actor had sent while the agent carried nothing, if its channel had room
    assert {event.worker for event in events(run, "lost")} <= {"actor-0"}
    assert agents(run)["b#1"].parent() == own
    assert not before & {p.pid for p in run.processes()}  # who was taken for dead is
    died, gone, (_, begun) = events(run, "died"), events(run, "lost"), lost(run)
    own.terminate()  # and whom it holds leaves first
    wait_until(lambda: len(events(run, "lives")) >= 4, 120, "its workers live again with the runner")
    told = [event.cause for event in events(run, "died")[len(died) :]]
    assert told == ["its host b was told to leave (SIGTERM)"] * 2
    assert any("b: it was told to leave: its workers" in event.cause for event in events(run, "told"))
    wait_until(lambda: not agents(run).keys() & {"b", "b#1"}, 120, "both agents end")
    goes_on(run)
    # what was sent has come, and what was begun, unless it took long: a sample of 64 rows
    assert events(run, "lost") == gone and 0 <= lost(run)[1] - begun <= 64
    for process in (*agents(run).values(), psutil.Process(run.main.pid)):
        process.terminate()  # all of them: the run ends, and nobody leaves it
    status, text = run.ended()
    assert status == 143, text
    assert run.summary()["status"] == "interrupted" and len(events(run, "died")) == len(died) + 2
    run.nothing_is_left()


def test_a_host_that_is_back_gets_its_share_from_a_stand_in_that_leaves_in_order(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NETWORK, json.dumps([LOOPBACK, {"b": [LOOPBACK]}]))
    run = start("cartpole", "ReturningOnceTold", restarts=2, file=NETWORKED)
    agents(run)["b"].kill()
    wait_until(lambda: len(events(run, "lives")) >= 2, 120, "its workers live again with the runner")
    goes_on(run)
    died, gone, (_, begun) = events(run, "died"), events(run, "lost"), lost(run)
    (run.folder / "back").touch()
    wait_until(lambda: len(events(run, "lives")) >= 4, 120, "they live again on their own host")
    goes_on(run)
    told = [event.cause for event in events(run, "died")[len(died) :]]
    assert told == ["its host b is back, and has it again"] * 2
    # what was sent has come, and what was begun, unless it took long: a sample of 64 rows
    assert events(run, "lost") == gone and 0 <= lost(run)[1] - begun <= 64
    wait_until(lambda: agents(run).keys() == {"b", "b#2"}, 60, "who stood in for it ends")
    assert set(homes(run).values()) == {"b", "runner"}
    ends_cleanly(run)


def test_a_host_that_leaves_lets_its_actors_finish_the_samples_that_they_have_begun(tmp_path: Path) -> None:
    """A sample of theirs takes 2 s, of which half are over as they would pause."""
    run, told = tmp_path / "run", list[float]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not told:
            agents_of(psutil.Process().children())["b"].terminate()
            told.append(metrics["update"])

    made = experiment(updates=5, lag=None, actors=1)
    spec = AgentSpec(sample_steps=8)
    actor = made.workers["actor"].replace(
        environment=Gymnasium(make=f"{ENVIRONMENTS}:Dawdles"), agents=(spec,), lanes=1, ring=1
    )
    result = train(
        made.replace(workers={**made.workers, "actor": actor}),
        launch=ActorOnB, layout="given", run_dir=run, quiet=True, on_update=on_update,
    )  # fmt: skip
    assert (result.summary["status"], result.summary["updates"], len(told)) == ("completed", 5, 1)
    seen = [event for event in read_events(run) if event.what in ("died", "lost")]
    assert [(e.what, e.cause, e.steps, e.samples) for e in seen] == [
        ("died", "its host b was told to leave (SIGTERM)", 0, 0)
    ]
    assert read_metrics(run)[-1].get("lost/steps", 0) == 0


def test_a_runner_that_is_stopped_for_a_while_loses_no_host(start: Callable[..., Run]) -> None:
    run = start("cartpole", "TwoHosts")
    there, runner = agents(run), psutil.Process(run.main.pid)
    worker = worker_of(there["b"])
    runner.suspend()
    counts: list[tuple[float, int]] = []

    def is_still() -> bool:
        now = time.monotonic()
        counts.append((now, worker.num_ctx_switches().voluntary))
        earlier = [count for at, count in counts if at < now - 1.5]
        return bool(earlier) and counts[-1][1] - earlier[-1] < 30

    try:
        wait_until(is_still, 13, "its workers pause")
    finally:
        runner.resume()
    goes_on(run)
    assert events(run, "died") == [] and agents(run) == there
    ends_cleanly(run)


def test_a_runner_without_cores_takes_no_workers_of_hosts_that_are_gone(
    start: Callable[[str, str], Run],
) -> None:
    run = start("cartpole", "IdleRunner")
    agents(run)["b"].kill()
    status, text = run.ended()
    assert status == 1 and "no host is left that can have the workers of host b" in text
    assert run.summary()["status"] == "failed" and list((run.path / "checkpoints" / "policy").iterdir())
    run.nothing_is_left()


def test_what_a_policy_worker_held_is_asked_of_its_next_life(tmp_path: Path) -> None:
    run, killed = tmp_path / "run", list[psutil.Process]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        for process in () if killed else psutil.Process().children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if process.cmdline()[-1:] == ["b"]:
                    process.kill()
                    killed.append(process)

    # without it nobody comes beyond the samples that were on their way
    made = experiment(updates=30, servers=1, lag=None, actors=3)
    result = train(made, launch=ServerOnB, layout="given", run_dir=run, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["updates"], len(killed)) == ("completed", 30, 1)
    died = {event.worker for event in read_events(run) if event.what == "died"}
    assert died == {"actor-0", "actor-2", "server-0"}


def test_rows_behind_a_buffer_worker_of_a_lost_host_are_whole_and_trained_once(tmp_path: Path) -> None:
    """One actor is lost with it, and the other one's samples go to its next life."""
    run, killed, last = tmp_path / "run", list[float](), list[float]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killed and metrics["update"] >= 10:
            agents_of(psutil.Process().children())["b"].kill()
            killed.append(metrics["update"])
        elif killed and not last and sum(event.what == "lives" for event in read_events(run)) == 2:
            last.append(metrics["update"] + 20)
        elif last and metrics["update"] >= last[0]:
            control.stop()

    made = load_attribute(f"{EXPERIMENTS}:numbered_behind_buffers", "experiment")(str(tmp_path / "sample"))
    result = train(made, launch=BufferOnB, run_dir=run, source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert result.summary["status"] == "completed" and result.summary["updates"] >= last[0] > killed[0]
    died = sorted(event.worker for event in read_events(run) if event.what == "died")
    assert died == ["actor-0", "buffers-0"]
    count = int(read_newest(run / "checkpoints" / "policy").arrays["algorithm"]["count"])
    rows = [row for n in range(count) for row in acted_rows(tmp_path / f"sample-{n}.npz", set())]
    assert len(rows) == len(set(rows)) >= result.summary["updates"] * 64


def test_where_a_host_is_lost_that_hands_a_cell_on_its_stand_in_does(tmp_path: Path) -> None:
    """Host b hands on to f what the trainer publishes; in lockstep all wait for it."""
    run, killed = tmp_path / "run", list[tuple[float, psutil.Process]]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        for process in () if killed or metrics["update"] < 5 else psutil.Process().children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if process.cmdline()[-1:] == ["b"]:
                    process.kill()
                    killed.append((metrics["update"], process))

    made = experiment(updates=40, actors=5)
    result = train(made, launch=SixHosts, layout="given", run_dir=run, quiet=True, on_update=on_update)
    assert (result.summary["status"], result.summary["updates"], len(killed)) == ("completed", 40, 1)
    assert killed[0][0] < 30
    places = RunFolder.open(run).read("placement.json")
    assert [places[host]["workers"] for host in ("b", "f")] == [[], ["actor-4"]]
    assert {event.worker for event in read_events(run) if event.what == "died"} == {"actor-0"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Any]:
    """An exact run, and what it learns on one machine."""
    made = experiment(updates=40, actors=3, servers=1).replace(exact_resume=True)
    trainer = made.workers["trainer"].replace(checkpoint_seconds=0.1)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    return made, weights(made, "threads", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("dies", ["host", "worker", "leaving host"])
def test_an_exact_run_that_loses_a_host_or_a_worker_there_is_the_one_that_lost_none_in_every_bit(
    dies: str, alone: tuple[Experiment, Any], tmp_path: Path
) -> None:
    (made, learnt), killed = alone, list[float]()
    dying: list[psutil.Process] = []  # looked for in time: the run waits for nobody here

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not dying:
            agent = agents_of(psutil.Process().children())["b"]
            dying.append(worker_of(agent) if dies == "worker" else agent)
        if not killed and metrics["update"] >= 8:
            dying[0].terminate() if dies == "leaving host" else dying[0].kill()
            killed.append(metrics["update"])

    # one whose host is gone as it comes to its limit ends there, and goes back nowhere
    for number in range(3):
        run = tmp_path / f"run-{number}"
        result = train(made, launch=ThreeHosts, layout="given", run_dir=run, quiet=True, on_update=on_update)
        assert (result.summary["status"], len(killed)) == ("completed", 1)
        if any(event.what == "went back" for event in read_events(run)):
            break
        dying.clear()
        killed.clear()
    compared, differing = compare("policy", learnt, read_newest(run / "checkpoints" / "policy"))
    assert compared > 15 and differing == []


def test_whoever_has_many_descriptors_open_can_hold_an_agent() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        held = StandIn("b#1", LOOPBACK)
        wait_until(lambda: held.key or held.error, 60, "it has told its key")
        held.close()
        assert held.error == "" and len(held.key) == 40
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stand_in_may_be_let_go_while_it_starts() -> None:
    held = StandIn("b#1", LOOPBACK)
    wait_until(lambda: held._engine._agents, 60, "its process has begun")
    (process,) = held._engine._agents.values()
    held.let_go()
    ends = [thread for thread in threading.enumerate() if thread.name in ("start b#1", "end b#1")]
    for thread in ends:  # what they raise fails this test
        thread.join(60)
    assert process.poll() is not None and not any(thread.is_alive() for thread in ends)


def test_what_a_stand_in_wrote_last_is_told_with_its_end() -> None:
    held = StandIn("b#1", LOOPBACK)
    try:
        wait_until(lambda: held.key, 60, "it has told its key")
        held.introduce(b"no introduction\n")
        wait_until(held.ended, 60, "it has ended")
        assert "status 1" in held.ended() and "this is no introduction" in held.ended()
    finally:
        held.let_go()
