"""Resets, closes, and the calls that keep a waiting session open, in both forms, while
the network fails or the server does not answer: each succeeds or raises a named error,
none hangs, and nothing is left open."""

import asyncio
import inspect
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from tests.envs.driver import Driver
from tests.remote.served import Ledger, client, hurried, serving
from tests.run.watching import wait_until

from tidemill.core.errors import RemoteFault, RemoteTimeout
from tidemill.remote.connections import AsyncConnection, Connection, _AsyncStream, _Stream
from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv
from tidemill.remote.wire import PREFIX

FORMS = {"threads": RemoteEnv, "loop": AsyncRemoteEnv}
OPERATIONS = [(holder, name) for holder in (_Stream, _AsyncStream) for name in ("read", "write")] + [
    (Connection, "_connect"),
    (AsyncConnection, "_connect"),
]


@contextmanager
def nothing_left():
    """No descriptor and no thread of the client or the server is there afterwards that
    was not before."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    wait_until(
        lambda: set(threading.enumerate()) <= threads and len(os.listdir("/proc/self/fd")) <= files,
        60,
        "all is closed",
    )


class Network:
    """Fails at its operation `at` (from 0; -1: at none), before that is done, or after:
    then what it brought is lost. `who`: the threads whose operations count."""

    def __init__(self, monkeypatch, after, who=""):
        self.after, self.who, self.at, self.count = after, who, -1, 0
        for holder, name in OPERATIONS:
            monkeypatch.setattr(holder, name, self._failing(getattr(holder, name)))

    def fail(self, at):
        self.at, self.count = at, 0

    def _failing(self, operation):
        def doing(moment):
            counts = threading.current_thread().name.startswith(self.who)
            if counts and moment == self.after:
                self.count += 1
                if self.count == self.at + 1:
                    raise OSError("cut")

        async def fails_later(*given, **named):
            doing(False)
            done = await operation(*given, **named)
            doing(True)
            return done

        def fails(*given, **named):
            doing(False)
            done = operation(*given, **named)
            doing(True)
            return done

        return fails_later if inspect.iscoroutinefunction(operation) else fails


async def said(answer):
    """What a call of either form says."""
    return await answer if inspect.isawaitable(answer) else answer


def play(plan, *given):
    """Carry it out, in two minutes at most."""

    async def whole():
        async with asyncio.timeout(120):
            return await plan(*given)

    return asyncio.run(whole())


# the fourth: see `test_every_await`
@pytest.mark.parametrize(("form", "after"), [("threads", False), ("threads", True), ("loop", True)])
@pytest.mark.parametrize("call", ["reset", "close"])
def test_a_reset_and_a_close_whose_network_fails_anywhere_do_what_they_should(monkeypatch, call, form, after):
    network = Network(monkeypatch, after)

    async def cut(server, at):
        env = FORMS[form](client(server).host())
        await said(env.reset(seed=1))
        await said(env.step(0))
        if call == "reset":
            await said(env.close())  # so that asking what the server is, and connecting, are among the points
        else:
            await said(env._connection.hang_up())
        network.fail(at)
        if call == "reset":
            observation, info = await said(env.reset(seed=2))
            assert observation.tolist()[:2] == [0, 0] and info == {"seed": 2}
        else:
            await said(env.close())
        reached = network.count > at
        network.fail(-1)
        left = server.sessions.counts().sessions
        assert left == 1 if call == "reset" else left <= reached
        if call == "close":
            assert (await said(env.reset(seed=2)))[1] == {"seed": 2}
        assert (await said(env.step(2)))[0].tolist()[1] == 1
        await said(env.close())
        assert server.sessions.counts().sessions == 0  # what could not be told then was told with the next
        return reached

    at = 0
    with nothing_left():
        while True:
            with serving() as server:
                if not play(cut, server, at):
                    break
            at += 1
            assert at < 100
    assert at >= (6 if call == "reset" else 3)


@pytest.mark.parametrize("form", FORMS)
def test_sessions_that_ended_while_their_server_was_not_there_are_ended_once_it_is_back(form):
    """It keeps sessions for ever, and takes no more than these."""

    async def through_an_outage(server):
        def envs(count):
            return [FORMS[form](client(server).host()) for _ in range(count)]

        before = envs(4)
        for env in before:
            await said(env.reset(seed=1))
        server._hang_up()
        for env in before:
            with hurried(env.session, deadline_s=0.3), pytest.raises(RemoteFault):
                await said(env.step(0))
            await said(env.close())
        del env, before  # and what they shared
        server._listen()
        (env,) = envs(1)
        await said(env.reset(seed=2))
        assert server.sessions.counts().sessions == 1
        await said(env.close())

    with serving(limit=4, idle_seconds=0, left_seconds=1000) as server:
        play(through_an_outage, server)


@pytest.mark.parametrize("form", FORMS)
def test_the_last_session_is_ended_also_where_the_breaker_has_just_opened(monkeypatch, form):
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 60.0)

    async def closes(server):
        env = FORMS[form](client(server).host())
        breaker = env.session.host.breaker
        for pause, left in ((0.05, 0), (1000.0, 1)):
            await said(env.reset(seed=1))
            breaker._first = breaker._longest = pause
            while not breaker.wait():
                breaker.failed()
            await said(env.close())  # it waits for a trial that is near alone
            assert server.sessions.counts().sessions == left

    with serving() as server:
        play(closes, server)


class Gated(Ledger):
    """Those of its `reset` or `close` that begin while the gate is shut wait there."""

    def __init__(self, gate, call):
        super().__init__()
        self.gate, self.call = gate, call

    def reset(self, **given):
        self.wait("reset")
        return super().reset(**given)

    def close(self):
        self.wait("close")

    def wait(self, call):
        if call == self.call:
            self.gate.pass_()


class Gate:
    """Nobody may have to wait for what waits here."""

    def __init__(self):
        self.open, self.waiting, self.late = threading.Event(), 0, False
        self.open.set()

    def pass_(self):
        if not self.open.is_set():
            self.waiting += 1  # no call in between: two threads lose none
        self.late |= not self.open.wait(60)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["what it is", "reset", "close"])
def test_a_reset_or_a_close_that_is_not_answered_ends_at_its_deadline_and_a_new_session_can_be_opened(
    monkeypatch, call, form
):
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 0.1)
    gate = Gate()

    async def stuck(server):
        host = client(server).host()
        describe = server.sessions.describe
        server.sessions.describe = lambda size: (call == "what it is" and gate.pass_(), describe(size))[1]
        env = FORMS[form](host)
        await said(env.reset(seed=1))
        await said(env.step(0))
        first = env.session.name
        if call == "what it is":
            await said(env.close())
        gate.open.clear()
        with hurried(env.session, deadline_s=0.3, attempt_s=0.1):
            if call == "close":
                await said(env.close())
            else:
                with pytest.raises(RemoteTimeout, match=rf"{call}.*no answer within 0\.3 s"):
                    await said(env.reset(seed=2))
        wait_until(lambda: gate.waiting, 60, "it has come to the server")
        assert not gate.late
        gate.open.set()
        assert (await said(env.reset(seed=3)))[1] == {"seed": 3} and env.session.name != first
        assert (await said(env.step(2)))[0].tolist()[1] == 1
        monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 60.0)
        await said(env.close())
        wait_until(lambda: server.sessions.counts().sessions == 0, 60, "sessions are closed")

    with nothing_left(), serving(lambda: Gated(gate, call)) as server:
        play(stuck, server)


@pytest.mark.parametrize("form", FORMS)
def test_closing_does_not_wait_for_resets_under_way(monkeypatch, form):
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 0.1)
    gate = Gate()
    with nothing_left(), serving(lambda: Gated(gate, "reset")) as server:
        environment = client(server, form=form).build(2, 5)
        Driver(environment)
        gate.open.clear()
        environment.send([{"action": np.zeros(2, np.int64)}], np.ones(2, bool))
        wait_until(lambda: environment.ready() or gate.waiting == 2, 60, "both wait")
        assert not environment.ready()
        environment.close()
        assert gate.waiting == 2 and not gate.late
        gate.open.set()
        wait_until(lambda: server.sessions.counts().sessions == 0, 60, "sessions are closed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", ["before", "after", "stuck"])
def test_a_session_that_waits_is_kept_open_however_calls_for_that_fail(monkeypatch, fault, form):
    """The next one keeps it, the session plays on, and nobody waits for a call that is
    stuck."""
    network, kept = Network(monkeypatch, fault == "after", "rest keeper"), []

    async def wait(server):
        host, gate = client(server).host(), Gate()
        # so the client keeps it that often; the server would wait for longer
        host.description.idle_seconds = 0.2
        kind, keep = server._posts[f"{PREFIX}/keep"]

        def noted(call, caller):
            gate.pass_()
            kept.append(call.sessions)
            return keep(call, caller)

        server._posts[f"{PREFIX}/keep"] = kind, noted
        env = FORMS[form](host)
        await said(env.reset(seed=1))
        if fault == "stuck":
            gate.open.clear()
            wait_until(lambda: gate.waiting >= 2, 60, "it was given up, and tried again")
            assert (await said(env.step(0)))[0].tolist()[1] == 1
            gate.open.set()
        for at in range(4 if fault != "stuck" else 1):
            network.fail(at if fault != "stuck" else -1)
            before = len(kept)
            wait_until(
                lambda at=at, before=before: network.count > at and len(kept) > before + 1, 60, "it is kept"
            )
        assert set(kept) == {(env.session.name,)}
        assert (await said(env.step(0)))[0].tolist()[1] == (2 if fault == "stuck" else 1)
        gate.open.clear()  # the next one is stuck, where there is one
        await said(env.close())
        assert not gate.late
        gate.open.set()
        assert server.sessions.counts().sessions == 0

    with nothing_left(), serving() as server:
        play(wait, server)
