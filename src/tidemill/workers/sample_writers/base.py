"""The contract for sample writers: where an agent's rows are written, and how they become
samples. A mode of samples is a writer; `sample_writers.WRITERS` lists them.

While all seats of a fixed-length spec are at the same row, rows are written into the
sample's slot itself, as one slice per tick (`fixed.AlignedBlock`). All else (`Columns`)
is written by index into memory of the agent's own, where each seat is at a row of its
own; what is finished is copied into slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import FILLER, ROW_FIELDS, PostProcessor
from tidemill.api.stream import SampleProducer
from tidemill.core.cut import Part
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import Arrays, Field, Schema, allocate, layout

Seats = NDArray[np.intp]

MOST_SLOTS = 4096  # of one channel, since both ends make arrays of each at the start


class BlockSizes(NamedTuple):
    """The sizes of an agent's memory: `private_rows` rows of each seat in memory of its
    own, and in each stream `slots` slots of [rows, columns]."""

    private_rows: int
    rows: int
    columns: int
    slots: int


class SampleTerms(Protocol):
    """Sample terms are what a writer must know of the `AgentSpec` whose rows it
    writes."""

    @property
    def match(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def sample_steps(self) -> int: ...
    @property
    def burn_in(self) -> int: ...
    @property
    def bootstrap(self) -> int: ...
    @property
    def padded(self) -> bool: ...
    @property
    def post(self) -> Sequence[PostProcessor]: ...


@dataclass(frozen=True)
class WriterTerms:
    """The terms are what a sample writer is made from.

    row: fields of a row as an agent writes it (`row_schema`)
    schema: fields of a sample's row (`sample_schema`)
    same_step: a seat may end one episode and begin the next within a tick
    samples: where samples go
    on_sent: function that is called after each sample
    """

    spec: SampleTerms
    row: Schema
    schema: Schema
    seats: int
    need: BlockSizes
    same_step: bool
    samples: SampleProducer
    on_sent: Callable[[], None]

    def offer(self, schema: Schema) -> None:
        """Make the slots of the samples, whose rows have the fields of `schema`."""
        self.samples.offer(schema, self.need.rows, self.need.columns, self.need.slots)


class SampleWriter(ABC):
    """A sample writer is where an agent's rows are written, and decides when they leave
    as samples. `arrays` has field name → [rows, N, ...]: the rows that are being written.

    settings: names of those fields of an `AgentSpec` that not every mode knows, and that
        act in this one ("sample_steps", "padded", "post"; "deterministic", where rows of
        deterministic play may be sent); others are refused
    row_fields: fields of a row that do not come from spaces
    needs_limit: whether episodes are kept whole, so that the most steps of one must be
        known
    by_seat: whether a sample is of one seat
    final_values: whether the final row of a cut episode is asked for its value
    returns: type in which returns are summed
    """

    settings: ClassVar[Collection[str]] = ()
    row_fields: ClassVar[Mapping[str, Field]] = ROW_FIELDS
    needs_limit: ClassVar[bool] = False
    by_seat: ClassVar[bool] = False
    final_values: ClassVar[bool] = True
    returns: ClassVar[str] = "float32"

    arrays: Arrays

    @classmethod
    def sizes(cls, spec: SampleTerms, seats: int, limit: int, same_step: bool, slots: int) -> BlockSizes:
        """Return what `spec` takes, when an episode has at most `limit` steps and a
        stream is to hold `slots` samples of each seat. By itself: of all seats so many
        rows."""
        return BlockSizes(spec.rows + same_step, spec.rows, seats, slots)

    @classmethod
    def own_rows(cls, spec: SampleTerms, need: BlockSizes, same_step: bool) -> int:
        """Return the rows of each seat that take memory of the agent's own."""
        return need.private_rows

    @classmethod
    def sample_fields(cls, others: int) -> Mapping[str, Field]:
        """Return the fields that a sample's row has besides. `others`: agents of other
        specs in a lane."""
        return {}

    @abstractmethod
    def has_room(self) -> bool:
        """True when the rows of a tick have a place to go (False while the consumer holds
        all slots). Needs that all rows have their answers."""

    @abstractmethod
    def send(self) -> bool:
        """Send what is finished, now that all rows written so far have their answers.
        False when some of it found no slot."""

    def unsent(self) -> int:
        """Return how many steps stand in rows that are to be trained on, and that no
        sample was sent with; 0 where each row goes as it comes."""
        return 0

    def unfilled(self) -> int:
        """Return the bytes of `own_rows` that are still to be written for the first
        time."""
        return 0


class Columns(SampleWriter):
    """The base of writers by index: each seat is at a row of its own, in memory of so
    many rows per seat."""

    def __init__(self, terms: WriterTerms) -> None:
        self._terms, self._private_rows = terms, terms.need.private_rows
        # since whole columns are read, of few seats at a time
        by_seat = allocate(terms.schema, (terms.seats, self._private_rows))
        self.arrays = {name: array.swapaxes(0, 1) for name, array in by_seat.items()}
        fill({name: array[: terms.spec.burn_in] for name, array in self.arrays.items()})
        self.position = np.full(terms.seats, terms.spec.burn_in, np.intp)
        """[N], the next row of each seat."""
        self._reached = 0  # rows that any seat ever had

    def unsent(self) -> int:
        # nothing has come of the newest row's action yet
        ends = np.maximum(self.position - 1, 0)
        rows = np.arange(ends.max())[:, None]
        written = {name: self.arrays[name][: len(rows)] for name in ("done", "truncated")}
        return steps_of(written, (rows >= self._terms.spec.burn_in) & (rows < ends))

    def unfilled(self) -> int:
        rows = max(self._private_rows - self._reached, 0)  # one row too many is an error
        return layout(self._terms.schema, (self._terms.seats, rows))[1]

    def close(self, seats: Seats) -> None:
        """The newest rows of `seats` are the last of their episodes."""

    def abort(self, seats: Seats) -> None:
        """The newest rows of `seats` are the last of episodes whose next steps are
        lost."""
        self.close(seats)

    def state(self) -> Part:
        """Return the rows that are being written, where the next ones go, and what was
        sent and not given back."""
        return {"rows": self.arrays, "position": self.position, "samples": self._terms.samples.state()}

    def load_state(self, state: Part) -> None:
        """Be as the writer was whose state this is."""
        self._terms.samples.load_state(state["samples"])
        self.position[:] = state["position"]
        put(self.arrays, state["rows"])

    def has_room(self) -> bool:
        if not self.send():
            return False
        rows = int(self.position.max()) + 1 + self._terms.same_step
        self._reached = max(self._reached, rows)
        if rows > self._private_rows:
            raise EnvironmentFault(
                f'an episode of the agents "{self._terms.spec.match}" goes on beyond the limit of its steps '
                "that the environment promised; give it the limit that holds, or one that we keep "
                "(Actors.max_episode_steps)"
            )
        return True


class Slot:
    """A slot that is filled column by column, in the order in which seats finish."""

    def __init__(self, terms: WriterTerms, arrays: Arrays) -> None:
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

    def unsent(self) -> int:
        """See `SampleWriter`."""
        if not self._filled:
            return 0
        spec, rows = self._terms.spec, np.arange(self._terms.need.rows)[:, None]
        trained = (rows >= spec.burn_in) & (rows < spec.rows - spec.bootstrap)
        return steps_of(self.arrays, trained & (np.arange(self._terms.seats) < self._filled))

    def state(self) -> Part:
        """Return what was written of the slot."""
        written = {name: array[:, : self._filled] for name, array in self.arrays.items()}
        return {"slot": written, "filled": self._filled}

    def load_state(self, state: Part) -> None:
        """Go on with a slot whose state this is."""
        self._filled = state["filled"]
        if written := state["slot"]:
            slot = self._terms.samples.reserve()
            assert slot is not None  # it had one when it was saved
            self.arrays = slot
            put({name: array[:, : self._filled] for name, array in slot.items()}, written)


def steps_of(rows: Arrays, where: NDArray[np.bool_]) -> int:
    """Return how many of the rows are steps: final ones are none."""
    return int(np.count_nonzero(where & ~(rows["done"] | rows["truncated"])))


def put(arrays: Arrays, saved: Part) -> None:
    """Write what was saved into arrays of the same names."""
    for name, array in arrays.items():
        array[...] = saved[name]


def fill(arrays: Arrays, where: NDArray[np.bool_] | slice = slice(None)) -> None:
    """Make rows fillers."""
    for name, array in arrays.items():
        array[where] = FILLER.get(name, 0)
