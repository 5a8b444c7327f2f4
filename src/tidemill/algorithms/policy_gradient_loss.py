"""The loss of algorithms that follow the policy's gradient, minibatch by minibatch: its
gradient, what is measured with it, and the step of Adam down what equal trainers found
together. Imports torch only for policies that are made of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tidemill.algorithms.array_library import Library, NumpyLibrary
from tidemill.algorithms.batch_totals import BatchTotals
from tidemill.algorithms.minibatches import Batch, Floats, Rows
from tidemill.algorithms.policy_gradient_formulas import differentiate_value_loss
from tidemill.algorithms.policy_gradient_settings import MEASURED, PolicyGradient
from tidemill.api.schedule import number
from tidemill.nets.trainable import Network, TrainablePolicy

COLUMNS = ("log_prob", "advantage", "target", "value")
"""What the loss needs of each row, in this order."""
Columns = Sequence[Mapping[str, Any]]
"""The actions of a batch by leaf name, [M, ...]; and ``scalars``, `COLUMNS` as one array
[4, M]: in the policy's library."""


@dataclass(frozen=True, eq=False)
class Minibatches:
    """What the minibatches of an update are made of.

    source: what their pieces are picked from
    weight: of a row: 1 / (rows of a minibatch at all trainers, about)
    """

    source: Rows
    columns: Columns
    weight: float


class PolicyLoss(NamedTuple):
    """The policy's loss over the rows of a minibatch, as arrays and scalars of the
    policy's library."""

    loss: Any
    """Summed over the rows."""
    of_log_prob: Any
    """Its derivative with respect to log π(a) of each row, [n]."""
    kl: Any
    """Estimate of KL(μ‖π), summed over the rows."""
    clipped: Any
    """How many rows' ratio is beyond where it is clipped."""


class PolicyGradientLoss(ABC):
    """A policy gradient's loss is that of the policy, of its values and its entropy.
    An algorithm says what the policy's is.

    config: the settings, as they are in the update
    library: of the policy's arrays
    shared: [gradient, measured parts, share], float32: those of the loss summed over own
        rows, in units of 1 / (rows of a minibatch, about)
    gradient: that part of `shared`
    parts: the rest of it: as `MEASURED`, then the share
    optimiser: Adam down `gradient`
    """

    config: PolicyGradient

    def __init__(self, config: PolicyGradient, policy: TrainablePolicy) -> None:
        self.config, self.policy = config, policy
        self.library = _library_of(policy.network)
        size = policy.network.size
        with policy.network.place():
            self.shared = self.library.zeros(size + len(MEASURED) + 1)
            self.gradient, self.parts = self.shared[:size], self.shared[size:]
            self.optimiser = self.library.optimiser(policy.network, self.gradient, config.adam_epsilon)
        towers = policy.network.towers if config.clip_apart else ()
        self._towers = [[self.gradient[place] for place in tower] for tower in towers]
        self._recorded: Callable[[Any], Any] | None = None
        self._recorded_of: Minibatches | None = None

    @abstractmethod
    def weigh(self, advantage: Floats, whole: BatchTotals) -> None:
        """Turn a batch's advantages [M] into what the loss takes, in place."""

    @abstractmethod
    def of_policy(self, log_prob: Any, behaviour: Any, advantage: Any) -> PolicyLoss:
        """Return the policy's loss on a minibatch [n] whose actions have these
        log-probabilities now, and had those of the behaviour."""

    def of_parts(self, parts: Any) -> Any:
        """Return the whole loss, of what is measured as `MEASURED` (along the first
        axis)."""
        of_value, of_entropy = (
            number(each) for each in (self.config.value_coefficient, self.config.entropy_coefficient)
        )
        return parts[0] + of_value * parts[1] - of_entropy * parts[2]

    def columns(self, batch: Batch, whole: BatchTotals) -> Columns:
        """Return the columns of a batch."""
        if len(batch):
            self.policy.check(batch.observation)
        scale = np.float32(self.policy.value_scale)
        scalars = np.empty((len(COLUMNS), len(batch)), np.float32)
        scalars[0] = batch.log_prob
        scalars[1] = batch.advantage
        self.weigh(scalars[1], whole)
        np.divide(batch.target, scale, out=scalars[2])
        np.divide(batch.value, scale, out=scalars[3])
        return [self.library.columns(arrays) for arrays in (batch.action, {"scalars": scalars})]

    def differentiate(self, of: Minibatches, pieces: Any) -> int:
        """Write the loss's gradient and its parts, summed over the rows of these `pieces`
        and multiplied by their weight, into `shared`; return how many rows these are."""
        if not len(pieces):
            self.shared[:] = 0
            return 0
        config, weight, take, xp = self.config, of.weight, self.library.take, self.library.namespace
        inputs, rows = of.source.pick(pieces)
        action = take(of.columns[0], rows)
        log_prob, advantage, target, old_value = take(of.columns[1], rows, 1)["scalars"]
        found = self.policy.network.forward(inputs, action)
        of_policy, of_log_prob, kl, clipped = self.of_policy(found.log_prob, log_prob, advantage)
        of_log_prob *= weight
        value_loss, of_value = differentiate_value_loss(
            xp, found.value, target, old_value, number(config.clip_value)
        )
        of_value *= weight * number(config.value_coefficient)
        bonus = number(config.entropy_coefficient)
        of_entropy = xp.full_like(of_value, -bonus * weight) if bonus else None
        self.library.total(
            (of_policy, value_loss, found.entropy.sum(), kl, clipped, len(rows)), weight, self.parts
        )
        self.policy.network.backward(of_log_prob, of_entropy, of_value, self.gradient)
        return len(rows)

    def descend(self, parts: Any, share: float, rate: float) -> Any:
        """Do one step of Adam down the gradient, which is that of all trainers by now,
        `share` times the mean, as `parts` are the means. Return the mean gradient's norm
        before clipping."""
        limit, loss = self.config.max_gradient_norm, self.of_parts(parts)
        if len(self._towers) < 2 or limit is None:
            return self.optimiser.descend(rate, share, limit, loss)
        norms = [self.optimiser.clip(tower, share, limit) for tower in self._towers]
        whole = sum(norm**2 for norm in norms) ** 0.5
        self.optimiser.descend(rate, share, None, loss + whole)  # the gradient is not its own any more
        return whole

    def epoch(
        self, of: Minibatches, order: Any, bounds: Sequence[int], rate: float, found: Any
    ) -> int | None:
        """Do an epoch at once, by the pieces of `order` between `bounds`; write what is
        measured into `found`, and return how many minibatches were done: fewer where the
        KL divergence ends the update, or one is not finite. None where this cannot be
        done at once. By default by what a device has recorded of a step, where what is
        done next follows from nothing but pieces."""
        if self.policy.recurrent or self.config.target_kl is not None:
            return None
        if self._recorded_of is not of:

            def step(pieces: Any) -> Any:
                share = float(np.float32(self.differentiate(of, pieces) * of.weight))
                parts = self.parts[:-1] / share
                measured = self.library.zeros(len(MEASURED) + 1)
                measured[:-1], measured[-1] = parts, self.descend(parts, share, rate)
                return measured

            self._recorded, self._recorded_of = self.library.recorded(step), of
        if self._recorded is None:
            return None
        for i, (start, end) in enumerate(pairwise(bounds)):
            found[i] = self._recorded(order[start:end])
        return len(bounds) - 1

    def release(self) -> None:
        """Let go of the batch that was gone through."""
        self._recorded = self._recorded_of = None


def _library_of(network: Network) -> Library:
    """Return the library of the arrays of `network`; torch is imported when it is
    needed."""
    if network.library == "numpy":
        return NumpyLibrary()
    from tidemill.algorithms.torch_library import TorchLibrary

    return TorchLibrary(network)
