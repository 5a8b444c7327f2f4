"""PPO whose trainers write down their weights."""

import hashlib
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill import PPO
from tidemill.algorithms.ppo import PPOLearner
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.api.policy import Policy
from tidemill.core.schema import Array


@dataclass(frozen=True, kw_only=True)
class Watched(PPO):
    """PPO whose trainers each write down, in a file of their own in `record`, their
    weights and their learning rate after each update."""

    record: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Watched(self, self.trainable(policy), seed)


class _Watched(PPOLearner):
    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        metrics = yield from super().parallel_update(samples, steps)
        weights = b"".join(array.tobytes() for array in self.policy.parameters().values())
        assert isinstance(self.config, Watched)
        with open(Path(self.config.record) / str(os.getpid()), "a") as file:
            file.write(f"{metrics['learning_rate']} {hashlib.sha256(weights).hexdigest()}\n")
        return metrics
