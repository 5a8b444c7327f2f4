"""How often updates get a record: metrics grow with time and not with speed.

A burst is let through at once, then a steady few, and one before each checkpoint, so that
a resumed run finds all that came before its own.
"""

import time

# records of updates that a run may write as quickly as it makes them, so that a short run
# has a record of each
BURST = 1000
RATE = 1.0  # of them a second in the long run: one has 1 to 2 KB


class RecordPace:
    """A record pace lets `BURST` records through, and `RATE` a second from then on: a
    credit for each that comes back with time."""

    def __init__(self) -> None:
        self._credits, self._at = float(BURST), time.monotonic()

    def allows(self) -> bool:
        """Return whether one may be written now, which counts as written then."""
        now = time.monotonic()
        self._credits, self._at = min(BURST, self._credits + RATE * (now - self._at)), now
        allowed = self._credits >= 1
        self._credits -= allowed
        return allowed
