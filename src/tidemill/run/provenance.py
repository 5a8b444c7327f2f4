"""Where a run comes from: the file that defines it, and the versions of all that its result may depend on."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tidemill.api.experiment import Experiment
from tidemill.core.config import Config
from tidemill.core.cores import cores
from tidemill.core.errors import RunError
from tidemill.core.secrets import hide_words

_PACKAGES = ("tidemill", "numpy", "torch", "gymnasium", "msgspec", "safetensors")


def source_file(path: Path) -> Path:
    """Return the resolved path of the file that an experiment came from. Raises `RunError` when it is not there."""
    if not path.is_file():
        raise RunError(f"there is no file {path}; say where the experiment's file is with --file FILE.py")
    return path.resolve()


def own_source(experiment: Experiment) -> Path | None:
    """Return the main script, when classes of the experiment are defined in it (worker processes must load it)."""
    classes = _classes(experiment)
    files = {sys.modules[c.__module__].__file__ for c in classes if c.__module__ == "__main__" or c.__module__.startswith("tidemill_file_")}
    files.discard(None)
    return source_file(Path(str(files.pop()))) if files else None


def _classes(value: Any) -> set[type]:
    """Return the classes of all configurations that a configuration holds, itself among them."""
    match value:
        case Config():
            return {type(value)}.union(*map(_classes, vars(value).values()))
        case dict():
            return set().union(*map(_classes, value.values()))
        case tuple():
            return set().union(*map(_classes, value))
    return set()


def versions(secrets: Collection[str] = ()) -> dict[str, Any]:
    """Return the versions of everything that a result may depend on, and the command, without `secrets`."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "cores": cores(),
        "command": hide_words(sys.argv, secrets),
        "git": git_state(Path()),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and changed files of the checkout that `folder` is in, None outside one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": (git("status", "--porcelain") or "").splitlines()[:200]}
