"""The table of faults of runs on several hosts, for `benchmarks/cluster.py`. What dies of
a worker is timed as on one machine (`fault_rows/deaths.py`)."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import psutil
from cluster_runs import IDENTIFIED, WELL, ClusterRun, Figures, running
from fault_rows.deaths import after
from fault_rows.row import Seen
from fault_rows.runs import EXPERIMENTS, BrokenPromise, marked, processes
from fault_rows.signals import says_so
from networks import Network

Measure = Callable[[Random, bool], Iterator[Figures]]
OF_FAULTS, ROWS = f"{EXPERIMENTS}:", f"{IDENTIFIED}:rows_apart"
APART = ("--place=actor-0=h1", "--place=actor-1=h2", "--place=server=h2")


def figures(seen: Seen) -> Figures:
    """Return what was seen by one name each."""
    return {**seen.seconds, **seen.lost}


def worker_dies(experiment: str, host: str, *places: str, log: str = "") -> Measure:
    """Return what kills the worker of a host, or of the runner's that with a log,
    twice."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with running(2, OF_FAULTS + experiment, *places) as (_, run):
            run.wait_for_updates()
            for _ in range(1 if short else 2):
                time.sleep(draw.uniform(0.1, 4.0))
                worker = processes(run.main.pid)[log] if log else run.worker_on(host)
                yield figures(after(run, worker.kill))
            goes_on(run)
            yield {"nothing left": run.interrupt()}

    return measure


def goes_on(run: ClusterRun) -> None:
    """Wait until it has trained some more."""
    run.wait_for_updates(3)


def ends(run: ClusterRun) -> Figures:
    """End a run, and return what became of its steps."""
    goes_on(run)
    left = run.interrupt()
    samples, steps = run.lost()
    return {"nothing left": left, "samples lost": samples, "env steps begun lost": steps, **run.check()}


def host_killed(experiment: str) -> Measure:
    """Return what kills an agent, and with it all of its process space, and cuts the
    host off."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with running(2, experiment, *APART[: 2 if experiment == "replay" else 3]) as (network, run):
            run.wait_for_updates()
            time.sleep(draw.uniform(0.1, 4.0))

            def strike() -> None:
                network.set(cut=[1])
                run.agents()["h1"].kill()

            yield figures(after(run, strike)) | ends(run)

    return measure


def cut_off(seconds: float, experiment: str = ROWS) -> Measure:
    """Return what cuts a host off for so long."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with running(2, experiment, *APART) as (network, run):
            run.wait_for_updates()
            time.sleep(draw.uniform(0.1, 4.0))
            if seconds < 6.0:  # as long as that nobody is taken for lost
                network.set(cut=[1])
                time.sleep(seconds)
                network.set(**WELL)
                back = time.monotonic()
                goes_on(run)
                found: Figures = {"trains again": time.monotonic() - back}
                if died := run.events("died"):
                    raise BrokenPromise(f"{died[0].worker} died: {died[0].cause}")
            else:
                heal = threading.Timer(seconds, partial(network.set, **WELL))

                def strike() -> None:
                    network.set(cut=[1])
                    heal.start()

                try:
                    found = figures(after(run, strike))
                finally:
                    heal.join()
                time.sleep(2.0)
                told = {agent for agent in run.agents() if agent.startswith("h1")}
                found["its host has its share"] = "yes" if told >= {"h1"} else "no"
            yield found | ends(run)

    return measure


def slow_line(**line: float) -> Measure:
    """Return what slows the line down: nothing fails of it, and lag keeps its bound."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with running(2, "cartpole", "--place=actor-0=h1", "--place=actor-1=h2") as (network, run):
            run.await_seconds(3.0)
            seconds, found = 3.0 if short else 15.0, dict[str, float | str]()
            for name, change in (("well", {}), ("slow", line)):
                network.set(**change)
                first = run.newest()
                run.await_seconds(first["time/seconds"] + seconds)
                last = run.newest()
                took = last["time/seconds"] - first["time/seconds"]
                found[f"{name}, steps a second"] = (last["step"] - first["step"]) / took
            records = run.all_records()[-5:]
            for wanted in (
                "lag/max",
                "host/h1/round_trip_ms",
                "host/h1/lag",
                "host/runner/sent_mb_per_second",
            ):
                if values := [r[wanted] for r in records if wanted in r]:
                    found[wanted] = max(values)
            found["deaths"] = len(run.events("died"))
            network.set(**WELL)
            yield found | ends(run)

    return measure


def runner_dies(silently: bool) -> Measure:
    """Return what ends the runner's host: its processes are killed or, `silently`, stop
    and its line is cut, as where a machine has no power. The run goes on by `resume`."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        with running(2, OF_FAULTS + "apart", *APART) as (network, run):
            run.wait_for(run.checkpoints, "a checkpoint")
            time.sleep(draw.uniform(0.1, 2.0))
            agents = run.agents().values()
            own = [run.main.pid, *(each.pid for each in processes(run.main.pid).values())]
            there = {child.pid for agent in agents for child in (agent, *agent.children(recursive=True))}
            at = time.monotonic()
            if silently:
                network.set(cut=[0])
            for pid in own:
                os.kill(pid, signal.SIGSTOP if silently else signal.SIGKILL)
            run.wait_for(lambda: not there & set(marked(run.folder)), "the hosts end", 60.0, alive=False)
            ended = time.monotonic() - at
            for pid in own:
                os.kill(pid, signal.SIGKILL) if psutil.pid_exists(pid) else None
            run.wait_for(lambda: not marked(run.folder), "nothing is left", alive=False)
            network.set(**WELL)
            done = run.newest()["step"]
            kept, at = run.checkpoint().facts["steps"], time.monotonic()
            run.resume()
            run.wait_for_updates()
            again = time.monotonic() - at
            yield {"hosts end": ended, "resumed": again, "env steps undone": max(done - kept, 0)} | {
                "nothing left": run.interrupt()
            }

    return measure


def host_told_to_leave(draw: Random, short: bool) -> Iterator[Figures]:
    """SIGTERM to a host's agent."""
    with running(2, ROWS, *APART) as (_, run):
        run.wait_for_updates()
        time.sleep(draw.uniform(0.1, 4.0))
        struck = time.time()
        found = figures(after(run, run.agents()["h1"].terminate))
        # it says so before its actors have finished their samples
        found["noticed"] = run.event("told", "host h1: it was told to leave").time - struck
        causes = {event.cause for event in run.events("died")}
        if causes != {"its host h1 was told to leave (SIGTERM)"}:
            raise BrokenPromise(f"its workers died: {causes}")
        yield found | {"void": sum(event.steps for event in run.events("died"))} | ends(run)


def runner_told_to_end(draw: Random, short: bool) -> Iterator[Figures]:
    """SIGTERM to the runner: a checkpoint of its last update, and the run goes on."""
    with running(2, OF_FAULTS + "apart", *APART) as (_, run):
        run.wait_for_updates()
        time.sleep(draw.uniform(0.1, 4.0))
        at = time.monotonic()
        run.main.send_signal(signal.SIGTERM)
        run.wait_for(lambda: says_so(run), "it says that it ends", alive=False)
        noticed = time.monotonic() - at
        left = run.gone(at)
        if run.main.returncode != 128 + signal.SIGTERM:
            raise BrokenPromise(f"status {run.main.returncode}: {run.output[-400:]}")
        done, kept = max(run.updates_told()), int(run.checkpoint().facts["updates"])
        run.resume()
        run.wait_for_updates()
        if (first := run.newest()["update"]) <= kept:
            raise BrokenPromise(f"it resumed at update {first}, and had saved {kept}")
        yield {"noticed": noticed, "nothing left": left, "updates lost": done - kept}
        run.interrupt()


LACKS = {
    "NoPackage": r"host h1 has no agent.*No module named.*is Tidemill installed in its Python",
    "OtherVersion": r"host h1 has other versions.*numpy 1\.0, here.*install the same there",
    "BlindHost": r"host h1 cannot start its workers.*is not seen there, and trainer-1 must read checkpoints.*"
    r"put it where all hosts see it",
    "OneGpu": r"more GPUs are asked for than there are: trainer-0 .* needs one of its own, and host runner "
    r"has none; host h1 has 1, which trainer-1 took; host h2 has none; take hosts that have more",
    "Networked": r"host h2 does not reach host h1 at [\d.]+, ports \d+ and \d+: .* both reach [\d.]+: let "
    r"connections between the two through",
}


EQUAL = (OF_FAULTS + "equal", "--place=trainer-1=h1", "--place=actor-1=h1")


def host_lacks(launcher: str, *words: str, made: Sequence[str] = EQUAL, apart: Sequence[int] = ()) -> Measure:
    """Return what has a host that cannot do its share: one error names it. `made`: the
    experiment, and who is placed where. `words`: more of the command. `apart`: two hosts
    that do not reach each other."""

    def measure(draw: Random, short: bool) -> Iterator[Figures]:
        at = time.monotonic()
        with Network(3) as network:
            network.set(apart=[apart])
            given: dict[str, Any] = {"network": network, "launcher": launcher, "CUDA_VISIBLE_DEVICES": ""}
            with running(2, *made, *words, **given) as (_, run):
                status = run.ended(120.0)
                told = time.monotonic() - at
                left = run.gone(time.monotonic())
                said = re.sub(r"[\s│|]+", " ", run.output)
                if status != 1 or not re.search(LACKS[launcher], said):
                    raise BrokenPromise(f"status {status}: {said[-600:]}")
                if run.output.count("host h1") > 1 or (run.path / "checkpoints").exists():
                    raise BrokenPromise(f"more than one error, or it has begun: {said[-600:]}")
                yield {"refused": told, "nothing left": left}

    return measure


def few_cores(draw: Random, short: bool) -> Iterator[Figures]:
    """A host of one core has two actors: it is told before they begin, and all goes
    on."""
    with running(2, OF_FAULTS + "apart", "--place=actor=h1", "--place=server=h2",
                 launcher="OneCore") as (_, run):  # fmt: skip
        run.wait_for_updates()
        goes_on(run)
        told = run.events("told", r"host h1 has 1 core for 2 processes \(actor-0, actor-1\)")
        if [event.time < run.events("began")[0].time for event in told] != [True]:
            raise BrokenPromise(f"it was told {len(told)} times, or late: {run.output[-400:]}")
        yield {"deaths": len(run.events("died")), "nothing left": run.interrupt()}
