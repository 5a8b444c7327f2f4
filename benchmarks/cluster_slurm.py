"""Jobs of a Slurm that is brought up for them, for `benchmarks/cluster.py`: they are
queued again while they train, told that their time is over, or lose their first node.

Debian's packages slurmctld, slurmd and slurm-client are needed. Each node is a network
namespace of this machine with processes, host name and `/dev/shm` of its own. A job that
was queued again waits for some `AGAIN_S`; Slurm's own is 120.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import psutil
from cluster_faults import Measure
from cluster_runs import ClusterRun, Figures
from fault_rows.row import Impossible
from fault_rows.runs import EXPERIMENTS, BrokenPromise, marked, run_leaves
from networks import Network

from tidemill.launchers.slurm_job import JOB, SOON_S

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


class Slurm:
    """A Slurm whose nodes are the hosts of a network behind its first one, which has its
    controller, and is where jobs are submitted.

    variables: by which its commands find it
    """

    def __init__(self, network: Network) -> None:
        """Raises `Impossible`."""
        self._network = network
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-slurm-"))
        self.variables = {"SLURM_CONF": str(self._folder / "slurm.conf"), "SLURM_TIME_FORMAT": "%s"}
        others = network.addresses[1:]
        self._names = ["head", *(f"node{number}" for number in range(1, len(others) + 1))]
        hosts = "".join(
            f"{where} {name}\n" for name, where in zip(self._names, network.addresses, strict=True)
        )
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        text = CONF.format(addresses=network.addresses, folder=self._folder, again=AGAIN_S)
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
                    raise Impossible(f"Slurm is not up within {UP_S:.0f} s: {self._told()}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def _begin(self, number: int, *daemon: str) -> None:
        apart = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        with (self._folder / f"{self._names[number]}.out").open("wb") as output:
            self._nodes.append(
                subprocess.Popen(
                    [*self._network.command(number), *apart, "sh", "-c", NODE, self._names[number],
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
            [*self._network.command(0), *words], env={**os.environ, **self.variables}, capture_output=True,
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


class SlurmRun(ClusterRun):
    """A run that is a job of a Slurm; its main process is the command that follows it.

    slurm: where it is
    job: its number
    """

    slurm: Slurm
    job: str

    def of_job(self) -> set[int]:
        """Return the processes of the job, on all nodes."""
        own = {self.main.pid}
        with suppress(psutil.NoSuchProcess):  # it has ended
            own |= {process.pid for process in psutil.Process(self.main.pid).children()}
        return set(marked(self.folder)) - own

    def is_clean(self, there: set[int]) -> bool:
        """True when nothing lives of these processes, nor of any job on any node."""
        return not there & self.of_job() and not self.slurm.left()

    def trains_again(self, before: int) -> None:
        """Wait until its next life has done an update, where its newest checkpoint had
        so many of them."""
        lines = self.records()
        self.wait_for(lambda: self.records() > lines and self.newest()["update"] > before, "it trains again")


@contextmanager
def job_of(nodes: int, hosts: int, *words: str) -> Iterator[tuple[Network, SlurmRun]]:
    """A run on so many hosts of a Slurm of so many nodes, once it trains."""
    if lacking := [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        raise Impossible(f"there is no {', '.join(lacking)} here (Debian: slurmctld, slurmd, slurm-client)")
    with Network(nodes + 1) as network, tempfile.TemporaryDirectory(prefix="tidemill-slurm-run-") as folder:
        slurm = Slurm(network)
        try:
            run = SlurmRun(
                network, Path(folder), f"{EXPERIMENTS}:apart", "--hosts", str(hosts), "--cpus-per-host",
                str(CORES), *words, launch="slurm", **slurm.variables,
            )  # fmt: skip
            try:
                run.wait_for(run.newest, "its first update")
                run.slurm, run.job = slurm, (run.path / JOB).read_text().strip()
                yield network, run
            finally:
                run.kill()
        finally:
            slurm.close()


def says_that_it_ends(run: SlurmRun) -> int:
    """Return how often a run has said so, or has ended, in all the lives of its job."""
    return len(run.events("told", " has come: ")) + len(run.events("ended"))


def ends(run: SlurmRun) -> float:
    """End a job as Ctrl-C does; return the seconds until nothing of it was left on any
    node."""
    run.wait_for_updates(3)
    at = time.monotonic()
    os.killpg(run.main.pid, signal.SIGINT)
    run.wait_for(lambda: run.is_clean(run.of_job()), "nothing is left", alive=False)
    took = time.monotonic() - at
    if (status := run.ended()) != 128 + signal.SIGTERM:
        raise BrokenPromise(f"status {status}: {run.output[-400:]}")
    if left := run_leaves(run):
        raise BrokenPromise(f"it left {left}")
    return took


def queued_again(told: Callable[[SlurmRun], None], *words: str) -> Measure:
    """Return what has a job queued again that trains, by `told`: it goes on where it was,
    twice."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with job_of(2, 2, *words) as (_, run):
            for _ in range(1 if short else 2):
                time.sleep(draw.uniform(0.1, 4.0))
                there = run.of_job()
                end, said = run.slurm.job(run.job, "EndTime"), says_that_it_ends(run)
                told(run)
                at = time.monotonic()
                run.wait_for(lambda said=said: says_that_it_ends(run) > said, "it says that it ends")
                found: Figures = {"noticed": time.monotonic() - at}
                if words:  # it has a time
                    found["seconds left"] = int(end) - time.time()
                run.wait_for(lambda there=there: run.is_clean(there), "nothing is left")
                found["nothing left"] = time.monotonic() - at
                done, kept = max(run.updates_told()), int(run.checkpoint().facts["updates"])
                run.wait_for(run.of_job, "it begins again")
                begun = time.monotonic()
                run.trains_again(kept)
                again = time.monotonic()
                found |= {"queued for": begun - at, "first update": again - begun, "trains again": again - at}
                if kept + 1 not in (updates := run.updates_told()) or updates != sorted(set(updates)):
                    raise BrokenPromise(f"it saved {kept} updates, and tells {updates[-20:]}")
                yield found | {"updates lost": done - kept}
            yield {"nothing left": ends(run)}

    return measure


def requeue(run: SlurmRun) -> None:
    """Have Slurm queue a job again, as whoever runs it does for another one."""
    run.slurm.say("scontrol", "requeue", run.job)


def tell(run: SlurmRun) -> None:
    """Tell a job that its time is over soon, as Slurm does, once it has had some."""
    start = int(run.slurm.job(run.job, "StartTime"))
    time.sleep(max(start + SOON_S + 1 - time.time(), 0.0))
    run.slurm.say("scancel", "--signal=USR1", "--batch", run.job)


def wait(run: SlurmRun) -> None:
    """Wait until Slurm does so by itself."""
    said = says_that_it_ends(run)
    run.wait_for(lambda: says_that_it_ends(run) > said, "Slurm tells it", 300.0)


def first_node_dies(draw: Random, short: bool) -> Iterator[Figures]:
    """Kill a job's first node, with the runner: all others end, and one of them has the
    job queued again, which goes on once it has its nodes."""
    with job_of(3, 2) as (network, run):
        run.wait_for(run.checkpoints, "a checkpoint")
        time.sleep(draw.uniform(0.1, 2.0))
        at = time.monotonic()
        network.set(cut=[1])
        run.slurm.kill(1)
        agents = [agent.pid for agent in run.agents().values()]
        run.wait_for(lambda: not {*agents} & run.of_job(), "the hosts end")
        ended = time.monotonic() - at
        done, kept = run.newest(), run.checkpoint().facts
        run.wait_for(lambda: run.slurm.job(run.job, "Restarts") == "1", "the job is queued again")
        queued = time.monotonic() - at
        run.trains_again(int(kept["updates"]))
        yield {
            "hosts end": ended, "queued again": queued, "trains again": time.monotonic() - at,
            "env steps undone": max(done["step"] - kept["steps"], 0), "nothing left": ends(run),
        }  # fmt: skip
