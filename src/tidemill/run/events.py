"""What happened in a run besides training, `events.jsonl`: workers that died and lived
again, what was undone, what the user was told, how the run ended. A line per event."""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Literal

import msgspec

from tidemill.core.folder_thread import FolderThread
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import open_plain
from tidemill.store.fence import check

FILE = "events.jsonl"
LONGEST = 1 << 20  # bytes of a line
MOST_WAITING = 1000  # events for which there is no room on the disk

What = Literal["began", "died", "lost", "lives", "went back", "told", "ended"]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a run.

    time: when it happened, in seconds since 1970
    what: "began": every worker runs, for the first time in this command; "died": a worker
        did, of `cause`; "lost": what is lost with it, as far as that is known by
        now; "lives": it runs again; "went back": the trainers of `policy`
        begin anew at their newest checkpoint, since `worker` died; where there
        was none yet from the beginning, and `cause` says so; "told":
        the user was told `cause`, of `worker` where it is of one; "ended": the run did,
        for `cause`
    worker: its name
    life: number of its life, from 1; where it "went back", of the one that died
    policy: name of a policy
    cause: why, in words
    seconds: for how long the worker did not run
    steps: env steps that are undone, or whose update was left out; where a worker died,
        those that it had begun samples with, as far as it had told
    samples: that were on their way, and are lost
    """

    time: float
    what: What
    worker: str = ""
    life: int = 0
    policy: str = ""
    cause: str = ""
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0


class EventLog:
    """The log writes the events of the run in `folder`, in `thread`. What a disk cannot
    take waits until there is room, or until it answers again; that it cannot is told by
    whoever writes more than this."""

    def __init__(self, folder: Path, thread: FolderThread) -> None:
        self._path, self._thread = folder / FILE, thread
        self._changed = Lock()
        self._lines = deque[bytes](maxlen=MOST_WAITING)  # that are not in the file yet

    def write(self, events: Iterable[Event]) -> None:
        """Append events. They go to the file in one write: a kill tears at most the last
        line. Raises `Overtaken`."""
        with self._changed:
            self._lines += [msgspec.json.encode(event) + b"\n" for event in events]
        if self._lines:
            with suppress(OSError):
                self._thread.do(self._write_all)

    def _write_all(self) -> None:
        """See `write`. Raises `OSError`, and `Overtaken`."""
        check(self._path)
        with self._changed:
            lines = list(self._lines)
        data = b"".join(lines)
        with open(self._path, "ab", buffering=0, opener=private) as file:
            end = file.tell()
            try:
                written = file.write(data)
            except OSError:
                written = 0
            if written < len(data):
                check(self._path)  # else what is behind may be the other runner's
                file.truncate(end)  # no half of a line in the middle of the file
                return
        with self._changed:
            for line in lines:
                if self._lines and self._lines[0] is line:  # else it was given up meanwhile
                    self._lines.popleft()


def read_events(folder: Path) -> list[Event]:
    """Return the events of the run in `folder`, in order; none where it has no file of
    them. Lines that are torn, or of another version, are left out."""
    found = []
    try:
        with open_plain(folder / FILE) as file:
            while line := file.readline(LONGEST):
                try:
                    found.append(msgspec.json.decode(line, type=Event))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
    except OSError:
        return []
    return found
