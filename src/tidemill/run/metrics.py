"""What a run measured: `metrics.jsonl`, the source of truth, and TensorBoard events
beside it.

One line per record, such as ``{"step": 4096, "update": 2, "return/mean": 21.5,
"loss/policy": -0.01}``. `step` counts env steps. JSON has no NaN and no infinity, so both
are written as null, and read back as NaN. A record goes to the file in one write: a kill
tears at most the last line. TensorBoard gets the same. Both grow with time and not with
speed: a `Pace` says when updates get a record. Files are read a line at a time.
"""

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import RunError
from tidemill.core.private import private
from tidemill.core.reading import open_plain
from tidemill.core.secrets import says_secret
from tidemill.core.shortage import why

FILE = "metrics.jsonl"
# records of updates that a run may write as quickly as it makes them, so that a short run
# has a record of each
BURST = 1000
RATE = 1.0  # of them a second in the long run: one has 1 to 2 KB
LONGEST = 1 << 20  # bytes of a line

log = logging.getLogger(__name__)


class Pace:
    """Lets `BURST` records through, and `RATE` a second from then on: a credit for each
    that comes back with time."""

    def __init__(self) -> None:
        self._credits, self._at = float(BURST), time.monotonic()

    def allows(self) -> bool:
        """Return whether one may be written now, which counts as written then."""
        now = time.monotonic()
        self._credits, self._at = min(BURST, self._credits + RATE * (now - self._at)), now
        allowed = self._credits >= 1
        self._credits -= allowed
        return allowed


class MetricsWriter:
    """Writes the records of one run into `folder`.

    A resumed run says at which env step and which update it goes on (`resume_at`,
    `updates`): what an earlier life wrote about later ones is dropped, here and, by the
    step, in TensorBoard. A disk that is full, or a share that went away, does not stop
    training: the record is left out, whole, and a warning is logged once.
    """

    def __init__(self, folder: Path, resume_at: int | None = None, updates: int | None = None) -> None:
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                _drop_after(
                    self._path,
                    math.inf if resume_at is None else resume_at,
                    math.inf if updates is None else updates,
                )
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}. Free the disk, or name another folder with "
                "--run-dir"
            ) from error
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._events = _Events(folder, resume_at)
        self._warned = False

    def write(self, record: Mapping[str, float]) -> None:
        """Append one record. It needs a ``step``; the other names are free."""
        plain = {
            k: v if isinstance(v, int) else float(v)
            for k, v in record.items()
            if not says_secret(k.rpartition("/")[2])
        }
        line = msgspec.json.encode(plain) + b"\n"
        try:
            written = os.pwrite(self._file, line, self._end)
            # the second one says why the first was short
            if written < len(line) and written + os.pwrite(
                self._file, line[written:], self._end + written
            ) < len(line):
                raise OSError("the disk is full")
            self._end += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                # no half of a line in the middle of the file; shrinking works on a full
                # disk
                os.ftruncate(self._file, self._end)
            if not self._warned:
                log.warning(
                    "cannot write %s (%s): training goes on without these metrics", self._path, why(error)
                )
            self._warned = True
        self._events.write(plain, whole=not self._warned)

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._events.close()


class _Events:
    """TensorBoard events, written without a thread. The library is imported at the first
    record, when the workers are already running."""

    def __init__(self, folder: Path, resume_at: int | None) -> None:
        self._path = (
            folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        )
        self._resume_at = resume_at
        self._writer: Any = None
        self._failed = False

    def write(self, record: Mapping[str, float], whole: bool) -> None:
        """Take the record's numbers for scalars at its step. After a failure, which is
        logged, nothing more is written.

        whole: metrics.jsonl has all records so far
        """
        if self._failed:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._writer is None:
                self._writer = self._open()
                self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
                if self._resume_at is not None:  # TensorBoard hides what earlier files hold from this step on
                    self._put(
                        Event(
                            wall_time=time.time(),
                            step=self._resume_at + 1,
                            session_log=SessionLog(status=SessionLog.START),
                        )
                    )
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in record.items()
                if name != "step" and math.isfinite(value)
            ]
            self._put(Event(wall_time=time.time(), step=int(record["step"]), summary=Summary(value=values)))
            self._writer.flush()
        except (OSError, ImportError) as error:
            self._failed = True
            log.warning(
                "TensorBoard events stop here (%s)%s", error, f"; {FILE} has all metrics" if whole else ""
            )

    def _open(self) -> Any:
        from tensorboard.summary.writer.record_writer import RecordWriter

        return RecordWriter(open(self._path, "wb", opener=private))

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the failure was told when it began
                self._writer.close()
            self._writer = None


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the records of the run in `folder`, in order (see `each_record`)."""
    return list(each_record(folder))


def each_record(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the records of the run in `folder`, in order, one in memory at a time. A torn
    last line is left out; null is read as NaN.

    Raises `RunError` when there is no metrics file, or a line that is no record.
    """
    return (record for _, record in _lines(folder / FILE))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield each line and the record that it is."""
    try:
        with open_plain(path) as file:
            number = 0
            while line := file.readline(LONGEST):
                number += 1
                try:
                    record = msgspec.json.decode(line, type=dict[str, float | None])
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    if not file.readline(1):
                        return  # torn by a kill
                    raise RunError(
                        f"{path}, line {number} is no record: {line[:80]!r}. Remove the line to read the "
                        "others"
                    ) from None
                yield line, {k: math.nan if v is None else v for k, v in record.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{path.parent} has no {FILE}: it is no run folder, or the run ended before its first update"
        ) from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def _drop_after(path: Path, step: float, update: float) -> None:
    """Leave out the records of later steps and updates, and a torn last line. Written
    aside and renamed: a kill leaves one file or the other."""

    def stays(line: bytes, record: dict[str, float]) -> bool:
        return record.get("step", 0) <= step and record.get("update", 0) <= update and line.endswith(b"\n")

    if sum(len(line) for line, record in _lines(path) if stays(line, record)) == path.stat().st_size:
        return
    aside = path.with_suffix(".tmp")
    with open(aside, "wb", opener=private) as file:
        file.writelines(line for line, record in _lines(path) if stays(line, record))
    aside.replace(path)
