"""Where an agent's rows are written, and how they become samples: one member for each
mode of an agent spec.

While all seats of a fixed-length spec are at the same row, rows are written into the
sample's slot itself, as one slice per tick (`InStep`). All else (`Columns`) is written by
index into memory of the agent's own, where each seat is at a row of its own; what is
finished is copied into slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import FILLER
from tidemill.api.stream import SampleProducer
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import Arrays, Schema, allocate
from tidemill.workers.actor_config import PlayerSpec

Seats = NDArray[np.intp]


MOST_SLOTS = 4096  # of one channel, since both ends make arrays of each at the start


class Sizes(NamedTuple):
    """What an agent's rows take: `kept` rows of each seat in its own memory, and in each
    stream `slots` slots of [rows, columns]."""

    kept: int
    rows: int
    columns: int
    slots: int


def sizes(spec: PlayerSpec, seats: int, limit: int, same_step: bool, slots: int) -> Sizes:
    """Return what `spec` takes, when an episode has at most `limit` steps and a stream is
    to hold `slots` samples of each seat."""
    match spec.mode:
        case "fixed":
            return Sizes(spec.rows + same_step, spec.rows, seats, slots)
        case "after_done":  # what the episode before left over, and a whole one
            return Sizes(spec.rows + limit + same_step, spec.rows, seats, slots)
        case "full":
            return Sizes(limit + 1 + same_step, limit + 1, 1, min(slots * seats, MOST_SLOTS))
        case "transitions":
            return Sizes(0, 1, seats, slots)
    return Sizes(3 + same_step, 1, 1, min(slots * seats, MOST_SLOTS))


@dataclass(frozen=True)
class Terms:
    """What blocks are made from.

    row: fields of a row as an agent writes it (`row_schema`)
    schema: fields of a sample's row (`sample_schema`)
    same_step: a seat may end one episode and begin the next within a tick
    samples: where samples go; their slots were offered
    on_sent: called after each sample
    """

    spec: PlayerSpec
    row: Schema
    schema: Schema
    seats: int
    need: Sizes
    same_step: bool
    samples: SampleProducer
    on_sent: Callable[[], None]


class Blocks(ABC):
    """Rows being written. `arrays` has field name → [rows, N, ...]."""

    arrays: Arrays

    @abstractmethod
    def has_room(self) -> bool:
        """True when the rows of a tick have a place to go (False while the consumer holds
        all slots). Needs that all rows have their answers."""

    @abstractmethod
    def send(self) -> bool:
        """All rows written so far have their answers: send what is finished. False when
        some of it found no slot."""


class InStep(Blocks):
    """Fixed length, all seats at the same row: `arrays` is a slot ({} between two)."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._rows, self._overlap = terms.spec.rows, terms.spec.burn_in + terms.spec.bootstrap
        self.arrays = {}
        self.position = terms.spec.burn_in
        """The next row."""
        # the slot's first rows, kept from the one before
        self._carry = allocate(terms.schema, (self._overlap, terms.seats))
        fill(self._carry)
        # what a row has only once it was acted on
        self._cleared = [name for name in terms.schema if name == "reward" or name.startswith("info")]

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


class Columns(Blocks):
    """Each seat at a row of its own, in memory of so many rows per seat."""

    def __init__(self, terms: Terms) -> None:
        self._terms, self._kept = terms, terms.need.kept
        # since whole columns are read, of few seats at a time
        by_seat = allocate(terms.schema, (terms.seats, self._kept))
        self.arrays = {name: array.swapaxes(0, 1) for name, array in by_seat.items()}
        fill({name: array[: terms.spec.burn_in] for name, array in self.arrays.items()})
        self.position = np.full(terms.seats, terms.spec.burn_in, np.intp)
        """[N], the next row of each seat."""

    def close(self, seats: Seats) -> None:
        """The newest rows of `seats` are the last of their episodes."""

    def has_room(self) -> bool:
        if not self.send():
            return False
        if self.position.max() + 1 + self._terms.same_step > self._kept:
            raise EnvironmentFault(
                f'an episode of the agents "{self._terms.spec.match}" goes on beyond the limit of its steps '
                "that the environment promised; "
                "give it the limit that holds, or one that we keep (Actors.max_episode_steps)"
            )
        return True


class Slot:
    """A slot that is filled column by column, in the order in which seats finish."""

    def __init__(self, terms: Terms, arrays: Arrays) -> None:
        """Begin with a slot that was reserved before, {} for none."""
        self._terms, self.arrays = terms, arrays
        self._filled = 0

    def place(self, ready: Seats) -> tuple[Seats, slice]:
        """Return those of the `ready` seats for which there are columns, and these. No
        seats while the consumer holds all slots."""
        if not self.arrays:
            self.arrays = self._terms.samples.reserve() or {}
            if not self.arrays:
                return ready[:0], slice(0, 0)
        seats = ready[: self._terms.seats - self._filled]
        return seats, slice(self._filled, self._filled + len(seats))

    def written(self, columns: slice) -> None:
        """Send the slot when these were its last columns."""
        self._filled = columns.stop
        if self._filled == self._terms.seats:
            self._terms.samples.commit()
            self.arrays, self._filled = {}, 0
            self._terms.on_sent()


class FixedColumns(Columns):
    """Samples of so many rows, sent when a seat's last one is answered."""

    def __init__(self, terms: Terms, slot: Arrays) -> None:
        super().__init__(terms)
        self._slot = Slot(terms, slot)

    def send(self) -> bool:
        position, rows, step = self.position, self._terms.spec.rows, self._terms.spec.sample_steps
        while (position >= rows).any():
            seats, columns = self._slot.place((position >= rows).nonzero()[0])
            if not len(seats):
                return False
            for name, array in self.arrays.items():
                self._slot.arrays[name][:, columns] = array[:rows, seats]
                array[: self._kept - step, seats] = array[step:, seats]
            position[seats] -= step
            self._slot.written(columns)
        return True


class Closing(Columns):
    """What is sent by finished episodes. `_begin` is the row at which a seat's newest
    episode begins that was not looked at yet, `_closed` the one after its newest final
    row."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._begin, self._closed = self.position.copy(), self.position.copy()

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
                name: self.arrays[name][np.minimum(begin + time, self._kept - 1), seats]
                for name in post.reads
            }
            fill(episodes, time >= length)
            for name, found in post.process(episodes).items():
                self.arrays[f"post.{name}"][begin[columns] + steps, seats[columns]] = found[steps, columns]
        self._begin[seats] = self._closed[seats]


class AfterDone(Closing):
    """Samples of so many rows, held back until the episode of the last one is done."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._slot = Slot(terms, {})

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
        index = np.minimum(start[seats] + time, self._kept - 1)
        for array in self.arrays.values():
            array[: len(time), seats] = array[index, seats]


class Full(Closing):
    """One sample per episode, of one seat."""

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

    def _write(self, slot: Arrays, seat: int, rows: int) -> None:
        """Write a seat's episode into its slot."""
        for name, array in self.arrays.items():
            slot[name][:rows, 0] = array[:rows, seat]
        if self._terms.spec.padded:
            fill({name: array[rows:] for name, array in slot.items()})


class Concise(Full):
    """One sample of one row per episode. Of each seat three rows are kept: the episode's
    first, and its newest two.

    The fields are those of the first row, but for `done` and `truncated` (of the last
    one), the info, and some more: `last_version`, which did the episode's last action,
    `seat`, the seat's number in its target, and `others.version` and `others.policy` (see
    `Agent.meet`).
    """

    def send(self) -> bool:
        complete = super().send()
        # of open episodes: make room for a new last row
        seats = (self.position - self._closed >= 3).nonzero()[0]
        for array in self.arrays.values() if len(seats) else ():
            array[1, seats] = array[2, seats]
        self.position[seats] = 2
        return complete

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


def make_blocks(terms: Terms) -> InStep | Columns:
    """Return the blocks that a spec's mode needs, and offer their slots."""
    terms.samples.offer(terms.schema, terms.need.rows, terms.need.columns, terms.need.slots)
    match terms.spec.mode:
        case "fixed":
            return InStep(terms)
        case "after_done":
            return AfterDone(terms)
        case "full":
            return Full(terms)
    return Concise(terms)


def fill(arrays: Arrays, where: NDArray[np.bool_] | slice = slice(None)) -> None:
    """Make rows fillers."""
    for name, array in arrays.items():
        array[where] = FILLER.get(name, 0)
