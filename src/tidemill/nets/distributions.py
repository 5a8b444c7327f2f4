"""Action distributions, each with three sides that agree: `sample` for acting, `forward`
and `backward` for training, all in numpy, and `evaluate` in torch for networks that are.

Heads: `size` numbers per row come from the network. Numpy keeps them as [size, n] (rows
last, so that the few sizes are the loop and the many rows the vector); torch as [n,
size].
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import log, pi
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, leaves
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array
from tidemill.nets.scratch import Scratch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Floats = NDArray[np.float32]
HALF_LOG_TWO_PI = 0.5 * log(2 * pi)
EVERY = slice(None)


class Distribution(ABC):
    """A family of distributions over one action space. Its methods take and write actions
    as `action_of` gives them."""

    size: int
    """Numbers per row that the network's head gives."""
    deviations: int = 0
    """Number of log standard deviations that do not depend on the observation, a weight
    of the policy."""
    draws: int
    """Random numbers per row that `choose` needs."""
    normal: bool = False
    """Whether they are standard normal; else uniform in [0, 1)."""

    def action_of(self, arrays: Mapping[str, Any], rows: slice = EVERY) -> Any:
        """Return these rows of an action whose leaves are among `arrays`, by their names
        in rows, as views: one array, unless the space has parts."""
        return arrays["action"][rows]

    def leaves(self) -> dict[str, "Distribution"]:
        """Return the distribution of each leaf of the action, by its name in rows."""
        return {"action": self}

    @abstractmethod
    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Any
    ) -> Floats:
        """Draw n actions from `head` [size, n] (overwritten) and `log_std` [deviations,
        1] into `action` [n, ...]; return their log-probabilities [n].

        Where `deterministic` (bool, or bool [n]) is true, the mode is taken instead.
        """

    @abstractmethod
    def forward(self, head: Floats, log_std: Floats, action: Any) -> tuple[Floats, Floats]:
        """Return (log_prob [n], entropy [n]) of `action` [n, ...] under `head` [size, n]
        (contiguous, overwritten and kept) and `log_std` [deviations, 1], in memory that
        the next call rewrites."""

    @abstractmethod
    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        """Write into `of_head` [size, n] (contiguous) and `of_log_std` [deviations, 1]
        the gradient of Σ (of_log_prob · log_prob + of_entropy · entropy) over the rows of
        the last `forward`; None stands for zeros. Once only: what `forward` kept is
        overwritten."""

    @abstractmethod
    def evaluate(self, head: "Tensor", log_std: "Tensor", action: Any) -> "tuple[Tensor, Tensor]":
        """Return (log_prob [n], entropy [n]) of `action` [n, ...] under `head` [n, size]
        and `log_std` [deviations]."""

    def draw(self, noise: "Tensor", generator: "torch.Generator") -> None:
        """Fill `noise` [n, draws] with the random numbers that `choose` needs."""
        if self.normal:
            noise.normal_(generator=generator)
        else:
            noise.uniform_(generator=generator)

    @abstractmethod
    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: Any
    ) -> None:
        """Write n actions into `action` [n, ...], drawn by `noise` [n, draws], or the
        mode where `deterministic` [n] (bool) is true; in torch like `evaluate`."""


class Categorical(Distribution):
    """One integer 0 … size-1; the head gives unnormalised log-probabilities."""

    def __init__(self, n: int) -> None:
        self.size, self.draws = n, 1
        self._scratch = Scratch()
        self._rows: NDArray[np.intp] = np.arange(0)

    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Array
    ) -> Floats:
        # by inverting the cumulative distribution
        n = head.shape[1]
        # ufuncs' own reduce: half of what the methods of arrays take for few rows
        head -= np.maximum.reduce(head, axis=0)
        sums = np.exp(head)
        np.add.accumulate(sums, axis=0, out=sums)
        total = sums[-1]
        if deterministic is True:
            choice = head.argmax(0)
        else:
            choice = np.add.reduce(sums[:-1] <= rng.random(n, np.float32) * total, axis=0)
            if deterministic is not False:
                choice = np.where(deterministic, head.argmax(0), choice)
        action[...] = choice
        log_prob: Floats = head.ravel().take(choice * n + np.arange(n)) - np.log(total)
        return log_prob

    def forward(self, head: Floats, log_std: Floats, action: Array) -> tuple[Floats, Floats]:
        size, n = head.shape
        scratch = self._scratch
        if len(self._rows) < n:
            self._rows = np.arange(n)
        chosen = np.multiply(action, n, out=scratch("chosen", (n,), np.intp))  # places in the flattened head
        chosen += self._rows[:n]
        head -= np.maximum.reduce(head, axis=0, out=scratch("n", (n,)))
        p = np.exp(head, out=scratch("p", (size, n)))
        total = np.add.reduce(p, axis=0, out=scratch("n", (n,)))
        p /= total
        head -= np.log(total, out=total)
        entropy = np.add.reduce(
            np.multiply(p, head, out=scratch("size n", (size, n))), axis=0, out=scratch("entropy", (n,))
        )
        np.negative(entropy, out=entropy)
        # mode: with "raise" numpy would write to a copy of `out` first
        log_prob = np.take(head.reshape(-1), chosen, out=scratch("log_prob", (n,)), mode="clip")
        self._saved = head, p, entropy, chosen
        return log_prob, entropy

    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        head, p, entropy, chosen = self._saved  # head: log p by now
        # ∂ log p_a / ∂x_k = [k = a] - p_k;  ∂H/∂x_k = -p_k (log p_k + H)
        np.multiply(p, np.negative(of_log_prob, out=self._scratch("n", of_log_prob.shape)), out=of_head)
        of_head.reshape(-1)[chosen] += of_log_prob
        if of_entropy is not None:
            head += entropy
            head *= p
            head *= of_entropy
            of_head -= head

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        log_probs = head.log_softmax(-1)
        log_prob = log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(-1)

    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: "Tensor"
    ) -> None:
        p = head.softmax(-1)
        drawn = (p.cumsum(-1)[:, :-1] <= noise).sum(-1)
        # Sums are rounded, on a GPU each in its own order: where that has hit upon what
        # is impossible, the mode is as good as any.
        impossible = p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1) == 0
        action.copy_(head.argmax(-1).where(deterministic | impossible, drawn))


class Independent(Distribution):
    """Independent parts: their log-probabilities and entropies add up, and their heads,
    deviations and random numbers lie side by side."""

    def __init__(self, parts: Sequence[Distribution]) -> None:
        counts = [
            [part.size for part in parts],
            [part.deviations for part in parts],
            [part.draws for part in parts],
        ]
        self.size, self.deviations, self.draws = map(sum, counts)
        # of each part: its outputs, deviations and random numbers among all
        self._places = list(zip(parts, *map(_side_by_side, counts), strict=True))
        self._scratch = Scratch()

    @abstractmethod
    def _split(self, action: Any) -> Sequence[Any]:
        """Return the parts' actions, as views."""

    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Any
    ) -> Floats:
        total = np.zeros(head.shape[1], np.float32)
        for (part, outputs, own, _), of_part in zip(self._places, self._split(action), strict=True):
            total += part.sample(head[outputs], log_std[own], deterministic, rng, of_part)
        return total

    def forward(self, head: Floats, log_std: Floats, action: Any) -> tuple[Floats, Floats]:
        pairs = [
            part.forward(head[outputs], log_std[own], of_part)
            for (part, outputs, own, _), of_part in zip(self._places, self._split(action), strict=True)
        ]
        log_prob = self._scratch("log_prob", (head.shape[1],))
        entropy = self._scratch("entropy", (head.shape[1],))
        log_prob[...], entropy[...] = pairs[0]
        for more_log_prob, more_entropy in pairs[1:]:
            log_prob += more_log_prob
            entropy += more_entropy
        return log_prob, entropy

    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        for part, outputs, own, _ in self._places:
            part.backward(of_log_prob, of_entropy, of_head[outputs], of_log_std[own])

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: Any) -> "tuple[Tensor, Tensor]":
        pairs = [
            part.evaluate(head[:, outputs], log_std[own], of_part)
            for (part, outputs, own, _), of_part in zip(self._places, self._split(action), strict=True)
        ]
        log_prob, entropy = pairs[0]
        for more_log_prob, more_entropy in pairs[1:]:
            log_prob, entropy = log_prob + more_log_prob, entropy + more_entropy
        return log_prob, entropy

    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: Any
    ) -> None:
        for (part, outputs, own, draws), of_part in zip(self._places, self._split(action), strict=True):
            part.choose(head[:, outputs], log_std[own], noise[:, draws], deterministic, of_part)


def _side_by_side(lengths: Iterable[int]) -> list[slice]:
    """Return the places of what has these lengths, one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


class MultiCategorical(Independent):
    """One integer per branch."""

    def __init__(self, nvec: tuple[int, ...]) -> None:
        super().__init__([Categorical(n) for n in nvec])
        self.nvec = nvec

    def _split(self, action: Any) -> Sequence[Any]:
        return [action[:, i] for i in range(len(self.nvec))]


class NestedAction(Independent):
    """An action of several leaves, those of a Dict or Tuple, which have a distribution
    each. Where others take one array of actions, it takes a list of them, one for each
    leaf."""

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        super().__init__(list(parts.values()))
        self._parts = parts

    def action_of(self, arrays: Mapping[str, Any], rows: slice = EVERY) -> Any:
        return [arrays[name][rows] for name in self._parts]

    def leaves(self) -> dict[str, Distribution]:
        return dict(self._parts)

    def draw(self, noise: "Tensor", generator: "torch.Generator") -> None:
        for part, _, _, draws in self._places:
            part.draw(noise[:, draws], generator)

    def _split(self, action: Any) -> Sequence[Any]:
        assert isinstance(action, list)
        return action


class Bernoulli(Distribution):
    """`size` independent bits; the head gives log(p / (1-p)) of each."""

    def __init__(self, n: int) -> None:
        self.size = self.draws = n
        self._scratch = Scratch()

    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Array
    ) -> Floats:
        ones = head > 0
        if deterministic is not True:
            # rng.random() < p, said without dividing: u (1 + e^-x) < 1
            with np.errstate(over="ignore"):
                drawn = rng.random(head.shape, np.float32) * (1 + np.exp(-head)) < 1
            ones = drawn if deterministic is False else np.where(deterministic, ones, drawn)
        action[...] = ones.T
        # log p(bit) = -softplus(-x) for a one and -softplus(x) for a zero
        log_prob: Floats = -np.logaddexp(np.float32(0), np.where(ones, -head, head)).sum(0)
        return log_prob

    def forward(self, head: Floats, log_std: Floats, action: Array) -> tuple[Floats, Floats]:
        shape, n, scratch = head.shape, head.shape[1], self._scratch
        # with e = exp(-|x|): softplus(x) = max(x, 0) + log(1 + e), and p is 1 / (1 + e),
        # or e / (1 + e) where x < 0
        e = np.exp(
            np.negative(np.abs(head, out=scratch("e", shape)), out=scratch("e", shape)),
            out=scratch("e", shape),
        )
        softplus = np.log1p(e, out=scratch("softplus", shape))
        softplus += np.maximum(head, 0, out=scratch("size n", shape))
        p = np.divide(np.where(head < 0, e, 1), np.add(e, 1, out=e), out=scratch("p", shape))
        ones = scratch("ones", shape)
        ones[...] = action.T
        entropy = np.add.reduce(
            np.subtract(softplus, np.multiply(head, p, out=e), out=e), axis=0, out=scratch("entropy", (n,))
        )
        log_prob = np.add.reduce(
            np.subtract(np.multiply(ones, head, out=e), softplus, out=e),
            axis=0,
            out=scratch("log_prob", (n,)),
        )
        self._saved = head, p, ones
        return log_prob, entropy

    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        head, p, ones = self._saved
        # ∂ log p(bit) / ∂x = bit - p;  ∂H/∂x = -x p (1 - p)
        np.multiply(np.subtract(ones, p, out=ones), of_log_prob, out=of_head)
        if of_entropy is not None:
            head *= p
            head *= np.subtract(1, p, out=p)
            head *= of_entropy
            of_head -= head

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        from torch.nn.functional import softplus

        ones = action.to(head.dtype)
        log_prob = (ones * head - softplus(head)).sum(-1)
        return log_prob, (softplus(head) - head * head.sigmoid()).sum(-1)

    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: "Tensor"
    ) -> None:
        action.copy_((head > 0).where(deterministic.unsqueeze(-1), noise < head.sigmoid()))


class DiagonalGaussian(Distribution):
    """Independent normal distributions whose standard deviations do not depend on the
    observation.

    The network works in units of half the action's range: its mean m and deviation s
    stand for the action centre + half · (m + s ε), so that [-1, 1] maps onto [low, high];
    where a bound is infinite, centre is 0 and half is 1. The action written is exactly
    what goes to the environment's adapter, *unclipped*; the adapter clips it to the
    bounds. The log-probability is the density of m + s ε (before scaling), likewise
    unclipped, so that ratios need no correction at the bounds.
    """

    normal = True

    def __init__(self, space: Box) -> None:
        low, high = (b.ravel().astype(np.float32) for b in space.bounds())
        bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore", over="ignore"):
            self.centre: Floats = np.where(bounded, low / 2 + high / 2, np.float32(0))
            self.half: Floats = np.where(bounded, high / 2 - low / 2, np.float32(1))
        if not np.all(self.half > 0):
            raise ConfigError(
                f"the action space {space} has an element with low = high; take it out of the action, it "
                "decides nothing"
            )
        self.size = self.deviations = self.draws = low.size
        self._shape = space.shape
        self._scratch = Scratch()
        self._units: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def sample(
        self, head: Floats, log_std: Floats, deterministic: bool | Array, rng: Generator, action: Array
    ) -> Floats:
        n, total = head.shape[1], log_std.sum() + self.size * HALF_LOG_TWO_PI
        if deterministic is True:
            log_prob: Floats = np.full(n, -total, np.float32)
        else:
            noise = rng.standard_normal((n, self.size), np.float32).T
            if deterministic is not False:
                noise = np.where(deterministic, np.float32(0), noise)
            head += np.exp(log_std) * noise
            log_prob = np.add.reduce(np.square(noise), axis=0) * np.float32(-0.5) - total
        action[...] = (head.T * self.half + self.centre).reshape(n, *self._shape)
        return log_prob

    def forward(self, head: Floats, log_std: Floats, action: Array) -> tuple[Floats, Floats]:
        n, scratch = head.shape[1], self._scratch
        given = np.subtract(
            action.reshape(n, -1), self.centre, out=scratch("action", (n, self.size)), casting="same_kind"
        )
        given /= self.half
        precision = np.exp(-log_std)
        noise = np.subtract(given.T, head, out=head)
        noise *= precision
        total = float(log_std.sum())
        squares = np.multiply(noise, noise, out=scratch("squares", noise.shape))
        log_prob = np.add.reduce(squares, axis=0, out=scratch("log_prob", (n,)))
        log_prob *= -0.5
        log_prob -= total + self.size * HALF_LOG_TWO_PI
        entropy = scratch("entropy", (n,))
        entropy.fill(total + self.size * (HALF_LOG_TWO_PI + 0.5))
        self._saved = noise, squares, precision
        return log_prob, entropy

    def backward(
        self, of_log_prob: Floats, of_entropy: Floats | None, of_head: Floats, of_log_std: Floats
    ) -> None:
        noise, squares, precision = self._saved
        # with ε = (action - m) / s:
        # ∂ log p / ∂m = ε / s;  ∂ log p / ∂ log s = ε² - 1;  ∂H / ∂ log s = 1
        noise *= precision
        np.multiply(noise, of_log_prob, out=of_head)
        squares -= 1
        np.matmul(squares, of_log_prob[:, np.newaxis], out=of_log_std)
        if of_entropy is not None:
            of_log_std += of_entropy.sum()

    def evaluate(self, head: "Tensor", log_std: "Tensor", action: "Tensor") -> "tuple[Tensor, Tensor]":
        half, centre = self._units_on(head.device)
        noise = ((action.reshape(len(head), -1) - centre) / half - head) * (-log_std).exp()
        total = log_std.sum()
        log_prob = noise.square().sum(-1) * -0.5 - (total + self.size * HALF_LOG_TWO_PI)
        return log_prob, (total + self.size * (HALF_LOG_TWO_PI + 0.5)).expand(len(head))

    def choose(
        self, head: "Tensor", log_std: "Tensor", noise: "Tensor", deterministic: "Tensor", action: "Tensor"
    ) -> None:
        half, centre = self._units_on(head.device)
        means = head + log_std.exp() * noise.masked_fill(deterministic.unsqueeze(-1), 0)
        action.copy_((means * half + centre).reshape(len(head), *self._shape))

    def _units_on(self, device: "torch.device") -> "tuple[Tensor, Tensor]":
        """Return half the range and the centre as tensors on `device`."""
        if device not in self._units:
            from torch import from_numpy

            self._units[device] = from_numpy(self.half).to(device), from_numpy(self.centre).to(device)
        return self._units[device]


def distribution_of(space: Space) -> Distribution:
    """Return the distribution over `space`. Raises `ConfigError` for a space that has
    integers in a Box, or no element."""
    parts = leaves(space, "action")
    if not parts:
        raise _refusal("", f"{space}, which has no element")
    found = {name: _of_leaf(name, leaf) for name, leaf in parts.items()}
    return NestedAction(found) if isinstance(space, (Dict, Tuple)) else found["action"]


def _of_leaf(name: str, leaf: Space) -> Distribution:
    match leaf:
        case Discrete() if leaf.n > 0:
            return Categorical(leaf.n)
        case MultiDiscrete() if leaf.nvec and min(leaf.nvec) > 0:
            return MultiCategorical(leaf.nvec)
        case MultiBinary() if leaf.n > 0:
            return Bernoulli(leaf.n)
        case Box() if leaf.dtype in ("float32", "float64", "float16") and np.prod(leaf.shape) > 0:
            return DiagonalGaussian(leaf)
        case Box():
            problem = (
                f"a Box of {leaf.dtype} and shape {leaf.shape}; use MultiDiscrete for integers, and at least "
                "one element"
            )
        case _:
            problem = f"{leaf}, which has no element"
    raise _refusal(name, problem)


def _refusal(leaf: str, problem: str) -> ConfigError:
    """Return what to raise for an action space, of which a `leaf` within has a
    `problem`."""
    what = f"its part {leaf} is" if "." in leaf else "it is"
    return ConfigError(f"ActorCritic cannot act in this action space: {what} {problem}")
