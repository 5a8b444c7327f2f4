"""Environments whose every number is known beforehand: for checks, tests and
measurements."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.external_code import Outside
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.config import acting, check_counts
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.schema import Arrays
from tidemill.envs.tick_check import TickCheck

Ints = NDArray[np.int64]
KINDS = ("red", "blue")
ACTIONS = 4


def reward_of(lane: Any, agent: Any, episode: Any, row: Any, action: Any) -> Any:
    """The reward of one action of `Scripted`: exact in float32, and telling apart all
    rows of 128 seats × 16 episodes × 128 rows × 8 actions."""
    return action + 8 * (row % 128) + 1024 * (episode % 16) + 16384 * ((lane * 16 + agent) % 128)


def _mix(*numbers: Any) -> Any:
    """Numbers without a pattern, the same on every machine."""
    h: Any = 0
    for number in numbers:
        h = (h + np.asarray(number, np.int64) + 1) * 1103515245 % 2147483648
        h = (h ^ h >> 13) * 12345 % 2147483647
    return h >> 7


@dataclass(frozen=True, kw_only=True)
class Scripted(EnvironmentConfig):
    """A scripted environment has lanes × agents whose observations, rewards and ends are
    known functions of (lane, agent, episode, row).

    An observation is float32 [lane, agent, episode, row, tick]: row counts the agent's
    own actions in the episode, tick those of the lane. Agents of kind "blue" see one
    number more, 1, so that there are two specs. Rewards are `reward_of`; a seat that was
    absent gets what it is owed when it is next present, or when its episode closes.

    agents: per lane, named red_0, red_1, … or, with two kinds, red_0, blue_1, red_2, …
    kinds: 1 or 2
    shortest, longest: the length of a lane's episodes, in ticks, is
        `length(lane, episode)` between these
    truncations: every third episode is cut instead of ended
    deaths: about half of the agents end before their lane does
    turns: agent a is present at ticks t with t % turns == a % turns; 1: always
    same_step: a lane begins its next episode in the tick that ends one
    delay: seconds from `send` until the tick is ready
    fault: what goes wrong in tick `fault_tick` (counted from 0), in the last lane:
        "raise", "shape", "nan" (an observation), "reward" (not finite), "hang" (never
        ready again)
    """

    agents: int = 1
    kinds: int = 1
    shortest: int = 3
    longest: int = 12
    truncations: bool = True
    deaths: bool = False
    turns: int = 1
    same_step: bool = False
    delay: float = 0.0
    fault: Literal["raise", "shape", "nan", "reward", "hang"] | None = None
    fault_tick: int = acting(0, lambda scripted: scripted.fault is not None, "without a fault")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(agents=1, shortest=1, turns=1)
        if self.longest < self.shortest:
            raise ConfigError(f"longest = {self.longest} must be at least shortest = {self.shortest}")
        if self.shortest < self.turns:
            raise ConfigError(
                f"shortest = {self.shortest} must be at least turns = {self.turns}, so that every agent acts "
                "before its episode is over"
            )
        if self.kinds not in (1, 2):
            raise ConfigError(f"kinds = {self.kinds} must be 1 or 2")
        if self.same_step and self.turns > 1:
            raise ConfigError(
                f"same_step goes with turns = 1 only, not {self.turns}: an absent seat has no final "
                "observation"
            )

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return ()

    def build(self, lanes: int, seed: int, render: bool = False) -> "ScriptedEnvironment":
        """Return the environment; `seed` changes nothing (`Environment.seed` does)."""
        check_counts(lanes=lanes)
        return ScriptedEnvironment(self, lanes)

    def length(self, lane: Any, episode: Any) -> Any:
        """Ticks until the lane's episode is over."""
        return self.shortest + _mix(lane, episode) % (self.longest - self.shortest + 1)

    def cut(self, lane: Any, episode: Any) -> Any:
        """True when the lane's episode is truncated."""
        return np.asarray((lane + episode) % 3 == 2) & self.truncations

    def death(self, lane: Any, agent: Any, episode: Any) -> Any:
        """The tick at which the agent dies; beyond the lane's episode when it does
        not."""
        roll = _mix(lane, agent, episode, 7)
        return np.where((roll % 2 == 0) & self.deaths, self.turns + roll // 2 % self.longest, 2**40)


class ScriptedEnvironment(Environment):
    """What `Scripted` describes. State is [lanes, agents] throughout."""

    def __init__(self, config: Scripted, lanes: int) -> None:
        """Prepare `lanes` lanes; the first `send` begins their episode 0."""
        self.config = config
        self.lanes = lanes
        self.same_step = config.same_step
        self.max_episode_steps = config.longest
        self.agents = tuple(
            AgentInfo(
                f"{KINDS[a % config.kinds]}_{a}",
                Spaces(Box((5 + a % config.kinds,), "float32"), Discrete(ACTIONS)),
            )
            for a in range(config.agents)
        )
        shape = (lanes, config.agents)
        self._lane = np.arange(lanes)[:, None]
        self._agent = np.arange(config.agents)[None, :]
        self._episode = np.full((lanes, 1), -1)
        self._tick = np.zeros((lanes, 1), np.int64)
        self._row = np.zeros(shape, np.int64)
        self._alive = np.zeros(shape, np.bool_)
        self._acts = np.zeros(shape, np.bool_)  # seats whose newest row awaits an action
        self._owed = np.zeros(shape, np.float32)
        self._groups: list[Any] = []
        self._names: list[list[str]] = []
        self._checks: list[TickCheck] = []
        self._due = 0.0
        self._count = -1
        self._closed = threading.Event()
        self._wake: Callable[[], None] | None = None

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [
            slice(None) if list(group) == list(range(self.config.agents)) else list(group) for group in groups
        ]
        self._names = [[self.agents[a].name for a in group] for group in groups]
        firsts = [self.agents[group[0]].spaces.observation for group in groups]
        self._checks = [
            TickCheck(space, "Scripted", names) for space, names in zip(firsts, self._names, strict=True)
        ]

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._count += 1
        shape = self._row.shape
        action = np.zeros(shape, np.int64)
        for group, given in zip(self._groups, actions, strict=True):
            action[:, group] = given["action"].reshape(self.lanes, -1)
        # [L, 1]; a finished lane that is not reset is idle
        steps = ~reset[:, None] & self._alive.any(axis=1, keepdims=True)
        acts = self._acts & steps
        self._owed += np.where(acts, reward_of(self._lane, self._agent, self._episode, self._row, action), 0)
        self._row += acts
        self._tick += steps
        self._reward = np.zeros(shape, np.float32)
        self._final_row = self._row
        self._final_tick = self._tick
        self._final_episode = self._episode
        over = steps & (self._tick >= self.config.length(self._lane, self._episode))
        cut = over & self.config.cut(self._lane, self._episode)
        dies = steps & self._alive & (self._tick >= self.config.death(self._lane, self._agent, self._episode))
        self._done = dies | (self._alive & over & ~cut)
        self._truncated = self._alive & cut & ~self._done
        present = steps & self._alive & (self._on_turn() | dies)
        self._alive = self._alive & ~self._done & ~self._truncated
        begins = reset[:, None]
        self._restarted = np.zeros(shape, np.bool_)
        if self.same_step:
            again = steps & ~self._alive.any(axis=1, keepdims=True)
            self._restarted = again & (self._done | self._truncated)
            begins = begins | again
        pays = present | self._done | self._truncated
        self._reward[pays] = self._owed[pays]
        self._owed[pays] = 0
        if begins.any():
            self._final_row, self._final_tick = self._row.copy(), self._tick.copy()
            self._final_episode = self._episode.copy()
            self._episode = self._episode + begins
            self._tick[begins] = 0
            seats = np.broadcast_to(begins, shape)
            self._row[seats], self._alive[seats] = 0, True
            self._owed[seats & reset[:, None]] = 0
            present = np.where(begins, self._on_turn(), present)
        self._present = present
        self._acts = present & self._alive
        if self.config.delay > 0:
            self._due = time.monotonic() + self.config.delay
            if self._wake is not None:
                timer = threading.Timer(self.config.delay, self._wake)
                timer.daemon = True
                timer.start()

    def seed(self, seed: int) -> None:
        """Let the next episodes be those of that number, below 4096."""
        self._episode[:] = seed % 4096 - 1

    def ready(self) -> bool:
        return not self._hangs() and (self.config.delay <= 0 or time.monotonic() >= self._due)

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def recv(self, ticks: Sequence[Tick]) -> None:
        if self._hangs():
            self._closed.wait()
            raise EnvironmentFault("Scripted: closed while it hung")
        if self.config.delay > 0:
            time.sleep(max(0.0, self._due - time.monotonic()))
        for group, tick in zip(self._groups, ticks, strict=True):
            out = tick.observation["obs"]
            self._observe(out, group, self._row, self._tick, self._episode)
            if not self._present.all():
                out[~self._present[:, group].reshape(-1)] = 0
            if tick.final:
                self._observe(
                    tick.final["obs"], group, self._final_row, self._final_tick, self._final_episode
                )
            tick.reward[:] = self._reward[:, group].reshape(-1)
            tick.done[:] = self._done[:, group].reshape(-1)
            tick.truncated[:] = self._truncated[:, group].reshape(-1)
            tick.present[:] = self._present[:, group].reshape(-1)
            tick.restarted[:] = self._restarted[:, group].reshape(-1)
        if self.config.fault is not None and self._count == self.config.fault_tick:
            self._go_wrong(ticks)
        for check, tick in zip(self._checks, ticks, strict=True):
            check(tick)

    def close(self) -> None:
        self._closed.set()

    def _on_turn(self) -> NDArray[np.bool_]:
        turn: NDArray[np.bool_] = self._tick % self.config.turns == self._agent % self.config.turns
        return turn

    def _observe(self, out: NDArray[Any], group: Any, row: Ints, tick: Ints, episode: Ints) -> None:
        seats = self._row.shape
        wide = (
            out.reshape(self.lanes, -1, out.shape[-1])
            if out.flags.c_contiguous
            else np.empty((self.lanes, len(out) // self.lanes, out.shape[-1]), out.dtype)
        )
        for column, values in enumerate((self._lane, self._agent, episode, row, tick)):
            wide[:, :, column] = np.broadcast_to(values, seats)[:, group]
        wide[:, :, 5:] = 1
        if not out.flags.c_contiguous:
            out[:] = wide.reshape(out.shape)

    def _hangs(self) -> bool:
        return self.config.fault == "hang" and self._count >= self.config.fault_tick

    def _go_wrong(self, ticks: Sequence[Tick]) -> None:
        lane = self.lanes - 1
        if self.config.fault == "nan":
            ticks[0].observation["obs"][-1] = np.nan
        elif self.config.fault == "reward":
            ticks[0].reward[-1] = np.inf
        elif self.config.fault == "raise":
            raise EnvironmentFault(
                f"Scripted: lane {lane} raised ValueError while stepping: as its configuration asks (fault)"
            ) from ValueError("scripted")
        elif self.config.fault == "shape":
            raise EnvironmentFault(
                f"Scripted: lane {lane}: obs of agent {self._names[0][-1]} has shape (3,); the observation "
                "space says (5,)"
            )


@dataclass(frozen=True, kw_only=True)
class Free(EnvironmentConfig):
    """The environment returns zeros and costs nearly nothing, so that what remains is the
    cost of the actor.

    agents: per lane
    shape: shape of an observation
    dtype: its dtype
    actions: number of actions
    death_rate: share of the agents that die in each tick, at random; a lane is over when
        all are dead. 0: no episode ever ends
    """

    agents: int = 1
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    actions: int = 2
    death_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(agents=1)
        self.check_shares("death_rate")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return ()

    def build(self, lanes: int, seed: int, render: bool = False) -> "FreeEnvironment":
        """Return the environment with `lanes` lanes."""
        check_counts(lanes=lanes)
        return FreeEnvironment(self, lanes, seed)


class FreeEnvironment(Environment):
    """What `Free` describes."""

    def __init__(self, config: Free, lanes: int, seed: int) -> None:
        """Draw who dies when, for a while ahead: drawing in every tick would cost."""
        self.lanes, self._rate = lanes, config.death_rate
        spaces = Spaces(Box(config.shape, config.dtype), Discrete(config.actions))
        self.agents = tuple(AgentInfo(f"agent_{a}", spaces) for a in range(config.agents))
        shape = (lanes, config.agents)
        self._deaths = (
            np.random.default_rng(seed).random((256, *shape)) < config.death_rate
            if config.death_rate
            else np.zeros((1, *shape), np.bool_)
        )
        self._alive = np.zeros(shape, np.bool_)
        self._present = self._done = self._alive
        self._count = 0
        self._groups: list[Any] = []

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [
            slice(None) if list(group) == list(range(len(self.agents))) else list(group) for group in groups
        ]

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._count += 1
        if not self._rate:
            self._alive |= reset[:, None]
            self._present = self._alive
            return
        self._done = self._alive & self._deaths[self._count % len(self._deaths)]
        self._present = self._alive
        self._alive = self._alive & ~self._done
        if reset.any():
            self._alive[reset] = True
            self._done[reset] = False
            self._present = self._present | reset[:, None]

    def recv(self, ticks: Sequence[Tick]) -> None:
        for group, tick in zip(self._groups, ticks, strict=True):
            for leaf in tick.observation.values():
                leaf.fill(0)
            tick.reward.fill(0)
            tick.truncated.fill(False)
            tick.restarted.fill(False)
            tick.present[:] = self._present[:, group].reshape(-1)
            if self._rate:
                tick.done[:] = self._done[:, group].reshape(-1)
            else:
                tick.done.fill(False)

    def close(self) -> None:
        pass
