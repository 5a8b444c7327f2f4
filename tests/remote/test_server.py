"""The reference server over real sockets: order, repeats, limits, and who may call."""

import itertools
import json
import math
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import gymnasium
import httpx
import msgspec
import numpy as np
import pytest
from tests.remote.served import Ledger, Script, applied, serving
from tests.run.watching import wait_until

from tidemill.core.errors import ConfigError
from tidemill.remote.fault_injection import Faults, FaultSampler
from tidemill.remote.server import Server
from tidemill.remote.server_sessions import Caller, RefusedCall, Sessions
from tidemill.remote.wire import ResetCall, SessionsCall, StepCall

# one: each makes an SSL context, which takes longer than all else here
HTTP = httpx.Client(verify=False, timeout=120)


def post(server, path, **body):
    # not on a connection that the server may just be closing as idle
    return HTTP.post(f"{server.url}/v1/{path}", json=body, headers={"connection": "close"})


def reset(server, session="s", episode=0, **more):
    return post(server, "reset", session=session, episode=episode, **{"seed": 1, **more})


def step(server, number, session="s", episode=0, action=1):
    return post(server, "step", session=session, episode=episode, step=number, action=action)


def test_it_says_what_it_is():
    with serving() as server:
        said = HTTP.get(f"{server.url}/v1/environment").json()
    assert (said["protocol"], said["version"], said["repeats"], said["environment"]) == (
        "tidemill-rest",
        1,
        "remembered",
        "Ledger",
    )
    assert said["action_space"] == {"type": "discrete", "n": 4, "start": 0}
    assert said["observation_space"] == {
        "type": "box",
        "shape": [3],
        "dtype": "float32",
        "low": [None],
        "high": [None],
    }


def test_a_call_that_is_sent_again_is_answered_the_same_and_applied_once():
    with serving() as server:
        assert reset(server).json() == reset(server).json()
        first, again = step(server, 1).json(), step(server, 1).json()
        assert first == again and first["step"] == 1 and first["reward"] == 11.0
        assert step(server, 2).json()["step"] == 2
        counts = server.sessions.counts()
    assert (counts.applied, counts.repeated, counts.resets, counts.opened) == (2, 2, 1, 1)


@pytest.mark.parametrize("number", [0, 2, 7, -1])
def test_a_step_out_of_order_is_refused_with_the_servers_own_count(number):
    with serving() as server:
        reset(server)
        said = step(server, number)
        assert (said.status_code, said.json()["error"], said.json()["episode"], said.json()["step"]) == (
            409,
            "out_of_order",
            0,
            0,
        )
        assert applied(server) == 0


def test_a_finished_episode_takes_no_step_and_an_older_one_no_reset():
    with serving(lambda: Ledger(length=2)) as server:
        reset(server), step(server, 1)
        assert step(server, 2).json()["terminated"] is True
        assert step(server, 3).status_code == 409
        assert reset(server, episode=1).json()["episode"] == 1
        assert reset(server, episode=0).status_code == 409


def test_an_unknown_session_is_opened_by_episode_0_only():
    with serving() as server:
        assert step(server, 1).json()["error"] == "unknown_session"
        assert reset(server, episode=3).json()["error"] == "unknown_session"
        assert reset(server).status_code == 200


def test_a_session_that_was_closed_is_opened_by_no_reset_that_comes_late(monkeypatch):
    monkeypatch.setattr("tidemill.remote.server_sessions.ENDED_NAMES", 2)
    with serving() as server:
        assert reset(server, "a").status_code == 200
        assert post(server, "close", sessions=["a", "b"]).json() == {"sessions": ["a"]}
        for name in "ab":
            assert reset(server, name).json()["error"] == "unknown_session"
        assert server.sessions.counts().sessions == 0
        post(server, "close", sessions=["c"])  # the newest two names are remembered
        assert [reset(server, name).status_code for name in "abc"] == [200, 404, 404]


def test_sessions_beyond_the_limit_are_refused_until_one_is_closed():
    with serving(limit=2) as server:
        assert [reset(server, name).status_code for name in "abc"] == [200, 200, 429]
        assert post(server, "close", sessions=["a", "x"]).json() == {"sessions": ["a"]}
        assert reset(server, "c").status_code == 200


def test_idle_sessions_are_closed_and_kept_ones_are_not(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("tidemill.remote.server_sessions.time", SimpleNamespace(monotonic=lambda: now))
    with serving(idle_seconds=100.0) as server:
        reset(server, "idle"), reset(server, "kept")
        now += 60
        assert post(server, "keep", sessions=["kept"]).json() == {"sessions": ["kept"]}
        now += 60
        wait_until(lambda: server.sessions.counts().sessions == 1, 60, "one is closed")
        assert step(server, 1, "idle").json()["error"] == "unknown_session"
        assert step(server, 1, "kept").status_code == 200


def table(limit, left_seconds, make=Ledger):
    """Sessions without a server."""
    sessions = Sessions(make, "Ledger", limit, left_seconds=left_seconds)

    def begin(name, caller):
        return sessions.reset(ResetCall(session=name, episode=0, seed=1, options=None), caller)

    return sessions, begin


def test_the_session_that_was_left_longest_gives_way_where_all_are_taken():
    closed_ones = []

    class Told(Ledger):
        def close(self):
            closed_ones.append(self.seeded)

    sessions, begin = table(3, 0.0, Told)
    here, first, then = Caller(), Caller(), Caller()
    begin("here", here), begin("first", first), begin("then", then)
    closed_ones.clear()
    first.gone = then.gone = True
    begin("other", here)
    assert closed_ones == [1]
    with pytest.raises(RefusedCall, match=r"no session 'first'.* gave way"):
        sessions.step(StepCall(session="first", episode=0, step=1, action=0), here)
    for name in ("here", "other", "then"):  # which has another caller from now on
        sessions.step(StepCall(session=name, episode=0, step=1, action=0), here)
    with pytest.raises(RefusedCall, match="all 3 sessions are taken"):
        begin("more", here)


def test_a_session_that_was_left_stays_for_a_while():
    sessions, begin = table(2, 1000.0)
    gone, here = Caller(), Caller()
    begin("left", gone), begin("other", here)
    gone.gone = True
    with pytest.raises(RefusedCall, match="give way 1000 s after"):
        begin("more", here)
    sessions.step(StepCall(session="left", episode=0, step=1, action=0), here)


def test_a_session_that_is_kept_is_not_left_though_its_own_connection_is_closed():
    sessions, begin = table(1, 0.0)
    gone, keeper = Caller(), Caller()
    begin("kept", gone)
    sessions.keep(SessionsCall(sessions=("kept",)), keeper)
    gone.gone = True
    with pytest.raises(RefusedCall):
        begin("other", keeper)
    keeper.gone = True
    begin("other", Caller())


def test_a_session_is_not_left_when_one_of_the_connections_that_a_call_came_on_is_closed():
    _, begin = table(1, 0.0)
    first, repeat = Caller(), Caller()
    begin("here", first), begin("here", repeat)
    repeat.gone = True
    with pytest.raises(RefusedCall):
        begin("other", Caller())
    first.gone = True
    begin("other", Caller())


def test_an_environment_that_raises_is_named_and_its_session_is_gone():
    with serving(lambda: Ledger(raises_at=2)) as server:
        reset(server), step(server, 1)
        said = step(server, 2)
        assert (said.status_code, said.json()["error"]) == (
            500,
            "environment_raised",
        ) and "ValueError: as the test asks" in said.json()["message"]
        assert step(server, 2).json()["error"] == "unknown_session"
        assert applied(server) == 1


def test_a_repeat_that_waits_for_a_call_whose_environment_raises_is_told_the_same():
    inside, go = threading.Event(), threading.Event()

    class Raising(Ledger):
        def step(self, action):
            inside.set()
            assert go.wait(60)
            raise ValueError("as the test asks")

    said = []
    with serving(Raising) as server:
        reset(server)
        first = threading.Thread(target=lambda: said.append(step(server, 1)))
        first.start()
        assert inside.wait(60)
        again = threading.Thread(target=lambda: said.append(step(server, 1)))
        again.start()
        # each call has a connection of its own
        wait_until(lambda: len(server.sessions._open["s"].callers) == 3, 60, "the repeat")
        go.set()
        first.join(), again.join()
    assert [(each.status_code, each.json()["error"]) for each in said] == [(500, "environment_raised")] * 2


ODD_ANSWERS = [
    (None, "TypeError"),
    (([0, 0, 0], "1.5", False, False, {}), "reward is '1.5'; it must be one number"),
    (([0, 0, 0], 1.0, None, False, {}), "terminated is None; it must be one bool"),
    (([0, 0, 0], 1.0, False, "False", {}), "truncated is 'False'; it must be one bool"),
    (([0, 0], 1.0, False, False, {}), "observation does not fit its space: it has shape"),
    (([0, 1e39, 0], 1.0, False, False, {}), "it is stored as float32"),
    (([0, 0, 0], 1.0, False, False, 7), "AttributeError"),
]


@pytest.mark.parametrize(("answer", "says"), ODD_ANSWERS)
def test_an_environment_that_answers_what_cannot_be_sent_is_done_with_and_never_stepped_twice(answer, says):
    stepped = []

    class Odd(Ledger):
        def step(self, action):
            stepped.append(action)
            return answer

    with serving(Odd) as server:
        reset(server)
        said = step(server, 1).json()
        assert said["error"] == "environment_raised" and says in said["message"]
        assert step(server, 1).json()["error"] == "unknown_session"
        assert len(stepped) == 1


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str fails")


@pytest.mark.parametrize(
    ("kind", "says"),
    [(SystemExit, "?"), (KeyboardInterrupt, "?"), (Wordless, "its __str__ raised RuntimeError")],
)
def test_an_environment_that_raises_what_nobody_expects_is_stepped_once_and_named(kind, says):
    stepped = []

    class Leaving(Ledger):
        def step(self, action):
            stepped.append(action)
            raise kind("\ud800")

    with serving(Leaving) as server:
        reset(server)
        assert step(server, 1).json()["message"] == f"the environment raised {kind.__name__}: {says}"
        assert step(server, 1).json()["error"] == "unknown_session" and len(stepped) == 1


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_info_of_any_kind_is_sent_as_plain_values_or_left_out(form):
    info = {
        "x_position": np.float64(0.5),
        "single": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "name": np.str_("leg"),
        "half": "\ud800",
        3: 2**64 - 1,
        "large": 2**64,
        "small": -(2**63) - 1,
        "array": np.zeros(2),
        "map": {"a": np.int8(1), "array": np.zeros(2), "b": {"c": {"too": "deep"}}},
    }

    class Telling(Ledger):
        def reset(self, **asked):
            return super().reset(**asked)[0], info

    encode, decode = (
        (msgspec.json.encode, msgspec.json.decode)
        if form == "json"
        else (msgspec.msgpack.encode, msgspec.msgpack.decode)
    )
    with serving(Telling) as server:
        content = encode({"session": "s", "episode": 0})
        said = HTTP.post(
            f"{server.url}/v1/reset", content=content, headers={"content-type": f"application/{form}"}
        )
    sent = {
        "x_position": 0.5,
        "single": 0.5,
        "count": 3,
        "flag": True,
        "name": "leg",
        "half": "?",
        "3": 2**64 - 1,
        "map": {"a": 1, "b": {}},
    }
    assert said.status_code == 200 and decode(said.content)["info"] == sent


def test_an_environment_that_cannot_be_made_is_named_and_takes_up_no_session():
    made = []

    def make():
        made.append(1)
        if len(made) > 1:
            raise OSError("no more of them")
        return Ledger()

    with serving(make, limit=1) as server:
        for name in "ab":
            said = reset(server, name)
            assert (said.status_code, said.json()["error"]) == (
                500,
                "environment_raised",
            ) and "no more of them" in said.json()["message"]


def test_an_environment_that_cannot_be_closed_keeps_no_other_from_being_closed():
    class Clinging(Ledger):
        def close(self):
            if self.episode >= 0:
                raise OSError("not now")

    with serving(Clinging, idle_seconds=0.2) as server:
        for name in "ab":
            reset(server, name)
            wait_until(lambda: server.sessions.counts().sessions == 0, 60, "nobody's session is closed")
        reset(server, "c")
        server.restart()
        assert reset(server, "d").status_code == 200


def test_steps_that_hang_hold_up_no_end_and_are_closed_when_they_are_done():
    stepping, go_on, closed_ones = threading.Semaphore(0), threading.Event(), []

    class Hanging(Ledger):
        def step(self, action):
            stepping.release()
            assert go_on.wait(60)
            return super().step(action)

        def close(self):
            if self.episode >= 0:
                closed_ones.append(self)

    with serving(Hanging) as server:
        for name in "abc":
            reset(server, name)
        clients = [
            threading.Thread(target=lambda name=name: suppress_errors(lambda: step(server, 1, name)))
            for name in "abc"
        ]
        for thread in clients:
            thread.start()
        for _ in clients:
            assert stepping.acquire(timeout=60)
        server.restart()
        assert not closed_ones  # nor did it wait for them: they are told to go on now
        go_on.set()
        until = time.monotonic() + 60
        while len(closed_ones) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(closed_ones) == 3 == applied(server)
        for thread in clients:
            thread.join(60)


def suppress_errors(call):
    with suppress(httpx.TransportError):
        call()


def test_an_array_whose_shape_is_none_is_refused():
    class Steered(Ledger):
        action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    with serving(Steered) as server:
        reset(server)
        assert (
            step(server, 1, action={"dtype": "float32", "shape": None, "data": ""}).json()["error"]
            == "bad_action"
        )


def test_without_the_token_nothing_is_told_or_done():
    with serving(token="secret-token") as server:
        for headers in ({}, {"authorization": "Bearer wrong-token"}, {"authorization": "secret-token"}):
            assert HTTP.get(f"{server.url}/v1/environment", headers=headers).status_code == 401
            assert (
                HTTP.post(
                    f"{server.url}/v1/reset", json={"session": "s", "episode": 0}, headers=headers
                ).status_code
                == 401
            )
        assert (
            HTTP.get(
                f"{server.url}/v1/environment", headers={"authorization": "Bearer secret-token"}
            ).status_code
            == 200
        )
        assert server.sessions.counts().opened == 0


def test_only_a_token_opens_an_address_that_others_reach():
    sessions = Sessions(Ledger, "Ledger")
    with pytest.raises(ConfigError, match="token"):
        Server(sessions, host="0.0.0.0")
    with pytest.raises(ConfigError, match="8 printable"):
        Server(sessions, token="short")
    with serving() as taken, pytest.raises(ConfigError, match="choose another"):
        Server(sessions, port=int(taken.url.rpartition(":")[2])).start()


def test_large_bodies_are_refused_however_they_come():
    with serving(max_body_bytes=1024) as server:
        for content in (b"x" * 2000, (b"x" * 500 for _ in range(4))):
            try:
                said = HTTP.post(
                    f"{server.url}/v1/step", content=content, headers={"content-type": "application/json"}
                )
                assert said.status_code == 413
            except httpx.TransportError:  # it hung up before all was sent
                pass
        assert reset(server).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "status"),
    [
        ("POST", "/v1/step", b"{", "application/json", 400),
        ("POST", "/v1/step", b"{}", "application/json", 400),
        ("POST", "/v1/step", b"\xc1", "application/msgpack", 400),
        ("POST", "/v1/close", b'{"sessions": ["\xff"]}', "application/json", 400),
        ("POST", "/v1/close", b"\x81\xa8sessions\x91\xa1\xff", "application/msgpack", 400),
        ("POST", "/v1/step", b"[" * 5000, "application/json", 400),
        ("POST", "/v1/step", b"{}", "text/plain", 415),
        ("GET", "/v1/step", b"", "application/json", 405),
        ("POST", "/v1/environment", b"{}", "application/json", 405),
        ("GET", "/", b"", "application/json", 404),
    ],
)
def test_a_request_that_is_none_is_refused_by_name(method, path, content, kind, status):
    with serving() as server:
        said = HTTP.request(method, server.url + path, content=content, headers={"content-type": kind})
        assert said.status_code == status and said.json()["message"]


def test_an_action_outside_its_space_is_refused_and_not_applied():
    with serving() as server:
        reset(server)
        assert step(server, 1, action=4).json()["error"] == "bad_action"
        assert step(server, 1, action=3).status_code == 200 and applied(server) == 1


def test_what_is_no_http_is_told_so_and_the_connection_closed():
    with (
        serving() as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection,
    ):
        connection.sendall(b"hello there\r\n\r\n")
        said = b""
        while part := connection.recv(4096):
            said += part
    assert (
        said.startswith(b"HTTP/1.1 400")
        and json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "bad_request"
    )


def connected(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)


def closed(connection, drip=b""):
    """True once the server has closed it, sent a byte now and then."""
    until = time.monotonic() + 60
    try:
        while time.monotonic() < until:
            connection.sendall(drip)
            connection.settimeout(0.05)
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    return True
    except OSError:
        return True
    return False


@pytest.mark.parametrize("drip", [b"", b"a"])
def test_who_shows_no_token_is_hung_up_on_soon(monkeypatch, drip):
    with serving(token="secret-token") as server, connected(server) as known:
        known.sendall(
            b"GET /v1/environment HTTP/1.1\r\nhost: h\r\nauthorization: Bearer secret-token\r\n\r\n"
        )
        assert known.recv(65536).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr("tidemill.remote.server.FIRST_SECONDS", 0.2)
        with connected(server) as unknown:
            assert closed(unknown, drip)
        monkeypatch.setattr("tidemill.remote.server.FIRST_SECONDS", 60.0)
        with connected(server) as wrong:  # the body of such a request is not waited for
            wrong.sendall(b"POST /v1/step HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n")
            assert wrong.recv(65536).startswith(b"HTTP/1.1 401") and closed(wrong)
        known.sendall(
            b"GET /v1/environment HTTP/1.1\r\nhost: h\r\nauthorization: Bearer secret-token\r\n\r\n"
        )
        assert b"HTTP/1.1 200" in known.recv(65536)


@pytest.mark.parametrize(
    "begun", [b"GET /v1/env", b"POST /v1/step HTTP/1.1\r\nhost: h\r\ncontent-length: 100000\r\n\r\n"]
)
def test_a_request_that_comes_a_byte_at_a_time_is_given_up(monkeypatch, begun):
    with serving() as server, connected(server) as slow:
        slow.sendall(b"GET /v1/counts HTTP/1.1\r\nhost: h\r\n\r\n")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr("tidemill.remote.server.REQUEST_SECONDS", 0.2)
        slow.sendall(begun)
        assert closed(slow, b"a")


def test_who_does_not_read_the_answers_is_hung_up_on(monkeypatch):
    monkeypatch.setattr("tidemill.remote.server.REQUEST_SECONDS", 0.2)
    asked = itertools.repeat(b"GET /v1/environment HTTP/1.1\r\nhost: h\r\n\r\n" * 100)
    with (
        serving() as server,
        connected(server) as deaf,
        pytest.raises(OSError, match=r"reset|[Bb]roken pipe"),
    ):
        deque(map(deaf.sendall, asked), 0)


def test_a_connection_on_which_nothing_is_asked_is_closed_with_the_idle_sessions():
    with serving(idle_seconds=0.4) as server, connected(server) as idle:
        idle.sendall(b"GET /v1/counts HTTP/1.1\r\nhost: h\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200") and closed(idle)


def ask(connection, path, **body):
    """Send a call without waiting for its answer."""
    said = json.dumps(body).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(said)}\r\n\r\n"
    )
    connection.sendall(head.encode() + said)


def served(connection, path="keep", **body):
    ask(connection, path, **(body or {"sessions": []}))
    return connection.recv(65536).startswith(b"HTTP/1.1 200")


def settled(server, asking=0):
    """An answer is here a moment before the thread of its connection waits again."""
    wait_until(
        lambda: sum(line.idle_since == math.inf for line in list(server._lines)) == asking,
        60,
        f"nothing is asked on all connections but {asking}",
    )


def test_a_client_that_is_gone_frees_its_session_and_one_that_was_hung_up_on_keeps_it():
    with serving(limit=1, left_seconds=0.0) as server, ExitStack() as stack:
        with connected(server) as killed:
            assert served(killed, "reset", session="killed", episode=0)
        until = time.monotonic() + 60
        while reset(server, "next").status_code == 429 and time.monotonic() < until:
            time.sleep(0.01)
        post(server, "close", sessions=["next"])
        idle = stack.enter_context(connected(server))
        assert served(idle, "reset", session="idle", episode=0)
        settled(server)
        for _ in range(18):
            assert served(stack.enter_context(connected(server)))
        assert closed(idle)
        assert reset(server, "another").status_code == 429
        assert step(server, 1, "idle").status_code == 200


def test_connections_on_which_nothing_is_asked_make_room_for_others():
    stepping, go_on = threading.Event(), threading.Event()

    class Hanging(Ledger):
        def step(self, action):
            stepping.set()
            assert go_on.wait(60)
            return super().step(action)

    faults = Script({})
    with serving(Hanging, faults, limit=1) as server, ExitStack() as stack:
        busy = stack.enter_context(connected(server))
        assert served(busy, "reset", session="s", episode=0)
        ask(busy, "step", session="s", episode=0, step=1, action=1)
        assert stepping.wait(60)
        known = stack.enter_context(connected(server))
        assert served(known)
        strangers = [stack.enter_context(connected(server)) for _ in range(80)]
        strangers[-1].sendall(b"POST /v1")
        assert served(stack.enter_context(connected(server))) and closed(strangers[0])
        assert served(known)  # strangers give way first
        settled(server, asking=1)
        for _ in range(18):
            assert served(stack.enter_context(connected(server)))
        assert closed(known)
        settled(server, asking=1)
        others = []
        for number in range(17):
            others.append(stack.enter_context(connected(server)))
            ask(others[-1], "step", session="s", episode=0, step=1, action=1)
            until = time.monotonic() + 60
            while faults.calls < number + 3 and time.monotonic() < until:
                time.sleep(0.001)
        assert closed(stack.enter_context(connected(server)))
        go_on.set()
        for connection in (busy, *others):  # nobody gives way who waits for an answer
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_environment_may_take_longer_than_a_request_does():
    """While it steps, nothing that the server closes connections by runs out."""
    seen = []

    class Slow(Ledger):
        def step(self, action):
            seen.extend((line.until, line.idle_since) for line in server._lines)
            return super().step(action)

    with serving(Slow) as server:
        reset(server)
        wait_until(lambda: not server._lines, 60, "the connection of that call is closed")
        assert step(server, 1).json()["step"] == 1
    assert seen == [(math.inf, math.inf)]


def test_a_restart_forgets_sessions_and_keeps_the_count():
    with serving() as server:
        reset(server), step(server, 1)
        before = HTTP.get(f"{server.url}/v1/environment").json()["instance"]
        server.restart()
        assert HTTP.get(f"{server.url}/v1/environment").json()["instance"] != before
        assert step(server, 2).json()["error"] == "unknown_session"
        assert HTTP.get(f"{server.url}/v1/counts").json()["applied"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"idle_seconds": math.inf},
        {"idle_seconds": math.nan},
        {"left_seconds": math.nan},
        {"left_seconds": -1.0},
    ],
)
def test_seconds_that_are_none_are_refused(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} = "):
        Sessions(Ledger, "Ledger", **settings)


def test_an_environment_without_arrays_is_refused_at_the_start():
    class Texts(Ledger):
        observation_space = gymnasium.spaces.Text(5)

    with pytest.raises(ConfigError, match="Text space"):
        Sessions(Texts, "Texts")


def test_faults_are_drawn_as_often_as_asked_and_the_same_again():
    faults = Faults.from_words(
        {"reply_lost": "0.25", "stall": "0.25", "latency": "uniform:0.1:0.2", "seed": "3"}
    )
    first, second = FaultSampler(faults), FaultSampler(faults)
    drawn = [first.draw("/v1/step") for _ in range(4000)]
    assert drawn == [second.draw("/v1/step") for _ in range(4000)]
    assert all(0.1 <= fault.seconds <= 0.2 for fault in drawn)
    for kind, share in (("reply_lost", 0.25), ("stall", 0.25), ("", 0.5)):
        assert abs(first.drawn[kind] / 4000 - share) < 0.03


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"reply_los": "0.1"}, 'did you mean "reply_lost"'),
        ({"stall": "often"}, "no number"),
        ({"stall": "-1"}, "0 or more"),
        ({"stall": "nan"}, "0 or more"),
        ({"restart_every": "1e20"}, "no more than 1e"),
        ({"latency": "inf"}, "no distribution"),
        ({"stall": "0.6", "reply_lost": "0.6"}, "add up to 1.2"),
        ({"latency": "normal:1:2"}, "no distribution"),
        ({"latency": "uniform:1"}, "no distribution"),
    ],
)
def test_faults_that_cannot_be_are_refused(words, match):
    with pytest.raises(ConfigError, match=match):
        Faults.from_words(words)
