"""Whole runs on hosts with networks of their own, for `benchmarks/cluster.py`."""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
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
from tidemill.run.folder import RunFolder

LAUNCH = f"{Path(__file__).with_name('networked.py')}:Networked"
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
MARK = "TIDEMILL_BENCHMARK"
SLEEP_S, SAMPLE = 0.05, 16  # seconds of a step, rows of a lane in a sample
STARTUP_S = 4.0  # of training that do not count
LEFT_S = 30.0  # seconds that a run has to leave nothing


class SlowSleeping(Sleeping):
    """A step waits 50 ms."""

    def __init__(self):
        """See `Sleeping`."""
        super().__init__(SLEEP_S)


def sleeping():
    """Return the experiment of hosts that sleep: HOSTS actors of LANES lanes."""
    hosts, lanes = int(os.environ["HOSTS"]), int(os.environ["LANES"])
    actors = Actors(
        environment=Gymnasium(make=f"{__file__}:SlowSleeping", threads=lanes),
        count=hosts,
        lanes=lanes,
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


def cartpole():
    """Return CartPole, learnt by PPO until it stands."""
    return Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), count=4, lanes=16),
            "trainer": Trainer(algorithm=PPO(), max_policy_lag=4),
        },
        limits=Limits(),
    )


def replay():
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


class ClusterRun:
    """A run on the hosts of a network, the first of which is its runner's."""

    def __init__(self, network, folder, experiment, *words, **environment):
        self.path, self._mark = folder / "run", uuid.uuid4().hex
        self._log = (folder / "output").open("w+")
        command = [sys.executable, "-m", "tidemill.cli.main", "train", f"{__file__}:{experiment}"]
        command += ["--layout", "given", "--run-dir", str(self.path), "--launch", LAUNCH, *words]
        environment |= {**os.environ, **settings(network, *OWN_PROCESSES), MARK: self._mark}
        self.main = subprocess.Popen(
            [*network.command(0), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def output(self):
        """Return what it has written."""
        return Path(self._log.name).read_text()

    def records(self):
        """Return its metrics so far."""
        path = self.path / "metrics.jsonl"
        return read_metrics(self.path) if path.exists() and path.stat().st_size else []

    def await_seconds(self, seconds):
        """Wait until it has trained for so long."""
        deadline = time.monotonic() + 120 + seconds
        while not (found := self.records()) or found[-1]["time/seconds"] < seconds:
            if self.main.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run does not train:\n{self.output()}")
            time.sleep(0.1)

    def left(self):
        """Return what still lives of it on any host."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self):
        """Have it end as Ctrl-C does; return its status, and the seconds until nothing of
        it was left."""
        start = time.monotonic()
        if self.main.poll() is None:
            os.killpg(self.main.pid, signal.SIGINT)
        while self.main.poll() is None or self.left():
            if time.monotonic() > start + LEFT_S:
                raise SystemExit(f"{len(self.left())} processes are left after {LEFT_S} s:\n{self.output()}")
            time.sleep(0.02)
        return self.main.returncode, time.monotonic() - start

    def kill(self):
        """Leave nothing, whatever happened."""
        for process in self.left():
            process.kill()
        self.main.wait()
        self._log.close()


@contextmanager
def running(
    hosts: int, experiment: str, *words: str, **environment: str
) -> Iterator[tuple[Network, ClusterRun]]:
    """A run on so many hosts besides the runner's."""
    with Network(hosts + 1) as network, tempfile.TemporaryDirectory() as folder:
        run = ClusterRun(network, Path(folder), experiment, *words, **environment)
        try:
            yield network, run
        finally:
            run.kill()


def measure_sleepers(hosts, lanes, seconds):
    """Return how many steps/s so many hosts reach, and what the rest of it costs, in
    words."""
    with running(hosts, "sleeping", HOSTS=str(hosts), LANES=str(lanes)) as (_, run):
        run.await_seconds(STARTUP_S)
        runner = psutil.Process(run.main.pid)
        before, at = sum(runner.cpu_times()[:2]), time.monotonic()
        psutil.cpu_times_percent(None)
        run.await_seconds(STARTUP_S + seconds)
        idle = psutil.cpu_times_percent(None).idle / 100
        share = (sum(runner.cpu_times()[:2]) - before) / (time.monotonic() - at)
        records = [r for r in run.records() if r["time/seconds"] >= STARTUP_S]
        _, left = run.end()
    first, last = records[0], records[-1]
    rate = (last["step"] - first["step"]) / (last["time/seconds"] - first["time/seconds"])
    told = [v for r in records for k, v in r.items() if re.fullmatch(r"host/h\d+/messages_per_second", k)]
    heard = [r["host/runner/messages_per_second"] / hosts for r in records]
    return rate, (
        f"runner {share:.1%} of a core; messages per host and second {statistics.mean(told):.1f} to others, "
        f"{statistics.mean(heard):.1f} from the runner; nothing was left {left:.1f} s after Ctrl-C; "
        f"the machine was idle for {idle:.0%}"
    )


def sleepers(hosts, lanes, seconds):
    """Print what `hosts` hosts reach, beside so many times what one does."""
    found = {}
    for count in (1, hosts):
        found[count], costs = measure_sleepers(count, lanes, seconds)
        reached = found[count] / count / lanes * SLEEP_S
        print(
            f"{count} hosts of {lanes} lanes that sleep 50 ms: {found[count]:,.0f} steps/s, {reached:.2f} of "
            f"what they could; {costs}",
            flush=True,
        )
    print(f"{hosts} hosts: {found[hosts] / found[1] / hosts:.2f} of {hosts} x one")


LINES = (
    {"loss": 0.01},
    {"delay": 0.05},
    {"rate": 10e6},
    {"loss": 0.01, "delay": 0.05, "rate": 10e6},
)
WELL = {"loss": 0.0, "delay": 0.0, "rate": None, "cut": []}


def soak(experiment, minutes, partitions, seed):
    """Train for so long on two hosts beside the runner's, with a random fault each 10 to
    20 s: a line that loses frames, is slow or narrow, or a host that is cut off for one
    of `partitions` (s)."""
    chance, faults = random.Random(seed), 0
    with running(2, experiment) as (network, run):
        run.await_seconds(2.0)
        end = time.monotonic() + 60 * minutes
        while (left := end - time.monotonic()) > 0 and run.main.poll() is None:
            time.sleep(min(chance.uniform(5, 10), left))
            seconds, line = chance.uniform(3, 8), dict(chance.choice(LINES))
            if chance.random() < 0.5:
                seconds, line = chance.choice(partitions), {"cut": [chance.choice((1, 2))]}
            faults += 1
            print(f"{run.records()[-1]['step']:,.0f} steps; for {seconds:.0f} s {line}", flush=True)
            network.set(**line)
            time.sleep(seconds)
            network.set(**WELL)
        step = run.records()[-1]["step"] if run.main.poll() is None else -1
        deadline = time.monotonic() + 30
        while run.main.poll() is None and run.records()[-1]["step"] <= step:
            assert time.monotonic() < deadline, f"it does not go on:\n{run.output()}"
            time.sleep(0.1)
        went_on = run.main.poll() is None
        status, nothing = run.end()
        records, counts = run.records(), network.set()
        summary = RunFolder(run.path).read("summary.json")
    best = max(r.get("return/mean", 0.0) for r in records)
    steps = [r["step"] for r in records]
    print(
        f"{faults} faults, {counts['lost']:,} of {counts['frames']:,} frames lost; "
        f"{'it went on to the end' if went_on else 'it ended before'}, status {status}: {summary['reason']}; "
        f"{steps[-1]:,.0f} steps, best mean return {best:.0f}, nothing was left after {nothing:.1f} s; "
        f"steps only grow: {steps == sorted(steps)}"
    )
    if "started" in summary:
        begun, committed, voided = (summary[name] for name in ("started", "committed", "voided"))
        fits = begun == committed + voided
        print(f"{begun:,} steps begun = {committed:,} committed + {voided:,} voided: {fits}")
