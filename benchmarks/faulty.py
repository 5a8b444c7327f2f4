"""Runs that suffer faults, for `soak.py` and `moments.py`: of CartPole that raises, hangs
or tells what nobody can learn from, where a file asks for that."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fault_rows.runs import processes
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
    PolicyWorkers,
    Trainer,
)

LOOK_EVERY = 64  # steps of a lane between looks at whether it is to have a fault
DEADLINE = 5.0  # seconds after which a step counts as hung
LONGEST = 120.0  # seconds that something of a run may take
ENVIRONMENT = ("raise", "nan", "huge", "hang")
FAULTS = ("kill", "stop", *ENVIRONMENT)


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


LASTING: dict[str, Any] = {"deadline_s": DEADLINE, "restarts": 1000, "lane_restarts": 1000}


def _experiment(workers: dict[str, Any], agent: AgentSpec, **settings: Any) -> Experiment:
    """Two actors whose environments suffer, trainers, and an evaluation."""
    faulty = Gymnasium(
        make=f"{__file__}:Faulty", kwargs={"faults": os.environ["FAULTS"]}, max_episode_steps=500
    )
    judge = AgentSpec(
        inference="inline", parameters=Drawn(tag="evaluating"), samples="evaluation", mode="concise",
        deterministic=True,
    )  # fmt: skip
    return Experiment(
        name="soak",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(count=2, environment=faulty, lanes=16, agents=(agent,), **LASTING),
            **workers,
            "judge": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(judge,), **LASTING),
            "evaluation": Evaluation(games=16, restarts=1000),
        },
        limits=Limits(updates=100_000_000, stall_s=60.0),
        **settings,
    )


def _trainer(count: int = 1) -> Trainer:
    return Trainer(
        count=count,
        algorithm=PPO(minibatch_size=512),
        restarts=1000,
        checkpoint_seconds=1.0,
        checkpoint_share=0.5,
        database_seconds=1.0,
    )


def apart() -> Experiment:
    """Two actors, a policy worker, a trainer and an evaluation, each in a process of its
    own."""
    server = PolicyWorkers(stream="inference", restarts=1000)
    return _experiment(
        {"server": server, "trainer": _trainer()}, AgentSpec(inference="inference", sample_steps=32)
    )


def equal() -> Experiment:
    """Two processes, each an actor and an equal trainer by turns, beside an
    evaluation."""
    return _experiment({"trainer": _trainer(2)}, AgentSpec(sample_steps=32), together=("actor", "trainer"))


LAYOUTS = {"apart": apart, "equal": equal}


class Run:
    """A run of an experiment in a folder of its own, in processes."""

    def __init__(self, folder: Path, function: Callable[[], Experiment], *more: str) -> None:
        self.folder, self.path, self.faults = folder, folder / "run", folder / "faults"
        self.faults.mkdir()
        file = Path(function.__code__.co_filename).resolve()
        words = [f"{file}:{function.__name__}", "--launch", "processes", "--layout", "given", *more]
        variables = {**os.environ, "TMPDIR": str(folder), "FAULTS": str(self.faults)}
        with (folder / "output.txt").open("wb") as output:
            self.main = subprocess.Popen(
                ["tidemill", "train", *words, "--run-dir", str(self.path), "--log", ""],
                stdout=output, stderr=output, env=variables,
            )  # fmt: skip

    def suffer(self, fault: str, draw: random.Random, whose: str = "") -> None:
        """Have one of these faults: of a process of a worker so named, where it is one of
        a process."""
        if fault in ENVIRONMENT:
            (self.faults / fault).touch()
            return
        with suppress(psutil.Error, IndexError):
            workers = {name: p for name, p in processes(self.main.pid).items() if whose in name}
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
