"""The memory of a replay: its rows' fields, in the process's own memory or in a file.
Stacked observations are kept as single frames."""

import os
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError
from tidemill.core.memory import size
from tidemill.core.private_files import private_folder
from tidemill.core.schema import Array, Arrays, Field, Schema, layout, views

STORED_FIELDS = ("action", "reward", "done", "version")
"""Besides observations: fields of these names, and their leaves."""
MASK = "action_mask"
"""The part of an observation that is never stacked."""


@dataclass(frozen=True)
class Frames:
    """How a stacked leaf lies: `count` frames of shape `single`, along the axis `axis`
    (-1: channels last) of the stack's `shape`."""

    shape: tuple[int, ...]
    single: tuple[int, ...]
    count: int
    last: bool

    def newest(self, stacks: Array) -> Array:
        """Return the newest frame [N, *single] of stacks [N, *shape]: a view."""
        return (
            stacks[..., -self.single[-1] :]
            if self.last
            else stacks.reshape(len(stacks), self.count, *self.single)[:, -1]
        )

    def join(self, frames: Array) -> Array:
        """Return stacks [n, *shape] of frames [n, count, *single]."""
        return (np.moveaxis(frames, 1, -2) if self.last else frames).reshape(len(frames), *self.shape)


def frames_of(name: str, field: Field, count: int) -> Frames | None:
    """Return how the leaf of an observation is stacked by `ReplayActors.frame_stack`,
    None for one that is stored as it is: an action mask, and what is no float and no
    uint8 (stacks of these are kept whole)."""
    shape = field.shape
    if count == 1 or name.endswith(f".{MASK}") or np.dtype(field.dtype).kind not in "fu":
        return None
    if field.dtype == "uint8" and len(shape) == 3:  # an image of more channels: see `envs.frame_stack`
        first = shape[0] % count == 0 and shape[0] // count <= shape[2]
        last = shape[2] % count == 0 and shape[0] > shape[2] // count
        if first and last:  # the one of fewer channels; rows are looked at when they come
            if shape[0] == shape[2]:
                return None
            first = shape[0] < shape[2]
        if last and not first:
            return Frames(shape, (*shape[:2], shape[2] // count), count, True)
        if first:
            return Frames(shape, (shape[0] // count, *shape[1:]), count, False)
    elif shape[:1] == (count,):
        return Frames(shape, shape[1:], count, False)
    raise not_stacked(name, f"{field.dtype}{list(shape)}", count)


def not_stacked(name: str, found: str, count: int) -> ConfigError:
    """Return what to raise where rows hold no stacks."""
    return ConfigError(
        f"Replay: frame_stack = {count}, but the rows' {name} is {found}, which is no stack of {count} "
        "frames; take the frame_stack of the ReplayActors whose rows these are, or 1 to keep observations "
        "as they come"
    )


class Store:
    """The store holds `places` rows of those fields of `schema` that a replay needs."""

    def __init__(self, schema: Schema, frame_stack: int) -> None:
        self.schema: dict[str, Field] = {}
        self.frames: dict[str, Frames] = {}
        for name, field in schema.items():
            if name == "obs" or name.startswith("obs."):
                frames = frames_of(name, field, frame_stack)
                if frames is not None:
                    self.frames[name] = frames
                    field = Field(frames.single, field.dtype)
            elif not any(name == kept or name.startswith(f"{kept}.") for kept in STORED_FIELDS):
                continue
            self.schema[name] = field
        self.arrays: Arrays = {}

    def nbytes(self, places: int) -> int:
        """Return the bytes of so many rows."""
        return layout(self.schema, (places,))[1]

    def formula(self) -> str:
        """Return what makes a row, for people."""
        return " + ".join(f"{name} {field.nbytes:,}" for name, field in self.schema.items())

    def open(self, places: int, folder: Path | None) -> None:
        """Make the memory: of the system, page by page when it is first written; or, in
        `folder`, a file that has no name once it is open."""
        nbytes = self.nbytes(places)
        descriptor = -1 if folder is None else _file(folder, nbytes)
        memory = mmap(descriptor, nbytes)
        if descriptor != -1:
            os.close(descriptor)  # the map has its own
        self.arrays = views(self.schema, (places,), memoryview(memory))

    def write(self, places: NDArray[np.int64], rows: Arrays, columns: Any) -> None:
        """Write rows [N, ...] of `columns` to `places`."""
        for name, array in self.arrays.items():
            given = rows[name][columns]
            frames = self.frames.get(name)
            array[places] = given if frames is None else frames.newest(given)


def _file(folder: Path, nbytes: int) -> int:
    """Return a new file, the owner's alone, of so many bytes, all of which the disk has
    set aside. Its name is taken away at once, so that nothing is left of it however this
    process ends."""
    path = folder / f".replay.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        private_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise ConfigError(
            f"mapped = True: a file of {size(nbytes)} in {folder} cannot be made: {error.strerror}; free "
            "space, make capacity less, or take a folder of another disk for the run"
        ) from None
    return descriptor
