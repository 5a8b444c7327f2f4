"""The agent whose seats write one row after the other into blocks, which become samples.

A seat's life in rows (T actions give T + 1 rows)::

    row              0      1      …   T-1    T (final)   0 (next episode)
    on_reset         1      0          0      0           1
    done|truncated   0      0          0      1           0
    reward           r_1    r_2        r_T    0           …
    info_mask        0      0          1      0           0

A tick brings the observation of row t and the reward of row t-1; the answer completes row
t. Where rows lie, and how they become samples, is the matter of `writer` (see
`sample_writers`). While all seats are at the same row, a tick's rows are written as one
slice of a sample's slot. From the first tick in which they differ on (an absent seat, one
that ended and restarted), they are written by index.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.stream import InferenceClient
from tidemill.core.cut import Part
from tidemill.core.schema import Arrays, Schema, allocate
from tidemill.native.library import asked_for, choices
from tidemill.workers import info_numbers
from tidemill.workers.agent import Agent
from tidemill.workers.sample_writers.base import Columns, Seats, put
from tidemill.workers.sample_writers.fixed import AlignedBlock
from tidemill.workers.step_books import StepBooks

_NOBODY = np.empty(0, np.intp)


class BlockAgent(Agent):
    """An agent that writes the rows of its seats into blocks (see the module's text)."""

    writer: AlignedBlock | Columns

    def __init__(
        self,
        schema: Schema,
        seats: int,
        deterministic: bool,
        client: InferenceClient,
        writer: AlignedBlock | Columns,
    ) -> None:
        super().__init__(schema, seats, deterministic, client, writer)
        self._final_values = writer.final_values
        self._packs_info = info_numbers.FIELD in schema
        self._version = self.policy = -1  # of the newest answer
        self.begun = _NOBODY
        """The seats whose episodes begin with the request in flight."""
        self._others: list[BlockAgent] = []
        self._lanes, self._numbered = 1, True
        kept, kernels = {**self._actions, **self._state}, asked_for(choices()[-1])
        self._books = StepBooks(self._return, self._length, self._answer_names, kept, kernels)

        # The request in flight.
        self._request: int | None = None
        self._asked: Any = None  # index into the block of the rows that wait for an answer
        self._asking: Seats | None = None  # seats that get their next action by it; None: all, in order
        self._extra = 0  # leading rows of the request that are final ones (asked for their value alone)
        self._gathered = allocate(
            {n: schema[n] for n in (*self._observation_names, *self._state_names)}, (2 * seats,)
        )

    def meet(self, others: "Sequence[BlockAgent]", lanes: int, numbered: bool) -> None:
        """Say who else plays in the target's `lanes`. Where samples have the fields, the
        row whose action finished an episode tells who played the others in it:
        `others.version` and `others.policy`, a column for each seat of each of `others`
        in the lane. `numbered`: this agent's own policy plays versions of the run, not
        parameters from elsewhere."""
        self._others = [other for other in others if other is not self]
        self._lanes = lanes
        self._numbered = numbered

    # ---- first half: from answers to actions -------------------------------------------

    def is_ready(self) -> bool:
        return self._request is None or self.client.is_ready(self._request)

    def waits_for_others(self) -> bool:
        """True when a policy worker is still to answer what the seats have asked."""
        return self._request is not None and self.client.on_its_way(self._request)

    def get_action(self) -> Arrays:
        """See `Agent`; completes the rows that were asked for."""
        self.complete()
        self.writer.send()
        return self._actions

    def complete(self) -> None:
        """Complete the rows that were asked for; `is_ready`."""
        if self._request is not None:
            answer = self.client.consume_result(self._request)
            self._request = None
            if answer.version != self._version or len(self.begun):
                self._note(answer.version, answer.policy)
            if self._asking is None:
                self._books.complete(answer, self.writer.arrays, self._asked)
                return
            block, asked, fields = self.writer.arrays, self._asked, answer.fields
            count, seats, extra = self._extra + len(self._asking), self._asking, self._extra
            for name in self._answer_names:
                block[name][asked] = fields[name][:count]
            block["version"][asked] = answer.version
            block["policy"][asked] = answer.policy
            for name, action in self._actions.items():
                action[seats] = fields[name][extra:count]
            for name, state in self._state.items():
                state[seats] = fields[name][extra:count]

    # ---- second half: from observations to requests ------------------------------------

    def next_observation(self, tick: Tick) -> None:
        """See `Agent`: at the row that comes next, in place."""
        if isinstance(self.writer, AlignedBlock):
            block, position = self.writer.arrays, self.writer.position
            tick.observation = {name: block[name][position] for name in self._observation_names}

    def observe(self, tick: Tick) -> None:
        """See `Agent`; posts the request for the answers that the rows wait for."""
        writer = self.writer
        if 1 in tick.restarted.tobytes() and count_nonzero(lost := tick.restarted & tick.voided):
            self.abort(lost)
            tick.restarted &= ~lost
        if isinstance(writer, AlignedBlock):
            ends = self._books.count(tick, writer.arrays, writer.position - 1)
            if ends is not None:
                self._observe_in_step(writer, tick, ends)
                return
            tick.observation = {name: array.copy() for name, array in tick.observation.items()}
            self.writer = writer = writer.by_index()
        self._observe_by_index(writer, tick)

    def _observe_in_step(self, writer: AlignedBlock, tick: Tick, any_final: bool) -> None:
        """All seats write row `position`; the tick is counted."""
        block, position = writer.arrays, writer.position
        begins, final = self.finished, tick.done | tick.truncated
        if any_final:
            seats = final.nonzero()[0]
            self._unmask(tick, seats, (position - 1, seats), self._length[seats])
            block["done"][position], block["truncated"][position] = tick.done, tick.truncated
        if 1 in begins.tobytes():
            self._begin(begins.nonzero()[0])
            block["on_reset"][position] = begins
        for name in self._state_names:
            block[name][position] = self._state[name]
        self.finished = final
        writer.position = position + 1
        observation = tick.observation
        state = {name: block[name][position] for name in self._state_names}
        if not any_final:
            self._asked, self._asking = position, None
        else:
            idle = tick.done if self._final_values else final
            self._erase(block, (position, idle.nonzero()[0]))
            asking = (~idle).nonzero()[0]
            if not len(asking):
                return
            self._asked, self._asking, self._extra = (position, asking), asking, 0
            observation = {name: self._gather(name, array, asking, 0) for name, array in observation.items()}
            state = {name: self._gather(name, array, asking, 0) for name, array in state.items()}
        self._request = self.client.post_request(observation, state, self._deterministic)

    def _observe_by_index(self, writer: Columns, tick: Tick) -> None:
        """The general case: in this tick a seat writes one row, none, or (ended and
        restarted) two."""
        block, position = writer.arrays, writer.position
        final = (tick.done | tick.truncated) & ~self.finished
        open_seats = (~self.finished).nonzero()[0]
        block["reward"][position[open_seats] - 1, open_seats] += tick.reward[open_seats]
        self._return[open_seats] += tick.reward[open_seats]
        if final.any():
            seats = final.nonzero()[0]
            self._unmask(tick, seats, (position[seats] - 1, seats), self._length[seats] + 1)
        # ended or cut while absent: the final row repeats the last observation
        closing = (final & ~tick.present).nonzero()[0]
        for name in self._observation_names if len(closing) else ():
            tick.observation[name][closing] = block[name][position[closing] - 1, closing]
        first = (final & tick.restarted).nonzero()[0]
        second = (tick.present | final).nonzero()[0]
        asked_first = asked_second = (_NOBODY, _NOBODY)
        if len(first):
            asked_first = self._write_rows(
                writer, first, tick.final, tick.done[first], tick.truncated[first], 0
            )
        if len(second):
            still = final[second] & ~tick.restarted[second]
            done, truncated = tick.done[second] & still, tick.truncated[second] & still
            asked_second = self._write_rows(
                writer, second, tick.observation, done, truncated, len(asked_first[1])
            )
        count = len(asked_first[1]) + len(asked_second[1])
        self._asking, self._extra = asked_second[1], len(asked_first[1])
        if count:
            self._asked = tuple(np.concatenate(pair) for pair in zip(asked_first, asked_second, strict=True))
            observation = {name: self._gathered[name][:count] for name in self._observation_names}
            state = {name: self._gathered[name][:count] for name in self._state_names}
            self._request = self.client.post_request(observation, state, self._deterministic)

    def _write_rows(
        self,
        writer: Columns,
        seats: Seats,
        observation: Arrays,
        done: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        start: int,
    ) -> tuple[Seats, Seats]:
        """Write each seat's next row; gather those to be asked for from `start` on.
        Return the index (rows, seats) of the latter."""
        block, rows = writer.arrays, writer.position[seats]
        begins, final = self.finished[seats], done | truncated
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
        idle = done if self._final_values else final
        self._erase(block, (rows[idle], seats[idle]))
        self.finished[seats] = final
        writer.position[seats] = rows + 1
        if final.any():
            writer.close(seats[final])
        rows, asking = rows[~idle], seats[~idle]
        for name in self._observation_names:
            self._gather(name, observation[name], asking, start)
        for name in self._state_names:
            self._gather(name, self._state[name], asking, start)
        return rows, asking

    def ask_again(self) -> None:
        """Ask anew for the answers of the newest rows, after these were `complete`: their
        actions, and what is remembered after them, are those of the second answer."""
        writer, open_seats = self.writer, (~self.finished).nonzero()[0]
        if isinstance(writer, Columns):
            # who was absent has acted on its newest row already
            absent = np.setdiff1d(open_seats, self._asking)  # type: ignore[arg-type]
            writer.arrays["truncated"][writer.position[absent] - 1, absent] = True
            self._asked, self._asking = (writer.position[open_seats] - 1, open_seats), open_seats
        elif len(open_seats) == self._seats:
            self._asked, self._asking = writer.position - 1, None
        else:
            self._asked, self._asking = (writer.position - 1, open_seats), open_seats
        self._extra = 0
        if len(open_seats):
            observation, state = (
                {n: writer.arrays[n][self._asked] for n in names}
                for names in (self._observation_names, self._state_names)
            )
            self._request = self.client.post_request(observation, state, self._deterministic)

    def _shown(self, seats: Seats) -> Arrays:
        writer = self.writer
        if isinstance(writer, AlignedBlock):
            block, rows = writer.newest, np.full(len(seats), writer.position - 1)
        else:
            block, rows = writer.arrays, writer.position[seats] - 1
        return {name: block[name][rows, seats] for name in (*self._observation_names, "version", "policy")}

    # ---- a cut -------------------------------------------------------------------------

    def state(self) -> Part:
        """Return what is known of each seat, of the rows that are being written, and of
        the request in flight."""
        asked: Part = {}
        if isinstance(self._asked, tuple):
            rows, seats = np.broadcast_arrays(*self._asked)
            asked = {"rows": rows, "seats": seats}
        return {
            "finished": self.finished,
            "return": self._return,
            "length": self._length,
            "actions": self._actions,
            "remembered": self._state,
            "stages": self._stages,
            "stage": self.stage,
            "episodes": [[*episode[:3], dict(episode[3])] for episode in self.episodes],
            "acting": self.acting,
            "writer": self.writer.state(),
            "by_index": isinstance(self.writer, Columns),
            "version": self._version,
            "policy": self.policy,
            "begun": self.begun,
            "request": self._request,
            "row": self._asked if isinstance(self._asked, int) else None,
            "asked": asked,
            "asking": {} if self._asking is None else {"seats": self._asking},
            "extra": self._extra,
        }

    def load_state(self, state: Part) -> None:
        """Be as the agent was whose state this is."""
        if state["by_index"] and isinstance(self.writer, AlignedBlock):
            self.writer = self.writer.by_index()
        self.writer.load_state(state["writer"])
        self.finished, self.stage = state["finished"], state["stage"]
        self._return[:], self._length[:] = state["return"], state["length"]
        self._stages[:], self.acting[:] = state["stages"], state["acting"]
        episodes = state.get("episodes", ())
        self.episodes = [(reached, steps, stage, told) for reached, steps, stage, told in episodes]
        put(self._actions, state["actions"])
        put(self._state, state["remembered"])
        self._version, self.policy, self.begun = state["version"], state["policy"], state["begun"]
        self._request, self._extra = state["request"], state["extra"]
        self._asking = state["asking"].get("seats")
        asked = state["asked"]
        self._asked = (asked["rows"], asked["seats"]) if asked else state["row"]

    # ---- the parts both share ----------------------------------------------------------

    def _gather(self, name: str, source: NDArray[Any], seats: Seats, start: int) -> NDArray[Any]:
        target = self._gathered[name][start : start + len(seats)]
        np.take(source, seats, axis=0, out=target, mode="clip")  # "clip": numpy buffers `out` otherwise
        return target

    def _note(self, version: int, policy: int) -> None:
        """Episodes begin, or another version acts from now on."""
        if version != self._version:
            self.acting[~self.finished] = -1
            self._version, self.policy = version, policy
        if self._numbered:
            self.acting[self.begun] = version
        self.begun = _NOBODY

    def _begin(self, seats: Seats) -> None:
        super()._begin(seats)
        self.begun = seats

    def _unmask(self, tick: Tick, seats: Seats, at: Any, lengths: NDArray[np.int32]) -> None:
        """These seats' episodes are over, after so many actions: show the info on the
        rows whose actions finished them."""
        block = self.writer.arrays
        heard = self._end(tick, seats, lengths, block, at)
        if "others.version" in block:
            lane = seats // (self._seats // self._lanes)
            block["others.version"][at] = np.concatenate(
                [other.acting.reshape(self._lanes, -1)[lane] for other in self._others], axis=1
            )
            block["others.policy"][at] = np.repeat(
                [o.policy for o in self._others], [len(o.acting) // self._lanes for o in self._others]
            )
        for place, numbers in enumerate(heard) if self._packs_info else ():
            block[info_numbers.FIELD][tuple(part if np.ndim(part) == 0 else part[place] for part in at)] = (
                info_numbers.pack(numbers)
            )

    def abort(self, lost: NDArray[np.bool_]) -> None:
        """The newest steps of these seats [N] are lost: the rows that they started from
        become the final ones of their episodes, cut ones, and show the info."""
        writer, seats = self.writer, (lost & ~self.finished).nonzero()[0]
        rows = writer.position - 1 if isinstance(writer, AlignedBlock) else writer.position[seats] - 1
        block = writer.newest if isinstance(writer, AlignedBlock) else writer.arrays
        at = rows, seats
        block["truncated"][at] = block["info_mask"][at] = True
        block["info.return"][at], block["info.length"][at] = self._returns_of(seats), self._length[seats]
        block["reward"][at] = 0
        self.finished = self.finished | lost
        if isinstance(writer, Columns):
            writer.abort(seats)

    def _erase(self, block: Arrays, at: Any) -> None:
        """Rows on which nothing acts."""
        for name in self._answer_names:
            block[name][at] = 0
        block["version"][at] = -1
        block["policy"][at] = -1
