"""Credits: a trainer whose memory is limited says how many steps each actor may have
started. A cell for each actor, which holds numbers that only grow, so that the newest one
says all: nothing has to be read in order, and nobody waits for room.

A step that is granted counts as started (see `replay.limiter`). An actor's targets share
what it was granted. A later life of the trainer grants anew, from 0.
"""

from tidemill.api.transport import Reader, Writer
from tidemill.core.schema import Field, allocate

WRITES_OF_LIFE = 1 << 32
"""The writes of a trainer's life are numbered from so many times its number on."""
_SCHEMA = {
    "granted": Field((), "int64"),
    "received": Field((), "int64"),
    "finishing": Field((), "bool"),
}


class CreditWriter:
    """The granting end, in this `life` of the trainer. `granted` is how many steps the
    actor may have started so far, `received` how many of its samples have been dealt
    with. `finishing`: no episode may begin (take its first step)."""

    def __init__(self, cell: Writer, life: int = 0) -> None:
        self._cell = cell
        self._value = allocate(_SCHEMA, ())
        self._writes = life * WRITES_OF_LIFE
        self.granted = self.received = 0
        self.finishing = False
        cell.offer(_SCHEMA)

    def write(self) -> None:
        """Tell the actor, and wake it."""
        for name, array in self._value.items():
            array[...] = getattr(self, name)
        self._writes += 1
        self._cell.write(self._value, self._writes)


class Credits:
    """The spending end. Each question looks for news, which costs one read of memory
    where there are none."""

    def __init__(self, cell: Reader) -> None:
        self._cell = cell
        self._attached = False
        self._read = 0  # the newest write that was read
        self._value = allocate(_SCHEMA, ())
        self._spent = self._granted = self._received = 0
        self._finishing = False
        self._life = 0  # the trainer's, whose credits are spent
        self.outlived = False
        """The trainer was seen in a later life. Nothing is left before `go_over`."""

    def _look(self) -> None:
        self._attached = self._attached or self._cell.attach()
        if self._attached and self._cell.newest() > self._read:
            self._read = self._cell.read(self._value)
            self._granted, self._received = int(self._value["granted"]), int(self._value["received"])
            self._finishing = bool(self._value["finishing"])
            self.outlived = self._read // WRITES_OF_LIFE > self._life

    def go_over(self) -> int:
        """Spend the credits of the trainer's later life from now on, none of which is
        spent yet. Return the number of that life."""
        self._life, self._spent, self.outlived = self._read // WRITES_OF_LIFE, 0, False
        return self._life

    @property
    def finishing(self) -> bool:
        """True while no episode may begin."""
        self._look()
        return self._finishing

    def left(self) -> int:
        """Return how many steps may start now."""
        self._look()
        return 0 if self.outlived else self._granted - self._spent

    def spend(self, steps: int) -> None:
        """So many of those that are left start now."""
        self._spent += steps

    def received(self) -> int:
        """Return how many of this actor's samples the trainer has dealt with: what they
        owed was trained, and the version after it is published."""
        self._look()
        return self._received
