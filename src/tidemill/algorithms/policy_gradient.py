"""What algorithms that follow the policy's gradient have in common: their settings.
Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.policy import Policy
from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.nets.trainable import TrainablePolicy

MEASURED = ("loss/policy", "loss/value", "entropy", "kl", "clip_fraction")
"""What is measured on every minibatch, in this order."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(AlgorithmConfig):
    """The settings that `PPO` and `Impala` share: Adam down the gradient of a policy
    loss, a value loss and an entropy bonus."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "minibatch_size": (1, 1e12, "a quarter of the trainer's batch_size is usual"),
        "learning_rate": (0, 1e6, "0.0003 is usual"),
        "value_coefficient": (0, 1e9, "0.5 is usual"),
        "entropy_coefficient": (-1e9, 1e9, "0 to 0.01 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "0.5 is usual; None leaves gradients as they are"),
        "chunk_steps": (1, 1e9, "16 to 128 is usual; None takes the whole length of a sample"),
    }
    """The least and the most of each number, and a word of advice."""

    gamma: float = 0.99
    """Discount of a step."""
    minibatch_size: int = 2048
    """Rows of a minibatch, about: the trained rows of a batch are split into equal parts
    of nearly this size. Equal trainers share them: each has its part of every minibatch,
    so that learning does not change with their number."""
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
    normalise_returns: bool = True
    """Whether values are learnt in units of the running deviation of their targets."""
    chunk_steps: int | None = None
    """Of a policy that remembers: each seat's rows are cut into chunks of so many,
    through which gradients flow back in time; None, or more than a sample has: all of
    them. A minibatch has whole chunks, about `minibatch_size` rows. A chunk begins with
    the state that the behaviour had there; with `AgentSpec.burn_in` so many rows before
    it first bring that up to date."""

    def measures(self) -> tuple[str, ...]:
        return *MEASURED, "gradient_norm", "explained_variance", "learning_rate", "rows", "minibatches"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (low, high, advice) in self.ranges.items():
            value: Any = getattr(self, name)
            if value is not None and not (isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} = {value} is not between {low:g} and {high:g}; {advice}")
        if self.learning_rate_schedule not in ("constant", "linear"):
            raise ConfigError(
                f'learning_rate_schedule = "{self.learning_rate_schedule}" is not known; take constant or '
                "linear"
            )

    def check_endless(self) -> None:
        self.refuse_idle(
            "learning_rate_schedule",
            "without limits.steps or limits.updates: nobody knows how far the run is",
        )

    def trainable(self, policy: Policy) -> "TrainablePolicy":
        """Return `policy`. Raises `ConfigError` when gradients cannot train it."""
        from tidemill.nets.trainable import TrainablePolicy

        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(
                f"{type(self).__name__} cannot train a {type(policy).__name__}: it is no TrainablePolicy "
                "(see tidemill.nets.trainable)"
            )
        if self.chunk_steps is not None and not policy.recurrent:
            raise ConfigError(
                f"chunk_steps = {self.chunk_steps}: a {type(policy).__name__} has no state, so that it is "
                "trained on rows one by one; leave it out, "
                "or take RecurrentActorCritic"
            )
        return policy
