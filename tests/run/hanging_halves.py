"""An environment that steps elsewhere, in two halves, and hangs there, for runs whose
processes need nothing that tests alone need."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium

from tidemill import Experiment
from tidemill.api.environment import Environment, EnvironmentConfig
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.envs.vector import VectorLanes

experiments = load_file(Path(__file__).with_name("experiments.py"), "test")
hold = load_attribute(f"{experiments.ENVIRONMENTS}:hold", "test")


class Halves:
    """CartPoles that are stepped by `send` and `recv`; the 20th one does not come back
    before there is a file `flag`.over, but when it has hung before."""

    def __init__(self, lanes: int, flag: str) -> None:
        self._env, self._flag = gymnasium.make_vec("CartPole-v1", lanes), Path(flag)
        self._actions: Any = None
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def send(self, actions: Any) -> None:
        self._actions = actions

    def recv(self) -> Any:
        self._steps += 1
        if self._steps == 20:
            hold(self._flag)
        return self._env.step(self._actions)


@dataclass(frozen=True, kw_only=True)
class InHalves(EnvironmentConfig):
    """`Halves` as an environment."""

    flag: str

    def build(self, lanes: int, seed: int, render: bool = False) -> Environment:
        return VectorLanes(Halves(lanes, self.flag), "halves", seed, "next-step", halves=True)


def hangs_once(flag: str) -> Experiment:
    """An actor's environment hangs, once: then there is a file `flag`."""
    made = experiments.experiment(InHalves(flag=flag))
    actor = made.workers["actor"].replace(deadline_s=2.0)
    return made.replace(workers={**made.workers, "actor": actor})
