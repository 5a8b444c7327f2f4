"""Soft actor-critic (SAC), in numpy: its configuration and its learner."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import ClassVar

import numpy as np

from tidemill.algorithms.action_value_formulas import Floats, differentiate_actor, soft_values
from tidemill.algorithms.adam import adam
from tidemill.algorithms.twin_critics import TwinCriticLearner, TwinCritics
from tidemill.api.algorithm import Algorithm
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Arrays
from tidemill.nets.squashed_gaussian import DrawnActions, SquashedGaussianPolicy, draw

LARGEST = 709.0
"""The largest log temperature whose exponential is a float."""


@dataclass(frozen=True, kw_only=True)
class SAC(TwinCritics):
    """SAC, the soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and
    Applications"), trains two critics, an actor whose reward includes its entropy, and a
    temperature α that holds the entropy at `target_entropy`. Each update is a step of the
    critics, of the actor, of α (with `learn_temperature`) and of the target critics.

    It is for policies of `SquashedGaussian`, on batches of a `Replay` or
    `PrioritisedReplay`; the critics have the hidden layers that the policy has.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **TwinCritics.ranges,
        "temperature": (1e-9, 1e9, "1 is usual where it is learnt, 0.2 where it is not"),
        "target_entropy": (-1e9, 1e9, "None: minus the number of the action's elements"),
    }

    # a learnt α begins as `temperature`, which would change nothing later
    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon", "temperature"}

    temperature: float | LinearSchedule = 1.0
    """α at the start: the weight of the entropy beside the return. A schedule goes with
    `learn_temperature` = False."""
    learn_temperature: bool = True
    """Whether α is learnt; else it is `temperature` always."""
    target_entropy: float | None = acting(
        None, lambda sac: sac.learn_temperature, "with learn_temperature = False: α is temperature"
    )
    """Entropy of the policy, in nats, that α is learnt to bring about, of actions scaled
    to [-1, 1]. None: minus the number of the action's elements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn_temperature and "temperature" in self.schedules:
            raise ConfigError(
                f"temperature = {self.temperature}, and learn_temperature = True learns it from its first "
                "value on; set learn_temperature to False, or temperature to a number"
            )

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
        if not isinstance(policy, SquashedGaussianPolicy):
            raise ConfigError(
                f"SAC cannot train a {type(policy).__name__}; take a SquashedGaussian for the policy"
            )
        return SACLearner(self, policy, seed)


class SACLearner(TwinCriticLearner):
    """The learner that `SAC` describes: it trains a `SquashedGaussianPolicy`."""

    policy: SquashedGaussianPolicy
    config: SAC

    def __init__(self, config: SAC, policy: SquashedGaussianPolicy, seed: int) -> None:
        super().__init__(config, policy, seed)
        begun = log(number(self.config.temperature))
        self.log_temperature = np.full(1, begun, np.float32)
        self._of_temperature = np.zeros(1, np.float32)
        self._adams["temperature"] = adam(
            self.log_temperature, self._of_temperature, config.adam_epsilon, policy.kernels
        )

    def _draw(self, inputs: Floats) -> DrawnActions:
        head = self._actor.forward(inputs)[0]
        noise = self._rng.standard_normal((len(head), self.policy.actions), np.float32)
        return draw(head, noise, self.policy.kernels)

    @property
    def temperature(self) -> float:
        """The temperature α. A learnt one that is too large for a float is as large as
        can be, and infinite in float32, so that the next step is left out."""
        if not self.config.learn_temperature:
            return number(self.config.temperature)
        return exp(min(float(self.log_temperature[0]), LARGEST))

    def _values(self, then: Floats) -> Floats:
        drawn = self._draw(then)
        told = self.targets.forward(np.concatenate([then, drawn.action], 1))[..., 0]
        return soft_values(told, drawn.log_prob, self.temperature)

    def _improve_actor(self, seen: Floats, weight: Floats) -> dict[str, float]:
        """Do a step down α log π(a) - Q(a), eq. 7 and 9, of the actor, Q being the lesser
        of the two critics; one of α, eq. 18; and one of the target critics."""
        config, share = self.config, weight / np.float32(len(weight))
        drawn = self._draw(seen)
        told = self.critics.forward(np.concatenate([seen, drawn.action], 1))
        loss = float((self.temperature * drawn.log_prob - told.min(0)[:, 0]) @ share)
        of_action = self.critics.backward_chosen(told[..., 0].argmin(0))[:, seen.shape[1] :]
        of_mean, of_log_std = differentiate_actor(drawn.action, drawn.spread, of_action, self.temperature)
        of_head = np.concatenate([of_mean, of_log_std * drawn.uncut], 1) * share[:, None]
        self._actor.backward(of_head[None], self._of_actor)
        self._step("actor", number(config.learning_rate), loss)
        if config.learn_temperature:
            goal = -float(self.policy.actions) if config.target_entropy is None else config.target_entropy
            gap = float((drawn.log_prob + np.float32(goal)) @ share)
            self._of_temperature[0] = -self.temperature * gap
            self._step("temperature", number(config.learning_rate), gap)
        self._approach()
        return {
            "loss/policy": loss,
            "entropy": -float(drawn.log_prob.mean()),
            "temperature": self.temperature,
        }

    def _own(self) -> Arrays:
        return {**super()._own(), "log_temperature": self.log_temperature}
