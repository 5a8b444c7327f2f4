"""Slow servers: what is under way is waited for until its deadline, is asked for once
more where that is safe, and counts as nobody's failure."""

import asyncio
import inspect
import math
import os
import threading
import time

import pytest
from tests.remote.served import Ledger, Script, applied, client, hurried, serving
from tests.run.watching import wait_until

from tidemill.core.errors import RemoteFault, RemoteTimeout
from tidemill.remote.call_limits import Budget, CallTimes
from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv

FORMS = {"threads": RemoteEnv, "loop": AsyncRemoteEnv}


async def said(answer):
    """What a call of either form says."""
    return await answer if inspect.isawaitable(answer) else answer


def playing(form, settings, plan, make=Ledger, faults=None):
    """Have `plan(env, server)` carried out, in two minutes at most; neither thread nor
    descriptor is left."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    async def whole(server):
        env = FORMS[form](client(server, **settings).host())
        async with asyncio.timeout(120):
            await plan(env, server)
            await said(env.close())

    with serving(make, faults=faults) as server:
        asyncio.run(whole(server))
    wait_until(
        lambda: set(threading.enumerate()) <= threads and len(os.listdir("/proc/self/fd")) <= files,
        60,
        "all is closed",
    )


class InTurn(Script):
    """A repeat is taken once `taken` is true of the call that it repeats, which a busy
    server may come to later."""

    def __init__(self, plan, **settings):
        super().__init__(plan, **settings)
        self.thread, self.taken = None, lambda: self.calls > 1

    def draw(self, path):
        if self.calls == 0:
            self.thread = threading.current_thread()  # of the connection on which all begins
        elif threading.current_thread() is not self.thread:
            wait_until(self.taken, 60, "the first request is taken")
        return super().draw(path)


class Slow(Ledger):
    def reset(self, **given):
        time.sleep(0.1)
        return super().reset(**given)

    def step(self, action):
        time.sleep(0.1)
        return super().step(action)


@pytest.mark.parametrize("form", FORMS)
def test_a_server_that_takes_longer_than_an_attempt_loses_no_step_however_few_retries_there_are(form):
    async def plan(env, server):
        await said(env.reset(seed=1))
        for number in range(1, 15):
            assert (await said(env.step(0)))[0].tolist()[1] == number
        host = env.session.host
        assert applied(server) == 14 and server.sessions.counts().repeated > 0
        assert host.breaker.opened == 0 and host.budget.spent < 14  # it ran out of repeats, and went on
        assert host.budget.spend(4)  # what calls that fail have left

    playing(form, {"attempt_s": 0.02, "retries": 0.0}, plan, lambda: Slow(length=100))


@pytest.mark.parametrize("deadline_s", [120.0, math.inf])
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_is_lost_in_silence_is_asked_for_on_another_connection(form, deadline_s):
    async def plan(env, server):
        server.faults.taken = lambda: applied(server)
        await said(env.reset(seed=1))
        first = env._connection._connection
        with hurried(env.session, attempt_s=0.1):
            assert (await said(env.step(0)))[0].tolist()[1] == 1
        assert env._connection._connection is not first
        for number in range(2, 5):
            assert (await said(env.step(0)))[0].tolist()[1] == number
        assert applied(server) == 4 and server.sessions.counts().repeated == 1

    playing(form, {"deadline_s": deadline_s}, plan, faults=InTurn({1: "stall"}, stall_seconds=1000.0))


@pytest.mark.parametrize("form", FORMS)
def test_the_first_request_counts_though_the_repeat_gets_no_answer(form):
    gate = threading.Event()

    class Late(Ledger):
        def step(self, action):
            assert gate.wait(60)
            return super().step(action)

    async def plan(env, server):
        await said(env.reset(seed=1))
        first = env._connection._connection
        opener = threading.Thread(
            target=lambda: (wait_until(lambda: server.faults.calls == 3, 60, "the repeat"), gate.set())
        )
        opener.start()
        with hurried(env.session, attempt_s=0.1):
            assert (await said(env.step(0)))[0].tolist()[1] == 1
        opener.join()
        assert env._connection._connection is first
        assert (await said(env.step(0)))[0].tolist()[1] == 2
        assert applied(server) == 2

    playing(form, {}, plan, Late, InTurn({2: "reply_lost"}))


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_of_the_repeat_leaves_the_first_request_to_be_waited_for(form):
    gate = threading.Event()

    class Late(Ledger):
        def step(self, action):
            assert gate.wait(60)
            return super().step(action)

    async def plan(env, server):
        await said(env.reset(seed=1))
        opener = threading.Thread(
            target=lambda: (
                wait_until(lambda: server.sessions.counts().refused == 1, 60, "the repeat"),
                gate.set(),
            )
        )
        opener.start()
        with hurried(env.session, attempt_s=0.1):
            assert (await said(env.step(0)))[0].tolist()[1] == 1
        opener.join()
        assert applied(server) == 1 and env.session.host.breaker.opened == 0

    playing(form, {}, plan, Late, Script({2: "unavailable"}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("repeats", ["refused", "applied"])
def test_a_step_is_never_repeated_while_it_is_under_way_where_the_server_remembers_none(form, repeats):
    async def plan(env, server):
        env.session.host.description.repeats = repeats
        await said(env.reset(seed=1))
        await said(env.step(0))
        assert server.faults.calls == 2

    playing(form, {"attempt_s": 0.02}, plan, Slow, Script({}))


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_end_at_their_deadline_are_no_failures_of_the_host_and_say_which_settings_they_went_by(
    form, monkeypatch
):
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 0.1)

    class Hanging(Ledger):
        def step(self, action):
            assert gate.wait(60)
            return super().step(action)

    async def plan(env, server):
        host, told = env.session.host, []
        for _ in range(6):
            await said(env.reset(seed=1))
            gate.clear()
            with (
                hurried(env.session, attempt_s=0.1, deadline_s=0.3),
                pytest.raises(RemoteTimeout, match=r"step 1 .*within 0\.3 s \(deadline_s\)") as raised,
            ):
                await said(env.step(0))
            told.append(str(raised.value))
            gate.set()
        # where the machine stood still for both there was no time between them
        assert any("sent again after 0.1 s (attempt_s)" in text for text in told)
        assert all("deadline_s=SECONDS" in text for text in told)
        assert host.breaker.opened == 0 and host.breaker.wait() == 0
        await said(env.reset(seed=1))
        assert (await said(env.step(0)))[0].tolist()[1] == 1

    playing(form, {"retries": 0.0}, plan, Hanging)


def test_a_call_under_way_twice_is_broken_off_at_once():
    gate, ended = threading.Event(), threading.Event()

    class Hanging(Ledger):
        def step(self, action):
            assert gate.wait(240)
            return super().step(action)

    def step(env):
        with pytest.raises(RemoteFault, match="closed while a call was under way"):
            env.step(0)
        ended.set()

    with serving(Hanging, faults=Script({})) as server:
        env = RemoteEnv(client(server, deadline_s=240.0).host())
        env.reset(seed=1)
        with hurried(env.session, attempt_s=0.05):
            thread = threading.Thread(target=step, args=(env,))
            thread.start()
            wait_until(lambda: server.faults.calls == 3, 60, "the repeat")
            env.interrupt()
            assert ended.wait(60)  # as no call does that hangs
        thread.join(60)
        gate.set()
        env.close()


def test_an_answer_is_late_after_twice_what_the_slowest_call_of_late_took():
    pace = CallTimes()
    assert pace.late(30.0) == 15.0  # nothing is known yet
    pace.took(0.001)
    assert pace.late(30.0) == 1.0
    pace.took(11.0)
    assert pace.late(30.0) == 22.0
    for _ in range(500):
        pace.took(0.001)
    assert pace.late(30.0) == 1.0


def test_repeats_of_what_is_under_way_leave_half_of_the_retries_for_calls_that_fail():
    budget = Budget(0.0, 10)
    assert [budget.spend(spare=True) for _ in range(6)] == [True] * 5 + [False]
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
