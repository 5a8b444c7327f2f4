"""Samplers: environment parameters that a simulator draws anew each time it asks for
them."""

import random
from dataclasses import dataclass
from typing import Any

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


def parameter(name: str, value: Any) -> float | Sampler:
    """Return an environment parameter from plain data: a number, or one of {"uniform":
    [low, high]}, {"gaussian": [mean, deviation]} and {"multi_range": [[low, high], …]}.
    """
    try:
        match value:
            case bool() | str():
                pass
            case int() | float():
                return float(value)
            case {"uniform": [low, high], **rest} if not rest:
                return Uniform(float(low), float(high))
            case {"gaussian": [mean, deviation], **rest} if not rest:
                return Gaussian(float(mean), float(deviation))
            case {"multi_range": ranges, **rest} if not rest:
                return MultiRange(tuple((float(low), float(high)) for low, high in ranges))
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f'parameter "{name}" = {value!r} must be a number, or a sampler: {{"uniform": [low, high]}}, '
        '{"gaussian": [mean, deviation]} or {"multi_range": [[low, high], …]}'
    )
