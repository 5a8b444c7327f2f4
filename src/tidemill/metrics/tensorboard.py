"""TensorBoard events beside `metrics.jsonl`."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import IO

from tidemill.api.metric_sink import LoggedRun, MetricSink, viewer_name
from tidemill.core.private_files import private
from tidemill.metrics.event_file import framed, scalars_event, start_event, version_event
from tidemill.store.fence import check


class TensorBoard(MetricSink):
    """The sink writes TensorBoard events, and needs nothing of TensorBoard for it."""

    title = "TensorBoard events"

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._file: IO[bytes] | None = None
        self._files = 0

    def write(self, record: Mapping[str, float]) -> None:
        try:
            self._write(record)
        except OSError:
            self.close()  # what follows half of a record could not be read: the next one begins a file
            raise

    def _write(self, record: Mapping[str, float]) -> None:
        events, now = [], time.time()
        if self._file is None:
            events.append(version_event(now))
            if self.run.resume_at is not None:
                events.append(start_event(now, self.run.resume_at + 1))
        scalars = {
            viewer_name(name): value
            for name, value in record.items()
            if name != "step" and math.isfinite(value)
        }
        events.append(scalars_event(now, int(record["step"]), scalars))
        written = b"".join(map(framed, events))
        check(self.run.folder)  # again: making them whole may have been held up
        self._append(written)

    def _append(self, written: bytes) -> None:
        if self._file is None:
            self._file = self._open()
        self._file.write(written)
        self._file.flush()

    def _open(self) -> IO[bytes]:
        self._files += 1
        number = f".{self._files}" if self._files > 1 else ""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}{number}"
        return open(self.run.folder / name, "wb", opener=private)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the failure was told when it began
                self._file.close()
            self._file = None
