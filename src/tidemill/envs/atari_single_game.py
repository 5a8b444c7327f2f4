"""One game of ale-py's vector environment as a `gymnasium.Env`, for a server to play:
what training sees of it, preprocessing included."""

from typing import Any

import gymnasium
import numpy as np

from tidemill.envs.atari import LONG_AGO, Lives


class OneGame(gymnasium.Env[Any, Any]):
    """The environment takes over a vector environment of one game. It is reset whenever
    whoever plays it asks, so that the library never begins a game by itself.

    clip, lives: as of `Games`: where a lost life ends the episode, a reset without a seed
        goes on with the game
    """

    def __init__(self, games: Any, clip: bool, lives: Lives) -> None:
        self._games, self._clip, self._score = games, clip, 0.0
        self._are, self._lives, self._lost = lives, 0, False
        self._age = LONG_AGO  # steps since a life began in the midst of a game
        self.observation_space, self.action_space = games.single_observation_space, games.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None and self._lost and self._are.episodes:
            observation, _, ended, cut, _ = self.step(self._are.first)
            if not (ended or cut):
                return observation, {}
        self._score, self._lost, self._age = 0.0, False, LONG_AGO
        seen, infos = self._games.reset(seed=seed)
        self._lives = int(infos["lives"][0])
        return seen[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._age += 1
        if self._lost and self._are.first is not None:
            action, self._age = self._are.first, 0
        seen, rewards, over, cut, infos = self._games.step(np.array([action]))
        before, self._lives = self._lives, int(infos["lives"][0])
        self._score += float(rewards[0])
        ended, truncated = bool(over[0]), bool(cut[0])
        paid = np.clip(rewards[0], -1, 1) if self._clip else rewards[0]
        self._lost = self._lives < before and not (ended or truncated)
        told = {"score": self._score} if ended or truncated else {}
        if (before := len(seen[0]) - 1 - self._age) > 0:  # as of `Games`
            seen[0, :before] = 0
        return seen[0], float(paid), ended or (self._lost and self._are.episodes), truncated, told

    def close(self) -> None:
        self._games.close()
