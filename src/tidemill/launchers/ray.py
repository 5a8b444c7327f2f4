"""Ray as the engine: ``--launch ray`` has it give the hosts of a run. It carries no data;
a process of its own speaks to it (`ray_driver.py`)."""

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

import msgspec

from tidemill.core.errors import ConfigError, RunError
from tidemill.core.killed_processes import await_end
from tidemill.core.private_files import private
from tidemill.core.user_code_loading import environment_of_ours

if lacking := [name for name in ("ray", "zmq") if importlib.util.find_spec(name) is None]:
    raise ConfigError(f"{' and '.join(lacking)} must be installed: pip install 'tidemill[ray]'")

from tidemill.launchers.engine import START_S, HostEngine, StartedAgent
from tidemill.launchers.hosts import HostsLauncher, check_hosts
from tidemill.launchers.ray_driver import (
    PLACE_S,
    Back,
    Brought,
    BroughtHost,
    Ended,
    Failed,
    Introduce,
    Wanted,
)

_DRIVER = ("-P", "-m", "tidemill.launchers.ray_driver")
_END_S = 8.0  # seconds that Ray's driver has to give all back
_TAIL = 2000  # characters of what a dead driver wrote that are shown


class RayLauncher(HostsLauncher):
    """The launcher of hosts that a Ray cluster gives. The runner is a process of the
    cluster, on any of its hosts.

    hosts: how many, the runner's included where it has cores for workers; None: all
    address: of Ray's head, HOST:PORT; None: what RAY_ADDRESS says, or else the Ray of
        this machine; without one, the run has this machine alone
    insecure: whether a Ray without authentication may have an address of the internet
    place: see `HostsLauncher`
    """

    def __init__(
        self,
        hosts: int | None = None,
        address: str | None = None,
        insecure: bool = False,
        place: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(place)
        check_hosts(hosts)
        if address is not None and not isinstance(address, str):
            raise ConfigError(f"--ray-address {address!r}: it must be HOST:PORT")
        self._wanted = Wanted(address or "", hosts, bool(insecure))

    def engine(self) -> HostEngine:
        return RayEngine(self._wanted)


class RayEngine(HostEngine):
    """The engine that has Ray bring hosts."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._driver: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._ended: dict[str, str] = {}
        self._back: dict[str, StartedAgent] = {}
        self._unread = b""

    def start(self, logs: Path | None) -> dict[str, StartedAgent]:
        self._log = logs / "ray.log" if logs is not None else None
        variables = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        with open(self._log or os.devnull, "wb", opener=private) as log:
            self._driver = subprocess.Popen(
                [sys.executable, *_DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment_of_ours(**variables),
                start_new_session=True,  # Ctrl-C is the runner's to handle
            )
        self._write(self._wanted)
        deadline = monotonic() + START_S + PLACE_S
        while not (lines := self._lines(max(deadline - monotonic(), 0.0))):
            if gone := self._gone():
                raise RunError(f"--launch ray: {gone}")
            if monotonic() > deadline:
                raise RunError(
                    f"--launch ray: Ray gave no hosts within {START_S + PLACE_S:.0f} s; is it well?"
                )
        told = msgspec.json.decode(lines[0], type=Failed | Brought)
        if isinstance(told, Failed):
            raise RunError(f"--launch ray: {told.why}")
        if told.alone:
            print(
                "--launch ray: there is no Ray here, and neither RAY_ADDRESS nor --ray-address: the run has "
                "this machine alone",
                file=sys.stderr,
            )
        self.own_address, self.own_cores, self.own_gpus = told.address, told.cores, told.gpus
        return {name: self._started(host) for name, host in told.hosts.items()}

    @property
    def restarts(self) -> bool:  # type: ignore[override]
        """Whether hosts may come back: as long as there is who speaks to Ray."""
        return not self._gone()

    def introduce(self, host: str, introduction: bytes) -> None:
        self._write(Introduce(host, introduction.decode()))

    def ended(self, host: str) -> str:
        self._read()
        return self._ended.get(host) or self._gone()

    def again(self, host: str) -> StartedAgent | None:
        self._read()
        if (agent := self._back.pop(host, None)) is not None:
            del self._ended[host]
        return agent

    def _read(self) -> None:
        for line in self._lines(0.0):
            told = msgspec.json.decode(line, type=Ended | Back)
            if isinstance(told, Ended):
                self._ended[told.host] = told.how
                self._back.pop(told.host, None)  # it has ended before it was asked for
            else:
                self._back[told.name] = self._started(told.host)

    @staticmethod
    def _started(host: BroughtHost) -> StartedAgent:
        return StartedAgent(host.key.encode("ascii"), host.address, host.cores, host.gpus, host.version)

    def close(self) -> None:
        if self._driver is None:
            return
        for pipe in (self._driver.stdin, self._driver.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._driver.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            await_end(self._driver, "the process that speaks to Ray")
        if self._log is not None and self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()
        self._driver = None

    def _write(self, message: Wanted | Introduce) -> None:
        assert self._driver is not None and self._driver.stdin is not None
        with contextlib.suppress(OSError):  # it died, and `ended` says so
            self._driver.stdin.write(msgspec.json.encode(message) + b"\n")
            self._driver.stdin.flush()

    def _lines(self, seconds: float) -> list[bytes]:
        """Return the whole lines that the driver has told, waiting so long for one."""
        assert self._driver is not None and self._driver.stdout is not None
        output, poll = self._driver.stdout.fileno(), select.poll()
        poll.register(output, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._unread += os.read(output, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        return lines

    def _gone(self) -> str:
        """Return how the driver has ended, "" as long as it lives."""
        assert self._driver is not None
        if (code := self._driver.poll()) is None:
            return ""
        text = self._log.read_text(errors="replace") if self._log is not None and self._log.exists() else ""
        return f"the process that speaks to Ray ended with status {code}; {text[-_TAIL:].strip()}"
