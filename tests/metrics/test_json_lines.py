"""metrics.jsonl and TensorBoard events: what was written is read back, whatever ended the
run."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidemill.api.metric_sink import LoggedRun
from tidemill.core.errors import Overtaken, RunError
from tidemill.core.folder_thread import FolderThread
from tidemill.metrics import json_lines, record_pace, writer
from tidemill.metrics.csv_file import CSV
from tidemill.metrics.json_lines import JSONLines, each_record, last_records, read_metrics
from tidemill.metrics.record_pace import BURST, RATE, RecordPace
from tidemill.metrics.tensorboard import TensorBoard
from tidemill.metrics.writer import MetricsWriter
from tidemill.store.fence import let_go, take


def write(folder: Path, *steps: int, resume_at: int | None = None) -> None:
    writer = MetricsWriter(LoggedRun(folder, resume_at=resume_at), [TensorBoard])
    for step in steps:
        writer.write({"step": step, "update": step // 10, "return/mean": step + 0.5})
    writer.close()


def steps(folder: Path) -> list[float]:
    return [record["step"] for record in read_metrics(folder)]


def events(folder: Path) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(e.step, tag, e.value) for tag in accumulator.Tags()["scalars"] for e in accumulator.Scalars(tag)]


def test_records_are_read_back_as_written(tmp_path: Path) -> None:
    write(tmp_path / "run", 10, 20)
    assert read_metrics(tmp_path / "run") == [
        {"step": 10, "update": 1, "return/mean": 10.5},
        {"step": 20, "update": 2, "return/mean": 20.5},
    ]


def test_nan_and_infinity_are_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    writer.write({"step": 1, "a": math.nan, "b": -math.inf})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"a":null,"b":null}\n'
    record = read_metrics(tmp_path)[0]
    assert math.isnan(record["a"])
    assert math.isnan(record["b"])


def test_a_record_is_readable_before_close(tmp_path: Path) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    writer.write({"step": 1})
    assert steps(tmp_path) == [1]
    writer.close()
    writer.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_left_out_and_written_over_on_resume(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 10, 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps(tmp_path) in ([10], [10, 20])  # without its line end only, the record is still whole
    write(tmp_path, 30, resume_at=20)
    assert steps(tmp_path) == [10, 30]


@pytest.mark.parametrize("cut", [1, 5])
def test_a_line_that_is_being_written_is_left_to_the_next_reader(
    tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10, 20)
    path, decode = tmp_path / "metrics.jsonl", msgspec.json.decode
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])

    def later(line: bytes, **how: Any) -> Any:
        if not line.endswith(b"\n"):  # the rest of it comes once it was read
            path.write_bytes(whole + whole)
        return decode(line, **how)

    monkeypatch.setattr(msgspec.json, "decode", later)
    assert steps(tmp_path) == ([10, 20] if cut == 1 else [10])
    assert steps(tmp_path) == [10, 20, 10, 20]


def test_a_resumed_run_drops_what_came_after_and_appends(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30)
    write(tmp_path, 25, 35, resume_at=20)
    assert steps(tmp_path) == [10, 20, 25, 35]
    assert [path.name for path in tmp_path.iterdir() if "tfevents" not in path.name] == ["metrics.jsonl"]


def test_an_update_on_rows_that_were_counted_before_is_dropped_too(tmp_path: Path) -> None:
    """Samples that are trained on again make updates without a step."""
    writer = JSONLines(LoggedRun(tmp_path))
    for update in range(1, 5):
        writer.write({"step": 10 * (update // 2), "update": update})
    writer.close()
    JSONLines(LoggedRun(tmp_path, resume_at=10, updates=2)).close()
    assert [record["update"] for record in read_metrics(tmp_path)] == [1, 2]


def test_of_several_trainers_each_goes_back_to_its_own_update(tmp_path: Path) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    told = [("a-0", 1), ("b-0", 1), ("a-0", 2), ("b-0", 2), ("a-0", 3)]
    for step, (trainer, update) in enumerate(told):
        writer.write({f"{trainer}/update": update, "step": step, "update": update})
    writer.close()
    JSONLines(LoggedRun(tmp_path, resume_at=4, updates=3, by_trainer={"b-0": 1})).close()
    kept = [name for record in read_metrics(tmp_path) for name in record if "/" in name]
    assert kept == ["a-0/update", "b-0/update", "a-0/update", "a-0/update"]


def test_what_a_trainer_has_told_stays_where_the_steps_of_another_one_are_undone(tmp_path: Path) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    first = {"a-0/update": 1, "a-0/step": 30, "step": 40, "update": 4}
    both = {"a-0/update": 2, "a-0/step": 60, "b-0/update": 4, "b-0/step": 90, "step": 90, "update": 4}
    other = {"b-0/update": 5, "b-0/step": 120, "step": 120, "update": 5}
    third = {"a-0/update": 3, "a-0/step": 80, "step": 120, "update": 5}
    for record in (first, both, other, third, {"step": 120, "evaluation/return": 1}):
        writer.write(record)
    writer.close()
    JSONLines(LoggedRun(tmp_path, resume_at=80, updates=3, by_trainer={"b-0": 1})).close()
    assert read_metrics(tmp_path) == [
        first | {"update": 3},
        {"a-0/update": 2, "a-0/step": 60, "step": 80, "update": 3},
        third | {"step": 80, "update": 3},
    ]


def test_without_resume_at_everything_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    assert steps(tmp_path) == [10, 20]


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    assert events(tmp_path) == [
        (10, "update", 1.0),
        (20, "update", 2.0),
        (10, "return/mean", 10.5),
        (20, "return/mean", 20.5),
    ]


def test_records_of_updates_are_let_through_in_a_burst_and_then_one_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(record_pace, "time", SimpleNamespace(monotonic=lambda: now))
    pace = RecordPace()
    assert sum(pace.allows() for _ in range(5000)) == BURST  # those of a short run, however quick
    allowed = []
    for tick in range(3600 * 16):  # an hour, 16 asked for a second
        now = 100.0 + (tick + 1) / 16
        if pace.allows():
            allowed.append(now)
    assert len(allowed) == 3600 * RATE and all(b - a == 1 / RATE for a, b in pairwise(allowed))
    now += 10 * BURST  # a pause
    assert sum(pace.allows() for _ in range(5000)) == BURST


def test_what_is_read_on_resume_is_in_memory_a_line_at_a_time(tmp_path: Path) -> None:
    lines = [
        b'{"step":%d,"update":%d,"episodes":%d,"filler":%s1}\n' % (10 * n, n, n, b" " * 5000)
        for n in range(1, 4001)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))  # 20 MB
    tracemalloc.start()
    try:
        assert sum(1 for _ in each_record(tmp_path)) == 4000
        JSONLines(LoggedRun(tmp_path, resume_at=20_000, updates=2000)).close()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1_000_000
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:2000])


def test_a_line_without_an_end_is_not_taken_into_memory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1}\n' + b" " * 2 * json_lines.LONGEST)
    with pytest.raises(RunError, match="line 2 is no record"):
        read_metrics(tmp_path)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(RunError, match="line 2 is no record: b'nonsense"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing has no metrics\.jsonl"):
        read_metrics(tmp_path / "nothing")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write .*--run-dir"):
        JSONLines(LoggedRun(tmp_path / "file" / "run"))


def test_what_a_full_disk_does_not_take_waits_and_both_ends_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    writer.write({"step": 1})
    real = os.pwrite

    def half(file: int, data: bytes, offset: int) -> int:
        return real(file, data[: len(data) // 2], offset)

    def none(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step, broken in ((2, half), (3, none)):
        monkeypatch.setattr(os, "pwrite", broken)
        writer.write({"step": step})
        assert not writer.whole
        assert steps(tmp_path) == [1]  # and no half of a line
    monkeypatch.setattr(os, "pwrite", real)
    writer.write({"step": 4})
    assert writer.whole
    writer.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    first, last = (record.message for record in caplog.records)
    assert "training goes on, and the last 2,000 records wait" in first
    assert "is written again, with the 2 records that waited" in last


def test_what_waits_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json_lines, "WAITING", 3)
    writer, real = JSONLines(LoggedRun(tmp_path)), os.pwrite
    monkeypatch.setattr(os, "pwrite", none)
    for step in range(5):
        writer.write({"step": step})
    monkeypatch.setattr(os, "pwrite", real)
    writer.close()
    assert steps(tmp_path) == [2, 3, 4]
    writer = JSONLines(LoggedRun(tmp_path / "other"))
    monkeypatch.setattr(os, "pwrite", none)
    writer.write({"step": 1})
    writer.close()
    assert "lacks the last 1 records" in caplog.text


def test_a_share_that_was_away_is_written_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file of before cannot be written any more, and is another one now."""
    writer, real, stale = JSONLines(LoggedRun(tmp_path)), os.pwrite, list[int]()

    def write(file: int, data: bytes, offset: int) -> int:
        if stale:
            raise OSError(errno.ESTALE, "Stale file handle", stale.pop())
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    writer.write({"step": 1})
    stale.append(1)
    writer.write({"step": 2})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "away")
    writer.write({"step": 3})
    writer.write({"step": 4})
    writer.close()
    assert steps(tmp_path) == [2, 3, 4]


def test_one_whose_file_cannot_be_opened_at_the_first_try_is_written_to_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, write, wrong = JSONLines(LoggedRun(tmp_path)), os.pwrite, [errno.ESTALE]

    def fails(file: int, data: bytes, offset: int) -> int:
        if wrong:
            raise OSError(wrong.pop(), "Stale file handle")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", fails)
    writer.write({"step": 1})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "away")
    (tmp_path / "metrics.jsonl").mkdir()
    writer.write({"step": 2})
    (tmp_path / "metrics.jsonl").rmdir()
    writer.write({"step": 3})
    writer.close()
    assert steps(tmp_path) == [1, 2, 3]


def test_a_disk_that_comes_and_goes_is_told_of_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, away, real = [1e6], list[bool](), os.pwrite

    def write(file: int, data: bytes, offset: int) -> int:
        if away:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(json_lines, "awake", lambda: now[0])
    writer, told = JSONLines(LoggedRun(tmp_path)), list[int]()
    for step, (seconds, gone) in enumerate(
        [(0, 1), (0, 0), (1, 1), (1, 0), (58, 1), (0, 0), (0, 1), (60, 1)]
    ):
        now[0] += seconds
        away[:] = [True] * gone
        writer.write({"step": step})
        told.append(len(caplog.records))
    assert told == [1, 2, 2, 2, 3, 4, 4, 5]
    away.clear()
    writer.close()
    assert steps(tmp_path) == [*range(8)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_hung_is_not_written_into_what_another_runner_has_written_since(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, hung, back = tmp_path / "run", os.pwrite, threading.Event(), threading.Event()
    run.mkdir()
    take(run)
    thread = FolderThread(run, 60.0)
    writer = JSONLines(LoggedRun(run), thread)
    writer.write({"step": 1})

    def write(file: int, data: bytes, offset: int) -> int:
        hung.set()
        thread.seconds = 0.0
        assert back.wait(60)
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    for step in (2, 3):
        writer.write({"step": step})
    assert hung.is_set() and writer.hangs
    (run / "epochs/2").touch()
    newer = "".join(json.dumps({"step": step, "update": 7}) + "\n" for step in (1, 2, 30))
    (run / "metrics.jsonl").write_text(newer)
    back.set()
    until = monotonic() + 60
    while writer.hangs:
        assert monotonic() < until
        sleep(0.001)
    thread.seconds = 60.0
    with pytest.raises(Overtaken):
        writer.write({"step": 4})
    writer.close()
    thread.close()
    let_go(run)
    late = "" if fails else '{"step":2}\n'  # was in the kernel: nothing can keep it from being written
    at = len('{"step":1}\n')
    assert (run / "metrics.jsonl").read_text() == newer[:at] + late + newer[at + len(late) :]


def test_who_is_closed_writes_into_nobody_elses_file(tmp_path: Path) -> None:
    writer = JSONLines(LoggedRun(tmp_path))
    writer.write({"step": 1})
    writer.close()
    with open(tmp_path / "other", "w+b") as other:  # it has the number of the one that was closed
        writer.write({"step": 2})
        assert other.read() == b""
    assert steps(tmp_path) == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == f"folder {tmp_path.name}"]


LIMITED = """
import resource, sys
from pathlib import Path
from tidemill.api.metric_sink import LoggedRun
from tidemill.metrics.json_lines import JSONLines
writer = JSONLines(LoggedRun(Path(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
for step in range(1_000):
    writer.write({"step": step})
writer.close()
"""


def test_a_limit_of_files_is_as_a_full_disk_and_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert 100 < len(steps(tmp_path)) < 1_000 and (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    assert (
        "File too large: no file or piece of shared memory may be larger (the limit is 2,000 bytes)"
        in done.stderr
    )
    assert done.stderr.count("training goes on") == 1


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


APPEND = "tidemill.metrics.tensorboard.TensorBoard._append"


def test_sinks_that_cannot_write_are_tried_again_and_given_what_they_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait_for(what: str) -> None:
        end = monotonic() + 60
        while caplog.text.count(what) < 2:
            assert monotonic() < end
            sleep(0.001)

    monkeypatch.setattr("tidemill.metrics.spool.RETRY", 0.01)
    writer = MetricsWriter(LoggedRun(tmp_path), [TensorBoard, CSV])
    writer.write({"step": 1.0, "a": 1.0})
    with monkeypatch.context() as broken:
        broken.setattr(APPEND, full)
        broken.setattr("tidemill.metrics.csv_file.CSV._append", full)
        writer.write({"step": 2.0, "a": 2.0})
        wait_for("cannot be written")
        for step in (3, 4):
            writer.write({"step": float(step), "a": float(step)})
    wait_for("written again")
    writer.write({"step": 5.0, "a": 5.0})
    writer.write({"step": 6.0, "a": 6.0})
    writer.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,a",
        *(f"{i}.0,{i}.0" for i in range(1, 7)),
    ]
    assert set(range(1, 7)) == {step for step, *_ in events(tmp_path)}
    told = [record.message.partition(":")[0] for record in caplog.records]
    assert sorted(told[:2]) == [
        "TensorBoard events cannot be written ([Errno 28] No space left on device)",
        "metrics.csv cannot be written ([Errno 28] No space left on device)",
    ]
    assert sorted(told[2:]) == ["TensorBoard events", "metrics.csv"]


def test_where_both_are_lost_neither_is_said_to_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(LoggedRun(tmp_path), [TensorBoard])
    monkeypatch.setattr(APPEND, full)
    monkeypatch.setattr(os, "pwrite", full)
    writer.write({"step": 1, "a": 1.0})
    writer.close()
    assert "TensorBoard events lacks its last records" in caplog.text
    assert "has all" not in caplog.text


def test_tensorboard_hides_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30)
    for path in tmp_path.glob("events*"):
        # file names carry the second; lives are read in their order
        path.rename(path.with_name("events.out.tfevents.0000000001.earlier"))
    write(tmp_path, 25, resume_at=20)
    assert [step for step, tag, _ in events(tmp_path) if tag == "update"] == [10, 20, 25]


def test_a_run_goes_back_once_its_folder_answers_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, back = os.pwrite, threading.Event()
    thread = FolderThread(tmp_path, 60.0)
    records = MetricsWriter(LoggedRun(tmp_path), (), thread)

    def write(file: int, data: bytes, offset: int) -> int:
        thread.seconds = 0.0
        assert back.wait(60)
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(writer, "ANSWER", 0.0)
    records.write({"step": 1})
    with pytest.raises(RunError, match="has not answered for 0 s, and a worker has died"):
        records.go_back(LoggedRun(tmp_path, resume_at=1))
    back.set()
    thread.seconds = 60.0
    monkeypatch.setattr(writer, "ANSWER", 60.0)
    records.go_back(LoggedRun(tmp_path, resume_at=1))
    records.write({"step": 2})
    records.close()
    thread.close()
    assert steps(tmp_path) == [1, 2]


def test_a_run_goes_back_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = MetricsWriter(LoggedRun(tmp_path))
    for step in (1, 2, 3):
        records.write({"step": step})
    with monkeypatch.context() as full:
        full.setattr(json_lines, "open", none_is_left, raising=False)
        records.go_back(LoggedRun(tmp_path, resume_at=2))
    records.write({"step": 4})
    records.close()
    assert steps(tmp_path) == [1, 2, 4]


def none_is_left(*given: Any, **more: Any) -> Any:
    """Raise as the system does where a file is to be made on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_was_removed_is_not_made_anew_by_a_run_that_goes_back(tmp_path: Path) -> None:
    records = MetricsWriter(LoggedRun(tmp_path / "run"))
    records.write({"step": 1})
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(RunError, match="run was removed or renamed, or its disk is away, and a worker has"):
        records.go_back(LoggedRun(tmp_path / "run", resume_at=1))
    assert not (tmp_path / "run").exists()


def test_the_last_records_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run has gigabytes of them."""
    assert last_records(tmp_path) == []
    monkeypatch.setattr(json_lines, "END", 1000)
    lines = "".join(f'{{"step": {step}, "x": null}}\n' for step in range(100))
    (tmp_path / "metrics.jsonl").write_text(f'{lines}no record\n{{"step": 100}}\n{{"step": 1')
    found = [record["step"] for record in last_records(tmp_path)]
    assert found == list(range(int(found[0]), 101)) and 30 < len(found) < 50
    assert math.isnan(last_records(tmp_path)[0]["x"])
