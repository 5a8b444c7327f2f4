"""`metrics.jsonl`, the source of truth: what a run measured, a line per record.

A line is a record such as ``{"step": 4096, "update": 2, "return/mean": 21.5,
"loss/policy": -0.01}``. `step` counts env steps. JSON has no NaN and no infinity, so both
are written as null, and read back as NaN. A record goes to the file in one write: a kill
tears at most the last line. The file is read a line at a time.
"""

import contextlib
import errno
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.clock import awake
from tidemill.core.errors import Overtaken, RunError
from tidemill.core.folder_thread import FolderThread
from tidemill.core.private_files import private
from tidemill.core.resource_shortage import why
from tidemill.core.untrusted_files import open_plain
from tidemill.store.fence import check

FILE = "metrics.jsonl"
LONGEST = 1 << 20  # bytes of a line
END = 2 * LONGEST  # bytes in which whoever wants the last records looks for them
WAITING = 2_000  # records that wait while they cannot be written; one has 1 to 2 KB
PATIENCE = 2.0  # seconds that whoever writes one waits for the disk
QUIET = 60.0  # seconds until it is told again that they cannot, of a disk that comes and goes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class JSONLines(MetricSink):
    """The sink writes the records of one run into its `metrics.jsonl`.

    What an earlier life of a resumed run wrote about later steps is dropped, and what it
    told of others than updates is not written again, where that is the same in every
    word: an evaluation that a killed run has played, and an exact one plays again, has
    one line. A disk that is full, or a share that went away, or hangs, does not stop
    training: the newest records wait in memory until they can be written, and a warning
    is logged once, and once when that is over; once a minute at most, where it is slow.

    thread: in which it writes; None: one of its own
    """

    title = FILE

    def __init__(self, run: LoggedRun, thread: FolderThread | None = None) -> None:
        super().__init__(run)
        self._path = run.folder / FILE
        self._thread, self._own = thread or FolderThread(run.folder, PATIENCE), thread is None
        # what follows is changed with this held
        self._changed = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=WAITING)  # the first may be just being written
        self._closed = self._left = False  # what waits is never written
        self._failed: OSError | None = None  # why the first of them is not in the file
        self._waited = self._lost = 0  # of them, since then
        self._said, self._quiet = False, 0.0  # that was told; until when no other one is
        self._told = deque[bytes](maxlen=WAITING)  # before the run was resumed, not of updates
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                _drop_later(self._path, run)
                self._told.extend(line for line, record in _lines(self._path) if not _of_update(record))
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}. Free the disk, or name another folder with "
                "--run-dir"
            ) from error
        self._end = os.lseek(self._file, 0, os.SEEK_END)

    def write(self, record: Mapping[str, float]) -> None:
        """See `MetricSink.write`; once closed it writes no more. Raises `Overtaken`."""
        line = msgspec.json.encode(record) + b"\n"
        if line in self._told or self._closed:
            return
        with self._changed:
            self._lost += len(self._waiting) == WAITING
            self._waiting.append(line)
        try:
            self._thread.do(self._write_all)
        except OSError as error:
            if not self._said and awake() >= self._quiet:
                self._said, self._quiet = True, awake() + QUIET
                log.warning(
                    "cannot write %s (%s): training goes on, and the last %s records wait until that is over",
                    self._path,
                    why(error),
                    f"{WAITING:,}",
                )
            self._failed = error
            self._waited += 1
            return
        if self._said:
            lost = f"; {self._lost:,} before them are lost" if self._lost else ""
            log.warning(
                "%s is written again, with the %s records that waited%s",
                self._path,
                f"{self._waited - self._lost:,}",
                lost,
            )
        if self._failed is not None:
            self._failed, self._waited, self._lost, self._said = None, 0, 0, False

    def _write_all(self) -> None:
        """Append all that waits, unless another runner leads the run by now, which may
        have begun while one of them hung. Raises `OSError`, and `Overtaken`."""
        if self._failed is not None and self._failed.errno not in FULL:  # a share may be another one now
            self._close_file()
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._end = min(self._end, os.lseek(self._file, 0, os.SEEK_END))
        while self._waiting and not self._left:
            check(self._path)
            line = self._waiting[0]
            self._append(line)
            with self._changed:
                self._end += len(line)
                if self._waiting and self._waiting[0] is line:
                    self._waiting.popleft()
                else:
                    self._lost -= 1  # it was given up meanwhile

    @property
    def whole(self) -> bool:
        """All records so far are in the file, or just being written."""
        return self._failed is None or not self._waiting

    @property
    def hangs(self) -> bool:
        """The run's folder does not answer."""
        return self._thread.hangs

    @property
    def end(self) -> int:
        """How many bytes of the file the records so far take, once all are in it."""
        with self._changed:
            return self._end + sum(map(len, self._waiting))

    def _append(self, line: bytes) -> None:
        """Append a whole line, or nothing. Raises `OSError`, and `Overtaken`."""
        try:
            written = os.pwrite(self._file, line, self._end)
            # the second one says why the first was short
            if written < len(line) and written + os.pwrite(
                self._file, line[written:], self._end + written
            ) < len(line):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                check(self._path)  # else what is behind may be the other runner's
                # no half of a line in the middle of the file; shrinking works on a full
                # disk
                os.ftruncate(self._file, self._end)
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, Overtaken):
            self._thread.do(self._write_last, anyway=True)
        if self._waiting:
            log.warning(
                "%s lacks the last %s records, which could not be written",
                self._path,
                f"{len(self._waiting):,}",
            )
        self._left = bool(self._waiting)
        if self._own:
            self._thread.close()

    def _write_last(self) -> None:
        try:
            self._write_all()  # the disk may have room by now
        finally:
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def read_metrics(folder: str | Path) -> list[dict[str, float]]:
    """Return the metrics of the run in `folder`: its records in order, each a mapping
    from names to numbers (``{"step": 4096.0, "return/mean": 21.5}``). A null is read as
    NaN, and a torn last line is left out. Raises `RunError` when there is no metrics
    file, or a line is no record."""
    return list(each_record(Path(folder)))


def each_record(folder: Path, most: float = math.inf) -> Iterator[dict[str, float]]:
    """Yield the records of the run in `folder`, in order, one in memory at a time: those
    that the first `most` bytes of the file hold. A torn last line is left out; null is
    read as NaN.

    Raises `RunError` when there is no metrics file, or a line that is no record.
    """
    return (record for _, record in _lines(folder / FILE, most))


def last_records(folder: Path) -> list[dict[str, float]]:
    """Return the last records of the run in `folder`, in order, as far as the end of the
    file holds them: a long run has very many. What is no record is left out; [] where
    there is none, or the file cannot be read."""
    found = []
    with contextlib.suppress(OSError), open_plain(folder / FILE) as file:
        if (begin := os.fstat(file.fileno()).st_size - END) > 0:
            file.seek(begin)
            file.readline()  # the end of one
        for line in file.read(END).splitlines():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                record = msgspec.json.decode(line, type=dict[str, float | None])
                found.append({name: math.nan if v is None else v for name, v in record.items()})
    return found


def _lines(path: Path, most: float = math.inf) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield each line that begins in the first `most` bytes, and the record that it
    is."""
    try:
        with open_plain(path) as file:
            number = 0
            while most > 0 and (line := file.readline(LONGEST)):
                number, ended, most = number + 1, line.endswith(b"\n"), most - len(line)
                try:
                    record = msgspec.json.decode(line, type=dict[str, float | None])
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    if (not ended and len(line) < LONGEST) or not file.readline(1):
                        return  # torn by a kill, or just being written
                    raise RunError(
                        f"{path}, line {number} is no record: {line[:80]!r}. Remove the line to read the "
                        "others"
                    ) from None
                yield line, {k: math.nan if v is None else v for k, v in record.items()}
                if not ended:
                    return
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{path.parent} has no {FILE}: it is no run folder, or the run ended before its first update"
        ) from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def _of_update(record: Mapping[str, float]) -> bool:
    return any(name.rpartition("/")[2] == "update" for name in record)


def _drop_later(path: Path, run: LoggedRun) -> None:
    """Leave out the records of later steps and updates, and a torn last line. Where these
    are the last ones the file is cut, for which a full disk has room; else it is written
    aside and renamed: a kill leaves one file or the other."""

    def left(line: bytes, record: dict[str, float]) -> bytes:
        stays = run.left_of(record) if line.endswith(b"\n") else {}
        return line if stays is record else msgspec.json.encode(stays) + b"\n" if stays else b""

    end = kept = 0  # bytes: read, and of the first lines, which stay as they are
    first = True  # these are all that stay
    for line, record in _lines(path):
        if stays := left(line, record):
            first = first and stays == line and kept == end
            kept += len(line)
        end += len(line)
    if first:
        if kept < path.stat().st_size:
            os.truncate(path, kept)
        return
    aside = path.with_suffix(".tmp")
    with open(aside, "wb", opener=private) as file:
        file.writelines(left(line, record) for line, record in _lines(path))
    aside.replace(path)
