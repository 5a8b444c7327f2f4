"""Standard output and standard error that end nothing: where nobody reads any more, or the disk is full, what is written is lost and whoever wrote
it goes on."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_PLAIN = str.maketrans({"–": "-", "−": "-", "─": "-", "━": "=", "█": "#", "·": ".", "…": "...", "→": "->", "×": "x", "µ": "u"})


class _Forgiving:
    """A text stream in place of another, which it writes to."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write what the stream takes. A letter that its encoding lacks is written as another."""
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
        """Throw away what the stream holds back: it would be tried again with every write, and at the interpreter's end, whose status it would be."""
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


_lock = threading.Lock()
_entered = 0  # how often, by any thread


@contextmanager
def forgiving_output() -> Iterator[None]:
    """Have ``sys.stdout`` and ``sys.stderr`` raise nothing to whoever prints, in any thread, until the last who entered this has left it."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            _replace(lambda stream: stream if stream is None else cast(TextIO, _Forgiving(stream)))
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                _replace(_bare)


def _replace(by: Any) -> None:
    sys.stdout, sys.stderr = by(sys.stdout), by(sys.stderr)


def _bare(stream: TextIO) -> TextIO:
    """Return the stream behind ours, without anything that it holds back; another one stays."""
    if isinstance(stream, _Forgiving):
        stream.flush()
        return stream.stream
    return stream
