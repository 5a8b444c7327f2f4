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
each minute it prints memory, descriptors, files and steps/s, and in the end what is left.

With `--marks` CartPole, and two CartPoles in one environment that two policies play by a
policy worker each, are learnt until episodes have a mean return of 475, with such faults
all the while. `moments.py` has a fault at each moment of a run.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import pettingzoo
import psutil
from fault_rows.runs import processes
from faulty import FAULTS, LASTING, LAYOUTS, Faulty, Run
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


def soak(layout: Callable[[], Experiment], seconds: float, gap: float, draw: random.Random) -> None:
    """Have one fault after another, and print what the run holds meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), layout)
        began = told = time.monotonic()
        had, before = Counter[str](), (time.time(), 0.0)
        if not run.wait_for(run.newest):
            sys.exit(f"the run did not begin:\n{run.output.read_text()}")
        print("  time  faults      MB  descriptors  threads  files  update      steps/s", flush=True)
        while time.monotonic() - began < seconds and run.main.poll() is None:
            time.sleep(gap)
            fault = draw.choice(FAULTS)
            had[fault] += 1
            run.suffer(fault, draw)
            if time.monotonic() - told < min(60.0, seconds / 5):
                continue
            told = time.monotonic()
            every = [psutil.Process(run.main.pid), *processes(run.main.pid).values()]
            used, descriptors, threads = 0, 0, 0
            for process in every:
                with suppress(psutil.Error):  # it dies meanwhile
                    used += process.memory_full_info().uss
                    descriptors += process.num_fds()
                    threads += process.num_threads()
            record, now = run.newest(), time.time()
            steps, (at, last) = record.get("step", 0.0), before
            before = now, steps
            files = sum(len(files) for _, _, files in os.walk(run.path))
            print(
                f"{told - began:>5.0f}s {had.total():>7} {used / 1e6:>7.0f} {descriptors:>12} {threads:>8} "
                f"{files:>6} {record.get('update', 0):>7.0f} {(steps - last) / (now - at):>12,.0f}",
                flush=True,
            )
        status = run.end(signal.SIGTERM)
        lives = Counter(event.what for event in read_events(run.path))
        returns = [r["evaluation/return"] for r in read_metrics(run.path) if "evaluation/return" in r]
        counts = ", ".join(f"{count} {fault}" for fault, count in sorted(had.items()))
        best = max(returns, default=0.0)
        print(
            f"{counts}: {lives['died']} workers died, {lives['lives']} live again, {lives['went back']} "
            f"times back to a checkpoint; status {status}; {len(returns)} evaluations, the best {best:.0f}; "
            f"left: {run.left() or 'nothing'}"
        )
        if status != ASKED:
            print(run.output.read_text()[-3000:])


def marks(gap: float, draw: random.Random) -> None:
    """Have faults all the while that something is learnt, until it is; print how long
    that took."""
    for function in (one_policy, two_policies):
        with tempfile.TemporaryDirectory() as name:
            run, began, had = Run(Path(name), function), time.monotonic(), Counter[str]()
            run.wait_for(run.newest)
            while run.main.poll() is None and time.monotonic() - began < LONGEST_LESSON:
                time.sleep(draw.uniform(0.5, 1.5) * gap)
                fault = draw.choice([fault for fault in FAULTS if fault != "huge"])  # returns have it
                had[fault] += 1
                run.suffer(fault, draw)
            status = run.end(signal.SIGTERM)
            record, lives = run.newest(), Counter(event.what for event in read_events(run.path))
            reached = ", ".join(
                f"{metric} {value:.0f}"
                for metric, value in record.items()
                if metric.startswith("return/") and metric.endswith("mean")
            )
            counts = ", ".join(f"{count} {fault}" for fault, count in sorted(had.items()))
            print(
                f"{function.__name__}: {reached} after {record.get('step', 0):,.0f} env steps and "
                f"{time.monotonic() - began:.0f} s; {counts}: {lives['died']} workers died, {lives['lives']} "
                f"live again, {lives['went back']} times back to a checkpoint; status {status}; left: "
                f"{run.left() or 'nothing'}",
                flush=True,
            )
            if status:
                print(run.output.read_text()[-3000:])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--gap", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--layout", choices=LAYOUTS, default="apart")
    parser.add_argument("--marks", action="store_true", help="learn two tasks to their marks meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    if given.marks:
        marks(given.gap, draw)
    else:
        soak(LAYOUTS[given.layout], given.seconds, given.gap, draw)


if __name__ == "__main__":
    main()
