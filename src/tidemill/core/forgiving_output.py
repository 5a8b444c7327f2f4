"""Standard output and standard error that end nothing, and hold nobody up: where nobody
reads any more, or the disk is full, what is written is lost and whoever wrote it goes on.

While a run goes on nobody waits for its reader: pipes and terminals are opened anew
without blocking, and what they do not take within half a second is lost. How a run
ended is written as usual, and waited for, but after a signal.
"""

import io
import os
import select
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TextIO, cast

# seconds that a reader who has read so far may leave what is written, where nobody is to
# wait for it
PATIENCE = 0.5
_PLAIN = str.maketrans(
    {"–": "-", "−": "-", "─": "-", "━": "=", "█": "#", "·": ".", "…": "...", "→": "->", "×": "x", "µ": "u"}
)


def printable(text: str) -> str:
    """Return a text without what a terminal would obey: it may tell what stands in a file
    of somebody else's, or what another host has said."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text
    )


class _Forgiving:
    """A text stream in place of another, which it writes to."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write what the stream takes. A letter that its encoding lacks is written as
        another."""
        try:
            return self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            return self.write(text.translate(_PLAIN).encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):  # ValueError: somebody has closed it
            self._drop()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them all."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Have written what can be."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self._drop()

    def _drop(self) -> None:
        """Throw away what the stream holds back: it would be tried again with every
        write, and at the interpreter's end, whose status it would be."""
        with suppress(OSError, ValueError):
            own = self.stream.fileno()
            kept, nowhere = os.dup(own), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, own)
                self.stream.flush()
            finally:
                os.dup2(kept, own)
                os.close(kept)
                os.close(nowhere)


class _Unawaited(io.RawIOBase):
    """A pipe or a terminal of which nobody waits for the reader: what it does not take
    within `PATIENCE` is lost, and so is at once what comes after, until it takes
    something again. `descriptor` must not block, and is closed with this."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._patience = descriptor, PATIENCE
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write what is taken, and say that it was all."""
        left, deadline = memoryview(data), monotonic() + self._patience
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                if (wait := deadline - monotonic()) <= 0 or not self._poll.poll(wait * 1000):
                    self._patience = 0.0
                    return len(data)
        if not self._patience and self._poll.poll(0):  # a letter may find room where no line does
            self._patience = PATIENCE
        return len(data)

    def close(self) -> None:
        """Close it. May be called twice."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


_lock = threading.Lock()
_entered = 0  # how often, by any thread
# streams that nobody waits for now, and what they write to else
_unawaited: list[tuple[_Forgiving, TextIO]] = []
_hurried = 0  # how often, by any thread


@contextmanager
def forgiving_output() -> Iterator[None]:
    """Have ``sys.stdout`` and ``sys.stderr`` raise nothing to whoever prints, in any
    thread, until the last who entered this has left it."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            _occupy()
            _replace(lambda stream: stream if stream is None else cast(TextIO, _Forgiving(stream)))
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                _replace(_bare)


def _occupy() -> None:
    """Have nothing else become standard input, output or error of a process that was
    started without: files of ours would be written into, and what workers are to inherit
    would not reach them."""
    with suppress(OSError):
        while (taken := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(taken)


@contextmanager
def unawaited_output() -> Iterator[None]:
    """Within `forgiving_output`: have nobody wait for who reads ``sys.stdout`` and
    ``sys.stderr``, a terminal that is held (Ctrl-S) or a pipe that is full, until the
    last who entered this has left it."""
    global _hurried
    with _lock:
        _hurried += 1
        if _hurried == 1:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Forgiving) and (own := _without_waiting(stream)) is not None:
                    _unawaited.append((stream, stream.stream))
                    stream.stream = own
    try:
        yield
    finally:
        with _lock:
            _hurried -= 1
            while not _hurried and _unawaited:
                stream, before = _unawaited.pop()
                own, stream.stream = stream.stream, before
                with suppress(OSError):
                    own.close()


def _without_waiting(stream: _Forgiving) -> TextIO | None:
    """Return a stream into the same pipe or terminal that does not wait, opened anew: the
    old one is others', too. None where it cannot be had, and for anything else: a file
    has no reader."""
    stream.flush()
    with suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
            again = os.open(
                f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
            return io.TextIOWrapper(
                cast(Any, _Unawaited(again)),
                stream.encoding,
                stream.errors,
                line_buffering=True,
                write_through=True,
            )
    return None


def _replace(by: Any) -> None:
    sys.stdout, sys.stderr = by(sys.stdout), by(sys.stderr)


def _bare(stream: TextIO) -> TextIO:
    """Return the stream behind ours, without anything that it holds back; another one
    stays."""
    if isinstance(stream, _Forgiving):
        stream.flush()
        return stream.stream
    return stream
