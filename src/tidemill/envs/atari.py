"""Atari games by ale-py's own vector environment, which steps them in threads and does
the usual preprocessing itself."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import EnvironmentConfig, Tick
from tidemill.api.external_code import Outside
from tidemill.core.config import check_counts, decode
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, did_you_mean, needing
from tidemill.core.schema import Arrays
from tidemill.envs.episode_replay import TOO_LONG, KeptEpisodes, another
from tidemill.envs.multi_agent import GAMES_APART
from tidemill.envs.vector import VectorLanes

FRAMES_PER_SECOND = 60  # of the console
_CURE = 'pip install "ale-py>=0.12"'


@dataclass(frozen=True, kw_only=True)
class Atari(EnvironmentConfig):
    """An `Atari` config builds a game, with observations uint8 [stack, height, width],
    84×84 and four frames in a row unless set otherwise. At its end its info has the
    game's `score`, whatever rewards are; `evaluate` and `play` have whole games, whose
    rewards are the score.

    id: "ALE/Pong-v5", "Pong" or "pong"
    num_threads: threads that step the games; 0: one per core
    frame_skip: frames that each action is repeated for
    stack: newest frames in an observation
    size: height and width
    noop_max: a game begins with up to this many idle frames, so that games differ
    repeat_action_probability: "sticky" actions; the games of id "ALE/…-v5" in Gymnasium
        use 0.25, published scores mostly 0
    episodic_life: whether a lost life ends the episode, as of Mnih et al. 2015; the game
        goes on, and its score is that of all its lives
    reward_clipping: whether rewards become −1, 0 or 1, so that returns of training are
        not scores: these are ``info/score``
    fire_reset: whether fire is pressed at the start of games that wait for it
    fire_lives: whether it is pressed at the start of each life, too, in place of what the
        policy does: so have `evaluate` and `play` games of policies that were trained
        with `episodic_life`, to which the library did that
    full_action_space: whether there are all 18 actions, not only those that the game
        knows
    max_episode_steps: most steps (not frames) of a game, which is truncated there
    """

    id: str
    num_threads: int = 0
    frame_skip: int = 4
    stack: int = 4
    size: int = 84
    noop_max: int = 30
    repeat_action_probability: float = 0.0
    episodic_life: bool = True
    reward_clipping: bool = True
    fire_reset: bool = True
    fire_lives: bool = False
    full_action_space: bool = False
    max_episode_steps: int = 27_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(frame_skip=1, stack=1, size=1, max_episode_steps=1, num_threads=0, noop_max=0)
        self.check_shares("repeat_action_probability")

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        return decode(cls, {"kind": cls.__name__, "id": name, **settings}, "environment")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return ()

    @property
    def rewarded(self) -> str:
        parts = (["clipped to -1, 0 and 1"] if self.reward_clipping else []) + (
            ["of one life, where a game has several"] if self.episodic_life else []
        )
        return f"rewards {' and '.join(parts)}; the game's score is info/score" if parts else ""

    def scored(self) -> "Atari":
        return self.replace(
            reward_clipping=False, episodic_life=False, fire_lives=self.fire_lives or self.episodic_life
        )

    def build(self, lanes: int, seed: int, render: bool = False) -> VectorLanes:
        """Return `lanes` games. Pictures, where asked for, are the newest frame of an
        observation: the library draws no others of many games."""
        check_counts(lanes=lanes)
        env = self._games(lanes)
        picture = _newest_frame if render else None
        vector = Games(env, self.id, seed, self.reward_clipping, self._lives(env), picture)
        vector.max_episode_steps = self.max_episode_steps
        vector.render_fps = FRAMES_PER_SECOND / self.frame_skip
        return vector

    def make_one(self) -> Any:
        """Return one game as a bare `gymnasium.Env`, as a server plays it."""
        from tidemill.envs.atari_single_game import OneGame

        env = self.replace(num_threads=1)._games(1)
        return OneGame(env, self.reward_clipping, self._lives(env))

    def _lives(self, env: Any) -> "Lives":
        names = [action.name for action in env.ale.get_action_set()]
        fire = names.index("FIRE") if self.fire_reset and "FIRE" in names else None
        if not self.episodic_life:
            return Lives(False, fire if self.fire_lives else None)
        return Lives(True, fire or 0)

    def _games(self, lanes: int) -> Any:
        with needing(f'environment "{self.id}" needs', _CURE):
            from ale_py import roms
            from ale_py.vector_env import AtariVectorEnv
        # "ALE/MsPacman-v5" is the ROM "ms_pacman"
        known = {rom.replace("_", ""): rom for rom in roms.get_all_rom_ids()}
        name = re.sub(r"^ALE/|-v\d+$", "", self.id).lower().replace("_", "")
        if name not in known:
            raise ConfigError(
                f'id = "{self.id}": no such Atari game; '
                f"{did_you_mean(name, difflib.get_close_matches(name, known, n=1) or known)}"
            )
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
            # `Games` does both, whose scores are of whole games and not clipped
            episodic_life=False,
            reward_clipping=False,
            use_fire_reset=self.fire_reset,
        )


LONG_AGO = 1 << 30  # ticks


class Lives(NamedTuple):
    """What lives are to a game.

    episodes: whether a lost one ends the episode, and the next tick begins another
    first: the action of the tick in which the next life begins; None: the policy's
    """

    episodes: bool
    first: int | None


class Games(VectorLanes):
    """Atari games whose scores are recorded; `clip`: rewards are clipped."""

    def __init__(self, env: Any, name: str, seed: int, clip: bool, lives: Lives, picture: Any) -> None:
        super().__init__(env, name, seed, "next-step", partial_resets=True, halves=True, picture=picture)
        self._clip, self._are = clip, lives
        self._score = np.zeros(self.lanes)
        self._scored = np.zeros(self.lanes)  # of the games that have ended last
        self._over = np.zeros(self.lanes, np.bool_)  # lanes whose game's end the tick tells
        self._lives = np.zeros(self.lanes, np.int64)
        nobody = np.zeros(self.lanes, np.bool_)
        # lanes that have lost a life, while the game goes on; whose game ended in the
        # tick that began an episode, as done and as truncated: told a tick later; and
        # whose game begins in the tick under way
        self._lost, self._late_done, self._late_cut, self._new = (nobody.copy() for _ in range(4))
        # ticks since a life began in the midst of a game
        self._age = np.full(self.lanes, LONG_AGO)
        self._reborn = nobody  # lanes in which one begins with the tick under way
        self._kept: KeptEpisodes | None = None  # for a cut
        self._root, self._games = seed, [0] * self.lanes  # that were begun, where they are kept
        self._seeds = np.zeros(0, np.int64)  # of the games that begin with the tick under way

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """See `VectorLanes`. Of games that may be played again each begins with a seed of
        its own: where the library's random streams are it does not tell."""
        self._new = reset.copy() if self._started else np.ones(self.lanes, np.bool_)
        if self._seed is not None:  # what begins by a seed follows from nothing else
            self._lost = self._lost & ~reset
        lost = self._lost & reset if self._are.episodes else self._lost & ~reset
        if self._are.episodes and self._started:
            self._new = (reset & ~self._lost) | self._late_done | self._late_cut
        if self._are.first is not None:
            self._reborn = lost
            if lost.any():
                actions = [{"action": np.where(lost, self._are.first, actions[0]["action"])}]
        if self._kept is not None:
            self._kept.add(actions[0])
            begins = np.flatnonzero(self._new).tolist()
            self._seeds = np.array([self._begin(lane) for lane in begins], np.int64)
            if self._new.all():
                self._seed = self._seeds
        super().send(actions, self._new)
        if self._are.episodes and self._started:
            self._began = reset.copy()

    def _begin(self, lane: int) -> int:
        """Note that a lane's next game begins, and return its seed."""
        assert self._kept is not None
        seed = (self._root + lane + GAMES_APART * self._games[lane]) % (1 << 31)
        self._games[lane] += 1
        self._kept.begin(lane, self.env, seed)
        return seed

    def _to_reset(self, reset: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        forced = super()._to_reset(reset)
        return forced if self._kept is None or not reset.any() else reset.copy()

    def _asked(self, mask: NDArray[np.bool_] | None = None) -> dict[str, Any]:
        seeds = {} if self._kept is None or mask is None else {"seed": self._seeds}
        return super()._asked(mask) | seeds

    def recv(self, ticks: Sequence[Tick]) -> None:
        super().recv(ticks)
        (tick,) = ticks
        if self._new.any():
            self._score[self._new] = 0
        self._score += np.where(self._new, 0, self._result[1])
        if self._finished.any():
            self._scored[self._finished] = self._score[self._finished]
        self._over = self._finished
        if self._clip:
            np.clip(tick.reward, -1, 1, out=tick.reward)
        if self._are != (False, None):
            # where all games begin, nobody says how many lives there are; of a lane that
            # was reset on its own those of the game before are told
            lives = self._result[4].get("lives", 0)
            self._lost = (lives < self._lives) & ~(self._finished | self._began | self._new)
            self._lives = np.where(self._new, 0, lives).astype(np.int64)
        if self._are.episodes:
            self._end_episodes(tick)
        if self._are.first is not None:
            self._begin_stacks(tick.observation["obs"])

    def _end_episodes(self, tick: Tick) -> None:
        """Tell episodes' ends where a life was lost, and a tick later those of games
        which ended as their next life began."""
        late = self._began & ~self._new & self._finished
        done, cut = late & tick.done, late & tick.truncated
        tick.done[late] = tick.truncated[late] = False
        # what ended a tick ago has begun another game already, which goes on from here
        before = self._late_done | self._late_cut
        tick.done |= self._lost | self._late_done
        tick.truncated |= self._late_cut
        self._lost |= before
        self._over = (self._finished & ~late) | before
        self._late_done, self._late_cut = done, cut

    def _begin_stacks(self, frames: NDArray[np.uint8]) -> None:
        """Show blanks in place of the frames before a life's first, as the library does
        before a game's: so a replay memory that keeps single frames stacks them."""
        self._age += 1
        self._age[self._new] = LONG_AGO
        self._age[self._reborn] = 0
        newest = frames.shape[1] - 1
        for lane in np.flatnonzero(self._age < newest).tolist():
            frames[lane, : newest - self._age[lane]] = 0

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        infos = super().episode_infos(group, seats)
        return [
            info
            if self._lost[lane] and not self._over[lane]
            else {**info, "score": (self._scored if self._over[lane] else self._score)[lane]}
            for lane, info in zip(seats, infos, strict=True)
        ]

    # ---- a cut -------------------------------------------------------------------------

    def keep_episodes(self) -> None:
        self._kept = KeptEpisodes(self.lanes)

    def state(self) -> Part | None:
        if self._kept is None:
            return None
        open_lanes = np.flatnonzero(~self._finished).tolist() if self._started else []
        episodes = {str(lane): self._kept.state(lane) or {} for lane in open_lanes}
        seen = {str(lane): self._result[0][lane].copy() for lane in open_lanes}
        own = {"games": [*self._games], "score": self._score.copy(), "finished": self._finished}
        lives = {
            "lives": self._lives,
            "lost": self._lost,
            "late": [self._late_done, self._late_cut],
            "age": self._age.copy(),
        }
        return {
            **own,
            **lives,
            "root": self._root,
            "started": self._started,
            "episodes": episodes,
            "seen": seen,
        }

    def load_state(self, state: Part) -> Mapping[int, str]:
        """See `Environment`. All lanes play at once what is played again, so that those
        of longer games begin before the others."""
        self._root, self._games, self._score = state["root"], list(state["games"]), state["score"]
        self._finished, self._started = state["finished"], state["started"]
        if "lives" in state:  # which cuts of before they counted have not
            self._lives, self._lost, self._age = state["lives"], state["lost"], state["age"]
            self._late_done, self._late_cut = state["late"]
        if not self._started:
            return {}
        held = {int(lane): episode for lane, episode in state["episodes"].items()}
        episodes = {lane: episode for lane, episode in held.items() if episode}
        blank = {"action": np.zeros(self.lanes, np.int64)}
        kept = self._kept = KeptEpisodes.of(episodes, blank, [None])
        lost = dict.fromkeys(held.keys() - episodes.keys(), TOO_LONG)
        seen, _ = self.env.reset(seed=np.array([self._seed_in(episodes, lane) for lane in range(self.lanes)]))
        for number, actions in kept.ticks():
            self._begin_again(kept, episodes, number)
            seen, _, ended, cut, _ = self.env.step(actions["action"])
            for lane in episodes.keys() - lost.keys():
                if kept.begun(lane) <= number and (ended[lane] or cut[lane]):
                    lost[lane] = another("it ended before it had")
        if (begun := self._begin_again(kept, episodes, kept.now)) is not None:
            seen = begun
        for lane in episodes.keys() - lost.keys():
            if seen[lane].tobytes() != state["seen"][str(lane)].tobytes():
                lost[lane] = another("another picture in the end")
        nothing = np.zeros(self.lanes, np.bool_)
        self._result = seen.copy(), np.zeros(self.lanes, np.float32), nothing, nothing, {}
        return lost

    def _seed_in(self, episodes: Mapping[int, Part], lane: int) -> int:
        return int(episodes[lane]["seed"]) if lane in episodes else 0

    def _begin_again(self, kept: KeptEpisodes, episodes: Mapping[int, Part], number: int) -> Any:
        """Begin the games whose first step is in this tick, but for the first one: all
        were begun. Return what is seen, None where none begins."""
        lanes = [lane for lane in sorted(episodes) if number and kept.begun(lane) == number]
        if not lanes:
            return None
        mask = np.zeros(self.lanes, np.bool_)
        mask[lanes] = True
        seeds = np.array([self._seed_in(episodes, lane) for lane in lanes])
        return self.env.reset(seed=seeds, options={"reset_mask": mask})[0]


def _newest_frame(observation: Any) -> Any:
    """Lane 0's newest frame in three colours."""
    return np.repeat(observation[0, -1, :, :, None], 3, axis=2)
