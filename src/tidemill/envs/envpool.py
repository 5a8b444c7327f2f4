"""EnvPool: environments written in C++, stepped in threads of their own."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside
from tidemill.core.config import check_counts, decode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, did_you_mean, needing
from tidemill.envs.gymnasium_registry import call_maker, outside
from tidemill.envs.vector import VectorLanes

_CURE = 'pip install "envpool>=1.2.5"'
# arguments that are settings, or follow from lanes and seed
_OURS = ("num_envs", "batch_size", "num_threads", "max_episode_steps", "seed", "env_seed", "render_mode")
# what EnvPool's specs write for the least float64 is the least that is positive
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, kw_only=True)
class EnvPool(EnvironmentConfig):
    """An `EnvPool` config builds a task of EnvPool, of one agent. Its observations and
    rewards differ in detail from those of Gymnasium's environment of that name. Atari,
    Box2D, classic control and MiniGrid can be rendered.

    id: "HalfCheetah-v4", "Pong-v5", …: `envpool.list_all_envs()` has them
    num_threads: threads that step the lanes, on the cores that the actor keeps to; 0: one
        per core of the actor, at most one per lane
    max_episode_steps: most steps of an episode, which is cut (truncated) there; None: the
        task's own limit
    kwargs: the task's own settings, as {"frame_skip": 1}; `envpool.make_spec(id).config`
        has them
    """

    id: str
    num_threads: int = 0
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(num_threads=0, max_episode_steps=1)
        for name in _OURS:
            if name in self.kwargs:
                cure = (
                    "a setting beside kwargs" if name in _SETTINGS else "chosen by the lanes, seed and actor"
                )
                raise ConfigError(f'kwargs = {self.kwargs}: "{name}" is {cure}; take it out of kwargs')

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        own = {key: value for key, value in settings.items() if key in _SETTINGS}
        kwargs = {key: value for key, value in settings.items() if key not in _SETTINGS}
        data = {"kind": cls.__name__, "id": name.removeprefix("envpool:"), "kwargs": kwargs, **own}
        return decode(cls, data, "environment")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return outside({"id": settings.get("id"), "kwargs": settings.get("kwargs")})

    def preset_name(self, name: str) -> str:
        return self.id

    @property
    def rewarded(self) -> str:
        parts = [said for key, said in _TRAINING.items() if self.kwargs.get(key)]
        return f"rewards {' and '.join(parts)}" if parts else ""

    def scored(self) -> "EnvPool":
        kwargs = {key: value for key, value in self.kwargs.items() if key not in _TRAINING}
        return self.replace(kwargs=kwargs)

    def build(self, lanes: int, seed: int, render: bool = False) -> VectorLanes:
        """Return the environment with `lanes` lanes."""
        check_counts(lanes=lanes)
        with needing(f'environment "envpool:{self.id}" needs', _CURE):
            import envpool
        known = envpool.list_all_envs()
        if self.id not in known:
            raise ConfigError(
                f'id = "{self.id}": EnvPool {envpool.__version__} has no such task; '
                + (
                    did_you_mean(self.id, known)
                    if difflib.get_close_matches(self.id, known)
                    else "envpool.list_all_envs() lists those that there are"
                )
            )
        what = f'environment "envpool:{self.id}"'
        spec = call_maker(envpool.make_spec, what, None, {"task_id": self.id})
        config, source = spec.config, " ".join(kind.__module__ for kind in type(spec).__mro__)
        if config.max_num_players > 1:
            raise ConfigError(
                f"{what} has {config.max_num_players} players; tasks of one agent are supported"
            )
        kwargs: dict[str, Any] = {
            **self.kwargs,
            "num_envs": lanes,
            "num_threads": min(self.num_threads or cores(), lanes),
            "seed": seed % (1 << 30),  # what it adds the lanes' numbers to is an int32
        }
        if self.max_episode_steps is not None:
            kwargs["max_episode_steps"] = self.max_episode_steps
        if render and any(family in source for family in _DRAWN):
            kwargs["render_mode"] = "rgb_array"
        pool = call_maker(
            lambda **given: envpool.make_gymnasium(self.id, **given), what, type(config), kwargs
        )
        vector = Pool(PartialResets(pool), self.id, halves=kwargs["num_threads"] > 1)
        vector.max_episode_steps = pool.spec.config.max_episode_steps
        return vector


_SETTINGS = tuple(each.name for each in fields(EnvPool) if each.name not in ("id", "kwargs"))
# families that draw; MuJoCo's end the process where there is no OpenGL
_DRAWN = ("envpool.atari", "envpool.box2d", "envpool.classic_control", "envpool.minigrid")
_BOOKKEEPING = ("env_id", "players", "elapsed_step", "ram")  # in infos, and no statistics of episodes
_TRAINING = {"reward_clip": "clipped to -1, 0 and 1", "episodic_life": "of one life"}  # Atari's


class PartialResets:
    """A pool of which some lanes can be reset: it returns the observations of all, where
    EnvPool returns those of the lanes that it has reset. Bounds that mean "none" are
    infinite."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._seen = pool, None
        self.num_envs, self.metadata = pool.config["num_envs"], pool.metadata
        self.render_mode, self.render = pool.render_mode, pool.render
        self.single_observation_space = _unbounded(pool.single_observation_space)
        self.single_action_space = _unbounded(pool.single_action_space)
        self.send, self.close = pool.send, pool.close

    def reset(
        self, *, seed: None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all lanes, or those of ``options["reset_mask"]``."""
        if options is None:
            self._seen, infos = self._pool.reset()
            return self._seen, infos
        mask: NDArray[np.bool_] = options["reset_mask"]
        some, infos = self._pool.reset(np.flatnonzero(mask).astype(np.int32))
        self._seen = _replaced(self._seen, mask, some)
        return self._seen, infos

    def recv(self) -> Any:
        """Return what the step that was sent has brought."""
        result = self._pool.recv()
        self._seen = result[0]
        return result

    def step(self, actions: Any) -> Any:
        """Step all lanes."""
        self.send(actions)
        return self.recv()


class Pool(VectorLanes):
    """Lanes of EnvPool. Seeds are fixed when a pool is made."""

    def __init__(self, env: PartialResets, name: str, halves: bool) -> None:
        super().__init__(env, name, None, "next-step", partial_resets=True, halves=halves)

    def seed(self, seed: int) -> None:
        """Do nothing: an environment of a pool cannot be seeded again."""

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        infos = super().episode_infos(group, seats)
        return [{key: info[key] for key in info if key not in _BOOKKEEPING} for info in infos]


def _unbounded(space: Any) -> Any:
    """Return `space` with an infinite bound wherever EnvPool writes numbers of C++ for
    "none", of which the least is a positive one."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _unbounded(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and np.any(space.low == _TINY):
        return spaces.Box(np.where(space.low == _TINY, -np.inf, space.low), space.high, dtype=space.dtype)
    return space


def _replaced(all_lanes: Any, mask: NDArray[np.bool_], some: Any) -> Any:
    """Return the (nested) observations of all lanes with `some` in place of those of
    `mask`."""
    if isinstance(all_lanes, Mapping):
        return {key: _replaced(part, mask, some[key]) for key, part in all_lanes.items()}
    replaced = all_lanes.copy()
    replaced[mask] = some
    return replaced
