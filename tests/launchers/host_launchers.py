"""Hosts for tests: agents on this machine, joined over loopback."""

import os
import subprocess
import sys
from pathlib import Path

from tidemill.launchers.engine import CommandEngine, CommandHost, HostEngine
from tidemill.launchers.hosts import HostsLauncher
from tidemill.run import equal_lives

equal_lives.ANSWER = 60.0  # seconds, in the runner that loads this: others have the machine, too
LOOPBACK = "127.0.0.1"
# what runs as a command of its own, which takes no host for lost that a busy machine
# keeps still
PATIENT = "from tidemill.launchers import agents; agents.VOID_S = 60.0"
HAVE_GPUS = (
    "mount -t tmpfs tmpfs /proc/driver && cd /proc/driver && "
    'mkdir -p nvidia/gpus/0000:01:00.0 nvidia/gpus/0000:02:00.0 && cd / && exec "$@"'
)


class TwoHosts(HostsLauncher):
    """The runner's host and another one."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK)})


class FourTrainers(TwoHosts):
    """The runner's host has two of four trainers, the other one the others."""

    def __init__(self) -> None:
        super().__init__({"trainer-0": "runner", "trainer-1": "runner", "trainer-2": "b", "trainer-3": "b"})


class ThreeHosts(HostsLauncher):
    """The runner's host and two others."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK), "c": CommandHost(LOOPBACK)})


class OneTellsNonsense(HostsLauncher):
    """The runner's host and two others, of which the second one tells nonsense, when it
    is to. A trainer on the first one gets samples from there."""

    def __init__(self) -> None:
        super().__init__({"actor": "c", "trainer-1": "b"})

    def engine(self) -> HostEngine:
        there = ("env", f"PYTHONPATH={Path(__file__).with_name('nonsense')}")
        return CommandEngine({"b": CommandHost(LOOPBACK), "c": CommandHost(LOOPBACK, there)})


class SixHosts(HostsLauncher):
    """The runner's host, without cores for workers, and five others: one more than a host
    sends a cell to."""

    def engine(self) -> HostEngine:
        return CommandEngine({host: CommandHost(LOOPBACK) for host in "bcdef"}, cores=0)


class OtherKind(HostsLauncher):
    """A host of another kind, which has SLOW in its environment."""

    def engine(self) -> HostEngine:
        there = ("env", "SLOW=1", "TIDEMILL_NATIVE=baseline")
        return CommandEngine({"b": CommandHost(LOOPBACK, there)})


class NoTidemill(HostsLauncher):
    """A host whose Python has no Tidemill."""

    def engine(self) -> HostEngine:
        base = os.path.realpath(sys.executable)  # of which the virtual environment is made
        return CommandEngine({"b": CommandHost(LOOPBACK, ("env", "-i"), base)})


class NoCommand(HostsLauncher):
    """A host whose command is not there, beside another one."""

    def engine(self) -> HostEngine:
        return CommandEngine({"a": CommandHost(LOOPBACK), "b": CommandHost(LOOPBACK, ("no-such-shell", "b"))})


class CalledRunner(HostsLauncher):
    """A host that is called as the runner's own is."""

    def engine(self) -> HostEngine:
        return CommandEngine({"runner": CommandHost(LOOPBACK)})


class BlindHost(HostsLauncher):
    """A host that does not see the folder which HIDDEN names: another one lies there."""

    def engine(self) -> HostEngine:
        hide = 'mount -t tmpfs tmpfs "$HIDDEN" && exec "$@"'
        return CommandEngine({"b": CommandHost(LOOPBACK, ("unshare", "-m", "sh", "-c", hide, "sh"))})


def allowed() -> str:
    """Return why a host cannot be made to look otherwise here, "" where it can."""
    done = subprocess.run(
        ("unshare", "-m", "sh", "-c", HAVE_GPUS, "sh", "true"), capture_output=True, text=True
    )
    return f"nothing can be mounted over /proc/driver: {done.stderr}" if done.returncode else ""


class TwoGpus(HostsLauncher):
    """A host beside the runner's, whose driver has two GPUs."""

    def engine(self) -> HostEngine:
        here = ("env", "-u", "CUDA_VISIBLE_DEVICES", "unshare", "-m", "sh", "-c", HAVE_GPUS, "sh")
        return CommandEngine({"b": CommandHost(LOOPBACK, here)})


class OneCore(HostsLauncher):
    """A host beside the runner's, of one core."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK, cores=1)})


class TrainerOnB(TwoHosts):
    """The trainer stands on the other host."""

    def __init__(self) -> None:
        super().__init__({"trainer": "b"})


class ActorOnB(TwoHosts):
    """An actor stands on the other host, however many cores there are."""

    def __init__(self) -> None:
        super().__init__({"actor": "b"})


class ServerOnB(ThreeHosts):
    """A policy worker stands on one of the hosts, and an actor that asks it on another,
    however many cores there are."""

    def __init__(self) -> None:
        super().__init__({"actor": "b", "actor-1": "c", "server": "b"})


class BufferOnB(TwoHosts):
    """A buffer worker stands on the other host, and the first of its actors."""

    def __init__(self) -> None:
        super().__init__({"buffers": "b", "actor-0": "b", "actor-1": "runner"})


class IdleRunner(HostsLauncher):
    """A host beside the runner's, which has no cores for workers: a login node."""

    def engine(self) -> HostEngine:
        return CommandEngine({"b": CommandHost(LOOPBACK)}, cores=0)
