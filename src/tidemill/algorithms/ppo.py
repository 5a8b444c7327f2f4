"""Proximal policy optimisation: the configuration. Imports no torch; the learner stands in `ppo_learner`."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy
from tidemill.core.errors import ConfigError

_RANGES: dict[str, tuple[float, float, str]] = {
    "gamma": (0, 1, "0.99 is usual"),
    "gae_lambda": (0, 1, "0.95 is usual"),
    "clip": (1e-6, 1e6, "0.2 is usual"),
    "epochs": (1, 1e6, "4 is usual"),
    "minibatch_size": (1, 1e12, "a quarter of the trainer's batch_size is usual"),
    "learning_rate": (0, 1e6, "0.0003 is usual"),
    "value_coefficient": (0, 1e9, "0.5 is usual"),
    "entropy_coefficient": (-1e9, 1e9, "0 to 0.01 is usual"),
    "max_gradient_norm": (1e-9, 1e9, "0.5 is usual; None leaves gradients as they are"),
    "clip_value": (1e-9, 1e9, "0.2 is usual; None leaves values unclipped"),
    "target_kl": (1e-9, 1e9, "0.02 is usual; None never stops early"),
}


@dataclass(frozen=True, kw_only=True)
class PPO(AlgorithmConfig):
    """Schulman et al. 2017, "Proximal Policy Optimization Algorithms": clipped surrogate, GAE, several epochs over each batch, Adam."""

    gamma: float = 0.99
    """Discount of a step."""
    gae_lambda: float = 0.95
    """λ of the advantages and of the values' targets."""
    clip: float = 0.2
    """ε of the policy's ratio."""
    epochs: int = 4
    """Passes over each batch."""
    minibatch_size: int = 2048
    """Rows of a minibatch, about: the trained rows of a batch are split into equal parts of nearly this size. Equal trainers share them: each has its
    part of every minibatch, so that learning does not change with their number."""
    learning_rate: float = 3e-4
    """Adam's."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """``linear``: falls to 0 over the run's step limit."""
    adam_epsilon: float = 1e-5
    """Added to Adam's denominator."""
    value_coefficient: float = 0.5
    """Weight of the value loss ½ (V - target)²."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, per nat."""
    max_gradient_norm: float | None = 0.5
    """Gradients of all weights together are scaled down to this Euclidean norm."""
    normalise_advantages: bool = True
    """Whether a batch's advantages are brought to mean 0 and deviation 1."""
    normalise_returns: bool = True
    """Whether values are learnt in units of the running deviation of λ-returns."""
    clip_value: float | None = None
    """ε of the clipped value loss, in those units."""
    target_kl: float | None = None
    """An update ends before the first minibatch whose approximate KL divergence from the behaviour is above it."""
    correct_off_policy: bool = False
    """Whether traces are cut short where the policy at the start of the update has moved away from the behaviour (V-trace; one more forward
    pass). Of use when samples lag behind."""

    def __post_init__(self) -> None:
        for name, (low, high, advice) in _RANGES.items():
            value: Any = getattr(self, name)
            if value is not None and not (isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} = {value} is not between {low:g} and {high:g}; {advice}")
        if self.learning_rate_schedule not in ("constant", "linear"):
            raise ConfigError(f'learning_rate_schedule = "{self.learning_rate_schedule}" is not known; take constant or linear')

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be a `TrainablePolicy`. Minibatches are drawn from `seed`."""
        from tidemill.algorithms.ppo_learner import PPOLearner
        from tidemill.nets.trainable import TrainablePolicy

        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(f"PPO cannot train a {type(policy).__name__}: it is no TrainablePolicy (see tidemill.nets.trainable)")
        return PPOLearner(self, policy, seed)
