"""What the doctor proposes for a server: how many slots, an evaluation's session
considered, and which deadlines."""

import dataclasses
import itertools
import re
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
from tests.remote.served import Ledger, answering, client, serving

from tidemill.remote import doctor
from tidemill.remote.doctor import _slots, examine
from tidemill.remote.rest_config import Rest
from tidemill.testing.check_env import Finding


class Slow(Ledger):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


@pytest.fixture
def quick(monkeypatch):
    """No call counts as slow that was kept waiting on a busy machine."""
    measure = doctor._Latency.__init__

    def measured(latency, *given):
        measure(latency, *given)
        latency.slowest = 1e-3

    monkeypatch.setattr(doctor._Latency, "__init__", measured)


def found(server, **settings):
    return {finding.name: finding for finding in examine(client(server, **settings), seconds=1)}


def sessions(finding):
    return [int(count) for count in re.findall(r"(\d+): [\d,.]+", finding.message.partition(";")[0])]


@pytest.mark.usefixtures("quick")
def test_as_many_sessions_as_the_server_says_it_takes_are_tried():
    with serving(limit=3) as server:
        said = found(server)
    assert sessions(said["at a time"]) == [1, 2, 3] and said["at a time"].level == "ok"


@pytest.mark.usefixtures("quick")
def test_a_limit_that_the_server_does_not_tell_is_found(monkeypatch):
    rate = doctor._rate

    def rate_of(host, count, seconds):
        """Who gets no session waits until its deadline."""
        patient, host.settings = (
            host.settings,
            dataclasses.replace(host.settings, deadline_s=8.0 if count > 3 else 120.0),
        )
        try:
            return rate(host, count, seconds)
        finally:
            host.settings = patient

    monkeypatch.setattr(doctor, "_rate", rate_of)
    with serving(limit=3) as server:
        describe = server.sessions.describe
        server.sessions.describe = lambda most: msgspec.structs.replace(describe(most), max_sessions=0)
        said = found(server)
        assert server.sessions.counts().sessions == 0
    tried = said["at a time"]
    assert (
        tried.level == "warn" and sessions(tried) == [1, 2, 3] and "all 3 sessions are taken" in tried.message
    )
    assert tried.cure == "stay at 3 sessions, evaluations included"


def test_a_server_that_is_gone_before_the_end_is_no_server_of_few_sessions(monkeypatch):
    rates = iter([(100.0, 0.01, "", 1), (0.0, 0.0, "nothing answers", 0), (0.0, 0.0, "nothing answers", 0)])
    monkeypatch.setattr(doctor, "_rate", lambda host, count, seconds: next(rates))
    with serving(limit=4) as server:
        said = found(server)
    assert (
        said["at a time"].level == "fail"
        and "the server answers no more" in said["at a time"].message
        and "proposal" not in said
    )


def test_a_deadline_is_proposed_where_the_slowest_call_is_near_to_what_resets_may_take():
    finding = Finding("latency", "ok", "")
    for slow, given in ((0.3, ""), (11.0, ""), (110.0, ", deadline_s=500")):
        latency = SimpleNamespace(finding=finding, slowest=slow, steps=(slow, slow, slow))
        with serving(limit=1) as server:
            (*_, proposal) = doctor._concurrency(client(server).host(), latency, 0.01, 1)
        assert proposal.message.endswith(f"Rest(url=…{given})")


@pytest.mark.parametrize("field", ["reward", "terminated", "truncated"])
def test_a_field_that_an_answer_lacks_is_named_before_anything_else_is_tried(field):
    with serving() as server:
        answering(server, "step", lambda said: said.pop(field))
        *_, last = found(server).values()
    assert (last.name, last.level) == ("replies", "fail") and f"no {field}" in last.message


def test_what_is_slower_than_the_deadline_is_told_to_look_again_with_another(monkeypatch):
    with serving(Slow, limit=2) as server:
        host = client(server).host()  # it has said what it is
        host.settings = dataclasses.replace(host.settings, deadline_s=0.2, attempt_s=0.1)
        host.terms = dataclasses.replace(host.terms, attempt_s=0.1)
        monkeypatch.setattr(Rest, "host", lambda _: host)
        said = found(server, deadline_s=0.2, attempt_s=0.1)
    assert (
        said["calls"].level == "fail"
        and "(deadline_s)" in said["calls"].message
        and "--deadline 2" in said["calls"].cure
    )


def test_a_server_whose_calls_take_long_is_tried_with_fewer_counts_of_sessions():
    with serving(Slow, limit=8) as server:
        said = found(server)
    assert sessions(said["at a time"]) == [1, 8]
    assert said["repeats"].level == said["replies"].level == "ok"


class SlowToReset(Ledger):
    """Takes longer than each of two sessions has, one after the other."""

    def reset(self, *, seed=None, options=None):
        time.sleep(0.15)
        return super().reset(seed=seed)


def test_a_server_of_one_session_is_not_blamed_for_long_resets():
    with serving(SlowToReset, limit=1) as server:
        said = found(server)
    assert said["determinism"].level == "ok", said["determinism"].message


def taking_no_turns(sessions):
    """Have calls of one session run at the same time, as a server without a lock for each
    session does."""
    whole = sessions._taken

    @contextmanager
    def taken(name, caller, opens):
        with whole(name, caller, opens) as session:
            session.lock.release()
            try:
                yield session
            finally:
                session.lock.acquire()

    sessions._taken = taken


class Meeting(Ledger):
    """The second step of all and the third are taken at the same time."""

    def __init__(self, steps, both):
        super().__init__(length=100)
        self.steps, self.both = steps, both

    def step(self, action):
        if next(self.steps) in (2, 3):
            self.both.wait(60)
        return super().step(action)


def test_a_server_that_applies_a_repeat_while_the_first_call_is_under_way_is_found_out():
    steps, both = itertools.count(1), threading.Barrier(2)
    with serving(lambda: Meeting(steps, both)) as server:
        taking_no_turns(server.sessions)
        said = found(server)
    assert said["repeats"].level == "fail" and "while the first was under way" in said["repeats"].message


def test_a_server_that_resets_twice_is_found_out():
    with serving() as server:
        again = server.sessions._again

        def anew(reply):
            if reply.step == 0:
                observation = msgspec.structs.replace(reply.observation, data=bytes(12))
                return msgspec.structs.replace(reply, observation=observation)
            return again(reply)

        server.sessions._again = anew
        said = found(server)
    assert said["repeats"].level == "fail" and "a reset" in said["repeats"].message


@pytest.mark.parametrize(
    ("best", "limit", "most", "said"),
    [
        (100, 100, 128, "100 slots, or 99 with evaluation_steps"),
        (64, 64, 64, "64 slots, or 63 with evaluation_steps"),
        (1, 1, 64, "1 slot, and no evaluation_steps: there is no session for them"),
        (32, 100, 64, "32 slots"),
        (64, 0, 64, "64 slots (more may help still: try --most 256)"),
        (64, 100, 64, "64 slots (more may help still: try --most 256)"),
    ],
)
def test_slots_leave_a_session_for_an_evaluation(best, limit, most, said):
    assert _slots(best, limit, most) == said
