"""An algorithm and an environment of members of populations, for runs whose processes
need nothing that tests alone need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.api.policy import Policy
from tidemill.core.schema import Array, Arrays
from tidemill.core.user_code_loading import load_file

load_file(Path(__file__).parents[1] / "run" / "experiments.py", "test")  # the policy


@dataclass(frozen=True, kw_only=True)
class Adding(AlgorithmConfig):
    """Adds to every weight, and tells what it was trained on."""

    amount: float = 1.0

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Adding(policy, self.amount)


class _Adding(Algorithm):
    def __init__(self, policy: Policy, amount: float) -> None:
        self.policy, self.amount, self.updates = policy, amount, 0

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        self.policy.parameters()["w"][...] += self.amount  # type: ignore[index]
        self.updates += 1
        return {
            "oldest_min": float(min(sample["version"][sample.trained()].min() for sample in samples)),
            "since": float(self.updates),
        }

    def state(self) -> Arrays:
        return {"updates": np.array(self.updates)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.updates = int(state["updates"])


class Paying(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps, each paid alike."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, pay: float) -> None:
        self.pay = pay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), self.pay, self.steps == 5, False, {}
