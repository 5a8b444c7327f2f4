"""Which rows of a replay's memory belong together: one circular sequence for each lane,
cut into episodes. The rows themselves lie elsewhere.

Row r of lane l lies at *place* l · length + r mod length. A transition begins at a row
and ends `span` rows later, after n steps, or fewer where the episode was over before;
a place whose span is 0 begins none (yet, or any more). Neither lanes nor episodes ever
mix: what a lane holds was written by one seat, and a span never leads out of an episode.

A place is marked when its transition is complete, and unmarked when anything that it
needs is written over, so that drawing looks at marks alone.
"""

from typing import Protocol

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.core.schema import Arrays

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TransitionWatcher(Protocol):
    """Who is told which places begin a transition."""

    def admit(self, places: Ints) -> None:
        """These do from now on."""

    def drop(self, places: Ints) -> None:
        """These do no longer."""


class Sequences:
    """The sequences of all lanes say which places begin a transition, and how far it
    reaches. `frames`: how many rows a stack of observations reaches over; a row whose
    stack is no longer whole begins no transition. `whole`: the transitions of an episode
    count once it is over (or too long for its lane). `drop`: episodes that are cut are
    given up."""

    def __init__(
        self,
        lanes: int,
        length: int,
        steps: int,
        frames: int,
        whole: bool,
        drop: bool = False,
        watcher: TransitionWatcher | None = None,
    ) -> None:
        self.lanes, self.length = lanes, length
        self._steps, self._frames, self._whole, self._watcher = steps, frames, whole, watcher
        # an episode so long has left just one transition of those before it
        self._room = length - steps - frames - 1
        self.heads: Ints = np.zeros(lanes, np.int64)
        """Rows ever written, per lane."""
        self.age: Ints = np.full(lanes, -1, np.int64)
        """Steps of each lane's open episode so far; -1: none is open."""
        self.loose: Bools = np.full(lanes, not whole)
        """Whether the transitions of the open episode count before it is over."""
        self.step = np.zeros(lanes * length, np.int32)
        """The number of each row within its episode."""
        self.span = np.zeros(lanes * length, np.int32)
        """Rows from the beginning of a transition to its end; 0 where none begins."""
        self.count = 0
        """Transitions."""
        self._drop = drop
        self.least = 0
        """No episode is given up where fewer transitions would be left."""
        self.reached: Ints = np.zeros(lanes, np.int64)
        """With `drop`: the most rows that a lane ever had; what lies after its head is
        of no episode."""
        # when rows were drawn last: how many lanes held, and with those before them
        self._filled = self._ends = self.filled()

    @staticmethod
    def least_length(steps: int, frames: int) -> int:
        """Return the rows that a lane must have so that it always holds a transition once
        it is full."""
        return 2 * (steps + frames) + 2

    def ahead(self, places: Ints, rows: NDArray[np.int32] | Ints | int) -> Ints:
        """Return the places so many rows after these (before them: negative), in the
        same lanes; broadcasts."""
        start = places // self.length * self.length
        return start + (places - start + rows) % self.length

    def filled(self) -> Ints:
        """Return how many rows each lane holds."""
        return np.minimum(self.heads, self.length)

    def written(self) -> int:
        """Return the most places of a lane, its first ones, that were ever written."""
        return int(np.minimum(np.maximum(self.heads, self.reached), self.length).max(initial=0))

    def rows(self, places: Ints) -> Ints:
        """Return the numbers of the rows that lie at `places`, counted in their lanes
        from the first one ever written."""
        newest = self.heads[places // self.length] - 1
        return newest - (newest - places) % self.length

    def append(self, lanes: Ints, begins: Bools, ends: Bools) -> Ints:
        """Add a row to each of `lanes` (each at most once) and return the rows' places.
        Where an episode begins while another is open, that one was cut. A row after the
        end of an episode begins one, whatever `begins` says."""
        age = self.age[lanes]
        begins = begins | (age < 0)
        if count_nonzero(begins) and count_nonzero(age[begins] >= 0):
            self.cut(lanes[begins])
        rows = self.heads[lanes]
        places = lanes * self.length + rows % self.length
        full = rows >= self.length
        if count_nonzero(full):
            self._forget(places[full])
        age = age + 1
        age[begins] = 0
        self.step[places], self.heads[lanes], self.age[lanes] = age, rows + 1, age
        if self._drop:
            self.reached[lanes] = np.maximum(self.reached[lanes], rows + 1)
        if self._whole:
            self.loose[lanes[begins]] = False
        mature = (age >= self._steps) & self.loose[lanes]
        if count_nonzero(mature):
            self._admit(self.ahead(places[mature], -self._steps), self._steps)
        if count_nonzero(ends):
            self._close(lanes[ends])
        if self._whole:
            self._loosen(lanes[~self.loose[lanes] & (age >= self._room) & ~ends])
        return places

    def cut(self, lanes: Ints) -> None:
        """End the open episodes of `lanes` after their last rows, or give them up; lanes
        without one stay as they are."""
        lanes = lanes[self.age[lanes] >= 0]
        self._close(
            np.array([lane for lane in lanes if not self._give_up(int(lane))], np.int64)
            if self._drop
            else lanes
        )

    def _give_up(self, lane: int) -> bool:
        """Take back the rows of a lane's open episode, so that its next rows lie where
        these lay. False where too little would be left."""
        age = int(self.age[lane])
        places = self.ahead(self._newest(np.array([lane])), -np.arange(min(age + 1, self.length)))
        begun = places[self.span[places] > 0]
        if self.count - len(begun) < self.least:
            return False
        self.drop(begun)
        self.heads[lane] -= age + 1
        self.age[lane] = -1
        return True

    def _newest(self, lanes: Ints) -> Ints:
        return lanes * self.length + (self.heads[lanes] - 1) % self.length

    def _close(self, lanes: Ints) -> None:
        """Let the last steps of episodes that are over begin transitions, shorter than
        others."""
        age = self.age[lanes]
        # a beginning without a step: nobody needs it, and slots that keep failing would
        # fill their lanes with them
        self.heads[lanes[age == 0]] -= 1
        for lane in lanes[~self.loose[lanes]].tolist():
            self._admit_back(lane, 1)
        loose = self.loose[lanes]
        for rows in range(1, self._steps):
            longer = lanes[loose & (age >= rows)]
            if len(longer):
                self._admit(self.ahead(self._newest(longer), -rows), rows)
        self.age[lanes] = -1

    def _loosen(self, lanes: Ints) -> None:
        """Let the steps of episodes count that their lanes cannot hold any longer as a
        whole."""
        for lane in lanes.tolist():
            self._admit_back(lane, self._steps)
            self.loose[lane] = True

    def _admit_back(self, lane: int, least: int) -> None:
        """Let all steps of a lane's open episode begin transitions, but those less than
        `least` rows before its newest row."""
        age = int(self.age[lane])
        held = min(age, self.length - 1)
        if held < age:  # the rows at the edge whose stacks reach over it
            held -= self._frames - 1
        back = np.arange(held, least - 1, -1)
        if len(back):
            self._admit(self.ahead(self._newest(np.array([lane])), -back), np.minimum(back, self._steps))

    def _admit(self, places: Ints, spans: Ints | int) -> None:
        self.span[places] = spans
        self.count += len(places)
        if self._watcher is not None:
            self._watcher.admit(places)

    def _forget(self, places: Ints) -> None:
        """Give up what needs the rows at `places`, which are about to be written over."""
        for rows in range(self._frames):
            later = self.ahead(places, rows)
            gone = later[(self.span[later] > 0) & (self.step[later] >= rows)]
            if len(gone):
                self.drop(gone)

    def drop(self, places: Ints) -> None:
        """Let the transitions that begin at `places`, each named once, begin no more."""
        self.span[places] = 0
        self.count -= len(places)
        if self._watcher is not None:
            self._watcher.drop(places)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Return `count` places that begin a transition, each equally likely, with
        replacement. There must be one."""
        places, found, rows = np.empty(count, np.int64), 0, self._count_rows()
        for _ in range(8):  # most rows begin one
            found += self._find(rng.integers(rows, size=count - found), places[found:])
            if found == count:
                return places
        places[found:] = rng.choice(np.flatnonzero(self.span), count - found)
        return places

    def _count_rows(self) -> int:
        """Return how many rows all lanes hold."""
        self._filled = self.filled()
        self._ends = np.add.accumulate(self._filled)
        return int(self._ends[-1])

    def _find(self, drawn: Ints, places: Ints) -> int:
        """Write to `places` where those of the rows `drawn`, counted over all lanes, lie
        that begin a transition; return how many do."""
        lanes = self._ends.searchsorted(drawn, side="right")
        drawn += lanes * self.length - (self._ends - self._filled)[lanes]
        begun = drawn[self.span[drawn] > 0]
        places[: len(begun)] = begun
        return len(begun)

    def stacks(self, places: Ints) -> tuple[Ints, Bools]:
        """Return the places [n, frames] of the stacks of observations that end at
        `places`, the oldest first, and which of them would lie before the beginning of
        the episode: its first row stands for those."""
        back, step = np.arange(self._frames - 1, -1, -1), self.step[places][:, None]
        return self.ahead(places[:, None], -np.minimum(back, step)), back > step

    def state(self) -> Arrays:
        """Return its arrays: views."""
        names = ("heads", "age", "loose", "step", "span", *(["reached"] if self._drop else []))
        return {name: getattr(self, name) for name in names}

    def recount(self) -> None:
        """Count the transitions anew, after the arrays of `state` were written. Raises
        `ValueError` for what would lead out of the memory."""
        if (self.heads < 0).any() or ((self.span < 0) | (self.span > self._steps)).any():
            raise ValueError(f"a lane has fewer than 0 rows, or a transition not 0 to {self._steps} steps")
        self.count = int(np.count_nonzero(self.span))
