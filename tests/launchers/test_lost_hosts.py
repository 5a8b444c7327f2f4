"""Hosts that are lost: their workers are many deaths at once, and live again on a host
that is left, or on their own once that is back."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launchers.host_launchers import SmallRunner
from tests.launchers.test_hosts import LAUNCHERS, experiment
from tests.run.watching import Run, wait_until

from tidemill import train
from tidemill.launchers.placement import place


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Run]]:
    runs: list[Run] = []

    def begin(function: str, launcher: str) -> Run:
        runs.append(Run(tmp_path, function, "--layout", "given", launch=f"{LAUNCHERS}:{launcher}"))
        runs[-1].wait_for_updates()
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def agents(run: Run) -> dict[str, psutil.Process]:
    """Return the processes of agents, by their names."""
    return {p.cmdline()[-1]: p for p in run.processes() if "tidemill.launchers.host" in p.cmdline()}


def events(run: Run, what: str) -> list[Any]:
    path = run.path / "events.jsonl"
    told = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [event for event in told if event["what"] == what]


def goes_on(run: Run) -> None:
    lines = lambda: len((run.path / "metrics.jsonl").read_text().splitlines())  # noqa: E731
    before = lines()
    wait_until(lambda: lines() > before + 2, 60, "updates go on")


def ends_cleanly(run: Run) -> None:
    os.killpg(run.main.pid, signal.SIGINT)
    status, text = run.ended()
    assert status == 130, text
    assert run.summary()["status"] == "interrupted"
    run.nothing_is_left()


def test_a_share_goes_on_from_host_to_host(start: Callable[[str, str], Run]) -> None:
    run = start("cartpole", "ThreeHosts")
    there = agents(run)
    there["b"].kill()
    wait_until(lambda: len(events(run, "lives")) >= 2, 60, "its workers live again")
    assert agents(run)["b#1"].parent() == there["c"]  # nobody is busy there
    goes_on(run)
    there["c"].kill()  # and what it holds goes with it
    wait_until(lambda: len(events(run, "lives")) >= 4, 60, "they live again with the runner")
    assert agents(run).keys() == {"b#2"}
    goes_on(run)
    assert {event["worker"] for event in events(run, "died")} == {"actor-0", "server-0"}
    ends_cleanly(run)


def test_a_trainer_s_host_takes_all_back_to_the_newest_checkpoint(start: Callable[[str, str], Run]) -> None:
    run = start("equal", "TwoHosts")
    agents(run)["b"].kill()
    wait_until(lambda: events(run, "lives"), 60, "trainers live again")
    assert len(events(run, "went back")) == 1
    goes_on(run)
    ends_cleanly(run)


def test_a_host_that_is_back_in_time_keeps_its_share(start: Callable[[str, str], Run]) -> None:
    run = start("cartpole", "TwoHosts")
    own = agents(run)["b"]
    before = {p.pid for p in own.children(recursive=True)}
    own.suspend()
    wait_until(lambda: events(run, "died"), 30, "its workers are taken for dead")
    own.resume()
    wait_until(lambda: len(events(run, "lives")) >= 2, 60, "its workers live again")
    goes_on(run)
    assert agents(run)["b#1"].parent() == own
    assert not before & {p.pid for p in run.processes()}  # who was taken for dead is
    ends_cleanly(run)


def test_a_runner_that_is_stopped_for_a_while_loses_no_host(start: Callable[[str, str], Run]) -> None:
    run = start("cartpole", "TwoHosts")
    there, runner = agents(run), psutil.Process(run.main.pid)
    worker = next(p for p in there["b"].children() if "tidemill.launchers.entry" in p.cmdline())
    runner.suspend()
    counts = [worker.num_ctx_switches().voluntary]

    def is_still() -> bool:
        counts.append(worker.num_ctx_switches().voluntary)
        return len(counts) > 400 and counts[-1] - counts[-300] < 30

    try:
        wait_until(is_still, 13, "its workers pause")
    finally:
        runner.resume()
    goes_on(run)
    assert events(run, "died") == [] and agents(run) == there
    ends_cleanly(run)


def test_a_host_that_is_told_to_leave_does_and_the_run_goes_on(start: Callable[[str, str], Run]) -> None:
    run = start("cartpole", "TwoHosts")
    own = agents(run)["b"]
    own.terminate()
    wait_until(lambda: len(events(run, "lives")) >= 2, 60, "its workers live again")
    told = {event["cause"] for event in events(run, "died")}
    assert told == {"its host b was told to leave (SIGTERM)"}
    wait_until(lambda: "b" not in agents(run), 20, "its agent ends")
    goes_on(run)
    for process in (*agents(run).values(), psutil.Process(run.main.pid)):
        process.terminate()  # all of them: the run ends, and nobody leaves it
    status, text = run.ended()
    assert status == 143, text
    assert run.summary()["status"] == "interrupted" and len(events(run, "died")) == 2
    run.nothing_is_left()


def test_what_a_policy_worker_held_is_asked_of_its_next_life(tmp_path: Path) -> None:
    run, killed = tmp_path / "run", threading.Event()
    metrics = run / "metrics.jsonl"

    def kill() -> None:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size, 60, "the first update")
        for process in psutil.Process().children():
            if process.cmdline()[-1:] == ["b"]:
                process.kill()
                killed.set()

    made = experiment(updates=100, servers=1, lag=None, actors=3)
    places = place(made, {"runner": 1, "b": 2, "c": 2})
    assert places["server-0"] == "b" and places["actor-1"] == "c"
    thread = threading.Thread(target=kill)
    thread.start()
    summary = train(made, launch=SmallRunner, layout="given", run_dir=run, quiet=True).summary
    thread.join()
    assert summary["status"] == "completed" and summary["updates"] == 100 and killed.is_set()
    lives = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert {e["worker"] for e in lives if e["what"] == "died"} == {"actor-0", "actor-2", "server-0"}
