"""What the doctor proposes for a server: how many slots, an evaluation's session considered, and which deadlines."""

import re
import time

import msgspec
import pytest
from tests.envs.rest.served import Ledger, client, serving

from tidemill.envs.rest import doctor
from tidemill.envs.rest.doctor import _slots, examine


class Slow(Ledger):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


def found(server, **settings):
    return {finding.name: finding for finding in examine(client(server, **settings), seconds=1)}


def sessions(finding):
    return [int(count) for count in re.findall(r"(\d+): [\d,.]+", finding.message.partition(";")[0])]


def test_as_many_sessions_as_the_server_says_it_takes_are_tried():
    with serving(limit=3) as server:
        said = found(server)
    assert sessions(said["at a time"]) == [1, 2, 3] and said["at a time"].level == "ok"


def test_a_limit_that_the_server_does_not_tell_is_found():
    with serving(limit=3) as server:
        describe = server.sessions.describe
        server.sessions.describe = lambda most: msgspec.structs.replace(describe(most), max_sessions=0)
        said = found(server, deadline=3.0)
        assert server.sessions.counts().sessions == 0
    tried = said["at a time"]
    assert tried.level == "warn" and sessions(tried) == [1, 2, 3] and "all 3 sessions are taken" in tried.message
    assert tried.cure == "stay at 3 sessions, evaluations included"


def test_a_server_that_is_gone_before_the_end_is_no_server_of_few_sessions(monkeypatch):
    rates = iter([(100.0, 0.01, "", 1), (0.0, 0.0, "nothing answers", 0), (0.0, 0.0, "nothing answers", 0)])
    monkeypatch.setattr(doctor, "_rate", lambda host, count, seconds: next(rates))
    with serving(limit=4) as server:
        said = found(server)
    assert said["at a time"].level == "fail" and "the server answers no more" in said["at a time"].message and "proposal" not in said


def test_deadlines_are_several_times_the_slowest_call():
    with serving(Slow, limit=2) as server:
        proposal = found(server)["proposal"].message
    attempt, deadline = (float(re.search(rf"{name}=([\d.]+)", proposal)[1]) for name in ("attempt", "deadline"))
    assert attempt >= 5 * 0.3 and deadline == max(5, 3 * attempt)


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
