"""Environments that fail in some of their episodes, which follow from what a reset draws
and from the actions since."""

from typing import Any

import gymnasium
import numpy as np
from pettingzoo import ParallelEnv

STEP = 5  # in which an episode that is to fail does
LONG = 5_000_000  # characters of a text that no record needs


class Panic(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


class Wordless(Exception):
    """Nobody can say what it says."""

    def __str__(self) -> str:
        raise RuntimeError("str fails")


class Spoilt(gymnasium.Env[Any, Any]):
    """Sees (steps, what its reset drew, the sum of its actions), in one array that it
    writes over. Where less than a half was drawn, it fails in its fifth step as `fault`
    says; "once": for the first time in this process alone."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    failed = False

    def __init__(self, fault: str = "nan") -> None:
        self.fault, self.seen = fault, np.zeros(3, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seen[:] = 0, self.np_random.random(), 0
        return self.seen.copy(), {}

    def step(self, action: Any) -> Any:
        self.seen[0] += 1
        self.seen[2] += action
        told, reward = self.seen.copy(), 1.0
        infos = {"sum": self.seen[2], "arm": object(), "at": [1, 2]}
        over = bool(self.seen[0] == STEP)
        if over and self.seen[1] < 0.5:
            match self.fault:
                case "nan":
                    told[1] = np.nan
                case "reward":
                    reward = float("-inf")
                case "shape":
                    told = told[:2]
                case "raise":
                    raise RuntimeError("the arm is stuck")
                case "panic":
                    raise Panic("the arm is stuck")
                case "wordless":
                    raise Wordless
                case "long":
                    raise ValueError("x" * LONG)
                case "long infos":
                    told[1] = np.nan
                    infos |= {"k" * LONG: 1.0, "text": "t" * LONG}
                case "once" if not Spoilt.failed:
                    Spoilt.failed = True
                    raise RuntimeError("the cable was loose")
        return told, reward, over, False, infos


class Vector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Each lane sees (lane, steps); in step 7 of all, lane 1 tells NaN."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.calls = num_envs, 0
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def see(self) -> Any:
        return np.stack([np.arange(self.num_envs), np.full(self.num_envs, self.calls)], 1, dtype=np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.calls = 0
        return self.see(), {}

    def step(self, actions: Any) -> Any:
        self.calls += 1
        seen, nothing = self.see(), np.zeros(self.num_envs, np.bool_)
        if self.calls == 7:
            seen[1, 1] = np.nan
        return seen, np.ones(self.num_envs), nothing, nothing, {}

    def close(self, **kwargs: Any) -> None:
        pass


class Both(ParallelEnv):  # type: ignore[misc]
    """Two agents that see (steps, what the reset drew); "b" tells NaN in the fifth step
    where less than a half was drawn."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:
        return Spoilt.observation_space

    def action_space(self, agent: str) -> Any:
        return Spoilt.action_space

    def see(self) -> Any:
        return {agent: np.array([self.steps, self.drawn, 0], np.float32) for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = [*self.possible_agents], 0
        self.drawn = np.random.default_rng(seed).random()
        return self.see(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        told, over = self.see(), self.steps == STEP
        if over and self.drawn < 0.5:
            told["b"][2] = np.nan
        agents, self.agents = self.agents, [] if over else self.agents
        ends, goes_on = dict.fromkeys(agents, over), dict.fromkeys(agents, False)
        return told, dict.fromkeys(agents, 1.0), ends, goes_on, {agent: {} for agent in agents}
