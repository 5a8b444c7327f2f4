"""A look inside: what lies in memory files, as plain data. Nothing here writes, and no
file needs to be left alone meanwhile."""

import json
import os
import stat
import time
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.image import LARGEST, GroupImage, layout_of, read_header, read_image
from tidemill.bridge.protocol.tables import (
    CLOSE,
    LAYOUTS,
    QUERY,
    RESET,
    SIMULATOR,
    STEP,
    TRAINER,
    MemoryLayout,
)
from tidemill.bridge.trainer_side.steps import count
from tidemill.core.errors import ImageError

Plain = dict[str, Any]
LONGEST_FILE_NAME = 255
_SETTLE = 0.5  # seconds in which two reads in a row are to see the same
_WIDTH = 150


def dump(file: Path, header: Path | None = None) -> Plain:
    """Return what `file` holds: a file of layout 0, or a body of layout 0.3.0 or 0.3.2
    with its `header`; the layout is seen from the file.

    Where `file` is itself such a header, its body is looked for beside it. Numbers that
    are not finite are None, so that all is valid JSON. ImageError where it cannot be
    read, or is no image.
    """
    first = _read(file if header is None else header)
    layout = LAYOUTS[_layout_of(first, file, header)]
    body_path = file
    if header is None and layout.files == 2:
        number = read_header(layout, first)["body"]
        if number > LONGEST_FILE_NAME:
            raise ImageError(
                f"{file}: the header says that its body is number {number}, a name that no file has"
            )
        header, body_path = file, file.with_name(file.name + "_" * number)
    first, body = _settled(body_path if header is None else header, None if header is None else body_path)
    image = read_image(layout, first, body)
    memory = first if body is None else body
    turn, command = _turn(layout, image.header)
    return {
        "layout": layout.name,
        "turn": turn,
        "command": command,
        "side_channel_bytes": len(image.side_channel),
        "side_channel": image.side_channel.hex(),
        "header": dict(image.header),
        "groups": [_group(layout, memory, group) for group in image.groups],
    }


def text_of(value: Any, indent: int = 0) -> str:
    """Return plain data as JSON: short lists on a line each."""
    line = json.dumps(value, allow_nan=False)
    deep = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict) for item in value)
    )
    if not value or not isinstance(value, dict | list) or (not deep and indent + len(line) <= _WIDTH):
        return line
    space = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {text_of(item, indent + 2)}" for key, item in value.items()]
    elif any(isinstance(item, dict | list) for item in value):
        items = [text_of(item, indent + 2) for item in value]
    else:
        return line
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(space + item for item in items) + f"\n{' ' * indent}{end}"


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ImageError(f"{path} is no plain file; a memory file is")
        if about.st_size > LARGEST:
            raise ImageError(f"{path} has {about.st_size} bytes, and a memory file at most {LARGEST}")
        return os.pread(descriptor, about.st_size, 0)
    finally:
        os.close(descriptor)


def _settled(first: Path, body: Path | None) -> tuple[bytes, bytes | None]:
    """Read the files as they were at one moment: again where a simulator that runs has
    changed them meanwhile, but not for ever."""
    end = time.monotonic() + _SETTLE
    before, seen = None, (_read(first), None if body is None else _read(body))
    while seen != before and time.monotonic() < end:
        before, seen = seen, (_read(first), None if body is None else _read(body))
    return seen


def _layout_of(first: bytes, file: Path, header: Path | None) -> str:
    if header is None:
        try:
            return layout_of(first)
        except ImageError as error:
            raise ImageError(
                f"{file}: {error}. If it is a body of layout 0.3.0 or 0.3.2, name its header, too (--header "
                "FILE)"
            ) from None
    try:
        name = layout_of(first)
    except ImageError as error:
        raise ImageError(f"{header} is no header: {error}") from None
    if LAYOUTS[name].files == 1:
        raise ImageError(
            f"{header} is a file of layout {name}, which has no header of its own; dump it alone"
        )
    return name


def _turn(layout: MemoryLayout, header: Mapping[str, int]) -> tuple[int | None, int]:
    """Return whose turn it is, and the command, in the numbers of layout 0; None where
    both sides wait, which they do for an instant."""
    if layout.files == 1:
        return header["turn"], header["command"]
    turn = None
    if not header["trainer_blocked"]:
        turn = TRAINER
    elif not header["simulator_blocked"]:
        turn = SIMULATOR
    command = (
        CLOSE if header["closed"] else RESET if header["reset"] else QUERY if header.get("query") else STEP
    )
    return turn, command


def _group(layout: MemoryLayout, memory: bytes, group: GroupImage) -> Plain:
    spec, actions = group.spec, group.spec.action_spec
    about: Plain = {
        "name": group.name,
        "max_agents": spec.max_agents,
        "continuous": actions.continuous_size > 0 or not actions.branches,
        "action_size": actions.continuous_size + len(actions.branches),
        "branches": list(actions.branches),
        "observation_shapes": [list(observation.shape) for observation in spec.observation_specs],
    }
    rows = _rows(memory, group, "agents", "", "agent_id")
    action = _actions(memory, group, rows["n_agents"])
    masks = (
        _block(memory, group.places["masks"], np.uint8, rows["n_agents"], sum(actions.branches))
        if actions.branches
        else None
    )
    if layout.files == 1:
        flags = {name: _flags(memory, group, name, rows["n_agents"]) for name in ("done", "max_step")}
        return about | _ordered(rows, **flags, masks=masks, action=action)
    none = [False] * rows["n_agents"]
    ended = _rows(memory, group, "ended", "ended_", "ended_id")
    cut = _flags(memory, group, "interrupted", ended["n_agents"])
    return about | {
        "decisions": _ordered(rows, done=none, max_step=none, masks=masks, action=action),
        "terminations": _ordered(
            ended, done=[True] * ended["n_agents"], max_step=cut, masks=None, action=None
        ),
        "action": action,
    }


def _ordered(rows: Plain, **more: Any) -> Plain:
    every = rows | more
    return {
        name: every[name]
        for name in ("n_agents", "obs", "reward", "done", "max_step", "agent_id", "masks", "action")
    }


def _rows(memory: bytes, group: GroupImage, counter: str, prefix: str, agent_id: str) -> Plain:
    rows = count(memory, group, counter)
    return {
        "n_agents": rows,
        "obs": [
            _block(memory, place, np.float32, rows, *one.shape) for place, one in group.observations(prefix)
        ],
        "reward": _block(memory, group.places[prefix + "reward"], np.float32, rows),
        "agent_id": _block(memory, group.places[agent_id], np.int32, rows),
    }


def _flags(memory: bytes, group: GroupImage, name: str, rows: int) -> list[bool]:
    return [flag != 0 for flag in memory[group.places[name] : group.places[name] + rows]]


def _actions(memory: bytes, group: GroupImage, rows: int) -> list[list[Any]]:
    """A row per agent: its continuous actions, then a choice per branch."""
    actions, places = group.spec.action_spec, group.places
    sizes = actions.continuous_size, len(actions.branches)
    starts = [
        places.get(name, places.get("actions", 0)) for name in ("continuous_actions", "discrete_actions")
    ]
    parts = [
        _block(memory, start, kind, rows, size)
        for start, kind, size in zip(starts, (np.float32, np.int32), sizes, strict=True)
    ]
    return [floats + choices for floats, choices in zip(*parts, strict=True)]


def _block(memory: bytes, place: int, kind: Any, *shape: int) -> list[Any]:
    array: NDArray[Any] = np.frombuffer(memory, kind, int(np.prod(shape)), place).reshape(shape)
    values: list[Any] = array.tolist()
    return values if np.isfinite(array).all() else _finite(values)


def _finite(values: Any) -> Any:  # nested lists, or a number
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if isfinite(values) else None
