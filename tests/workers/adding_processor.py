"""A processor of samples, for runs whose processes need nothing that tests alone need."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.schema import Schema
from tidemill.core.user_code_loading import load_file

load_file(Path(__file__).parents[1] / "run" / "experiments.py", "test")  # policy and algorithm


@dataclass(frozen=True, kw_only=True)
class Add(ProcessorConfig):
    """Adds to every reward, in place or not. What it does wrong: "field" (a new one),
    "shape"."""

    amount: float = 1.0
    in_place: bool = True
    wrong: str = ""

    def build(self, schema: Schema, policy: Policy | None, seed: int) -> Processor:
        return _Add(self)


class _Add(Processor):
    def __init__(self, config: Add) -> None:
        self._config = config

    def process(self, sample: Sample) -> None:
        if self._config.in_place:
            sample["reward"] += self._config.amount
        else:
            sample["reward"] = sample["reward"] + self._config.amount
        if self._config.wrong == "field":
            sample["bonus"] = sample["reward"]
        if self._config.wrong == "shape":
            sample["reward"] = np.zeros((3, 3, 3), np.float32)
