"""How transitions are sent to a replay memory: each tick sends a sample of one row of all
seats, with what was observed and what led to it (`ARRIVAL_FIELDS`).

Nothing waits for the next action, so that an open episode never holds back what is known
of its steps. Where a limiter stands behind the stream, a tick needs a credit for each
lane that is going to step, before its actions are asked for: so they are those of the
newest policy. Resets need none.

Where the limiter's trainer has died and lives again, elsewhere in its run, episodes go on
all the same (`TransitionAgent.begin_anew`). For the memory that is there then each of
them begins with the row that comes next: no transition reaches over the gap, and a step
that was in flight is none of those that this life has granted.
"""

from typing import Any

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.api.algorithm import ARRIVAL_FIELDS, FILLER
from tidemill.api.environment import Tick
from tidemill.api.stream import InferenceClient, SampleProducer
from tidemill.core.schema import Arrays, Schema, allocate
from tidemill.workers.agent import Agent
from tidemill.workers.sample_writers.base import BlockSizes, SampleTerms, SampleWriter, Seats


class Transitions(SampleWriter):
    """A row of all seats, which is a slot of its own."""

    row_fields = ARRIVAL_FIELDS

    @classmethod
    def sizes(cls, spec: SampleTerms, seats: int, limit: int, same_step: bool, slots: int) -> BlockSizes:
        return BlockSizes(0, 1, seats, slots)

    def __init__(self, samples: SampleProducer) -> None:
        self._samples = samples
        self.arrays = {}

    def has_room(self) -> bool:
        self.arrays = self._samples.reserve() or {}  # the same slot until it is sent
        return bool(self.arrays)

    def send(self) -> bool:
        self._samples.commit()
        return True


class TransitionAgent(Agent):
    """The agent of an actor that fills a replay memory: it sends what every tick brought.
    Its seats need not be in step: in each tick some of them have something. Rows are
    copied into the slots of its samples; what was seen last is kept here, so that
    requests may wait for credits."""

    in_place = True

    def __init__(
        self,
        schema: Schema,
        seats: int,
        deterministic: bool,
        client: InferenceClient,
        samples: SampleProducer,
    ) -> None:
        super().__init__(schema, seats, deterministic, client, Transitions(samples))
        self._answer_names = [name for name in self._answer_names if name != "voided"]
        answers: Arrays = allocate(
            {n: schema[n] for n in (*self._answer_names, "version", "policy")}, (seats,)
        )
        self._newest: Arrays = allocate({n: schema[n] for n in self._observation_names}, (seats,))
        self._answers = answers  # what led to the newest row, or is going to lead to the next one
        self._marks = [
            "on_reset",
            "voided",
            "done",
            "truncated",
            *(name for name in self._cleared if name != "reward"),
        ]
        self._requests: dict[int, Seats] = {}  # who waits for which answer
        self._row: Arrays = {}  # that is sent next
        self._rows: dict[int, Arrays] = {}  # the one row of each slot, by the slot's id
        self._acts: NDArray[np.bool_] = np.zeros(seats, np.bool_)
        self.acts = 0
        """Seats that are going to act in their next ticks."""
        self.asked = False
        """Actions were asked for since rows were sent."""
        # whose step in flight was granted in a life of the trainer before
        self._ungranted: NDArray[np.bool_] = np.zeros(seats, np.bool_)
        self._any_ungranted = False
        # steps of the open episode before the row with which it begins in the memory
        self._before = np.zeros(seats, np.int32)
        self.begun_in = np.zeros(seats, np.int64)
        """int64 [N]: the stage of the curriculum in which the seat's reset was sent."""
        self.sent = 0
        """Samples so far."""
        self.stepped = 0
        """Seats whose steps the newest sample holds, neither lost nor resets."""

    def _next_row(self) -> Arrays:
        arrays = self.writer.arrays
        row = self._rows.get(id(arrays))
        if row is None:
            row = self._rows[id(arrays)] = {name: array[0] for name, array in arrays.items()}
        return row

    def next_observation(self, tick: Tick) -> None:
        self._row, tick.observation = self._next_row(), self._newest

    def begin_anew(self, seats: Seats, life: int) -> None:
        """The trainer lives again, in this `life`: say so, and send what `seats`, whose
        next steps it is to grant, see now, as rows that begin. What others have in flight
        was granted before: the row that comes of it begins, too, and is no step. Needs
        `has_room`."""
        row, here = self._next_row(), np.zeros(self._seats, np.bool_)
        here[seats] = self._acts[seats]
        for name in (*self._marks, *self._answer_names, "reward"):
            row[name].fill(0)
        for part in (self._newest, self._state):
            for name, array in part.items():
                row[name][:] = array
                row[name][~here] = 0
        for name, value in {**FILLER, "version": -1 - life}.items():
            row[name].fill(value)
        row["on_reset"][:] = here
        self._before[here] = self._length[here]
        self._ungranted[:] = ~here
        self._any_ungranted = True
        self.writer.send()
        self.sent += 1

    def observe(self, tick: Tick, came: Seats | None = None) -> None:
        """Send the row of a tick in which the seats `came` (increasing; None: all) have
        something. Others have fillers, and what `tick` says of them is not looked at.
        Nobody is done, truncated or voided in it when this returns."""
        row, every = self._row, came is None or len(came) == self._seats
        at: Any = slice(None) if every else came
        for name in self._marks:
            row[name].fill(0)
        if not every:
            for name, value in FILLER.items():
                row[name].fill(value)
        for part in (self._answers, self._newest, self._state):
            for name, array in part.items():
                row[name][at] = array[at]
        rewards = tick.reward[at]
        row["reward"][at] = rewards
        ends = count_nonzero(tick.done) or count_nonzero(tick.truncated) or count_nonzero(tick.voided)
        if self._any_ungranted or ends or count_nonzero(self.finished[at]) or not tick.present[at].all():
            self._observe_rare(tick, row, at)
        else:
            self._return[at] += rewards
            self._length[at] += 1
            self.stepped = len(rewards)
        self.asked = False
        self.writer.send()
        self.sent += 1

    def _observe_rare(self, tick: Tick, row: Arrays, at: Any) -> None:
        """A tick in which an episode begins or ends, a seat does not act, or its step is
        not the memory's."""
        here = np.zeros(self._seats, np.bool_)
        here[at] = True
        present = tick.present & here
        # where an episode is cut and nothing is seen, what its step led to is not known
        voided = (tick.voided | (tick.truncated & ~present)) & here & ~self.finished
        # what was made anew begins its next episode in the row that voids a step
        begins = present & (self.finished | (voided & tick.restarted))
        stepped = present & ~self.finished & ~voided
        final = (tick.done | tick.truncated) & stepped
        self._return[stepped] += tick.reward[stepped]
        self._length += stepped
        granted = ~self._ungranted
        kept, again = stepped & granted, stepped & ~granted & ~final
        self.stepped = int(count_nonzero(kept))
        if begins.any():
            seats = begins.nonzero()[0]
            self._begin(seats)
            self._before[seats] = 0
            self._stages[seats] = self.begun_in[seats]
            for name in self._state_names:
                row[name][seats] = 0
        row["on_reset"][:], row["voided"][:] = begins | again, voided & granted
        row["done"][:], row["truncated"][:] = tick.done & kept, tick.truncated & final & granted
        idle, nothing = ~kept, here & ~(kept | begins | again)
        for name in (*self._answer_names, "reward"):
            row[name][idle] = 0
        for name, value in FILLER.items():
            row[name][idle] = value
        for name in (*self._observation_names, *self._state_names):
            row[name][nothing] = 0
        if final.any():
            seats = final.nonzero()[0]
            self._end(tick, seats, self._length[seats], row, seats)
        if self._any_ungranted:
            for name in self._cleared:  # of an episode whose end is not the memory's
                row[name][final & ~granted] = 0
            self._before[again] = self._length[again]
            self._ungranted &= ~(stepped | voided | begins)
            self._any_ungranted = bool(self._ungranted.any())
        self.finished[:] = ((self.finished | voided) & ~begins) | final
        self._acts[at] = (present & ~self.finished)[at]
        self.acts = int(count_nonzero(self._acts))
        for flags in (tick.done, tick.truncated, tick.voided):
            flags.fill(False)

    def _shown(self, seats: Seats) -> Arrays:
        """See `Agent`. Where environments have told something since, it is that."""
        answers = {name: self._answers[name][seats] for name in ("version", "policy")}
        return {**{name: seen[seats] for name, seen in self._newest.items()}, **answers}

    def begins(self, seat: int) -> bool:
        """True when the seat's next step is the first one of its episode, as far as the
        memory has it."""
        return bool(self._length[seat] == self._before[seat])

    def act(self, seats: Seats) -> NDArray[np.bool_]:
        """Return which of `seats` are going to act in their next ticks."""
        return self._acts[seats]

    def ask(self, seats: Seats | None = None) -> int:
        """Ask for the actions of `seats` (increasing; None: of all that are going to
        act), and return the request's number."""
        seats = self._acts.nonzero()[0] if seats is None else seats
        observation, state = self._newest, self._state
        if len(seats) < self._seats:
            observation, state = (
                {name: array[seats] for name, array in part.items()} for part in (observation, state)
            )
        request = self.client.post_request(observation, state, self._deterministic)
        self._requests[request] = seats
        self.asked = True
        return request

    def answered(self, request: int) -> bool:
        """True when the answer to a request has come."""
        return self.client.is_ready(request)

    def take(self, request: int) -> None:
        """Take the answer to a request: `actions` of its seats are there."""
        seats, answer = self._requests.pop(request), self.client.consume_result(request)
        count = len(seats)
        at: Any = slice(None) if count == self._seats else seats
        for name in self._answer_names:
            self._answers[name][at] = answer.fields[name][:count]
        for part in (self._actions, self._state):  # actions once more: whoever is given them may change them
            for name, array in part.items():
                array[at] = answer.fields[name][:count]
        self._answers["version"][at], self._answers["policy"][at] = answer.version, answer.policy

    @property
    def actions(self) -> Arrays:
        """The actions of all seats, always in the same arrays."""
        return self._actions

    def is_ready(self) -> bool:
        return all(self.client.is_ready(request) for request in self._requests)

    def get_action(self) -> Arrays:
        for request in list(self._requests):
            self.take(request)
        return self._actions
