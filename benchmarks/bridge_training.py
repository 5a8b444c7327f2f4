"""Training a world of ten agents: what does it cost that it is a simulator behind the bridge?

    python benchmarks/bridge_training.py [--runs 5] [--steps 200000] [--world PATH]

The same game ("reach", ten agents) is trained with the same settings: as a simulator, a process of its own (the Python world by default, or --world:
the C one, say), and as a Python vector environment of ten lanes in the actor's own process. One actor, one trainer, on processes. The figure is the
time per trained step (a row of one agent), after a start-up; runs alternate; medians. The aim is a ratio of at most 1.25. "CPU" is what all processes
together computed per row, start-up taken off: it says more on a machine where other programs run.
"""

import argparse
import resource
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import gymnasium
import numpy as np

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, GymnasiumVector, Limits, SimulatorEnvironment, Trainer
from tidemill.bridge.worlds import reach
from tidemill.bridge.worlds.game import Randoms
from tidemill.run.metrics import read_metrics

AGENTS, SAMPLE_STEPS = 10, 256
STARTUP = 2.0  # seconds of training that do not count


class ReachVector(gymnasium.vector.VectorEnv):
    """The game of `tidemill.bridge.worlds.reach`, whose agents are lanes here."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs):
        """Make so many lanes."""
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self._field = reach.Field(Randoms(1, num_envs), num_envs)
        self._over = np.ones(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """Begin all lanes."""
        self._field.place(np.arange(self.num_envs))
        self._over[:] = False
        return self._field.observation(), {}

    def step(self, actions):
        """Move all lanes; those that were over begin again."""
        new = self._over.nonzero()[0]
        rewards, there = self._field.move(actions)
        there &= ~self._over
        late = (self._field.steps == reach.LONGEST) & ~there & ~self._over
        if len(new):
            self._field.place(new)
            rewards[new] = 0
        self._over = there | late
        return self._field.observation(), rewards, there, late, {}


def train(environment, lanes, rows):
    """Train, and return the run's records, and the CPU seconds of all its processes."""
    actors = Actors(environment=environment, lanes=lanes, agents=(AgentSpec(sample_steps=SAMPLE_STEPS),))
    experiment = Experiment(
        name="bridge",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=512))},
        limits=Limits(steps=rows // (AGENTS // lanes)),
    )
    before = computed()
    with tempfile.TemporaryDirectory() as folder:
        result = tidemill.train(experiment, run_dir=Path(folder) / "run", quiet=True, layout="given")
        return read_metrics(result.folder), computed() - before


def computed():
    """Return the CPU seconds of this process and of all that it has started and that ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def cost(environment, lanes, rows):
    """Return the seconds and the CPU seconds per trained row, and some words."""
    few, start_up = train(environment, lanes, SAMPLE_STEPS * AGENTS)
    records, spent = train(environment, lanes, rows)
    first, last = next(record for record in records if record["time/seconds"] >= STARTUP), records[-1]
    shares = {place: last.get(f"time/actor-0/{place}", 0.0) for place in ("environment", "inference", "wait", "python")}
    told = ", ".join(f"{place} {share:.0%}" for place, share in shares.items())
    per_step = AGENTS // lanes
    seconds = (last["time/seconds"] - first["time/seconds"]) / ((last["step"] - first["step"]) * per_step)
    cpu = (spent - start_up) / ((last["step"] - few[-1]["step"]) * per_step)
    return seconds, cpu, f"return {last['return/mean']:.2f}; actor: {told}"


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200_000, help="rows to train in each run")
    parser.add_argument("--world", default=reach.__file__)
    given = parser.parse_args()
    kinds = {
        "vector environment": (GymnasiumVector(make=f"{__file__}:ReachVector"), AGENTS),
        "simulator": (SimulatorEnvironment(path=given.world), 1),
        "simulator, same_step=False": (SimulatorEnvironment(path=given.world, same_step=False), 1),
    }
    found, began = {name: [] for name in kinds}, perf_counter()
    for run in range(given.runs):
        for name, (environment, lanes) in kinds.items():
            seconds, cpu, told = cost(environment, lanes, given.steps)
            found[name].append((seconds * 1e6, cpu * 1e6))
            print(f"run {run}: {name}: {seconds * 1e6:.1f} µs per trained row, CPU {cpu * 1e6:.1f}; {told}", flush=True)
    base, base_cpu = map(statistics.median, zip(*found["vector environment"], strict=True))
    print(f"\n{'':28} {'µs/row':>8} {'lowest':>8} {'highest':>8} {'ratio':>6} {'CPU':>8} {'ratio':>6}")
    for name, values in found.items():
        times, cpus = zip(*values, strict=True)
        middle, cpu = statistics.median(times), statistics.median(cpus)
        print(f"{name:28} {middle:8.1f} {min(times):8.1f} {max(times):8.1f} {middle / base:6.2f} {cpu:8.1f} {cpu / base_cpu:6.2f}")
    print(f"medians of {given.runs} alternating runs of {given.steps:,} rows; {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
