"""Small environments with identifiable answers, for the tests of the adapters (and found
there by name, as a user's would be)."""

import random
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[Any, Any]):
    """Observation [seed, step]; ends after `length` steps. `fault` names what goes wrong
    in step 2."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3, start=5)

    def __init__(self, length: int = 4, fault: str = "", both: bool = False) -> None:
        self.length, self.fault, self.both = length, fault, both
        self.given: list[Any] = []

    def _see(self) -> Any:
        return np.array([self.began_with, self.steps], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.began_with, self.steps = -1 if seed is None else seed, 0
        if self.fault == "reset":
            raise RuntimeError("no more games")
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.given.append(action)
        self.steps += 1
        over = self.steps >= self.length
        observation, reward = self._see(), float(self.steps)
        if self.steps == 2:
            match self.fault:
                case "raise":
                    raise ZeroDivisionError("the pole is gone")
                case "shape":
                    observation = np.zeros(3, np.float32)
                case "dtype":
                    observation = np.array(["a", "b"])
                case "nan":
                    observation[1] = np.nan
                case "reward":
                    reward = float("inf")
                case "reward shape":
                    reward = np.zeros(2)  # type: ignore[assignment]
                case "old":
                    return observation, reward, over, {}
        return observation, reward, over, over and self.both, {}


class Nested(Counter):
    """Dict observation and Tuple action, with a Discrete part that does not start at
    0."""

    observation_space = spaces.Dict(
        {
            "step": spaces.Discrete(100, start=10),
            "place": spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.MultiBinary(3)]),
        }
    )  # type: ignore[assignment]
    action_space = spaces.Tuple(
        [
            spaces.Box(-1, 1, (2,), np.float32),
            spaces.Dict({"a": spaces.Discrete(2, start=3), "b": spaces.MultiDiscrete([2, 3])}),
        ]
    )

    def _see(self) -> Any:
        return {
            "step": 10 + self.steps,
            "place": (np.full((2, 2), self.steps, np.uint8), np.array([1, 0, 1], np.int8)),
        }


class Delayed(Counter):
    """Takes a time that nobody can foresee, of `most` seconds at most; knows in which
    threads it was stepped, and whether it was closed."""

    def __init__(self, length: int = 4, fault: str = "", most: float = 0.002) -> None:
        super().__init__(length, fault)
        self.most, self.threads, self.closed = most, set[int](), False

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        time.sleep(random.random() * self.most)
        if self.fault == "exit" and self.steps == 1:
            sys.exit("enough")
        return super().step(action)

    def close(self) -> None:
        self.closed = True


class Eating(Counter):
    """Is as long as the first of `lengths`, which it eats."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths.pop(0))


class Hanging(Counter):
    """Hangs in step 2 until it is `freed`."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.freed, self.closed, self.threads = threading.Event(), 0, set[int]()

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        if self.steps == 1:
            self.freed.wait()
        return super().step(action)

    def close(self) -> None:
        self.closed = threading.get_ident()


class Unseeded(Counter):
    """Draws numbers that no seed governs."""

    def _see(self) -> Any:
        return np.random.default_rng().random(2).astype(np.float32)


class Outside(Counter):
    """Leaves the bounds of its space."""

    def _see(self) -> Any:
        return np.full(2, 2e6, np.float32)


class Double(Counter):
    """Returns float64 where it declares float32."""

    def _see(self) -> Any:
        return super()._see().astype(np.float64)


def vector(
    num_envs: int,
    mode: str | None = "NextStep",
    kind: str = "Counter",
    publish: bool = True,
    lengths: tuple[int, ...] = (2, 3, 4),
) -> Any:
    """A vector environment in the given autoreset mode; lane i plays games of
    ``lengths[i % len]`` steps."""
    classes = {"Counter": Counter, "Nested": Nested}
    env = gymnasium.vector.SyncVectorEnv(
        [lambda i=i: classes[kind](lengths[i % len(lengths)]) for i in range(num_envs)],
        autoreset_mode=mode or "NextStep",
    )  # type: ignore[misc]
    if not publish:
        del env.metadata["autoreset_mode"]
    return env


def seeded(num_envs: int, number: int) -> Any:
    """`vector`, seeded when it is made and at no other time."""
    env = vector(num_envs)
    reset = env.reset

    def begin(*, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is None, "was seeded when it was made"
        return reset(seed=number, options=options)

    env.reset = begin
    return env


def of_the_old_gym() -> Any:
    return type("Old", (), {"__module__": "gym.core"})()


def not_an_env() -> object:
    return object()


if "TidemillCounter-v0" not in gymnasium.registry:
    gymnasium.register("TidemillCounter-v0", entry_point=Counter)
