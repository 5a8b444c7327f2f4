"""Environments that answer one wrong value in one lane, of every kind there is, and such
as share memory; found by name, as a user's would be."""

from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

FLAT = spaces.Box(-np.inf, np.inf, (4,), np.float32)
PARTS = spaces.Dict(
    {
        "a": spaces.Box(0, 1, (2,), np.float32),
        "b": spaces.Tuple([spaces.Box(0, 1, (3,), np.float32), spaces.Discrete(5, start=1)]),
    }
)
BYTES = spaces.Box(0, 255, (3,), np.uint8)
SMALL = spaces.Box(-128, 127, (3,), np.int8)
BITS = spaces.MultiBinary(3)
DIGITS = spaces.MultiDiscrete([2, 3])
WIDE = spaces.Box(-np.inf, np.inf, (2,), np.float64)


def parts(a: int = 2, b: int = 3, choice: Any = 1) -> Any:
    return {"a": np.zeros(a, np.float32), "b": (np.zeros(b, np.float32), choice)}


GOOD: list[tuple[spaces.Space[Any], Any]] = [
    (FLAT, np.zeros(4, np.float32)),
    (PARTS, parts()),
    (BYTES, np.zeros(3, np.uint8)),
    (SMALL, np.zeros(3, np.int8)),
    (BITS, np.zeros(3, np.int8)),
    (DIGITS, np.zeros(2, np.int64)),
    (WIDE, np.zeros(2)),
    (spaces.Discrete(4), 0),
]
# What lane 1 answers in step 1 besides what is good, and what the error says.
OBSERVATIONS: dict[str, tuple[spaces.Space[Any], Any, str]] = {
    "flat": (FLAT, np.zeros(3, np.float32), r"obs of agent \w+ has shape \(3,\)"),
    "part": (PARTS, parts(a=3), r"obs.a of agent \w+ has shape \(3,\)"),
    "deep part": (PARTS, parts(b=1), r"obs.b.0 of agent \w+ has shape \(1,\)"),
    "choice in a part": (PARTS, parts(choice=6), r"obs.b.1 of agent \w+ is 6 .*says 1 … 5 \(Discrete\(5\)\)"),
    "choice below": (PARTS, parts(choice=np.int32(0)), r"obs.b.1 of agent \w+ is 0 "),
    "choice": (spaces.Discrete(4), np.int64(4), r"obs of agent \w+ is 4 \(int64\); .*0 … 3"),
    "no choice": (spaces.Discrete(4), None, r"obs of agent \w+ has dtype object"),
    "half a choice": (spaces.Discrete(4), 1.5, r"obs of agent \w+ has dtype float64"),
    "digit": (DIGITS, np.array([1, 3]), r"obs of agent \w+\[1\] is 3 "),
    "bit": (BITS, np.array([0, 2, 1], np.int8), r"obs of agent \w+\[1\] is 2 "),
    "uint16": (
        BYTES,
        np.array([0, 256, 1], np.uint16),
        r"obs of agent \w+\[1\] is 256 \(uint16\); it is stored as uint8, which holds 0 … 255",
    ),
    "int64": (
        SMALL,
        np.array([0, 1, -129]),
        r"obs of agent \w+\[2\] is -129 \(int64\); it is stored as int8",
    ),
    "float64": (
        WIDE,
        np.array([0, 1e39]),
        r"obs of agent \w+\[1\] is 1e\+39 \(float64\); it is stored as float32",
    ),
    "complex": (FLAT, np.zeros(4, np.complex128), r"obs of agent \w+ has dtype complex128"),
    "ragged": (FLAT, [[0.0], [0.0, 0.0], [0.0], [0.0]], r"obs of agent \w+ is no array: .*inhomogeneous"),
    "nothing": (FLAT, None, r"obs of agent \w+ has (shape \(\)|dtype object)"),
}
REWARDS: dict[str, tuple[Any, str]] = {
    "text": ("1.5", r"reward of agent \w+ is '1.5'; it must be one number"),
    "none": (None, r"reward of agent \w+ is None; it must be one number"),
    "array": (
        np.zeros(1),
        r"reward of agent \w+ is array\(\[0\.\]\)|each be an array of 2 lanes; reward has the shape",
    ),
    "complex": (1j, r"reward of agent \w+ is .*1j.*; it must be one number"),
    "large": (1e39, r"reward of agent \w+ is 1e\+39; rewards are stored as float32"),
    "larger": (10**400, r"reward of agent \w+ is 1000+…; rewards are stored as float32"),
    "nan": (float("nan"), r"reward of agent \w+ in lane 1 is not finite: nan"),
}
ENDS: dict[str, tuple[Any, str]] = {
    "none": (None, r"terminated of agent \w+ is None; it must be one bool"),
    "text": ("False", r"terminated of agent \w+ is 'False'; it must be one bool"),
    "number": (0.5, r"terminated of agent \w+ is 0.5; it must be one bool"),
    "two": (2, r"terminated of agent \w+ is 2; it must be one bool"),
    "array": (
        np.zeros(1, bool),
        r"terminated of agent \w+ is array\(\[False\]\)|each be an array of 2 lanes; terminated has the "
        r"shape",
    ),
}

Answer = tuple[Any, Any, Any]  # observation, reward, terminated


class One(gymnasium.Env[Any, Any]):
    """Answers `good` until its step 1, in which it answers `odd`."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any, good: Answer, odd: Answer) -> None:
        self.observation_space, self.good, self.odd, self.steps = space, good, odd, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return self.good[0], {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, reward, terminated = self.odd if self.steps == 1 else self.good
        return observation, reward, terminated, False, {}


def named(number: int = 0, odd: bool = True) -> One:
    """Return the case `number` of all: see `cases`."""
    space, good, bad, _ = list(cases().values())[number]
    return One(space, good, bad if odd else good)


def cases() -> dict[str, tuple[spaces.Space[Any], Answer, Answer, str]]:
    """Return by name (space, good answer, odd answer, what the error says)."""
    good = next(value for space, value in GOOD if space is FLAT)
    found: dict[str, Any] = {}
    for name, (space, odd, says) in OBSERVATIONS.items():
        usual = next(value for known, value in GOOD if known == space)
        found[f"observation: {name}"] = (space, (usual, 0.0, False), (odd, 0.0, False), says)
    for name, (reward, says) in REWARDS.items():
        found[f"reward: {name}"] = (FLAT, (good, 0.0, False), (good, reward, False), says)
    for name, (ends, says) in ENDS.items():
        found[f"terminated: {name}"] = (FLAT, (good, 0.0, False), (good, 0.0, ends), says)
    return found


class Async:
    """An environment as one with async def."""

    def __init__(self, env: Any) -> None:
        self.env, self.observation_space, self.action_space = env, env.observation_space, env.action_space

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        return self.env.step(action)


class Together(ParallelEnv):  # type: ignore[misc]
    """Two agents that see and get what an environment answers."""

    metadata = {"name": "together"}  # noqa: RUF012
    possible_agents = ["x", "y"]  # noqa: RUF012

    def __init__(self, env: Any) -> None:
        self.env, self.agents = env, ["x", "y"]

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = ["x", "y"]
        observation, _ = self.env.reset()
        return dict.fromkeys(self.agents, observation), {}

    def step(self, actions: Any) -> Any:
        return (*(dict.fromkeys(self.agents, value) for value in self.env.step(0)[:4]), {})


class Turns(AECEnv):  # type: ignore[misc]
    """One agent, always on turn, that sees and gets what an environment answers."""

    metadata = {"name": "turns"}  # noqa: RUF012
    possible_agents = ["x"]  # noqa: RUF012

    def __init__(self, env: Any) -> None:
        self.env = env

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.agent_selection = ["x"], "x"
        self.terminations = {"x": False}
        self.truncations = {"x": False}
        self.infos = {"x": {}}
        self.rewards = {"x": 0.0}
        self.seen, _ = self.env.reset()

    def observe(self, agent: str) -> Any:
        return self.seen

    def step(self, action: Any) -> None:
        self.seen, self.rewards["x"], self.terminations["x"], _, _ = self.env.step(action)


class Vector:
    """Environments as a vector whose reward and terminated are arrays of whatever the
    lanes answer."""

    def __init__(self, envs: list[Any]) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.metadata = {"autoreset_mode": "NextStep"}

    def reset(self, *, seed: int | None = None) -> Any:
        return self.joined([env.reset()[0] for env in self.envs]), {}

    def step(self, actions: Any) -> Any:
        observations, rewards, ends, cuts, _ = zip(*[env.step(0) for env in self.envs], strict=True)
        return self.joined(observations), self.array(rewards), self.array(ends), np.array(cuts), {}

    def array(self, values: Any) -> Any:
        return np.array([*values], None if len({*map(type, values)}) == 1 else object)

    def joined(self, values: Any) -> Any:
        if isinstance(values[0], dict):
            return {key: self.joined([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], tuple):
            return tuple(self.joined([value[number] for value in values]) for number in range(len(values[0])))
        return np.array([*values])

    def close(self) -> None:
        pass


class Sharing(gymnasium.Env[Any, Any]):
    """Every copy writes [its number, steps] into one array of the class. `view`: what it
    returns is a new view of it each time. `parts`: it lies in a dict of the class, of
    which only the parts are new; `mapping`: in a new mapping that is no dict. `buffer`:
    what is returned is a new array over one bytearray. `still`: it writes nothing."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    array = np.zeros(2, np.float32)
    dict: Any = {}  # noqa: RUF012
    memory = bytearray(8)
    made = 0

    def __init__(self, kind: str = "") -> None:
        self.kind, self.number = kind, Sharing.made
        Sharing.made += 1
        if kind in ("parts", "mapping"):
            self.observation_space = spaces.Dict({"a": Sharing.observation_space})

    def see(self) -> Any:
        if self.kind != "still":
            self.array[:] = self.number, self.steps
        if self.kind == "parts":
            self.dict["a"] = self.array.copy()
            return self.dict
        if self.kind == "mapping":
            return MappingProxyType({"a": self.array})
        if self.kind == "buffer":
            np.frombuffer(self.memory, np.float32)[:] = self.array
            return np.frombuffer(self.memory, np.float32)
        if self.kind == "list":
            Sharing.numbers[:] = self.array.tolist()
            return Sharing.numbers
        return self.array[:] if self.kind == "view" else self.array

    numbers: list[float] = [0.0, 0.0]  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.see(), 0.0, self.steps == 9, False, {}
