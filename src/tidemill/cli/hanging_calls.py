"""What a command says that steps environments in its own thread, while one of their calls
does not come back: a constructor that waits for an engine, say. A run's supervisor is
not there to tell."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tidemill.core.forgiving_output import printable
from tidemill.core.thread_stacks import stack_of, words_of

LOOK_S = 10.0  # seconds between two looks
_PACKAGE = f"{Path(__file__).parents[1]}/"


@contextmanager
def telling_what_hangs() -> Iterator[None]:
    """Have standard error say where this thread is, once, when a call of what is not ours
    has not come back between two looks, and again when another one has not."""
    over, watched = threading.Event(), threading.get_ident()
    watcher = threading.Thread(target=_watch, args=(over, watched), daemon=True, name="hanging calls")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(LOOK_S)


def _watch(over: threading.Event, watched: int) -> None:
    before: FrameType | None = None  # held, so that no other call has its place
    told = False
    while not over.wait(LOOK_S):
        if (call := _call_of(watched)) is not before:
            before, told = call, False
        elif call is not None and not told:
            told = True
            text = f"a call has not come back for {LOOK_S:g} s: {words_of(stack_of(watched))}"
            print(f"{printable(text)}; Ctrl-C ends this", file=sys.stderr, flush=True)


def _call_of(thread: int) -> FrameType | None:
    """Return the outermost call of what is not ours that the innermost of ours has made;
    None where a thread is in our own code, or asks the user."""
    frame, call = sys._current_frames().get(thread), None
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        call, frame = frame, frame.f_back
    asks = call is not None and call.f_globals.get("__name__", "").startswith(("click", "typer"))
    return None if asks else call
