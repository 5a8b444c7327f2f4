"""What goes over the wire between an environment server and its clients: docs/rest.md as
types. Nothing here opens a connection.

Every body is one map, in JSON or MessagePack (`ENCODINGS`). Arrays travel as `Array`:
dtype, shape and bytes (base64 in JSON); the value of a Discrete space as a plain number;
Dict as a map and Tuple as a list of their parts.
"""

import math
from contextlib import suppress
from typing import Any, Literal

import msgspec
import numpy as np

from tidemill.api.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Spaces,
    Tuple,
    field_of,
)
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.space_values import brief, misfit

PROTOCOL, VERSION = "tidemill-rest", 1
ENCODINGS = {"application/json": "json", "application/msgpack": "msgpack"}
PREFIX = "/v1"

LARGEST = 256 << 20
"""Bytes of a reply, or of one value of a space, at most."""

Repeats = Literal["remembered", "refused", "applied"]


class Array(msgspec.Struct, frozen=True):
    """One array: `dtype` as numpy names it ("float32", "uint8"), `shape`, and `data`, its
    elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Description(msgspec.Struct, kw_only=True):
    """What ``GET /v1/environment`` answers.

    instance: changes whenever the server starts anew, and with it every session is gone
    environment: its name
    observation_space, action_space: as `space_from_wire` reads them
    max_episode_steps: a promise: no episode has more steps; 0 where that is not known
    repeats: what the server does with a step that it has applied already: "remembered":
        answers the same again; "refused": says 409 with its own count; "applied": applies
        it once more, so that no client may ever send one twice
    idle_seconds: a session that is not heard of for so long is closed; 0: never
    max_sessions, max_body_bytes: its limits; 0: not told
    """

    protocol: str
    version: int
    instance: str
    environment: str
    observation_space: Any
    action_space: Any
    max_episode_steps: int = 0
    repeats: Repeats = "applied"
    idle_seconds: float = 0.0
    max_sessions: int = 0
    max_body_bytes: int = 0
    encodings: tuple[str, ...] = ("json",)

    def spaces(self, where: str) -> Spaces:
        """Return the two spaces. Raises `ConfigError` naming `where`."""
        return Spaces(
            space_from_wire(self.observation_space, f"{where}: observation_space"),
            space_from_wire(self.action_space, f"{where}: action_space"),
        )


class ResetCall(msgspec.Struct, kw_only=True):
    """``POST /v1/reset``: begin episode `episode` of `session`, which is opened if it
    does not exist. Sent again, it is answered the same."""

    session: str
    episode: int
    seed: int | None = None
    options: dict[str, Any] | None = None


class StepCall(msgspec.Struct, kw_only=True):
    """``POST /v1/step``: apply `action` as step number `step` (from 1) of the episode.
    (session, episode, step) is its idempotency key."""

    session: str
    episode: int
    step: int
    action: Any


class SessionsCall(msgspec.Struct, kw_only=True):
    """``POST /v1/close`` and ``POST /v1/keep``: end these sessions, or keep them from
    being closed as idle."""

    sessions: tuple[str, ...]


class StepResult(msgspec.Struct, kw_only=True):
    """What reset (step 0) and step answer. `step` is the server's own count of steps that
    it applied in this episode. What resets may leave out steps may not: `missing` says
    what is. A reward that is no finite number comes as null in JSON."""

    session: str
    episode: int
    step: int
    observation: Any
    reward: float | msgspec.UnsetType | None = msgspec.UNSET
    terminated: bool | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    info: dict[str, Any] = {}

    @property
    def missing(self) -> list[str]:
        """Which of a step's fields were left out."""
        return [
            name for name in ("reward", "terminated", "truncated") if getattr(self, name) is msgspec.UNSET
        ]


class FoundSessions(msgspec.Struct, kw_only=True):
    """What close and keep answer: those of the sessions that were there."""

    sessions: tuple[str, ...]


class ServerCounts(msgspec.Struct, kw_only=True):
    """What ``GET /v1/counts`` answers: what a server did since it was first started.
    `applied` counts steps, `repeated` replies given again."""

    sessions: int
    opened: int
    resets: int
    applied: int
    repeated: int
    refused: int


class Problem(msgspec.Struct, kw_only=True):
    """The body of every answer that is not 200. With such a body nothing was applied,
    whatever the status, unless `error` is "environment_raised".

    `episode` and `step` are the server's, where it refuses a call that is out of order.
    """

    error: str
    message: str
    episode: int | None = None
    step: int | None = None


def encode(value: Any, content_type: str) -> bytes:
    """Return `value` (one of the above) as a body."""
    return (
        msgspec.msgpack.encode(value) if content_type == "application/msgpack" else msgspec.json.encode(value)
    )


def decode(body: bytes, content_type: str, kind: Any) -> Any:
    """Return a body as `kind`. Raises `msgspec.DecodeError` (of which `ValidationError`
    is one)."""
    try:
        return (
            msgspec.msgpack.decode(body, type=kind)
            if content_type == "application/msgpack"
            else msgspec.json.decode(body, type=kind)
        )
    except UnicodeDecodeError as error:  # the only error of its own that msgspec lets through
        raise msgspec.DecodeError(f"its text is no UTF-8: {error}") from None


def misread(body: bytes, content_type: str, error: msgspec.DecodeError | RecursionError) -> str:
    """Say why a body cannot be read as what it should be: which field holds what."""
    field = str(error).partition(" - at `$.")[2].rstrip("`")
    with suppress(msgspec.DecodeError, RecursionError, KeyError, TypeError):
        if field:
            value = decode(body, content_type, dict[str, Any])
            return f"{field} is {brief(value[field])} ({str(error).partition(' - at')[0]})"
    if content_type == "application/json" and (b"NaN" in body or b"Infinity" in body):
        return f"JSON has no NaN and no Infinity, and numbers must be finite ({error}): {brief(body[:300])}"
    return f"{error}: {brief(body[:80])}"


class Values:
    """Values of one space on their way over the wire and back."""

    def __init__(self, space: Space, name: str) -> None:
        """`name` is what messages call the value."""
        self._space, self._name = space, name

    def write(self, value: Any) -> Any:
        """Return a value as an environment or a policy gives it, nested as its space is,
        with its arrays as `Array`. Raises `EnvironmentFault` where it does not fit."""
        try:
            return _written(self._space, value)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"{self._name} does not fit its space: {error}: {brief(value)}") from error

    def read(self, value: Any) -> Any:
        """Return what came over the wire: fresh arrays, of the declared shapes and
        dtypes, and finite. Raises `EnvironmentFault` that says which part is not as the
        space declares it."""
        return self._read(self._space, value, self._name)

    def _read(self, space: Space, value: Any, name: str) -> Any:
        match space:
            case Dict(spaces=parts):
                if not isinstance(value, dict) or value.keys() != parts.keys():
                    raise EnvironmentFault(
                        f"{name} has the parts {_keys(value)}; its space has {sorted(parts)}"
                    )
                return {key: self._read(part, value[key], f"{name}.{key}") for key, part in parts.items()}
            case Tuple(spaces=several):
                if not isinstance(value, list) or len(value) != len(several):
                    raise EnvironmentFault(
                        f"{name} has the parts {_keys(value)}; its space has {len(several)} in a list"
                    )
                return tuple(
                    self._read(part, each, f"{name}.{i}")
                    for i, (part, each) in enumerate(zip(several, value, strict=True))
                )
            case Discrete(n=n, start=start):
                if type(value) is not int or not start <= value < start + n:
                    raise EnvironmentFault(
                        f"{name} is {brief(value)}; its space says an integer from {start} to {start + n - 1}"
                    )
                return value
        return self._array(space, value, name)

    def _array(self, space: Space, value: Any, name: str) -> Any:
        dtype = space.dtype if isinstance(space, Box) else field_of(space).dtype
        shape = field_of(space).shape
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data"}:
            raise EnvironmentFault(
                f"{name} is {brief(value)}; its space says an array, written as {{dtype, shape, data}}"
            )
        if value["dtype"] != dtype or value["shape"] not in (list(shape), shape):
            raise EnvironmentFault(
                f"{name} is {brief(value['dtype'])} of shape {brief(value['shape'])}; its space says {dtype} "
                f"of shape {list(shape)}"
            )
        data = value["data"]
        if isinstance(data, str):
            try:
                data = msgspec.convert(data, bytes)
            except msgspec.ValidationError:
                raise EnvironmentFault(f"{name}: its data are no base64: {brief(data)}") from None
        wanted = np.dtype(dtype).newbyteorder("<")
        if not isinstance(data, bytes) or len(data) != wanted.itemsize * math.prod(shape):
            raise EnvironmentFault(
                f"{name}: its data are not the {wanted.itemsize * math.prod(shape)} bytes that {dtype} of "
                f"shape {list(shape)} takes"
            )
        array = np.frombuffer(data, wanted).astype(dtype).reshape(shape)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise EnvironmentFault(f"{name} is not finite: {brief(array)}")
        return array


def _written(space: Space, value: Any) -> Any:
    match space:
        case Dict(spaces=parts):
            return {key: _written(part, value[key]) for key, part in parts.items()}
        case Tuple(spaces=several):
            return [_written(part, value[i]) for i, part in enumerate(several)]
    if isinstance(space, Discrete) and type(value) is int and space.start <= value < space.start + space.n:
        return value  # a policy's action, as nearly always: what is below takes 8 us
    dtype = space.dtype if isinstance(space, Box) else field_of(space).dtype
    if wrong := misfit(space, value, "its space", dtype):
        raise ValueError(f"it{wrong}")
    if isinstance(space, Discrete):
        return int(value)
    array = np.asarray(value)
    return Array(dtype, array.shape, array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes())


def space_to_wire(space: Space) -> Any:
    """Return a space as plain data: the fields of `tidemill.api.spaces`, told apart by
    "type", with null for a bound that is infinite."""
    plain = msgspec.to_builtins(space)
    return _each_bound(
        plain, lambda bounds: [bound if math.isfinite(bound) else None for bound in bounds], {}
    )


def space_from_wire(value: Any, where: str) -> Space:
    """Return the space that plain data describe. Raises `ConfigError` naming `where`."""
    try:
        infinite = {"low": -math.inf, "high": math.inf}
        filled = _each_bound(
            value, lambda bounds: [bounds] if not isinstance(bounds, list) else bounds, infinite
        )
        space: Space = msgspec.convert(filled, Space, strict=True)
        _check_space(space)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is {brief(value)}, which is no space: {error}. Write it as docs/rest.md says, for "
            'instance {"type": "box", "shape": [4], "dtype": "float32", "low": [null], "high": [null]}'
        ) from None
    return space


def _each_bound(value: Any, change: Any, infinite: dict[str, float]) -> Any:
    """Return plain data of a space with each list of bounds changed, and null in it
    replaced by what `infinite` says."""
    if isinstance(value, list):
        return [_each_bound(part, change, infinite) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "box":
        bounds = {
            key: [infinite.get(key) if bound is None else bound for bound in change(value[key])]
            for key in ("low", "high")
            if key in value
        }
        return {**value, **bounds}
    return {
        key: _each_bound(part, change, infinite) if key == "spaces" or not isinstance(part, list) else part
        for key, part in value.items()
    }


def _check_space(space: Space) -> None:
    match space:
        case Dict(spaces=parts):
            for key, part in parts.items():
                if not key or "." in key:
                    raise ValueError(f"the key {key!r} must be a name without a dot")
                _check_space(part)
        case Tuple(spaces=several):
            for part in several:
                _check_space(part)
        case Box():
            _check_box(space)
        case Discrete(n=n) | MultiBinary(n=n):
            if not 1 <= n <= (LARGEST if isinstance(space, MultiBinary) else 1 << 62):
                raise ValueError(f"n = {n} must be at least 1, and no more than can be sent")
            if isinstance(space, Discrete) and abs(space.start) > 1 << 62:
                raise ValueError(f"start = {space.start} is none of 64 bits")
        case MultiDiscrete(nvec=nvec):
            if not nvec or min(nvec) < 1 or max(nvec) > 1 << 62:
                raise ValueError(f"nvec = {brief(list(nvec))} must hold numbers of at least 1, of 64 bits")


def _check_box(space: Box) -> None:
    if np.dtype(space.dtype).kind not in "fiub":
        raise ValueError(f"dtype {space.dtype} is none of numbers")
    if any(size < 0 for size in space.shape):
        raise ValueError(f"shape {list(space.shape)} has a negative size")
    if math.prod(space.shape) * np.dtype(space.dtype).itemsize > LARGEST:
        raise ValueError(f"a value of shape {list(space.shape)} takes more than {LARGEST} bytes")
    for bound in (space.low, space.high):
        if len(bound) not in (1, math.prod(space.shape)) or any(math.isnan(each) for each in bound):
            raise ValueError(
                f"{len(bound)} bounds for shape {list(space.shape)}; give one, or one per element"
            )
    if not np.all(np.less_equal(space.low, space.high)):  # one bound stands for all
        raise ValueError("a lower bound is above the upper one")


def _keys(value: Any) -> str:
    return str(
        sorted(map(str, value))
        if isinstance(value, dict)
        else f"{len(value)} in a list"
        if isinstance(value, list)
        else brief(value)
    )
