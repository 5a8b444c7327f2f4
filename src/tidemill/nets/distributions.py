"""Action distributions, each with two sides that agree: `sample` in numpy for acting, `evaluate` in torch for training.

Heads: `size` numbers per row come from the network. Acting keeps them as [size, n] (rows last, so that the few sizes are the loop and the many
rows the vector); training as [n, size].
"""

from abc import ABC, abstractmethod
from math import log, pi
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float32]
HALF_LOG_TWO_PI = 0.5 * log(2 * pi)


class Distribution(ABC):
    """A family of distributions over one action space."""

    size: int
    """Numbers per row that the network's head gives."""
    deviations: int = 0
    """Number of log-deviations that do not depend on the observation, a weight of the policy."""

    @abstractmethod
    def sample(self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: np.random.Generator, action: Array, log_prob: Array) -> None:
        """Draw n actions from `head` [size, n] (overwritten) and `log_std` [deviations, 1] into `action` [n, ...] and `log_prob` [n].

        Where `deterministic` (bool, or bool [n]) is true, the mode is taken instead.
        """

    @abstractmethod
    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return (log_prob [n], entropy [n]) of `action` [n, ...] under `head` [n, size] and `log_std` [deviations]."""


class Categorical(Distribution):
    """One integer 0 … size-1; the head gives unnormalised log-probabilities."""

    def __init__(self, n: int) -> None:
        self.size = n

    def sample(self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: np.random.Generator, action: Array, log_prob: Array) -> None:
        choice, chosen = self.draw(head, deterministic, rng)
        action[...] = choice
        log_prob[...] = chosen

    def draw(self, head: Floats, deterministic: bool | Array, rng: np.random.Generator) -> tuple[NDArray[np.intp], Floats]:
        """Return (choices [n], their log-probabilities [n]) by inverting the cumulative distribution."""
        n = head.shape[1]
        head -= head.max(0)
        sums = np.exp(head)
        np.add.accumulate(sums, axis=0, out=sums)
        total = sums[-1]
        if deterministic is True:
            choice = head.argmax(0)
        else:
            choice = (sums[:-1] <= rng.random(n, np.float32) * total).sum(0)
            if deterministic is not False:
                choice = np.where(deterministic, head.argmax(0), choice)
        chosen = head.ravel().take(choice * n + np.arange(n))
        return choice, chosen - np.log(total)

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        log_probs = head.log_softmax(-1)
        log_prob = log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(-1)


class MultiCategorical(Distribution):
    """One integer per branch, branches independent: log-probabilities and entropies add up."""

    def __init__(self, nvec: tuple[int, ...]) -> None:
        self.size = sum(nvec)
        self._branches = [Categorical(n) for n in nvec]
        ends = np.cumsum(nvec).tolist()
        self._parts = [slice(end - n, end) for n, end in zip(nvec, ends, strict=True)]

    def sample(self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: np.random.Generator, action: Array, log_prob: Array) -> None:
        total = np.zeros(head.shape[1], np.float32)
        for i, (branch, part) in enumerate(zip(self._branches, self._parts, strict=True)):
            choice, chosen = branch.draw(head[part], deterministic, rng)
            action[:, i] = choice
            total += chosen
        log_prob[...] = total

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        branches = enumerate(zip(self._branches, self._parts, strict=True))
        pairs = [branch.evaluate(head[:, part], log_std, action[:, i]) for i, (branch, part) in branches]
        log_prob, entropy = pairs[0]
        for more_log_prob, more_entropy in pairs[1:]:
            log_prob, entropy = log_prob + more_log_prob, entropy + more_entropy
        return log_prob, entropy


class Bernoulli(Distribution):
    """`size` independent bits; the head gives log(p / (1-p)) of each."""

    def __init__(self, n: int) -> None:
        self.size = n

    def sample(self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: np.random.Generator, action: Array, log_prob: Array) -> None:
        ones = head > 0
        if deterministic is not True:
            # rng.random() < p, said without dividing: u (1 + e^-x) < 1
            with np.errstate(over="ignore"):
                drawn = rng.random(head.shape, np.float32) * (1 + np.exp(-head)) < 1
            ones = drawn if deterministic is False else np.where(deterministic, ones, drawn)
        action[...] = ones.T
        # log p(bit) = -softplus(-x) for a one and -softplus(x) for a zero
        log_prob[...] = -np.logaddexp(np.float32(0), np.where(ones, -head, head)).sum(0)

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        from torch.nn.functional import softplus

        ones = action.to(head.dtype)
        log_prob = (ones * head - softplus(head)).sum(-1)
        return log_prob, (softplus(head) - head * head.sigmoid()).sum(-1)


class DiagonalGaussian(Distribution):
    """Independent normal distributions whose deviations do not depend on the observation.

    The network works in units of half the action's range: its mean m and deviation s stand for the action centre + half · (m + s ε), so that [-1, 1]
    maps onto [low, high]; where a bound is infinite, centre is 0 and half is 1. The action written is exactly what goes to the environment's
    adapter, *unclipped*; the adapter clips it to the bounds. The log-probability is the density of m + s ε (before scaling), likewise
    unclipped, so that ratios need no correction at the bounds.
    """

    def __init__(self, space: Box) -> None:
        low, high = (b.ravel().astype(np.float32) for b in space.bounds())
        bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore", over="ignore"):
            self._centre: Floats = np.where(bounded, low / 2 + high / 2, np.float32(0))
            self._half: Floats = np.where(bounded, high / 2 - low / 2, np.float32(1))
        if not np.all(self._half > 0):
            raise ConfigError(f"the action space {space} has an element with low = high; take it out of the action, it decides nothing")
        self.size = self.deviations = low.size
        self._shape = space.shape

    def sample(self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: np.random.Generator, action: Array, log_prob: Array) -> None:
        n = head.shape[1]
        if deterministic is True:
            log_prob[...] = -(log_std.sum() + self.size * HALF_LOG_TWO_PI)
        else:
            noise = rng.standard_normal((n, self.size), np.float32).T
            if deterministic is not False:
                noise = np.where(deterministic, np.float32(0), noise)
            head += np.exp(log_std) * noise
            log_prob[...] = np.square(noise).sum(0) * np.float32(-0.5) - (log_std.sum() + self.size * HALF_LOG_TWO_PI)
        action[...] = (head.T * self._half + self._centre).reshape(n, *self._shape)

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        import torch

        half, centre = torch.from_numpy(self._half), torch.from_numpy(self._centre)
        noise = ((action.reshape(len(head), -1) - centre) / half - head) * (-log_std).exp()
        total = log_std.sum()
        log_prob = noise.square().sum(-1) * -0.5 - (total + self.size * HALF_LOG_TWO_PI)
        return log_prob, (total + self.size * (HALF_LOG_TWO_PI + 0.5)).expand(len(head))


def distribution_of(space: Space) -> Distribution:
    """Return the distribution over `space`. Raises `ConfigError` for spaces with parts, of integers in a Box, and of nothing."""
    problem: Any = None
    match space:
        case Discrete() if space.n > 0:
            return Categorical(space.n)
        case MultiDiscrete() if space.nvec and min(space.nvec) > 0:
            return MultiCategorical(space.nvec)
        case MultiBinary() if space.n > 0:
            return Bernoulli(space.n)
        case Box() if space.dtype in ("float32", "float64", "float16") and np.prod(space.shape) > 0:
            return DiagonalGaussian(space)
        case Box():
            problem = f"a Box of {space.dtype} and shape {space.shape}; use MultiDiscrete for integers, and at least one element"
        case Dict() | Tuple():
            problem = "a Dict or Tuple; flatten it into one Box, MultiDiscrete or MultiBinary in a wrapper of the environment"
        case _:
            problem = f"{space}, which has no element"
    raise ConfigError(f"ActorCritic cannot act in this action space: it is {problem}")
