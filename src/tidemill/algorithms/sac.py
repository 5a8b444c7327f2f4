"""Soft actor-critic (SAC), in numpy: its configuration and its learner."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import ClassVar, NamedTuple

import numpy as np

from tidemill.algorithms.action_value_formulas import (
    Floats,
    approach,
    differentiate_actor,
    n_step_returns,
    soft_values,
)
from tidemill.algorithms.adam import adam, spoilt
from tidemill.algorithms.learner_state import (
    check_learner_state,
    prefixed,
    random_state,
    set_random_state,
    unprefixed,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.api.policy import Policy
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.mlp import MLPShape
from tidemill.nets.native_mlp import mlp
from tidemill.nets.squashed_gaussian import SquashedGaussianPolicy, split, squash


@dataclass(frozen=True, kw_only=True)
class SAC(AlgorithmConfig):
    """SAC, the soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and
    Applications"), trains two critics, an actor whose reward includes its entropy, and a
    temperature α that holds the entropy at `target_entropy`. Each update is a step of the
    critics, of the actor, of α (with `learn_temperature`) and of the target critics.

    It is for policies of `SquashedGaussian`, on batches of a `Replay` or
    `PrioritisedReplay`; the critics have the hidden layers that the policy has.
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

    # α is learnt from its first value on
    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon", "temperature"}

    gamma: float = 0.99
    """Discount of a step."""
    learning_rate: float = 3e-4
    """Learning rate of Adam, for the actor and the temperature."""
    critic_learning_rate: float | None = None
    """Learning rate of Adam, for the critics; None: as `learning_rate`."""
    adam_epsilon: float = 1e-8
    """Added to Adam's denominator."""
    max_gradient_norm: float | None = None
    """The gradients of the actor, and of both critics together, are scaled down to this
    Euclidean norm. None: they are not scaled."""
    target_rate: float = 0.005
    """τ: in each update the target critics move to the critics by this share of the
    way."""
    temperature: float = 1.0
    """α at the start: the weight of the entropy beside the return."""
    learn_temperature: bool = True
    """Whether α is learnt; else it stays as it is."""
    target_entropy: float | None = acting(
        None, lambda sac: sac.learn_temperature, "with learn_temperature = False: α stays as it is"
    )
    """Entropy of the policy, in nats, that α is learnt to bring about, of actions scaled
    to [-1, 1]. None: minus the number of the action's elements."""

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


class _Drawn(NamedTuple):
    """Actions drawn for n observations, in [-1, 1], and what their gradients need."""

    action: Floats
    log_prob: Floats
    spread: Floats
    """Standard deviation times noise."""
    uncut: Floats


class SACLearner(Algorithm):
    """The learner that `SAC` describes: it trains a `SquashedGaussianPolicy` in place, on
    batches that a replay draws. Deterministic given seed, samples and one thread."""

    policy: SquashedGaussianPolicy
    config: SAC

    def __init__(self, config: SAC, policy: SquashedGaussianPolicy, seed: int) -> None:
        self.policy, self.config = policy, config
        weights_seed, drawing_seed = np.random.SeedSequence(seed).spawn(2)
        self._rng = np.random.default_rng(drawing_seed)
        kernels = policy.kernels
        self._actor = mlp(policy.shape, policy.flat, kernels)
        shape = MLPShape(2, policy.encoder.width + policy.actions, policy.hidden, 1, 1.0)
        self.critics = mlp(shape, shape.begin(np.random.default_rng(weights_seed)), kernels)
        self.targets = mlp(shape, self.critics.flat.copy(), kernels)
        self.log_temperature = np.full(1, log(config.temperature), np.float32)
        self._of_actor, self._of_critics = np.zeros_like(policy.flat), np.zeros_like(self.critics.flat)
        self._of_temperature = np.zeros(1, np.float32)
        pairs = {"actor": (policy.flat, self._of_actor), "critics": (self.critics.flat, self._of_critics)}
        pairs["temperature"] = (self.log_temperature, self._of_temperature)
        self._adams = {name: adam(*pair, config.adam_epsilon, kernels) for name, pair in pairs.items()}

    def _draw(self, inputs: Floats) -> _Drawn:
        mean, log_std, uncut = split(self._actor.forward(inputs)[0])
        noise = self._rng.standard_normal(mean.shape, np.float32)
        return _Drawn(*squash(mean, log_std, noise), np.exp(log_std) * noise, uncut)

    def update(self, samples: Sequence[Sample], progress: float) -> dict[str, float]:
        """See `Algorithm.update`. Raises `RunError` when a loss or gradient is not
        finite; the weights that it is of stay as they were."""
        with np.errstate(over="ignore", invalid="ignore"):  # `_step` looks for what is not finite
            return self._update(*samples)

    def _update(self, sample: Sample) -> dict[str, float]:
        batch = {name: array[0] for name, array in sample.items()}
        seen = self.policy.inputs(batch)
        metrics = self._improve_critics(batch, seen)
        if "priority" in sample:
            sample["priority"][0] = self._error
        metrics |= self._improve_actor(seen, batch["weight"])
        approach(self.targets.flat, self.critics.flat, self.config.target_rate, self.policy.kernels)
        return {**metrics, "temperature": self.temperature, "rows": float(len(seen))}

    @property
    def temperature(self) -> float:
        """The temperature α."""
        return exp(float(self.log_temperature[0]))

    def _improve_critics(self, batch: Arrays, seen: Floats) -> dict[str, float]:
        """Do a step down Σ ½ (Q - y)² of both critics: Haarnoja et al. 2018, eq. 5, with
        y of eq. 3 and the lesser of the two target critics."""
        config, weight = self.config, batch["weight"]
        returns, discount = n_step_returns(batch["rewards"], batch["steps"], batch["done"], config.gamma)
        then = self.policy.inputs(batch, "next.obs")
        drawn = self._draw(then)
        told = self.targets.forward(np.concatenate([then, drawn.action], 1))[..., 0]
        goal = returns + discount * soft_values(told, drawn.log_prob, self.temperature)
        found = self.critics.forward(np.concatenate([seen, self.policy.unscaled(batch["action"])], 1))[..., 0]
        error = found - goal
        self._error: Floats = np.abs(error).mean(0)
        share = weight / np.float32(len(weight))
        value = float(found.mean())
        loss = float((0.5 * error * error @ share).sum())
        self.critics.backward(np.multiply(error, share, dtype=np.float32)[..., None], self._of_critics)
        rate = config.learning_rate if config.critic_learning_rate is None else config.critic_learning_rate
        norm = self._step("critics", rate, loss)
        return {
            "loss/value": loss,
            "q/mean": value,
            "error/mean": float(self._error.mean()),
            "gradient_norm": norm,
        }

    def _improve_actor(self, seen: Floats, weight: Floats) -> dict[str, float]:
        """Do a step down α log π(a) - Q(a), eq. 7 and 9, of the actor, Q being the lesser
        of the two critics; and one of α, eq. 18."""
        config, share = self.config, weight / np.float32(len(weight))
        drawn = self._draw(seen)
        told = self.critics.forward(np.concatenate([seen, drawn.action], 1))
        lesser = told.argmin(0) == np.arange(2)[:, None, None]
        loss = float((self.temperature * drawn.log_prob - told.min(0)[:, 0]) @ share)
        of_inputs = self.critics.backward(lesser.astype(np.float32), None, of_inputs=True)
        assert of_inputs is not None
        of_action = of_inputs[:, seen.shape[1] :]
        of_mean, of_log_std = differentiate_actor(drawn.action, drawn.spread, of_action, self.temperature)
        of_head = np.concatenate([of_mean, of_log_std * drawn.uncut], 1) * share[:, None]
        self._actor.backward(of_head[None], self._of_actor)
        self._step("actor", config.learning_rate, loss)
        if config.learn_temperature:
            goal = -float(self.policy.actions) if config.target_entropy is None else config.target_entropy
            gap = float((drawn.log_prob + np.float32(goal)) @ share)
            self._of_temperature[0] = -self.temperature * gap
            self._step("temperature", config.learning_rate, gap)
        return {"loss/policy": loss, "entropy": -float(drawn.log_prob.mean())}

    def _step(self, name: str, rate: float, loss: float) -> float:
        norm: float = self._adams[name].descend(
            rate, 1.0, None if name == "temperature" else self.config.max_gradient_norm, loss
        )
        if not isfinite(norm + loss):
            raise spoilt(
                "SAC", f"the weights of the {name}", f"the loss is {loss}, the gradient's norm {norm}"
            )
        return norm

    def state(self) -> Arrays:
        """Return copies of critics, target critics, log α, the moments and steps of their
        Adams, and the random stream."""
        own: Arrays = {
            "critics": self.critics.flat.copy(),
            "targets": self.targets.flat.copy(),
            "log_temperature": self.log_temperature.copy(),
            "random": random_state(self._rng),
        }
        for name, each in self._adams.items():
            own |= prefixed(f"adam.{name}", each.state())
        return own

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        check_learner_state(self.state(), state)
        self.critics.flat[:], self.targets.flat[:] = state["critics"], state["targets"]
        self.log_temperature[:] = state["log_temperature"]
        set_random_state(self._rng, state["random"])
        for name, each in self._adams.items():
            each.load_state(unprefixed(f"adam.{name}", state))
