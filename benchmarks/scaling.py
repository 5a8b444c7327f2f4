"""Does cost grow as the work does? Speed of whole runs against lanes, actors, seats and
the size of an observation.

    python benchmarks/scaling.py [--out docs/results/scaling]
        [--only lanes,actors,seats,bytes] [--runs 3] [--seconds 4] [--quick]

Each point is a run on processes through `tidemill.train`: env steps that entered training
per second, after a start-up. Per curve a table (printed, and written as NAME.md),
NAME.png and NAME.json. Every run has the same number of rows in an update, or as near to
it as can be.

lanes: 1 … 256 copies of CartPole-v1, inference inline (MLP 64 x 64), PPO with one epoch,
    laid out by itself: processes by turns, as many as cores
actors: 1 … 64 actor processes, each with one environment whose step sleeps 20 ms; ideal:
    each adds as many steps/s as the first
seats: 1 … 1,024 agents in one lane of an environment that is free; a policy and a learner
    that cost nearly nothing, so that what is seen is ours
bytes: observations of 16 B … 1 MB in one lane, likewise
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter, sleep

import gymnasium
import numpy as np
import psutil

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Free, Gymnasium, Limits, Trainer
from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import schema_of_space
from tidemill.core.clock import PLACES
from tidemill.core.schema import Field
from tidemill.metrics.json_lines import read_metrics

SLEEP = 0.02
WARM = 1.5  # seconds of training that do not count; of a run that is not much longer, the first half
ROWS = 4096  # of an update


class Sleeping(gymnasium.Env):
    """A step waits 20 ms; an episode has 100."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Begin at once."""
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        """Wait."""
        sleep(SLEEP)
        self._steps += 1
        return np.zeros(4, np.float32), 1.0, self._steps == 100, False, {}


class _Still(Policy):
    """Always answers 0."""

    def __init__(self):
        self._weight = {"w": np.zeros(1, np.float32)}

    def act(self, observation, state, deterministic, out):
        for array in out.values():
            array[: len(next(iter(observation.values())))] = 0

    def parameters(self):
        return self._weight

    def load(self, parameters, version):
        self.version = version


@dataclass(frozen=True, kw_only=True)
class Still(PolicyConfig):
    """A policy that costs nearly nothing."""

    def answer(self, spaces):
        """Return what an actor-critic answers."""
        return {
            **schema_of_space(spaces.action, "action"),
            "log_prob": Field((), "float32"),
            "value": Field((), "float32"),
        }

    def build(self, spaces, seed):
        """Return it."""
        return _Still()


class _Reads(Algorithm):
    def __init__(self, policy):
        self.policy = policy

    def update(self, samples, steps):
        return {"reward": float(sum(sample["reward"].sum() for sample in samples))}

    def state(self):
        return {}

    def load_state(self, state):
        pass


@dataclass(frozen=True, kw_only=True)
class Reads(AlgorithmConfig):
    """Learns nothing: adds up the rewards."""

    def build(self, policy, seed):
        """Return it."""
        return _Reads(policy)


def experiment(environment, *, lanes=1, count=1, sample_steps, free, batch_size=None):
    """Return one actor group and a trainer."""
    actors = Actors(
        environment=environment,
        lanes=lanes,
        count=count,
        slots=2,
        agents=(AgentSpec(sample_steps=sample_steps),),
    )
    algorithm = Reads() if free else PPO(epochs=1, minibatch_size=2048)
    policy = Still() if free else ActorCritic(normalise_observations=False)
    workers = {"actor": actors, "trainer": Trainer(algorithm=algorithm, batch_size=batch_size)}
    return Experiment(name="scaling", policies={"policy": policy}, workers=workers)


def steps_for(bytes_per_row):
    """Return the rows of a sample: as many as an update has, and at most 32 MB of
    them."""
    return max(4, min(ROWS, (32 << 20) // bytes_per_row))


CURVES = {  # name: (what is counted, its values, those of a smoke test, value → experiment)
    "lanes": (
        "lanes",
        [1, 2, 4, 8, 16, 32, 64, 128, 256],
        [1, 8],
        lambda n: experiment(
            Gymnasium(id="CartPole-v1"), lanes=n, sample_steps=min(1024, ROWS // n), free=False
        ),
    ),
    "actors": (
        "actors",
        [1, 2, 4, 8, 16, 32, 64],
        [2],
        lambda n: experiment(
            Gymnasium(make=f"{__file__}:Sleeping"), count=n, sample_steps=16, free=False, batch_size=16 * n
        ),
    ),
    "seats": (
        "seats",
        [1, 4, 16, 64, 256, 1024],
        [64],
        lambda n: experiment(Free(agents=n), sample_steps=max(16, ROWS // n), free=True),
    ),
    "bytes": (
        "bytes of an observation",
        [1 << power for power in range(4, 21, 2)],
        [4096],
        lambda n: experiment(Free(shape=(n // 4,)), sample_steps=steps_for(n), free=True),
    ),
}


@cache
def memory_speed():
    """Return the bytes/s at which numpy fills observations of float32, one after the
    other, in as much memory as the slots of the largest have."""
    rows = np.ones((64, 1 << 18), np.float32)
    times = []
    for _ in range(9):
        start = perf_counter()
        for row in rows:
            row.fill(0)
        times.append(perf_counter() - start)
    return rows.nbytes / statistics.median(times)


def measure(made, seconds, warm):
    """Run it once, for `warm` and `seconds` or, where these are None, for two updates,
    and return steps/s, seconds of the whole command besides training, and what was left
    of it (processes)."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix="tidemill-scaling-") as folder:
        result = tidemill.train(
            made.replace(
                limits=Limits(updates=2)
                if seconds is None
                else Limits(seconds=warm + seconds, updates=10**12)
            ),
            run_dir=Path(folder) / "run",
            source=__file__,
            quiet=True,
        )
        records = read_metrics(result.folder)
    took = perf_counter() - start
    if not records:  # no update in this time, on a machine so busy
        return measure(made, 2 * seconds, 2 * warm)
    steady = [
        record for record in records if record["time/seconds"] >= min(warm, records[-1]["time/seconds"] / 2)
    ]
    first, last = steady[0], steady[-1]
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    span = last["time/seconds"] - first["time/seconds"]
    places = [f"{worker}/{place}" for worker in ("actor-0", "trainer-0") for place in PLACES]
    shares = {place: last[f"time/{place}"] for place in places if f"time/{place}" in last}
    return {
        "steps_per_second": (last["step"] - first["step"]) / span
        if span
        else last["step"] / last["time/seconds"],
        "start_and_stop_seconds": took - records[-1]["time/seconds"],
        "left": len(left),
        "shares": shares,
    }


def curve(name, runs, seconds, quick):
    """Measure one curve; runs alternate over its points."""
    _, values, few, make = CURVES[name]
    values = few if quick else values
    found = {value: [] for value in values}
    for run in range(runs):
        for value in values:
            found[value].append(measure(make(value), None if quick else seconds, 0.0 if quick else WARM))
            print(
                f"  {name} {value:,}, run {run}: {found[value][-1]['steps_per_second']:,.0f} steps/s",
                flush=True,
            )
    points = []
    for value, told in found.items():
        speeds = [one["steps_per_second"] for one in told]
        speed = statistics.median(speeds)
        point = {
            "at": value,
            "steps_per_second": speed,
            "lowest": min(speeds),
            "highest": max(speeds),
            "microseconds_per_step": 1e6 / speed,
        }
        point["start_and_stop_seconds"] = statistics.median(one["start_and_stop_seconds"] for one in told)
        point["left"] = max(one["left"] for one in told)
        point["shares"] = told[-1]["shares"]
        points.append(point)
    for point in points:
        point["ideal"] = ideal(name, point["at"], points)
        point["unit_microseconds"] = 1e6 / point["steps_per_second"] / (point["at"] if name == "seats" else 1)
    return points


def ideal(name, value, points):
    """Return the steps/s that the curve would have if cost grew as the work does and
    nothing else were in the way; None where that says nothing."""
    first, last = points[0], points[-1]
    if name == "actors":
        return value / SLEEP
    if name == "lanes":  # a cost per tick and one per step, from the ends of the curve
        tick = (
            (1e6 / first["steps_per_second"] - 1e6 / last["steps_per_second"]) / (1 - 1 / last["at"])
            if last["at"] > 1
            else 0.0
        )
        step = 1e6 / first["steps_per_second"] - tick
        return 1e6 / (step + tick / value)
    if name == "seats":  # likewise, per tick and per seat
        seat = (1e6 / last["steps_per_second"] - 1e6 / first["steps_per_second"]) / max(
            last["at"] - first["at"], 1
        )
        return 1e6 / (1e6 / first["steps_per_second"] + seat * (value - first["at"]))
    return 1 / (1 / first["steps_per_second"] + value / memory_speed())


IDEAL = {
    "lanes": "a cost per tick and one per step, from the two ends",
    "actors": "each actor as fast as its environment",
    "seats": "a cost per tick and one per seat, from the two ends",
    "bytes": "the smallest observation's cost, and filling 64 MB in rows once",
}


def table(name, points, told):
    """Return the curve as Markdown."""
    unit = "µs per row" if name == "seats" else "µs per step"
    lines = [
        f"# {name}: steps/s of whole runs",
        "",
        f"{told}. Ideal: {IDEAL[name]}.",
        "",
        f"| {CURVES[name][0]} | steps/s | lowest–highest | ideal | of ideal | {unit} | start and stop, s |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {p['at']:,} | {p['steps_per_second']:,.0f} | {p['lowest']:,.0f}–{p['highest']:,.0f} | "
        f"{p['ideal']:,.0f} | {p['steps_per_second'] / p['ideal']:.2f} | {p['unit_microseconds']:.2f} | "
        f"{p['start_and_stop_seconds']:.1f} |"
        for p in points
    ]
    return "\n".join(lines) + "\n"


def draw(name, points, path):
    """Draw steps/s beside the ideal, and the cost of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    at, speeds = [p["at"] for p in points], [p["steps_per_second"] for p in points]
    left.fill_between(at, [p["lowest"] for p in points], [p["highest"] for p in points], alpha=0.2)
    left.plot(at, speeds, "o-", label="steps/s")
    left.plot(at, [p["ideal"] for p in points], "--", color="grey", label=f"ideal: {IDEAL[name]}")
    left.set_title("env steps that entered training, per second")
    left.legend(fontsize=7)
    right.plot(at, [p["unit_microseconds"] for p in points], "o-", color="tab:orange")
    right.set_title("µs per row" if name == "seats" else "µs per step")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(CURVES[name][0])
        axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/scaling"))
    parser.add_argument("--only", default=",".join(CURVES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: few points, short runs, figures that mean nothing"
    )
    given = parser.parse_args()
    runs = 1 if given.quick else given.runs
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only.split(","):
        points = curve(name, runs, given.seconds, given.quick)
        length = "two updates" if given.quick else f"{given.seconds:g} s"
        told = f"Medians of {runs} alternating runs of {length} on {psutil.cpu_count()} cores"
        text = table(name, points, told)
        print(text, flush=True)
        (given.out / f"{name}.md").write_text(text)
        (given.out / f"{name}.json").write_text(json.dumps({"told": told, "points": points}, indent=1) + "\n")
        draw(name, points, given.out / f"{name}.png")


if __name__ == "__main__":
    main()
