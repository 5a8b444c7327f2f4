"""Where threads are: the calls that they are in, for messages.

Calls of this package tell what they are about by their variables, which are looked at
only when somebody asks, so that nobody writes anything down meanwhile. Of environments
`lane` is the one that a call is at, and `answered` lists the answers of those that it is
through with, one lane after the other; `self.number`, or `target`, says which target of a
ring it serves; a turn is that of the worker `self`. Lanes that step all together, in
whole arrays or in what is not ours, are at none.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SHOWN_CALLS = 6  # of a stack, the innermost ones
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LANES = f"{_PACKAGE}envs/"
_TARGETS = (f"{_PACKAGE}workers/ring.py", f"{_PACKAGE}replay_training/ready_environments.py")
_TURNS = f"{_PACKAGE}workers/base.py"


class Call(NamedTuple):
    """A call that a thread is in: the function's name, its file, the line there, and what
    it is about ("lane 3"), "" where that is not known."""

    name: str
    file: str
    line: int
    about: str = ""


def stack_of(thread: int | None) -> list[Call]:
    """Return the calls that a thread of this process is in, by its identity; the
    innermost first, [] where there is none."""
    frame = sys._current_frames().get(thread or 0)
    calls = []
    while frame is not None:
        code = frame.f_code
        calls.append(Call(code.co_name, code.co_filename, frame.f_lineno or 0, _about(frame)))
        frame = frame.f_back
    return calls


def words_of(calls: Sequence[Call]) -> str:
    """Return the innermost calls as messages show them: "read (arm.py:41) ← step …"."""
    return " ← ".join(f"{call.name} ({Path(call.file).name}:{call.line})" for call in calls[:SHOWN_CALLS])


def whereabouts(calls: Sequence[Call]) -> str:
    """Return what calls are about, and the innermost ones: "lane 3 of target 0 of
    actor-1: read (arm.py:41) ← step …"."""
    found: dict[str, str] = {}  # the innermost lane, target, and worker, which has no kind
    for call in calls:
        if call.about:
            found.setdefault(call.about.rpartition(" ")[0], call.about)
    place = " of ".join(found.values())
    return f"{place}: {words_of(calls)}" if place else words_of(calls)


def _about(frame: FrameType) -> str:
    """Return what a call is about, "" where it is not one that says so."""
    file = frame.f_code.co_filename
    if file == _TURNS and frame.f_code.co_name == "_turn":
        return str(frame.f_locals["self"].name)
    number: Any = None
    if file in _TARGETS:
        known = frame.f_locals
        number = getattr(known.get("self"), "number", known.get("target"))
    elif file.startswith(_LANES):
        known = frame.f_locals
        answered = known.get("answered")
        number = known.get("lane") if answered is None else len(answered)
    kind = "target" if file in _TARGETS else "lane"
    return f"{kind} {number}" if isinstance(number, int) else ""
