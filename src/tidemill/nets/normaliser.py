"""Running means and variances, and the normalisers made of them. They are part of a
policy's parameters, so that each version carries its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.schema import Arrays, Field

Doubles = NDArray[np.float64]


def merge_moments(
    mean: Doubles,
    variance: Doubles,
    count: float,
    other_mean: Doubles,
    other_variance: Doubles,
    other_count: float,
) -> tuple[Doubles, Doubles, float]:
    """Return (mean, variance, count) of two sets of values from those of each. Variances
    are of the population (divided by count).

    Chan, Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", eq. 2.1.
    """
    total = count + other_count
    if total == 0:
        return mean, variance, 0.0
    delta = other_mean - mean
    merged_mean = mean + delta * (other_count / total)
    squares = variance * count + other_variance * other_count + delta * delta * (count * other_count / total)
    return merged_mean, squares / total, total


class RunningMoments:
    """Running moments are mean, variance and count of everything folded in so far, kept
    as arrays that a policy's parameters hold (float64).

    Before the first fold: mean 0 and variance 1, so that normalising changes nothing.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.mean: Doubles = np.zeros(shape)
        self.variance: Doubles = np.ones(shape)
        self.count: Doubles = np.zeros(())
        self._name = name

    def parameters(self) -> Arrays:
        """Return the three arrays by name; views."""
        return {f"{self._name}.{k}": getattr(self, k) for k in ("mean", "variance", "count")}

    @staticmethod
    def fields(name: str, shape: tuple[int, ...]) -> dict[str, Field]:
        """Return the fields of what `parameters` gives."""
        return {
            f"{name}.mean": Field(shape, "float64"),
            f"{name}.variance": Field(shape, "float64"),
            f"{name}.count": Field((), "float64"),
        }

    def moments(self, values: NDArray[Any] | None) -> Doubles:
        """Return [n, Σ (x - mean) …, Σ (x - mean)² …] of `values` [n, *shape], about the
        present mean; zeros for None."""
        size = self.mean.size
        sums = np.zeros(1 + 2 * size)
        if values is not None:
            off = values.reshape(len(values), size) - self.mean.reshape(size)
            sums[0] = len(values)
            np.add.reduce(off, axis=0, out=sums[1 : 1 + size])
            np.einsum("ni,ni->i", off, off, out=sums[1 + size :])
        return sums

    def fold(self, moments: Doubles) -> None:
        """Merge the values whose `moments` (or the sums of several) these are. None
        change nothing."""
        count, size = float(moments[0]), self.mean.size
        if count:
            off, square = (
                sums.reshape(self.mean.shape) / count for sums in (moments[1 : 1 + size], moments[1 + size :])
            )
            variance = np.maximum(square - off * off, 0)
            merged = merge_moments(
                self.mean, self.variance, float(self.count), self.mean + off, variance, count
            )
            self.mean[...], self.variance[...], self.count[...] = merged

    def deviation(self) -> float:
        """Return the deviation of a scalar as a divisor: 1 before the first fold and
        while nothing varies, and never under a hundredth of the mean's size, so that
        rounding in constant values is not blown up."""
        if not self.count:
            return 1.0
        return max(float(np.sqrt(self.variance)), 0.01 * abs(float(self.mean))) or 1.0


OBSERVATION_CLIP = np.float32(10.0)
"""Normalised observations are clipped to ± this."""


class ObservationNormaliser:
    """An observation normaliser brings those `columns` (bool [width]) of flattened
    observations that are of Boxes to mean 0 and deviation 1, by the moments of what was
    folded in."""

    def __init__(self, columns: NDArray[np.bool_]) -> None:
        self.moments, self._columns = RunningMoments("observation", columns.shape), columns
        self.refresh()

    def refresh(self) -> None:
        """Go by the moments as they are now: they were loaded, or folded into."""
        factor = 1 / np.sqrt(self.moments.variance + 1e-8)
        self._shift = np.where(self._columns, self.moments.mean, 0).astype(np.float32)
        self._factor = np.where(self._columns, factor, 1).astype(np.float32)

    def apply(self, features: NDArray[np.float32]) -> None:
        """Normalise rows [n, width] in place."""
        features -= self._shift
        features *= self._factor
        np.minimum(features, OBSERVATION_CLIP, out=features)
        np.maximum(features, -OBSERVATION_CLIP, out=features)
