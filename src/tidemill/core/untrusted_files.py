"""Files that anybody may have written: read whole, where they are plain ones that fit
into memory, and JSON of a depth that cannot hurt."""

import errno
import json
import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from tidemill.core.memory import available, size

_OF_SEVERAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal of a commit to several databases
SMALL = 1 << 20
"""Bytes that are read without a look at what memory has, which takes a millisecond."""
DEPTH = 64
"""How deep the JSON that is read here may be nested."""


def open_plain(path: Path, links: bool = False) -> BufferedReader:
    """Open a plain file to be read. Raises `OSError`, which says what it is, for anything
    else: a FIFO would be waited for, a device may do anything. Links are refused, too,
    unless `links` is true: somebody named the file, and no folder that may be another's
    did."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))

    found = path.stat() if links else path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(found.st_mode)}, and not a plain file", str(path))
    return open(path, "rb", opener=opener)


def read_plain(path: Path, links: bool = False) -> bytes:
    """Return what a plain file holds. Raises `OSError` for what `open_plain` refuses, and
    for more than memory can hold: a file with holes takes no disk."""
    with open_plain(path, links) as file:
        length = os.fstat(file.fileno()).st_size
        if length > SMALL and length > (most := available()):
            raise OSError(
                errno.EFBIG,
                f"it says that it has {size(length)}, and {size(most)} of memory are free",
                str(path),
            )
        return file.read(length)


def check_database(path: Path) -> None:
    """Raise `ValueError` unless SQLite may open the database at `path`: its files are
    plain ones, and no journal has it remove another file, as it does once the last
    database of several was brought back that a commit was to."""
    for place in (Path(f"{path}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")):
        try:
            mode = place.lstat().st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"{place} is {_kind(mode)}, and not a plain file")
            if place.name.endswith("-journal"):
                with open_plain(place) as file:
                    file.seek(-len(_OF_SEVERAL), os.SEEK_END)
                    if file.read() == _OF_SEVERAL:
                        raise ValueError(f"{place} is of several databases")
        except OSError:
            continue  # it is not there, or has nothing yet; what cannot be read, SQLite tells


def read_json(data: bytes | str) -> Any:
    """Return what JSON says. Raises `ValueError` for what is none, or is nested deeper
    than `DEPTH`."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    level = [content]
    for _ in range(DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, (Mapping, list))
            for part in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return content
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a folder")
