"""PPO: proximal policy optimisation. Imports no torch by itself."""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from tidemill.algorithms.adam import NativeAdam
from tidemill.algorithms.batch_totals import BatchTotals
from tidemill.algorithms.minibatches import Floats, Integers, gae_of, take_rows
from tidemill.algorithms.native_ppo import NativePPO
from tidemill.algorithms.native_traces import native_gae
from tidemill.algorithms.policy_gradient import PolicyGradientLearner
from tidemill.algorithms.policy_gradient_formulas import adapted_rate, differentiate_surrogate, gae
from tidemill.algorithms.policy_gradient_loss import Minibatches, PolicyGradientLoss, PolicyLoss
from tidemill.algorithms.policy_gradient_settings import PolicyGradient
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays
from tidemill.native.library import KernelLoss
from tidemill.nets.native_actor_critic import NativeActorCritic
from tidemill.nets.trainable import TrainablePolicy


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """PPO, proximal policy optimisation, trains by a clipped surrogate loss, GAE, several
    epochs over each batch, and Adam (Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms")."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        **PolicyGradient.ranges,
        "gae_lambda": (0, 1, "0.95 is usual"),
        "clip": (1e-6, 1e6, "0.2 is usual"),
        "epochs": (1, 1e6, "10 is usual, and 4 for images"),
        "clip_value": (1e-9, 1e9, "0.2 is usual; None leaves values unclipped"),
        "target_kl": (1e-9, 1e9, "0.02 is usual; None never stops early"),
        "desired_kl": (1e-9, 1e9, "0.01 is usual; None leaves the learning rate as it is set"),
    }

    changeable: ClassVar[Collection[str]] = ranges.keys() - {"adam_epsilon", "chunk_steps"}

    gae_lambda: float = 0.95
    """λ of the advantages (GAE) and of the values' targets (λ-returns)."""
    clip: float | LinearSchedule = 0.2
    """ε of the clipped surrogate: the ratio of new to old probability of an action is
    clipped to 1 ± ε."""
    epochs: int = 10
    """Passes over each batch."""
    normalise_advantages: bool | Literal["minibatch"] = True
    """Whether a batch's advantages are brought to mean 0 and standard deviation 1;
    ``minibatch``: those of each minibatch, as in Stable-Baselines3."""
    clip_value: float | LinearSchedule | None = None
    """ε of the clipped value loss: new values count within ε of the old ones, in units of
    the running standard deviation of returns (without `normalise_returns` in reward
    units). None: they are not clipped."""
    target_kl: float | None = None
    """Approximate KL divergence, in nats, of the trained policy from the one that acted:
    an update ends before the first minibatch on which it is larger. None: all epochs are
    done."""
    desired_kl: float | None = None
    """Approximate KL divergence, in nats, of an update, which the learning rate is
    adapted to: it begins as `learning_rate`, and falls after an update that went further
    than twice this, and rises after one that went less than half as far
    (`adapted_rate`), where updates have more than one minibatch. None: it is what it is
    set to."""
    correct_off_policy: bool = False
    """Whether traces are cut short where the policy at the start of the update has moved
    away from the one that acted (V-trace; one more forward pass). Of use when samples lag
    behind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.desired_kl is not None and "learning_rate" in self.schedules:
            raise ConfigError(
                f"desired_kl = {self.desired_kl} adapts the learning rate, which is to follow a schedule; "
                "set learning_rate to a number, or leave desired_kl out"
            )

        if self.target_kl is not None and 2 * self.target_kl <= (self.desired_kl or 0):
            raise ConfigError(
                f"target_kl = {self.target_kl} ends updates before they go half as far as desired_kl = "
                f"{self.desired_kl}, so that the learning rate would only rise; set target_kl above half of "
                "that, or leave it out"
            )

    def check_made(self, names: Collection[str]) -> None:
        if "advantage" in names and not self.correct_off_policy:
            for name in ("gamma", "gae_lambda"):
                self.refuse_idle(
                    name, "on rows that have their advantages already (AgentSpec.post), where it is set"
                )

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the learner of `policy`, which must be a `TrainablePolicy`. Minibatches
        are drawn from `seed`."""
        return PPOLearner(self, self.trainable(policy), seed)


class PPOLoss(PolicyGradientLoss):
    """The loss that `PPO` describes, by the native core where the policy's network is."""

    config: PPO

    def __init__(self, config: PolicyGradient, policy: TrainablePolicy) -> None:
        super().__init__(config, policy)
        network = policy.network
        self._native = NativePPO(network, self.shared) if isinstance(network, NativeActorCritic) else None

    def weigh(self, advantage: Floats, whole: BatchTotals) -> None:
        if self.config.normalise_advantages:
            advantage -= np.float32(whole.mean)
            advantage /= np.float32(whole.deviation + 1e-8)

    def of_policy(self, log_prob: Any, behaviour: Any, advantage: Any) -> PolicyLoss:
        xp, clip = self.library.namespace, number(self.config.clip)
        return PolicyLoss(*differentiate_surrogate(xp, log_prob - behaviour, advantage, clip))

    def differentiate(self, of: Minibatches, pieces: Any) -> int:
        # a trainer without rows has no inputs to bind
        if not len(pieces) or (native := self._bound(of)) is None:
            return super().differentiate(of, pieces)
        native.differentiate(pieces, of.weight)
        return len(pieces)

    def epoch(
        self, of: Minibatches, order: Any, bounds: Sequence[int], rate: float, found: Any
    ) -> int | None:
        native, adam, config = self._bound(of), self.optimiser, self.config
        if native is None:
            return super().epoch(of, order, bounds, rate, found)
        assert isinstance(adam, NativeAdam)
        ends = np.array(bounds, np.int64)
        return adam.go_through(
            rate,
            config.max_gradient_norm,
            config.target_kl,
            config.clip_apart,
            lambda descent: native.epoch(descent, order, ends, of.weight, found),
        )

    def _bound(self, of: Minibatches) -> NativePPO | None:
        """Return what computes minibatches of these rows in the native core, where it
        does."""
        native = self._native
        if native is not None and native.columns is not of.columns:
            config = self.config
            of_values = -1.0 if config.clip_value is None else config.clip_value
            settings = config.clip, of_values, config.value_coefficient, config.entropy_coefficient
            loss = KernelLoss(*map(number, settings))
            native.bind(loss, of.source.inputs, of.columns)
        return native


class PPOLearner(PolicyGradientLearner):
    """The learner that `PPO` describes."""

    loss_type = PPOLoss
    config: PPO

    def __init__(self, config: PPO, policy: TrainablePolicy, seed: int) -> None:
        super().__init__(config, policy, seed)
        network = policy.network
        # the rate that is set, and what was made of it
        self._adapted = np.full(2, number(self.config.learning_rate))
        self._gae = gae
        if isinstance(network, NativeActorCritic):
            self._gae = partial(native_gae, network.kernels)

    @property
    def rate(self) -> float:
        if self.config.desired_kl is None:
            return super().rate
        if self._adapted[0] != super().rate:  # it was changed
            self._adapted[:] = super().rate
        return float(self._adapted[1])

    def _update(self, samples: Sequence[Sample], alone: bool) -> Generator[Array, None, dict[str, float]]:
        metrics = yield from super()._update(samples, alone)
        # before the first step of an update there is no divergence
        if self.config.desired_kl is not None and metrics.get("minibatches", 0) > 1:
            self._adapted[1] = adapted_rate(self._adapted[1], metrics["kl"], self.config.desired_kl)
        return metrics

    def state(self) -> Arrays:
        """See `PolicyGradientLearner.state`; and the learning rate that was adapted."""
        return {**super().state(), "rate": self._adapted.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        # earlier versions adapted none
        state = {"rate": self._adapted.copy(), **state}
        super().load_state(state)
        self._adapted[:] = state["rate"]

    def _estimate(self, sample: Sample) -> tuple[Floats, Floats]:
        config = self.config
        log_ratio = self._log_ratio if config.correct_off_policy else None
        return gae_of(config.gamma, config.gae_lambda, log_ratio, self._gae)(sample)

    def _log_ratio(self, sample: Sample, rows: Integers) -> Floats:
        ratio, _ = self._evaluate(sample, rows)
        ratio -= take_rows([sample], [rows], "log_prob")
        return ratio
