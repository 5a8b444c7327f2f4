"""One game of ale-py's vector environment as a `gymnasium.Env`, for a server to play:
what training sees of it, preprocessing included."""

from typing import Any

import gymnasium
import numpy as np


class OneGame(gymnasium.Env[Any, Any]):
    """The environment takes over a vector environment of one game. It is reset whenever
    whoever plays it asks, so that the library never begins a game by itself."""

    def __init__(self, games: Any, clip: bool) -> None:
        self._games, self._clip, self._score = games, clip, 0.0
        self.observation_space, self.action_space = games.single_observation_space, games.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._score = 0.0
        observation, _ = self._games.reset(seed=seed)
        return observation[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self._games.step(np.array([action]))
        self._score += float(reward[0])
        paid = np.clip(reward[0], -1, 1) if self._clip else reward[0]
        return observation[0], float(paid), bool(terminated[0]), bool(truncated[0]), {"score": self._score}

    def close(self) -> None:
        self._games.close()
