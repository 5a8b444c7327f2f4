"""Runs that resume exactly and in which somebody dies as they end, in a file of their
own: trainers' processes run it."""

import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.run.cut_experiments import experiment, two_policies

from tidemill import PPO, Experiment, Limits
from tidemill.algorithms.ppo import PPOLearner

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
