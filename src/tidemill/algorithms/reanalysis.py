"""Re-analysis: what a newer policy thinks of rows that an older one has gathered."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.schema import Arrays, Schema, allocate

MOST_ROWS = 1024  # that the policy is asked for at once: its memory grows with them


@dataclass(frozen=True, kw_only=True)
class Reanalyse(ProcessorConfig):
    """Re-analysis replaces the values of a sample's rows by those of the newest policy,
    so that returns are bootstrapped with what is known now: Schrittwieser et al. 2021,
    "Online and Offline Reinforcement Learning by Planning with a Learned Model", without
    the planning. Actions, log-probabilities and versions stay those of the policy that
    acted. A recurrent policy begins at each row from the state that is stored there, its
    actor's (the "stored state" of Kapturowski et al. 2019, "Recurrent Experience Replay
    in Distributed Reinforcement Learning", section 3)."""

    needs_policy: ClassVar[bool] = True

    def build(self, schema: Schema, policy: Policy | None, seed: int) -> Processor:
        if policy is None:
            raise ConfigError("Reanalyse needs a policy: set the policy of the buffer workers")
        if "value" not in schema:
            raise ConfigError(
                f'Reanalyse replaces "value", which the rows lack; {did_you_mean("value", schema)}'
            )
        return _Reanalysis(schema, policy)


class _Reanalysis(Processor):
    def __init__(self, schema: Schema, policy: Policy) -> None:
        parts = {
            part: [name for name in schema if name.partition(".")[0] == part] for part in ("obs", "state")
        }
        self._policy, self._observation, self._state = policy, parts["obs"], parts["state"]
        others = ("obs", "info", "post", *ROW_FIELDS)
        self._out = allocate(
            {name: field for name, field in schema.items() if name.partition(".")[0] not in others},
            (MOST_ROWS,),
        )

    def process(self, sample: Sample) -> None:
        version, value = sample["version"].reshape(-1), sample["value"].reshape(-1)
        acted = np.flatnonzero(version >= 0)  # on others nothing acted, and there is no value
        for first in range(0, len(acted), MOST_ROWS):
            rows = acted[first : first + MOST_ROWS]
            observation = self._of(sample, self._observation, rows)
            state = self._of(sample, self._state, rows)
            self._policy.act(observation, state, True, self._out)
            value[rows] = self._out["value"][: len(rows)]

    def state(self) -> Part:
        return {}

    def load_state(self, state: Part) -> None:
        pass

    @staticmethod
    def _of(sample: Sample, names: list[str], rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Arrays:
        return {name: sample[name].reshape(-1, *sample[name].shape[2:])[rows] for name in names}
