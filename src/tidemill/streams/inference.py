"""The inference stream over channels: actors ask, policy workers answer, many at once.

A pair of channels joins one asker and one server for one policy. A request slot holds up
to `rows` rows and a header (number, rows, whether the rows' flags count); an answer slot
as many answers and (number, rows, version, policy). Answers are matched by number, and no
number is used twice, nor by a later life of the asker: an answer that nobody waits for,
because it is late, a repetition, or for who is dead, is dropped. A server takes a request
only when there is room for its answer.

So `respond` never waits and never fails, however often is asked. A policy worker that
dies and lives again takes what it had not answered once more, since a request is given
back after its answer is sent. Where it has no life left its clients turn to another
server (`turn_to`), and ask that again (`ask_again`) for what it has not answered: all
that an answer follows from, states of memories included, is in the request. The first
answer counts.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.api.stream import Answer, InferenceClient, InferenceServer, Requests
from tidemill.api.transport import Consumer, Producer
from tidemill.core.cut import Part
from tidemill.core.errors import SchemaError
from tidemill.core.memory import Need
from tidemill.core.schema import Array, Arrays, Field, Schema
from tidemill.streams.inline import rows_of

_HEADER = "header"  # int64 [4]
_FLAG = "deterministic"
_FLAGS: Schema = {_FLAG: Field((), "bool")}
_SLOTS = 2  # of a channel, for each request that may wait


def _slot(rows: int, fields: Schema) -> dict[str, Field]:
    return {
        _HEADER: Field((4,), "int64"),
        **{name: Field((rows, *f.shape), f.dtype) for name, f in fields.items()},
    }


def memory_need(observation: Schema, state: Schema, answer: Schema, rows: int, in_flight: int) -> Need:
    """Return the memory of an asker's requests, and of their answers: up to `in_flight`
    requests of up to `rows` rows wait at a time."""
    fields = (*observation.values(), *_FLAGS.values(), *answer.values(), *state.values(), *state.values())
    row, slots = sum(field.nbytes for field in fields), _SLOTS * in_flight
    sums = f"{slots} slots x {rows:,} rows x {row:,} bytes"
    return Need("requests and answers", slots * rows * row, sums, shared=True)


_Asked = tuple[Arrays, Arrays, bool | Array]
"""A request: observation, state, deterministic. Its owner leaves the arrays as they are
until it is answered."""


@dataclass(eq=False)
class _TakenAnswer(Answer):
    """An answer whose slot was taken. The slot goes back when it is done with, and so are
    all that were taken before it."""

    done: bool = False


class ChannelInferenceClient(InferenceClient):
    """The asking end: a request takes one slot.

    observation, state: schemas of a request's row; `rows` the most rows of one request,
        `in_flight` the most requests that wait at a time
    life: number of the asker's life
    """

    def __init__(
        self,
        requests: Producer,
        answers: Consumer,
        observation: Schema,
        state: Schema,
        rows: int,
        in_flight: int,
        life: int = 0,
    ) -> None:
        self._slot, self._slots = _slot(rows, {**observation, **state, **_FLAGS}), _SLOTS * in_flight
        self._join(requests, answers)
        self._posted: dict[int, _Asked] = {}  # number → to be sent
        self._pending: dict[int, _Asked] = {}  # number → sent and not yet answered
        self._arrived: dict[int, _TakenAnswer] = {}
        self._taken: deque[_TakenAnswer] = deque()  # in the order in which they were taken
        self._reading: list[_TakenAnswer] = []  # those that the next post gives back
        self._number = life << 32  # what a life before has asked may still be answered

    def _join(self, requests: Producer, answers: Consumer) -> None:
        self._requests, self._answers = requests, answers
        requests.offer(self._slot, (), self._slots)

    def turn_to(self, requests: Producer, answers: Consumer) -> None:
        """Ask another server from now on: the one before is dead. What it has answered
        counts; what it was sent and has not is sent to this one, at once."""
        self._receive()
        self._copy_out()
        self._join(requests, answers)
        unsent = {number: asked for number, asked in self._posted.items() if number not in self._pending}
        self._posted.clear()
        for number in self._pending:
            self.ask_again(number)
        self.flush()
        self._posted |= unsent

    @property
    def buffered(self) -> int:
        return len(self._posted)

    def post_request(self, observation: Arrays, state: Arrays, deterministic: bool | Array) -> int:
        if self._reading:
            for held in self._reading:
                held.done = True
            self._reading.clear()
            self._release()
        self._number += 1
        self._posted[self._number] = observation, state, deterministic
        return self._number

    def ask_again(self, request: int) -> None:
        """Send a request once more, at the next `flush`: it may be lost, on its way or
        with its server. The first answer counts. Nothing is done for a request that is
        answered, or not yet sent."""
        if request in self._pending:
            self._posted[request] = self._pending[request]

    def flush(self) -> None:
        while self._posted and (slot := self._requests.reserve()) is not None:
            number = next(iter(self._posted))
            asked = observation, state, deterministic = self._posted.pop(number)
            rows = rows_of(observation)
            for part in (observation, state):
                for name, array in part.items():
                    slot[name][:rows] = array
            flagged = deterministic is not False
            if flagged:
                slot[_FLAG][:rows] = deterministic
            header = slot[_HEADER]
            header[0], header[1], header[2] = number, rows, flagged  # a tuple becomes an array first
            self._pending[number] = asked
            self._requests.commit()

    def is_ready(self, request: int) -> bool:
        if request not in self._arrived:
            self._receive()
        return request in self._arrived

    def on_its_way(self, request: int) -> bool:
        return not self.is_ready(request) and request in self._pending

    def state(self) -> Part:
        self._receive()
        waiting = {**self._pending, **self._posted}
        return {
            "number": self._number,
            "sent": [*self._pending],
            "asked": {
                str(number): {"observation": observation, "state": state, "deterministic": deterministic}
                for number, (observation, state, deterministic) in waiting.items()
            },
            "answers": {
                str(number): {
                    "fields": {k: v for k, v in held.fields.items() if k != _HEADER},
                    "version": held.version,
                    "policy": held.policy,
                }
                for number, held in self._arrived.items()
            },
        }

    def load_state(self, state: Part) -> None:
        """See `InferenceClient`. What was sent is sent once more: whoever was to answer
        does not have it any more."""
        self._number = state["number"]
        asked = {
            int(number): (each["observation"], each.get("state", {}), each["deterministic"])
            for number, each in state["asked"].items()
        }
        self._posted = {number: asked[number] for number in sorted(state["sent"])}
        self.flush()
        self._posted = {number: asked[number] for number in sorted(asked.keys() - {*state["sent"]})}
        for number, each in state["answers"].items():
            held = _TakenAnswer(each["fields"], each["version"], each["policy"], done=True)
            self._arrived[int(number)] = held

    def _release(self) -> None:
        while self._taken and self._taken[0].done:
            self._taken.popleft()
            self._answers.release()

    def _receive(self) -> None:
        while self._answers.attach() and (slot := self._answers.take()) is not None:
            number, rows, version, policy = slot[_HEADER].tolist()
            held = _TakenAnswer(slot, version, policy)
            self._taken.append(held)
            if (asked := self._pending.pop(number, None)) is None:
                held.done = True  # late or repeated: nobody waits for it
                self._release()
            elif rows_of(asked[0]) != rows:
                raise SchemaError(f"request {number} of {rows_of(asked[0])} rows was answered with {rows}")
            else:
                self._posted.pop(number, None)  # no need to ask again
                self._arrived[number] = held
            if len(self._taken) == self._answers.slots:
                self._copy_out()

    def _copy_out(self) -> None:
        """Give all slots back. Answers that nobody has read yet lie before others that
        were: the next ones need room."""
        for held in self._taken:
            if not held.done:
                held.fields = {name: array.copy() for name, array in held.fields.items()}
                held.done = True
        self._release()

    def consume_result(self, request: int) -> Answer:
        held = self._arrived.pop(request)
        self._reading.append(held)
        return held

    def refresh(self) -> None:
        """Do nothing: the policy worker takes new parameters."""


class ChannelInferenceServer(InferenceServer):
    """The answering end, over one pair of channels per client.

    observation, state, answer: schemas of a row; an answer slot holds the answer and the
        next state
    """

    def __init__(
        self,
        channels: Iterable[tuple[Consumer, Producer]],
        observation: Schema,
        state: Schema,
        answer: Schema,
    ) -> None:
        self._fields = {**answer, **state}
        self._observation, self._state = list(observation), list(state)
        self._asked = {**observation, **state, **_FLAGS}
        self._channels: list[tuple[Consumer, Producer]] = []
        self._offered: list[bool] = []
        # per client: those whose slots are not yet released
        self._requests: list[deque[Requests]] = []
        # Per client, so that two threads may count: requests taken, by who polls, and
        # answered, by who responds.
        self._taken: list[int] = []
        self._answered: list[int] = []
        # per client: a request taken that did not fit the last batch
        self._next: list[Requests | None] = []
        self._capacity: list[int] = []
        self._first = 0  # the client to begin with, in turn
        for requests, answers in channels:
            self.add(requests, answers)

    def add(self, requests: Consumer, answers: Producer) -> None:
        """Serve one more client."""
        self._offered.append(False)
        self._requests.append(deque())
        self._taken.append(0)
        self._answered.append(0)
        self._next.append(None)
        self._capacity.append(0)
        self._channels.append((requests, answers))

    def _attach(self, client: int) -> bool:
        requests, answers = self._channels[client]
        if not self._offered[client]:
            if not requests.attach():
                return False
            rows = max(requests.schema.get(_FLAG, Field((), "bool")).shape, default=0)
            if dict(requests.schema) != _slot(rows, self._asked):
                raise SchemaError(
                    f"client {client} asks with {dict(requests.schema)}; the policy needs "
                    f"{_slot(rows, self._asked)}"
                )
            self._capacity[client] = rows
            answers.offer(_slot(rows, self._fields), (), requests.slots)
            self._offered[client] = True
        return True

    def poll_requests(self, most_rows: int, beside: int = 0) -> list[Requests]:
        found: list[Requests] = []
        total, clients = beside, len(self._channels)
        for turn in range(clients):
            client = (self._first + turn) % clients
            if not self._offered[client] and not self._attach(client):
                continue
            requests, answers = self._channels[client]
            unanswered = self._taken[client] - self._answered[client]  # first: another thread may respond
            room = answers.free() - unanswered
            while total < most_rows:
                if (request := self._next[client]) is None:
                    if room <= 0 or (slot := requests.take()) is None:
                        break
                    room -= 1
                    request = self._request(client, slot)
                if total and total + request.rows > most_rows:
                    self._next[client] = request
                    break
                self._next[client] = None
                found.append(request)
                total += request.rows
        if clients and not beside:  # whoever begins a batch has room in it, however much it asks for
            self._first = (self._first + 1) % clients
        return found

    def _request(self, client: int, slot: Arrays) -> Requests:
        number, rows, flagged, _ = slot[_HEADER].tolist()
        if not 0 < rows <= self._capacity[client]:
            raise SchemaError(f"client {client} asks for {rows} rows in a slot of {self._capacity[client]}")
        observation = {name: slot[name][:rows] for name in self._observation}
        state = {name: slot[name][:rows] for name in self._state} if self._state else {}
        flags = slot[_FLAG][:rows] if flagged else False
        request = Requests(client, number, rows, observation, state, flags)
        self._requests[client].append(request)
        self._taken[client] += 1
        return request

    def place(self, request: Requests) -> Arrays:
        place = self._reserve(request.client).copy()  # what a policy puts in place of an array is seen so
        del place[_HEADER]
        return place

    def _reserve(self, client: int) -> Arrays:
        slot = self._channels[client][1].reserve()
        if slot is None:
            raise SchemaError(
                f"client {client} was given more answers than it has asked for, and has no room for them"
            )
        return slot

    def respond(self, requests: Sequence[Requests], answers: Arrays, version: int, policy: int) -> None:
        start = 0
        for request in requests:
            client, rows = request.client, request.rows
            consumer, producer = self._channels[client]
            slot = self._reserve(client)
            for name in self._fields:
                if (answer := answers[name]) is not (place := slot[name]):
                    place[:rows] = answer[start : start + rows]
            header = slot[_HEADER]
            header[0], header[1], header[2], header[3] = request.number, rows, version, policy
            producer.commit()
            if not request.answered:
                request.answered = True
                self._answered[client] += 1
            held = self._requests[client]
            while held and held[0].answered:
                held.popleft()
                consumer.release()
            start += rows
