"""Jobs of a Slurm that is brought up for them, for `benchmarks/cluster.py`: they are
queued again while they train, told that their time is over, or lose their first node.
See `slurm_nodes`.
"""

import os
import signal
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
from slurm_nodes import CORES, NotUp, Slurm, lacking

from tidemill.launchers.slurm_job import JOB, SOON_S


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
    if why := lacking():
        raise Impossible(why)
    with Network(nodes + 1) as network, tempfile.TemporaryDirectory(prefix="tidemill-slurm-run-") as folder:
        try:
            slurm = Slurm(network.addresses, network.command)
        except NotUp as error:
            raise Impossible(str(error)) from None
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
