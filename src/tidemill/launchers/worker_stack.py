"""Where a worker process's threads are: how it is asked, and how that is written."""

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from time import monotonic, sleep

from tidemill.api.launcher import Call
from tidemill.launchers.worker_process import ASK_FOR_STACK

_ANSWER = 0.5  # seconds that a process has to write down where its threads are
_LONGEST_ANSWER = 1 << 20  # bytes of that which are read


def stack_of(process: int, asked: int, stacks: int) -> Sequence[Call]:
    """Return the calls in which the thread of a process's workers is, the innermost
    first; () where it does not tell.

    process: pidfd of it
    asked: eventfd by which it is asked
    stacks: memfd that it writes them into
    """
    with contextlib.suppress(ProcessLookupError):
        for again in (False, True):
            os.ftruncate(stacks, 0)
            os.lseek(stacks, 0, os.SEEK_SET)  # for the process, too
            if again:
                signal.pidfd_send_signal(process, ASK_FOR_STACK)
            else:  # a thread of it knows more, where Python's lock is not held
                os.eventfd_write(asked, 1)
            deadline, written = monotonic() + _ANSWER, b""
            while monotonic() < deadline and not written.endswith(b"\n"):
                sleep(0.02)
                written = os.pread(stacks, _LONGEST_ANSWER, 0)
            if calls := calls_of(written.decode(errors="replace")):
                return calls
    return ()


def dump_of(calls: Sequence[Call]) -> str:
    """Return calls as `faulthandler` writes them, and what each is about besides."""
    lines = (
        f'  File "{call.file}", line {call.line} in {call.name}{f" ({call.about})" * bool(call.about)}\n'
        for call in calls
    )
    return f"Where its workers are (most recent call first):\n{''.join(lines)}"


def calls_of(dump: str) -> Sequence[Call]:
    """Return where the workers' thread is, of what `faulthandler` has written of all, or
    `dump_of` of that one, the innermost call first; () where it is not among them."""
    for thread in dump.split("\n\n"):
        found = re.findall(r'File "(.*)", line (\d+) in (.*?)(?: \((.*)\))?$', thread, re.MULTILINE)
        if any(file.endswith("workers/base.py") for file, *_ in found):
            return [Call(name, file, int(line), about) for file, line, name, about in found]
    return ()
