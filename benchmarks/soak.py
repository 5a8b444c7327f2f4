"""What a run survives in the long run: random faults, one every 20 s, while it trains
CartPole in processes with a policy worker and an evaluation.

    python benchmarks/soak.py                     # an hour
    python benchmarks/soak.py --seconds 300 --gap 10
    python benchmarks/soak.py --moments 4         # each fault at 20 moments, five kinds
    python benchmarks/soak.py --marks --gap 2     # is learnt what is to be learnt?

A fault is one of: kill -9 of any worker; SIGSTOP of any for some seconds; and in an
actor's environment an exception, NaN in an observation, a reward of 3e38 (which makes
learning's numbers infinite), or a step that never comes back. For each minute it prints
memory, descriptors, files and steps/s, and in the end what is left.

With `--moments` a short run gets one fault each, at a random moment of its start-up, of
an evaluation, as it writes a checkpoint, as it ends, or at any; it prints how many came
to their limit all the same, and how the others ended.

With `--marks` CartPole, and two CartPoles in one environment that two policies play by a
policy worker each, are learnt until episodes have a mean return of 475, with such faults
all the while.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import psutil
from deaths import left_behind, processes
from gymnasium.envs.classic_control import CartPoleEnv

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    PolicyWorkers,
    Trainer,
)
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events

LOOK_EVERY = 64  # steps of a lane between looks at whether it is to have a fault
DEADLINE = 5.0  # seconds after which a step counts as hung
SHORT = 100  # updates of a run that gets one fault
ASKED = 128 + signal.SIGTERM  # the exit status of a run that was told to end
LONGEST = 120.0  # seconds that such a run has
LONGEST_LESSON = 900.0  # and one that is to learn
ENVIRONMENT = ("raise", "nan", "huge", "hang")
FAULTS = ("kill", "stop", *ENVIRONMENT)
MOMENTS = ("start", "evaluation", "saving", "ending", "any")


class Faulty(CartPoleEnv):
    """CartPole that takes the faults which lie in a folder, each once."""

    def __init__(self, faults: str) -> None:
        super().__init__()
        self._faults, self._left = faults, LOOK_EVERY

    def step(self, action: Any) -> Any:
        observation, reward, over, cut, info = super().step(action)
        self._left -= 1
        if self._left == 0:
            self._left = LOOK_EVERY
            for fault in os.listdir(self._faults):
                with suppress(FileNotFoundError):  # another lane was before this one
                    os.unlink(f"{self._faults}/{fault}")
                    observation, reward = self._suffer(fault, observation, reward)
        return observation, reward, over or cut, False, info

    def _suffer(self, fault: str, observation: Any, reward: Any) -> tuple[Any, Any]:
        if fault == "raise":
            raise RuntimeError("the pole is gone")
        if fault == "hang":
            time.sleep(1e6)
        if fault == "nan":
            return np.full_like(observation, np.nan), reward
        return observation, 3e38


def experiment(updates: int) -> Experiment:
    """Two actors, a policy worker, a trainer and an evaluation, each in a process of its
    own."""
    faulty = Gymnasium(
        make=f"{__file__}:Faulty", kwargs={"faults": os.environ["FAULTS"]}, max_episode_steps=500
    )
    lasting: dict[str, Any] = {"deadline_s": DEADLINE, "restarts": 1000, "lane_restarts": 1000}
    judge = AgentSpec(
        inference="inline", parameters=Drawn(tag="evaluating"), samples="evaluation", mode="concise",
        deterministic=True,
    )  # fmt: skip
    return Experiment(
        name="soak",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                count=2,
                environment=faulty,
                lanes=16,
                agents=(AgentSpec(inference="inference", sample_steps=32),),
                **lasting,
            ),
            "server": PolicyWorkers(stream="inference", restarts=1000),
            "trainer": Trainer(
                algorithm=PPO(minibatch_size=512),
                restarts=1000,
                checkpoint_seconds=1.0,
                checkpoint_share=0.5,
                database_seconds=1.0,
            ),
            "judge": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(judge,), **lasting),
            "evaluation": Evaluation(games=16, restarts=1000),
        },
        limits=Limits(updates=updates, stall_s=60.0),
    )


def endless() -> Experiment:
    return experiment(100_000_000)


def short() -> Experiment:
    return experiment(SHORT)


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
            deadline_s=DEADLINE,
            restarts=1000,
            lane_restarts=1000,
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
        make=f"{__file__}:Faulty", kwargs={"faults": os.environ["FAULTS"]}, max_episode_steps=500
    )
    return learns(["policy"], faulty, "return/mean >= 475")


def two_policies() -> Experiment:
    poles = PettingZoo(make=f"{__file__}:TwoPoles", kwargs={"faults": os.environ["FAULTS"]})
    return learns(["left", "right"], poles, "return/left/mean >= 475 and return/right/mean >= 475")


class Run:
    """A run of one of these experiments, in a folder of its own."""

    def __init__(self, function: Callable[[], Experiment], folder: Path) -> None:
        self.folder, self.path, self.faults = folder, folder / "run", folder / "faults"
        self.faults.mkdir()
        words = [f"{__file__}:{function.__name__}", "--launch", "processes", "--layout", "given"]
        variables = {**os.environ, "TMPDIR": str(folder), "FAULTS": str(self.faults)}
        with (folder / "output.txt").open("wb") as output:
            self.main = subprocess.Popen(
                ["tidemill", "train", *words, "--run-dir", str(self.path), "--log", ""],
                stdout=output, stderr=output, env=variables,
            )  # fmt: skip

    def suffer(self, fault: str, draw: random.Random, whose: str = "") -> None:
        """Have one of these faults: of a worker whose name begins so, where it is one of
        a process."""
        if fault in ENVIRONMENT:
            (self.faults / fault).touch()
            return
        with suppress(psutil.Error, IndexError):
            workers = {name: p for name, p in processes(self.main.pid).items() if name.startswith(whose)}
            process = workers[draw.choice(sorted(workers))]
            if fault == "kill":
                process.kill()
                return
            process.suspend()
            back = threading.Timer(draw.uniform(1.0, 8.0), self._resume, (process,))
            back.daemon = True
            back.start()

    def _resume(self, process: psutil.Process) -> None:
        with suppress(psutil.Error):
            process.resume()

    def newest(self) -> dict[str, float]:
        """Return the newest record of an update."""
        with suppress(OSError):
            for line in reversed((self.path / "metrics.jsonl").read_bytes()[-20_000:].splitlines()):
                with suppress(ValueError):
                    if "update" in (record := json.loads(line)):
                        return dict(record)
        return {}

    def wait_for(self, holds: Callable[[], object]) -> bool:
        """Wait until something holds; False where the run ended before."""
        until = time.monotonic() + LONGEST
        while not holds():
            if self.main.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def end(self, asks: bool, seconds: float = LONGEST) -> int | None:
        """Wait for its end, which it is told if it `asks`. Return its exit status; None
        where it had to be killed."""
        if asks:
            self.main.send_signal(signal.SIGTERM)
        try:
            return self.main.wait(seconds)
        except subprocess.TimeoutExpired:
            self.main.kill()
            self.main.wait()
            return None


def soak(seconds: float, gap: float, draw: random.Random) -> None:
    """Have one fault after another, and print what the run holds meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(endless, Path(name))
        began = told = time.monotonic()
        had, before = Counter[str](), (time.time(), 0.0)
        if not run.wait_for(run.newest):
            sys.exit(f"the run did not begin:\n{(run.folder / 'output.txt').read_text()}")
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
        status = run.end(asks=True)
        lives = Counter(event.what for event in read_events(run.path))
        returns = [r["evaluation/return"] for r in read_metrics(run.path) if "evaluation/return" in r]
        counts = ", ".join(f"{count} {fault}" for fault, count in sorted(had.items()))
        best = max(returns, default=0.0)
        print(
            f"{counts}: {lives['died']} workers died, {lives['lives']} live again, {lives['went back']} "
            f"times back to a checkpoint; status {status}; {len(returns)} evaluations, the best {best:.0f}; "
            f"left: {left_behind(run.folder)} (one holds the faults)"
        )
        if status != ASKED:
            print((run.folder / "output.txt").read_text()[-3000:])


def at_moment(moment: str, fault: str, draw: random.Random) -> str:
    """Have a fault at some moment of a short run. Return how that ended, in words."""
    with tempfile.TemporaryDirectory() as name:
        run, whose, update = Run(short, Path(name)), "", draw.randint(5, SHORT // 2)
        if moment == "start":
            run.wait_for(lambda: processes(run.main.pid))
            time.sleep(draw.uniform(0.0, 1.5))
        elif moment == "evaluation":
            run.wait_for(lambda: run.newest().get("update", 0) >= 5)
            time.sleep(draw.uniform(0.0, 1.5))
            whose = draw.choice(["judge", "evaluation"])
        elif moment == "saving":
            run.wait_for(lambda: run.newest().get("update", 0) >= update)
            run.wait_for(lambda: [*run.path.glob("checkpoints/policy/.update-*")])
            whose = "trainer"
        elif moment == "ending":
            run.wait_for(lambda: run.newest().get("update", 0) >= SHORT - 5)
            time.sleep(draw.uniform(0.0, 0.3))
        else:
            run.wait_for(lambda: run.newest().get("update", 0) >= 2 * update)
        run.suffer(fault, draw, whose)
        status = run.end(asks=False)
        left = left_behind(run.folder)
        clean = "" if left == "0 processes, 1 files" else f", and left {left}"
        output = (run.folder / "output.txt").read_text().strip().splitlines()
        updates = run.newest().get("update", 0)
        if status == 0 and updates == SHORT:
            return f"came to its limit{clean}"
        why = next((line for line in reversed(output) if "rror" in line), output[-1] if output else "")
        return f"status {status} after {updates:.0f} updates{clean}: {why[:200]}"


def marks(gap: float, draw: random.Random) -> None:
    """Have faults all the while that something is learnt, until it is; print how long
    that took."""
    for function in (one_policy, two_policies):
        with tempfile.TemporaryDirectory() as name:
            run, began, had = Run(function, Path(name)), time.monotonic(), Counter[str]()
            run.wait_for(run.newest)
            while run.main.poll() is None and time.monotonic() - began < LONGEST_LESSON:
                time.sleep(draw.uniform(0.5, 1.5) * gap)
                fault = draw.choice([fault for fault in FAULTS if fault != "huge"])  # returns have it
                had[fault] += 1
                run.suffer(fault, draw)
            status = run.end(asks=run.main.poll() is None)
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
                f"{left_behind(run.folder)} (one holds the faults)",
                flush=True,
            )
            if status:
                print((run.folder / "output.txt").read_text()[-3000:])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--gap", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--moments", type=int, help="each fault at so many moments of each kind")
    parser.add_argument("--marks", action="store_true", help="learn two tasks to their marks meanwhile")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    if given.marks:
        marks(given.gap, draw)
        return
    if given.moments is None:
        soak(given.seconds, given.gap, draw)
        return
    for moment in MOMENTS:
        for fault in given.faults:
            ends = Counter(at_moment(moment, fault, draw) for _ in range(given.moments))
            told = "; ".join(f"{count} {end}" for end, count in ends.most_common())
            print(f"{moment:<10} {fault:<5} {told}", flush=True)


if __name__ == "__main__":
    main()
