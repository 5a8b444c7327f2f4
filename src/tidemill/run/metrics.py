"""What a run measured: `metrics.jsonl`, the source of truth, and TensorBoard events beside it.

One line per record, such as ``{"step": 4096, "update": 2, "return/mean": 21.5, "loss/policy": -0.01}``. `step` counts env steps. JSON has no NaN
and no infinity, so both are written as null, and read back as NaN. A record goes to the file in one write: a kill tears at most the last line.
TensorBoard gets what is newest, ten times a second at most.
"""

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import RunError

FILE = "metrics.jsonl"
EVENTS_EVERY = 0.1  # seconds: TensorBoard itself shows a thousand points of a curve, and one record's event is 0.15 ms of a core

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes the records of one run into `folder`.

    A resumed run says at which env step and which update it goes on (`resume_at`, `updates`): what an earlier life wrote about later ones is dropped,
    here and, by the step, in TensorBoard.
    A disk that is full, or a share that went away, does not stop training: the record is left out, whole, and a warning is logged once.
    """

    def __init__(self, folder: Path, resume_at: int | None = None, updates: int | None = None) -> None:
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                _drop_after(self._path, math.inf if resume_at is None else resume_at, math.inf if updates is None else updates)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}. Free the disk, or name another folder with --run-dir") from error
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._events = _Events(folder, resume_at)
        self._warned = False

    def write(self, record: Mapping[str, float]) -> None:
        """Append one record. It needs a ``step``; the other names are free."""
        plain = {k: v if isinstance(v, int) else float(v) for k, v in record.items()}
        line = msgspec.json.encode(plain) + b"\n"
        try:
            if os.pwrite(self._file, line, self._end) < len(line):
                raise OSError("the disk is full")
            self._end += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)  # no half of a line in the middle of the file; shrinking works on a full disk
            if not self._warned:
                log.warning("cannot write %s (%s): training goes on without these metrics", self._path, error.strerror or error)
            self._warned = True
        self._events.write(plain, whole=not self._warned)

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._events.close()


class _Events:
    """TensorBoard events, written without a thread: of each name what is newest, every `EVENTS_EVERY` seconds. The library is imported at the first
    record, when the workers are already running."""

    def __init__(self, folder: Path, resume_at: int | None) -> None:
        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._resume_at = resume_at
        self._writer: Any = None
        self._failed, self._whole = False, True
        self._newest: dict[str, tuple[int, float]] = {}  # step and value of each name that was told since the last event
        self._written = -math.inf

    def write(self, record: Mapping[str, float], whole: bool) -> None:
        """Take the record's numbers for scalars at its step. After a failure, which is logged, nothing more is written.

        whole   metrics.jsonl has all records so far
        """
        self._whole, step = whole, int(record["step"])
        self._newest |= {k: (step, v) for k, v in record.items() if k != "step" and math.isfinite(v)}
        if time.monotonic() - self._written >= EVENTS_EVERY:
            self._write_newest()

    def _write_newest(self) -> None:
        newest, self._newest = self._newest, {}
        if self._failed or not newest:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._writer is None:
                self._writer = self._open()
                self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
                if self._resume_at is not None:  # TensorBoard hides what earlier files hold from this step on
                    self._put(Event(wall_time=time.time(), step=self._resume_at + 1, session_log=SessionLog(status=SessionLog.START)))
            for step in sorted({step for step, _ in newest.values()}):
                values = [Summary.Value(tag=name, simple_value=value) for name, (at, value) in newest.items() if at == step]
                self._put(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
            self._written = time.monotonic()
        except (OSError, ImportError) as error:
            self._failed = True
            log.warning("TensorBoard events stop here (%s)%s", error, f"; {FILE} has all metrics" if self._whole else "")

    def _open(self) -> Any:
        from tensorboard.summary.writer.record_writer import RecordWriter

        return RecordWriter(self._path.open("wb"))

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        self._write_newest()
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the failure was told when it began
                self._writer.close()
            self._writer = None


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the records of the run in `folder`, in order. A torn last line is left out; null is read as NaN.

    Raises `RunError` when there is no metrics file, or a line that is no record.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} has no {FILE}: it is no run folder, or the run ended before its first update") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=dict[str, float | None])
        except (msgspec.DecodeError, UnicodeDecodeError):
            if number == len(lines):
                break  # torn by a kill
            raise RunError(f"{path}, line {number} is no record: {line[:80]!r}. Remove the line to read the others") from None
        records.append({k: math.nan if v is None else v for k, v in record.items()})
    return records


def _drop_after(path: Path, step: float, update: float) -> None:
    """Leave out the records of later steps and updates, and a torn last line. Written aside and renamed: a kill leaves one file or the other."""
    lines = path.read_bytes().splitlines(keepends=True)
    early = [r.get("step", 0) <= step and r.get("update", 0) <= update for r in read_metrics(path.parent)]
    kept = [line for line, stays in zip(lines, early, strict=False) if stays and line.endswith(b"\n")]
    if kept != lines:
        aside = path.with_suffix(".tmp")
        aside.write_bytes(b"".join(kept))
        aside.replace(path)
