"""Re-analysis: what a newer policy thinks of rows that an older one has gathered."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays, allocate, schema_of


@dataclass(frozen=True, kw_only=True)
class Reanalyse(ProcessorConfig):
    """Replaces the values of a sample's rows by those of the newest policy, so that returns are bootstrapped with what is known now: Schrittwieser et
    al. 2021, "Online and Offline Reinforcement Learning by Planning with a Learned Model", without the planning. Actions, log-probabilities and
    versions stay those of the policy that acted."""

    needs_policy: ClassVar[bool] = True

    def build(self, policy: Policy | None, seed: int) -> Processor:
        if policy is None:
            raise ConfigError("Reanalyse needs a policy: set the policy of the buffer worker")
        return _Reanalysis(policy)


class _Reanalysis(Processor):
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._out: Arrays = {}

    def process(self, sample: Sample) -> None:
        rows = np.flatnonzero(sample["version"] >= 0)  # on others nothing acted, and there is no value
        if not len(rows):
            return
        given = {name: array.reshape(-1, *array.shape[2:]).take(rows, axis=0) for name, array in sample.items()}
        answers = {name: array for name, array in given.items() if name in ("log_prob", "value") or name.partition(".")[0] in ("action", "state")}
        observation, state = ({name: array for name, array in given.items() if name.partition(".")[0] == part} for part in ("obs", "state"))
        if not self._out or len(self._out["value"]) < len(rows):
            self._out = allocate(schema_of({name: array[0] for name, array in answers.items()}), (sample["version"].size,))
        self._policy.act(observation, state, True, self._out)
        sample["value"].reshape(-1)[rows] = self._out["value"][: len(rows)]
