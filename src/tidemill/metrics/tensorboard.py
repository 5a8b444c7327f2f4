"""TensorBoard events beside `metrics.jsonl`."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tidemill.api.metric_sink import LoggedRun, MetricSink, viewer_name
from tidemill.core.private_files import private
from tidemill.metrics.event_file import EventFile


class TensorBoard(MetricSink):
    """The sink writes TensorBoard events without a thread. The library is imported at the
    first record, when the workers are already running."""

    title = "TensorBoard events"

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._writer: EventFile | None = None
        self._files = 0

    def write(self, record: Mapping[str, float]) -> None:
        try:
            self._write(record)
        except OSError:
            self.close()  # what follows half of a record could not be read: the next one begins a file
            raise

    def _write(self, record: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
            self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if self.run.resume_at is not None:  # TensorBoard hides what earlier files hold from this step on
                self._put(
                    Event(
                        wall_time=time.time(),
                        step=self.run.resume_at + 1,
                        session_log=SessionLog(status=SessionLog.START),
                    )
                )
        values = [
            Summary.Value(tag=viewer_name(name), simple_value=value)
            for name, value in record.items()
            if name != "step" and math.isfinite(value)
        ]
        self._put(Event(wall_time=time.time(), step=int(record["step"]), summary=Summary(value=values)))
        self._writer.flush()

    def _open(self) -> EventFile:
        self._files += 1
        number = f".{self._files}" if self._files > 1 else ""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}{number}"
        return EventFile(open(self.run.folder / name, "wb", opener=private))

    def _put(self, event: Any) -> None:
        assert self._writer is not None
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the failure was told when it began
                self._writer.close()
            self._writer = None
