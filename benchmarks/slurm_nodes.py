"""A Slurm that is brought up on this machine for a benchmark, or a test, and leaves
nothing.

Debian's packages slurmctld, slurmd and slurm-client are needed. Each node is a network
namespace of this machine with processes, host name and `/dev/shm` of its own. A job that
was queued again waits for some `AGAIN_S`; Slurm's own is 120.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

AGAIN_S = 5  # seconds (cred_expire) that a job waits which was queued again
UP_S = 60.0  # seconds that Slurm has to be up
CORES = 2  # that each node says it has
NODE = """
hostname "$0"
mount -t tmpfs shm /dev/shm
mount --bind "$1" /etc/hosts
shift
"$@" </dev/null &
cat
"""
"""What the first process of a node does: it ends with its standard input, and with it all
that is there, so that nothing is left, however its user ends."""
CONF = """
ClusterName=tidemill
SlurmctldHost=head({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={again}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
"""


class NotUp(Exception):
    """There is no Slurm here, or it did not come up."""


def lacking() -> str:
    """Return which programs of Slurm's are not here, in words; "" where all are."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if not missing:
        return ""
    return f"there is no {', '.join(missing)} here (Debian: slurmctld, slurmd, slurm-client)"


class Slurm:
    """A Slurm whose nodes are the hosts of a network behind its first one, which has its
    controller, and is where jobs are submitted.

    addresses: of these hosts, the controller's first
    command: function that returns the words before a command that runs on one of them
    variables: by which its commands find it
    """

    def __init__(self, addresses: Sequence[str], command: Callable[[int], Sequence[str]]) -> None:
        """Raises `NotUp`."""
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-slurm-"))
        self.variables = {"SLURM_CONF": str(self._folder / "slurm.conf"), "SLURM_TIME_FORMAT": "%s"}
        others = addresses[1:]
        self._names = ["head", *(f"node{number}" for number in range(1, len(others) + 1))]
        hosts = "".join(f"{where} {name}\n" for name, where in zip(self._names, addresses, strict=True))
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        text = CONF.format(addresses=addresses, folder=self._folder, again=AGAIN_S)
        for name, where in zip(self._names[1:], others, strict=True):
            text += f"NodeName={name} NodeAddr={where} CPUs={CORES} State=UNKNOWN\n"
            (self._folder / name).mkdir()
        (self._folder / "slurm.conf").write_text(f"{text}PartitionName=all Nodes=ALL Default=YES State=UP\n")
        (self._folder / "state").mkdir()
        self._nodes = list[subprocess.Popen[bytes]]()
        try:
            self._begin(0, "slurmctld", "-D", "-c")
            for number, name in enumerate(self._names[1:], 1):
                self._begin(number, "slurmd", "-D", "-N", name)
            until = time.monotonic() + UP_S
            while (
                self.say("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
                != self._names[1:]
            ):
                if time.monotonic() > until:
                    raise NotUp(f"Slurm is not up within {UP_S:.0f} s: {self._told()}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def _begin(self, number: int, *daemon: str) -> None:
        apart = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        with (self._folder / f"{self._names[number]}.out").open("wb") as output:
            self._nodes.append(
                subprocess.Popen(
                    [*self._command(number), *apart, "sh", "-c", NODE, self._names[number],
                     str(self._folder / "hosts"), *daemon],
                    stdin=subprocess.PIPE, stdout=output, stderr=output,
                    env={**os.environ, **self.variables}, start_new_session=True,
                )
            )  # fmt: skip

    def _told(self) -> str:
        files = [*self._folder.glob("*.out"), *self._folder.glob("*.log")]
        return " ".join(file.read_text(errors="replace")[-300:] for file in files)

    def say(self, *words: str) -> str:
        """Return what a command of Slurm's says, "" where it fails."""
        done = subprocess.run(
            [*self._command(0), *words], env={**os.environ, **self.variables}, capture_output=True,
            text=True, timeout=UP_S,
        )  # fmt: skip
        return "" if done.returncode else done.stdout

    def job(self, number: str, what: str) -> str:
        """Return what Slurm says of a job by that name ("JobState")."""
        found = re.search(rf"\b{what}=(\S+)", self.say("scontrol", "--oneliner", "show", "job", number))
        return found[1] if found else ""

    def kill(self, number: int) -> None:
        """Kill a node, with all that is on it."""
        self._nodes[number].kill()

    def left(self) -> str:
        """Return what jobs have left on the nodes that live, in words."""
        found = list[str]()
        for node in self._nodes[1:]:
            with suppress(psutil.Error, OSError, ValueError):  # one that is dead has none
                (first,) = psutil.Process(node.pid).children()
                found += os.listdir(f"/proc/{first.pid}/root/dev/shm")
                found += [
                    " ".join(each.cmdline())[:200]
                    for each in first.children(recursive=True)
                    if each.name() not in ("cat", "slurmd") and each.status() != "zombie"
                ]
        return ", ".join(found)

    def close(self) -> None:
        """Leave nothing of it."""
        for node in self._nodes:
            with node:
                node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
