"""Files and folders that nobody but their owner may read, whatever the umask lets others
do: what a run writes of itself."""

import os
from contextlib import suppress
from pathlib import Path


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, where it is made for its owner alone:
    ``open(path, "wb", opener=private)``."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def private_folder(path: Path) -> list[Path]:
    """Make a folder for its owner alone, and those above it that are missing (as the
    umask says). Return what was made, the innermost first; [] where it was there. Of
    several who do this at once one makes it. Raises `OSError`, with nothing left behind.
    """
    made: list[Path] = []
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    try:
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir(0o700 if folder is path else 0o777)
                made.insert(0, folder)
        if not path.is_dir():
            raise NotADirectoryError(20, os.strerror(20), str(path))
    except OSError:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
    return made
