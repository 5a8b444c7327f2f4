"""Which lane a thread is in is read from its calls, by whoever asks: an environment that
hangs is told with its lane."""

import threading
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv
from tests.envs.driver import Driver
from tests.envs.games import Counter

from tidemill import Asynchronous, Gymnasium, GymnasiumVector, PettingZoo
from tidemill.api.environment import EnvironmentConfig
from tidemill.core.thread_stacks import stack_of, whereabouts

STEPS = 3


class Found:
    """Where each call of an environment was, in order."""

    resets: ClassVar[list[str]] = []
    steps: ClassVar[list[str]] = []

    @classmethod
    def note(cls, found: list[str]) -> None:
        words = whereabouts(stack_of(threading.get_ident()))
        found.append(words.partition(":")[0] if words.startswith("lane ") else "")


class Single(Counter):
    def reset(self, **given: Any) -> Any:
        Found.note(Found.resets)
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        Found.note(Found.steps)
        return super().step(action)


class Awaited:
    observation_space, action_space = Counter.observation_space, Counter.action_space

    async def reset(self, **given: Any) -> Any:
        Found.note(Found.resets)
        return np.zeros(2, np.float32), {}

    async def step(self, action: Any) -> Any:
        Found.note(Found.steps)
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Pair(ParallelEnv[str, Any, Any]):
    metadata: ClassVar[dict[str, Any]] = {"name": "pair"}
    possible_agents: ClassVar[list[str]] = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return Counter.observation_space

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def _see(self) -> Any:
        return dict.fromkeys(self.agents, np.zeros(2, np.float32))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        Found.note(Found.resets)
        self.agents = [*self.possible_agents]
        return self._see(), {}

    def step(self, actions: Any) -> Any:
        Found.note(Found.steps)
        no, paid = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, 0.0)
        return self._see(), paid, no, no, {}


@pytest.mark.parametrize(
    "config",
    [
        Gymnasium(make=Single),
        Gymnasium(make=Single, threads=2),
        PettingZoo(make=Pair),
        Asynchronous(make=Awaited),
    ],
    ids=["one after the other", "threads", "games", "coroutines"],
)
def test_each_call_of_a_lane_is_known_by_its_number(config: EnvironmentConfig) -> None:
    environment = config.build(3, 0)
    Found.resets.clear()  # it may have looked at one
    Found.steps.clear()
    try:
        driver = Driver(environment)
        for _ in range(STEPS):
            driver.tick()
    finally:
        environment.close()
    lanes = ["lane 0", "lane 1", "lane 2"]
    assert sorted(Found.resets) == lanes and sorted(Found.steps) == sorted(lanes * (STEPS - 1))


def test_lanes_that_step_all_together_have_none() -> None:
    made = GymnasiumVector(id="CartPole-v1").build(3, 0, render=True)  # Gymnasium's own
    seen = list[str]()
    step = made.env.step

    def noting(actions: Any) -> Any:
        Found.note(seen)
        return step(actions)

    made.env.step = noting
    driver = Driver(made)
    for _ in range(STEPS):
        driver.tick()
    made.close()
    assert seen and {*seen} == {""}
