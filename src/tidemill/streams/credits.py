"""Credits: a trainer whose memory is limited says how many steps each actor may have
started. A cell for each actor, which holds numbers that only grow, so that the newest one
says all: nothing has to be read in order, and nobody waits for room.

A step that is granted counts as started (see `replay.limiter`). An actor's targets share
what it was granted.
"""

import numpy as np

from tidemill.api.transport import Reader, Writer
from tidemill.core.schema import Field

_SCHEMA = {"received": Field((), "int64")}


class CreditWriter:
    """The granting end. `granted` is how many steps the actor may have started so far,
    `received` how many of its samples have been dealt with. `finishing`: no episode may
    begin (take its first step)."""

    def __init__(self, cell: Writer) -> None:
        self._cell = cell
        self._value = {"received": np.zeros((), np.int64)}
        self.granted = self.received = 0
        self.finishing = False
        cell.offer(_SCHEMA)

    def write(self) -> None:
        """Tell the actor, and wake it."""
        self._value["received"][...] = self.received
        self._cell.write(self._value, 2 * self.granted + self.finishing)


class Credits:
    """The spending end."""

    def __init__(self, cell: Reader) -> None:
        self._cell = cell
        self._attached = False
        self._spent = 0
        self._value = {"received": np.zeros((), np.int64)}

    def _granted(self) -> int:
        self._attached = self._attached or self._cell.attach()
        return self._cell.newest() >> 1 if self._attached else 0

    @property
    def finishing(self) -> bool:
        """True while no episode may begin."""
        return self._granted() > 0 and bool(self._cell.newest() & 1)

    def left(self) -> int:
        """Return how many steps may start now."""
        return self._granted() - self._spent

    def spend(self, steps: int) -> None:
        """So many of those that are left start now."""
        self._spent += steps

    def received(self) -> int:
        """Return how many of this actor's samples the trainer has dealt with: what they
        owed was trained, and the version after it is published."""
        if self._granted() > 0:
            self._cell.read(self._value)
        return int(self._value["received"])
