"""Samples of a fixed number of rows of all seats, sent as soon as the last one is
answered.

Once seats are out of step (an absent seat, or one that ended and restarted within a
tick), rows are written by index for good, and finished columns are copied into slots in
the order in which they finish: a seat that died early would otherwise hold back the slot
of all others until it lives again. A column of a sample is then not always the same seat,
but always consecutive rows of one seat.
"""

from collections.abc import Collection
from typing import ClassVar

import numpy as np

from tidemill.core.cut import Part
from tidemill.core.schema import Arrays, allocate, layout
from tidemill.workers.sample_writers.base import (
    BlockSizes,
    Columns,
    SampleTerms,
    SampleWriter,
    Slot,
    WriterTerms,
    fill,
    put,
    steps_of,
)

# what is written after the row is, or in few rows
_CLEARED = ("reward", "on_reset", "done", "truncated")


class AlignedBlock(SampleWriter):
    """The writer of samples of a fixed length while all seats are at the same row:
    `arrays` is a slot ({} between two)."""

    settings: ClassVar[Collection[str]] = ("sample_steps", "burn_in", "bootstrap")

    def __init__(self, terms: WriterTerms) -> None:
        self._terms = terms
        self._rows, self._overlap = terms.spec.rows, terms.spec.burn_in + terms.spec.bootstrap
        self.arrays = {}
        self.position = terms.spec.burn_in
        """The next row."""
        # the slot's first rows, kept from the one before
        self._carry = allocate(terms.schema, (self._overlap, terms.seats))
        fill(self._carry)
        self._cleared = [name for name in terms.schema if name in _CLEARED or name.startswith("info")]

    @classmethod
    def own_rows(cls, spec: SampleTerms, need: BlockSizes, same_step: bool) -> int:
        # what is carried over from sample to sample, and in a tick; all of it where seats
        # get out of step
        return spec.burn_in + spec.bootstrap + 1 + need.private_rows * same_step

    def has_room(self) -> bool:
        if not self.arrays:
            slot, position = self._terms.samples.reserve(), self.position
            if slot is None:
                return False
            self.arrays = slot
            for name, array in slot.items():
                array[:position] = self._carry[name][:position]
            for name in self._cleared:
                slot[name][position:] = 0
        return True

    def send(self) -> bool:
        if self.position == self._rows:
            for name, array in self.arrays.items():
                self._carry[name][:] = array[self._rows - self._overlap :]
            self._terms.samples.commit()
            self.arrays, self.position = {}, self._overlap
            self._terms.on_sent()
        return True

    def unsent(self) -> int:
        rows = np.arange(self._rows)[:, None]
        block = self.newest
        # nothing has come of the newest row's action yet
        written = (rows >= self._terms.spec.burn_in) & (rows < self.position - 1)
        return steps_of(block, written[: len(block["done"])])

    def unfilled(self) -> int:
        need, terms = self._terms.need, self._terms
        return layout(terms.schema, (need.private_rows * terms.same_step, terms.seats))[1]

    @property
    def newest(self) -> Arrays:
        """The rows that end with the newest one, which is at `position` - 1."""
        return self.arrays or self._carry

    def state(self) -> Part:
        """See `Columns`."""
        return {
            "rows": {name: array[: self.position] for name, array in self.arrays.items()},
            "position": self.position,
            "carry": self._carry,
            "samples": self._terms.samples.state(),
        }

    def load_state(self, state: Part) -> None:
        """See `Columns`."""
        self._terms.samples.load_state(state["samples"])
        put(self._carry, state["carry"])
        self.position = state["position"]
        if state["rows"]:
            slot = self._terms.samples.reserve()
            assert slot is not None  # it had one when it was saved
            self.arrays = slot
            put({name: array[: self.position] for name, array in slot.items()}, state["rows"])
            for name in self._cleared:
                slot[name][self.position :] = 0

    def by_index(self) -> "Columns":
        """Return the same rows as columns, because seats are at different rows from now
        on."""
        columns = self._columns()
        for name, array in (self.arrays or self._carry).items():
            columns.arrays[name][: self.position] = array[: self.position]
        columns.position.fill(self.position)
        return columns

    def _columns(self) -> "Columns":
        return FixedColumns(self._terms, self.arrays)


class FixedColumns(Columns):
    """The writer of samples of so many rows, each sent when a seat's last one is
    answered."""

    def __init__(self, terms: WriterTerms, slot: Arrays) -> None:
        super().__init__(terms)
        self._slot = Slot(terms, slot)

    def unsent(self) -> int:
        return super().unsent() + self._slot.unsent()

    def state(self) -> Part:
        return {**super().state(), **self._slot.state()}

    def load_state(self, state: Part) -> None:
        super().load_state(state)
        self._slot.load_state(state)

    def send(self) -> bool:
        position, rows, step = self.position, self._terms.spec.rows, self._terms.spec.sample_steps
        while (position >= rows).any():
            seats, columns = self._slot.place((position >= rows).nonzero()[0])
            if not len(seats):
                return False
            for name, array in self.arrays.items():
                self._slot.arrays[name][:, columns] = array[:rows, seats]
                array[: self._private_rows - step, seats] = array[step:, seats]
            position[seats] -= step
            self._slot.written(columns)
        return True
