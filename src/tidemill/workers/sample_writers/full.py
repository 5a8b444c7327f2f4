"""Samples of one episode of one seat, all its rows."""

from collections.abc import Collection
from typing import ClassVar

from tidemill.core.cut import Part
from tidemill.core.schema import Arrays
from tidemill.workers.sample_writers.base import MOST_SLOTS, BlockSizes, SampleTerms, fill
from tidemill.workers.sample_writers.closed_episodes import ClosedEpisodes


class Full(ClosedEpisodes):
    """One sample per episode, of one seat."""

    settings: ClassVar[Collection[str]] = ("padded", "post", "deterministic")
    needs_limit = True
    by_seat = True

    @classmethod
    def sizes(cls, spec: SampleTerms, seats: int, limit: int, same_step: bool, slots: int) -> BlockSizes:
        return BlockSizes(limit + 1 + same_step, limit + 1, 1, min(slots * seats, MOST_SLOTS))

    def send(self) -> bool:
        self._post_process()
        for seat in self._closed.nonzero()[0].tolist():
            slot = self._terms.samples.reserve()
            if slot is None:
                return False
            rows = int(self._closed[seat])
            self._write(slot, seat, rows)
            self._terms.samples.commit()
            self._terms.on_sent()
            begun = int(self.position[seat]) - rows  # rows of the next episode
            for array in self.arrays.values():
                array[:begun, seat] = array[rows : rows + begun, seat]
            self.position[seat], self._begin[seat], self._closed[seat] = begun, 0, 0
        return True

    def state(self) -> Part:
        # what lies behind an episode in its slot is of an older one
        cut = not self._terms.spec.padded
        return {**super().state(), "samples": self._terms.samples.state(cut=cut)}

    def _write(self, slot: Arrays, seat: int, rows: int) -> None:
        """Write a seat's episode into its slot."""
        for name, array in self.arrays.items():
            slot[name][:rows, 0] = array[:rows, seat]
        if self._terms.spec.padded:
            fill({name: array[rows:] for name, array in slot.items()})
