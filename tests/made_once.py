"""What is dear to make, and no test changes, is made once for all processes of pytest."""

import fcntl
from collections.abc import Callable
from os import environ
from pathlib import Path

import pytest


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of these tests share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in environ else own


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder with what `make` puts there: one process calls it, the others
    wait."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder
