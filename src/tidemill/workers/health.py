"""How an actor's slots are: what went wrong in them, told now and then, and when too few are left to go on."""

import re
from collections.abc import Callable, Sequence
from time import monotonic

from tidemill.api.environment import Environment
from tidemill.core.errors import EnvironmentFault

NUMBERED = re.compile(r"\w*\d[\w.]*")
TELL = 10.0  # seconds between notices of faults; the first one is told at once, and so is each quarantine
LOOK = 0.02  # seconds between looks


class Health:
    """Of the `environments` that void their steps when these fail (see `envs.slots`).

    least   slots that must be healthy
    tell    takes a text for the user
    """

    def __init__(self, environments: Sequence[Environment], least: int, tell: Callable[[str], None]) -> None:
        self._slots = [(number, environment) for number, environment in enumerate(environments) if environment.voids]
        self._least, self._tell = least, tell
        self._faults = [0] * len(self._slots)
        self._quarantined: set[int] = set()  # numbers of those that were told
        self._untold: list[str] = []
        self._told_at = self._looked_at = -TELL
        self._first = self._last = ""

    def look(self) -> None:
        """Tell what went wrong. Raises `EnvironmentFault`, with the first cause, when too few slots are healthy."""
        if not self._slots or (now := monotonic()) - self._looked_at < LOOK:
            return
        self._looked_at = now
        self._collect()
        healthy = sum(not slot.quarantined for _, slot in self._slots)
        if now - self._told_at >= TELL or healthy < self._least:
            self._tell_untold()
        if healthy < self._least:
            last = f"; the last: {self._last}" if _kind(self._last) != _kind(self._first) else ""
            raise EnvironmentFault(
                f"{healthy} of {len(self._slots)} slots are healthy, and min_healthy_slots = {self._least}; the first fault was: {self._first}{last}"
            )

    def end(self) -> None:
        """Tell what was kept back."""
        self._collect()
        self._tell_untold()

    def _collect(self) -> None:
        """Take away what the slots say. A slot is in quarantine once and for all, so that is told at once, each by itself, with its last fault."""
        for place, (number, slot) in enumerate(self._slots):
            quarantined = slot.quarantined and number not in self._quarantined
            if slot.faults:
                texts = [f"slot {number}: {text}" for text in slot.faults]
                slot.faults.clear()
                self._faults[place] += len(texts)
                self._first, self._last = self._first or texts[0], texts[-1]
                if quarantined:
                    self._quarantined.add(number)
                    self._tell(f"slot {number} is quarantined: it failed {self._faults[place]} times, at last: {texts.pop().partition(': ')[2]}")
                self._untold += texts

    def _tell_untold(self) -> None:
        if self._untold:
            more = f" (and {len(self._untold) - 1} more)" if len(self._untold) > 1 else ""
            self._tell(f"{self._untold[-1]}{more}")
            self._untold.clear()
            self._told_at = self._looked_at

    def stats(self) -> dict[str, float]:
        """Return the faults of each slot that had any, which are in quarantine, how many of both there are, and how many are healthy."""
        if not self._slots:
            return {}
        quarantined = len(self._quarantined)
        told = {
            "slots/healthy": float(len(self._slots) - quarantined),
            "slots/quarantined": float(quarantined),
            "slots/faults": float(sum(self._faults)),
        }
        faults = {f"slot/{number}/faults": float(count) for (number, _), count in zip(self._slots, self._faults, strict=True) if count}
        return told | faults | {f"slot/{number}/quarantined": 1.0 for number in sorted(self._quarantined)}


def _kind(text: str) -> str:
    """Return what a fault says, whichever slot, step or session it was in."""
    return NUMBERED.sub("", text)
