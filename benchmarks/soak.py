"""What a run survives in the long run: random faults, one every 20 s, while it trains
CartPole in processes with an evaluation.

    python benchmarks/soak.py                     # an hour
    python benchmarks/soak.py --layout equal      # two equal trainers
    python benchmarks/soak.py --seconds 300 --gap 10
    python benchmarks/soak.py --marks --gap 2     # is learnt what is to be learnt?

A fault is one of: kill -9 of any worker; SIGSTOP of any for some seconds; and in an
actor's environment an exception, NaN in an observation, a reward of 3e38 (which makes
learning's numbers infinite), or a step that never comes back. Processes are two actors, a
policy worker and a trainer, or (`--layout equal`) two that gather and train by turns. For
each minute (of a short run 18 times) it prints memory, descriptors, threads, files and
steps/s, and in the end what is left. Faults are those that came: whom one should strike
may not be there, and an environment takes its own after at most 32 steps. Files are those
of the run's folder, but for records of faults (`faults/`), of which 10 are kept of each
worker, and which come slowly.

It ends with 1 where the run did not end as it was told to, left anything, has kept more
records than that, had less than half of the faults, or is not level: where of the last
third of these lines the median of memory, descriptors, threads or files is more than 5 %
and `SLACK` above that of the middle third, or that of steps/s below three quarters of it.
The first third is not looked at: what is kept fills up. Fewer than nine lines tell
nothing, and end with 1, too.

With `--marks` CartPole, and two CartPoles in one environment that two policies play by a
policy worker each, are learnt until episodes have a mean return of 475, with such faults
all the while; it ends with 1 where one was not learnt, or left anything. `moments.py` has
a fault at each moment of a run.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import gymnasium
import pettingzoo
import psutil
from fault_rows.runs import processes
from faulty import FAULTS, LASTING, LAYOUTS, Faulty, NoFault, Run
from faulty import __file__ as faulty_file

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    PolicyWorkers,
    Trainer,
)
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events

ASKED = 128 + signal.SIGTERM  # the exit status of a run that was told to end
LONGEST_LESSON = 900.0  # seconds that a run has to learn
KEPT = 10  # records of faults, of each worker
LINES = 9  # at least: three of each third
SLACK = {"MB": 8.0, "descriptors": 5.0, "threads": 2.0, "files": 4.0}
"""What each may grow by besides: that of a worker which lives at one moment and not at
another."""
SLOWER = 0.75  # steps/s, as a share of what they were


class TwoPoles(pettingzoo.ParallelEnv[str, Any, Any]):
    """Two CartPoles that two agents hold, until both have fallen; who has fallen is paid
    nothing more."""

    def __init__(self, faults: str) -> None:
        self.metadata, self.possible_agents = {"name": "two_poles"}, ["left", "right"]
        self._poles = {
            name: gymnasium.wrappers.TimeLimit(Faulty(faults), 500) for name in self.possible_agents
        }
        pole = self._poles["left"]
        self.observation_spaces = dict.fromkeys(self._poles, pole.observation_space)
        self.action_spaces = dict.fromkeys(self._poles, pole.action_space)

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        seeds = {name: None if seed is None else seed + number for number, name in enumerate(self._poles)}
        return {name: pole.reset(seed=seeds[name])[0] for name, pole in self._poles.items()}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        answers = {name: self._poles[name].step(action) for name, action in actions.items()}
        self.agents = [name for name, (_, _, over, cut, _) in answers.items() if not (over or cut)]
        columns = [{name: answer[place] for name, answer in answers.items()} for place in range(4)]
        return *columns, {name: {} for name in answers}


def learns(policies: Sequence[str], environment: Any, mark: str) -> Experiment:
    """PPO's usual settings, in processes of their own for each policy's trainer and
    worker."""
    several = len(policies) > 1
    specs = tuple(
        AgentSpec(
            inference=f"answers_{name}",
            policy=name,
            samples=name,
            sample_steps=128,
            **{"match": name} if several else {},
        )
        for name in policies
    )
    workers: dict[str, Any] = {
        "actor": Actors(
            environment=environment,
            lanes=4,
            slots=2,
            agents=specs,
            **LASTING,
        )
    }
    for name in policies:
        algorithm = PPO(minibatch_size=64, epochs=10)
        workers[f"server_{name}"] = PolicyWorkers(stream=f"answers_{name}", policies=(name,), restarts=1000)
        workers[f"trainer_{name}"] = Trainer(
            algorithm=algorithm,
            policy=name,
            samples=name,
            restarts=1000,
            checkpoint_seconds=1.0,
            checkpoint_share=0.5,
        )
    return Experiment(
        name="marks",
        policies=dict.fromkeys(policies, ActorCritic()),
        workers=workers,
        limits=Limits(until=mark, steps=3_000_000, stall_s=60.0),
    )


def one_policy() -> Experiment:
    faulty = Gymnasium(
        make=f"{faulty_file}:Faulty", kwargs={"faults": os.environ["FAULTS"]}, max_episode_steps=500
    )
    return learns(["policy"], faulty, "return/mean >= 475")


def two_policies() -> Experiment:
    poles = PettingZoo(make=f"{__file__}:TwoPoles", kwargs={"faults": os.environ["FAULTS"]})
    return learns(["left", "right"], poles, "return/left/mean >= 475 and return/right/mean >= 475")


def not_level(lines: Sequence[dict[str, float]]) -> list[str]:
    """Return what has grown, or become slower, from the middle third of these to the
    last one, in words."""
    third = len(lines) // 3
    if len(lines) < LINES:
        return [f"{len(lines)} lines do not tell what grows; give it longer, or a shorter gap"]
    middle, last = (
        {name: statistics.median(line[name] for line in part) for name in lines[0]}
        for part in (lines[-2 * third : -third], lines[-third:])
    )
    wrong = [
        f"{name} grew from {middle[name]:,.0f} to {last[name]:,.0f}"
        for name, slack in SLACK.items()
        if last[name] > 1.05 * middle[name] + slack
    ]
    if last["steps/s"] < SLOWER * middle["steps/s"]:
        wrong.append(f"steps/s fell from {middle['steps/s']:,.0f} to {last['steps/s']:,.0f}")
    return wrong


def held(run: Run) -> dict[str, float]:
    """Return what the processes of a run hold, and how many files it has."""
    found = dict.fromkeys(SLACK, 0.0)
    for process in (psutil.Process(run.main.pid), *processes(run.main.pid).values()):
        with suppress(psutil.Error):  # it dies meanwhile
            found["MB"] += process.memory_full_info().uss / 1e6
            found["descriptors"] += process.num_fds()
            found["threads"] += process.num_threads()
    for folder, inner, files in os.walk(run.path):  # what goes meanwhile is no error
        if folder == str(run.path):
            inner[:] = [name for name in inner if name != "faults"]
        found["files"] += len(files)
    return found


class Had:
    """The faults that a run was to have, and has had."""

    def __init__(self, run: Run, draw: random.Random) -> None:
        self._run, self._draw = run, draw
        self._asked, self._had = 0, Counter[str]()

    def one_of(self, faults: Sequence[str]) -> None:
        """Have one more, of these."""
        fault = self._draw.choice(faults)
        self._asked += 1
        with suppress(NoFault):
            self._run.suffer(fault, self._draw)
            self._had[fault] += 1

    def came(self) -> Counter[str]:
        """Return how many came of each."""
        return self._had - Counter(self._run.waiting())

    def too_few(self) -> list[str]:
        """Return in words that most did not come, where it is so."""
        came = self.came().total()
        return [f"of {self._asked} faults {came} came"] * (2 * came < self._asked)

    def __str__(self) -> str:
        return ", ".join(f"{count} {fault}" for fault, count in sorted(self.came().items()))


def soak(layout: Callable[[], Experiment], seconds: float, gap: float, draw: random.Random) -> list[str]:
    """Have one fault after another, and print what the run holds meanwhile. Return what
    is wrong."""
    lines = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run = Run(Path(name), layout)
        stack.callback(run.kill)
        began = told = time.monotonic()
        had, before = Had(run, draw), (time.time(), 0.0)
        if not run.wait_for(run.newest):
            sys.exit(f"the run did not begin:\n{run.output.read_text()}")
        print("  time  faults      MB  descriptors  threads  files  update      steps/s", flush=True)
        while time.monotonic() - began < seconds and run.main.poll() is None:
            time.sleep(gap)
            had.one_of(FAULTS)
            if time.monotonic() - told < min(60.0, seconds / (2 * LINES)):
                continue
            told = time.monotonic()
            record, now = run.newest(), time.time()
            steps, (at, last) = record.get("step", 0.0), before
            before = now, steps
            line = held(run) | {"steps/s": (steps - last) / (now - at)}
            lines.append(line)
            print(
                f"{told - began:>5.0f}s {had.came().total():>7} {line['MB']:>7.0f} "
                f"{line['descriptors']:>12.0f} {line['threads']:>8.0f} {line['files']:>6.0f} "
                f"{record.get('update', 0):>7.0f} {line['steps/s']:>12,.0f}",
                flush=True,
            )
        status = run.end(signal.SIGTERM)
        lives = Counter(event.what for event in read_events(run.path))
        returns = [r["evaluation/return"] for r in read_metrics(run.path) if "evaluation/return" in r]
        best, left = max(returns, default=0.0), run.left()
        print(
            f"{had}: {lives['died']} workers died, {lives['lives']} live again, {lives['went back']} "
            f"times back to a checkpoint; status {status}; {len(returns)} evaluations, the best {best:.0f}; "
            f"left: {left or 'nothing'}"
        )
        if status != ASKED:
            print(run.output.read_text()[-3000:])
        kept = {path.name: len([*path.iterdir()]) for path in run.path.glob("faults/*")}
        return [
            *[f"it ended with {status}"] * (status != ASKED),
            *had.too_few(),
            *[f"it left {left}"] * bool(left),
            *(f"{count} records of faults of {name}" for name, count in kept.items() if count > KEPT),
            *not_level(lines),
        ]


def marks(gap: float, draw: random.Random) -> list[str]:
    """Have faults all the while that something is learnt, until it is; print how long
    that took. Return what is wrong."""
    wrong = list[str]()
    for function in (one_policy, two_policies):
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            run, began = Run(Path(name), function), time.monotonic()
            had = Had(run, draw)
            stack.callback(run.kill)
            run.wait_for(run.newest)
            while run.main.poll() is None and time.monotonic() - began < LONGEST_LESSON:
                time.sleep(draw.uniform(0.5, 1.5) * gap)
                had.one_of([fault for fault in FAULTS if fault != "huge"])  # returns have it
            status = run.end(signal.SIGTERM)
            record, lives = run.newest(), Counter(event.what for event in read_events(run.path))
            reached = ", ".join(
                f"{metric} {value:.0f}"
                for metric, value in record.items()
                if metric.startswith("return/") and metric.endswith("mean")
            )
            left = run.left()
            print(
                f"{function.__name__}: {reached} after {record.get('step', 0):,.0f} env steps and "
                f"{time.monotonic() - began:.0f} s; {had}: {lives['died']} workers died, {lives['lives']} "
                f"live again, {lives['went back']} times back to a checkpoint; status {status}; left: "
                f"{left or 'nothing'}",
                flush=True,
            )
            if status:
                print(run.output.read_text()[-3000:])
                wrong.append(f"{function.__name__} was not learnt: status {status}")
            wrong += [f"{function.__name__} left {left}"] * bool(left) + had.too_few()
    return wrong


def main() -> int:
    """Do what the command line says. Return 1 where something is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--gap", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--layout", choices=LAYOUTS, default="apart")
    parser.add_argument("--marks", action="store_true", help="learn two tasks to their marks meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    if given.marks:
        wrong = marks(given.gap, draw)
    else:
        wrong = soak(LAYOUTS[given.layout], given.seconds, given.gap, draw)
    for line in wrong:
        print(f"wrong: {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
