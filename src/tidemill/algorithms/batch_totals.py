"""What is known of a batch of all equal trainers together: sums over its rows, before the
first step of an update."""

from math import nan, sqrt
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.minibatches import Batch

SUMS = 7
"""How many numbers `sums_of` returns."""


class BatchTotals(NamedTuple):
    """The totals of a batch are sums over the rows of all equal trainers together."""

    rows: float
    mean: float
    """Mean of the advantages, reward units."""
    deviation: float
    """Standard deviation of the advantages, reward units."""
    explained_variance: float

    @classmethod
    def of(cls, sums: NDArray[np.float64]) -> Self:
        """Return what follows from the `sums_of` of all trainers."""
        rows, *pairs = sums.tolist()
        if not rows:
            return cls(0.0, 0.0, 0.0, nan)
        means = [total / rows for total in pairs[::2]]
        squares = [square / rows for square in pairs[1::2]]
        advantage, target, error = (
            max(square - mean * mean, 0.0) for mean, square in zip(means, squares, strict=True)
        )
        varies = target > 1e-12 * squares[1]  # less is rounding of these sums
        return cls(rows, means[0], sqrt(advantage), 1 - error / target if varies else nan)


def sums_of(batch: Batch) -> NDArray[np.float64]:
    """Return [rows, then sum and sum of squares of advantages, targets and errors of the
    values]."""
    sums = [float(len(batch))]
    for column in (batch.advantage, batch.target, batch.target - batch.value):
        x = column.astype(np.float64)
        sums += [float(x.sum()), float(x @ x)]
    return np.array(sums)
