"""Where threads are: the calls that they are in, for messages."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SHOWN_CALLS = 6  # of a stack, the innermost ones


class Call(NamedTuple):
    """A call that a thread is in: the function's name, its file and the line there."""

    name: str
    file: str
    line: int


def stack_of(thread: int | None) -> list[Call]:
    """Return the calls that a thread of this process is in, by its identity; the
    innermost first, [] where there is none."""
    frame = sys._current_frames().get(thread or 0)
    calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
    return [Call(call.name, call.filename, call.lineno or 0) for call in calls]


def words_of(calls: Sequence[Call]) -> str:
    """Return the innermost calls as messages show them: "read (arm.py:41) ← step …"."""
    return " ← ".join(f"{call.name} ({Path(call.file).name}:{call.line})" for call in calls[:SHOWN_CALLS])
