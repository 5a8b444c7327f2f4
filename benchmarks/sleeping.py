"""64 environments whose step sleeps 5 ms, in one actor process: what part of bare
threads' speed does a whole run reach?

    python benchmarks/sleeping.py [--runs 5] [--seconds 8] [--splits 8x8,16x4,8x8/all]

Bare: 64 threads of one process, each of which steps its own environment in a loop, and
resets it when it must. Ours: a run of one actor and a trainer on processes, inference
inline (MLP 64 x 64); steps that entered training per second, after a start-up. A split
RxL is a ring of R targets of L lanes, each lane with a thread, and the actor keeps to one
core; with RxL/all it has every core. All alternate; medians. "others" is the share of all
cores that other programs used meanwhile: above a few percent the figures say more about
those.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

import gymnasium
import numpy as np

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Trainer
from tidemill.metrics.json_lines import read_metrics

ENVIRONMENTS, SLEEP, LENGTH = 64, 0.005, 200
STARTUP = 2.0  # seconds of training that do not count


class Sleeping(gymnasium.Env):
    """A step waits 5 ms, as if for somebody's answer; an episode has 200."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds=SLEEP):
        """Wait `seconds` in each step."""
        self._seconds, self._answer = seconds, np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        """Begin at once."""
        self._steps = 0
        return self._answer, {}

    def step(self, action):
        """Wait."""
        sleep(self._seconds)
        self._steps += 1
        return self._answer, 1.0, self._steps == LENGTH, False, {}


def bare(seconds):
    """Return the steps/s of threads that do nothing else. Runs in a process of its
    own."""
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sleeping import ENVIRONMENTS, Sleeping
counts, stop = [0] * ENVIRONMENTS, threading.Event()
def loop(number):
    env = Sleeping()
    env.reset()
    while not stop.is_set():
        if env.step(0)[2]:
            env.reset()
        counts[number] += 1
for number in range(ENVIRONMENTS):
    threading.Thread(target=loop, args=(number,), daemon=True).start()
time.sleep(0.5)
first, start = sum(counts), time.perf_counter()
time.sleep({seconds})
print((sum(counts) - first) / (time.perf_counter() - start))
stop.set()
"""
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def experiment(ring, lanes, one_core=True):
    """Return the whole system on `ring` x `lanes` environments."""
    actors = Actors(
        environment=Gymnasium(make=f"{__file__}:Sleeping", threads=lanes),
        lanes=lanes,
        ring=ring,
        slots=2,
        one_core=one_core,
        agents=(AgentSpec(sample_steps=128),),
    )
    trainer = Trainer(algorithm=PPO(minibatch_size=2048, epochs=4), batch_size=128 * ENVIRONMENTS)
    return Experiment(
        name="sleeping",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": trainer},
    )


def ours(ring, lanes, seconds, one_core=True):
    """Return (steps/s that entered training, shares of the actor's time)."""

    def end(record, control):
        if record["time/seconds"] >= STARTUP + seconds:
            control.stop()

    with tempfile.TemporaryDirectory() as folder:
        result = tidemill.train(
            experiment(ring, lanes, one_core), run_dir=Path(folder) / "run", quiet=True, on_update=end
        )
        records = read_metrics(result.folder)
    first = ([record for record in records if record["time/seconds"] >= STARTUP] or records)[0]
    last = records[-1]
    shares = {
        place: last.get(f"time/actor-0/{place}", 0.0)
        for place in ("environment", "inference", "wait", "python")
    }
    if first is last:  # one update alone
        return last["step"] / last["time/seconds"], shares
    return (last["step"] - first["step"]) / (last["time/seconds"] - first["time/seconds"]), shares


class Others:
    """Watches how much of the machine programs other than this one and its children
    use."""

    def __init__(self):
        """Begin."""
        self._start = self._seen()

    @staticmethod
    def _seen():
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        return perf_counter(), busy - own

    def share(self):
        """Return the share of all cores since the beginning."""
        (now, busy), (then, before) = self._seen(), self._start
        return max(0.0, busy - before) / (now - then) / (os.cpu_count() or 1)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--splits", default="8x8,16x4,8x8/all")
    given = parser.parse_args()
    try:
        splits = [
            (*map(int, split.removesuffix("/all").split("x")), not split.endswith("/all"))
            for split in given.splits.split(",")
        ]
    except ValueError:
        splits = []
    if not splits or any(len(split) != 3 or split[0] * split[1] != ENVIRONMENTS for split in splits):
        parser.error(
            f"--splits {given.splits}: each is RxL or RxL/all, with {ENVIRONMENTS} environments in all"
        )
    began, found = perf_counter(), {}
    for run in range(given.runs):
        others = Others()
        found.setdefault("bare threads", []).append(speed := bare(given.seconds / 2))
        print(f"run {run}: bare threads {speed:,.0f} steps/s (others {others.share():.0%})", flush=True)
        for ring, lanes, one_core in splits:
            name = f"{ring} x {lanes}" + ("" if one_core else ", all cores")
            others = Others()
            speed, shares = ours(ring, lanes, given.seconds, one_core)
            found.setdefault(name, []).append(speed)
            spent = ", ".join(f"{place} {share:.0%}" for place, share in shares.items())
            print(
                f"run {run}: {name} {speed:,.0f} steps/s (others {others.share():.0%}); actor: {spent}",
                flush=True,
            )
    best = statistics.median(found["bare threads"])
    print(f"\n{'':20} {'steps/s':>8} {'lowest':>8} {'highest':>8} {'of bare':>8}")
    for name, speeds in found.items():
        middle = statistics.median(speeds)
        print(f"{name:20} {middle:8,.0f} {min(speeds):8,.0f} {max(speeds):8,.0f} {middle / best:8.3f}")
    print(f"medians of {given.runs} alternating runs; {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
