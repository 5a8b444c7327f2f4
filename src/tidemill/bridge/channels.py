"""Side channels: what trainer and simulator tell each other besides observations and actions. Both ends, and both framings.

The bytes that one side hands over with its turn are messages in a row, each a key, an i32 length and so many bytes. The key is the channel's UUID
in .NET's byte order (framing "uuid"), or an i32 type in an older framing ("type"). All numbers are little-endian; a string is an i32 count and ASCII.

    trainer                                           simulator
    engine = EngineSettings()                         EngineSettings(on_change=apply)
    engine.set(time_scale=20.0)
    parameters = EnvironmentParameters()              parameters.get("gravity", 9.81)
    parameters.set("gravity", Uniform(1.0, 10.0))
    statistics.tally.take()                           Statistics().add("score", 3.0, "sum")
"""

import math
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from uuid import UUID

from tidemill.core.errors import ConfigError, SimulatorError, did_you_mean
from tidemill.core.tally import HOWS, How, Tally

Framing = Literal["uuid", "type"]

ENGINE, PARAMETERS, STATISTICS, PROPERTIES = 2, 3, 4, 1  # older types; those of parameters and statistics are ours, the older ones had neither
RAW_TYPES, CUSTOM_TYPES = 1000, 2000  # where the types of raw bytes, and of channels of one's own, begin


class ChannelError(SimulatorError):
    """Bytes of a side channel are torn, or not what their channel's format says."""


# ---- numbers and strings in bytes --------------------------------------------------------------------------------------------------------------


_INTEGER, _NUMBER = struct.Struct("<i"), struct.Struct("<f")


class Reader:
    """Reads a message piece by piece. Every method raises `ChannelError` where the bytes do not hold what was asked for."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._at, self._what = data, 0, what

    def _unpack(self, form: struct.Struct) -> Any:
        at = self._at
        self._at = at + form.size
        if self._at > len(self._data):
            self._at = at
            self.take(form.size)
        return form.unpack_from(self._data, at)[0]

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        left = len(self._data) - self._at
        if not 0 <= size <= left:
            raise ChannelError(f"{self._what}: {size} bytes are announced where {left} are left; the other side writes another format")
        self._at += size
        return self._data[self._at - size : self._at]

    def boolean(self) -> bool:
        """Return a truth value: one byte, 0 or 1."""
        value = self.take(1)[0]
        if value > 1:
            raise ChannelError(f"{self._what}: a truth value is {value}; it must be 0 or 1")
        return value == 1

    def integer(self) -> int:
        """Return an i32."""
        return int(self._unpack(_INTEGER))

    def number(self) -> float:
        """Return an f32, which must be finite."""
        value = float(self._unpack(_NUMBER))
        if not math.isfinite(value):
            raise ChannelError(f"{self._what}: a number is {value}; it must be finite")
        return value

    def numbers(self) -> list[float]:
        """Return a list of f32."""
        count = self.integer()
        data = self.take(4 * count)
        values = list(struct.unpack(f"<{count}f", data))
        if not all(map(math.isfinite, values)):
            raise ChannelError(f"{self._what}: a list holds {values[:4]} …; its numbers must be finite")
        return values

    def text(self) -> str:
        """Return a string."""
        data = self.take(self.integer())
        try:
            return data.decode("ascii")
        except UnicodeDecodeError:
            raise ChannelError(f"{self._what}: a name is not ASCII: {data[:32]!r}") from None

    def end(self) -> None:
        """Say that the message is over."""
        if self._at < len(self._data):
            raise ChannelError(f"{self._what}: {len(self._data) - self._at} bytes more than its format has; the other side writes another format")


class Writer:
    """Makes a message piece by piece: ``Writer().text("gravity").integer(0).number(9.81).data``."""

    def __init__(self) -> None:
        self.data = b""

    def _add(self, data: bytes) -> "Writer":
        self.data += data
        return self

    def boolean(self, value: bool) -> "Writer":
        """Add a truth value."""
        return self._add(bytes([value]))

    def integer(self, value: int) -> "Writer":
        """Add an i32."""
        if not -(1 << 31) <= value < 1 << 31:
            raise ConfigError(f"{value} does not fit 32 bits")
        return self._add(struct.pack("<i", value))

    def number(self, value: float) -> "Writer":
        """Add an f32."""
        if not abs(value) <= 3.4028234e38:
            raise ConfigError(f"{value} is no finite number of 32 bits")
        return self._add(struct.pack("<f", value))

    def numbers(self, values: Sequence[float]) -> "Writer":
        """Add a list of f32."""
        self.integer(len(values))
        for value in values:
            self.number(value)
        return self

    def text(self, value: str) -> "Writer":
        """Add a string, which must be ASCII."""
        if not value.isascii():
            raise ConfigError(f'"{value}" is not ASCII; names of parameters, properties and statistics must be')
        return self.integer(len(value))._add(value.encode("ascii"))


# ---- channels ----------------------------------------------------------------------------------------------------------------------------------


class SideChannel:
    """One channel. A custom one is a subclass with a UUID (framing "uuid") or a type from `CUSTOM_TYPES` on (framing "type") of its own that
    overrides `receive`.
    """

    def __init__(self, uuid: UUID | str | None = None, type: int | None = None) -> None:
        try:
            self.uuid = UUID(uuid) if isinstance(uuid, str) else uuid
        except ValueError:
            raise ConfigError(f'"{uuid}" is no UUID; write one such as "621f0a70-4f87-11ea-a6bf-784f4387d1f7"') from None
        self.type = type
        self.queue: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Have `data` handed over with the next turn."""
        self.queue.append(bytes(data))

    def receive(self, data: bytes) -> None:
        """Called once per message that came, in their order."""
        raise ChannelError(f"{type(self).__name__}: a message of {len(data)} bytes came from the side that should only read")

    def _reader(self, data: bytes) -> Reader:
        return Reader(data, type(self).__name__)

    def _older(self) -> bytes | None:
        """Return the messages that are queued as the older framing has them, or None where that makes no difference."""
        return None


def framing_of(name: str) -> Framing:
    """Return the framing of that name."""
    for framing in get_args(Framing):
        if framing == name:
            return framing  # type: ignore[no-any-return]
    raise ConfigError(f'framing = "{name}" must be one of {", ".join(get_args(Framing))}')


class Channels:
    """The channels of one bridge. Messages for a channel that is not among them are skipped; `unknown` counts them by key."""

    def __init__(self, channels: Iterable[SideChannel] = (), framing: Framing = "uuid") -> None:
        self.framing = framing_of(framing)
        self._by_key: dict[bytes, SideChannel] = {}
        self.unknown: dict[bytes, int] = {}
        for channel in channels:
            self.register(channel)

    def register(self, channel: SideChannel) -> None:
        """Add a channel. Raises `ConfigError` when it has no key of this framing, or another has the same."""
        key = self._key(channel)
        if key in self._by_key:
            raise ConfigError(f"two side channels have one key ({channel.uuid or channel.type}); give each its own")
        self._by_key[key] = channel

    def __iter__(self) -> Any:
        return iter(self._by_key.values())

    def _key(self, channel: SideChannel) -> bytes:
        if self.framing == "uuid":
            if channel.uuid is None:
                raise ConfigError(f'a {type(channel).__name__} without a UUID cannot be told from others in framing "uuid"; give it one')
            return channel.uuid.bytes_le
        if channel.type is None:
            raise ConfigError(f'a {type(channel).__name__} without a type cannot be told from others in framing "type"; give it one')
        return struct.pack("<i", channel.type)

    @property
    def waiting(self) -> bool:
        """True when something is queued."""
        return any(channel.queue for channel in self._by_key.values())

    def outgoing(self) -> bytes:
        """Return all that was queued since the last call, for the other side."""
        parts = []
        for key, channel in self._by_key.items():
            if channel.queue:
                queue, channel.queue = channel.queue, []
                older = channel._older() if self.framing == "type" else None
                for message in queue if older is None else (older,):
                    parts += [key, struct.pack("<i", len(message)), message]
        return b"".join(parts)

    def incoming(self, data: bytes) -> None:
        """Deliver what the other side sent. Raises `ChannelError` for torn bytes; what came before them was delivered."""
        if not data:
            return
        reader, size = Reader(bytes(data), "side channels"), 16 if self.framing == "uuid" else 4
        while reader._at < len(data):
            key = reader.take(size)
            message = reader.take(reader.integer())
            channel = self._by_key.get(key)
            if channel is None:
                self.unknown[key] = self.unknown.get(key, 0) + 1
            else:
                channel.receive(message)


class RawBytes(SideChannel):
    """Bytes as they are: `send` on one side, `take` on the other. In framing "type" its type is ``RAW_TYPES + number``."""

    def __init__(self, uuid: UUID | str | None = None, number: int | None = None) -> None:
        if number is not None and not 0 <= number < CUSTOM_TYPES - RAW_TYPES:
            raise ConfigError(f"number = {number} of a RawBytes channel must be from 0 to {CUSTOM_TYPES - RAW_TYPES - 1}")
        super().__init__(uuid, None if number is None else RAW_TYPES + number)
        self._came: list[bytes] = []

    def receive(self, data: bytes) -> None:
        self._came.append(data)

    def take(self) -> list[bytes]:
        """Return the messages that came since the last call."""
        came, self._came = self._came, []
        return came


class FloatProperties(SideChannel):
    """Numbers by name that both sides set and both see."""

    def __init__(self, uuid: UUID | str = "60ccf7d0-4f7e-11ea-b238-784f4387d1f7", type: int = PROPERTIES) -> None:
        super().__init__(uuid, type)
        self.values: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Set a property on both sides; the other side sees it with the next turn."""
        self.send(Writer().text(name).number(value).data)
        self.values[name] = value

    def get(self, name: str, default: float) -> float:
        """Return a property, or `default` when neither side has set it."""
        return self.values.get(name, default)

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        name, value = reader.text(), reader.number()
        reader.end()
        self.values[name] = value


@dataclass(frozen=True)
class Engine:
    """Settings of an engine; None leaves one as it is.

    width, height       of its window, pixels; both or neither
    quality_level       index of its quality settings
    time_scale          game seconds per second
    target_frame_rate   frames per second it tries to draw; -1: as it likes
    capture_frame_rate  frames per game second, whatever a frame takes; 0: off
    """

    width: int | None = None
    height: int | None = None
    quality_level: int | None = None
    time_scale: float | None = None
    target_frame_rate: int | None = None
    capture_frame_rate: int | None = None


class EngineSettings(SideChannel):
    """Settings of the engine, from trainer to simulator. There `settings` holds what came, and `on_change(settings)` is called with each message."""

    _ONE = ("quality_level", "time_scale", "target_frame_rate", "capture_frame_rate")

    def __init__(self, on_change: Callable[[Engine], None] | None = None) -> None:
        super().__init__("e951342c-4f7e-11ea-b238-784f4387d1f7", ENGINE)
        self.settings, self._on_change = Engine(), on_change

    def set(self, **settings: float | None) -> None:
        """Change settings (fields of `Engine`) with the next turn."""
        for name in settings:
            if name not in Engine.__dataclass_fields__:
                raise ConfigError(f'an engine has no setting "{name}"; {did_you_mean(name, Engine.__dataclass_fields__)}')
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float) if name == "time_scale" else int):
                raise ConfigError(f"{name} = {value!r} must be {'a number' if name == 'time_scale' else 'an integer'}")
        if ("width" in given) != ("height" in given):
            raise ConfigError("width and height of the window are set together; give both")
        if not given.get("time_scale", 1.0) >= 0:
            raise ConfigError(f"time_scale = {given['time_scale']} must not be negative")
        if "width" in given:
            self.send(Writer().integer(0).integer(given["width"]).integer(given["height"]).data)
        for number, name in enumerate(self._ONE, 1):
            if name in given:
                writer = Writer().integer(number)
                self.send((writer.number(given[name]) if name == "time_scale" else writer.integer(given[name])).data)
        self.settings = Engine(**{**vars(self.settings), **given})

    def repeat(self) -> None:
        """Send all settings, to a simulator that has heard none of them."""
        self.queue = []
        self.set(**vars(self.settings))

    def _older(self) -> bytes:
        """One message holds everything but the capture frame rate."""
        known = {name: value for name, value in vars(self.settings).items() if value is not None}
        known = {"width": 80, "height": 80, "quality_level": 1, "time_scale": 1.0, "target_frame_rate": -1, **known}
        writer = Writer().integer(known["width"]).integer(known["height"]).integer(known["quality_level"])
        return writer.number(known["time_scale"]).integer(known["target_frame_rate"]).data

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        changed: dict[str, float]
        if len(data) == 20:  # the older framing's; the longest of the others has 12 bytes
            changed = {name: reader.number() if name == "time_scale" else reader.integer() for name in list(Engine.__dataclass_fields__)[:5]}
        elif (what := reader.integer()) == 0:
            changed = {"width": reader.integer(), "height": reader.integer()}
        elif 1 <= what <= len(self._ONE):
            name = self._ONE[what - 1]
            changed = {name: reader.number() if name == "time_scale" else reader.integer()}
        else:
            raise ChannelError(f"EngineSettings: there is no setting {what}; 0 to {len(self._ONE)} are known")
        reader.end()
        self.settings = Engine(**{**vars(self.settings), **changed})
        if self._on_change is not None:
            self._on_change(self.settings)


@dataclass(frozen=True)
class Uniform:
    """A sampler: drawn evenly from [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"Uniform({self.low}, {self.high}): low must not exceed high")


@dataclass(frozen=True)
class Gaussian:
    """A sampler: drawn from a normal distribution."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not self.deviation >= 0:
            raise ConfigError(f"Gaussian({self.mean}, {self.deviation}): the deviation must not be negative")


@dataclass(frozen=True)
class MultiRange:
    """A sampler: drawn evenly from several ranges [low, high), each with a chance in proportion to its width."""

    ranges: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.ranges or not all(len(pair) == 2 and pair[0] <= pair[1] for pair in self.ranges):
            raise ConfigError(f"MultiRange({self.ranges}): needs ranges (low, high), at least one, and no low may exceed its high")


Sampler = Uniform | Gaussian | MultiRange


def draw(sampler: Sampler, rng: random.Random) -> float:
    """Return one draw."""
    match sampler:
        case Uniform(low, high):
            return low + (high - low) * rng.random()
        case Gaussian(mean, deviation):
            return rng.gauss(mean, deviation)
        case MultiRange(ranges):
            widths = [high - low for low, high in ranges]
            low, high = rng.choices(ranges, widths if sum(widths) > 0 else None)[0]
            return low + (high - low) * rng.random()


class EnvironmentParameters(SideChannel):
    """Parameters of the environment by name, from trainer to simulator: numbers, or samplers that the simulator draws from."""

    def __init__(self) -> None:
        super().__init__("534c891e-810f-11ea-a9d0-822485860400", PARAMETERS)
        self.values: dict[str, float | Sampler] = {}
        self._seeds: dict[str, int] = {}
        self._streams: dict[str, random.Random] = {}

    def set(self, name: str, value: float | Sampler, seed: int = 0) -> None:
        """Set a parameter with the next turn; `seed` is that of a sampler's random stream."""
        self.send(self._encoded(name, value, seed))
        self._put(name, value, seed)

    def repeat(self) -> None:
        """Send all parameters, to a simulator that has heard none of them."""
        self.queue = [self._encoded(name, value, self._seeds[name]) for name, value in self.values.items()]

    def get(self, name: str, default: float) -> float:
        """Return a parameter, drawn anew where it is a sampler; `default` when it was not set."""
        value = self.values.get(name, default)
        return value if isinstance(value, (int, float)) else draw(value, self._streams[name])

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        name, kind, seed = reader.text(), reader.integer(), 0
        value: float | Sampler
        try:
            if kind == 0:
                value = reader.number()
            elif kind == 1:
                seed, sampler = reader.integer(), reader.integer()
                if sampler == 0:
                    value = Uniform(reader.number(), reader.number())
                elif sampler == 1:
                    value = Gaussian(reader.number(), reader.number())
                elif sampler == 2:
                    numbers = reader.numbers()
                    if len(numbers) % 2:
                        raise ChannelError(f'EnvironmentParameters: the ranges of "{name}" are {len(numbers)} numbers; they must come in pairs')
                    value = MultiRange(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
                else:
                    raise ChannelError(f"EnvironmentParameters: there is no sampler {sampler}; 0 to 2 are known")
            else:
                raise ChannelError(f"EnvironmentParameters: there is no kind {kind} of parameters; 0 and 1 are known")
        except ConfigError as error:
            raise ChannelError(f'EnvironmentParameters: "{name}": {error}') from None
        reader.end()
        self._put(name, value, seed)

    def _put(self, name: str, value: float | Sampler, seed: int) -> None:
        self.values[name] = value
        self._seeds[name], self._streams[name] = seed, random.Random(seed)

    def _encoded(self, name: str, value: float | Sampler, seed: int) -> bytes:
        writer = Writer().text(name)
        match value:
            case Uniform(low, high):
                return writer.integer(1).integer(seed).integer(0).number(low).number(high).data
            case Gaussian(mean, deviation):
                return writer.integer(1).integer(seed).integer(1).number(mean).number(deviation).data
            case MultiRange(ranges):
                return writer.integer(1).integer(seed).integer(2).numbers([number for pair in ranges for number in pair]).data
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f'parameter "{name}" = {value!r} must be a number or a sampler (Uniform, Gaussian, MultiRange)')
        return writer.integer(0).number(value).data


class Statistics(SideChannel):
    """Numbers by name, from simulator to trainer, where they become metrics of the run."""

    def __init__(self) -> None:
        super().__init__("a1d8f7b7-cec8-50f9-b78b-d3e165a78520", STATISTICS)
        self.tally = Tally()
        """What came."""

    def add(self, name: str, value: float, how: How = "average") -> None:
        """Tell one value; `how` says what becomes of several within a summary."""
        if how not in HOWS:
            raise ConfigError(f'how = "{how}" is not known; {did_you_mean(how, HOWS)}')
        self.send(Writer().text(name).number(value).integer(HOWS.index(how)).data)

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        name, value, number = reader.text(), reader.number(), reader.integer()
        if not 0 <= number < len(HOWS):
            raise ChannelError(f'Statistics: "{name}" is to be summed up in way {number}; 0 to {len(HOWS) - 1} are known')
        reader.end()
        self.tally.add(name, value, HOWS[number])
