"""Soft actor-critic: the configuration. The learner stands in `sac_learner`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tidemill.algorithms.dqn import check_ranges
from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SAC(AlgorithmConfig):
    """Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications": two critics,
    an actor that is paid for its entropy, and a temperature α that keeps the entropy
    where it is wanted. Each update is a step of the critics, of the actor and of α, and
    one of the target critics.

    For policies of `SquashedGaussian`, on batches of a `Replay`; the critics have the
    hidden layers that the policy has.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "learning_rate": (0, 1e6, "0.0003 is usual"),
        "critic_learning_rate": (0, 1e6, "0.0003 to 0.001 is usual; None: as learning_rate"),
        "adam_epsilon": (1e-30, 1, "0.00000001 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "None is usual: gradients stay as they are"),
        "target_rate": (1e-9, 1, "0.005 is usual"),
        "temperature": (1e-9, 1e9, "1 is usual where it is learnt, 0.2 where it is not"),
        "target_entropy": (-1e9, 1e9, "None: minus the number of the action's elements"),
    }
    """The least and the most of each number, and a word of advice."""

    gamma: float = 0.99
    """Discount of a step."""
    learning_rate: float = 3e-4
    """Adam's, of the actor and of the temperature."""
    critic_learning_rate: float | None = None
    """Adam's, of the critics; None: as `learning_rate`."""
    adam_epsilon: float = 1e-8
    """Added to Adam's denominator."""
    max_gradient_norm: float | None = None
    """The gradients of the actor, and of both critics together, are scaled down to this
    Euclidean norm."""
    target_rate: float = 0.005
    """τ: in each update the target critics move to the critics by this share of the
    way."""
    temperature: float = 1.0
    """α at the start."""
    learn_temperature: bool = True
    """Whether α is learnt; else it stays as it is."""
    target_entropy: float | None = acting(
        None, lambda sac: sac.learn_temperature, "with learn_temperature = False: α stays as it is"
    )
    """Entropy, in nats, that α is learnt for; of actions in [-1, 1]. None: minus the
    number of the action's elements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, self.ranges)

    def measures(self) -> tuple[str, ...]:
        return (
            "loss/value",
            "loss/policy",
            "q/mean",
            "error/mean",
            "entropy",
            "temperature",
            "gradient_norm",
            "rows",
        )

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be what a `SquashedGaussian` builds.
        The critics' first weights, and the actions that are drawn in updates, come from
        two streams of `seed`."""
        from tidemill.algorithms.sac_learner import SACLearner
        from tidemill.nets.squashed_gaussian_policy import SquashedGaussianPolicy

        if not isinstance(policy, SquashedGaussianPolicy):
            raise ConfigError(
                f"SAC cannot train a {type(policy).__name__}; take a SquashedGaussian for the policy"
            )
        return SACLearner(self, policy, seed)
