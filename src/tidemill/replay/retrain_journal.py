"""The journal of a run with a replay memory, from which `retrain` trains it again: what
came, in the order in which it was stored, and where between it was trained.

A header (a line of JSON) and records: an arrival (its channel, which seats have something
in it, and their rows as they came: what was observed, the version that acted, the loss of
a step), a training task (its progress), and a memory that began empty after a resume;
each with its CRC-32 behind it. Whoever feeds these to the same buffer and algorithm gets
the same weights, since all that a buffer draws depends on what it was given (see
`trained.retrain`).
"""

import json
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import numpy as np

from tidemill.api.algorithm import FILLER, Sample
from tidemill.api.stream import Offered, SampleConsumer, WatchedConsumer
from tidemill.core.errors import CheckpointError, Overtaken
from tidemill.core.private_files import private
from tidemill.core.schema import Field, Schema, is_of_numbers
from tidemill.core.untrusted_files import open_plain, read_json
from tidemill.store.fence import check

FORMAT = 2
MOST = 1 << 28
"""Bytes of an arrival, at most: a row of all seats of a target."""
_ARRIVAL, _TASK, _EMPTIED = b"A", b"T", b"E"
_ARRIVED, _PROGRESS = struct.Struct("<HI"), struct.Struct("<d")  # channel and number of seats; progress
_SEAT = np.dtype("<u4")
_SUM = struct.Struct("<I")
_TOGETHER = 1 << 18  # bytes that are written at once


def journal_path(folder: Path, policy: str) -> Path:
    """Return where the journal of a run in `folder` lies."""
    return folder / f"journal-{policy}.bin"


class JournalWriter:
    """A journal writer writes a run's journal. `offered` says what each channel sends,
    `facts` are plain data for the header. `end`, in bytes, is where a resumed run goes
    on: what was written after it is cut off.

    Records wait in memory until there are many: before they go to the disk is looked
    whether a newer runner leads the run, which raises `Overtaken`."""

    def __init__(self, path: Path, offered: list[Offered], facts: dict[str, Any], end: int | None) -> None:
        check(path)
        self._waiting = bytearray()
        try:
            if end is None:
                schema = {name: [list(field.shape), field.dtype] for name, field in offered[0].schema.items()}
                header = {
                    "format": FORMAT,
                    "schema": schema,
                    "leads": [list(block.lead) for block in offered],
                    "facts": facts,
                }
                # no buffer but ours; `close` closes it
                self._file: BinaryIO = open(path, "wb", buffering=0, opener=private)  # noqa: SIM115
                self._waiting += json.dumps(header).encode() + b"\n"
            else:
                self._file = path.open("r+b", buffering=0)
                if (size := path.stat().st_size) < end:
                    self._file.close()
                    raise CheckpointError(
                        f"the journal {path} has {size:,} bytes, and had {end:,} when the checkpoint was "
                        "written that the run goes on from: what came before is lost; put the whole file "
                        "back, or resume with journal = False"
                    )
                self._file.truncate(end)
                self._file.seek(end)
        except OSError as error:
            raise CheckpointError(
                f"the journal {path} cannot be written: {error.strerror}; a resumed run needs the journal of "
                "its first life"
            ) from None
        self._path, self._names = path, list(offered[0].schema)

    def arrival(self, sample: Sample) -> None:
        """Note that `sample` is stored next."""
        seats = ((sample["version"] >= 0) | sample["on_reset"] | sample["voided"])[0].nonzero()[0]
        head = [_ARRIVAL, _ARRIVED.pack(sample.channel, len(seats)), seats.astype(_SEAT).tobytes()]
        self._write(b"".join([*head, *(sample[name][0, seats].tobytes() for name in self._names)]))

    def task(self, progress: float) -> None:
        """Note that a task is done next, with this `progress` (see
        `Algorithm.update`)."""
        self._write(_TASK + _PROGRESS.pack(progress))

    def emptied(self) -> None:
        """Note that the memory begins empty."""
        self._write(_EMPTIED)

    def sync(self) -> int:
        """Have all of it on the disk, and return its length."""
        with self._named():
            self._write_out()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        """Write what is left, if that can be: a checkpoint has had it on the disk before,
        and whoever resumes goes on from there."""
        with suppress(OSError), self._file, suppress(Overtaken):
            self._write_out()

    def _write(self, record: bytes) -> None:
        self._waiting += record + _SUM.pack(crc32(record))
        if len(self._waiting) >= _TOGETHER:
            with self._named():
                self._write_out()

    def _write_out(self) -> None:
        check(self._path)
        while self._waiting:  # what a full disk does not take stays for the next time
            written = self._file.write(self._waiting)
            del self._waiting[:written]

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the journal {self._path} cannot be written any further: {error.strerror}; free the disk "
                "and resume, or train with journal = False"
            ) from None


class JournaledConsumer(WatchedConsumer):
    """A sample stream whose samples are noted as they are taken."""

    def __init__(self, source: SampleConsumer, journal: JournalWriter) -> None:
        super().__init__(source)
        self._journal = journal

    def _look(self, sample: Sample) -> None:
        self._journal.arrival(sample)


class Task(NamedTuple):
    """A training task."""

    progress: float


class MemoryCleared(NamedTuple):
    """The memory begins empty."""


def _lengths(shape: Any) -> tuple[int, ...]:
    """Return a shape, as the header has it. Raises `ValueError` for what is none."""
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{shape} is no shape")
    return tuple(shape)


def _numbers(dtype: Any) -> str:
    """Return the name of a type of numbers. Raises `ValueError` for anything else that
    numpy knows, or does not."""
    if not is_of_numbers(dtype):
        raise ValueError(f"{dtype!r} is no type of numbers")
    return str(dtype)


class JournalReader(SampleConsumer):
    """A journal reader reads a journal, and is the sample stream that it was written
    from. Raises `CheckpointError` for what is no journal."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = open_plain(path)
            header = read_json(self._file.readline(1 << 24))
            if header["format"] != FORMAT:
                raise CheckpointError(
                    f"the journal {path} has format {header['format']}; this version reads {FORMAT}"
                )
            self.facts: dict[str, Any] = header["facts"]
            self._schema: Schema = {
                name: Field(_lengths(shape), _numbers(dtype))
                for name, (shape, dtype) in header["schema"].items()
            }
            self._leads = [(rows, seats) for rows, seats in map(_lengths, header["leads"])]
            if any(
                rows * seats * sum(field.nbytes for field in self._schema.values()) > MOST
                for rows, seats in self._leads
            ):
                raise ValueError(f"it has arrivals above {MOST:,} bytes")
            self._left = path.stat().st_size - self._file.tell()  # bytes: nothing that is longer is read
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"no journal can be read from {path}: {error}; a run writes one with "
                "ReplayTrainer(journal=True)"
            ) from None
        self._waiting: deque[Sample] = deque()

    def records(self) -> Iterator[Task | MemoryCleared | None]:
        """Yield the records in order. None stands for an arrival: it is there for
        `consume` then. A last one that is torn is left out."""
        while tag := self._file.read(1):
            at, self._sum = self._file.tell() - 1, crc32(tag)
            found: Task | MemoryCleared | Sample | None = MemoryCleared()
            if tag == _TASK:
                found = (
                    None if (data := self._take(_PROGRESS.size)) is None else Task(*_PROGRESS.unpack(data))
                )
            elif tag == _ARRIVAL:
                found = self._read()
            elif tag != _EMPTIED:
                raise CheckpointError(f"the journal is damaged: there is no record {tag!r} (at byte {at:,})")
            told = self._sum
            if found is None or (data := self._take(_SUM.size)) is None:
                return
            if _SUM.unpack(data) != (told,):
                raise CheckpointError(
                    f"the journal is damaged: its record at byte {at:,} is not what was written"
                )
            if isinstance(found, Sample):
                self._waiting.append(found)
                yield None
            else:
                yield found

    def _take(self, size: int) -> bytes | None:
        """Return the next bytes, which the check sum has, too; None where the file ends
        before."""
        if size > self._left or len(data := self._file.read(size)) < size:
            return None
        self._sum = crc32(data, self._sum)
        return data

    def _read(self) -> Sample | None:
        if (data := self._take(_ARRIVED.size)) is None:
            return None
        channel, count = _ARRIVED.unpack(data)
        if channel >= len(self._leads):
            raise CheckpointError(
                f"the journal is damaged: it has {len(self._leads)} channels, and a record of channel "
                f"{channel}"
            )
        lead = self._leads[channel]
        if count > lead[1]:
            raise CheckpointError(
                f"the journal is damaged: channel {channel} has {lead[1]} seats, and a record of {count}"
            )
        if (data := self._take(count * _SEAT.itemsize)) is None:
            return None
        seats = np.frombuffer(data, _SEAT)
        if count and int(seats.max()) >= lead[1]:
            raise CheckpointError(
                f"the journal is damaged: channel {channel} has {lead[1]} seats, and a record of seat "
                f"{seats.max()}"
            )
        sample = Sample()
        sample.channel, sample.bootstrap = channel, 0
        for name, field in self._schema.items():
            if (data := self._take(count * field.nbytes)) is None:
                return None
            sample[name] = np.full((*lead, *field.shape), FILLER.get(name, 0), field.dtype)
            sample[name][0, seats] = np.frombuffer(data, field.dtype).reshape(count, *field.shape)
        return sample

    def offered(self) -> list[Offered]:
        return [Offered(self._schema, lead, 2, lead[0] * lead[1]) for lead in self._leads]

    def consume(self) -> Sample | None:
        return self._waiting.popleft() if self._waiting else None

    def release(self) -> None:
        """Do nothing: samples are copies."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
