"""Deep Q-learning: the configuration. The learner stands in `dqn_learner`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Literal

from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DQN(AlgorithmConfig):
    """Mnih et al. 2015, "Human-level control through deep reinforcement learning", with
    what Hessel et al. 2018, "Rainbow", joined to it: double Q-learning here; n-step
    returns by `Replay(steps=n)`; priorities by `PrioritisedReplay`; duelling, noisy and
    distributional networks by `QNetwork`.

    Everything is counted in updates, never in time: with a trainer's `ratio` of 1/4 an
    update is four steps.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "learning_rate": (0, 1e6, "0.0001 to 0.001 is usual"),
        "adam_epsilon": (1e-30, 1, "0.00001 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "10 is usual; None leaves gradients as they are"),
        "target_every": (1, 1e12, "500 is usual"),
        "target_rate": (1e-9, 1, "1 copies the weights, 0.005 with target_every = 1 follows them"),
        "epsilon_start": (0, 1, "1 is usual"),
        "epsilon_end": (0, 1, "0.01 to 0.1 is usual"),
        "epsilon_updates": (1, 1e12, "a tenth of all updates is usual"),
    }
    """The least and the most of each number, and a word of advice."""

    gamma: float = 0.99
    """Discount of a step."""
    double: bool = True
    """Whether the network itself chooses the action whose value the target network tells
    (van Hasselt et al. 2016)."""
    learning_rate: float = 5e-4
    """Adam's."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """``linear``: falls to 0 over the run's step limit."""
    adam_epsilon: float = 1e-5
    """Added to Adam's denominator."""
    max_gradient_norm: float | None = 10.0
    """The gradient of all weights together is scaled down to this Euclidean norm."""
    target_every: int = 500
    """Every so many updates the target network moves to the network,"""
    target_rate: float = 1.0
    """by this share of the way."""
    epsilon_start: float = 1.0
    """Probability of an action drawn at random, before the first update,"""
    epsilon_end: float = 0.05
    """and from update `epsilon_updates` on; between them it falls in a straight line. A
    noisy network explores by its noise: 0 from the first update on."""
    epsilon_updates: int = acting(
        10_000,
        lambda dqn: dqn.epsilon_start != dqn.epsilon_end,
        "where epsilon_start is epsilon_end: ε stays as it is",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, self.ranges)
        if self.learning_rate_schedule not in ("constant", "linear"):
            raise ConfigError(
                f'learning_rate_schedule = "{self.learning_rate_schedule}" is not known; take constant or '
                "linear"
            )

    def measures(self) -> tuple[str, ...]:
        return "loss/value", "q/mean", "error/mean", "gradient_norm", "learning_rate", "epsilon", "rows"

    def check_endless(self) -> None:
        self.refuse_idle(
            "learning_rate_schedule",
            "without limits.steps or limits.updates: nobody knows how far the run is",
        )

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be what a `QNetwork` builds. A noisy
        network's noise is drawn from `seed`."""
        from tidemill.algorithms.dqn_learner import DQNLearner
        from tidemill.nets.q_policy import QPolicy

        if not isinstance(policy, QPolicy):
            raise ConfigError(
                f"DQN cannot train a {type(policy).__name__}, which tells no action's value; take a QNetwork "
                "for the policy"
            )
        if policy.config.noise:
            for name in ("epsilon_end", "epsilon_updates"):
                self.refuse_idle(name, "on a noisy network, whose ε is 0 from the first update on")
        return DQNLearner(self, policy, seed)


def check_ranges(config: Any, ranges: Mapping[str, tuple[float, float, str]]) -> None:
    """Raise `ConfigError` for a number of `config` that is not within its range."""
    for name, (low, high, advice) in ranges.items():
        value: Any = getattr(config, name)
        if value is not None and not (isfinite(value) and low <= value <= high):
            raise ConfigError(f"{name} = {value} is not between {low:g} and {high:g}; {advice}")
