"""Whole runs on hosts with networks of their own, for `benchmarks/cluster.py`: their
experiments, hosts that sleep, and training under faults."""

import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import identified
import psutil
from fault_rows.runs import BrokenPromise, Run, marked
from networked import settings
from networks import Network
from sleeping import Sleeping

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
)
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder

LAUNCHERS = Path(__file__).with_name("networked.py")
IDENTIFIED = Path(identified.__file__)
OWN_MEMORY = 'mount -t tmpfs shm /dev/shm && exec "$@"'
OWN_PROCESSES = (
    *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
    *("sh", "-c", OWN_MEMORY, "sh"),
)
AGENT, WORKER = "tidemill.launchers.host", "tidemill.launchers.entry"
Figures = dict[str, float | str]
"""What was measured, by name, with a unit where that is not seconds; and remarks."""
SLEEP_S, SAMPLE = 0.05, 16  # seconds of a step, rows of a lane in a sample
STARTUP_S = 4.0  # of training that do not count
PATIENT_S = 180.0  # seconds after which what does not come counts as never
LEFT_S = 60.0  # seconds that a run has to leave nothing


class SlowSleeping(Sleeping):
    """A step waits 50 ms."""

    def __init__(self) -> None:
        """See `Sleeping`."""
        super().__init__(SLEEP_S)


def sleeping() -> Experiment:
    """Return the experiment of hosts that sleep: HOSTS actors of LANES lanes."""
    hosts, lanes = int(os.environ["HOSTS"]), int(os.environ["LANES"])
    actors = Actors(
        environment=Gymnasium(make=f"{__file__}:SlowSleeping", threads=lanes),
        count=hosts,
        lanes=lanes,
        slots=2,
        agents=(AgentSpec(sample_steps=SAMPLE),),
    )
    rows = SAMPLE * lanes * hosts
    trainer = Trainer(algorithm=PPO(minibatch_size=min(rows, 4096), epochs=1), batch_size=rows)
    return Experiment(
        name="sleeping",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": trainer},
        limits=Limits(),
    )


def cartpole() -> Experiment:
    """Return CartPole, learnt by PPO until it stands."""
    return Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"),
                count=4,
                lanes=16,
                slots=2,
                agents=(AgentSpec(sample_steps=128),),
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=2048, epochs=4), max_policy_lag=4),
        },
        limits=Limits(),
    )


def four_trainers() -> Experiment:
    """Return CartPole with four equal trainers, each with its actor."""
    made = cartpole()
    workers = {name: group.replace(count=4) for name, group in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def replay() -> Experiment:
    """Return CartPole with a replay memory, whose every step is counted."""
    return Experiment(
        name="replay",
        policies={"policy": QNetwork(hidden=(64, 64))},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id="CartPole-v1"), lanes=8, count=4),
            "trainer": ReplayTrainer(
                algorithm=DQN(), buffer=Replay(capacity=50_000, warm_up=1000), batch_size=64, ratio="1/4"
            ),
        },
        limits=Limits(),
    )


class ClusterRun(Run):
    """A run on the hosts of a network, the first of which is its runner's. Each other one
    has processes and shared memory of its own.

    words: of its command
    launcher: of those in networked.py
    launch: another launcher, of the runner's host or with its own way to the others
    around: words before the commands of its runner and of its agents
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        experiment: str,
        *words: str,
        launcher: str = "Networked",
        launch: str = "",
        around: tuple[Sequence[str], Sequence[str]] = ((), ()),
        **variables: str,
    ) -> None:
        of_runner, of_agents = around
        self.before = [*network.command(0), *of_runner]
        self.variables = {**variables, **settings(network, *of_agents, *OWN_PROCESSES)}
        self._places = [word for word in words if word.startswith("--place")]
        place = f"{__file__}:{experiment}" if ":" not in experiment else experiment
        super().__init__(place, launch or f"{LAUNCHERS}:{launcher}", folder, folder / "run", None, *words)

    def resume(self) -> None:
        """Go on with it on the same hosts, once its main process is gone."""
        self.main.wait(LEFT_S)
        self._start("resume", str(self.path), "--launch", self.launch, *self._places)

    def wait_for(
        self, holds: Callable[[], Any], what: str, seconds: float = PATIENT_S, alive: bool = True
    ) -> Any:
        """Wait as any run does, longer."""
        return super().wait_for(holds, what, max(seconds, PATIENT_S), alive)

    def all_records(self) -> list[dict[str, float]]:
        """Return its metrics so far."""
        path = self.path / "metrics.jsonl"
        return list(read_metrics(self.path)) if path.exists() and path.stat().st_size else []

    def await_seconds(self, seconds: float) -> None:
        """Wait until it has trained for so long."""
        self.wait_for(
            lambda: self.newest().get("time/seconds", 0.0) >= seconds, f"{seconds:.0f} s of training",
            seconds + PATIENT_S,
        )  # fmt: skip

    def left(self) -> list[psutil.Process]:
        """Return what still lives of it on any host."""
        found = []
        for pid in marked(self.folder):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def agents(self) -> dict[str, psutil.Process]:
        """Return the agents of its hosts, by their names."""
        found = {}
        for process in self.left():
            with suppress(psutil.Error):  # it has ended meanwhile
                words = process.cmdline()
                if AGENT in words and words[0] != "unshare" and words[0] != "nsenter":
                    found[words[-1]] = process
        return found

    def worker_on(self, host: str) -> psutil.Process:
        """Return the process of the one worker of a host."""

        def look() -> list[psutil.Process]:
            found = []
            agents = self.agents()
            for name in (host, *(name for name in agents if name.startswith(f"{host}#"))):
                with suppress(psutil.Error, KeyError, OSError):
                    # one that waits for the next life has no output yet
                    found += [
                        child
                        for child in agents[name].children()
                        if WORKER in child.cmdline() and os.readlink(f"/proc/{child.pid}/fd/1") != os.devnull
                    ]
            return found

        found = self.wait_for(look, f"{host} has a worker")
        if len(found) > 1:
            raise BrokenPromise(f"{host} has {len(found)} worker processes")
        return found[0]  # type: ignore[no-any-return]

    def interrupt(self) -> float:
        """Have it end as Ctrl-C does; return the seconds until nothing of it was left."""
        start = time.monotonic()
        if self.main.poll() is None:
            os.killpg(self.main.pid, signal.SIGINT)
        return self.gone(start)

    def gone(self, start: float) -> float:
        """Wait until nothing is left of it on any host; return the seconds since
        `start`."""
        self.wait_for(
            lambda: self.main.poll() is not None and not marked(self.folder), "nothing is left", LEFT_S, False
        )
        return time.monotonic() - start

    def summary(self) -> Mapping[str, Any]:
        """Return how it ended."""
        return RunFolder(self.path).read("summary.json")  # type: ignore[no-any-return]

    def lost(self) -> tuple[int, int]:
        """Return how many samples are lost, and how many env steps of others, by what
        happened. Raises `BrokenPromise` where its metrics say otherwise."""
        samples, begun = 0, dict[tuple[str, int], int]()
        for event in read_events(self.path):
            if event.what in ("died", "lost"):
                samples += event.samples
                begun[event.worker, event.life] = event.steps
        found, records = (samples, sum(begun.values())), self.all_records()
        # the newest: what was begun may turn out to be less
        newest = next((r for r in reversed(records) if "lost/steps" in r), {})
        told = tuple(newest.get(f"lost/{what}", 0) for what in ("samples", "steps"))
        if self.main.poll() is not None and told != found:
            raise BrokenPromise(f"lost are {found}, and metrics say {told}")
        return found

    def check(self) -> dict[str, float]:
        """Return what became of its env steps, once it has ended: of those with a replay
        memory how many are not accounted for, and of those that can be known again
        (`identified.py`) how many were lost. Raises `BrokenPromise`."""
        summary, steps = self.summary(), [r["step"] for r in self.all_records() if "update" in r]
        if steps != sorted(steps):
            raise BrokenPromise("its env steps do not only grow")
        if "started" in summary:
            begun, committed, voided = (summary[name] for name in ("started", "committed", "voided"))
            return {"begun": begun, "voided": voided, "unaccounted": abs(begun - committed - voided)}
        if not (self.folder / "played").exists():
            return {}
        rows = identified.found(self.folder, summary["updates"])
        if rows.trained != summary["env_steps"]:
            rows.wrong.append(f"{rows.trained} steps were trained on, of {summary['env_steps']}")
        if rows.wrong:
            raise BrokenPromise("; ".join(rows.wrong))
        events, records = list(read_events(self.path)), self.all_records()
        told = {"dropped": max((record.get("dropped", 0) for record in records), default=0)}
        identified.too_many(rows, events, told, 1)
        # what a host that was killed had committed, and not sent, is lost uncounted
        dead = sum(event.what == "died" and event.worker.startswith("actor") for event in events)
        most, missing = rows.most + dead * identified.SLOTS * identified.SAMPLE, rows.tails + rows.gaps
        if missing > most:
            raise BrokenPromise(f"nobody trained on {missing} steps, and at most {most} can be lost")
        return {"played": rows.played, "trained": rows.trained, "missing": missing, "at most": most}


@contextmanager
def running(
    hosts: int, experiment: str, *words: str, network: Network | None = None, **more: Any
) -> Iterator[tuple[Network, ClusterRun]]:
    """A run on so many hosts besides the runner's, in a network of theirs."""
    with tempfile.TemporaryDirectory(prefix="tidemill-cluster-") as folder:
        made = network or Network(hosts + 1)
        try:
            run = ClusterRun(made, Path(folder), experiment, *words, **more)
            try:
                yield made, run
            finally:
                run.kill()
        finally:
            if network is None:
                made.close()


def measure_sleepers(hosts: int, lanes: int, seconds: float) -> dict[str, float]:
    """Return what so many hosts reach, and what the rest of it costs."""
    many = {"HOSTS": str(hosts), "LANES": str(lanes)}
    with running(hosts, "sleeping", launcher="OneCoreEach", **many) as (_, run):
        run.await_seconds(STARTUP_S)
        runner = psutil.Process(run.main.pid)
        before, at = sum(runner.cpu_times()[:2]), time.monotonic()
        psutil.cpu_times_percent(None)
        run.await_seconds(STARTUP_S + seconds)
        idle = psutil.cpu_times_percent(None).idle / 100
        share = (sum(runner.cpu_times()[:2]) - before) / (time.monotonic() - at)
        records = [r for r in run.all_records() if r["time/seconds"] >= STARTUP_S]
        left = run.interrupt()
    first, last = records[0], records[-1]
    rate = (last["step"] - first["step"]) / (last["time/seconds"] - first["time/seconds"])
    told = [v for r in records for k, v in r.items() if re.fullmatch(r"host/h\d+/messages_per_second", k)]
    heard = [r["host/runner/messages_per_second"] / hosts for r in records]
    return {
        "steps a second": rate,
        "of what they could": rate / hosts / lanes * SLEEP_S,
        "runner's share of a core": share,
        "messages a second and host": statistics.mean(told),
        "messages a second to each": statistics.mean(heard),
        "nothing left": left,
        "idle": idle,
    }


def sleepers(hosts: int, lanes: int, seconds: float) -> dict[str, float]:
    """Measure what `hosts` hosts reach, beside so many times what one does."""
    one, many = (measure_sleepers(count, lanes, seconds) for count in (1, hosts))
    found = {"of so many times one": many["steps a second"] / one["steps a second"] / hosts}
    name = "messages a second and host"
    found["messages of a host beside one's"] = many[name] / one[name]
    found |= {f"one: {what}": value for what, value in one.items()}
    return found | many


LINES = (
    {"loss": 0.01},
    {"delay": 0.05},
    {"rate": 10e6},
    {"loss": 0.01, "delay": 0.05, "rate": 10e6},
)
WELL: dict[str, Any] = {"loss": 0.0, "delay": 0.0, "rate": None, "cut": []}
EXPERIMENTS = {"rows": f"{IDENTIFIED}:rows_apart", "cartpole": "cartpole", "replay": "replay"}
HURRY = (5.0, 10.0)  # seconds between two faults


def _have_fault(chance: random.Random, run: ClusterRun, network: Network, partitions: Sequence[float]) -> str:
    """Have one fault; return what it was."""
    kind, host = chance.choice(("line", "cut", "kill")), chance.choice((1, 2))
    if kind == "kill" and (agent := run.agents().get(f"h{host}")) is not None:
        network.set(cut=[host])
        agent.kill()  # and all that it has begun: it is the first of its process space
        time.sleep(chance.uniform(1, 3))
        network.set(**WELL)
        return f"h{host} killed"
    seconds, line = chance.uniform(3, 8), dict(chance.choice(LINES))
    if kind != "line":
        seconds, line = chance.choice(partitions), {"cut": [host]}
    network.set(**line)
    time.sleep(seconds)
    network.set(**WELL)
    return f"for {seconds:.0f} s {line}"


def soak(experiment: str, minutes: float, partitions: Sequence[float], seed: int) -> dict[str, float | str]:
    """Train for so long on two hosts beside the runner's, with random faults, 5 to 10 s
    between two: a line that loses frames, is slow or narrow, a host that is cut off for
    one of `partitions` (s), or killed with all that is on it. Hosts come back."""
    chance, faults = random.Random(seed), list[str]()
    restarts = [f"--set=workers.{group}.restarts=1000" for group in ("actor", "trainer")]
    with running(2, EXPERIMENTS[experiment], *restarts, launcher="Returning") as (network, run):
        run.await_seconds(2.0)
        end = time.monotonic() + 60 * minutes
        while (left := end - time.monotonic()) > 0 and run.main.poll() is None:
            time.sleep(min(chance.uniform(*HURRY), left))
            faults.append(_have_fault(chance, run, network, partitions))
            print(f"{run.newest()['step']:,.0f} steps; {faults[-1]}", flush=True)
        run.wait_for(lambda: {"h1", "h2"} <= run.agents().keys(), "the hosts are back")
        run.wait_for_updates(3)
        nothing = run.interrupt()
        records, counts, found = run.all_records(), network.set(), run.check()
        samples, _ = run.lost()
    return {
        "faults": len(faults),
        "hosts killed": sum(each.endswith("killed") for each in faults),
        "env steps": records[-1]["step"],
        "best mean return": max(r.get("return/mean", 0.0) for r in records),
        "samples lost": samples,
        "frames lost": counts["lost"],
        "nothing left": nothing,
        **found,
    }
