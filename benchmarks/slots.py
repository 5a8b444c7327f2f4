"""What slots and the limiter cost.

    python benchmarks/slots.py [--runs 3] [--seconds 8] [--slots 32] [--sleep 0.05]
        [--jitter 0] [--slack N] [--switch 0.005] [--apart] [--every-core]

1. So many slots of an environment whose step sleeps, and a DQN that trains once in 4
   steps (MLP 64 x 64, batches of 64), all in threads of one process: committed steps per
   second, as a share of what as many bare threads reach that do nothing but step (and
   reset) the same environment. Runs of both alternate; medians.
2. Environments that answer at once, a policy and an algorithm that do nothing: seconds
   per committed step are all overhead. Where they go, by the workers' clocks (shares of
   the last quarter of a second).

`--jitter` varies each sleep, by so large a share of it at most. Steps that all take the
same time are the hardest: slots that waited for a task together come back together. Actor
and trainer take turns in one thread, as `AsyncTrainRunner` has it, unless `--apart`, and
their thread and the environments' keep to one core (`Actors.one_core`), unless
`--every-core`. `--switch` is Python's switch interval (5 ms unless told): how long a
thread that computes may keep others that want Python's lock waiting.
"""

import argparse
import statistics
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from random import uniform
from time import perf_counter, sleep

import gymnasium
import numpy as np

import tidemill
from tidemill import (
    DQN,
    Experiment,
    Gymnasium,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Slots,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.core.schema import Field
from tidemill.metrics.json_lines import read_metrics

LENGTH = 200
STARTUP = 1.5  # seconds of training that do not count


class Sleeping(gymnasium.Env):
    """A step waits, as if for somebody's answer; an episode has 200."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds=0.0, jitter=0.0):
        """Wait `seconds` in each step, more or less by the share `jitter` of it."""
        self._seconds, self._jitter, self._answer = seconds, jitter, np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        """Begin at once."""
        self._steps = 0
        return self._answer, {}

    def step(self, action):
        """Wait."""
        if self._seconds:
            sleep(self._seconds * (1 + self._jitter * uniform(-1, 1)) if self._jitter else self._seconds)
        self._steps += 1
        return self._answer, 1.0, self._steps == LENGTH, False, {}


@dataclass(frozen=True, kw_only=True)
class Nothing(AlgorithmConfig):
    """Learns nothing."""

    def build(self, policy, seed):
        """Return it."""
        return _Nothing()


class _Nothing(Algorithm):
    def update(self, samples, steps):
        return {"loss": 0.0}

    def state(self):
        return {}

    def load_state(self, state):
        pass


@dataclass(frozen=True, kw_only=True)
class Still(PolicyConfig):
    """Always does the same."""

    def answer(self, spaces):
        """Return its answer's fields."""
        return {"action": Field((), "int64")}

    def build(self, spaces, seed):
        """Return it."""
        return _Still()


class _Still(Policy):
    def act(self, observation, state, deterministic, out):
        pass

    def parameters(self):
        return {"w": np.zeros(1)}

    def load(self, parameters, version):
        self.version = version


def bare(slots, seconds, wait, jitter=0.0):
    """Return the steps/s of threads that do nothing else."""
    counts, stop = [0] * slots, threading.Event()

    def live(number):
        env = Sleeping(wait, jitter)
        env.reset()
        while not stop.is_set():
            if env.step(0)[2]:
                env.reset()
            counts[number] += 1

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(slots)]
    for thread in threads:
        thread.start()
    sleep(0.5)
    before, began = sum(counts), perf_counter()
    sleep(seconds)
    rate = (sum(counts) - before) / (perf_counter() - began)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def ours(
    slots,
    seconds,
    wait,
    policy,
    algorithm,
    threads,
    flush,
    slack=None,
    apart=False,
    jitter=0.0,
    one_core=True,
):
    """Return the committed steps/s of a run, and its last record."""
    environment = Gymnasium(
        make=f"{__file__}:Sleeping", kwargs={"seconds": wait, "jitter": jitter}, threads=threads
    )
    experiment = Experiment(
        name="slots",
        policies={"policy": policy},
        workers={
            "actor": ReplayActors(
                environment=Slots(environment=environment),
                lanes=1,
                ring=slots,
                one_core=one_core,
                flush_requests=flush,
            ),
            "trainer": ReplayTrainer(
                algorithm=algorithm,
                buffer=Replay(capacity=100_000, warm_up=64),
                batch_size=64,
                ratio="1/4",
                slack=slack,
                database_seconds=None,
            ),
        },
        limits=Limits(seconds=seconds + STARTUP),
        together=() if apart else ("actor", "trainer"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = tidemill.train(
            experiment, launch="threads", run_dir=Path(folder) / "run", source=__file__, quiet=True
        ).folder
        records = [record for record in read_metrics(run) if record["time/seconds"] > STARTUP]
    first, last = records[0], records[-2]
    return (last["step"] - first["step"]) / (last["time/seconds"] - first["time/seconds"]), last


def main():
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--sleep", type=float, default=0.05)
    parser.add_argument("--switch", type=float, default=0.005)
    parser.add_argument("--flush", type=int, default=1)
    parser.add_argument("--slack", type=int)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--every-core", action="store_true")
    given = parser.parse_args()
    sys.setswitchinterval(given.switch)
    dqn = QNetwork(), DQN()
    pairs = []
    for _ in range(given.runs):
        one, (two, last) = (
            bare(given.slots, given.seconds, given.sleep, given.jitter),
            ours(
                given.slots,
                given.seconds,
                given.sleep,
                *dqn,
                1,
                given.flush,
                given.slack,
                given.apart,
                given.jitter,
                not given.every_core,
            ),
        )
        pairs.append((one, two))
        told = {name: round(value, 3) for name, value in last.items() if name.startswith("limiter")}
        print(f"bare {one:8.1f}/s  ours {two:8.1f}/s  {two / one:.3f}  {told}", flush=True)
    print(f"of bare threads: {statistics.median(two / one for one, two in pairs):.3f}")
    for threads in (0, 1):
        runs = [
            ours(
                given.slots,
                given.seconds / 2,
                0.0,
                Still(),
                Nothing(),
                threads,
                given.flush,
                None,
                given.apart,
                0.0,
                not given.every_core,
            )
            for _ in range(given.runs)
        ]
        each, last = 1e6 / statistics.median(rate for rate, _ in runs), runs[-1][1]
        where = "in threads of their own" if threads else "in the actor's thread"
        spent = {
            f"{worker} {place}": round(each * last[f"time/{worker}-0/{place}"], 1)
            for worker in ("actor", "trainer")
            for place in ("environment", "inference", "train", "copy", "python", "wait")
        }
        print(f"overhead, environments {where}: {each:.1f} us per step, of which {spent}", flush=True)


if __name__ == "__main__":
    main()
