"""Where a run comes from: the file that defines it, and the versions of all that its
result may depend on."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from tidemill.api.experiment import Experiment
from tidemill.core.config import Config, encode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.secrets import hide_words
from tidemill.core.user_code_loading import is_installed, only_here_in, why_only_here

_PACKAGES = ("tidemill", "numpy", "torch", "gymnasium", "msgspec", "safetensors")


def source_file(path: Path) -> Path:
    """Return the resolved path of the file that an experiment came from. Raises
    `RunError` when it is not there."""
    if not path.is_file():
        raise RunError(f"there is no file {path}; say where the experiment's file is with --file FILE.py")
    return path.resolve()


def own_source(experiment: Experiment) -> Path | None:
    """Return the file that classes of the experiment are defined in, the main script
    first, or a module that lies beside it (worker processes must load it); None where
    there is none."""
    found = {place: file for place in _own_modules(experiment) if (file := _file_of(place)) is not None}
    return (
        source_file(Path(found["__main__"] if "__main__" in found else min(found.values())))
        if found
        else None
    )


def check_other_processes(experiment: Experiment) -> None:
    """Raise `ConfigError` for code that the experiment is made of, and that no other
    process could have."""
    cure = 'or train in this process: launch="threads" (or "inline")'
    for name in only_here_in(encode(experiment)):
        raise ConfigError(f"{why_only_here(name)}; {cure}")
    for kind in _classes(experiment):
        if "<locals>" in kind.__qualname__ or (
            kind.__module__ == "__main__" and _file_of("__main__") is None
        ):
            raise ConfigError(
                f"{why_only_here(f'{kind.__module__}:{kind.__qualname__}').partition(', and name it')[0]}; "
                f"{cure}"
            )


def _own_modules(experiment: Experiment) -> set[str]:
    """Return the modules that define classes of the experiment and that are neither of
    this library nor of a package."""
    return {kind.__module__ for kind in _classes(experiment) if "." not in kind.__module__}


def _file_of(module: str) -> str | None:
    """Return a module's file; None for what has none that could be loaded, or was
    installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (
        file
        if file is not None and file.endswith(".py") and Path(file).is_file() and not is_installed(Path(file))
        else None
    )


def _classes(value: Any) -> set[type]:
    """Return the classes of all configurations that a configuration holds, itself among
    them."""
    match value:
        case Config():
            return {type(value)}.union(*map(_classes, vars(value).values()))
        case dict():
            return set().union(*map(_classes, value.values()))
        case tuple():
            return set().union(*map(_classes, value))
    return set()


def versions(secrets: Collection[str] = ()) -> dict[str, Any]:
    """Return the versions of everything that a result may depend on, and the command,
    without `secrets`."""
    return {
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cores": cores(),
        "command": hide_words(sys.argv, secrets),
        "git": git_state(Path()),
    }


@cache
def installed(package: str) -> str:
    """Return the version of a package that is installed, or that none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and changed files of the checkout that `folder` is in, None outside
    one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                # no lock: one that is broken off would leave it in the user's repository
                ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=5,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": (git("status", "--porcelain") or "").splitlines()[:200]}
