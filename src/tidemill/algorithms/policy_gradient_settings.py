"""The settings of algorithms that follow the policy's gradient, and what they measure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tidemill.algorithms.adam import AdamSettings
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule
from tidemill.core.errors import ConfigError
from tidemill.nets.trainable import TrainablePolicy

MEASURED = ("loss/policy", "loss/value", "entropy", "kl", "clip_fraction")
"""What is measured on every minibatch, in this order."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(AdamSettings):
    """The settings that `PPO` and `Impala` share: Adam down the gradient of a policy
    loss, a value loss and an entropy bonus."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "minibatch_size": (1, 1e12, "64 is usual, and 256 and more for images"),
        "learning_rate": (0, 1e6, "0.0003 is usual"),
        "adam_epsilon": (1e-30, 1, "0.00001 is usual"),
        "value_coefficient": (0, 1e9, "0.5 is usual"),
        "entropy_coefficient": (-1e9, 1e9, "0 to 0.01 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "0.5 is usual; None leaves gradients as they are"),
        "chunk_steps": (1, 1e9, "16 to 128 is usual; None takes the whole length of a sample"),
    }

    gamma: float = 0.99
    """Discount of a step."""
    minibatch_size: int = 64
    """Rows of a minibatch, about: the trained rows of a batch are split into equal parts
    of nearly this size. Equal trainers share them: each has its part of every minibatch,
    so that learning does not change with their number. Few rows make many steps of Adam
    an env step: by PPO with 64 rows and 10 epochs Hopper-v5 returns 1,000 and more after
    200 k env steps, with 2,048 rows and 4 epochs 200."""
    value_coefficient: float | LinearSchedule = 0.5
    """Weight of the value loss ½ (V - target)²."""
    entropy_coefficient: float | LinearSchedule = 0.0
    """Weight of the entropy bonus, per nat."""
    max_gradient_norm: float | None = 0.5
    """Gradients of all weights together are scaled down to this Euclidean norm.
    None: they are not scaled."""
    clip_apart: bool = True
    """Whether the actor's gradient and the critic's, where they share no weights, are
    scaled down to `max_gradient_norm` each by itself, so that large errors of values do
    not shorten the actor's steps (FrozenLake-v1 after 75 k env steps: 0.46, and 0.37
    where they do)."""
    normalise_returns: bool = True
    """Whether values are learnt in units of the running standard deviation of their
    targets."""
    chunk_steps: int | None = None
    """Rows of a chunk, of a recurrent policy: each seat's rows are cut into chunks,
    through which gradients flow back in time (truncated backpropagation). None, or more
    than a sample has: all of them. A minibatch has whole chunks, about `minibatch_size`
    rows. A chunk begins with the state that the policy that acted had there; with
    `AgentSpec.burn_in` so many rows before it first bring that up to date."""

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: what was saved without `clip_apart`
        scaled both gradients down together. All settings are saved, so that what lacks
        others, too, was written by hand. See `Config.of_today`."""
        data = super().of_today(data)
        return {"clip_apart": False, **data} if "max_gradient_norm" in data else data

    @property
    def epochs(self) -> int:
        """Passes over each batch."""
        return 1

    @property
    def clip_value(self) -> float | LinearSchedule | None:
        """ε of the clipped value loss; None leaves it unclipped."""
        return None

    @property
    def target_kl(self) -> float | None:
        """The KL divergence above which an update ends; None: none is too far."""
        return None

    @property
    def normalise_advantages(self) -> bool | Literal["minibatch"]:
        """Whether advantages are brought to mean 0 and standard deviation 1, and of
        what."""
        return False

    def measures(self) -> tuple[str, ...]:
        return *MEASURED, "gradient_norm", "explained_variance", "learning_rate", "rows", "minibatches"

    def trainable(self, policy: Policy) -> TrainablePolicy:
        """Return `policy`. Raises `ConfigError` when gradients cannot train it."""
        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(
                f"{type(self).__name__} cannot train a {type(policy).__name__}: it is no TrainablePolicy "
                "(see tidemill.nets.trainable)"
            )
        if self.chunk_steps is not None and not policy.recurrent:
            raise ConfigError(
                f"chunk_steps = {self.chunk_steps}: a {type(policy).__name__} has no state, so that it is "
                "trained on rows one by one; leave it out, or take RecurrentActorCritic"
            )
        return policy
