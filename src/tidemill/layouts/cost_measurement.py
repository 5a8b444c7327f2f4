"""What measures the costs of an experiment's parts, for the probe of layouts (`probe`)
and for `tidemill bench`: environments stepped at random; random rows; timed work. It is
done in processes of its own (`launchers/measuring.py`).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from threading import get_native_id
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick, alike
from tidemill.api.spaces import Discrete, MultiDiscrete, Space, leaves, schema_of_space
from tidemill.core.schema import Arrays
from tidemill.testing.check_env import keep_allowed, sample_actions
from tidemill.transports.local import LocalBell

# a part of the seconds is enough where the mean's standard error is so small a part of it
PRECISE, LEAST = 0.02, 0.25
PARTS = 4


class RandomPlay:
    """Random play steps an environment with random actions, and resets its lanes as their
    episodes end. `waited` says whether the last tick's steps were not done when `send`
    came back.
    """

    waited = False

    def __init__(self, environment: Environment) -> None:
        self._environment, self._rng = environment, np.random.default_rng(0)
        lanes, agents = environment.lanes, environment.agents
        # those of equal spaces are stepped together, as one agent spec plays them
        groups = alike(agents)
        environment.bind(groups)
        self._spaces = [agents[group[0]].spaces for group in groups]
        seats = [lanes * len(group) for group in groups]
        self._actions = [
            [sample_actions(s.action, self._rng, n) for s, n in zip(self._spaces, seats, strict=True)]
            for _ in range(61)
        ]
        self._ticks = [
            Tick.allocate(s.observation, n, environment.info, environment.same_step)
            for s, n in zip(self._spaces, seats, strict=True)
        ]
        self._masked = [
            group
            for group, tick in enumerate(self._ticks)
            if any(f"{name}.".startswith("obs.action_mask.") for name in tick.observation)
        ]
        self._ended: list[NDArray[np.bool_]] = [np.ones(n, np.bool_) for n in seats]  # or not yet begun
        # of one agent a lane it is the same array
        self._reset = self._ended[0] if seats == [lanes] else np.ones(lanes, np.bool_)
        self._bell, self._count = LocalBell(), 0
        environment.on_ready(self._bell.ring)

    def tick(self) -> int:
        """Do one tick and return the env steps in it: those of resets are none."""
        environment = self._environment
        steps = environment.lanes - int(np.count_nonzero(self._reset))
        self._count += 1
        actions = self._actions[self._count % len(self._actions)]
        for group in self._masked:
            seen = self._ticks[group].observation
            keep_allowed(actions[group], self._spaces[group].action, seen, self._rng)
        environment.send(actions, self._reset)
        self.waited = not environment.ready()
        while not environment.ready():
            self._bell.wait(0.1)
        environment.recv(self._ticks)
        for ended, tick in zip(self._ended, self._ticks, strict=True):
            np.greater(ended, tick.present, out=ended)  # and not: an absent seat stays as it was
            ended |= tick.done
            ended |= tick.truncated
            np.greater(ended, tick.restarted, out=ended)
        if self._reset is not self._ended[0]:
            self._reset = np.logical_and.reduce(
                [ended.reshape(environment.lanes, -1).all(axis=1) for ended in self._ended]
            )
        return steps


def random_rows(space: Space, rows: int, name: str = "obs") -> Arrays:
    """Return random values of each leaf of a space called `name`: indices in their range,
    floats standard normal, bits all 1 (they may be an action mask) and no byte 0."""
    rng, found = np.random.default_rng(0), {}
    for key, leaf in leaves(space, name).items():
        ((_, field),) = schema_of_space(leaf, key).items()
        shape = (rows, *field.shape)
        if "float" in field.dtype:
            found[key] = rng.standard_normal(shape, np.float32).astype(field.dtype)
        else:
            index = isinstance(leaf, (Discrete, MultiDiscrete))
            most = (
                leaf.n
                if isinstance(leaf, Discrete)
                else np.array(leaf.nvec)
                if isinstance(leaf, MultiDiscrete)
                else 2
            )
            found[key] = rng.integers(
                0 if index else 1, 256 if field.dtype == "uint8" else most, shape
            ).astype(field.dtype)
    return found


class TimeSpent(NamedTuple):
    """What some work took: units done, core seconds, seconds that passed, and those of
    them in which others had the core."""

    units: int
    core: float
    wall: float
    delayed: float

    @property
    def each(self) -> tuple[float, float]:
        """The core seconds and the seconds of a unit. Seconds in which the thread could
        have gone on, but others had the core, do not count, nor those of another that it
        may have waited for."""
        return self.core / self.units, max(self.wall - self.delayed, self.core) / self.units


def timed(work: Callable[[], int], seconds: float, precise: bool = False) -> TimeSpent:
    """Call `work`, which returns the units that it did, until so many seconds have passed
    and something was done; with `precise` also until it is known well enough how long a
    call takes, which is sooner."""
    before, units, times, began, core = queued(), 0, [perf_counter()], perf_counter(), process_time()
    while True:
        units += work()
        times.append(perf_counter())
        passed = times[-1] - began
        early = precise and passed >= seconds * LEAST and _precise(np.diff(times))
        if units and (passed >= seconds or early):
            core = max(process_time() - core, 1e-9)
            delays = {thread: spent - before.get(thread, 0.0) for thread, spent in queued().items()}
            delayed = delays.pop(get_native_id(), 0.0) + max(delays.values(), default=0.0)
            return TimeSpent(units, core, passed, delayed)


def undisturbed(work: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Return the core seconds and the seconds of a unit of `work` in the best of `PARTS`
    parts of so many seconds: what others do on the machine only adds to them."""
    return min(timed(work, seconds / PARTS).each for _ in range(PARTS))


def _precise(times: NDArray[np.float64]) -> bool:
    return len(times) >= 10 and float(times.std(ddof=1)) <= PRECISE * float(times.mean()) * len(times) ** 0.5


def queued() -> dict[int, float]:
    """Return the seconds that each thread of this process has waited for a core, by its
    number; nothing where the system does not say."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with (
                suppress(OSError, IndexError, ValueError),
                open(f"/proc/self/task/{thread}/schedstat") as file,
            ):
                found[int(thread)] = int(file.read().split()[1]) * 1e-9
    return found
