"""The launchers that are known by a name of one word."""

from tidemill.api.launcher import Launcher
from tidemill.core.named_class import make, named_class

LAUNCHERS = {
    "inline": "tidemill.launchers.inline:InlineLauncher",
    "threads": "tidemill.launchers.threads:ThreadsLauncher",
    "processes": "tidemill.launchers.processes:ProcessesLauncher",
}
"""Module and class of each. A new one is a line here."""


def make_launcher(launch: str | type[Launcher]) -> Launcher:
    """Return the launcher that a user has chosen: by name, "module:NAME", "FILE.py:NAME",
    or as a class. Raises `TidemillError` for one that there is not, or not here."""
    return make(named_class(launch, Launcher, LAUNCHERS, "--launch"), "--launch")
