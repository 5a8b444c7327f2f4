"""Atari games by ale-py's own vector environment, which steps them in threads and does the usual preprocessing itself."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.outside import Outside
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.envs.vector import VectorLanes

_CURE = 'pip install "ale-py>=0.12"'


@dataclass(frozen=True, kw_only=True)
class Atari(EnvironmentConfig):
    """An Atari game: observations uint8 [stack, height, width], 84×84 and four frames in a row unless set otherwise.

    id                         "ALE/Pong-v5", "Pong" or "pong"
    num_threads                threads that step the games; 0: one per core
    frame_skip                 frames that each action is repeated for
    stack                      newest frames in an observation
    size                       height and width
    noop_max                   a game begins with up to this many idle frames, so that games differ
    repeat_action_probability  "sticky" actions; the games of id "ALE/…-v5" in Gymnasium use 0.25, published scores mostly 0
    episodic_life              a lost life ends the episode (the game goes on all the same)
    reward_clipping            rewards become −1, 0 or 1, so that returns of training are not scores; leave it away when playing for the score
    fire_reset                 press fire at the start of games that wait for it
    full_action_space          all 18 actions, not only those that the game knows
    max_episode_steps          a game is cut after this many steps (not frames)
    """

    id: str
    num_threads: int = 0
    frame_skip: int = 4
    stack: int = 4
    size: int = 84
    noop_max: int = 30
    repeat_action_probability: float = 0.0
    episodic_life: bool = False
    reward_clipping: bool = True
    fire_reset: bool = True
    full_action_space: bool = False
    max_episode_steps: int = 27_000

    def __post_init__(self) -> None:
        for name in ("frame_skip", "stack", "size", "max_episode_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("num_threads", "noop_max"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be 0 or more")
        if not 0 <= self.repeat_action_probability <= 1:
            raise ConfigError(f"repeat_action_probability = {self.repeat_action_probability} must lie between 0 and 1")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return ()

    def build(self, lanes: int, seed: int, render: bool = False) -> VectorLanes:
        """Return `lanes` games. Pictures, where asked for, are the newest frame of an observation: the library draws no others of many games."""
        if lanes < 1:
            raise ConfigError(f"lanes = {lanes} must be at least 1")
        env = self._games(lanes)
        vector = VectorLanes(env, self.id, seed, "next-step", partial_resets=True, halves=True, picture=_newest_frame if render else None)
        vector.max_episode_steps = self.max_episode_steps
        return vector

    def make_one(self) -> Any:
        """Return one game as a bare `gymnasium.Env`, as a server plays it."""
        from tidemill.envs.one_game import OneGame

        return OneGame(self.replace(num_threads=1)._games(1))

    def _games(self, lanes: int) -> Any:
        try:
            from ale_py import roms
            from ale_py.vector_env import AtariVectorEnv
        except ImportError as error:
            raise ConfigError(f'environment "{self.id}" needs a package that is not installed: {_CURE} ({error})') from error
        known = {rom.replace("_", ""): rom for rom in roms.get_all_rom_ids()}  # "ALE/MsPacman-v5" is the ROM "ms_pacman"
        name = re.sub(r"^ALE/|-v\d+$", "", self.id).lower().replace("_", "")
        if name not in known:
            raise ConfigError(f'id = "{self.id}": no such Atari game; {did_you_mean(name, difflib.get_close_matches(name, known, n=1) or known)}')
        return AtariVectorEnv(
            game=known[name],
            num_envs=lanes,
            num_threads=self.num_threads,
            max_num_frames_per_episode=self.max_episode_steps * self.frame_skip,
            repeat_action_probability=self.repeat_action_probability,
            full_action_space=self.full_action_space,
            img_height=self.size,
            img_width=self.size,
            stack_num=self.stack,
            frameskip=self.frame_skip,
            noop_max=self.noop_max,
            episodic_life=self.episodic_life,
            reward_clipping=self.reward_clipping,
            use_fire_reset=self.fire_reset,
        )


def _newest_frame(observation: Any) -> Any:
    """Lane 0's newest frame in three colours."""
    import numpy as np

    return np.repeat(observation[0, -1, :, :, None], 3, axis=2)
