"""Messages of side channels piece by piece. All numbers are little-endian; a string is an
i32 count and so many ASCII characters."""

import math
import struct
from collections.abc import Sequence
from typing import Any

from tidemill.core.errors import ConfigError, SimulatorError

_INTEGER, _NUMBER = struct.Struct("<i"), struct.Struct("<f")


class ChannelError(SimulatorError):
    """Bytes of a side channel are torn, or not what their channel's format says."""


class MessageReader:
    """A message reader reads a message piece by piece. Every method raises `ChannelError`
    where the bytes do not hold what was asked for."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._at, self._what = data, 0, what

    def _unpack(self, form: struct.Struct) -> Any:
        at = self._at
        self._at = at + form.size
        if self._at > len(self._data):
            self._at = at
            self.take(form.size)
        return form.unpack_from(self._data, at)[0]

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if not 0 <= size <= self.left:
            raise ChannelError(
                f"{self._what}: {size} bytes are announced where {self.left} are left; the other side writes "
                "another format"
            )
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
        if self.left:
            raise ChannelError(
                f"{self._what}: {self.left} bytes more than its format has; the other side writes another "
                "format"
            )


class MessageWriter:
    """Makes a message piece by piece:
    ``MessageWriter().text("gravity").integer(0).number(9.81).data``."""

    def __init__(self) -> None:
        self.data = b""

    def _add(self, data: bytes) -> "MessageWriter":
        self.data += data
        return self

    def boolean(self, value: bool) -> "MessageWriter":
        """Add a truth value."""
        return self._add(bytes([value]))

    def integer(self, value: int) -> "MessageWriter":
        """Add an i32."""
        if not -(1 << 31) <= value < 1 << 31:
            raise ConfigError(f"{value} does not fit 32 bits")
        return self._add(struct.pack("<i", value))

    def number(self, value: float) -> "MessageWriter":
        """Add an f32."""
        if not abs(value) <= 3.4028234e38:
            raise ConfigError(f"{value} is no finite number of 32 bits")
        return self._add(struct.pack("<f", value))

    def numbers(self, values: Sequence[float]) -> "MessageWriter":
        """Add a list of f32."""
        self.integer(len(values))
        for value in values:
            self.number(value)
        return self

    def text(self, value: str) -> "MessageWriter":
        """Add a string, which must be ASCII."""
        if not value.isascii():
            raise ConfigError(
                f'"{value}" is not ASCII; names of parameters, properties and statistics must be'
            )
        return self.integer(len(value))._add(value.encode("ascii"))
