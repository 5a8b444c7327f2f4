"""Importance-weighted actor-learner: the configuration. Imports no torch; the learner
stands in `impala_learner`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tidemill.algorithms.policy_gradient import PolicyGradient
from tidemill.api.algorithm import Algorithm
from tidemill.api.policy import Policy
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Impala(PolicyGradient):
    """Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance
    Weighted Actor-Learner Architectures": V-trace targets, the policy gradient with
    weighted advantages, an entropy bonus, one pass over each batch.

    Ratios and values are those of the policy at the start of the update, for the whole
    batch. Where returns are normalised, advantages are in the same units as values: those
    of the running deviation of the targets.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **PolicyGradient.ranges,
        "trace_lambda": (0, 1, "1 is usual"),
        "rho_clip": (1e-6, 1e6, "1 is usual"),
        "c_clip": (1e-6, 1e6, "1 is usual"),
    }

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
        from tidemill.algorithms.impala_learner import ImpalaLearner

        return ImpalaLearner(self, self.trainable(policy), seed)
