"""A launcher whose hosts have networks of their own: agents on this machine.

--launch benchmarks/networked.py:Networked  # with `settings` in the environment
"""

import json
import os
from typing import Protocol

from tidemill.launchers.engine import CommandEngine, CommandHost, HostEngine
from tidemill.launchers.hosts import HostsLauncher

NETWORK = "TIDEMILL_TEST_NETWORK"


class _Network(Protocol):
    """A `Network` of benchmarks/networks.py."""

    addresses: list[str]

    def command(self, host: int) -> tuple[str, ...]: ...


def settings(network: _Network, *words: str) -> dict[str, str]:
    """Return the environment by which `Networked` knows the hosts of a network: the
    runner's is the first, the others are h1, h2 and so on. `words` are put before their
    agents' commands, too."""
    own, *others = network.addresses
    hosts = {f"h{i}": [where, *network.command(i), *words] for i, where in enumerate(others, 1)}
    return {NETWORK: json.dumps([own, hosts])}


class Networked(HostsLauncher):
    """The runner's host and others, which the environment tells (`settings`)."""

    def engine(self) -> HostEngine:
        """See `HostsLauncher`."""
        own, others = json.loads(os.environ[NETWORK])
        hosts = {name: CommandHost(at, tuple(command)) for name, (at, *command) in others.items()}
        return CommandEngine(hosts, own)
