"""Faults that lie in a folder, as empty files by their names, each taken by whoever comes
first."""

import os
from contextlib import suppress
from pathlib import Path

FOLDER = "FAULTS"  # the variable that names the folder
TAKEN = "taken"  # its folder of those that have happened: when is the file's time
MET = "met"  # the file beside a run in which its tracker says by what it failed


def taken() -> str:
    """Return the fault that is to happen now, "" where there is none."""
    folder = Path(os.environ[FOLDER])
    for name in os.listdir(folder):
        if name != TAKEN:
            with suppress(FileNotFoundError):  # another one was before this
                os.utime(folder / name)
                os.replace(folder / name, folder / TAKEN / name)
                return name
    return ""
