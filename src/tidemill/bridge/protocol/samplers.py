"""Samplers: environment parameters that a simulator draws anew each time it asks for
them."""

import random
from dataclasses import dataclass

from tidemill.core.errors import ConfigError


@dataclass(frozen=True)
class Uniform:
    """A sampler: drawn evenly from [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"Uniform({self.low}, {self.high}): low must not exceed high")


@dataclass(frozen=True)
class Gaussian:
    """A sampler: drawn from a normal distribution."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not self.deviation >= 0:
            raise ConfigError(f"Gaussian({self.mean}, {self.deviation}): the deviation must not be negative")


@dataclass(frozen=True)
class MultiRange:
    """A sampler: drawn evenly from several ranges [low, high), each with a chance in
    proportion to its width."""

    ranges: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.ranges or not all(len(pair) == 2 and pair[0] <= pair[1] for pair in self.ranges):
            raise ConfigError(
                f"MultiRange({self.ranges}): needs ranges (low, high), at least one, and no low may exceed "
                "its high"
            )


Sampler = Uniform | Gaussian | MultiRange


def draw(sampler: Sampler, rng: random.Random) -> float:
    """Return one draw."""
    match sampler:
        case Uniform(low, high):
            return low + (high - low) * rng.random()
        case Gaussian(mean, deviation):
            return rng.gauss(mean, deviation)
        case MultiRange(ranges):
            widths = [high - low for low, high in ranges]
            low, high = rng.choices(ranges, widths if sum(widths) > 0 else None)[0]
            return low + (high - low) * rng.random()
