"""What is known of a version of a policy's weights, and how tags and metadata may be
called."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from math import sqrt
from time import time

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError
from tidemill.store.query import check_field

LATEST = "latest"
"""The tag that moves with each push."""
RESERVED = ("version", "age")
"""The fields that every version has."""
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Mean:
    """The running mean of `count` values. `squares` is the sum of their squared
    deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float64]) -> "Mean":
        """Return the mean of these values too (Chan, Golub, LeVeque 1983, "Algorithms for
        Computing the Sample Variance", equations 2.1)."""
        if not len(values):
            return self
        count, mean = self.count + len(values), float(values.mean())
        apart = mean - self.mean
        squares = (
            self.squares
            + float(((values - mean) ** 2).sum())
            + apart * apart * self.count * len(values) / count
        )
        return Mean(count, self.mean + apart * len(values) / count, squares)

    @property
    def variance(self) -> float | None:
        """The values' sample variance; None of fewer than two."""
        return self.squares / (self.count - 1) if self.count > 1 else None

    @property
    def margin(self) -> float | None:
        """Half of the mean's 95 % confidence interval, by the normal distribution; None
        of fewer than two values."""
        return None if self.variance is None else 1.96 * sqrt(self.variance / self.count)


@dataclass(frozen=True)
class Version:
    """What is known of a version.

    pushed: when it was pushed, in seconds since 1970
    counters: numbers that were pushed with it
    means: running means of what was recorded for it since, by name
    """

    policy: str
    version: int
    pushed: float
    counters: dict[str, float]
    tags: tuple[str, ...] = ()
    means: dict[str, Mean] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return the number behind each field that a query can ask for."""
        means = {name: mean.mean for name, mean in self.means.items()} | {
            f"{name}.n": float(mean.count) for name, mean in self.means.items()
        }
        return {**self.counters, **means, "version": self.version, "age": time() - self.pushed}


def check_tag(tag: str) -> None:
    """Raise `ConfigError` unless `tag` is a name that a user may let point to a
    version."""
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f'tag "{tag}" is not a name: use 1 to 64 of letters, digits, ".", "_" and "-", beginning with a '
            "letter"
        )
    if tag == LATEST:
        raise ConfigError(
            f'the tag "{LATEST}" moves by itself, with each version that is pushed; take another name'
        )


def check_new_field(name: str, counters: Collection[str] = ()) -> None:
    """Raise `ConfigError` unless `name` can be metadata of a version that has these
    counters."""
    check_field(name)
    if name in RESERVED or name in counters:
        raise ConfigError(f'"{name}" is already a field of every version; record it under another name')
