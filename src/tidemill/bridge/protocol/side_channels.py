"""Side channels: what trainer and simulator tell each other besides observations and
actions. Both ends, and both framings.

The bytes that one side hands over with its turn are messages in a row, each a key, an i32
length and so many bytes. The key is the channel's UUID in .NET's byte order (framing
"uuid"), or an i32 type in an older framing ("type").

    trainer                                        simulator
    engine = EngineSettings()                      EngineSettings(on_change=apply)
    engine.set(time_scale=20.0)
    parameters = EnvironmentParameters()           parameters.get("gravity", 9.81)
    parameters.set("gravity", Uniform(1.0, 10.0))
    statistics.tally.take()                        Statistics().add("score", 3.0, "sum")
"""

import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args
from uuid import UUID

from tidemill.bridge.protocol.messages import ChannelError, MessageReader, MessageWriter
from tidemill.bridge.protocol.samplers import Gaussian, MultiRange, Sampler, Uniform, draw
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.tally import HOWS, How, Tally

Framing = Literal["uuid", "type"]

# older types; those of parameters and statistics are ours, the older ones had neither
ENGINE, PARAMETERS, STATISTICS, PROPERTIES = 2, 3, 4, 1
RAW_TYPES, CUSTOM_TYPES = 1000, 2000  # where the types of raw bytes, and of channels of one's own, begin


class SideChannel:
    """One channel. A custom one is a subclass with a UUID (framing "uuid") or a type from
    `CUSTOM_TYPES` on (framing "type") of its own that overrides `receive`.
    """

    def __init__(self, uuid: UUID | str | None = None, type: int | None = None) -> None:
        try:
            self.uuid = UUID(uuid) if isinstance(uuid, str) else uuid
        except ValueError:
            raise ConfigError(
                f'"{uuid}" is no UUID; write one such as "621f0a70-4f87-11ea-a6bf-784f4387d1f7"'
            ) from None
        self.type = type
        self.queue: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Have `data` handed over with the next turn."""
        self.queue.append(bytes(data))

    def receive(self, data: bytes) -> None:
        """Called once per message that came, in their order."""
        raise ChannelError(
            f"{type(self).__name__}: a message of {len(data)} bytes came from the side that should only read"
        )

    def _reader(self, data: bytes) -> MessageReader:
        return MessageReader(data, type(self).__name__)

    def _older(self) -> bytes | None:
        """Return the messages that are queued as the older framing has them, or None
        where that makes no difference."""
        return None


def framing_of(name: str) -> Framing:
    """Return the framing of that name."""
    if name not in get_args(Framing):
        raise ConfigError(f'framing = "{name}" must be one of {", ".join(get_args(Framing))}')
    return cast(Framing, name)


class Channels:
    """The channels of one bridge. Messages for a channel that is not among them are
    skipped; `unknown` counts them by key."""

    def __init__(self, channels: Iterable[SideChannel] = (), framing: Framing = "uuid") -> None:
        self.framing = framing_of(framing)
        self._by_key: dict[bytes, SideChannel] = {}
        self.unknown: dict[bytes, int] = {}
        for channel in channels:
            self.register(channel)

    def register(self, channel: SideChannel) -> None:
        """Add a channel. Raises `ConfigError` when it has no key of this framing, or
        another has the same."""
        key = self._key(channel)
        if key in self._by_key:
            raise ConfigError(
                f"two side channels have one key ({channel.uuid or channel.type}); give each its own"
            )
        self._by_key[key] = channel

    def __iter__(self) -> Any:
        return iter(self._by_key.values())

    def _key(self, channel: SideChannel) -> bytes:
        if self.framing == "uuid":
            if channel.uuid is None:
                raise ConfigError(
                    f"a {type(channel).__name__} without a UUID cannot be told from others in framing "
                    '"uuid"; give it one'
                )
            return channel.uuid.bytes_le
        if channel.type is None:
            raise ConfigError(
                f'a {type(channel).__name__} without a type cannot be told from others in framing "type"; '
                "give it one"
            )
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
        """Deliver what the other side sent. Raises `ChannelError` for torn bytes; what
        came before them was delivered."""
        if not data:
            return
        reader = MessageReader(bytes(data), f'side channels (framing "{self.framing}" here)')
        size = 16 if self.framing == "uuid" else 4
        while reader.left:
            key = reader.take(size)
            message = reader.take(reader.integer())
            channel = self._by_key.get(key)
            if channel is None:
                self.unknown[key] = self.unknown.get(key, 0) + 1
            else:
                channel.receive(message)


class RawBytes(SideChannel):
    """Bytes as they are: `send` on one side, `take` on the other. In framing "type" its
    type is ``RAW_TYPES + number``."""

    def __init__(self, uuid: UUID | str | None = None, number: int | None = None) -> None:
        if number is not None and not 0 <= number < CUSTOM_TYPES - RAW_TYPES:
            raise ConfigError(
                f"number = {number} of a RawBytes channel must be from 0 to {CUSTOM_TYPES - RAW_TYPES - 1}"
            )
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

    def __init__(
        self, uuid: UUID | str = "60ccf7d0-4f7e-11ea-b238-784f4387d1f7", type: int = PROPERTIES
    ) -> None:
        super().__init__(uuid, type)
        self.values: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Set a property on both sides; the other side sees it with the next turn."""
        self.send(MessageWriter().text(name).number(value).data)
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

    width, height: size of its window in pixels; both or neither
    quality_level: index of its quality settings
    time_scale: game seconds per second
    target_frame_rate: frames per second it tries to draw; -1: as it likes
    capture_frame_rate: frames per game second, whatever a frame takes; 0: off
    """

    width: int | None = None
    height: int | None = None
    quality_level: int | None = None
    time_scale: float | None = None
    target_frame_rate: int | None = None
    capture_frame_rate: int | None = None


class EngineSettings(SideChannel):
    """Settings of the engine, from trainer to simulator. There `settings` holds what
    came, and `on_change(settings)` is called with each message."""

    _ONE = ("quality_level", "time_scale", "target_frame_rate", "capture_frame_rate")

    def __init__(self, on_change: Callable[[Engine], None] | None = None) -> None:
        super().__init__("e951342c-4f7e-11ea-b238-784f4387d1f7", ENGINE)
        self.settings, self._on_change = Engine(), on_change

    def set(self, **settings: float | None) -> None:
        """Change settings (fields of `Engine`) with the next turn."""
        for name in settings:
            if name not in Engine.__dataclass_fields__:
                raise ConfigError(
                    f'an engine has no setting "{name}"; {did_you_mean(name, Engine.__dataclass_fields__)}'
                )
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(
                value, (int, float) if name == "time_scale" else int
            ):
                raise ConfigError(
                    f"{name} = {value!r} must be {'a number' if name == 'time_scale' else 'an integer'}"
                )
        if ("width" in given) != ("height" in given):
            raise ConfigError("width and height of the window are set together; give both")
        if not given.get("time_scale", 1.0) >= 0:
            raise ConfigError(f"time_scale = {given['time_scale']} must not be negative")
        if "width" in given:
            self.send(MessageWriter().integer(0).integer(given["width"]).integer(given["height"]).data)
        for number, name in enumerate(self._ONE, 1):
            if name in given:
                writer = MessageWriter().integer(number)
                self.send(
                    (writer.number(given[name]) if name == "time_scale" else writer.integer(given[name])).data
                )
        self.settings = Engine(**{**vars(self.settings), **given})

    def repeat(self) -> None:
        """Send all settings, to a simulator that has heard none of them."""
        self.queue = []
        self.set(**vars(self.settings))

    def _older(self) -> bytes:
        """One message holds everything but the capture frame rate."""
        known = vars(Engine(80, 80, 1, 1.0, -1)) | {
            name: value for name, value in vars(self.settings).items() if value is not None
        }
        writer = MessageWriter()
        for name in list(Engine.__dataclass_fields__)[:5]:
            (writer.number if name == "time_scale" else writer.integer)(known[name])
        return writer.data

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        changed: dict[str, float]
        if len(data) == 20:  # the older framing's; the longest of the others has 12 bytes
            changed = {
                name: reader.number() if name == "time_scale" else reader.integer()
                for name in list(Engine.__dataclass_fields__)[:5]
            }
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


class EnvironmentParameters(SideChannel):
    """Parameters of the environment by name, from trainer to simulator: numbers, or
    samplers that the simulator draws from."""

    def __init__(self) -> None:
        super().__init__("534c891e-810f-11ea-a9d0-822485860400", PARAMETERS)
        self.values: dict[str, float | Sampler] = {}
        self._seeds: dict[str, int] = {}
        self._streams: dict[str, random.Random] = {}

    def set(self, name: str, value: float | Sampler, seed: int = 0) -> None:
        """Set a parameter with the next turn; `seed` is that of a sampler's random
        stream."""
        self.send(self._encoded(name, value, seed))
        self._put(name, value, seed)

    def repeat(self) -> None:
        """Send all parameters, to a simulator that has heard none of them."""
        self.queue = [self._encoded(name, value, self._seeds[name]) for name, value in self.values.items()]

    def get(self, name: str, default: float) -> float:
        """Return a parameter, drawn anew where it is a sampler; `default` when it was not
        set."""
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
                        raise ChannelError(
                            f'EnvironmentParameters: the ranges of "{name}" are {len(numbers)} numbers; they '
                            "must come in pairs"
                        )
                    value = MultiRange(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
                else:
                    raise ChannelError(
                        f"EnvironmentParameters: there is no sampler {sampler}; 0 to 2 are known"
                    )
            else:
                raise ChannelError(
                    f"EnvironmentParameters: there is no kind {kind} of parameters; 0 and 1 are known"
                )
        except ConfigError as error:
            raise ChannelError(f'EnvironmentParameters: "{name}": {error}') from None
        reader.end()
        self._put(name, value, seed)

    def _put(self, name: str, value: float | Sampler, seed: int) -> None:
        self.values[name] = value
        self._seeds[name], self._streams[name] = seed, random.Random(seed)

    def _encoded(self, name: str, value: float | Sampler, seed: int) -> bytes:
        writer = MessageWriter().text(name)
        match value:
            case Uniform(low, high):
                return writer.integer(1).integer(seed).integer(0).number(low).number(high).data
            case Gaussian(mean, deviation):
                return writer.integer(1).integer(seed).integer(1).number(mean).number(deviation).data
            case MultiRange(ranges):
                numbers = [number for pair in ranges for number in pair]
                return writer.integer(1).integer(seed).integer(2).numbers(numbers).data
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(
                f'parameter "{name}" = {value!r} must be a number or a sampler (Uniform, Gaussian, '
                "MultiRange)"
            )
        return writer.integer(0).number(value).data


class Statistics(SideChannel):
    """Numbers by name, from simulator to trainer, where they become metrics of the
    run."""

    def __init__(self) -> None:
        super().__init__("a1d8f7b7-cec8-50f9-b78b-d3e165a78520", STATISTICS)
        self.tally = Tally()
        """What came."""

    def add(self, name: str, value: float, how: How = "average") -> None:
        """Tell one value; `how` says what becomes of several within a summary."""
        if how not in HOWS:
            raise ConfigError(f'how = "{how}" is not known; {did_you_mean(how, HOWS)}')
        self.send(MessageWriter().text(name).number(value).integer(HOWS.index(how)).data)

    def receive(self, data: bytes) -> None:
        reader = self._reader(data)
        name, value, number = reader.text(), reader.number(), reader.integer()
        if not 0 <= number < len(HOWS):
            raise ChannelError(
                f'Statistics: "{name}" is to be summed up in way {number}; 0 to {len(HOWS) - 1} are known'
            )
        reader.end()
        self.tally.add(name, value, HOWS[number])
