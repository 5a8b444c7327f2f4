"""Launchers whose hosts have networks of their own: agents on this machine.

--launch benchmarks/networked.py:Networked  # with `settings` in the environment
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Protocol

from tidemill.core.errors import RunError
from tidemill.launchers.engine import CommandEngine, CommandHost, HostEngine, StartedAgent
from tidemill.launchers.hosts import HostsLauncher

NETWORK = "TIDEMILL_TEST_NETWORK"
BACK_S = 3.0  # seconds after the end of an agent that `Returning` begins another


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
        return self.bring(hosts, own)

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """Return what brings these hosts to the runner's, which has this address."""
        return CommandEngine(hosts, own)


class OneCoreEach(Networked):
    """The same, where each host has one core of this machine's, in turn, and the runner's
    none for workers but its trainer."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        cores = sorted(os.sched_getaffinity(0))
        with_core = {
            name: replace(host, command=(*host.command, "taskset", "-c", str(cores[i % len(cores)])))
            for i, (name, host) in enumerate(hosts.items())
        }
        return CommandEngine(with_core, own, cores=0)


class Returning(Networked):
    """The same, and hosts whose agents have ended come back."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        return _Returning(hosts, own)


class ReturningOnceTold(Networked):
    """The same, but they come back only once there is a file `back` where the run was
    begun."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        return _ReturningOnceTold(hosts, own)


class NoPackage(Networked):
    """The same, where Tidemill is not installed for the Python of h1."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        base = os.path.realpath(sys.executable)  # of which the virtual environment is made
        there = replace(hosts["h1"], command=(*hosts["h1"].command, "env", "-i"), python=base)
        return CommandEngine({**hosts, "h1": there}, own)


class OtherVersion(Networked):
    """The same, where h1 has another numpy, by what is written down there."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        packages = Path(os.environ["TMPDIR"]).with_name("packages")
        (packages / "numpy-1.0.dist-info").mkdir(parents=True)
        (packages / "numpy-1.0.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 1.0\n")
        words = (*hosts["h1"].command, "env", f"PYTHONPATH={packages}")
        return CommandEngine({**hosts, "h1": replace(hosts["h1"], command=words)}, own)


class BlindHost(Networked):
    """The same, where h1 does not see the run's folder."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        hide = f'mount -t tmpfs tmpfs "{Path(os.environ["TMPDIR"]).parent}" && exec "$@"'
        words = (*hosts["h1"].command, "unshare", "-m", "sh", "-c", hide, "sh")
        return CommandEngine({**hosts, "h1": replace(hosts["h1"], command=words)}, own)


class OneGpu(Networked):
    """The same, where h1 has a GPU, by what its driver tells."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        has = 'mount -t tmpfs tmpfs /proc/driver && mkdir -p /proc/driver/nvidia/gpus/0 && exec "$@"'
        words = (
            *hosts["h1"].command,
            "env",
            "-u",
            "CUDA_VISIBLE_DEVICES",
            "unshare",
            "-m",
            "sh",
            "-c",
            has,
            "sh",
        )
        return CommandEngine({**hosts, "h1": replace(hosts["h1"], command=words)}, own)


class OneCore(Networked):
    """The same, where one core of h1 is the run's."""

    def bring(self, hosts: dict[str, CommandHost], own: str) -> HostEngine:
        """See `Networked`."""
        return CommandEngine({**hosts, "h1": replace(hosts["h1"], cores=1)}, own)


class _Returning(HostEngine):
    """An engine that starts another agent on a host whose own has ended, some seconds
    later."""

    restarts = True

    def __init__(self, hosts: Mapping[str, CommandHost], address: str) -> None:
        self.own_address, self._hosts = address, hosts
        self._engines = {name: self._make(name) for name in hosts}
        self._back_at: dict[str, float] = {}
        self._coming: dict[str, threading.Thread] = {}
        self._came: dict[str, tuple[CommandEngine, StartedAgent]] = {}

    def _make(self, name: str) -> CommandEngine:
        return CommandEngine({name: self._hosts[name]}, self.own_address)

    def start(self, logs: Path | None) -> dict[str, StartedAgent]:
        return {name: engine.start(None)[name] for name, engine in self._engines.items()}

    def introduce(self, host: str, introduction: bytes) -> None:
        self._engines[host].introduce(host, introduction)

    def ended(self, host: str) -> str:
        return self._engines[host].ended(host)

    def again(self, host: str) -> StartedAgent | None:
        if host in self._came:
            old, (self._engines[host], agent) = self._engines[host], self._came.pop(host)
            del self._coming[host], self._back_at[host]
            old.close()
            return agent
        gone = self.ended(host) and host not in self._coming
        if gone and monotonic() >= self._back_at.setdefault(host, monotonic() + BACK_S):
            self._coming[host] = threading.Thread(target=self._bring, args=(host,), daemon=True)
            self._coming[host].start()
        return None

    def _bring(self, host: str) -> None:
        engine = self._make(host)
        with suppress(RunError):  # an agent that told no key is none
            self._came[host] = engine, engine.start(None)[host]

    def close(self) -> None:
        for thread in self._coming.values():
            thread.join(10.0)
        for engine in (*self._engines.values(), *(engine for engine, _ in self._came.values())):
            engine.close()


class _ReturningOnceTold(_Returning):
    def again(self, host: str) -> StartedAgent | None:
        return super().again(host) if Path("back").exists() else None
