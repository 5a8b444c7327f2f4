"""Shares, and disks, that hang without an error: training goes on, what was missed is
caught up with, and a run can be ended all the while."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.shares import NoShare, Share, share_in
from tests.run.watching import Run, ended_well, leftovers, wait_until

import tidemill
from tidemill.core.errors import RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest

SILENT = "its disk, or share, does not answer since"


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Share]:
    try:
        with share_in(tmp_path) as made:
            yield made
    except NoShare as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("exact", [False, True])
def test_a_share_that_hangs_stops_no_training_and_has_all_once_it_answers(
    exact: bool,
    share: Share,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tidemill.store.checkpoint.PATIENCE", 1.0)
    monkeypatch.setattr("tidemill.run.run_lifecycle.PATIENCE", 1.0)
    monkeypatch.setattr("tidemill.workers.checkpoint_pace.AGAIN", 1e-9)
    told, without = "", 0

    def on_update(metrics: dict[str, float], control: tidemill.RunControl) -> None:
        nonlocal told, without
        told += capsys.readouterr().err
        if metrics["update"] == 3:
            share.stop()
        elif SILENT in told and SILENT in caplog.text:
            without += 1
            if without == 10:
                share.go_on()
            if "checkpoints are written again" in told and "is written again, with" in caplog.text:
                control.stop("it is back")

    done = tidemill.train(
        "CartPole-v1", steps=10**6, launch="inline", layout="given", run_dir=share.place / "run", log="csv",
        quiet=True, on_update=on_update, lanes=4, sample_steps=16, minibatch_size=32,
        checkpoint_seconds=1e-9, checkpoint_share=1, exact_resume=exact, **{"limits.updates": 900},
    )  # fmt: skip
    assert done.summary.reason == "it is back", told + caplog.text
    assert without > 10
    updates = int(done.summary.updates)
    assert [record["update"] for record in read_metrics(done.folder)] == [*range(1, updates + 1)]
    assert (done.folder / "metrics.csv").read_text().count("\n") == updates + 1
    assert read_newest(done.folder / "checkpoints/policy").facts["updates"] == updates
    assert f"checkpoint {done.folder}/checkpoints/policy/update-" in told
    assert [event for event in read_events(done.folder) if SILENT in event.cause]
    assert leftovers(done.folder) == []


def test_a_disk_that_is_slow_as_the_run_ends_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, slow = os.pwrite, list[float]()

    def write(file: int, data: bytes, offset: int) -> int:
        if b'"update":3.0,' in data and not slow:
            slow.append(time.monotonic())
            time.sleep(0.3)
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr("tidemill.run.run_lifecycle.PATIENCE", 0.01)
    done = short(tmp_path / "run")
    assert slow and done.summary.status == "completed", caplog.text
    assert [record["update"] for record in read_metrics(done.folder)] == [1, 2, 3]
    assert "lacks" not in caplog.text


def test_a_disk_that_hangs_as_the_run_ends_leaves_nothing_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, back, hangs = RunFolder(tmp_path / "run"), os.pwrite, threading.Event(), list[int]()

    def write(file: int, data: bytes, offset: int) -> int:
        if b'"update":3.0,' in data:
            hangs.append(file)
            assert back.wait(60)
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr("tidemill.run.run_lifecycle.PATIENCE", 0.1)
    monkeypatch.setattr("tidemill.run.run_lifecycle.LAST", 0.1)
    before = set(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(RunError, match=SILENT):
            short(folder.path)
        assert hangs and folder.led()
    finally:
        back.set()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "folder run"], 60, "it is")
    assert not folder.led() and set(os.listdir("/proc/self/fd")) == before


def short(folder: Path) -> tidemill.Result:
    return tidemill.train(
        "CartPole-v1", steps=10**6, launch="inline", layout="given", run_dir=folder, log="", quiet=True,
        lanes=4, sample_steps=16, minibatch_size=32, **{"limits.updates": 3},
    )  # fmt: skip


def ended_by_signal(run: Run) -> tuple[int, str]:
    """End a run with all of its processes. Return its status, and what it has printed."""
    os.kill(run.main.pid, signal.SIGTERM)
    ended = run.ended()
    wait_until(lambda: not run.processes(), 60, "no process of the run is left")
    return ended


def test_while_a_share_hangs_a_signal_ends_the_run_and_its_last_weights_go_elsewhere(
    share: Share, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    run = Run(folder, "cartpole", "--run-dir", str(share.place / "run"))
    try:
        run.wait_for_file(share.place / "run/metrics.jsonl", "the first update")
        share.stop()
        wait_until(lambda: SILENT in (folder / "output.txt").read_text(), 120, "that is told")
        status, text = ended_by_signal(run)
    finally:
        share.go_on()
        run.kill_all()
    assert status == 1 and f"{share.place}/run cannot be written: {SILENT}" in text, text
    (refuge,) = run.temporary.glob("tidemill-run-*")
    assert f"The last checkpoint is in {refuge} instead" in text
    newest = read_newest(refuge / "checkpoints/policy")
    assert (newest.arrays["policy"]["w"] == newest.facts["updates"]).all()
    assert {path.name for path in refuge.iterdir()} >= {"config.json", "summary.json"}


def test_where_an_evaluation_hangs_on_a_share_is_told_and_a_signal_ends_the_run(
    share: Share, tmp_path: Path
) -> None:
    """The share holds up the judge, which draws versions, and the evaluation, which looks
    for them. Their logs are there, too."""
    folder, place = tmp_path / "own", share.place / "run"
    told_soon = "from tidemill.run import silence; silence.TIMES = 0.0"
    run = Run(folder, "evaluated", "--run-dir", str(place), code=told_soon)
    told = folder / "output.txt"
    # who asked the database may stand further out than what is shown of a stack
    at = r"\((sources|evaluation|parameter_database|version_index|recorded_results)\.py:"
    stuck = re.compile(r"(judge|evaluation)-0 is silent for .*: \1-0: .* ← .* " + at)
    try:
        wait_until(lambda: "evaluation 10.00" in told.read_text(), 120, "versions are evaluated")
        share.stop()
        before = read_newest(tmp_path / "behind/run/checkpoints/policy").facts["updates"]
        seen = len(told.read_text())
        wait_until(lambda: stuck.search(told.read_text(), seen), 120, "it is told where one hangs")
        status, text = ended_by_signal(run)
    finally:
        share.go_on()
        run.kill_all()
    assert status == 1 and f"{place} cannot be written: {SILENT}" in text, text
    (refuge,) = run.temporary.glob("tidemill-run-*")
    assert read_newest(refuge / "checkpoints/policy").facts["updates"] >= before


def test_a_trainer_that_dies_while_a_share_hangs_lives_again_once_it_answers(
    share: Share, tmp_path: Path
) -> None:
    folder, place = tmp_path / "own", share.place / "run"
    told_soon = "from tidemill.run import stall_watch; stall_watch.STALL = 5.0"
    run = Run(folder, "cartpole", "--run-dir", str(place), code=told_soon)
    told, gone = folder / "output.txt", f"its output cannot be read: {place}/logs/trainer-0.log: {SILENT}"
    try:
        run.wait_for_file(place / "metrics.jsonl", "the first update")
        trainer = run.wait_for_worker("trainer-0")
        share.stop()
        trainer.kill()
        wait_until(lambda: gone in told.read_text(), 120, "its death is told")
        wait_until(lambda: "trainer-0 died at" in told.read_text(), 120, "the main process goes on")
        share.go_on()
        wait_until(lambda: "lives" in {event.what for event in read_events(place)}, 120, "it lives again")
        os.kill(run.main.pid, signal.SIGTERM)
        run.ended()
        wait_until(lambda: not run.processes(), 60, "no process of the run is left")
    finally:
        share.go_on()
        run.kill_all()
    (died,) = [event for event in read_events(place) if event.what == "died"]
    assert died.worker == "trainer-0" and "killed by SIGKILL" in died.cause and gone in died.cause
    ended_well(place, "interrupted", "SIGTERM")
