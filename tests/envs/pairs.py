"""Gymnasium environments of two agents, found by name as a user's would be."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Pair(gymnasium.Env[Any, Any]):
    """Two agents: each sees [game, step, its number] and is paid its action plus ten
    times its number. An episode takes five steps.

    team: whether one number is paid, the sum
    ends: how its end is told, of "all" (one truth) or of "each"; "both": the first agent
        is cut where the second one ends; else as it stands
    lacks: whether the second agent's reward is missing
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    game = -1

    def __init__(
        self, team: bool = False, ends: Any = "all", lacks: bool = False, render_mode: Any = None
    ) -> None:
        self.team, self.ends, self.lacks, self.render_mode = team, ends, lacks, render_mode
        self.observation_space = spaces.Tuple([spaces.Box(-np.inf, np.inf, (3,), np.float32)] * 2)
        self.action_space = spaces.Tuple([spaces.Discrete(4)] * 2)

    def _see(self) -> tuple[Any, ...]:
        return tuple(np.array([self.game, self.now, agent], np.float32) for agent in range(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.game, self.now = 0 if seed is not None else self.game + 1, 0
        return self._see(), {}

    def step(self, action: tuple[int, ...]) -> Any:
        self.now += 1
        rewards: Any = [int(action[agent]) + 10 * agent for agent in range(2)]
        over = self.now == 5
        ended, cut = self.ends, False
        if self.ends == "all":
            ended = over
        elif self.ends == "each":
            ended, cut = [over, self.now >= 3], np.zeros(2, bool)
        elif self.ends == "both":
            ended, cut = (False, over), [over, False]
        if self.lacks:
            rewards = rewards[:1]
        return self._see(), sum(rewards) if self.team else rewards, ended, cut, {"steps": self.now}

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8)


class Ragged(Pair):
    """Pays what is no number, and its resets take no options."""

    def reset(self, *, seed: int | None = None) -> Any:
        return super().reset(seed=seed)

    def step(self, action: tuple[int, ...]) -> Any:
        seen, rewards, *ends, _ = super().step(action)
        return seen, [np.array(rewards), 1.0], *ends, 3


class Bare(Pair):
    """Begins, or steps, without an info."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed)
        return [*answer] if self.lacks else answer

    def step(self, action: tuple[int, ...]) -> Any:
        return super().step(action)[:4]


class BothKinds(gymnasium.Env[Any, Any], ParallelEnv[str, Any, Any]):
    """Of both libraries' classes, and told as PettingZoo's."""

    possible_agents = ("a", "b")

    def observation_space(self, agent: str) -> Any:  # type: ignore[override]
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> Any:  # type: ignore[override]
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents = [*self.possible_agents]
        return dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, None)


if "Pair-v0" not in gymnasium.registry:
    gymnasium.register("Pair-v0", Pair)
    gymnasium.register("ShortPair-v0", Pair, max_episode_steps=3)
