"""Numbers by name that add up until somebody looks: statistics of environments on their
way to a run's metrics.

Actors send those of their environments (`Environment.statistics`) with their regular
statistics, the controller adds them up, and the next record of an update has them as
``environment/NAME``.
"""

from collections.abc import Mapping
from typing import Literal

How = Literal["average", "most_recent", "sum", "smallest", "largest"]
HOWS: tuple[How, ...] = ("average", "most_recent", "sum")  # those that simulators may ask for, by number
TallyEntry = tuple[How, float, int]
"""How values are summed up, their sum (or the newest, smallest or largest of them), and
how many they are."""


class Tally:
    """A tally holds values by name. Several under one name become one number: their
    average, the newest, their sum, the smallest or the largest."""

    def __init__(self) -> None:
        self._entries: dict[str, TallyEntry] = {}

    def add(self, name: str, value: float, how: How = "average", count: int = 1) -> None:
        """Add a value, or the sum of `count` of them."""
        before = self._entries.get(name)
        if before is None or before[0] != how or how == "most_recent":
            self._entries[name] = (how, value, count)
        elif how in ("smallest", "largest"):
            self._entries[name] = (
                how,
                (min if how == "smallest" else max)(before[1], value),
                before[2] + count,
            )
        else:
            self._entries[name] = (how, before[1] + value, before[2] + count)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def merge(self, entries: Mapping[str, TallyEntry]) -> None:
        """Add what another tally's `take` returned."""
        for name, (how, value, count) in entries.items():
            self.add(name, value, how, count)

    def take(self) -> dict[str, TallyEntry]:
        """Return all, and begin anew."""
        entries, self._entries = self._entries, {}
        return entries


def summary(entries: Mapping[str, TallyEntry]) -> dict[str, float]:
    """Return one number per name of what `Tally.take` gave."""
    return {
        name: value / count if how == "average" else value for name, (how, value, count) in entries.items()
    }
