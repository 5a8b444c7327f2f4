"""A run in lockstep that is killed as it goes on, and its environment, in a file of their
own: each actor's process runs it."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from gymnasium.envs.classic_control import CartPoleEnv
from tests.run.cut_experiments import MANY, experiment
from tests.run.watching import log_of

from tidemill import AgentSpec, Experiment, Gymnasium, PolicyWorkers, RecurrentActorCritic, resume, train
from tidemill.run.events import read_events
from tidemill.store.checkpoint import checkpoints
from tidemill.workers.cut_files import number_of

SLOW = Path(__file__)
PARTS = "actor-0", "served-0", "runner"


class Slow(CartPoleEnv):
    """CartPole that leaves others time to kill somebody before a run has many updates."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def slow(updates: int = MANY) -> Experiment:
    """An actor with memory and a normaliser, which a policy worker answers."""
    environment = Gymnasium(make=f"{SLOW}:Slow", max_episode_steps=20)
    spec = AgentSpec(sample_steps=4, inference="served")
    policy = RecurrentActorCritic(hidden=(8,), normalise_observations=True)
    made = experiment(0, updates, policy=policy, environment=environment, lanes=1, agents=(spec,))
    served = PolicyWorkers(stream="served")
    made = made.replace(workers={**made.workers, "served": served}, together=("actor", "trainer"))
    return made


def newest_cut(folder: Path) -> int:
    """Return the number of the newest cut of which all have written their part."""
    return min(max(map(number_of, checkpoints(folder / "cuts" / name)), default=0) for name in PARTS)


def live(folder: Path, log: str) -> None:
    """Begin a run in processes, or go on with it. It saves after each update. Once there
    is a new cut, the process with this `log` is killed; once there is another one after
    that has lived again, this one is."""
    began, struck = newest_cut(folder), list[int]()

    def on_update(record: dict[str, float], control: Any) -> None:
        control.save()
        newest = newest_cut(folder)
        if not struck and newest > began:
            (process,) = (
                each for each in psutil.Process().children() if log_of(each) == folder / "logs" / log
            )
            process.kill()
            struck.append(newest)
        lives = sum(event.what == "lives" for event in read_events(folder))
        if struck and newest > struck[0] + 1 and lives > before:
            os.kill(os.getpid(), signal.SIGKILL)

    before = sum(event.what == "lives" for event in read_events(folder))
    settings: dict[str, Any] = {"launch": "processes", "quiet": True, "on_update": on_update}
    if began:
        resume(folder, trust=True, **settings)
    else:
        train(slow(), run_dir=folder, layout="given", **settings)


if __name__ == "__main__":
    live(Path(sys.argv[1]), sys.argv[2])
