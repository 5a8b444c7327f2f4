"""IMPALA: the importance-weighted actor-learner. Imports no torch by itself."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tidemill.algorithms.batch_totals import BatchTotals
from tidemill.algorithms.minibatches import Floats, take_rows
from tidemill.algorithms.native_traces import native_vtrace
from tidemill.algorithms.policy_gradient import PolicyGradientLearner
from tidemill.algorithms.policy_gradient_formulas import differentiate_policy_gradient, vtrace
from tidemill.algorithms.policy_gradient_loss import PolicyGradientLoss, PolicyLoss
from tidemill.algorithms.policy_gradient_settings import PolicyGradient
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.api.policy import Policy
from tidemill.core.errors import ConfigError
from tidemill.nets.native_actor_critic import NativeActorCritic
from tidemill.nets.trainable import TrainablePolicy

BEYOND = 1.001
"""Ratios that are cut off by less than a thousandth are not counted as clipped: on the
policy's own samples they are 1, but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Impala(PolicyGradient):
    """Impala, the importance-weighted actor-learner, trains by V-trace targets, a policy
    gradient with weighted advantages and an entropy bonus, in one pass over each batch
    (Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
    Actor-Learner Architectures").

    Ratios and values are those of the policy at the start of the update, for the whole
    batch. Where returns are normalised, advantages are in the same units as values: those
    of the running standard deviation of the targets.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **PolicyGradient.ranges,
        "trace_lambda": (0, 1, "1 is usual"),
        "rho_clip": (1e-6, 1e6, "1 is usual"),
        "c_clip": (1e-6, 1e6, "1 is usual"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon", "chunk_steps"}

    trace_lambda: float = 1.0
    """λ of the traces (the paper's remark 2)."""
    rho_clip: float = 1.0
    """ρ̄: where the ratio in δ and in the policy's gradient is cut off; it decides which
    policy's values are learnt."""
    c_clip: float = 1.0
    """c̄, at most ρ̄: where the ratio in traces is cut off; it decides how fast they are
    learnt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_clip > self.rho_clip:
            raise ConfigError(
                f"c_clip = {self.c_clip} is above rho_clip = {self.rho_clip}; V-trace needs c̄ ≤ ρ̄, 1 and 1 "
                "are usual"
            )

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be a `TrainablePolicy`. Minibatches
        are drawn from `seed`."""
        return ImpalaLearner(self, self.trainable(policy), seed)


class ImpalaLoss(PolicyGradientLoss):
    """The loss that `Impala` describes."""

    config: Impala

    def weigh(self, advantage: Floats, whole: BatchTotals) -> None:
        advantage /= np.float32(self.policy.value_scale)

    def of_policy(self, log_prob: Any, behaviour: Any, advantage: Any) -> PolicyLoss:
        xp = self.library.namespace
        excess = xp.expm1(log_prob - behaviour)  # ρ - 1
        kl = (excess - (log_prob - behaviour)).sum()
        clipped = (excess > self.config.rho_clip * BEYOND - 1).sum()
        return PolicyLoss(*differentiate_policy_gradient(xp, log_prob, advantage), kl, clipped)


class ImpalaLearner(PolicyGradientLearner):
    """The learner that `Impala` describes."""

    loss_type = ImpalaLoss
    config: Impala

    def __init__(self, config: Impala, policy: TrainablePolicy, seed: int) -> None:
        super().__init__(config, policy, seed)
        network, self._vtrace = policy.network, vtrace
        if isinstance(network, NativeActorCritic):
            self._vtrace = partial(native_vtrace, network.kernels)

    def _estimate(self, sample: Sample) -> tuple[Floats, Floats]:
        config, acted = self.config, sample["version"] >= 0
        # those that were cut and the last ones among them: their values are bootstrap
        # values
        rows = np.flatnonzero(acted)
        log_prob, values = self._evaluate(sample, rows)
        rho, value = np.zeros((2, *acted.shape), np.float32)
        rho.reshape(-1)[rows] = np.exp(log_prob - take_rows([sample], [rows], "log_prob"))
        value.reshape(-1)[rows] = values
        done, truncated = sample["done"], sample["truncated"]
        return self._vtrace(
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
