"""Environments around environments: what a wrapper does not change it hands on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.core.cut import Part
from tidemill.core.schema import Arrays
from tidemill.core.tally import TallyEntry

CHANGING = ("resting", "rests", "shared", "away")
"""Attributes of an environment that are another later."""
FIXED = tuple(name for name in Environment.__annotations__ if name not in CHANGING)


class Wrapper(Environment):
    """An environment that hands everything on to the one that it holds, `inner`. Members
    override what they change: attributes after this class's `__init__`, which takes all
    of `inner`'s, and methods."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner
        for name in FIXED:
            setattr(self, name, getattr(inner, name))

    @property
    def resting(self) -> bool:  # type: ignore[override]
        """See `Environment`."""
        return self._inner.resting

    @property
    def rests(self) -> int:  # type: ignore[override]
        """See `Environment`."""
        return self._inner.rests

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """See `Environment`."""
        return self._inner.shared

    @property
    def away(self) -> bool:  # type: ignore[override]
        """See `Environment`."""
        return self._inner.away

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._inner.bind(groups)

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._inner.send(actions, reset)

    def ready(self) -> bool:
        return self._inner.ready()

    def recv(self, ticks: Sequence[Tick]) -> None:
        self._inner.recv(ticks)

    def begin_close(self) -> None:
        self._inner.begin_close()

    def close(self) -> None:
        self._inner.close()

    def wait_closed(self, seconds: float) -> bool:
        return self._inner.wait_closed(seconds)

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._inner.on_ready(wake)

    def seed(self, seed: int) -> None:
        self._inner.seed(seed)

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._inner.enter_stage(options)

    def restart_lanes(self, permit: Callable[[Exception], int]) -> bool:
        return self._inner.restart_lanes(permit)

    def watch(self, deadline_s: float | None) -> None:
        self._inner.watch(deadline_s)

    def doing(self) -> str:
        return self._inner.doing()

    def keep_episodes(self) -> None:
        self._inner.keep_episodes()

    def episode(self, lane: int) -> Part | None:
        return self._inner.episode(lane)

    def begin_like(self, episode: Part) -> None:
        self._inner.begin_like(episode)

    def state(self) -> Part | None:
        inner, own = self._inner.state(), self._own_state()
        return None if inner is None or own is None else {"inner": inner, "own": own}

    def load_state(self, state: Part) -> Mapping[int, str]:
        lost = self._inner.load_state(state["inner"])
        self._load_own_state(state["own"])
        return lost

    def _own_state(self) -> Part | None:
        """Return what the wrapper knows itself of open episodes; None where it cannot
        tell."""
        return None

    def _load_own_state(self, state: Part) -> None:
        """Take back what `_own_state` returned."""

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        return self._inner.episode_infos(group, seats)

    def statistics(self) -> dict[str, TallyEntry]:
        return self._inner.statistics()

    def render(self) -> NDArray[np.uint8] | None:
        return self._inner.render()


def innermost(environment: Environment) -> Environment:
    """Return what all wrappers around `environment` hold."""
    while isinstance(environment, Wrapper) and environment._inner is not None:
        environment = environment._inner
    return environment
