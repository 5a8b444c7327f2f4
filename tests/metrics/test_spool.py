"""Sinks that do not come back, are slow, or are bound to a thread: training goes on, each
sink that works has all records, and one that comes back has what it missed."""

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import ClassVar

import pytest

import tidemill
from tidemill import Gymnasium, LoggedRun, MetricSink, RunError
from tidemill.metrics import spool, writer
from tidemill.metrics.csv_file import CSV
from tidemill.metrics.json_lines import read_metrics
from tidemill.metrics.writer import MetricsWriter
from tidemill.presets.ppo import ppo

PATIENCE = 60.0


def until(holds: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < end
        sleep(0.001)


class Noting(MetricSink):
    """Notes what it is given, and who calls it."""

    title = "the notes"
    steps: ClassVar[list[float]]
    calls: ClassVar[list[str]]
    threads: ClassVar[set[int]]

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._note("made" if run.resume_at is None else f"made at {run.resume_at}")

    def write(self, record: Mapping[str, float]) -> None:
        self._note(f"write {record['step']:.0f}")
        self.steps.append(record["step"])

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(call)


class Hanging(Noting):
    """Does not come back from its first record until `back` is set."""

    title = "the hanging sink"
    entered: ClassVar[threading.Event]
    back: ClassVar[threading.Event]

    def write(self, record: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.back.wait(PATIENCE)
        super().write(record)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    for kind in (Noting, Hanging):
        kind.steps, kind.calls, kind.threads = [], [], set()
    Hanging.entered, Hanging.back = threading.Event(), threading.Event()
    before = {*threading.enumerate()}  # other tests' may go on
    yield
    Hanging.back.set()
    until(lambda: not any(t.name.startswith("sink ") for t in {*threading.enumerate()} - before))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_sink_that_does_not_come_back_is_told_once_and_gets_the_newest_records_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "MISSED", 3)
    records = MetricsWriter(LoggedRun(tmp_path), [Hanging, Noting])
    beside = records._spools[1]

    def works(step: float) -> bool:
        """That one has the record, and is out of the call: it is not late, either."""
        return Noting.steps[-1:] == [step] and beside._called is None

    records.write({"step": 1})
    assert Hanging.entered.wait(PATIENCE)
    records.look()
    assert not caplog.records  # it may still come back
    monkeypatch.setattr(spool, "LATE", 0.0)
    until(lambda: works(1))
    for step in range(2, 8):
        records.look()
        records.write({"step": step})
        until(lambda: works(step))  # noqa: B023
    assert messages(caplog) == [
        "the hanging sink has not come back for 0 s: training goes on, and the newest 3 records wait for it"
    ]
    Hanging.back.set()
    records.close()
    assert Hanging.steps == [1, 5, 6, 7]
    assert Noting.steps == [record["step"] for record in read_metrics(tmp_path)] == [*range(1, 8)]
    assert messages(caplog)[1:] == [
        "the hanging sink: it is written again, with what it missed, but for the oldest 3 records"
    ]


def test_a_run_goes_on_beside_a_sink_that_hangs_which_has_all_records_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "LATE", 0.0)
    told: list[float] = []

    def on_update(metrics: Mapping[str, float], control: tidemill.RunControl) -> None:
        if "the hanging sink has not come back" in caplog.text:
            told.append(metrics["update"])
            Hanging.back.set()
            control.stop("it is told")

    made = ppo("small", Gymnasium(id="CartPole-v1"), lanes=4, sample_steps=16, updates=10_000)
    with caplog.at_level(logging.WARNING):
        done = tidemill.train(
            made, launch="inline", run_dir=tmp_path / "run", quiet=True, log=[Hanging], on_update=on_update
        )
    assert told and told[0] > 1
    assert Hanging.steps == [record["step"] for record in read_metrics(done.folder)]


@pytest.mark.parametrize("signalled", [False, True])
def test_at_the_end_a_sink_that_does_not_come_back_is_left_and_closed_once_it_does(
    signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Hanging, "closing_s", 1e9 if signalled else 0.0)
    monkeypatch.setattr(writer, "HURRIED", 0.0)
    records = MetricsWriter(LoggedRun(tmp_path), [Hanging, Noting])
    records.write({"step": 1})
    records.write({"step": 2})
    assert Hanging.entered.wait(PATIENCE)
    # the signal comes when the other one has ended, which it hurries, too
    beside = records._spools[1]._thread
    records.close(lambda: signalled and not beside.is_alive())
    assert Noting.steps == [1, 2] and Noting.calls[-1] == "close"
    (message,) = messages(caplog)
    assert re.fullmatch(
        r"the hanging sink has not come back within \d+ s of the run's end, and is left: it lacks the last 2 "
        r"records; metrics.jsonl has all metrics",
        message,
    )
    records.close()
    Hanging.back.set()
    until(lambda: Hanging.calls[-1] == "close")
    assert Hanging.calls == ["made", "write 1", "close"]  # it had been in that call
    assert len(caplog.records) == 1


def test_a_sink_that_is_merely_slow_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MISSED", 1)
    monkeypatch.setattr(spool, "ROOM", PATIENCE)
    records = MetricsWriter(LoggedRun(tmp_path), [Noting])
    for step in range(300):
        records.write({"step": step})
    records.close()
    assert Noting.steps == [*range(300)]


def test_a_sink_that_is_too_slow_tells_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "MISSED", 2)
    monkeypatch.setattr(spool, "ROOM", 0.0)
    records = MetricsWriter(LoggedRun(tmp_path), [Hanging])
    records.write({"step": 1})
    assert Hanging.entered.wait(PATIENCE)
    for step in (2, 3, 4):
        records.write({"step": step})
    Hanging.back.set()
    records.close()
    assert Hanging.steps == [1, 3, 4]
    assert messages(caplog) == [
        "the hanging sink: it is written again, with what it missed, but for the oldest 1 records"
    ]


def test_a_sink_may_hold_what_belongs_to_one_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SQLite(MetricSink):
        def __init__(self, run: LoggedRun) -> None:
            super().__init__(run)
            self._database = sqlite3.connect(run.folder / "metrics.sqlite")
            self._database.execute("create table records (step, updates)")

        def write(self, record: Mapping[str, float]) -> None:
            self._database.execute("insert into records values (?, ?)", (record["step"], record["update"]))
            self._database.commit()

        def close(self) -> None:
            self._database.close()

    made = ppo("small", Gymnasium(id="CartPole-v1"), lanes=4, sample_steps=16, updates=3)
    done = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, log=[SQLite])
    kept = sqlite3.connect(done.folder / "metrics.sqlite")
    found = kept.execute("select * from records").fetchall()
    kept.close()
    assert found == [(record["step"], record["update"]) for record in read_metrics(done.folder)]
    assert len(found) == 3 and not caplog.records


def test_a_run_that_goes_back_has_its_sinks_made_anew_in_their_own_thread(tmp_path: Path) -> None:
    records = MetricsWriter(LoggedRun(tmp_path), [Noting])
    for step in (1, 2, 3):
        records.write({"step": step, "update": step})
    records.go_back(LoggedRun(tmp_path, resume_at=1, updates=1))
    records.write({"step": 2, "update": 2})
    records.close()
    assert Noting.calls == [
        "made", "write 1", "write 2", "write 3", "close", "made at 1", "write 2", "close",
    ]  # fmt: skip
    assert len(Noting.threads) == 1 and threading.get_ident() not in Noting.threads
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_csv_file_that_is_behind_has_each_record_once(tmp_path: Path) -> None:
    class Behind(CSV):
        def write(self, record: Mapping[str, float]) -> None:
            assert Hanging.back.wait(PATIENCE)
            super().write(record)

    records = MetricsWriter(LoggedRun(tmp_path), [Behind])
    for step in (1.0, 2.0, 3.0):
        records.write({"step": step, f"new/{step:.0f}": step})
    records.write({"step": 4.0})
    Hanging.back.set()
    records.close()
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,new/1,new/2,new/3", "1.0,1.0,,", "2.0,,2.0,", "3.0,,,3.0", "4.0,,,",
    ]  # fmt: skip


def test_a_sink_that_never_comes_back_from_being_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmade(Noting):
        def __init__(self, run: LoggedRun) -> None:
            assert Hanging.back.wait(PATIENCE)
            super().__init__(run)

    def sinks() -> Iterator[type[MetricSink]]:
        yield Noting
        monkeypatch.setattr(spool, "MAKING", 0.01)  # from then on others have little time for that
        yield Unmade

    with pytest.raises(RunError, match=r"--log Unmade: making it has taken 0\.01 s and is not over"):
        MetricsWriter(LoggedRun(tmp_path), sinks())  # type: ignore[arg-type]
    assert Noting.calls == ["made", "close"]
    Hanging.back.set()
    until(lambda: Noting.calls[2:] == ["made", "close"])


def test_a_signal_as_a_sinks_thread_begins_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt  # as where a signal comes while its begin is waited for

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(LoggedRun(tmp_path), [Noting])
    until(lambda: Noting.calls == ["made", "close"])


def test_what_is_no_exception_ends_the_sink_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Panic(BaseException):
        """As what code in Rust raises."""

    class Panicking(MetricSink):
        def write(self, record: Mapping[str, float]) -> None:
            raise Panic("overflow")

    records = MetricsWriter(LoggedRun(tmp_path), [Panicking, Noting])
    records.write({"step": 1})
    records.write({"step": 2})
    records.close()
    assert Noting.steps == [1, 2]
    assert messages(caplog) == [
        "this sink: no more is written there (Panic('overflow')); metrics.jsonl has all metrics"
    ]
