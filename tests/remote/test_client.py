"""The client against a real server that goes wrong: each step is applied once and told as
it was, or a named error says that it is lost."""

import asyncio
import socket
import threading
import time

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from tests.envs.driver import Driver
from tests.remote.served import (
    Ledger,
    Script,
    answering,
    applied,
    client,
    hurried,
    port_of_ones_own,
    serving,
)
from tests.run.watching import wait_until

from tidemill.api.environment import Tick
from tidemill.core import step_deadlines
from tidemill.core.errors import (
    ConfigError,
    ProtocolFault,
    RemoteFault,
    RemoteTimeout,
    RemoteUnavailable,
    ReplyLost,
    SessionLost,
)
from tidemill.core.thread_loop import own, run_ready
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.lane_restarts import LaneRestarts, RestartedTogether
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.remote.connections import Address, _AsyncStream
from tidemill.remote.rest_config import Rest
from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv

FORMS = ("threads", "loop")
HARMLESS = ("too_many", "unavailable", "request_lost", "reply_lost", "reply_torn", "reply_repeated")


def rows(environment, ticks, seed=3):
    """What so many ticks tell, as bytes; the environment is closed."""
    driver, told = Driver(environment, seed=seed), []
    try:
        for _ in range(ticks):
            (each,) = driver.tick()
            tick = each.tick
            told.append(
                (
                    *(a.tobytes() for a in tick.observation.values()),
                    tick.reward.tobytes(),
                    tick.done.tobytes(),
                    tick.truncated.tobytes(),
                )
            )
    finally:
        environment.close()
    return told


def local(lanes, ticks):
    return rows(LaneLoop([Ledger() for _ in range(lanes)], "Ledger", 5), ticks)


@pytest.mark.parametrize("kind", [*FORMS, "slots"])
def test_what_is_made_anew_knows_how_long_steps_took(kind, monkeypatch):
    monkeypatch.setattr(step_deadlines, "KNOWN", 5)
    with serving(lambda: Ledger(length=1000), faults=Script({8: "session_lost"})) as server:
        config = client(server, "loop" if kind == "slots" else kind, deadline_s=None)
        environment = Slots(environment=config, backoff_s=0.0).build(1, 0)
        if kind != "slots":
            environment.close()
            environment = RestartedTogether(
                config.build(1, 0), lambda added: config.build(1, added), LaneRestarts(1, 600.0, print)
            )
        environment.watch(None)
        driver, first = Driver(environment), environment._inner
        for number in range(12):
            before = [bool(over) for over in driver.over[0]]
            environment.send([{"action": np.zeros(1, np.int64)}], np.array(before))
            wait_until(lambda: (run_ready(), environment.ready())[1], 120, "it has answered")
            driver.receive()
            over = driver.ticks[0].voided & ~driver.ticks[0].restarted
            driver.over[0][:] = over[:, None]
            if number == 4:
                assert environment._inner.times[0].deadline(False) == step_deadlines.FIRST
        times = environment._inner.times[0]
        assert environment._inner is not first and times is not first.times[0]
        assert len(times._newest) >= 7 and times.deadline(False) < step_deadlines.FIRST
        environment.close()


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_environment_itself(form):
    with serving(Gymnasium(id="CartPole-v1").make_one) as server:
        assert rows(client(server, form=form).build(3, 5), 60) == rows(
            Gymnasium(id="CartPole-v1").build(3, 5), 60
        )
        assert server.sessions.counts().sessions == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HARMLESS)
def test_a_fault_in_any_call_changes_no_row_and_applies_no_step_twice(form, kind):
    for at in range(9):
        with serving(faults=Script({at: kind})) as server:
            assert rows(client(server, form=form).build(1, 5), 9) == local(1, 9), at
            assert applied(server) == 7  # 9 ticks, of which 2 are resets


@settings(max_examples=30)
@given(
    plan=st.dictionaries(st.integers(0, 60), st.sampled_from(HARMLESS), max_size=20),
    lanes=st.integers(1, 3),
    form=st.sampled_from(FORMS),
)
def test_whatever_goes_wrong_whenever_the_rows_are_the_same(plan, lanes, form):
    with serving(faults=Script(plan)) as server:
        told = rows(client(server, form=form).build(lanes, 5), 12)
        assert told == local(lanes, 12) and applied(server) == 10 * lanes


def play(env, steps, length=6):
    """Take so many steps, beginning episodes as they end or are lost; return (committed,
    voided) after checking every row."""
    committed = voided = 0
    at = None
    while committed + voided < steps:
        try:
            if at is None:
                observation, _ = env.reset(seed=1 if env.session.name == "" else None)
                at = 0
                assert observation[1] == 0
                continue
        except RemoteFault:
            continue
        try:
            observation, reward, terminated, _, _ = env.step(2)
        except RemoteFault as error:
            assert str(error).startswith("http://")
            voided, at = voided + 1, None
            continue
        committed, at = committed + 1, at + 1
        assert observation[1] == at and reward == 100.0 * observation[0] + 10 * at + 2
        at = None if terminated else at
    return committed, voided


def test_a_lost_session_is_named_and_the_next_reset_opens_another():
    with serving(faults=Script({3: "session_lost", 6: "session_lost"})) as server:
        env = RemoteEnv(client(server).host())
        env.reset(seed=1), env.step(0), env.step(0)
        with pytest.raises(SessionLost, match=r"step 3 .*no session"):
            env.step(0)
        with pytest.raises(RemoteFault, match="before reset"):
            env.step(0)
        observation, info = env.reset()
        # a new session, with a seed of its own
        assert observation.tolist()[:2] == [0, 0] and info["seed"] not in (-1, 1)
        env.step(0)
        with pytest.raises(SessionLost):
            env.step(0)
        env.close()


@pytest.mark.parametrize("seed", range(3))
def test_committed_and_voided_steps_are_those_started_and_the_servers_count_agrees(seed):
    rng = np.random.default_rng(seed)
    kinds = (*HARMLESS, "session_lost")
    with serving(
        faults=Script({int(at): kinds[rng.integers(len(kinds))] for at in rng.choice(300, 60, replace=False)})
    ) as server:
        env = RemoteEnv(client(server).host())
        committed, voided = play(env, 200)
        assert committed + voided == 200 and voided > 0
        # a session may be lost after a step was applied, and before its reply came
        assert committed <= applied(server) <= committed + voided
        env.close()


def test_a_restart_of_the_server_loses_open_episodes_and_nothing_else():
    with serving() as server:
        env, stop = RemoteEnv(client(server).host()), threading.Event()

        def restart():
            while not stop.wait(0.05):
                server.restart(0.02)

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            committed, voided = play(env, 150)
        finally:
            stop.set()
            thread.join()
        assert committed + voided == 150
        assert committed <= applied(server) <= committed + voided
        env.close()


def test_who_answers_in_place_of_a_server_that_has_answered_is_asked_again():
    with serving() as server:
        config = client(server)
        config.build(1, 0).close()
        describe, foreign = server.sessions.describe, ["another", "another"]

        def described(size):
            told = describe(size)
            return _replace(told, protocol=foreign.pop()) if foreign else told

        server.sessions.describe = described
        config.build(1, 1).close()
        assert foreign == []


def test_a_server_that_applies_what_is_sent_twice_is_never_sent_a_step_twice():
    with serving(faults=Script({2: "reply_lost", 6: "request_lost"})) as server:
        describe = server.sessions.describe
        server.sessions.describe = lambda size: _replace(describe(size), repeats="applied")
        env = RemoteEnv(client(server).host())
        committed, voided = play(env, 10)
        assert (committed, voided) == (8, 2)
        # the first was applied before its reply was lost
        assert applied(server) == 9 and server.sessions.counts().repeated == 0
        env.close()


def test_a_server_that_refuses_repeats_costs_the_episode_where_it_had_applied_the_step():
    with serving(faults=Script({2: "reply_lost", 6: "request_lost"})) as server:
        describe, again = server.sessions.describe, server.sessions._again
        server.sessions.describe = lambda size: _replace(describe(size), repeats="refused")
        server.sessions._again = lambda reply: again(reply) if reply.step == 0 else _refuse(reply)
        env = RemoteEnv(client(server).host())
        env.reset(seed=1), env.step(0)
        with pytest.raises(ReplyLost, match="was applied"):
            env.step(0)
        committed, voided = play(env, 8)
        assert (committed, voided) == (8, 0)  # the request that was lost on its way is sent again
        env.close()


def _replace(description, **changes):
    for name, value in changes.items():
        setattr(description, name, value)
    return description


def _refuse(reply):
    from tidemill.remote.server_sessions import RefusedCall

    raise RefusedCall(409, "out_of_order", "applied already", reply.episode, reply.step)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_ends_at_its_deadline_whatever_the_server_does(form):
    # longer than a test may take
    with serving(faults=Script(dict.fromkeys(range(1, 50), "stall"), stall_seconds=1000.0)) as server:
        driver = Driver(client(server, form=form).build(1, 5))
        driver.tick()
        with (
            hurried(driver.environment.envs[0].session, deadline_s=1.0, attempt_s=0.4),
            pytest.raises(RemoteTimeout, match=r"1 s \(deadline_s\)"),
        ):
            driver.tick()
        driver.environment.close()


@pytest.mark.parametrize("form", FORMS)
def test_who_was_refused_before_a_try_that_is_not_answered_is_told_why(form):
    # longer than a test may take
    with serving(faults=Script({1: "too_many", 2: "stall"}, stall_seconds=1000.0)) as server:
        driver = Driver(client(server, form=form).build(1, 5))
        driver.tick()
        with (
            hurried(driver.environment.envs[0].session, deadline_s=4.0),
            pytest.raises(RemoteTimeout, match=r"4 s \(deadline_s\).*; the try before: 429 too_many: on p"),
        ):
            driver.tick()
        driver.environment.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_server_that_sends_a_byte_now_and_then_cannot_hold_a_call(form):
    with serving() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def trickle():
            connection, _ = listener.accept()
            with connection:
                for byte in b"HTTP/1.1 200 OK\r\nx: " + b"a" * 10_000:
                    if stop.wait(0.02):
                        return
                    try:
                        connection.sendall(bytes([byte]))
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        environment = client(server, form=form).build(1, 5)
        (env,) = environment.envs
        env._connection = type(env._connection)(
            Address(f"http://127.0.0.1:{listener.getsockname()[1]}", [], None)
        )
        since = time.monotonic()
        try:
            with hurried(env.session, deadline_s=0.5), pytest.raises(RemoteTimeout):
                Driver(environment).tick()
            assert time.monotonic() - since < 150  # 10,000 bytes take 200 s
        finally:
            stop.set()
            environment.close()
            thread.join(60)


def test_a_call_whose_time_is_over_ends_though_something_comes_all_the_time():
    async def reads():
        stream = _AsyncStream()
        reading = asyncio.ensure_future(stream.read(100))
        await asyncio.sleep(0)
        # whoever reads is on its way when the alarm rings
        stream.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
        stream.give_up(TimeoutError("its time is over"))
        with pytest.raises(TimeoutError, match="its time is over"):
            await reading
        with pytest.raises(TimeoutError, match="its time is over"):
            await stream.read(100)

    asyncio.run(asyncio.wait_for(reads(), 60))


def test_a_connection_that_waits_for_a_while_stays_open():
    async def asks(env, times):
        await env.reset(seed=1)
        connection = env._connection._connection
        connection._alarm.cancel()
        connection._ring(asyncio.get_running_loop())  # as it does once that call's time is over
        stream = connection._stream
        for _ in range(times):
            await env.step(0)
            assert env._connection._connection._stream is stream
        await env.close()

    with serving() as server:
        asyncio.run(asyncio.wait_for(asks(AsyncRemoteEnv(client(server).host()), 2), 60))


def test_the_retry_budget_bounds_what_a_failing_server_is_asked():
    with serving(faults=Script(dict.fromkeys(range(1, 500), "unavailable"))) as server:
        environment = client(server, retries=0.0).build(1, 5)
        env = environment.envs[0]
        env.session.host.breaker._longest = 0.05
        env.reset(seed=1)
        with pytest.raises(RemoteUnavailable, match="retry budget"):
            env.step(0)
        with pytest.raises((RemoteUnavailable, RemoteTimeout)):
            env.reset()
        assert server.faults.calls < 20
        server.faults.calls = 1
        with pytest.raises(RemoteUnavailable, match=r"failed in 1 try \("):
            env.reset()
        environment.close()


@pytest.mark.parametrize("form", FORMS)
def test_closing_does_not_wait_for_a_call_under_way(form):
    # longer than a test may take
    with serving(faults=Script({2: "stall", 3: "stall"}, stall_seconds=1000.0)) as server:
        environment = client(server, deadline_s=1000.0, attempt_s=1000.0, form=form).build(2, 5)
        driver = Driver(environment)
        driver.tick()
        environment.send([{"action": np.zeros(2, np.int64)}], np.zeros(2, bool))
        while applied(server) < 2:
            assert not environment.ready()
            time.sleep(0.005)
        environment.close()
        environment.close()
        assert not [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith(server.url) and thread.is_alive()
        ]


def test_nobody_keeps_sessions_open_once_the_last_one_is_closed():
    def keepers():
        return {thread for thread in threading.enumerate() if thread.name == "rest keeper"}

    before = keepers()
    with serving(idle_seconds=3600) as server:
        first, second = (client(server).build(1, seed) for seed in (1, 2))
        for environment in (first, second):
            Driver(environment).tick()
        (keeper,) = keepers() - before
        first.close()
        assert keeper.is_alive()
        second.close()
        keeper.join(60)
        assert not keeper.is_alive()
        rows(client(server).build(1, 3), 2)  # and a session after that is kept again, and let go


def test_sessions_that_wait_are_kept_from_being_closed_as_idle():
    with serving(idle_seconds=3600) as server:
        env = RemoteEnv(client(server).host())
        env.session.host.description.idle_seconds = 0.2  # so the client keeps it that often
        env.reset(seed=1)
        (session,) = server.sessions._open.values()
        for _ in range(3):
            heard = session.used
            wait_until(lambda heard=heard: session.used > heard, 60, "it is kept")
        assert env.step(0)[0][1] == 1
        env.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ledger(nan_at=2), r"step 2 .*observation is not finite"),
        (lambda: Ledger(reward_nan_at=2), r"step 2 .*reward is not finite"),
        (lambda: Ledger(raises_at=2), r"step 2 .*ValueError: as the test asks"),
    ],
)
def test_what_an_environment_must_not_answer_is_named_at_its_step(make, words):
    with serving(make) as server:
        env = RemoteEnv(client(server).host())
        env.reset(seed=1), env.step(0)
        with pytest.raises(RemoteFault, match=words):
            env.step(0)
        env.close()


WRONG = [
    (
        {"reward": UNSET},
        r"the answer has no reward\. .*must have reward \(a number\), terminated and truncated",
    ),
    ({"terminated": UNSET}, "the answer has no terminated"),
    ({"terminated": UNSET, "truncated": UNSET}, "the answer has no terminated and no truncated"),
    ({"terminated": "false"}, r"terminated is 'false' \(Expected `bool`"),
    ({"truncated": None}, r"truncated is None \(Expected `bool`"),
    ({"terminated": 0}, r"terminated is 0 \(Expected `bool`"),
    ({"reward": "1.5"}, r"reward is '1\.5' \(Expected `float"),
    ({"reward": True}, r"reward is True \(Expected `float"),
    ({"reward": None}, "reward is not finite but None"),
    ({"reward": float("nan")}, "reward is not finite but (nan|None)"),
    ({"observation": 3}, r"observation is 3; its space says an array"),
]


@pytest.mark.parametrize("encoding", ["application/json", "application/msgpack"])
@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_an_answer_that_lacks_a_field_or_has_a_wrong_one_is_an_error_that_names_it(wrong, words, encoding):
    def change(said):
        for name, value in wrong.items():
            said[name] = value
            if value is UNSET:
                del said[name]

    with serving() as server:
        answering(server, "step", change)
        host = client(server).host()
        host.content_type = encoding
        env = RemoteEnv(host)
        env.reset(seed=1)
        with pytest.raises(ProtocolFault, match=rf"step 1 .*{words}") as raised:
            env.step(0)
        assert raised.value.first
        env.close()


def test_numbers_that_json_does_not_have_are_named(monkeypatch):
    with serving() as server:
        host = client(server).host()
        host.content_type = "application/json"
        env = RemoteEnv(host)
        env.reset(seed=1)
        monkeypatch.setattr("tidemill.remote.server.encode", lambda *_: b'{"reward": NaN}')
        with pytest.raises(ProtocolFault, match="JSON has no NaN"):
            env.step(0)
        monkeypatch.undo()
        env.close()


def test_a_reset_may_leave_out_what_nothing_was_earned_and_ended_by():
    def change(said):
        for name in ("reward", "terminated", "truncated", "info"):
            del said[name]

    with serving() as server:
        answering(server, "reset", change)
        assert rows(client(server).build(1, 5), 9) == local(1, 9)


@pytest.mark.parametrize("proven", [True, False])
def test_slots_give_up_a_server_that_never_answered_right_and_void_what_is_wrong_later(proven):
    wrong = [not proven]

    def change(said):
        if wrong[0]:
            del said["terminated"]

    def tick(reset):
        slot.send([{"action": np.zeros(1, np.int64)}], np.array([reset]))
        wait_until(slot.ready, 60, "the answer")
        slot.recv([told])
        return bool(told.voided[0])

    with serving() as server:
        answering(server, "step", change)
        slot = Slots(environment=client(server), backoff_s=0.001).build(1, 5)
        slot.bind([[0]])
        told = Tick.allocate(slot.agents[0].spaces.observation, 1, {}, False)
        assert not tick(True)
        if proven:
            assert not tick(False)
            wrong[0] = True
            assert tick(False)
        else:
            with pytest.raises(ProtocolFault, match="no terminated"):
                tick(False)
        slot.close()


def test_a_server_that_has_answered_right_is_believed_also_when_all_its_sessions_were_lost():
    with serving() as server:
        for wrong in (False, True):
            if wrong:
                answering(server, "step", lambda said: said.pop("terminated"))
            env = RemoteEnv(client(server).host())
            env.reset(seed=1)
            if wrong:
                with pytest.raises(ProtocolFault, match="no terminated") as caught:
                    env.step(0)
                assert not caught.value.first  # so that it costs a step, and not the run
            else:
                env.step(0)
            env.close()
            del env  # and with it all that its sessions shared


class Wider(Ledger):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self):
        return np.zeros(4, np.float32)


def test_a_server_that_changes_its_spaces_is_found_out_when_a_session_is_opened():
    from tidemill.remote.server_sessions import Sessions

    with serving() as server:
        env = RemoteEnv(client(server).host())
        env.reset(seed=1)
        other = Sessions(Wider, "Wider")
        server.sessions.describe, server.sessions.forget = other.describe, server.sessions.forget
        server.sessions.forget()
        with pytest.raises(SessionLost):
            env.step(0)
        with pytest.raises(RemoteFault, match=r"changed while this ran.*Wider.*begin a new run"):
            env.reset()
        env.close()


def test_an_observation_of_another_shape_is_named_at_its_step():
    with serving() as server:
        env = RemoteEnv(client(server).host())
        env.reset(seed=1)
        server.sessions._observations = type(server.sessions._observations)(Wider_space(), "observation")
        server.sessions._open[env.session.name].env.observe = lambda: np.zeros(4, np.float32)
        with pytest.raises(
            RemoteFault, match=r"step 1 .*float32.* of shape \[4\]; its space says float32 of shape \[3\]"
        ):
            env.step(0)
        env.close()


def Wider_space():
    from tidemill.envs.spaces import from_gymnasium

    return from_gymnasium(Wider.observation_space)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "127.0.0.1:80"}, "no address"),
        ({"url": "ftp://host"}, "no address"),
        ({"url": "http://"}, "no address"),
        ({"url": "http://user:secret@host"}, "token instead"),
        ({"url": "http://a..b"}, "no address"),
        ({"url": f"http://{'a' * 70}.com"}, "no address"),
        ({"url": "http://[::1"}, "no address"),
        ({"url": "http://пример.рф"}, "xn--"),
        ({"url": "http://host/a b"}, "%20"),
        ({"url": "http://host", "deadline_s": 0.0}, "deadline_s = 0.0"),
        ({"url": "http://host", "attempt_s": float("nan")}, "attempt_s = nan"),
        ({"url": "http://host", "retries": 2.0}, "retries = 2.0"),
        ({"url": "http://host", "form": "async"}, "threads"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Rest(**settings)


@pytest.mark.parametrize("token", ["ключ-и-замок", "secret-token\n"])
def test_a_token_that_no_header_carries_is_refused(token):
    with serving() as server, pytest.raises(ConfigError, match="printable ASCII"):
        Rest(url=server.url, token=token).build(1, 0)


def test_a_url_may_have_blanks_around_it_and_its_scheme_in_capitals():
    with serving() as server:
        Rest(url=f" {server.url.replace('http', 'HTTP')}/ ").build(1, 0).close()


def test_a_url_that_is_no_environment_server_is_refused_at_the_start():
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    with port_of_ones_own() as port, pytest.raises(ConfigError, match=r"nothing answers.*serve-env"):
        Rest(url=f"http://127.0.0.1:{port}").build(1, 0)
    answers = {
        "a page": (b"<html>", "no environment server"),
        "another api": (b'{"hello": 1}', "no environment server"),
        "another version": (
            b'{"protocol": "tidemill-rest", "version": 2}',
            "version 2 of tidemill-rest, this Tidemill version 1",
        ),
        "half": (b'{"protocol": "tidemill-rest", "version": 1}', "instance"),
        "no space": (
            b'{"protocol":"tidemill-rest","version":1,"instance":"a","environment":"e","observation_space":3,"action_space":3}',
            "no space",
        ),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.said)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        for said, words in answers.values():
            page.said = said
            with pytest.raises(ConfigError, match=words):
                Rest(url=f"http://127.0.0.1:{page.server_address[1]}").build(1, 0)
        page.shutdown()
    with serving(token="secret-token") as server, pytest.raises(ConfigError, match="another token"):
        Rest(url=server.url, token="other-token").build(1, 0)


@pytest.mark.parametrize("idle_seconds", [1e-9, 1e12])
def test_any_patience_of_a_server_is_one_that_a_client_can_wait_for(monkeypatch, idle_seconds):
    waited = []
    monkeypatch.setattr("tidemill.remote.host._keep", lambda host, done, every: waited.append(every))
    with serving(idle_seconds=3600) as server:
        host = client(server).host()
        host.description.idle_seconds = idle_seconds
        host.heard("s")
        wait_until(lambda: waited, 60, "the thread that keeps sessions")
        host.forget("s")
    assert 0.01 <= waited[0] <= 3600


@pytest.mark.parametrize("form", FORMS)
def test_an_environment_knows_how_many_sessions_its_server_takes(form):
    with serving(limit=2) as server:
        environment = client(server, form=form).build(1, 0)
        assert environment.most_lanes == 2 and not environment.needs_maker
        environment.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_server_is_asked_anew_once_all_that_played_there_are_closed_whoever_refers_to_them(form):
    with serving(limit=2) as server:
        config = client(server, form=form)
        several = [config.build(1, seed) for seed in range(2)]
        players = [environment.envs[0] for environment in several]  # as tracebacks and cycles of objects do
        server.sessions.limit = 5  # what is started there next takes more
        several[0].close()
        several[0] = config.build(1, 2)
        assert [environment.most_lanes for environment in several] == [2, 2]
        for environment in several:
            environment.close()
        anew = config.build(1, 3)
        assert anew.most_lanes == 5 and anew.envs[0].session.host is not players[1].session.host
        anew.close()


def test_who_waits_for_a_session_spends_no_retries_of_others():
    with serving(limit=1) as server:
        first = client(server, retries=0.0).build(1, 0)
        second = client(server, retries=0.0).build(1, 0)
        host = first.envs[0].session.host
        assert host is second.envs[0].session.host
        first.envs[0].reset(seed=0)
        left = host.budget._left
        with (
            hurried(second.envs[0].session, deadline_s=6.0),
            pytest.raises(RemoteTimeout, match="fewer at a time, or start the server with a higher limit"),
        ):
            second.envs[0].reset(seed=0)
        assert (host.budget._left, host.budget.spent > 0) == (left, True)
        first.close()
        assert second.envs[0].reset(seed=0)[0][1] == 0
        second.close()


def test_a_token_is_read_from_the_environment_and_not_saved(monkeypatch):
    from tidemill.core.config import encode

    with serving(token="secret-token") as server:
        monkeypatch.setenv("TIDEMILL_TOKEN", "secret-token")
        config = Rest(url=server.url)
        config.build(1, 0).close()
        assert "secret" not in str(encode(config))


def test_the_event_loop_ends_with_its_last_environment():
    with serving() as server:
        several = [client(server, form="loop").build(1, seed) for seed in range(40)]
        drivers = [Driver(environment) for environment in several]
        for driver in drivers:
            driver.tick()
        assert own.loop is not None
        for environment in several:
            environment.close()
        assert own.loop is None and server.sessions.counts().sessions == 0
