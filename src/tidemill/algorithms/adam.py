"""Adam: its settings, and the optimiser in numpy, over one flat array of weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import AlgorithmConfig, UpdateFault
from tidemill.api.schedule import LinearSchedule
from tidemill.core.schema import Array, Arrays, zeros
from tidemill.native.library import KernelDescent, Kernels, address

Floats = NDArray[np.float32]

BETAS = 0.9, 0.999
"""Decay of the first and of the second moment, per step."""
BLOCK = 1 << 14  # weights worked on at a time, about: six arrays of them fit in a second-level cache


@dataclass(frozen=True, kw_only=True)
class AdamSettings(AlgorithmConfig):
    """The settings of an algorithm all of whose weights one Adam trains."""

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "learning_rate_schedule": ("constant", "write learning_rate = LinearSchedule(3e-4, 0)")
    }

    learning_rate: float | LinearSchedule = 3e-4
    """Learning rate of Adam."""
    adam_epsilon: float = 1e-5
    """Added to Adam's denominator."""

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = super().of_today(data)
        if data.get("learning_rate_schedule") == "linear" and "learning_rate" in data:
            falling = {"kind": "LinearSchedule", "start": data["learning_rate"], "end": 0.0}
            data = {**data, "learning_rate": falling, "learning_rate_schedule": "constant"}
        return data


class Optimiser(ABC):
    """An optimiser steps down a gradient that always lies in the same array."""

    def begin(self) -> None:
        """Begin an update: where one of its steps is not finite, those after it change
        nothing either."""

    @abstractmethod
    def descend(self, rate: float, share: float, limit: float | None, loss: Any) -> Any:
        """Do one step with learning rate `rate` down the gradient, divided by `share` and
        then scaled down to Euclidean norm `limit` (it may be overwritten); return the
        norm before clipping. Where that or `loss` is not finite, no weight changes. Both
        are scalars of the library, in which a number may be read as late as at the
        update's end."""

    @abstractmethod
    def clip(self, parts: Sequence[Any], share: float, limit: float) -> Any:
        """Scale parts of the gradient down, so that their Euclidean norm together,
        divided by `share`, is `limit` at most; return the norm before, a scalar of the
        library."""

    @abstractmethod
    def state(self) -> Arrays:
        """Return copies of the number of steps and of the moments: ``0.step``,
        ``0.exp_avg``, ``0.exp_avg_sq``, and so on for other weights."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned."""


def spoilt(algorithm: str, weights: str, why: str, stage: str, minibatch: Arrays) -> UpdateFault:
    """Return what to raise when a step was left out, since what it computed was not
    finite; `stage` and `minibatch` as of `UpdateFault`."""
    text = (
        f"{algorithm} left out a step that would have spoilt {weights}: {why}. Look for NaN or huge numbers "
        "in observations and rewards (tidemill check-env), then lower learning_rate"
    )
    return UpdateFault(text, stage, minibatch)


class _Block(NamedTuple):
    weights: Floats
    gradient: Floats
    first: Floats
    second: Floats
    one: Floats
    two: Floats


class Adam(Optimiser):
    """Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1 in the
    order of its section 2:

    m ← β₁ m + (1-β₁) g;  v ← β₂ v + (1-β₂) g²;
    w ← w - α √(1-β₂ᵗ) / (1-β₁ᵗ) · m / (√v + ε √(1-β₂ᵗ))
    """

    def __init__(self, weights: Floats, gradient: Floats, epsilon: float) -> None:
        self._epsilon, self._weights, self._gradient = epsilon, weights, gradient
        self._steps = 0
        self._first, self._second = zeros(weights.size, "float32"), zeros(weights.size, "float32")
        count = max(round(weights.size / BLOCK), 1)
        scratch = np.empty((2, -(-weights.size // count)), np.float32)
        self._blocks = []
        for start, end in pairwise(weights.size * i // count for i in range(count + 1)):
            parts = [array[start:end] for array in (weights, gradient, self._first, self._second)]
            self._blocks.append(_Block(*parts, *scratch[:, : len(parts[0])]))

    def descend(self, rate: float, share: float, limit: float | None, loss: Any) -> float:
        norm = sqrt(self._square(self._gradient)) / share
        if isfinite(norm) and isfinite(loss):
            self._step(rate, (limit / norm if limit is not None and norm > limit else 1) / share)
        return norm

    def clip(self, parts: Sequence[Floats], share: float, limit: float) -> float:
        norm = sqrt(self._square(np.concatenate(parts))) / share
        if norm > limit:
            for part in parts:
                part *= limit / norm
        return norm

    def _square(self, gradient: Floats) -> float:
        return float(gradient @ gradient)

    def _step(self, rate: float, scale: float) -> None:
        """Do one step with learning rate `rate` and `scale` times the gradient."""
        self._steps += 1
        beta1, beta2 = BETAS
        root = sqrt(1 - beta2**self._steps)
        # Scalars that numpy keeps float32 arrays float32 with: Python's own.
        size, epsilon = rate * root / (1 - beta1**self._steps), self._epsilon * root
        into_second = scale * sqrt(1 - beta2)
        into_first = (1 - beta1) / sqrt(1 - beta2)
        for weights, gradient, first, second, one, two in self._blocks:
            np.multiply(gradient, into_second, out=one)
            np.multiply(one, one, out=two)
            second *= beta2
            second += two
            one *= into_first
            first *= beta1
            first += one
            np.sqrt(second, out=one)
            one += epsilon
            np.divide(first, one, out=one)
            one *= size
            weights -= one

    def state(self) -> Arrays:
        return {
            "0.step": np.array(self._steps, np.float32),
            "0.exp_avg": self._first.copy(),
            "0.exp_avg_sq": self._second.copy(),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._steps = int(state["0.step"])
        self._first[...], self._second[...] = state["0.exp_avg"], state["0.exp_avg_sq"]


class NativeAdam(Adam):
    """`Adam` by the native core: one pass over the weights."""

    def __init__(self, weights: Floats, gradient: Floats, epsilon: float, kernels: Kernels) -> None:
        super().__init__(weights, gradient, epsilon)
        self._kernels = kernels
        self.kernel_descent = KernelDescent(epsilon=epsilon, size=weights.size)
        """As `go_through` hands it to a kernel."""
        self._addresses = [address(array) for array in (weights, gradient, self._first, self._second)]
        self._spare = zeros(4 * (weights.size + 32), "float32")
        self.kernel_descent.spare = address(self._spare)
        for name, place in zip(("weights", "gradient", "first", "second"), self._addresses, strict=True):
            setattr(self.kernel_descent, name, place)

    def go_through(
        self,
        rate: float,
        limit: float | None,
        target_kl: float | None,
        apart: bool,
        kernel: Callable[[int], int],
    ) -> int:
        """Have `kernel` do steps by the descent whose address it is given; return what it
        does. `apart`: whether `limit` is each tower's."""
        descent = self.kernel_descent
        descent.rate, descent.steps, descent.apart = rate, self._steps, apart
        descent.limit, descent.target_kl = (-1.0 if each is None else each for each in (limit, target_kl))
        done = kernel(addressof(descent))
        self._steps = descent.steps
        return done

    def descend(self, rate: float, share: float, limit: float | None, loss: Any) -> float:
        most, steps = -1.0 if limit is None else limit, self._steps + 1
        norm: float = self._kernels.descend(
            self._weights.size, *self._addresses, steps, rate, self._epsilon, share, most, loss
        )
        if isfinite(norm) and isfinite(loss):
            self._steps = steps
        return norm

    def _square(self, gradient: Floats) -> float:
        square: float = self._kernels.square(gradient.size, address(gradient))
        return square


def adam(weights: Floats, gradient: Floats, epsilon: float, kernels: Kernels | None) -> Adam:
    """Return an Adam, the native core's where its `kernels` are given."""
    if kernels is None:
        return Adam(weights, gradient, epsilon)
    return NativeAdam(weights, gradient, epsilon, kernels)
