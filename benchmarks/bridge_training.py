"""Training a world of ten agents: what does it cost that it is a simulator behind the
bridge?

    python benchmarks/bridge_training.py [--runs 5] [--steps 400000]

The same game ("reach", ten agents) is trained with the same settings: as a Python vector
environment of ten lanes in the actor's own process, and as a simulator, a process of its
own, in C (where there is a compiler) and in Python. One world, and four: as many
simulators as `tidemill train simulator:PATH` starts, against four such vector
environments in a ring. One actor beside one trainer, on processes, which is how a
simulator is laid out by default on two cores (the vector environment's ten lanes become
two actors of five, which train by turns, and are no quicker). All move their agents in
one thread: the example in C shows by default how two share them, who wait for each other
for longer than ten agents take. The figure is the time per trained step (a row of one
agent) in the last two thirds of a run; runs alternate; medians. The aim is a ratio of at
most 1.25. "CPU" is what all processes together computed per row, start-up taken off,
spinning included.
"""

import argparse
import resource
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from time import perf_counter

import gymnasium
import numpy as np

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    GymnasiumVector,
    Limits,
    SimulatorEnvironment,
    Trainer,
    bridge,
)
from tidemill.bridge.worlds import reach
from tidemill.bridge.worlds.game import RandomStreams
from tidemill.metrics.json_lines import read_metrics

AGENTS, SAMPLE_STEPS = 10, 256
STARTUP = 1 / 3  # of a run, which does not count


class ReachVector(gymnasium.vector.VectorEnv):
    """The game of `tidemill.bridge.worlds.reach`, whose agents are lanes here."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs):
        """Make so many lanes."""
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self._field = reach.Square(RandomStreams(1, num_envs), num_envs)
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


def train(environment, lanes, ring, rows):
    """Train, and return the run's records, and the CPU seconds of all its processes."""
    actors = Actors(
        environment=environment,
        lanes=lanes,
        ring=ring,
        slots=2,
        agents=(AgentSpec(sample_steps=SAMPLE_STEPS),),
    )
    experiment = Experiment(
        name="bridge",
        policies={"policy": ActorCritic(normalise_observations=False)},
        workers={
            "actor": actors,
            "trainer": Trainer(algorithm=PPO(minibatch_size=512, epochs=4, clip_apart=False)),
        },
        limits=Limits(steps=rows // per_step(environment)),
    )
    before = computed()
    with tempfile.TemporaryDirectory() as folder:
        result = tidemill.train(experiment, run_dir=Path(folder) / "run", quiet=True, layout="given")
        return read_metrics(result.folder), computed() - before


def per_step(environment):
    """Return the rows of a lane's step."""
    return AGENTS if isinstance(environment, SimulatorEnvironment) else 1


def computed():
    """Return the CPU seconds of this process and of all that it has started and that
    ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def cost(environment, lanes, ring, rows):
    """Return the seconds and the CPU seconds per trained row, and some words."""
    rows_of = per_step(environment)
    few, start_up = train(environment, lanes, ring, SAMPLE_STEPS * lanes * ring * rows_of)
    records, spent = train(environment, lanes, ring, rows)
    last = records[-1]
    first = next(record for record in records if record["step"] >= STARTUP * last["step"])
    shares = {
        place: last.get(f"time/actor-0/{place}", 0.0)
        for place in ("environment", "inference", "wait", "python")
    }
    told = ", ".join(f"{place} {share:.0%}" for place, share in shares.items())
    seconds = (last["time/seconds"] - first["time/seconds"]) / ((last["step"] - first["step"]) * rows_of)
    cpu = (spent - start_up) / ((last["step"] - few[-1]["step"]) * rows_of)
    return seconds, cpu, f"return {last['return/mean']:.2f}; actor: {told}"


def simulators(folder):
    """Give the language and each simulator of this game, built in `folder`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        native = Path(bridge.__file__).parent / "native"
        subprocess.run(
            [
                compiler,
                "-std=c99",
                "-O2",
                "-pthread",
                str(native / "reach.c"),
                "-o",
                str(folder / "reach"),
                "-lm",
            ],
            check=True,
        )
        yield "C", SimulatorEnvironment(path=str(folder / "reach"), arguments=("--threads", "1"))
    yield "Python", SimulatorEnvironment(path=reach.__file__)


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400_000, help="rows to train in each run")
    given = parser.parse_args()
    vector = GymnasiumVector(make=f"{__file__}:ReachVector")
    with tempfile.TemporaryDirectory() as folder:
        built = dict(simulators(Path(folder)))
        one = {
            "vector environment": (vector, AGENTS, 1),
            **{f"simulator in {name}": (built[name], 1, 1) for name in built},
        }
        four = {
            "4 vector environments": (vector, AGENTS, 4),
            **{f"4 simulators in {name}": (built[name], 4, 1) for name in built},
        }
        found, began = {name: [] for name in one | four}, perf_counter()
        for run in range(given.runs):
            for name, kind in (one | four).items():
                seconds, cpu, told = cost(*kind, given.steps)
                found[name].append((seconds * 1e6, cpu * 1e6))
                print(
                    f"run {run}: {name}: {seconds * 1e6:.1f} µs per trained row, CPU {cpu * 1e6:.1f}; {told}",
                    flush=True,
                )
    print(f"\n{'':28} {'µs/row':>8} {'lowest':>8} {'highest':>8} {'ratio':>6} {'CPU':>8} {'ratio':>6}")
    for kinds in (one, four):
        report({name: found[name] for name in kinds})
    print(f"medians of {given.runs} alternating runs of {given.steps:,} rows; {perf_counter() - began:.0f} s")


def report(found):
    """Print the rows of a table; ratios are to the first."""
    base, base_cpu = map(statistics.median, zip(*next(iter(found.values())), strict=True))
    for name, values in found.items():
        times, cpus = zip(*values, strict=True)
        middle, cpu = statistics.median(times), statistics.median(cpus)
        print(
            f"{name:28} {middle:8.1f} {min(times):8.1f} {max(times):8.1f} {middle / base:6.2f} {cpu:8.1f} "
            f"{cpu / base_cpu:6.2f}"
        )


if __name__ == "__main__":
    main()
