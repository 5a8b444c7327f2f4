"""A run of two policies that resumes exactly, and of which one's trainer dies as it ends,
in a file of its own: that trainer's process runs it."""

import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.run.cut_experiments import two_policies

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
