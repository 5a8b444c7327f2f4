"""How an actor's slots are: what went wrong in them, told now and then, and whether an
exact run can go on."""

from collections.abc import Callable, Sequence
from time import monotonic

from tidemill.api.environment import Environment
from tidemill.core.errors import EnvironmentFault
from tidemill.envs.lane_restarts import cause_of

# seconds between notices of faults; the first one is told at once, and so is each slot's
# first rest
TELL = 10.0
LOOK = 0.02  # seconds between looks


class SlotFaults:
    """The slot faults are those of the `environments` that void their steps when these
    fail (see `envs.fault_tolerant`).

    exact: none of them may rest
    tell: takes a text for the user
    """

    def __init__(self, environments: Sequence[Environment], exact: bool, tell: Callable[[str], None]) -> None:
        self._slots = [
            (number, environment) for number, environment in enumerate(environments) if environment.voids
        ]
        self._exact, self._tell = exact, tell
        self._faults = [0] * len(self._slots)
        self._rested: set[int] = set()  # numbers of those whose first rest was told
        self._unreported: list[str] = []
        self._reported_at = self._looked_at = -TELL
        self._first = self._last = ""

    def look(self) -> None:
        """Tell what went wrong. Raises `EnvironmentFault`, with the first cause, where an
        exact run has a slot that rests."""
        if not self._slots or ((now := monotonic()) - self._looked_at < LOOK and not self._exact):
            return
        self._looked_at = now
        self._collect()
        failed = [number for number, slot in self._slots if slot.rests] if self._exact else []
        if now - self._reported_at >= TELL or failed:
            self._report_faults()
        if failed:
            last = f"; the last: {self._last}" if cause_of(self._last) != cause_of(self._first) else ""
            raise EnvironmentFault(
                f"slot {failed[0]} fails again and again, and an exact run goes on with all of its slots or "
                f"none; the first fault was: {self._first}{last}"
            )

    def end(self) -> None:
        """Tell what was kept back."""
        self._collect()
        self._report_faults()

    def _collect(self) -> None:
        """Take away what the slots say. A slot's first rest is told at once, by itself,
        with its last fault."""
        for place, (number, slot) in enumerate(self._slots):
            if slot.faults:
                texts = [f"slot {number}: {text}" for text in slot.faults]
                slot.faults.clear()
                self._faults[place] += len(texts)
                self._first, self._last = self._first or texts[0], texts[-1]
                if slot.resting and number not in self._rested:
                    self._rested.add(number)
                    count, last = self._faults[place], texts.pop().partition(": ")[2]
                    self._tell(
                        f"slot {number} rests, and is tried again after pauses that grow: it failed {count} "
                        f"times, at last: {last}"
                    )
                self._unreported += texts

    def _report_faults(self) -> None:
        if self._unreported:
            more = f" (and {len(self._unreported) - 1} more)" if len(self._unreported) > 1 else ""
            self._tell(f"{self._unreported[-1]}{more}")
            self._unreported.clear()
            self._reported_at = self._looked_at

    def rest(self) -> str:
        """Return in words what is waited for where all slots rest, with the last fault;
        "" where any goes on."""
        if not self._slots or not all(slot.resting for _, slot in self._slots):
            return ""
        return f"its slots, which all fail again and again, and rest: {self._last.partition(chr(10))[0]}"

    def stats(self) -> dict[str, float]:
        """Return the faults of each slot that had any, which rest now, how many of both
        there are, and how many are healthy."""
        if not self._slots:
            return {}
        resting = [number for number, slot in self._slots if slot.resting]
        told = {
            "slots/healthy": float(len(self._slots) - len(resting)),
            "slots/resting": float(len(resting)),
            "slots/faults": float(sum(self._faults)),
        }
        faults = {
            f"slot/{number}/faults": float(count)
            for (number, _), count in zip(self._slots, self._faults, strict=True)
            if count
        }
        return told | faults | {f"slot/{number}/resting": 1.0 for number in resting}
