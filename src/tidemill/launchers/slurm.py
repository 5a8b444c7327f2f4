"""Slurm as the engine: ``--launch slurm`` shares the workers of an experiment among the
nodes of an allocation; outside of one, a batch job is submitted that does
(`slurm_job.py`). Each other node's agent is started by `srun`, and ends with it.
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tidemill.core.errors import ConfigError, RunError

if importlib.util.find_spec("zmq") is None:
    raise ConfigError("pyzmq must be installed: pip install 'tidemill[hosts]'")

from tidemill.launchers.engine import RUNNER, CommandEngine, CommandHost, HostEngine
from tidemill.launchers.hosts import HostsLauncher, check_hosts

LEAST_LEFT_S = 60
"""Seconds that an allocation must have left for a run to begin."""
_ANSWER_S = 30.0  # seconds that a command of Slurm has


class SlurmLauncher(HostsLauncher):
    """The launcher of the nodes of a Slurm allocation. The runner is on one of them, or
    where the allocation was asked for.

    hosts: how many nodes; None: all of the allocation
    place: see `HostsLauncher`
    """

    def __init__(self, hosts: int | None = None, place: Mapping[str, str] | None = None) -> None:
        super().__init__(place)
        check_hosts(hosts)
        if "SLURM_JOB_ID" not in os.environ:
            raise ConfigError(
                "--launch slurm: this is no allocation of Slurm's (SLURM_JOB_ID is not set): `tidemill train "
                "(or resume) … --launch slurm --hosts N` submits a job, from where `sbatch` is; or begin in "
                "`salloc`"
            )
        self._hosts = hosts

    def engine(self) -> HostEngine:
        job, nodes = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NODELIST")
        if nodes is None:
            raise RunError(
                f"--launch slurm: job {job} has no nodes (SLURM_JOB_NODELIST is not set, though SLURM_JOB_ID "
                "is); begin within an allocation (`salloc`), or unset SLURM_JOB_ID to submit a job"
            )
        left = seconds_of(slurm("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip())
        if left is not None and left < LEAST_LEFT_S:
            raise RunError(
                f"--launch slurm: allocation {job} ends in {left} s, and a run wants {LEAST_LEFT_S} at "
                "least; ask for more with --time"
            )
        cores = cores_of_nodes(
            slurm("scontrol", "show", "hostnames", nodes).split(),
            os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""),
        )
        if self._hosts is not None and self._hosts > len(cores):
            raise RunError(
                f"--launch slurm: --hosts {self._hosts}, and allocation {job} has {len(cores)}: "
                f"{', '.join(cores)}"
            )
        own = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        names = sorted(cores, key=lambda name: name != own)[: self._hosts]
        hosts = {
            # a node may be called as the host that the run was begun on is
            f"{node}-node" if node == RUNNER else node: CommandHost(
                address_of(node), srun(node, cores[node]), cores=cores[node]
            )
            for node in names
            if node != own
        }
        address = own_address(next(iter(hosts.values())).address) if hosts else "127.0.0.1"
        return CommandEngine(hosts, address, cores.get(own, 0))


def slurm(*words: str) -> str:
    """Return what a command of Slurm's says. Raises `RunError`."""
    if shutil.which(words[0]) is None:
        raise RunError(f"--launch slurm: there is no `{words[0]}` here; begin where Slurm's commands are")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"--launch slurm: `{words[0]}` has not answered for {_ANSWER_S:.0f} s") from None
    if done.returncode:
        raise RunError(f"--launch slurm: `{' '.join(words)}` says: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def srun(node: str, cores: int) -> tuple[str, ...]:
    """Return the command that runs another on a node of the allocation, with all that the
    allocation has there."""
    return (
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--cpus-per-task={cores}", "--mem=0",
        "--overlap", "--kill-on-bad-exit=0", "--mpi=none", "--quiet",
    )  # fmt: skip


def cores_of_nodes(nodes: list[str], counts: str) -> dict[str, int]:
    """Return how many cores of each node are the job's, of what Slurm says of all:
    "8(x2),4". Raises `RunError`."""
    each = list[int]()
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        each += [int(count)] * int(times or 1)
    if len(each) != len(nodes):
        raise RunError(
            f"--launch slurm: SLURM_JOB_CPUS_PER_NODE={counts!r} does not tell the cores of "
            f"{len(nodes)} nodes"
        )
    return dict(zip(nodes, each, strict=True))


def seconds_of(left: str) -> int | None:
    """Return the seconds of a time as Slurm writes it ("2-03:00:00", "12:30"); None for
    one without an end."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def address_of(node: str) -> str:
    """Return the address of a node. Raises `RunError`."""
    found = re.search(r"\bNodeAddr=(\S+)", slurm("scontrol", "--oneliner", "show", "node", node))
    name = found[1] if found else node
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise RunError(f"--launch slurm: node {node} is at {name!r}, which has no address: {error}") from None


def own_address(other: str) -> str:
    """Return the address by which another host reaches this one: that from which this one
    would call it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # nothing is sent
        return str(probe.getsockname()[0])
