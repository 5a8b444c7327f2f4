"""Lanes of a Gymnasium environment that step by whole arrays: what Gymnasium's own code
would answer, without a call of Python per lane."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.errors import raised_by
from tidemill.core.schema import Array, Arrays
from tidemill.envs.gymnasium_registry import fps_of
from tidemill.envs.lane_ends import LaneEnds
from tidemill.envs.reset_options import reset_env, take_options
from tidemill.envs.spaces import action_caster, spaces_of
from tidemill.envs.tick_check import TickCheck
from tidemill.native.library import asked_for, choices

_CLASSIC = "tidemill.envs.classic_control"
_MUJOCO = {
    "ant": "Ant",
    "half_cheetah": "HalfCheetah",
    "hopper": "Hopper",
    "humanoid": "Humanoid",
    "humanoidstandup": "HumanoidStandup",
    "inverted_double_pendulum": "InvertedDoublePendulum",
    "inverted_pendulum": "InvertedPendulum",
    "pusher": "Pusher",
    "reacher": "Reacher",
    "swimmer": "Swimmer",
    "walker2d": "Walker2d",
}
BATCHES: dict[str, tuple[str, str]] = {
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": (_CLASSIC, "Acrobot"),
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": (_CLASSIC, "CartPole"),
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": (_CLASSIC, "CartPoleVector"),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": (
        _CLASSIC,
        "MountainCarContinuous",
    ),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": (_CLASSIC, "MountainCar"),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": (_CLASSIC, "Pendulum"),
    **{
        f"gymnasium.envs.mujoco.{module}_v{version}:{kind}Env": ("tidemill.envs.mujoco_tasks", f"{kind}Lanes")
        for version in (4, 5)
        for module, kind in _MUJOCO.items()
    },
}
"""By class of a Gymnasium environment: module and name of the `BatchLanes` that stand for
its lanes, or for a vector of them. A subclass, or one in wrappers, steps itself."""


class BatchLanes(Environment):
    """L lanes of one Gymnasium environment of one agent, whose observations and actions
    are one array each. A member steps all lanes at once (`_step`). Gymnasium's own code
    resets each lane, from the lane's own generator, and the member takes over the state
    that it leaves (`_load`).

    env: the environment that resets lanes, without a wrapper
    fewest: number of lanes from which on it saves time: with fewer the calls of numpy
        take as long as Gymnasium's code
    """

    fewest = 4
    _spaces_of = staticmethod(spaces_of)  # a lane's, of `env`

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        """Take over `env`; `name` is what messages call it. After `limit` steps an
        episode is cut; 0: never."""
        self.env, self.name, self.lanes = env, name, lanes
        self.max_episode_steps = limit
        self._spaces = self._spaces_of(env, name)
        self.agents = (AgentInfo("agent", self._spaces),)
        self.render_fps = fps_of(env)
        self._cast = action_caster(self._spaces.action)
        self._check = TickCheck(self._spaces.observation, name, ("agent",))
        self._counts = np.zeros(lanes, np.int64)  # env steps of each lane in its episode
        self._one = np.ones(lanes, np.int64)  # arrays: numpy takes three times as long with a number
        self._limits = np.full(lanes, limit or np.iinfo(np.int64).max, np.int64)
        self._generators: list[Any] = [None] * lanes
        self._options: dict[str, Any] | None = None  # of resets
        self._seeds: dict[int, int] = {}  # of next resets
        self.seed(seed)
        self._stepped: tuple[Array, Array, Array] | None = None
        self._begun: dict[int, Any] = {}  # first observations of the lanes that were reset
        self._idle = np.ones(lanes, np.bool_)  # finished and not yet reset
        self._ends = LaneEnds(self._counts, self._limits, self._idle, asked_for(choices()[-1]))

    @classmethod
    def fits(cls, env: Any) -> bool:
        """Return whether the lanes are equal to `env`; it may be reset and stepped to
        find out."""
        return True

    @abstractmethod
    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Step all lanes by `actions`, inside the bounds of the action space. Return
        observations [L, …], rewards and whether episodes ended (both [L]), which the
        caller copies before the next step. Lanes that are between two episodes are
        stepped, too, and what comes of it is thrown away; it must be finite."""

    @abstractmethod
    def _load(self, lane: int) -> None:
        """Take over the state of `env`, which has just been reset, as that of `lane`."""

    @abstractmethod
    def _lane_states(self) -> Part:
        """Return the states of all lanes' episodes."""

    @abstractmethod
    def _load_lane_states(self, state: Part) -> None:
        """Take back what `_lane_states` returned."""

    def state(self) -> Part:
        drawn = {
            str(lane): generator_state(generator)
            for lane, generator in enumerate(self._generators)
            if generator is not None
        }
        seeds = {str(lane): seed for lane, seed in self._seeds.items()}
        return {
            "lanes": self._lane_states(),
            "generators": drawn,
            "seeds": seeds,
            "counts": self._counts,
            "idle": self._idle,
        }

    def load_state(self, state: Part) -> Mapping[int, str]:
        self._load_lane_states(state["lanes"])
        self._counts[:], self._idle[:] = state["counts"], state["idle"]
        self._seeds = {int(lane): seed for lane, seed in state["seeds"].items()}
        for lane, drawn in state["generators"].items():
            generator = self._generators[int(lane)] = np.random.default_rng(0)
            set_generator_state(generator, drawn)
        return {}

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """Step every lane, or reset it where `reset` says so. A finished lane that is not
        reset does nothing."""
        self._stepped = None if 0 not in reset.tobytes() else self._step(self._cast(actions[0]["action"]))
        self._counts += self._one
        self._begun.clear()
        if 1 in reset.tobytes():
            self._idle &= ~reset
            self._counts[reset] = 0
            self._begun.update(self._begin(reset.nonzero()[0].tolist()))

    def recv(self, ticks: Sequence[Tick]) -> None:
        """Write what the steps brought. Raises `EnvironmentFault` for what the spaces
        forbid."""
        (tick,) = ticks
        seen, begun = tick.observation["obs"], list(self._begun)
        if self._stepped is None:
            tick.reward.fill(0)
            tick.done.fill(False)
        else:
            seen[...], tick.reward[...], tick.done[...] = self._stepped
        if begun:
            tick.reward[begun] = 0
            tick.done[begun] = False
            for lane, observation in self._begun.items():
                seen[lane] = observation
        self._ends.tell(tick)
        self._check(tick)

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        return [{} for _ in seats]

    def seed(self, seed: int) -> None:
        self._seeds = {lane: seed + lane for lane in range(self.lanes)}

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options = take_options(self.env, self.name, options)

    def close(self) -> None:
        self.env.close()

    def _begin(self, lanes: Sequence[int]) -> Mapping[int, Any]:
        """Reset these lanes and return their first observations. Each lane is seeded
        once, or whenever `seed` says so."""
        return {lane: self._begin_one(lane) for lane in lanes}

    def _begin_one(self, lane: int) -> Any:
        self.env.np_random = self._generators[lane]
        try:
            observation, _ = reset_env(self.env, self._seeds.pop(lane, None), self._options)
        except BaseException as error:
            raise raised_by(f"{self.name}: lane {lane}", "resetting", error) from error
        self._generators[lane] = self.env.np_random
        self._load(lane)
        return observation


def batch_of(env: Any, lanes: int) -> type[BatchLanes] | None:
    """Return the class that steps so many lanes of `env`, or of the vector `env`, by
    whole arrays; None where there is none, or it saves no time, or `env` has wrappers."""
    module, kind = BATCHES.get(f"{type(env).__module__}:{type(env).__qualname__}", ("", ""))
    batch: type[BatchLanes] | None = getattr(import_module(module), kind) if module else None
    return batch if batch is not None and lanes >= batch.fewest and batch.fits(env) else None
