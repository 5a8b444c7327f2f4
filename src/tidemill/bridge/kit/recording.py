"""Recordings: files that hold an exchange between a trainer and a simulator, to be played
again (docs/simulators.md has the format).

A file is 16 bytes that say what it is, then records: the length of what follows (i32),
its CRC-32 (u32), and MessagePack. The first record is a `Head`, the last an `End`, those
between are `Exchange`s. Numbers in rows are little-endian bytes, as they lie in memory.
"""

import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.image import LARGEST, check_spec
from tidemill.bridge.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DecisionSteps,
    ObservationSpec,
    TerminalSteps,
)
from tidemill.bridge.protocol.tables import LAYOUTS, QUERY, RESET, SHAPE_NUMBERS, STEP
from tidemill.core.errors import ConfigError, RecordingError, TidemillError

MAGIC = b"tidemill bridge\n"
VERSION = 1
_FRAME = struct.Struct("<iI")


class Head(msgspec.Struct, tag="head", frozen=True, forbid_unknown_fields=True):
    """version: of the format; layout: in which it was recorded; program: the simulator's
    file name."""

    version: int
    layout: str
    program: str


class Observation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `ObservationSpec`."""

    shape: tuple[int, ...]
    properties: tuple[int, ...]
    kind: int


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group that appeared: its name and its `BehaviorSpec`."""

    name: str
    max_agents: int
    observations: tuple[Observation, ...]
    continuous_size: int
    branches: tuple[int, ...]


class RecordedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agents that ask or end: agent_id i32 [n], reward f32 [n], obs f32 [n, *shape] each,
    flags u8: masks [n, B], or interrupted [n]."""

    agent_id: bytes
    reward: bytes
    obs: tuple[bytes, ...]
    flags: bytes


class Actions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of those who asked, in their order: continuous f32 [n, continuous_size], discrete
    i32 [n, branches]."""

    continuous: bytes
    discrete: bytes


class Exchange(msgspec.Struct, tag="exchange", frozen=True, forbid_unknown_fields=True):
    """What the trainer handed over, and what came back.

    command: 0 step, 1 reset, 4 query
    sent: side-channel data of the trainer
    actions: by group; a group without any was given zeros
    came: side-channel data of the simulator
    groups: that appeared
    steps: by group: those who ask, those whose episode is over
    """

    command: int
    sent: bytes
    actions: dict[str, Actions]
    came: bytes
    groups: tuple[GroupSpec, ...]
    steps: dict[str, tuple[RecordedRows, RecordedRows]]


class End(msgspec.Struct, tag="end", frozen=True, forbid_unknown_fields=True):
    """exchanges: how many there were."""

    exchanges: int


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Head | Exchange | End)


class RecordingWriter:
    """A recording writer writes a recording beside `path`, under which it appears, whole,
    with `close`. ConfigError where there is a file, unless it may be replaced."""

    def __init__(self, path: Path, layout: str, program: str, replace: bool = False) -> None:
        if path.exists() and not replace:
            raise ConfigError(
                f"there is a file {path} already; choose another name, or let it be replaced (--force)"
            )
        self._path, self._aside = path, path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(
                self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise ConfigError(f"no recording can be written in {path.parent}: {error.strerror}") from None
        self._file = os.fdopen(descriptor, "wb")
        self.exchanges = 0
        self._file.write(MAGIC)
        self._write(Head(VERSION, layout, program))

    def add(self, exchange: Exchange) -> None:
        """Add an exchange."""
        self._write(exchange)
        self.exchanges += 1

    def _write(self, record: Head | Exchange | End) -> None:
        data = _ENCODER.encode(record)
        self._file.write(_FRAME.pack(len(data), zlib.crc32(data)) + data)

    def close(self) -> None:
        """Let the file appear; where nothing was recorded there is none. Does nothing the
        second time."""
        if self._file.closed:
            return
        try:
            self._write(End(self.exchanges))
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if self.exchanges:
            self._aside.replace(self._path)
        else:
            self._aside.unlink()


class Recording:
    """A recording that was read through once and found whole. RecordingError otherwise.

    specs: specs of all groups, in the order in which they appeared
    commands: commands of all exchanges
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, BehaviorSpec] = {}
        self.commands: list[int] = []
        self._places: list[int] = []
        try:
            if not path.is_file() and path.exists():
                raise RecordingError(f"{path} is no plain file; a recording is")
            self._file = path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._read_through()
        except BaseException:
            self._file.close()
            raise

    def _read_through(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{self.path} is no recording; `tidemill simulator record` makes one")
        head = self._next()
        if not isinstance(head, Head):
            raise RecordingError(f"{self.path} begins with no head")
        if head.version != VERSION or head.layout not in LAYOUTS:
            raise RecordingError(
                f"{self.path} is of version {head.version} in layout {head.layout!r}; version {VERSION} can "
                "be read"
            )
        self.head = head
        asked: dict[str, int] = {}
        while True:
            place = self._file.tell()
            record = self._next()
            if isinstance(record, End):
                break
            if not isinstance(record, Exchange):
                raise RecordingError(f"{self.path}: there is a second head at byte {place}")
            asked = self._check(record, asked)
            self._places.append(place)
            self.commands.append(record.command)
        if record.exchanges != len(self._places) or not self._places or self._file.read(1):
            raise RecordingError(
                f"{self.path} has {len(self._places)} exchanges, and its end says {record.exchanges}; or "
                "more follows it"
            )

    def _next(self) -> Head | Exchange | End:
        place = self._file.tell()
        frame = self._file.read(_FRAME.size)
        length, checksum = _FRAME.unpack(frame) if len(frame) == _FRAME.size else (-1, 0)
        if not 0 <= length <= self._size - place - _FRAME.size:
            raise RecordingError(f"{self.path} is cut off or damaged at byte {place}: it ends amid a record")
        data = self._file.read(length)
        if zlib.crc32(data) != checksum:
            raise RecordingError(f"{self.path} is damaged at byte {place}: the record's checksum is another")
        try:
            record: Head | Exchange | End = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}: the record at byte {place} cannot be: {error}") from None
        return record

    def _check(self, exchange: Exchange, asked: Mapping[str, int]) -> dict[str, int]:
        """Check an exchange against what came before it; return how many agents ask for
        decisions now, by group."""
        what = f"{self.path}, exchange {len(self._places)}"
        if exchange.command not in (STEP, RESET, QUERY):
            raise RecordingError(f"{what}: there is no command {exchange.command} from a trainer")
        for group in exchange.groups:
            observations = tuple(
                ObservationSpec(one.shape, one.properties, one.kind) for one in group.observations
            )
            spec = BehaviorSpec(
                observations, ActionSpec(group.continuous_size, group.branches), group.max_agents
            )
            try:
                check_spec(LAYOUTS["0.3.2"], group.name, spec)
            except TidemillError as error:
                raise RecordingError(f"{what}: {error}") from None
            numbers = [number for one in observations for number in (*one.properties, one.kind)]
            if any(len(one.properties) > SHAPE_NUMBERS for one in observations) or any(
                abs(number) > LARGEST for number in numbers
            ):
                raise RecordingError(
                    f'{what}: group "{group.name}" has an observation whose properties cannot be'
                )
            if self.specs.setdefault(group.name, spec) is not spec:
                raise RecordingError(f'{what}: group "{group.name}" appears twice')
        if unknown := (exchange.steps.keys() | exchange.actions.keys()) - self.specs.keys():
            raise RecordingError(f"{what}: there is no group {sorted(unknown)[0]!r}")
        for name, actions in exchange.actions.items():
            self._actions(what, name, actions, asked.get(name, 0))
        found = dict(asked) if exchange.command == QUERY else {}
        for name, pair in exchange.steps.items():
            decisions, terminals = self._steps(what, name, pair)
            most = self.specs[name].max_agents
            if len(decisions) > most or len(terminals) > most:
                raise RecordingError(
                    f'{what}: group "{name}" has {len(decisions)} + {len(terminals)} rows, and room for '
                    f"{most}"
                )
            found[name] = len(decisions)
        return found

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Exchange:
        self._file.seek(self._places[number])
        record = self._next()
        if not isinstance(record, Exchange):
            raise RecordingError(f"{self.path} was changed while it was read")
        return record

    def __iter__(self) -> Iterator[Exchange]:
        return (self[number] for number in range(len(self)))

    def steps(self, exchange: Exchange, name: str) -> tuple[DecisionSteps, TerminalSteps]:
        """Return a group's steps in an exchange; nobody where the group was not there
        yet."""
        none = RecordedRows(b"", b"", (b"",) * len(self.specs[name].observation_specs), b"")
        return self._steps(str(self.path), name, exchange.steps.get(name, (none, none)))

    def actions(self, exchange: Exchange, name: str, agents: int) -> ActionTuple:
        """Return the actions that were handed over to `agents` agents of a group."""
        if name not in exchange.actions:
            return self.specs[name].action_spec.zeros(agents)
        return self._actions(str(self.path), name, exchange.actions[name], agents)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(
        self, what: str, name: str, pair: tuple[RecordedRows, RecordedRows]
    ) -> tuple[DecisionSteps, TerminalSteps]:
        spec, branches = self.specs[name], self.specs[name].action_spec.branches
        asks, ends = pair
        what = f'{what}, group "{name}"'
        ids, reward, obs = _block(what, asks, spec)
        forbidden = _array(what, "masks", asks.flags, np.uint8, len(ids), sum(branches)) != 0
        decisions = DecisionSteps(obs, reward, ids, forbidden if branches else None, branches)
        ids, reward, obs = _block(what, ends, spec)
        return decisions, TerminalSteps(
            obs, reward, ids, _array(what, "flags", ends.flags, np.uint8, len(ids)) != 0
        )

    def _actions(self, what: str, name: str, actions: Actions, agents: int) -> ActionTuple:
        spec = self.specs[name].action_spec
        what = f'{what}, group "{name}"'
        continuous = _array(
            what, "continuous actions", actions.continuous, np.float32, agents, spec.continuous_size
        )
        return ActionTuple(
            continuous, _array(what, "choices", actions.discrete, np.int32, agents, len(spec.branches))
        )


def _block(
    what: str, rows: RecordedRows, spec: BehaviorSpec
) -> tuple[NDArray[np.int32], NDArray[np.float32], list[NDArray[np.float32]]]:
    n = len(rows.agent_id) // 4
    if len(rows.obs) != len(spec.observation_specs):
        raise RecordingError(
            f"{what} has {len(rows.obs)} observations where {len(spec.observation_specs)} are declared"
        )
    obs = [
        _array(what, "an observation", data, np.float32, n, *one.shape)
        for data, one in zip(rows.obs, spec.observation_specs, strict=True)
    ]
    return (
        _array(what, "agent ids", rows.agent_id, np.int32, n),
        _array(what, "rewards", rows.reward, np.float32, n),
        obs,
    )


def _array(what: str, name: str, data: bytes, kind: Any, *shape: int) -> NDArray[Any]:
    size = int(np.dtype(kind).itemsize)
    for number in shape:
        size *= number
    if len(data) != size:
        raise RecordingError(f"{what}: {name} have {len(data)} bytes where {size} belong")
    array: NDArray[Any] = np.frombuffer(bytearray(data), kind).reshape(shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RecordingError(f"{what}: {name} are not finite")
    return array


def group_spec(name: str, spec: BehaviorSpec) -> GroupSpec:
    """Return a group as recordings have it."""
    observations = tuple(Observation(one.shape, one.properties, one.kind) for one in spec.observation_specs)
    return GroupSpec(
        name, spec.max_agents, observations, spec.action_spec.continuous_size, spec.action_spec.branches
    )


def rows_of(steps: DecisionSteps | TerminalSteps) -> RecordedRows:
    """Return steps as recordings have them."""
    marks = steps.interrupted if isinstance(steps, TerminalSteps) else steps.forbidden
    flags = b"" if marks is None else marks.astype(np.uint8).tobytes()
    return RecordedRows(
        steps.agent_id.tobytes(), steps.reward.tobytes(), tuple(array.tobytes() for array in steps.obs), flags
    )
