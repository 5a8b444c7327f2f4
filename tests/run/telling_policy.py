"""A policy whose actions tell its version, for runs whose processes need nothing that
tests alone need."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill import Policy, PolicyConfig
from tidemill.core.user_code_loading import load_file

experiments = load_file(Path(__file__).with_name("experiments.py"), "test")


@dataclass(frozen=True, kw_only=True)
class Tells(PolicyConfig):
    """Its action is what its weights say, which the recording algorithm raises by 1 with
    each update: the version's number, in four actions."""

    def answer(self, spaces: Any) -> Any:
        return experiments.ByObservation().answer(spaces)

    def build(self, spaces: Any, seed: int) -> Policy:
        return _Tells()


class _Tells(Policy):
    def __init__(self) -> None:
        self.w = np.zeros(1)

    def act(self, observation: Any, state: Any, deterministic: Any, out: Any) -> None:
        count = len(observation["obs"])
        out["action"][:count], out["log_prob"][:count], out["value"][:count] = self.w % 4, 0, 0

    def parameters(self) -> Any:
        return {"w": self.w}

    def load(self, parameters: Any, version: int) -> None:
        self.w[:], self.version = parameters["w"], version
