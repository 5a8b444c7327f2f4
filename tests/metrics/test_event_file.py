"""Files of TensorBoard events, as TensorBoard reads them."""

import random
from pathlib import Path

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from tidemill.metrics.event_file import crc32c, framed


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
