"""Samples of one row for each episode of a seat, for evaluations.

A row has the first and the last version of its episode, so that an evaluation can tell a
policy that changed meanwhile, and which version played each agent of another spec: -1
where it changed, also where that was after the agent's last action, since nobody looks at
each row.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

import numpy as np

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.core.cut import Part
from tidemill.core.schema import Arrays, Field
from tidemill.workers.info_numbers import FIELD, PACKED_INFO
from tidemill.workers.sample_writers.base import MOST_SLOTS, BlockSizes, SampleTerms, Seats, WriterTerms
from tidemill.workers.sample_writers.full import Full


class Concise(Full):
    """One sample of one row per episode. Of each seat three rows are kept: the episode's
    first, and its newest two.

    The fields are those of the first row, but for `done` and `truncated` (of the last
    one), the info, and some more: `last_version`, which did the episode's last action,
    `seat`, the seat's number in its target, and `others.version` and `others.policy` (see
    `BlockAgent.meet`).
    """

    settings: ClassVar[Collection[str]] = ("deterministic",)
    row_fields: ClassVar[Mapping[str, Field]] = {**ROW_FIELDS, FIELD: PACKED_INFO}
    needs_limit = False
    by_seat = False

    @classmethod
    def sizes(cls, spec: SampleTerms, seats: int, limit: int, same_step: bool, slots: int) -> BlockSizes:
        return BlockSizes(3 + same_step, 1, 1, min(slots * seats, MOST_SLOTS))

    @classmethod
    def sample_fields(cls, others: int) -> Mapping[str, Field]:
        own = {"last_version": Field((), "int64"), "seat": Field((), "int32")}
        theirs = {"others.version": Field((others,), "int64"), "others.policy": Field((others,), "int16")}
        return {**own, **theirs} if others else own

    def __init__(self, terms: WriterTerms) -> None:
        super().__init__(terms)
        self.playing = -1
        """The version whose episodes are counted."""
        self.played = np.zeros(terms.seats, np.int64)
        """[N], how many of each seat were sent since that was made 0."""

    def state(self) -> Part:
        return {**super().state(), "playing": self.playing, "played": self.played}

    def load_state(self, state: Part) -> None:
        super().load_state(state)
        self.playing, self.played[:] = state["playing"], state["played"]

    def send(self) -> bool:
        complete = super().send()
        # of open episodes: make room for a new last row
        seats = (self.position - self._closed >= 3).nonzero()[0]
        for array in self.arrays.values() if len(seats) else ():
            array[1, seats] = array[2, seats]
        self.position[seats] = 2
        return complete

    def settled(self) -> bool:
        """True when every episode that was sent has been given back."""
        return self._terms.samples.settled()

    def unsent(self) -> int:
        """Return 0: nobody trains on these rows."""
        return 0

    def abort(self, seats: Seats) -> None:
        """See `Columns`: nobody counts such episodes."""
        self.position[seats] = self._closed[seats]

    def _write(self, slot: Arrays, seat: int, rows: int) -> None:
        last, acted = rows - 1, rows - 2
        for name, array in self.arrays.items():
            shown = (
                last
                if name in ("done", "truncated")
                else acted
                if name.startswith(("info", "others."))
                else 0
            )
            slot[name][0, 0] = array[shown, seat]
        slot["last_version"][0, 0] = self.arrays["version"][acted, seat]
        slot["seat"][0, 0] = seat
        self.played[seat] += slot["version"][0, 0] == slot["last_version"][0, 0] == self.playing
