"""Samples of a fixed number of rows, sent when the episode of the last one is over."""

from collections.abc import Collection
from typing import ClassVar

import numpy as np

from tidemill.core.cut import Part
from tidemill.workers.sample_writers.base import BlockSizes, SampleTerms, Seats, Slot, WriterTerms
from tidemill.workers.sample_writers.closed_episodes import ClosedEpisodes


class AfterDone(ClosedEpisodes):
    """The writer of samples of so many rows that are held back until the episode of the
    last one is done."""

    settings: ClassVar[Collection[str]] = ("sample_steps", "burn_in", "bootstrap", "post")
    needs_limit = True

    @classmethod
    def sizes(cls, spec: SampleTerms, seats: int, limit: int, same_step: bool, slots: int) -> BlockSizes:
        # what the episode before left over, and a whole one
        return BlockSizes(spec.rows + limit + same_step, spec.rows, seats, slots)

    def __init__(self, terms: WriterTerms) -> None:
        super().__init__(terms)
        self._slot = Slot(terms, {})

    def unsent(self) -> int:
        return super().unsent() + self._slot.unsent()

    def state(self) -> Part:
        return {**super().state(), **self._slot.state()}

    def load_state(self, state: Part) -> None:
        super().load_state(state)
        self._slot.load_state(state)

    def send(self) -> bool:
        self._post_process()
        rows, start = self._terms.spec.rows, np.zeros(self._terms.seats, np.intp)
        time, complete = np.arange(rows)[:, None], True
        while complete and len(ready := (self._closed - start >= rows).nonzero()[0]):
            seats, columns = self._slot.place(ready)
            if complete := len(seats) > 0:
                for name, array in self.arrays.items():
                    self._slot.arrays[name][:, columns] = array[start[seats] + time, seats]
                start[seats] += self._terms.spec.sample_steps
                self._slot.written(columns)
        if start.any():
            self._drop(start)
        return complete

    def _drop(self, start: Seats) -> None:
        """Forget the first `start[seat]` rows of each seat."""
        for counter in (self.position, self._begin, self._closed):
            counter -= start
        seats = start.nonzero()[0]
        time = np.arange(self.position[seats].max())[:, None]
        index = np.minimum(start[seats] + time, self._private_rows - 1)
        for array in self.arrays.values():
            array[: len(time), seats] = array[index, seats]
