"""What the writers of `full`, `concise` and `after_done` have in common: each finished
episode is post-processed, and decides what leaves.

Each finished episode has a slot of its own, so that it leaves when it is done, whatever
its neighbours do; where all slots are held a trainer trains on what it has. Their memory
is sized by the limit of an episode's steps, so that an agent spec without one is refused.
"""

import numpy as np

from tidemill.core.cut import Part
from tidemill.workers.sample_writers.base import Columns, Seats, WriterTerms, fill


class ClosedEpisodes(Columns):
    """What is sent by finished episodes. `_begin` is the row at which a seat's newest
    episode begins that was not looked at yet, `_closed` the one after its newest final
    row."""

    def __init__(self, terms: WriterTerms) -> None:
        super().__init__(terms)
        self._begin, self._closed = self.position.copy(), self.position.copy()

    def state(self) -> Part:
        return {**super().state(), "begin": self._begin, "closed": self._closed}

    def load_state(self, state: Part) -> None:
        super().load_state(state)
        self._begin[:], self._closed[:] = state["begin"], state["closed"]

    def close(self, seats: Seats) -> None:
        self._closed[seats] = self.position[seats]

    def _post_process(self) -> None:
        """Add to the rows of newly finished episodes what is computed of them."""
        seats = (self._closed > self._begin).nonzero()[0]
        if not len(seats) or not self._terms.spec.post:
            return
        begin, length = self._begin[seats], self._closed[seats] - self._begin[seats]
        time = np.arange(length.max())[:, None]
        steps, columns = (time < length).nonzero()
        for post in self._terms.spec.post:
            episodes = {
                name: self.arrays[name][np.minimum(begin + time, self._private_rows - 1), seats]
                for name in post.reads
            }
            fill(episodes, time >= length)
            for name, found in post.process(episodes).items():
                self.arrays[f"post.{name}"][begin[columns] + steps, seats[columns]] = found[steps, columns]
        self._begin[seats] = self._closed[seats]
