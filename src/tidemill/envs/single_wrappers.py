"""Wrappers of single Gymnasium environments that Gymnasium has not, or not so: frames
that are skipped, stacked, or kept together with actions, and velocities that are hidden.
"""

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError

_VELOCITIES = {
    "CartPole": (1, 3),
    "MountainCar": (1,),
    "MountainCarContinuous": (1,),
    "Pendulum": (2,),
    "LunarLander": (2, 3, 5),
    "LunarLanderContinuous": (2, 3, 5),
}
"""By environment: which numbers of its observation are velocities."""


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A frame skip repeats each action and adds up the rewards. It is not the same as
    Gymnasium's `MaxAndSkipObservation`, which takes the brighter of two pictures.

    skip: number of steps that an action lasts
    """

    def __init__(self, env: Any, skip: int = 4) -> None:
        super().__init__(env)
        self._skip = _count("skip", skip)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step so many times, or to the end of the episode."""
        total = 0.0
        for _ in range(self._skip):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class StackedFrames(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A frame stack shows the newest observations at once, the oldest first: images of 3
    axes along their channels, everything else along a new first axis. At the start of an
    episode they are copies of its first.

    frames: number of them
    """

    def __init__(self, env: Any, frames: int = 4) -> None:
        super().__init__(env)
        space = _box(env, "frame-stack")
        self._frames: deque[Any] = deque(maxlen=_count("frames", frames))
        image = space.dtype == np.uint8 and len(space.shape) == 3
        self._axis = (0 if space.shape[0] <= space.shape[-1] else -1) if image else None
        low, high = (self._stack([bound] * frames) for bound in (space.low, space.high))
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._frames.clear()
        return super().reset(**kwargs)

    def observation(self, observation: Any) -> NDArray[Any]:
        """Return the newest observations, with this one."""
        missing = (self._frames.maxlen or 1) - len(self._frames)
        self._frames.extend([np.array(observation)] * max(1, missing))
        return self._stack(list(self._frames))

    def _stack(self, frames: list[Any]) -> NDArray[Any]:
        return np.stack(frames) if self._axis is None else np.concatenate(frames, self._axis)


class ObservationHistory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A history shows the newest observations and the actions that led to them, each
    oldest first, along the last axis. Before an episode's first observation both are 0.

    horizon: number of observations, and of actions
    """

    def __init__(self, env: Any, horizon: int = 2) -> None:
        super().__init__(env)
        seen, acts = _box(env, "history"), env.action_space
        if not isinstance(acts, spaces.Box) or acts.shape[:-1] != seen.shape[:-1]:
            raise ConfigError(
                f"the wrapper history takes actions that are a Box with the observation's axes, not {acts}"
            )
        bounds = [
            np.concatenate([each] * _count("horizon", horizon), -1)
            for each in (seen.low, seen.high, acts.low, acts.high)
        ]
        self.observation_space = spaces.Box(
            np.concatenate([bounds[0], bounds[2]], -1), np.concatenate([bounds[1], bounds[3]], -1)
        )
        self._blank = [[np.zeros(space.shape, np.float32)] * horizon for space in (seen, acts)]
        self._seen, self._acts = (deque(each, maxlen=horizon) for each in self._blank)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self._seen.extend(self._blank[0])
        self._acts.extend(self._blank[1])
        return self._told(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._acts.append(np.array(action, np.float32))
        return self._told(observation), reward, terminated, truncated, info

    def _told(self, observation: Any) -> NDArray[np.float32]:
        self._seen.append(np.array(observation, np.float32))
        return np.concatenate([*self._seen, *self._acts], -1)


class MaskVelocity(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A velocity mask shows 0 in place of velocities, so that a policy needs memory: of
    CartPole, MountainCar, Pendulum and LunarLander."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        name = str(getattr(env.spec, "id", "")).rpartition("-v")[0]
        if name not in _VELOCITIES:
            raise ConfigError(
                f"the wrapper mask-velocity does not know which numbers are velocities in {name or env}; it "
                f"knows {', '.join(_VELOCITIES)}"
            )
        self._mask = np.ones(_box(env, "mask-velocity").shape, np.float32)
        self._mask[list(_VELOCITIES[name])] = 0

    def observation(self, observation: Any) -> Any:
        """Return it without velocities."""
        return observation * self._mask


def _count(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} = {value!r} must be a whole number of at least 1")
    return value


def _box(env: Any, name: str) -> spaces.Box:
    space = env.observation_space
    if not isinstance(space, spaces.Box):
        raise ConfigError(f'the wrapper {name} takes a Box, not {space}; put "flatten" before it')
    return space
