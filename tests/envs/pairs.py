"""Gymnasium environments of two agents, found by name as a user's would be."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Pair(gymnasium.Env[Any, Any]):
    """Two agents: each sees [game, step, its number] and is paid its action plus ten
    times its number. An episode takes five steps.

    team: whether one number is paid, the sum
    ends: how its end is told, of "all" (one truth) or of "each"
    lacks: whether the second agent's reward is missing
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    game = -1

    def __init__(
        self, team: bool = False, ends: str = "all", lacks: bool = False, render_mode: Any = None
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
        ended: Any = over if self.ends == "all" else [over, self.now >= 3]
        if self.lacks:
            rewards = rewards[:1]
        return self._see(), sum(rewards) if self.team else rewards, ended, False, {"steps": self.now}

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8)


if "Pair-v0" not in gymnasium.registry:
    gymnasium.register("Pair-v0", Pair)
