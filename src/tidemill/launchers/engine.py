"""Engines: where hosts come from. An engine starts an agent on each, and says why one has
ended; it carries nothing of the run."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, NamedTuple

from tidemill.core.errors import DeadlineError, RunError
from tidemill.core.killed_processes import await_end
from tidemill.core.private_files import private
from tidemill.core.user_code_loading import environment_of_ours

AGENT = ("-P", "-m", "tidemill.launchers.host")
"""What a host's Python is given, and the host's name behind it."""
RUNNER = "runner"
"""The name of the runner's own host."""
LEFT = 75
"""The status with which an agent ends that was told to leave the run."""
START_S = 60.0
"""Seconds that an agent has to tell its key."""
_END_S = 3.0  # seconds that an agent has to end once its standard input has
_TAIL = 2000  # characters of what a dead agent wrote that are shown


class StartedAgent(NamedTuple):
    """An agent that an engine has started.

    key: its public key
    address: the one by which other hosts reach its host
    cores, gpus: of its host that are the run's; None: all that it may use
    version: which Tidemill it is of (`own_version`), as it told with its key; "" where
        it told none
    """

    key: bytes
    address: str
    cores: int | None = None
    gpus: int | None = None
    version: str = ""


def at_most(given: int | None, there: int) -> int:
    """Return how many of the cores or GPUs that are there are the run's."""
    return there if given is None else min(given, there)


class HostEngine(ABC):
    """An engine brings the hosts of a run, other than the runner's. Each host runs an
    agent (`launchers/host.py`), which tells its public key first, and is then introduced
    to the runner.

    own_address: the address by which other hosts reach the runner's, once it has started
    own_cores, own_gpus: of the runner's host that are the run's; None: all that it may
        use, of which a host without cores for workers has no GPU
    restarts: whether it starts another agent on a host whose own has ended (`again`)
    """

    own_address = "127.0.0.1"
    own_cores: int | None = None
    own_gpus: int | None = None
    restarts = False

    @abstractmethod
    def start(self, logs: Path | None) -> dict[str, StartedAgent]:
        """Start an agent on every host; return them by the hosts' names. `logs`: folder
        for what they write; None: it is kept for `ended` alone. Raises `RunError`."""

    @abstractmethod
    def introduce(self, host: str, introduction: bytes) -> None:
        """Tell an agent who it is and how it calls the runner: a line of JSON."""

    @abstractmethod
    def ended(self, host: str) -> str:
        """Return how the host's agent has ended, "" as long as it lives."""

    def again(self, host: str) -> StartedAgent | None:
        """Return the agent that it has started on a host whose agent had ended, once it
        has: only once, and None where it does no such thing."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End what is left of every agent."""


def how_it_ended(code: int, output: bytes) -> str:
    """Return how an agent has ended, of its status and what it wrote."""
    how = f"its agent was killed by signal {-code}" if code < 0 else f"its agent ended with status {code}"
    tail = output[-_TAIL:].decode(errors="replace").strip()
    return how + (f"; its last output:\n{tail}" if tail else "")


@dataclass(frozen=True)
class CommandHost:
    """A host that a command reaches.

    address: the one by which other hosts reach it
    command: what is put before the agent's command: ("ssh", "b"), say, or ("ip", "netns",
        "exec", "b")
    python: the host's Python, in which Tidemill is installed
    cores: of it that are the run's; None: all that it may use
    """

    address: str
    command: Sequence[str] = ()
    python: str = sys.executable
    cores: int | None = None


class CommandEngine(HostEngine):
    """An engine that starts agents by commands. An agent ends when its standard input
    does: when this process is gone, and when a line to it breaks."""

    def __init__(
        self, hosts: Mapping[str, CommandHost], address: str = "127.0.0.1", cores: int | None = None
    ) -> None:
        """`address`, `cores`: of the runner's host (see `HostEngine`)."""
        self._hosts, self.own_address, self.own_cores = dict(hosts), address, cores
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._written: dict[str, IO[bytes]] = {}  # by agents

    def start(self, logs: Path | None) -> dict[str, StartedAgent]:
        for name, host in self._hosts.items():
            if logs is None:
                self._written[name] = tempfile.TemporaryFile()  # noqa: SIM115  (until it is closed)
            else:
                self._logs[name] = logs / f"host-{name}.log"
                self._written[name] = open(self._logs[name], "w+b", opener=private)  # noqa: SIM115
            words = [*host.command, host.python, *AGENT, name]
            try:
                self._agents[name] = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._written[name],
                    env=environment_of_ours(),
                    start_new_session=True,  # Ctrl-C is the runner's to handle
                )
            except OSError as error:
                raise RunError(
                    f"host {name} cannot be reached: its command {words[0]} cannot be run "
                    f"({error.strerror}); it is: {shlex.join(words)}"
                ) from None
        deadline = monotonic() + START_S
        return {
            name: StartedAgent(key, host.address, host.cores, version=version)
            for name, host in self._hosts.items()
            for key, version in [self._told(name, deadline)]
        }

    def _told(self, name: str, deadline: float) -> tuple[bytes, str]:
        """Return what the agent tells first: its key, and its version."""
        output, line = self._agents[name].stdout, b""
        assert output is not None
        poll = select.poll()  # `select` knows no descriptor above 1023
        poll.register(output, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(deadline - monotonic(), 0.0) * 1000):
                words = [*self._hosts[name].command, self._hosts[name].python, *AGENT, name]
                raise RunError(
                    f"host {name} did not tell its key within {START_S:.0f} s; try its command by hand: "
                    f"{shlex.join(words)}"
                )
            part = os.read(output.fileno(), 1 << 12)
            line += part
            if not part or len(line) > 1 << 16:
                break
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            told = json.loads(line)
            return str(told["key"]).encode("ascii"), str(told.get("tidemill", ""))
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has hung up, and ends
            self._agents[name].wait(1.0)
        how = self.ended(name) or f"it said {line[:200]!r}"
        raise RunError(f"host {name} has no agent: {how}; is Tidemill installed in its Python, with pyzmq?")

    def introduce(self, host: str, introduction: bytes) -> None:
        pipe = self._agents[host].stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # it died: it says so by `ended`
            pipe.write(introduction + b"\n")
            pipe.flush()

    def ended(self, host: str) -> str:
        code = self._agents[host].poll()
        if code is None:
            return ""
        written = self._written[host].fileno()
        last = max(os.fstat(written).st_size - 4 * _TAIL, 0)  # a character has 4 bytes at most
        return how_it_ended(code, os.pread(written, 4 * _TAIL, last))

    def terminate(self) -> None:
        """Tell the agents to leave the run."""
        for agent in list(self._agents.values()):
            agent.terminate()

    def close(self) -> None:
        agents = dict(self._agents)  # of a stand-in another thread may close them, too
        for agent in agents.values():
            for pipe in (agent.stdin, agent.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
        deadline, held = monotonic() + _END_S, list[DeadlineError]()
        for name, agent in agents.items():
            try:
                agent.wait(max(deadline - monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                try:
                    await_end(agent, f"the agent of host {name}")
                except DeadlineError as error:
                    held.append(error)
            if (written := self._written.pop(name, None)) is not None:  # not closed by another thread
                written.close()
            if (log := self._logs.get(name)) is not None and log.exists() and not log.stat().st_size:
                log.unlink()
        self._agents.clear()
        if held:
            raise held[0]
