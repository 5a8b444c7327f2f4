"""Experiments with a limiter: a policy and an algorithm of numpy alone whose every number
depends on all that came before, and environments whose steps take what time they like."""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from tidemill import Experiment, Gymnasium, Limits, ReplayActors, ReplayTrainer
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.api.buffer import BufferConfig
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays, Field
from tidemill.replay.replay import Replay

PROFILES = ("none", "constant", "random", "first")


class Walk(gymnasium.Env[Any, Any]):
    """A random walk whose end, rewards and observations come from its own random numbers
    and the actions. Its observation: (position, step of the episode, episode, seed of the
    slot). `latency`: how long its steps take, `fails`: in which of its steps (counted
    over all copies) it raises."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    steps = 0
    made = 0
    closed = 0

    def __init__(
        self,
        latency: str = "none",
        fails: Sequence[int] = (),
        broken: bool = False,
        hangs: Sequence[int] = (),
    ) -> None:
        Walk.made += 1
        self.latency, self.fails, self.broken, self.hangs = latency, set(fails), broken, set(hangs)
        self.wait = np.random.default_rng()
        self.episode, self.name = -1, 0.0

    def _see(self) -> Any:
        return np.array([self.position, self.step_number, self.episode, self.name], np.float32)

    def _linger(self) -> None:
        if self.latency == "constant":
            time.sleep(0.001)
        elif self.latency == "long":
            time.sleep(0.03)
        elif self.latency == "random":
            time.sleep(self.wait.exponential(0.001))
        elif self.latency == "first" and int(self.name) % 2:
            time.sleep(0.003)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.name = float(seed % 1000)
        self._linger()
        self.position, self.step_number, self.episode = float(self.np_random.normal()), 0, self.episode + 1
        return self._see(), {}

    def step(self, action: Any) -> Any:
        Walk.steps += 1
        if self.broken or Walk.steps in self.fails:
            raise ConnectionError(f"lost in step {Walk.steps}")
        if Walk.steps in self.hangs:
            threading.Event().wait()
        self._linger()
        self.step_number += 1
        self.position += float(action - 1) + 0.1 * float(self.np_random.normal())
        return (
            self._see(),
            -abs(self.position),
            bool(self.np_random.random() < 0.1),
            self.step_number >= 12,
            {},
        )

    def close(self) -> None:
        Walk.closed += 1


class Slow(Walk):
    """Takes a while to make, and notes on which cores it is stepped."""

    cores: ClassVar[set[frozenset[int]]] = set()

    def __init__(self) -> None:
        time.sleep(0.06)
        super().__init__()

    def step(self, action: Any) -> Any:
        Slow.cores.add(frozenset(os.sched_getaffinity(0)))
        return super().step(action)


class Meeting(Walk):
    """The same. None takes its first step before all `copies` of it are about to, in
    whichever process they are: each adds a line to the file `log`."""

    def __init__(self, log: str, copies: int) -> None:
        super().__init__(latency="constant")
        self.log, self.copies, self.met = log, copies, False

    def step(self, action: Any) -> Any:
        if not self.met:
            with open(self.log, "a") as file:
                file.write("here\n")
            until = time.monotonic() + 100
            while time.monotonic() < until and not self.met:
                with open(self.log) as file:
                    self.met = len(file.readlines()) >= self.copies
                time.sleep(0.005)
        return super().step(action)


class Strolling(Walk):
    """The same, but for what its seed does not know of."""

    def _see(self) -> Any:
        return np.array([self.position, self.step_number, 0, self.name], np.float32)


class Errand:
    """The same, with `async def`. Each copy adds a line to the file `log`."""

    observation_space, action_space = Walk.observation_space, Walk.action_space

    def __init__(self, log: str) -> None:
        self.walk = Strolling()
        with open(log, "a") as file:
            file.write("made\n")

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0.001)
        return self.walk.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0.001)
        return self.walk.step(action)


class Failing(Strolling):
    """Fails in the third step of some episodes, by their seeds."""

    def step(self, action: Any) -> Any:
        if self.step_number == 2 and self.name % 3 == 0:
            raise ConnectionError("lost")
        return super().step(action)


class Counting(Walk):
    """Never ends, and shows what its seed does not know of: how many of it there were
    before."""

    copies = 0

    def __init__(self) -> None:
        super().__init__()
        Counting.copies += 1
        self.number = Counting.copies

    def _see(self) -> Any:
        return np.array([self.position, self.step_number, self.number, 0], np.float32)

    def step(self, action: Any) -> Any:
        seen, reward, _, _, info = super().step(action)
        return seen, reward, False, False, info


class SteeredWalk(Walk):
    """The same, by how far it is told to go."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(float(action[0]) + 1)


class PicturedWalk(Walk):
    """The same, seen as a picture."""

    observation_space = gymnasium.spaces.Box(0, 255, (40, 40), np.uint8)

    def _see(self) -> Any:
        seen = np.abs(super()._see()[:3] * 50).astype(np.int64) % 256
        return np.repeat(np.resize(seen, 40), 40).reshape(40, 40).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Drawing(PolicyConfig):
    """Draws its actions, by its weights and the observation."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        return {"action": Field((), "int64")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        return DrawingPolicy(seed)


class DrawingPolicy(Policy):
    def __init__(self, seed: int) -> None:
        self.rng, self.w = np.random.default_rng(seed), np.full(4, 0.1)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        score = observation["obs"].astype(np.float64) @ self.w + self.rng.normal(size=len(observation["obs"]))
        out["action"][: len(score)] = np.floor(np.abs(score) * 7).astype(np.int64) % 3

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def parameters(self) -> Arrays:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class Mixing(AlgorithmConfig):
    """Its weights are a running mixture of all that it was given. `seconds` is what an
    update takes at least; the update `fails` raises."""

    seconds: float = 0.0
    fails: int = -1

    def measures(self) -> tuple[str, ...]:
        return ("loss",)

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Mixing(self, policy)


class _Mixing(Algorithm):
    def __init__(self, config: Mixing, policy: Policy) -> None:
        self.config, self.policy, self.count = config, policy, 0

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        (sample,) = samples
        if self.count == self.config.fails:
            raise ArithmeticError("the update failed")
        if self.config.seconds:
            time.sleep(self.config.seconds)
        w = self.policy.parameters()["w"]
        fresh = (
            sample["obs"][0].mean(axis=0)
            + sample["next.obs"][0].mean(axis=0)
            + sample["rewards"][0].mean()
            + sample["action"][0].mean()
        )
        w[:] = np.sin(0.9 * w + fresh)
        self.count += 1
        return {"loss": float(w[0])}

    def state(self) -> Arrays:
        return {"count": np.array(self.count)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.count = int(state["count"])


def experiment(
    slots: int = 3,
    steps: int = 60,
    latency: str = "none",
    environment: EnvironmentConfig | None = None,
    buffer: BufferConfig | None = None,
    actors: int = 1,
    lanes: int = 1,
    threads: int = 1,
    algorithm: AlgorithmConfig | None = None,
    network: PolicyConfig | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Experiment:
    """`slots` of each of `actors`."""
    env = environment or Gymnasium(
        make=f"{__file__}:Walk", kwargs={"latency": latency, **(kwargs or {})}, threads=threads
    )
    return Experiment(
        name="limited",
        policies={"policy": network or Drawing()},
        workers={
            "actor": ReplayActors(
                environment=env, lanes=lanes, ring=slots, count=actors
            ),
            "trainer": ReplayTrainer(
                algorithm=algorithm or Mixing(), buffer=buffer or Replay(capacity=4000, warm_up=10),
                batch_size=8, database_seconds=None, **{"ratio": "1/2", **trainer},
            ),
        },
        limits=Limits(steps=steps),
    )  # fmt: skip
