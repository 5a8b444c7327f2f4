"""Runs that resume exactly and in which somebody dies as they end, in a file of their
own: trainers' processes run it."""

import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tests.run.cut_experiments import experiment, two_policies

from tidemill import PPO, Experiment, Gymnasium, Limits
from tidemill.algorithms.ppo import PPOLearner
from tidemill.core.cut import generator_state, set_generator_state

DYING = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class DyingPPO(PPO):
    """Its trainer's process dies, once (then there is a file `flag`), as it writes the
    run's last checkpoint, once there is a file `flag`.over."""

    flag: str

    def build(self, policy: Any, seed: int) -> Any:
        return Dying(self, policy, seed)


class Dying(PPOLearner):
    def state(self) -> Any:
        assert isinstance(self.config, DyingPPO)
        flag = Path(self.config.flag)
        callers = {frame.name for frame in traceback.extract_stack()}
        if callers & {"_on_exit", "_finish"} and not flag.exists():
            flag.touch()
            deadline = time.monotonic() + 120
            while not flag.with_suffix(".over").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state()


def dying_at_last(updates: int, flag: str) -> Experiment:
    made = two_policies(0)
    listener = made.workers["listener"].replace(algorithm=DyingPPO(minibatch_size=16, epochs=1, flag=flag))
    return made.replace(
        workers={**made.workers, "listener": listener}, limits=Limits(updates=updates), exact_resume=True
    )


@dataclass(frozen=True, kw_only=True)
class LastingPPO(PPO):
    """Its update after the first `updates` begins with a file `flag`.lasts, and lasts
    until there is a file `flag`."""

    flag: str
    updates: int

    def build(self, policy: Any, seed: int) -> Any:
        return Lasting(self, policy, seed)


class Lasting(PPOLearner):
    done = 0

    def update(self, *given: Any) -> Any:
        assert isinstance(self.config, LastingPPO)
        flag, deadline = Path(self.config.flag), time.monotonic() + 120
        if self.done == self.config.updates:
            flag.with_suffix(".lasts").touch()
            while not flag.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        self.done += 1
        return super().update(*given)


def lasting_at_last(updates: int, flag: str) -> Experiment:
    algorithm = LastingPPO(minibatch_size=32, epochs=2, flag=flag, updates=updates - 1)
    return experiment(0, updates, algorithm=algorithm)


class Fragile(gymnasium.Env[Any, Any]):
    """Its process dies, once (then there is a file `flag`), as its state is told for the
    run's last cut, once there is a file `flag`.over. While there is a file `flag`.away it
    cannot be reset."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, flag: str) -> None:
        self.flag, self.steps = Path(flag), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.flag.with_suffix(".away").exists():
            raise ConnectionRefusedError("nobody is there")
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.np_random.random(2, np.float32), float(action), self.steps == 12, False, {}

    def tidemill_state(self) -> dict[str, Any]:
        if self.flag.with_suffix(".over").exists() and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"steps": self.steps, "random": generator_state(self.np_random)}

    def load_tidemill_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        set_generator_state(self.np_random, state["random"])


def fragile(updates: int, flag: str, **actors: Any) -> Experiment:
    environment = Gymnasium(make=f"{DYING}:Fragile", kwargs={"flag": flag})
    return experiment(0, updates, environment=environment, **actors)
