"""Hosts for tests: agents on this machine, joined over loopback."""

import json
import os
import sys

from tidemill.launchers.engine import CommandEngine, CommandHost, HostEngine
from tidemill.launchers.hosts import HostsLauncher

LOOPBACK = "127.0.0.1"


class TwoHosts(HostsLauncher):
    """The runner's host and another one."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK)})


class ThreeHosts(HostsLauncher):
    """The runner's host and two others."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK), "c": CommandHost(LOOPBACK)})


class NoTidemill(HostsLauncher):
    """A host whose Python has no Tidemill."""

    def engine(self) -> HostEngine:
        base = os.path.realpath(sys.executable)  # of which the virtual environment is made
        return CommandEngine({"b": CommandHost(LOOPBACK, ("env", "-i"), base)})


class BlindHost(HostsLauncher):
    """A host that does not see the folder which HIDDEN names: another one lies there."""

    def engine(self) -> HostEngine:
        hide = 'mount -t tmpfs tmpfs "$HIDDEN" && exec "$@"'
        return CommandEngine({"b": CommandHost(LOOPBACK, ("unshare", "-m", "sh", "-c", hide, "sh"))})


NETWORK = "TIDEMILL_TEST_NETWORK"


class Networked(HostsLauncher):
    """Hosts in networks of their own, which NETWORK tells: the runner's address, and of
    each other host its address and the words of the command that reaches it."""

    def engine(self) -> HostEngine:
        own, others = json.loads(os.environ[NETWORK])
        hosts = {name: CommandHost(at, tuple(command)) for name, (at, *command) in others.items()}
        return CommandEngine(hosts, own)
