"""Deep Q-learning of quantiles of the return (QR-DQN), in numpy: its configuration and
its learner."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tidemill.algorithms.action_value_formulas import Floats, differentiate_quantile_huber
from tidemill.algorithms.dqn import DQN, DQNLearner
from tidemill.api.algorithm import Algorithm
from tidemill.core.errors import ConfigError
from tidemill.nets.q_network import QNetwork, QPolicy


@dataclass(frozen=True, kw_only=True)
class QRDQN(DQN):
    """QR-DQN (Dabney et al. 2018, "Distributional Reinforcement Learning with Quantile
    Regression") learns quantiles of each action's return in place of its mean, and acts
    by their mean. It is for policies of `QNetwork(quantiles=n)`; all else is as in `DQN`.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **DQN.ranges,
        "kappa": (1e-9, 1e9, "1 is usual"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon"}

    kappa: float = 1.0
    """κ: an error of more than this counts in proportion, a smaller one by its square."""

    def _check_head(self, network: QNetwork) -> None:
        if not network.quantiles:
            raise ConfigError(
                "QRDQN trains a QNetwork that tells quantiles, and this one has quantiles = 0; take "
                "QNetwork(quantiles=50), or DQN"
            )

    def _learner(self, policy: QPolicy, seed: int) -> Algorithm:
        return QRDQNLearner(self, policy, seed)


class QRDQNLearner(DQNLearner):
    """The learner that `QRDQN` describes: `DQNLearner` with the quantile Huber loss."""

    config: QRDQN

    def _differentiate_spread(
        self, found: Floats, then: Floats, returns: Floats, discount: Floats
    ) -> tuple[Floats, Floats]:
        goals = returns[:, None] + discount[:, None] * then
        return differentiate_quantile_huber(found, goals, self.config.kappa)
