"""What a run counts, and what it does when it ends badly or is to go on."""

import errno
import math
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import Limits
from tidemill.api.control_messages import Notice
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.launchers.threads import ThreadsLauncher
from tidemill.metrics import record_pace
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import beginning, controller, ending, worker_messages
from tidemill.run.folder import RunFolder
from tidemill.run.progress import Rate
from tidemill.training.train import Result, resume, train
from tidemill.workers import actor, checkpoint_pace

experiments = load_file(EXPERIMENTS, "test")


def run(folder: Path, made: Any = None, **limits: Any) -> Result:
    made = made or experiments.cartpole()
    return train(
        made.replace(limits=Limits(**limits)), launch="inline", run_dir=folder, source=EXPERIMENTS, quiet=True
    )


@pytest.mark.parametrize("setting", ["seconds", "mean_return"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_limits_are_finite(setting: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"limits\.{setting} = (nan|inf) is not a finite number; leave it out"
    ):
        Limits(**{setting: value})  # type: ignore[arg-type]


def test_two_trainers_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", str(tmp_path))
    made = experiments.rows()
    blue = made.workers["trainer-blue"].replace(batch_size=24 * 8)
    actor = made.workers["actor"].replace(slots=2)
    made = made.replace(workers={**made.workers, "actor": actor, "trainer-blue": blue})
    result = run(tmp_path / "run", made, updates=6)
    records = read_metrics(tmp_path / "run")
    names = ("trainer-red-0", "trainer-blue-0")
    last: dict[str, float] = {}
    for record in records:
        assert "loss" not in record
        last |= record
        for total, fold in (("step", max), ("update", max), ("dropped", sum)):
            assert record[total] == fold(last.get(f"{name}/{total}", 0) for name in names), total
    assert all(last[f"{name}/loss"] == 1.0 for name in names)
    assert last["trainer-red-0/update"] != last["trainer-blue-0/update"]
    assert (result.summary["env_steps"], result.summary["updates"]) == (last["step"], last["update"])


def test_a_full_disk_at_the_end_is_named_and_the_first_cause_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where its environment leaves a flag
    write = RunFolder.write

    def full(folder: RunFolder, name: str, content: Any) -> None:
        if name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(folder.path / name))
        write(folder, name, content)

    monkeypatch.setattr(RunFolder, "write", full)
    with pytest.raises(
        RunError, match=r"summary\.json cannot be written: No space left on device; free the disk"
    ) as caught:
        run(tmp_path / "one", updates=3)
    assert "resume" in str(caught.value)  # its checkpoints are there
    made = experiments.raises()
    first_fault = made.workers["actor"].replace(lane_restarts=None)  # ends it
    made = made.replace(workers={**made.workers, "actor": first_fault})
    with pytest.raises(RunError, match="the arm is broken"):
        run(tmp_path / "two", made, updates=10_000)
    assert "note: " in (said := capsys.readouterr().err) and "summary.json cannot be written" in said


def test_a_resume_says_which_history_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = experiments.cartpole()
    trainer = made.workers["trainer"].replace(database_seconds=0.001)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    folder = run(tmp_path / "run", made, updates=3).folder
    resume(folder, launch="inline", limits={"updates": 4})
    assert "missing" not in capsys.readouterr().out
    (folder / "metrics.jsonl").unlink()
    for file in (folder / "parameters").glob("index.sqlite*"):
        file.write_bytes(b"")
    resume(folder, launch="inline", limits={"updates": 5})
    said = capsys.readouterr().out
    assert "metrics.jsonl has no records: those of before update 5 are missing" in said
    assert "parameters holds no versions: those of before update 5 are missing" in said
    resume(folder, launch="inline", limits={"updates": 6})
    assert "missing" not in capsys.readouterr().out


def test_a_run_that_reached_its_mark_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", mean_return=1.0, window=3).folder
    with pytest.raises(
        RunError, match="already reached its mark, a mean return of 1, and has no other limit"
    ):
        resume(folder, launch="inline", quiet=True)
    steps = RunFolder(folder).read("summary.json")["env_steps"] + 2000
    (folder / "layout.json").touch()  # as where the power failed
    result = resume(folder, launch="inline", limits={"steps": steps}, quiet=True)
    assert "reached its mark, a mean return of 1, and goes on without one" in capsys.readouterr().err
    assert result.summary["env_steps"] >= steps and "env steps" in result.summary["reason"]
    # a new mark counts
    again = resume(folder, launch="inline", limits={"steps": steps * 10, "mean_return": 1.0}, quiet=True)
    assert again.summary["reason"].startswith("mean return")


def test_workers_are_left_alone_between_the_first_update_and_the_end_and_nothing_they_say_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[int, float]] = []
    midway, update = threading.Event(), experiments._Recorder.parallel_update

    def awaited(learner: Any, samples: Any, steps: int) -> Any:
        assert learner.count < 25 or midway.wait(60)  # however slow the runner is, it looks before the end
        return (yield from update(learner, samples, steps))

    class Listening(ThreadsLauncher):
        def wait(self, seconds: float, least: float = 0.0) -> None:
            records = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
            if records:
                midway.set()
            before = monotonic()
            super().wait(seconds, least)
            assert monotonic() - before >= least
            waits.append((records, least))

    monkeypatch.setattr(experiments._Recorder, "parallel_update", awaited)
    made = experiments.cartpole().replace(limits=Limits(updates=50))
    train(made, launch=Listening, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True)
    assert [record["update"] for record in read_metrics(tmp_path / "run")] == list(range(1, 51))
    assert {least for records, least in waits if records == 0} == {0.0}
    assert {least for records, least in waits if 0 < records < 50} == {controller.UNHEARD}
    assert waits[-1][1] == 0.0


def test_many_updates_have_few_records_and_the_last_of_a_life_and_of_each_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What equal runs measure is in the records, however many there are: their means
    weigh what each update told."""
    monkeypatch.setattr(checkpoint_pace, "LEAST", 3600.0)  # none of them for what takes long
    monkeypatch.setattr(checkpoint_pace, "LONG", 3600.0)
    made = experiments.cartpole()
    workers = made.workers

    def saved_every(seconds: float) -> Any:
        return made.replace(
            workers={**workers, "trainer": workers["trainer"].replace(checkpoint_seconds=seconds)}
        )

    run(tmp_path / "each", saved_every(600.0), updates=12)
    each = read_metrics(tmp_path / "each")
    monkeypatch.setattr(record_pace, "BURST", 2)
    monkeypatch.setattr(record_pace, "RATE", 0.0)
    run(tmp_path / "few", saved_every(600.0), updates=12)
    few = read_metrics(tmp_path / "few")
    assert [record["update"] for record in each] == list(range(1, 13)) and [
        record["update"] for record in few
    ] == [1, 2, 12]
    names = [name for name in each[0] if name.partition("/")[0] in ("loss", "entropy", "kl", "rows", "lag")]
    for name in names:
        wanted = (
            max(r[name] for r in each[2:]) if name.endswith("max") else sum(r[name] for r in each[2:]) / 10
        )
        assert few[-1][name] == pytest.approx(wanted, rel=1e-12), name
    last = {
        name: value
        for name, value in each[-1].items()
        if name in ("step", "episodes", "return/mean", "dropped")
    }
    assert names == ["loss", "lag/mean", "lag/max"] and last.items() <= few[-1].items()
    resume(tmp_path / "few", launch="inline", limits={"updates": 20}, quiet=True)
    assert [record["update"] for record in read_metrics(tmp_path / "few")] == [1, 2, 12, 13, 14, 20]
    run(tmp_path / "kept", saved_every(1e-9), updates=12)
    assert [record["update"] for record in read_metrics(tmp_path / "kept")] == list(range(1, 13))


def test_environments_that_are_made_one_after_another_have_the_deadline_of_a_start_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each takes most of that."""
    monkeypatch.chdir(tmp_path)
    before = {*threading.enumerate()}  # other tests' may hang for good
    later, told, over = [0.0], threading.Event(), threading.Event()
    starts, take = (
        load_attribute(f"{experiments.ENVIRONMENTS}:Starts", "test"),
        worker_messages.WorkerMessages.take,
    )
    silent: list[Any] = []

    def make(environment: Any) -> None:
        assert told.wait(60)  # of the one before
        told.clear()
        later[0] += 0.7 * beginning.READY_DEADLINE
        environment.steps = 0

    def make_silently(environment: Any) -> None:
        later[0] += 0.7 * beginning.READY_DEADLINE
        silent.append(environment)
        if len(silent) > 1:
            over.wait(60)

    def heard(messages: Any, name: str, message: Any) -> None:
        take(messages, name, message)
        if isinstance(message, Notice):
            told.set()

    monkeypatch.setattr(worker_messages.WorkerMessages, "take", heard)
    for place in (beginning, worker_messages, ending):
        monkeypatch.setattr(place, "awake", lambda: awake() + later[0])
    monkeypatch.setattr(actor, "monotonic", lambda: monotonic() + later[0])
    made = experiments.starts().replace(limits=Limits(steps=100))
    run = {"launch": "threads", "source": EXPERIMENTS, "quiet": True, "layout": "given"}
    monkeypatch.setattr(starts, "__init__", make)
    told.set()
    assert train(made, run_dir=tmp_path / "run", **run).summary["status"] == "completed"
    assert later[0] > 3 * beginning.READY_DEADLINE
    monkeypatch.setattr(starts, "__init__", make_silently)
    monkeypatch.setattr(actor, "TELL", 1e9)
    for deadline in ("CLOSE_DEADLINE", "CLOSING"):  # it stays where it is
        monkeypatch.setattr(ending, deadline, 0.1)
    with pytest.raises(RunError, match=r"actor-0 did not become ready, and said nothing for 120 s"):
        train(made, run_dir=tmp_path / "silent", **run)
    over.set()
    for thread in {*threading.enumerate()} - before:
        if thread.name == "actor-0":
            thread.join(60)


def test_a_rate_is_of_the_last_seconds() -> None:
    rate = Rate(5.0)
    assert rate.per_second(0.0) == 0.0
    rate.add(0.0, 1_000_000)  # an earlier life
    for second in range(1, 101):
        rate.add(second, 1_000_000 + second * (10 if second <= 50 else 0))
        if second == 50:
            assert rate.per_second(50.0) == 10.0
    rate = Rate(5.0)
    for second, count in ((0, 0), (10, 100), (20, 200)):  # updates that are rarer than that
        rate.add(second, count)
    for now in (24.0, 29.0):
        assert rate.per_second(now) == pytest.approx(100 / (now - 10))
    assert rate.per_second(100.0) == 0.0  # and then none
