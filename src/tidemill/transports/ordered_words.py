"""The words through which the two ends of a segment tell each other what they have
written, in an order that both see.

An index is one aligned word of 8 bytes. What the program writes before it has to be in
memory before it, and what it reads after it is read after it. x86-64 keeps that order for
every access (total store order), and Python's lock keeps it among threads. Between
processes on other processors, such as ARM, the native core reads and writes words, with
acquire and release; without it there are no processes there.
"""

import ctypes
import platform
from pathlib import Path
from typing import Any, Literal

from tidemill.core.errors import ConfigError
from tidemill.core.memory import LocalSegment, Segment
from tidemill.native.library import BUILT, Kernels, NativeUnavailable

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor keeps the order by itself."""
Code = Literal["Q", "q"]
"""Words without and with a sign, as for `memoryview.cast`."""


class OrderedWords:
    """The words of a piece of memory, read and written by the native core: what stands
    before an access in the program is in memory before it, and what stands after it
    after it."""

    def __init__(self, memory: memoryview, code: Code, library: Path) -> None:
        """Raises `NativeUnavailable`."""
        self._memory = memory  # which lives as long as this
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        word = {"Q": ctypes.c_uint64, "q": ctypes.c_int64}[code]
        self._read, self._write = _functions(library)
        self._read.argtypes, self._read.restype = [ctypes.c_void_p], word
        self._write.argtypes, self._write.restype = [ctypes.c_void_p, word], None

    def __getitem__(self, index: int) -> int:
        word: int = self._read(self._at + 8 * index)
        return word

    def __setitem__(self, index: int, word: int) -> None:
        self._write(self._at + 8 * index, word)


def _functions(library: Path) -> tuple[Any, Any]:
    Kernels(library)  # of this version, and loadable
    held = ctypes.PyDLL(str(library))  # keeps Python's lock: a word takes less than to give it back
    return held["tidemill_read_word"], held["tidemill_write_word"]


def words_of(segment: Segment, memory: memoryview, code: Code = "Q") -> memoryview | OrderedWords:
    """Return the words of `memory`, a part of `segment`."""
    if IN_ORDER or isinstance(segment, LocalSegment):
        return memory.cast(code)
    return OrderedWords(memory, code, BUILT)


def check_order() -> None:
    """Raise `ConfigError` where processes of this machine would not see each other's
    writes in order."""
    if IN_ORDER:
        return
    try:
        Kernels(BUILT)
    except NativeUnavailable as error:
        raise ConfigError(
            f"processes on {platform.machine()} need the native core, which orders what they write into "
            f"memory that they share: {error}; or take --launch threads or --launch inline"
        ) from None
