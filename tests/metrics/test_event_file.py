"""Files of TensorBoard events, as TensorBoard reads them."""

import random
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from tidemill.metrics.event_file import crc32c, framed, scalars_event, start_event, version_event


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
)
def test_checksums_are_those_of_rfc_3720(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def test_tensorboard_reads_the_records_of_any_length(tmp_path: Path) -> None:
    """It looks at both of their checksums."""
    draw = random.Random(1)
    records = [draw.randbytes(length) for length in (0, 1, 3, 4, 5, 511, 512, 513, 515, 1024, 5000)]
    (tmp_path / "events").write_bytes(b"".join(map(framed, records)))
    reader, read = PyRecordReader_New(str(tmp_path / "events")), list[bytes]()
    while len(read) < len(records):
        reader.GetNext()
        read.append(reader.record())
    assert read == records


@pytest.mark.parametrize("step", [0, 1, 127, 128, 300, 2**31, 2**63 - 1])
def test_events_are_what_tensorboards_own_messages_hold(step: int) -> None:
    """Numbers of any length, names of any letters, float32 out of its range."""
    scalars = {"loss": 0.1, "zero": 0.0, "négatif": -1e-30, "x" * 200: 1e300, "workers/a b": float(2**40)}
    with np.errstate(over="ignore"):
        values = [Summary.Value(tag=name, simple_value=np.float32(value)) for name, value in scalars.items()]
    made = Event(wall_time=12.5, step=step, summary=Summary(value=values))
    assert Event.FromString(scalars_event(12.5, step, scalars)) == made
    started = Event(wall_time=12.5, step=step, session_log=SessionLog(status=SessionLog.START))
    assert Event.FromString(start_event(12.5, step)) == started
    assert Event.FromString(version_event(0.5)) == Event(wall_time=0.5, file_version="brain.Event:2")
    assert Event.FromString(scalars_event(12.5, step, {})) == Event(
        wall_time=12.5, step=step, summary=Summary()
    )
