"""From samples to the rows that are trained on: targets computed on [T, N], then
everything flat and contiguous. Numpy only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.formulas import gae
from tidemill.api.algorithm import Sample
from tidemill.core.schema import Arrays

Floats = NDArray[np.float32]


@dataclass
class Batch:
    """M rows that enter the loss, in arrays of their own: the samples may be released."""

    observation: Arrays
    """Raw, by leaf name, [M, ...]."""
    action: Arrays
    """By leaf name, [M, ...]."""
    log_prob: Floats
    """Of the behaviour, [M]."""
    value: Floats
    """Of the behaviour, [M], reward units."""
    advantage: Floats
    """[M], reward units."""
    target: Floats
    """λ-returns, [M], reward units."""

    def __len__(self) -> int:
        return len(self.advantage)


Integers = NDArray[np.intp]
Estimate = Callable[[Sample], tuple[Floats, Floats]]
"""sample → (advantages, targets of the values), each [T, N], reward units."""
LogRatio = Callable[[Sample, Integers], Floats]
"""(sample, indices into its flattened [T, N]) → log π - log μ of each of these rows,
which all acted."""


def gae_of(gamma: float, lam: float, log_ratio: LogRatio | None = None) -> Estimate:
    """Return what estimates by `gae`. With `log_ratio` traces are corrected for the
    policy's lead; without, estimates that the rows have already
    (`tidemill.algorithms.post.GAE`) are taken as they are."""

    def estimate(sample: Sample) -> tuple[Floats, Floats]:
        fields: dict[str, NDArray[Any]] = dict(sample)
        if log_ratio is None and "post.advantage" in fields:
            return fields["post.advantage"], fields["post.target"]
        done, truncated, version = fields["done"], fields["truncated"], fields["version"]
        rho = None
        if log_ratio is not None:
            acted = np.flatnonzero((version >= 0) & ~(done | truncated))
            rho = np.ones(version.shape, np.float32)
            rho.reshape(-1)[acted] = np.exp(log_ratio(sample, acted))
        return gae(fields["reward"], fields["value"], done, truncated, version >= 0, gamma, lam, rho)

    return estimate


def trained_rows(samples: Sequence[Sample]) -> list[Integers]:
    """Return the indices, into each sample's flattened [T, N], of its rows that enter the
    loss."""
    return [np.flatnonzero(sample.trained()) for sample in samples]


def gather(samples: Sequence[Sample], estimate: Estimate) -> Batch:
    """Return the trained rows of `samples`, in order (without samples: no rows and no
    leaves), with their estimates."""
    if not samples:
        return Batch({}, {}, *(np.zeros((4, 0), np.float32)))
    indices, advantages, targets = trained_rows(samples), [], []
    for sample, index in zip(samples, indices, strict=True):
        advantage, target = estimate(sample)
        advantages.append(advantage.reshape(-1).take(index))
        targets.append(target.reshape(-1).take(index))
    return Batch(
        take_leaves(samples, indices, "obs"),
        take_leaves(samples, indices, "action"),
        take_rows(samples, indices, "log_prob"),
        take_rows(samples, indices, "value"),
        np.concatenate(advantages),
        np.concatenate(targets),
    )


def take_leaves(samples: Sequence[Sample], indices: Sequence[Integers], name: str) -> Arrays:
    """Return the chosen rows of every leaf of `name` (``obs``, ``obs.position`` …)."""
    return {
        key: take_rows(samples, indices, key)
        for key in samples[0]
        if key == name or key.startswith(f"{name}.")
    }


def take_rows(samples: Sequence[Sample], indices: Sequence[Integers], key: str) -> NDArray[Any]:
    """Return the chosen rows (indices into the flattened [T, N]) of one field of all
    samples, copied once."""
    first = samples[0][key]
    out = np.empty((sum(len(i) for i in indices), *first.shape[2:]), first.dtype)
    start = 0
    for sample, index in zip(samples, indices, strict=True):
        field = sample[key]
        # mode: with "raise" numpy would write to a copy of `out` first; the indices are
        # in range
        np.take(
            field.reshape(-1, *field.shape[2:]),
            index,
            axis=0,
            out=out[start : start + len(index)],
            mode="clip",
        )
        start += len(index)
    return out
