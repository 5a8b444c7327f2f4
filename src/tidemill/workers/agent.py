"""The agent: all seats that one agent spec matches in a target, and the rows that they write.

A seat's life in rows (T actions give T + 1 rows)::

    row              0      1      …   T-1    T (final)   0 (next episode)
    on_reset         1      0          0      0           1
    done|truncated   0      0          0      1           0
    reward           r_1    r_2        r_T    0           …
    info_mask        0      0          1      0           0

A tick brings the observation of row t and the reward of row t-1; the answer completes row t. A block [rows, seats] is committed when its last row
is answered, and the next block begins with its last `overlap` rows. While all seats are at the same row, the block is a slot of the sample stream
and a tick's rows are written as one slice. From the first tick in which they differ on (an absent seat, one that ended and restarted), rows are
written by index into memory of the agent's own, and finished columns are copied into slots.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.stream import InferenceClient, SampleProducer
from tidemill.core.schema import Arrays, Schema, allocate

Seats = NDArray[np.intp]


class Agent:
    """See the module's text.

    schema         the row's fields
    seats          N, in lane-major order
    rows, overlap  rows of a block, and how many of its last rows the next one repeats (burn_in + bootstrap)
    fillers        filler rows before a seat's very first row (the burn-in)
    same_step      seats may finish and restart within a tick: two rows
    deterministic  ask for the mode of the policy's distribution
    client         where requests go
    samples        where blocks go, `slots` of them; None to keep nothing
    on_boundary    called after each committed block
    """

    def __init__(
        self,
        schema: Schema,
        seats: int,
        rows: int,
        overlap: int,
        fillers: int,
        same_step: bool,
        deterministic: bool,
        client: InferenceClient,
        samples: SampleProducer | None,
        slots: int,
        on_boundary: Callable[[], None],
    ) -> None:
        self._seats, self._rows, self._overlap, self._same_step = seats, rows, overlap, same_step
        self._client, self._samples, self._on_boundary = client, samples, on_boundary
        self._deterministic = deterministic
        self._schema = schema
        self._observation_names = [n for n in schema if n == "obs" or n.startswith("obs.")]
        self._state_names = [n for n in schema if n.startswith("state.")]
        self._action_names = [n for n in schema if n == "action" or n.startswith("action.")]
        known = {*self._observation_names, *self._state_names, "on_reset", "done", "truncated", "reward", "version", "policy"}
        self._cleared = [n for n in schema if n == "reward" or n.startswith("info")]
        self._answer_names = [n for n in schema if n not in known and n not in self._cleared]
        self._info_names = [n for n in self._cleared if n not in ("reward", "info_mask", "info.return", "info.length")]

        # Where rows are written. `_position` is the next row: one int while all seats agree, else [N].
        self._block: Arrays | None = None  # a slot, or (staged) memory of our own
        self._position: Any = fillers
        self._carry = allocate(schema, (max(overlap, fillers), seats))  # the block's first rows, kept from the block before
        self._carry["version"][:] = self._carry["policy"][:] = -1
        self._staged = False
        self._slot: Arrays | None = None  # staged: the slot being filled, column by column
        self._columns = 0
        if samples is not None:
            samples.offer(schema, rows, seats, slots)

        # What is known of each seat between ticks.
        self.finished = np.ones(seats, np.bool_)
        """bool [N]: the seat is between two episodes; its next row is the first of one."""
        self._return = np.zeros(seats, np.float32)
        self._length = np.zeros(seats, np.int32)  # index within the episode of the seat's last row
        self._actions: Arrays = allocate({n: schema[n] for n in self._action_names}, (seats,))
        self._state: Arrays = allocate({n: schema[n] for n in self._state_names}, (seats,))
        self.episodes: list[tuple[float, int]] = []
        """(undiscounted return, number of actions) of the episodes that ended; the worker takes them away."""

        # The request in flight.
        self._request: int | None = None
        self._asked: Any = None  # index into the block of the rows that wait for an answer
        self._asking: Seats | None = None  # seats that get their next action by it; None: all, in order
        self._extra = 0  # leading rows of the request that are final ones (asked for their value alone)
        self._gathered = allocate({n: schema[n] for n in (*self._observation_names, *self._state_names)}, (2 * seats,))
        if same_step or samples is None:
            self._stage(None)

    # ---- first half: from answers to actions -------------------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """True when no seat waits for an answer."""
        return self._request is None or self._client.is_ready(self._request)

    def get_action(self) -> Arrays:
        """Complete the rows that were asked for and return the actions: name → [N, ...], meaningless for seats that asked for none."""
        if self._request is not None:
            answer = self._client.consume_result(self._request)
            self._request = None
            block, asked, fields = self._block, self._asked, answer.fields
            assert block is not None
            if self._asking is None:
                count, seats, extra = self._seats, slice(None), 0
            else:
                count, seats, extra = self._extra + len(self._asking), self._asking, self._extra  # type: ignore[assignment]
            for name in self._answer_names:
                block[name][asked] = fields[name][:count]
            block["version"][asked] = answer.version
            block["policy"][asked] = answer.policy
            for name, action in self._actions.items():
                action[seats] = fields[name][extra:count]
            for name, state in self._state.items():
                state[seats] = fields[name][extra:count]
        if self._staged:
            self._commit_columns()
        elif self._position == self._rows:
            self._commit_slot()
        return self._actions

    # ---- second half: from observations to requests ------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """True when the next rows have a place to go (False while the consumer holds all slots)."""
        if self._staged:
            self._commit_columns()
            return bool(self._position.max() < self._rows)
        if self._block is None:
            assert self._samples is not None
            self._block = self._samples.reserve()
            if self._block is None:
                return False
            for name, array in self._block.items():
                array[: self._position] = self._carry[name][: self._position]
            for name in self._cleared:
                self._block[name][self._position :] = 0
        return True

    def next_observation(self, tick: Tick) -> None:
        """Point `tick.observation` at the row that comes next, so that the environment writes it in place. Needs `has_room`."""
        if not self._staged:
            block, position = self._block, self._position
            assert block is not None
            tick.observation = {name: block[name][position] for name in self._observation_names}

    def observe(self, tick: Tick) -> None:
        """Store the rows of a tick and post the request for their answers."""
        if not self._staged and not (tick.present.all() and not tick.restarted.any()):
            self._stage(tick)
        if self._staged:
            self._observe_by_index(tick)
        else:
            self._observe_in_step(tick)

    def _observe_in_step(self, tick: Tick) -> None:
        """All seats write row `position`."""
        block, position = self._block, self._position
        assert block is not None
        begins, final = self.finished, tick.done | tick.truncated
        self._return += tick.reward
        if position:
            block["reward"][position - 1] = tick.reward
        any_final, any_begin = final.any(), begins.any()
        if any_final:
            seats = final.nonzero()[0]
            self._unmask(tick, seats, (position - 1, seats))
        self._length += 1
        if any_begin:
            self._begin(begins.nonzero()[0])
        block["on_reset"][position] = begins
        block["done"][position] = tick.done
        block["truncated"][position] = tick.truncated
        for name in self._state_names:
            block[name][position] = self._state[name]
        self.finished = final
        self._position = position + 1
        observation = {name: block[name][position] for name in self._observation_names}
        state = {name: block[name][position] for name in self._state_names}
        if not any_final:
            self._asked, self._asking = position, None
        else:
            self._erase(block, (position, tick.done.nonzero()[0]))
            asking = (~tick.done).nonzero()[0]
            if not len(asking):
                return
            self._asked, self._asking, self._extra = (position, asking), asking, 0
            observation = {name: self._gather(name, array, asking, 0) for name, array in observation.items()}
            state = {name: self._gather(name, array, asking, 0) for name, array in state.items()}
        self._request = self._client.post_request(observation, state, self._deterministic)

    def _observe_by_index(self, tick: Tick) -> None:
        """The general case: in this tick a seat writes one row, none, or (ended and restarted) two."""
        block, position = self._own, self._position
        final = (tick.done | tick.truncated) & ~self.finished
        open_seats = (~self.finished).nonzero()[0]
        block["reward"][position[open_seats] - 1, open_seats] += tick.reward[open_seats]
        self._return[open_seats] += tick.reward[open_seats]
        if final.any():
            seats = final.nonzero()[0]
            self._unmask(tick, seats, (position[seats] - 1, seats))
        closing = (final & ~tick.present).nonzero()[0]  # ended or cut while absent: the final row repeats the last observation
        for name in self._observation_names if len(closing) else ():
            tick.observation[name][closing] = block[name][position[closing] - 1, closing]
        first = (final & tick.restarted).nonzero()[0]
        second = (tick.present | (final & ~tick.present)).nonzero()[0]
        asked_first = asked_second = (np.empty(0, np.intp), np.empty(0, np.intp))
        if len(first):
            asked_first = self._write_rows(first, tick.final, tick.done[first], tick.truncated[first], 0)
        if len(second):
            still = final[second] & ~tick.restarted[second]
            asked_second = self._write_rows(second, tick.observation, tick.done[second] & still, tick.truncated[second] & still, len(asked_first[1]))
        count = len(asked_first[1]) + len(asked_second[1])
        if count:
            self._asked = tuple(np.concatenate(pair) for pair in zip(asked_first, asked_second, strict=True))
            self._asking, self._extra = asked_second[1], len(asked_first[1])
            observation = {name: self._gathered[name][:count] for name in self._observation_names}
            state = {name: self._gathered[name][:count] for name in self._state_names}
            self._request = self._client.post_request(observation, state, self._deterministic)

    def _write_rows(
        self, seats: Seats, observation: Arrays, done: NDArray[np.bool_], truncated: NDArray[np.bool_], start: int
    ) -> tuple[Seats, Seats]:
        """Write each seat's next row; gather those to be asked for from `start` on. Return the index (rows, seats) of the latter."""
        block, rows = self._own, self._position[seats]
        begins = self.finished[seats]
        self._length[seats] += 1
        if begins.any():
            self._begin(seats[begins])
        for name in self._observation_names:
            block[name][rows, seats] = observation[name][seats]
        block["on_reset"][rows, seats] = begins
        block["done"][rows, seats] = done
        block["truncated"][rows, seats] = truncated
        for name in self._cleared:
            block[name][rows, seats] = 0
        for name in self._state_names:
            block[name][rows, seats] = self._state[name][seats]
        self._erase(block, (rows[done], seats[done]))
        self.finished[seats] = done | truncated
        self._position[seats] = rows + 1
        rows, asking = rows[~done], seats[~done]
        for name in self._observation_names:
            self._gather(name, observation[name], asking, start)
        for name in self._state_names:
            self._gather(name, self._state[name], asking, start)
        return rows, asking

    # ---- the parts both share ----------------------------------------------------------------------------------------------------------------

    def _gather(self, name: str, source: NDArray[Any], seats: Seats, start: int) -> NDArray[Any]:
        target = self._gathered[name][start : start + len(seats)]
        np.take(source, seats, axis=0, out=target, mode="clip")  # "clip": numpy buffers `out` otherwise
        return target

    def _begin(self, seats: Seats) -> None:
        """An episode's first row: the default state, counts from 0."""
        self._return[seats] = 0
        self._length[seats] = 0
        for state in self._state.values():
            state[seats] = 0

    def _unmask(self, tick: Tick, seats: Seats, at: Any) -> None:
        """These seats' episodes are over: show the info on the rows whose actions finished them."""
        block = self._block
        assert block is not None
        returns, lengths = self._return[seats], self._length[seats] + 1
        block["info_mask"][at] = True
        block["info.return"][at] = returns
        block["info.length"][at] = lengths
        for name in self._info_names:
            block[name][at] = tick.info[name.removeprefix("info.")][seats]
        self.episodes += zip(returns.tolist(), lengths.tolist(), strict=True)

    def _erase(self, block: Arrays, at: Any) -> None:
        """Rows on which nothing acts."""
        for name in self._answer_names:
            block[name][at] = 0
        block["version"][at] = -1
        block["policy"][at] = -1

    # ---- blocks ------------------------------------------------------------------------------------------------------------------------------

    def _stage(self, tick: Tick | None) -> None:
        """Go on in memory of our own, because seats are at different rows from now on. `tick` holds observations not yet counted as rows."""
        own = allocate(self._schema, (self._rows + self._same_step, self._seats))
        position = self._position
        if self._block is not None:
            for name, array in self._block.items():
                own[name][:position] = array[:position]
            assert tick is not None
            tick.observation = {name: array.copy() for name, array in tick.observation.items()}
        else:
            for name, array in self._carry.items():
                own[name][:position] = array[:position]
        self._slot, self._block, self._own = self._block, own, own
        self._position = np.full(self._seats, position, np.intp)
        self._staged = True

    def _commit_slot(self) -> None:
        block, samples, overlap = self._block, self._samples, self._overlap
        assert block is not None and samples is not None
        for name, array in block.items():
            self._carry[name][:overlap] = array[self._rows - overlap :]
        samples.commit()
        self._block, self._position = None, overlap
        self._on_boundary()

    def _commit_columns(self) -> None:
        """Copy finished columns into slots, as far as there are slots."""
        own, position = self._own, self._position
        step = self._rows - self._overlap
        while (position >= self._rows).any():
            if self._samples is not None and self._slot is None:
                self._slot = self._samples.reserve()
                if self._slot is None:
                    return
            seats = (position >= self._rows).nonzero()[0][: self._seats - self._columns]
            columns = slice(self._columns, self._columns + len(seats))
            for name, array in own.items():
                if self._slot is not None:
                    self._slot[name][:, columns] = array[: self._rows, seats]
                array[: len(array) - step, seats] = array[step:, seats]
            position[seats] -= step
            if self._slot is not None:
                self._columns = columns.stop
                if self._columns == self._seats:
                    assert self._samples is not None
                    self._samples.commit()
                    self._slot, self._columns = None, 0
                    self._on_boundary()
