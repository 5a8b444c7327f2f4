"""Importance-weighted actor-learner: the learner that `Impala` builds. Imports torch only
for policies that are made of it."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.algorithms.batch import Floats, take_rows
from tidemill.algorithms.formulas import differentiate_policy_gradient, vtrace
from tidemill.algorithms.ppo_learner import PolicyGradientLearner, PolicyLoss, Whole
from tidemill.api.algorithm import Sample
from tidemill.nets.trainable import TrainablePolicy

if TYPE_CHECKING:
    from tidemill.algorithms.impala import Impala


BEYOND = 1.001
"""Ratios that are cut off by less than a thousandth are not counted as clipped: on the
policy's own samples they are 1, but for rounding."""


class ImpalaLearner(PolicyGradientLearner):
    """See `Impala`."""

    def __init__(self, config: "Impala", policy: TrainablePolicy, seed: int) -> None:
        super().__init__(config, policy, seed)
        self._impala = config

    def _estimate(self, sample: Sample) -> tuple[Floats, Floats]:
        config, acted = self._impala, sample["version"] >= 0
        # those that were cut and the last ones among them: their values are bootstrap
        # values
        rows = np.flatnonzero(acted)
        log_prob, values = self._evaluate(sample, rows)
        rho, value = np.zeros((2, *acted.shape), np.float32)
        with np.errstate(over="ignore"):
            rho.reshape(-1)[rows] = np.exp(log_prob - take_rows([sample], [rows], "log_prob"))
        value.reshape(-1)[rows] = values
        done, truncated = sample["done"], sample["truncated"]
        return vtrace(
            sample["reward"],
            value,
            done,
            truncated,
            acted,
            rho,
            config.gamma,
            config.trace_lambda,
            config.rho_clip,
            config.c_clip,
        )

    def _weigh(self, advantage: Floats, whole: Whole) -> None:
        advantage /= np.float32(self.policy.value_scale)

    def _policy_loss(self, log_prob: Any, behaviour: Any, advantage: Any) -> PolicyLoss:
        xp = self._library.namespace
        excess = xp.expm1(log_prob - behaviour)  # ρ - 1
        kl = (excess - (log_prob - behaviour)).sum()
        clipped = (excess > self._impala.rho_clip * BEYOND - 1).sum()
        return PolicyLoss(*differentiate_policy_gradient(xp, log_prob, advantage), kl, clipped)
