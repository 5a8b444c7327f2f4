"""Rows that nobody reads: of an evaluation only the episodes count."""

from typing import ClassVar

import numpy as np

from tidemill.core.schema import Schema
from tidemill.streams.samples import NullSampleProducer
from tidemill.workers.sample_writers.base import Columns, SampleTerms, WriterTerms
from tidemill.workers.sample_writers.fixed import AlignedBlock


class Unread(AlignedBlock):
    """Rows that are written over again and again, and leave for nowhere. Values of final
    rows are not asked for, and returns are summed exactly."""

    final_values: ClassVar[bool] = False
    returns: ClassVar[str] = "float64"

    def __init__(self, spec: SampleTerms, schema: Schema, seats: int, same_step: bool) -> None:
        need = self.sizes(spec, seats, 0, same_step, 1)
        terms = WriterTerms(
            spec, schema, schema, seats, need, same_step, NullSampleProducer(), on_sent=lambda: None
        )
        terms.offer(schema)
        super().__init__(terms)

    def _columns(self) -> Columns:
        return UnreadColumns(self._terms)


class UnreadColumns(Columns):
    """The same, by index: of full columns the newest row is kept."""

    def has_room(self) -> bool:
        return True

    def unfilled(self) -> int:
        return 0  # they are the rows of a sample: written at once

    def send(self) -> bool:
        if self.position.max() >= self._terms.spec.rows:
            for array in self.arrays.values():
                array[0] = array[self.position - 1, np.arange(len(self.position))]
            self.position.fill(1)
        return True
