"""Twin delayed deep deterministic policy gradient (TD3), in numpy: its configuration and
its learner."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.algorithms.action_value_formulas import (
    Floats,
    approach,
    differentiate_deterministic_actor,
    smoothed_actions,
)
from tidemill.algorithms.twin_critics import TwinCriticLearner, TwinCritics
from tidemill.api.algorithm import Algorithm
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays
from tidemill.nets.deterministic_actor import DeterministicPolicy


@dataclass(frozen=True, kw_only=True)
class TD3(TwinCritics):
    """TD3 (Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic
    Methods") trains two critics in each update, and in each `policy_delay`th a
    deterministic actor and the targets of all three; the critics' goals are of target
    actions with noise.

    It is for policies of `DeterministicActor`, on batches of a `Replay` or
    `PrioritisedReplay`. Before the first update actions are drawn uniformly.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **TwinCritics.ranges,
        "policy_delay": (1, 1e12, "2 is usual"),
        "exploration_noise": (0, 1e6, "0.1 is usual"),
        "target_noise": (0, 1e6, "0.2 is usual"),
        "target_noise_clip": (0, 2, "0.5 is usual"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon"}

    learning_rate: float | LinearSchedule = 1e-3
    """Learning rate of Adam, for the actor."""
    policy_delay: int = 2
    """Number of updates of the critics for each of the actor and of the targets."""
    exploration_noise: float | LinearSchedule = 0.1
    """Standard deviation of the normal noise in actions that are played to learn from; of
    actions scaled to [-1, 1], as the next two."""
    target_noise: float = 0.2
    """Standard deviation of the normal noise in target actions."""
    target_noise_clip: float = 0.5
    """The noise in target actions is clipped to ± this."""

    def measures(self) -> tuple[str, ...]:
        return "loss/value", "loss/policy", "q/mean", "error/mean", "gradient_norm", "rows"

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be what a `DeterministicActor`
        builds. The critics' first weights, and the noise of target actions, come from two
        streams of `seed`."""
        if not isinstance(policy, DeterministicPolicy):
            raise ConfigError(
                f"TD3 cannot train a {type(policy).__name__}; take a DeterministicActor for the policy"
            )
        return TD3Learner(self, policy, seed)


class TD3Learner(TwinCriticLearner):
    """The learner that `TD3` describes: it trains a `DeterministicPolicy`."""

    policy: DeterministicPolicy
    config: TD3

    def __init__(self, config: TD3, policy: DeterministicPolicy, seed: int) -> None:
        super().__init__(config, policy, seed)
        self.target_actor = policy.network(policy.flat.copy())
        self._updates = np.zeros((), np.int64)
        # of the actor's last step
        self._loss = np.zeros((), np.float64)
        self._explore()

    def _values(self, then: Floats) -> Floats:
        """See `TwinCriticLearner`: Fujimoto et al. 2018, eq. 10 and 14."""
        action = np.tanh(self.target_actor.forward(then)[0])
        noise = np.float32(self.config.target_noise) * self._rng.standard_normal(action.shape, np.float32)
        action = smoothed_actions(action, noise, self.config.target_noise_clip)
        lesser: Floats = self.targets.forward(np.concatenate([then, action], 1))[..., 0].min(0)
        return lesser

    def _improve_actor(self, seen: Floats, weight: Floats) -> dict[str, float]:
        """Do a step down -Q₁(π(s)) of the actor and move all targets, in each
        `policy_delay`th update: algorithm 1."""
        config = self.config
        if (self._updates + 1) % config.policy_delay == 0:
            share = weight / np.float32(len(weight))
            action = np.tanh(self._actor.forward(seen)[0])
            told = self.critics.forward(np.concatenate([seen, action], 1))
            loss = -float(told[0, :, 0] @ share)
            of_inputs = self.critics.backward_chosen(np.zeros(len(seen), np.int64))
            of_head = differentiate_deterministic_actor(action, of_inputs[:, seen.shape[1] :])
            self._actor.backward((of_head * share[:, None])[None], self._of_actor)
            self._step("actor", number(config.learning_rate), loss)
            self._loss[...] = loss
            self._approach()
            approach(self.target_actor.flat, self.policy.flat, config.target_rate, self.policy.kernels)
        self._updates += 1
        self._explore()
        return {"loss/policy": float(self._loss)}

    def _explore(self) -> None:
        """Set how the policy explores."""
        self.policy.noise[...] = number(self.config.exploration_noise)
        self.policy.epsilon[...] = 0 if self._updates else 1

    def _own(self) -> Arrays:
        own: Arrays = {"target_actor": self.target_actor.flat, "updates": self._updates}
        return {**super()._own(), **own, "policy_loss": self._loss}
