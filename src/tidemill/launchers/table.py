"""The launchers that are known by a name of one word."""

import inspect
from collections.abc import Mapping
from typing import Any

from tidemill.api.launcher import Launcher
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.named_class import make, named_class, read_call

LAUNCHERS = {
    "inline": "tidemill.launchers.inline:InlineLauncher",
    "threads": "tidemill.launchers.threads:ThreadsLauncher",
    "processes": "tidemill.launchers.processes:ProcessesLauncher",
    "ray": "tidemill.launchers.ray:RayLauncher",
    "slurm": "tidemill.launchers.slurm:SlurmLauncher",
}
"""Module and class of each. A new one is a line here."""


def make_launcher(launch: str | type[Launcher]) -> Launcher:
    """Return the launcher that a user has chosen: by name, "module:NAME", "FILE.py:NAME",
    each with arguments or without ("ray(hosts=4)"), or as a class. Raises `TidemillError`
    for one that there is not, or not here."""
    chosen, args, kwargs = chosen_launcher(launch)
    return make(chosen, "--launch", *args, **kwargs)


def chosen_launcher(launch: str | type[Launcher]) -> tuple[type[Launcher], list[Any], dict[str, Any]]:
    """Return the class of a launcher that a user has chosen, and its arguments. Raises
    `TidemillError` as `make_launcher` does."""
    name, args, kwargs = read_call(launch, "--launch") if isinstance(launch, str) else (launch, [], {})
    chosen = named_class(name, Launcher, LAUNCHERS, "--launch")
    known = inspect.signature(chosen).parameters
    if unknown := [argument for argument in kwargs if argument not in known]:
        cure = did_you_mean(unknown[0], known) if known else "it takes no options"
        raise ConfigError(f'--launch {name}: it has no option "{unknown[0]}"; {cure}')
    return chosen, args, kwargs


def with_options(launch: str, options: Mapping[str, Any]) -> str:
    """Return a launcher's name with these `options`, those that are None left out."""
    name, args, kwargs = read_call(launch, "--launch")
    kwargs |= {option: value for option, value in options.items() if value is not None}
    written = [*map(repr, args), *(f"{option}={value!r}" for option, value in kwargs.items())]
    return f"{name}({', '.join(written)})" if written else name
