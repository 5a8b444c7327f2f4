"""What a trainer has the parameter database know of each version: how far it was trained,
with which settings, and what the episodes that it was trained on have reached."""

import typing
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import isfinite
from typing import TypeVar

from tidemill.api.algorithm import AlgorithmConfig, Sample
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, did_you_mean

Setting = TypeVar("Setting", bound=AlgorithmConfig)

EPISODES = 100
"""Episodes that `training_return` is the mean of, at most."""
STAGE = "stage"
"""The stage of the curriculum (from 1) of which a version is, in runs with one."""
RECORDED = ("env_steps", "seconds", "adopted", "training_return", STAGE)
"""Besides the settings: env steps and seconds of training; the version as which the
policy went on from another one's weights last (see `Adopt`), 0 before that; the mean
undiscounted return of the last episodes since then that ended in rows that entered the
loss, which no version has before the first one ended."""


def stage_of(counters: Mapping[str, float]) -> int:
    """Return the stage (from 0) of a version with which these counters were pushed."""
    return int(counters.get(STAGE, 1)) - 1


def settings_of(algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the algorithm's settings that are finite numbers, by name."""
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return {
        name: float(v)
        for name, v in values.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and isfinite(v)
    }


def field_of(setting: str) -> str:
    """Return what a setting of the algorithm is called in the parameter database."""
    return f"algorithm/{setting}"


def with_settings(algorithm: Setting, settings: Mapping[str, float | None]) -> Setting:
    """Return `algorithm` with these settings, those that count things rounded. Raises
    `ConfigError` for one that it lacks, or cannot have."""
    hints = typing.get_type_hints(type(algorithm))
    kinds = {each.name: {hints[each.name], *typing.get_args(hints[each.name])} for each in fields(algorithm)}
    known = {name for name, kind in kinds.items() if not kind.isdisjoint((int, float))}
    changed = dict(settings)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f'{type(algorithm).__name__} has no number "{name}"; {did_you_mean(name, known)}'
            )
        if float not in kinds[name] and isinstance(value, float) and isfinite(value):
            changed[name] = round(value)
    return decode(type(algorithm), {**encode(algorithm), **changed}, type(algorithm).__name__)


class TrainingReturns:
    """The returns of the last episodes that a trainer was trained on."""

    def __init__(self) -> None:
        self._returns: deque[float] = deque(maxlen=EPISODES)

    def add(self, samples: Iterable[Sample]) -> None:
        """Take the episodes that end in the trained rows of `samples`, so that each
        counts once however samples overlap. One look at each sample's marks; Python's
        work is per finished episode."""
        for sample in samples:
            own = slice(sample.burn_in, len(sample["info_mask"]) - sample.bootstrap)
            # an episode whose next step was lost has its info on its final row
            ended = sample["info_mask"][own] & ~sample["truncated"][own]
            self._returns.extend(sample["info.return"][own][ended][-EPISODES:].tolist())

    def extend(self, returns: Iterable[float]) -> None:
        """Take the returns of episodes that ended."""
        self._returns.extend(returns)

    def values(self) -> list[float]:
        """Return them, oldest first."""
        return [*self._returns]

    def clear(self) -> None:
        """Forget them: they were of other weights."""
        self._returns.clear()

    def mean(self) -> float | None:
        """Return their mean; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None
