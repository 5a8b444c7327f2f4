"""Numbers by name that add up until somebody looks: statistics of environments on their way to a run's metrics."""

from collections.abc import Mapping
from typing import Literal, get_args

How = Literal["average", "most_recent", "sum"]
HOWS: tuple[How, ...] = get_args(How)
Told = tuple[How, float, int]
"""How values are summed up, their sum (or the newest of them), and how many they are."""


class Tally:
    """Values by name. Several under one name become one number: their average, the newest, or their sum."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}

    def add(self, name: str, value: float, how: How = "average", count: int = 1) -> None:
        """Add a value, or the sum of `count` of them."""
        before = self._told.get(name)
        if before is None or before[0] != how or how == "most_recent":
            self._told[name] = (how, value, count)
        else:
            self._told[name] = (how, before[1] + value, before[2] + count)

    def merge(self, told: Mapping[str, Told]) -> None:
        """Add what another tally's `take` returned."""
        for name, (how, value, count) in told.items():
            self.add(name, value, how, count)

    def take(self) -> dict[str, Told]:
        """Return all, and begin anew."""
        told, self._told = self._told, {}
        return told


def summary(told: Mapping[str, Told]) -> dict[str, float]:
    """Return one number per name of what `Tally.take` gave."""
    return {name: value / count if how == "average" else value for name, (how, value, count) in told.items()}
