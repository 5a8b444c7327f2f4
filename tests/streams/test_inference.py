"""The inference stream: each answer reaches the request that it answers, once, whole."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.streams.echo import ANSWER, OBSERVATION, ROWS, STATE, check, echo, request

from tidemill.api.policy import Policy
from tidemill.api.stream import Answer, Requests
from tidemill.api.transport import Bell
from tidemill.core.clock import Clock
from tidemill.core.errors import SchemaError
from tidemill.core.memory import LocalSegment
from tidemill.core.schema import Field, poison
from tidemill.streams.inference import ChannelInferenceClient, ChannelInferenceServer
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter


class Silent(Bell):
    def ring(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        raise AssertionError("nothing waits here")


def joined(
    clients: int, in_flight: int
) -> tuple[list[ChannelInferenceClient], ChannelInferenceServer, list[tuple[SlotConsumer, SlotProducer]]]:
    ends, channels = [], []
    for _ in range(clients):
        requests, answers = LocalSegment(), LocalSegment()
        asking = SlotProducer(requests, Silent()), SlotConsumer(answers, Silent())
        ends.append(ChannelInferenceClient(*asking, OBSERVATION, STATE, ROWS, in_flight))
        channels.append((SlotConsumer(requests, Silent()), SlotProducer(answers, Silent())))
    return ends, ChannelInferenceServer(channels, OBSERVATION, STATE, ANSWER), channels


def test_nothing_leaves_before_flush() -> None:
    (client,), server, _ = joined(1, 2)
    number = client.post_request(*request(1, 2))
    assert client.buffered == 1
    assert server.poll_requests(100) == []
    assert not client.is_ready(number)
    client.flush()
    assert client.buffered == 0
    assert [r.number for r in server.poll_requests(100)] == [number]


def test_requests_of_many_clients_make_one_batch() -> None:
    clients, server, _ = joined(3, 2)
    numbers = [client.post_request(*request(i, 1 + i)) for i, client in enumerate(clients)]
    for client in clients:
        client.flush()
    batch = server.poll_requests(100)
    assert [(r.client, r.rows) for r in batch] == [(0, 1), (1, 2), (2, 3)]
    server.respond(batch, echo(batch), 7, 3)
    for i, (client, number) in enumerate(zip(clients, numbers, strict=True)):
        assert client.is_ready(number)
        answer = client.consume_result(number)
        check(answer, i, 1 + i, 7)
        assert answer.policy == 3


def test_a_batch_is_bounded_and_clients_take_turns() -> None:
    clients, server, _ = joined(3, 2)
    for i, client in enumerate(clients):
        client.post_request(*request(i, 2))
        client.flush()
    firsts = []
    for _ in clients:
        (only,) = server.poll_requests(1)  # one request at least
        firsts.append(only.client)
        server.respond([only], echo([only]), 0, 0)
        clients[only.client].post_request(*request(9, 2))
        clients[only.client].flush()
    assert sorted(firsts) == [0, 1, 2]


def test_a_request_that_does_not_fit_is_the_next_batch_s() -> None:
    clients, server, _ = joined(2, 3)
    posted = {
        (c, clients[c].post_request(*request(10 * c + i, rows))): (10 * c + i, rows)
        for c in (0, 1)
        for i, rows in enumerate((3, 4, 1))
    }
    for client in clients:
        client.flush()
    for _ in range(8):
        if batch := server.poll_requests(5):
            assert len(batch) == 1 or sum(r.rows for r in batch) <= 5
            server.respond(batch, echo(batch), 0, 0)
            for r in batch:
                assert clients[r.client].is_ready(r.number)
                check(clients[r.client].consume_result(r.number), *posted.pop((r.client, r.number)))
    assert not posted


def test_an_answer_is_consumed_once() -> None:
    (client,), server, _ = joined(1, 2)
    number = client.post_request(*request(1, 2))
    with pytest.raises(KeyError):
        client.consume_result(number)
    client.flush()
    batch = server.poll_requests(100)
    server.respond(batch, echo(batch), 0, 0)
    with pytest.raises(KeyError):
        client.consume_result(number + 1)
    assert client.is_ready(number)
    client.consume_result(number)
    assert not client.is_ready(number)
    with pytest.raises(KeyError):
        client.consume_result(number)


def test_an_answer_that_comes_twice_is_dropped() -> None:
    """And does not give back the slot of the first, which may still be read."""
    (client,), server, channels = joined(1, 2)
    first, second = client.post_request(*request(1, 3)), client.post_request(*request(2, 3))
    client.flush()
    batch = server.poll_requests(100)
    for _ in range(2):
        server.respond(batch[:1], echo(batch[:1]), 0, 0)
    assert client.is_ready(first)
    assert not client.is_ready(second)  # looks for answers again
    assert channels[0][1].reserve() is not None
    for _ in range(2):
        slot = channels[0][1].reserve()
        if slot is not None:
            poison(slot)
            slot["header"][:] = 99, 3, 0, 0  # late: nobody asks for it any more
            channels[0][1].commit()
    assert not client.is_ready(second)
    check(client.consume_result(first), 1, 3)
    with pytest.raises(KeyError):
        client.consume_result(first)
    assert not client.is_ready(99)
    server.respond(batch[1:], echo(batch[1:]), 0, 0)
    assert client.is_ready(second)
    check(client.consume_result(second), 2, 3)


def test_a_response_to_a_request_that_was_asked_again_is_delivered_once() -> None:
    (client,), server, _ = joined(1, 2)
    first = client.post_request(*request(1, 2))
    client.ask_again(first)  # not even sent
    client.flush()
    client.ask_again(first)
    client.ask_again(first)  # once more at a time
    assert client.buffered == 1
    client.flush()
    both = server.poll_requests(100)
    assert [r.number for r in both] == [first, first]
    server.respond(both[:1], echo(both[:1]), 1, 0)
    assert client.is_ready(first)
    check(client.consume_result(first), 1, 2, 1)
    client.ask_again(first)  # nobody waits for it any more
    assert client.buffered == 0
    second = client.post_request(*request(2, 2))
    client.flush()
    server.respond(both[1:], {"action": np.full(2, -5), "state.h": np.full(2, -5)}, 2, 0)
    assert not client.is_ready(first) and not client.is_ready(second)
    batch = server.poll_requests(100)
    server.respond(batch, echo(batch), 3, 0)
    assert client.is_ready(second)
    check(client.consume_result(second), 2, 2, 3)


def test_an_answer_that_is_written_where_it_is_read_is_not_copied() -> None:
    """One that a policy has put in place of it is."""
    (client,), server, _ = joined(1, 2)
    for identity in range(6):
        number = client.post_request(*request(identity, 3))
        client.flush()
        (asked,) = server.poll_requests(100)
        place = server.place(asked)
        assert len(place["action"]) == ROWS
        answers, own = echo([asked]), place["action"] if identity % 2 else np.empty(3, np.int64)
        own[:3] = answers["action"]
        place["action"], place["state.h"][:3] = own, answers["state.h"]
        server.respond([asked], place, 5, 1)
        assert client.is_ready(number)
        answer = client.consume_result(number)
        check(answer, identity, 3, 5)
        assert np.shares_memory(answer.fields["action"], own) == bool(identity % 2)


def test_flags_of_an_earlier_request_in_the_slot_do_not_count() -> None:
    (client,), server, _ = joined(1, 1)
    for flags in (True, False, np.array([True, False]), False, True, np.array([False, False])):
        number = client.post_request(*request(1, 2)[:2], flags)
        client.flush()
        (asked,) = server.poll_requests(100)
        assert (np.broadcast_to(asked.deterministic, 2) == flags).all()
        server.respond([asked], {"action": np.zeros(2), "state.h": np.zeros(2)}, 0, 0)
        assert client.is_ready(number)
        client.consume_result(number)


def test_who_is_answered_in_time_does_not_ask_again() -> None:
    (client,), server, _ = joined(1, 2)
    number = client.post_request(*request(1, 2))
    client.flush()
    batch = server.poll_requests(100)
    client.ask_again(number)
    server.respond(batch, echo(batch), 0, 0)
    assert client.is_ready(number) and client.buffered == 0
    client.flush()
    assert server.poll_requests(100) == []


def test_a_server_takes_no_request_whose_answer_would_find_no_room() -> None:
    """However often a client asks, and however late it reads: nothing fails, and nothing
    else waits."""
    (client, other), server, _ = joined(2, 1)
    number = client.post_request(*request(1, 1))
    taken = []
    for _ in range(5):
        client.flush()
        client.ask_again(number)
        taken += server.poll_requests(100)
    assert len(taken) == 2  # two slots for answers
    server.respond(taken, echo(taken), 0, 0)
    client.flush()
    assert server.poll_requests(100) == []  # it asks once more, but both are full
    another = other.post_request(*request(2, 1))
    other.flush()
    batch = server.poll_requests(100)
    assert [r.client for r in batch] == [1]
    server.respond(batch, echo(batch), 0, 0)
    assert other.is_ready(another)
    assert client.is_ready(number)
    check(client.consume_result(number), 1, 1)
    client.flush()
    late = server.poll_requests(100)
    assert late and all(r.number == number for r in late)
    server.respond(late, echo(late), 0, 0)
    assert not client.is_ready(number)


def test_a_request_that_is_answered_twice_makes_no_room_for_more() -> None:
    (client,), server, _ = joined(1, 1)
    number = client.post_request(*request(1, 1))
    client.flush()
    batch = server.poll_requests(100)
    for _ in range(2):
        server.respond(batch, echo(batch), 0, 0)
    assert client.is_ready(number)
    client.consume_result(number)
    number = client.post_request(*request(2, 1))
    taken = []
    for turn in range(3):
        client.flush()
        client.ask_again(number)
        taken += server.poll_requests(100)
        if turn == 1:
            server.respond(taken[:1], echo(taken[:1]), 0, 0)
    assert len(taken) == 2  # the third would find no room beside the second
    server.respond(taken[1:], echo(taken[1:]), 0, 0)
    assert client.is_ready(number)
    check(client.consume_result(number), 2, 1)


def test_a_stale_answer_in_a_slot_that_is_used_again_reaches_nobody() -> None:
    (client,), server, _ = joined(1, 2)

    def ask(identity: int) -> int:
        number = client.post_request(*request(identity, 2))
        client.flush()
        return number

    first = ask(1)
    client.ask_again(first)
    client.flush()
    in_time, late = server.poll_requests(100)
    server.respond([in_time], echo([in_time]), 0, 0)
    assert client.is_ready(first)
    check(client.consume_result(first), 1, 2)
    for identity in (2, 3):
        number = ask(identity)
        batch = server.poll_requests(100)
        server.respond(batch, echo(batch), 0, 0)
        assert client.is_ready(number)
        check(client.consume_result(number), identity, 2)
    number = ask(4)
    batch = server.poll_requests(100)
    server.respond([late], echo([late]), 0, 0)  # now, where the next would be expected
    assert not client.is_ready(number)
    server.respond(batch, echo(batch), 0, 0)
    assert client.is_ready(number)
    check(client.consume_result(number), 4, 2)


def test_a_client_asks_another_server_for_what_the_dead_one_has_not_answered() -> None:
    """What it has answered counts, nothing is answered twice, and nothing leaves before
    its flush."""
    (client,), server, _ = joined(1, 5)
    requests, answers = LocalSegment(), LocalSegment()
    heir = ChannelInferenceServer([], OBSERVATION, STATE, ANSWER)
    heir.add(SlotConsumer(requests, Silent()), SlotProducer(answers, Silent()))
    numbers = []
    for identity in range(1, 5):
        numbers.append(client.post_request(*request(identity, 2)))
        client.flush()
    first, *taken = server.poll_requests(6)  # all but the last one
    server.respond([first], echo([first]), 1, 0)
    assert client.is_ready(numbers[0])  # taken, and not read yet
    server.respond(taken[:1], echo(taken[:1]), 1, 0)  # and not taken
    held = client.post_request(*request(5, 2))
    client.ask_again(numbers[3])
    client.turn_to(SlotProducer(requests, Silent()), SlotConsumer(answers, Silent()))
    assert client.buffered == 1
    for number, identity in zip(numbers[:2], (1, 2), strict=True):
        assert client.is_ready(number)
        check(client.consume_result(number), identity, 2, 1)
    server.respond(taken[1:], echo(taken[1:]), 1, 0)  # it was not dead: nobody hears it
    assert not client.is_ready(numbers[2])
    again = heir.poll_requests(100)
    assert [r.number for r in again] == numbers[2:]
    heir.respond(again, echo(again), 2, 0)
    client.flush()
    last = heir.poll_requests(100)
    assert [r.number for r in last] == [held]
    heir.respond(last, echo(last), 3, 0)
    for number, identity, version in ((numbers[2], 3, 2), (numbers[3], 4, 2), (held, 5, 3)):
        assert client.is_ready(number)
        check(client.consume_result(number), identity, 2, version)
    for identity in range(6, 26):  # round all slots
        number = client.post_request(*request(identity, 2))
        client.flush()
        batch = heir.poll_requests(100)
        heir.respond(batch, echo(batch), 4, 0)
        assert client.is_ready(number)
        check(client.consume_result(number), identity, 2, 4)


def test_what_a_life_before_had_asked_is_no_answer_for_the_next_one() -> None:
    requests, again, answers = LocalSegment(), LocalSegment(), LocalSegment()
    taking = SlotConsumer(requests, Silent())
    server = ChannelInferenceServer([(taking, SlotProducer(answers, Silent()))], OBSERVATION, STATE, ANSWER)
    numbers = list[int]()
    for life, segment in enumerate((requests, again)):
        if life:
            assert taking.attach()
            taking.renew(segment)
        asking = SlotProducer(segment, Silent()), SlotConsumer(answers, Silent())
        client = ChannelInferenceClient(*asking, OBSERVATION, STATE, ROWS, 2, life)
        numbers.append(client.post_request(*request(7 + life, 2 + life)))
        client.flush()
    while batch := server.poll_requests(1):
        server.respond(batch, echo(batch), 0, 0)
    assert not client.is_ready(numbers[0]) and client.is_ready(numbers[1])
    check(client.consume_result(numbers[1]), 8, 3)


def test_an_answer_of_another_size_is_an_error() -> None:
    (client,), server, _ = joined(1, 2)
    number = client.post_request(*request(1, 3))
    client.flush()
    (asked,) = server.poll_requests(100)
    asked.rows = 2
    server.respond([asked], {"action": np.zeros(2), "state.h": np.zeros(2)}, 0, 0)
    with pytest.raises(SchemaError, match="of 3 rows was answered with 2"):
        client.is_ready(number)


@pytest.mark.parametrize("rows", [0, -1, ROWS + 1, 1 << 40])
def test_a_request_that_lies_about_its_rows_is_an_error(rows: int) -> None:
    (client,), server, channels = joined(1, 2)
    client.post_request(*request(1, 2))
    client.flush()
    assert channels[0][0].attach()
    channels[0][0]._views[0]["header"][1] = rows
    with pytest.raises(SchemaError, match="rows in a slot of 4"):
        server.poll_requests(100)


@pytest.mark.parametrize(
    ("observation", "state"),
    [
        ({"obs": Field((3,), "float32")}, STATE),
        (OBSERVATION, {"state.h": Field((2,), "float32")}),
        (OBSERVATION, {}),
    ],
    ids=["observation", "a state of another shape", "no state"],
)
def test_a_client_with_other_rows_is_refused(observation: dict[str, Field], state: dict[str, Field]) -> None:
    segment = LocalSegment()
    ChannelInferenceClient(
        SlotProducer(segment, Silent()), SlotConsumer(LocalSegment(), Silent()), observation, state, ROWS, 1
    )
    server = ChannelInferenceServer(
        [(SlotConsumer(segment, Silent()), SlotProducer(LocalSegment(), Silent()))],
        OBSERVATION,
        STATE,
        ANSWER,
    )
    with pytest.raises(SchemaError, match="the policy needs"):
        server.poll_requests(1)


@pytest.mark.parametrize("in_flight", [2, 3])
def test_a_request_that_is_answered_late_keeps_its_slot(in_flight: int) -> None:
    (client,), server, _ = joined(1, in_flight)
    late = client.post_request(*request(1, 2))
    client.flush()
    (held,) = server.poll_requests(100)
    identity = 1
    for _ in range(10):
        if client.buffered == 0:
            identity += 1
            number = client.post_request(*request(identity, 2))
            client.flush()
        if batch := server.poll_requests(100):
            server.respond(batch, echo(batch), 0, 0)
            assert client.is_ready(number)
            check(client.consume_result(number), identity, 2)
        assert echo([held])["action"].tolist() == [10, 11]
    server.respond([held], echo([held]), 0, 0)
    assert client.is_ready(late)
    check(client.consume_result(late), 1, 2)


def test_an_answer_that_nobody_fetches_holds_nobody_up() -> None:
    """It is copied out of its slot when all others lie behind it."""
    (client,), server, _ = joined(1, 2)
    left = client.post_request(*request(1, 1))
    client.flush()
    for n in range(10):
        other = client.post_request(*request(2 + n, 1))
        client.flush()
        batch = server.poll_requests(100)
        server.respond(batch, echo(batch), 0, 0)
        assert client.is_ready(other)
        check(client.consume_result(other), 2 + n, 1)
    assert client.buffered == 0
    assert client.is_ready(left)
    check(client.consume_result(left), 1, 1)


@dataclass
class Side:
    client: ChannelInferenceClient
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # number → identity, rows
    reading: list[tuple[Answer, int, int]] = field(default_factory=list)


MOVES = st.tuples(
    st.sampled_from(["post", "flush", "poll", "respond", "newest", "again", "consume", "consume"]),
    st.integers(0, 1),
    st.integers(1, ROWS),
    st.integers(0, 5),
)


@settings(max_examples=150)
@example(
    [(move, 0, 1, 0) for move in ("post", "flush", "poll", "respond", "consume", "flush", "again", "again")],
    1,
)
@given(st.lists(MOVES, max_size=120), st.integers(1, 3))
def test_any_interleaving_matches_answers_to_requests(
    moves: list[tuple[str, int, int, int]], in_flight: int
) -> None:
    """Requests carry their identity, answers echo it. Batches are answered in any order,
    some twice."""
    clients, server, channels = joined(2, in_flight)
    sides = [Side(client) for client in clients]
    polled: list[Requests] = []
    answered: list[Requests] = []
    identity = version = 0
    for move, which, rows, pick in moves:
        side = sides[which]
        if move == "post" and len(side.waiting) < in_flight:
            identity += 1
            side.reading.clear()  # valid until the next post
            side.waiting[side.client.post_request(*request(identity, rows))] = identity, rows
        elif move == "flush":
            side.client.flush()
        elif move == "poll":
            polled += server.poll_requests(rows * 3)
        elif move in ("respond", "newest") and polled:
            one = polled.pop(-1 if move == "newest" else pick % len(polled))
            version += 1
            answers = echo([one])
            if move == "newest":  # in its place
                answers, own = server.place(one), answers
                for name, array in answers.items():
                    array[: one.rows] = own[name]
            server.respond([one], answers, version, 0)
            one.observation, one.state = {}, {}
            answered.append(one)
        elif move == "again" and answered:
            # a repeated answer, with nonsense in it, while there is room for it
            one = answered[pick % len(answered)]
            answers = channels[one.client][1]
            if answers.free() > len(sides[one.client].waiting):
                server.respond([one], {"action": np.full(ROWS, -5), "state.h": np.full(ROWS, -5)}, -5, 0)
        elif move == "consume" and side.waiting:
            number = list(side.waiting)[pick % len(side.waiting)]
            if side.client.is_ready(number):
                asked, of = side.waiting.pop(number)
                answer = side.client.consume_result(number)
                check(answer, asked, of)
                assert 0 < answer.version <= version
                side.reading.append((answer, asked, of))
        for requests in polled:
            echo([requests])  # still what was asked
        for each in sides:
            for answer, asked, of in each.reading:
                check(answer, asked, of)
    for _ in range(20 * in_flight):  # everything that was posted is answered in the end
        for side in sides:
            side.client.flush()
        polled += server.poll_requests(1000)
        if polled:
            server.respond(polled, echo(polled), version, 0)
            polled = []
        for side in sides:
            for number in [n for n in side.waiting if side.client.is_ready(n)]:
                check(side.client.consume_result(number), *side.waiting.pop(number))
    assert not sides[0].waiting and not sides[1].waiting


# ---- inline ----------------------------------------------------------------------------


class Echo(Policy):
    def __init__(self) -> None:
        self.calls: list[tuple[int, object]] = []
        self.version = 3
        self.w = np.zeros(1)

    def act(self, observation, state, deterministic, out) -> None:
        rows = len(observation["obs"])
        numbers = observation["obs"][:, 0].astype(np.int64)
        assert (observation["obs"][:, 0] == state["state.h"]).all()
        flags = np.broadcast_to(deterministic, rows)
        self.calls.append((rows, deterministic))
        assert (flags == (numbers % 2 == 1)).all() or not np.ndim(deterministic)
        out["action"][:rows] = numbers
        out["state.h"][:rows] = numbers + 0.5

    def parameters(self):
        return {"w": self.w}

    def load(self, parameters, version) -> None:
        self.w[:] = parameters["w"]
        self.version = version


def inline(rows: int = 16) -> tuple[InlineInferenceClient, Echo, SlotWriter]:
    cell = LocalSegment()
    policy = Echo()
    client = InlineInferenceClient(
        policy, 2, ParameterSubscriber(SlotReader(cell)), ANSWER, STATE, OBSERVATION, rows, Clock()
    )
    return client, policy, SlotWriter(cell, [])


def test_inline_nothing_is_computed_before_flush() -> None:
    client, policy, _ = inline()
    client.flush()
    number = client.post_request(*request(1, 4))
    assert client.buffered == 1 and not client.is_ready(number) and not policy.calls
    client.flush()
    assert client.buffered == 0 and client.is_ready(number) and len(policy.calls) == 1
    answer = client.consume_result(number)
    check(answer, 1, 4, 3)
    assert answer.policy == 2
    with pytest.raises(KeyError):
        client.consume_result(number)


def test_inline_requests_are_joined_into_one_batch() -> None:
    client, policy, _ = inline()
    posted = {client.post_request(*request(i, 1 + i)): (i, 1 + i) for i in range(4)}
    client.flush()
    assert [rows for rows, _ in policy.calls] == [10]
    for number in reversed(posted):
        check(client.consume_result(number), *posted[number])


def test_inline_flags_are_each_request_s_own() -> None:
    client, policy, _ = inline()
    client.post_request(*request(1, 2)[:2], True)
    client.post_request(*request(2, 3)[:2], False)
    policy_flags: list[np.ndarray] = []
    policy.act = lambda o, s, d, out: policy_flags.append(np.array(d))  # type: ignore[method-assign]
    client.flush()
    assert policy_flags[0].tolist() == [True, True, False, False, False]


def test_inline_takes_newer_parameters_when_told() -> None:
    client, policy, writer = inline()
    client.refresh()
    assert policy.version == 3
    writer.offer({"w": Field((1,), "float64")})
    for version, after in ((1, 3), (4, 4), (9, 9)):
        writer.write({"w": np.full(1, version)}, version)
        client.refresh()
        assert policy.version == after
    assert policy.w[0] == 9
    number = client.post_request(*request(1, 1))
    client.flush()
    assert client.consume_result(number).version == 9


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "flush", "consume"]), st.integers(1, 4), st.integers(0, 5)),
        max_size=80,
    )
)
def test_inline_buffers_are_not_rewritten_before_they_are_read(moves: list[tuple[str, int, int]]) -> None:
    client, _, _ = inline()
    waiting: dict[int, tuple[int, int]] = {}
    identity = 0
    for move, rows, pick in moves:
        if move == "post" and sum(r for _, r in waiting.values()) + rows <= 16:
            identity += 1
            waiting[client.post_request(*request(identity, rows))] = identity, rows
        elif move == "flush":
            client.flush()
        elif move == "consume" and waiting:
            number = list(waiting)[pick % len(waiting)]
            if client.is_ready(number):
                check(client.consume_result(number), *waiting.pop(number))
    assert len(client._free) <= 16
