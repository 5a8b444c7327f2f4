"""No answer ever reaches another request: the inference stream over the shared transport,
with what lies between dropping, delaying, repeating and reordering requests and answers.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.streams.echo import (
    ANSWER,
    OBSERVATION,
    ROWS,
    STATE,
    check,
    descriptors,
    echo,
    receiving,
    request,
    sending,
)

from tidemill.api.stream import Answer, Requests
from tidemill.core.schema import poison
from tidemill.streams.inference import ChannelInferenceClient, ChannelInferenceServer
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer

CLIENTS = 2
KEPT = 12  # messages that a road has in hand at most


class Road:
    """One direction between one client and the server: what was sent lies here until it
    is carried on: once, never, or again and again."""

    def __init__(self, taken: SlotConsumer, given: SlotProducer, kept: int) -> None:
        self._taken, self._given, self.kept = taken, given, kept
        self._offered = False
        self.messages: list[dict[str, Any]] = []

    def collect(self) -> bool:
        """Take what was sent. False while nobody has made this road's slots."""
        if not self._offered:
            if not self._taken.attach():
                return False
            self._given.offer(self._taken.schema, (), self._taken.slots)
            self._offered = True
        while len(self.messages) < self.kept and (slot := self._taken.take()) is not None:
            self.messages.append({name: array.copy() for name, array in slot.items()})
            poison(slot)
            self._taken.release()
        return True

    def carry(self, pick: int, copies: int, keep: bool = False) -> None:
        """Carry one message on, so many times; `keep` it for later all the same."""
        if not self.collect() or not self.messages:
            return
        pick %= len(self.messages)
        for _ in range(copies):
            slot = self._given.reserve()
            if slot is None:
                return  # it stays here
            for name, array in self.messages[pick].items():
                slot[name][...] = array
            self._given.commit()
        if not keep:
            del self.messages[pick]

    def carry_all(self) -> None:
        for _ in range(len(self.messages) + self.kept):
            self.carry(0, 1)

    def is_empty(self, held: int = 0) -> bool:
        """Nothing is under way, and so many slots wait for what is being read."""
        return (
            not self.messages
            and self._taken.waiting() == 0
            and self._given.free() == self._taken.slots - held
        )


class Side:
    """A client and what it waits for."""

    def __init__(self, client: ChannelInferenceClient, there: Road, back: Road, in_flight: int) -> None:
        self.client, self.there, self.back, self.in_flight = client, there, back, in_flight
        self.waiting: dict[int, tuple[int, int]] = {}  # number → identity, rows
        self.reading: list[tuple[Answer, int, int]] = []
        self.consumed = 0

    def post(self, identity: int, rows: int) -> None:
        if len(self.waiting) < self.in_flight:
            self.reading.clear()  # valid until the next post
            self.waiting[self.client.post_request(*request(identity, rows))] = identity, rows

    def consume(self, pick: int) -> None:
        if not self.waiting:
            return
        number = list(self.waiting)[pick % len(self.waiting)]
        if self.client.is_ready(number):
            identity, rows = self.waiting.pop(number)
            answer = self.client.consume_result(number)
            check(answer, identity, rows)
            self.reading.append((answer, identity, rows))
            self.consumed += 1
            with pytest.raises(KeyError):
                self.client.consume_result(number)


class Network:
    """Clients and a server, each behind memfds, and the roads between them."""

    def __init__(self, memory: list[int], bell: int, in_flight: int, kept: int) -> None:
        free = iter(memory)
        self.sides, pairs = [], []
        for _ in range(CLIENTS):
            asked, received, answered, got = (next(free) for _ in range(4))
            client = ChannelInferenceClient(
                sending(asked, bell), receiving(got, bell), OBSERVATION, STATE, ROWS, in_flight
            )
            there = Road(receiving(asked, bell), sending(received, bell), kept)
            back = Road(receiving(answered, bell), sending(got, bell), kept)
            self.sides.append(Side(client, there, back, in_flight))
            pairs.append((receiving(received, bell), sending(answered, bell)))
        self.server = ChannelInferenceServer(pairs, OBSERVATION, STATE, ANSWER)
        self.polled: list[Requests] = []
        self.identity = self.version = 0

    def post(self, which: int, rows: int) -> None:
        self.identity += 1
        self.sides[which].post(self.identity, rows)

    def poll(self, most_rows: int) -> None:
        self.polled += self.server.poll_requests(most_rows)

    def respond(self, pick: int, count: int) -> None:
        """Answer some, from `pick` on."""
        if self.polled:
            pick %= len(self.polled)
            some = self.polled[pick : pick + count]
            del self.polled[pick : pick + count]
            self.version += 1
            self.server.respond(some, echo(some), self.version, 0)

    def check(self) -> None:
        """What is being read is still what was answered, what was polled still what was
        asked, and nothing grows."""
        for requests in self.polled:
            echo([requests])
        for side in self.sides:
            for answer, identity, rows in side.reading:
                check(answer, identity, rows)
            client, slots = side.client, 2 * side.in_flight
            assert len(client._posted) <= side.in_flight and len(client._pending) <= side.in_flight
            assert len(client._taken) <= slots and len(client._arrived) <= side.in_flight
        for held in self.server._requests:
            assert len(held) <= 2 * self.sides[0].in_flight

    def heal(self) -> None:
        """From now on nothing goes wrong: whatever was lost is asked for again,
        everything is answered once, and every slot that is not being read is free again.
        """
        for _ in range(100):
            for side in self.sides:
                for number in side.waiting:
                    side.client.ask_again(number)
                side.client.flush()
                side.there.carry_all()
            self.poll(1000)
            self.respond(0, len(self.polled))
            for side in self.sides:
                side.back.carry_all()
                for _ in range(len(side.waiting)):
                    side.consume(0)
            if not any(side.waiting for side in self.sides):
                break
        assert not any(side.waiting for side in self.sides)
        for _ in range(30):  # what is still under way are repetitions
            for side in self.sides:
                side.there.carry_all()
                assert not side.client.is_ready(0)
                side.client.flush()
            self.poll(1000)
            self.respond(0, len(self.polled))
            for side in self.sides:
                side.back.carry_all()
        for side, held in zip(self.sides, self.server._requests, strict=True):
            client = side.client
            assert not client._posted and not client._pending and not client._arrived and not held
            # The next post gives back what is being read, and what was taken after that.
            assert not client._taken or any(client._taken[0] is one for one in client._reading)
            assert side.there.is_empty() and side.back.is_empty(held=len(client._taken))


@contextmanager
def network(in_flight: int, kept: int = KEPT) -> Iterator[Network]:
    with descriptors(4 * CLIENTS, 1) as (memory, (bell,)):
        yield Network(memory, bell, in_flight, kept)


WHICH, PICK = st.integers(0, CLIENTS - 1), st.integers(0, KEPT)


class AnyFault(RuleBasedStateMachine):
    @initialize(in_flight=st.integers(1, 3), kept=st.sampled_from([1, KEPT]))
    def begin(self, in_flight: int, kept: int) -> None:
        self.stack = ExitStack()
        self.net = self.stack.enter_context(network(in_flight, kept))

    @rule(which=WHICH, rows=st.integers(1, ROWS))
    def post(self, which: int, rows: int) -> None:
        self.net.post(which, rows)
        self.net.sides[which].client.flush()

    @rule(which=WHICH, rows=st.integers(1, ROWS))
    def post_and_wait(self, which: int, rows: int) -> None:
        self.net.post(which, rows)

    @rule(which=WHICH)
    def flush(self, which: int) -> None:
        self.net.sides[which].client.flush()

    @precondition(lambda self: any(side.waiting for side in self.net.sides))
    @rule(which=WHICH, pick=PICK)
    def ask_again(self, which: int, pick: int) -> None:
        side = self.net.sides[which]
        if side.waiting:
            side.client.ask_again(list(side.waiting)[pick % len(side.waiting)])

    @rule(which=WHICH, pick=PICK, copies=st.integers(0, 2), keep=st.booleans())
    def carry_a_request(self, which: int, pick: int, copies: int, keep: bool) -> None:
        self.net.sides[which].there.carry(pick, copies, keep)

    @rule(which=WHICH, pick=PICK, copies=st.integers(0, 2), keep=st.booleans())
    def carry_an_answer(self, which: int, pick: int, copies: int, keep: bool) -> None:
        self.net.sides[which].back.carry(pick, copies, keep)

    @rule()
    def carry_everything(self) -> None:
        for side in self.net.sides:
            side.there.carry_all()
            side.back.carry_all()

    @rule(most_rows=st.integers(1, 3 * ROWS))
    def poll(self, most_rows: int) -> None:
        self.net.poll(most_rows)

    @precondition(lambda self: self.net.polled)
    @rule(pick=PICK, count=st.integers(1, 4))
    def respond(self, pick: int, count: int) -> None:
        self.net.respond(pick, count)

    @rule(which=WHICH, pick=PICK)
    def consume(self, which: int, pick: int) -> None:
        self.net.sides[which].consume(pick)

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        self.net.check()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            with self.stack:
                self.net.heal()


AnyFault.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestAnyFault = AnyFault.TestCase


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_it_goes_on_for_ever(in_flight: int) -> None:
    """Thousands of requests through a few slots, of which a sixth is lost, as many are
    repeated, and all come late and out of order."""
    rng = np.random.default_rng(in_flight)
    with network(in_flight) as net:
        for _ in range(6000):
            for which, side in enumerate(net.sides):
                net.post(which, int(rng.integers(1, ROWS + 1)))
                if side.waiting and rng.random() < 0.3:
                    side.client.ask_again(next(iter(side.waiting)))
                side.client.flush()
                for road in (side.there, side.back):
                    fate = rng.random()
                    road.carry(
                        int(rng.integers(KEPT)),
                        0 if fate < 0.15 else 2 if fate < 0.3 else 1,
                        keep=fate > 0.9 and len(road.messages) < KEPT // 2,
                    )
                side.consume(int(rng.integers(4)))
            net.poll(int(rng.integers(1, 3 * ROWS)))
            net.respond(int(rng.integers(8)), int(rng.integers(1, 4)))
        net.check()
        net.heal()
        assert min(side.consumed for side in net.sides) > 1500, [side.consumed for side in net.sides]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_faulty_policy_worker_in_another_process(seed: int) -> None:
    """It answers late, out of order, twice, and sometimes never; whoever hears nothing
    asks again."""
    in_flight, enough = 3, 1500
    with descriptors(2 * CLIENTS, 2) as (memory, (theirs, ours)):
        ends = [
            (sending(memory[2 * i], theirs), receiving(memory[2 * i + 1], theirs)) for i in range(CLIENTS)
        ]
        clients = [ChannelInferenceClient(*pair, OBSERVATION, STATE, ROWS, in_flight) for pair in ends]
        command = [
            sys.executable,
            str(Path(__file__).with_name("faulty_server.py")),
            *map(str, (seed, theirs, ours, *memory)),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
        }
        server = subprocess.Popen(
            command,
            pass_fds=[*memory, theirs, ours],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        bell = EventBell(ours)
        waiting: list[dict[int, tuple[int, int]]] = [{} for _ in clients]
        identity, consumed, asked_again = 0, [0] * CLIENTS, 0
        try:
            while min(consumed) < enough:
                moved = False
                for i, client in enumerate(clients):
                    while len(waiting[i]) < in_flight:
                        identity += 1
                        rows = 1 + identity % ROWS
                        waiting[i][client.post_request(*request(identity, rows))] = identity, rows
                    client.flush()
                    for number in [n for n in waiting[i] if client.is_ready(n)]:
                        check(client.consume_result(number), *waiting[i].pop(number))
                        consumed[i] += 1
                        moved = True
                if not moved and not bell.wait(0.01):
                    assert server.poll() is None, "the server is gone"
                    for client, numbers in zip(clients, waiting, strict=True):
                        for number in numbers:
                            client.ask_again(number)
                            asked_again += 1
            faults = server.communicate("", timeout=240)[0]
        finally:
            server.kill()
            server.wait()
        late, twice, lost = map(int, faults.split())
        assert min(late, twice, lost) > 20 and asked_again > 0
