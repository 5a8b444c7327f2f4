"""A fault at every point at which the client waits: the call succeeds or raises a named error, and the session goes on from there. Never a hang."""

import asyncio

import httpcore
import pytest
from tests.envs.rest.served import applied, client, serving

from tidemill.envs.rest.connections import AsyncConnection, _AsyncStream
from tidemill.envs.rest.session import AsyncRemoteEnv, RemoteEnv


class Cancelled:
    """Awaits `work`, and cancels it where it waits for the `at`th time (from 0)."""

    def __init__(self, work, at):
        self.work, self.at, self.waited = work, at, 0

    def __await__(self):
        steps, raised = self.work.__await__(), None
        while True:
            try:
                future = steps.send(None) if raised is None else steps.throw(raised)
            except StopIteration as end:
                return end.value
            raised = None
            if self.waited == self.at:
                asyncio.current_task().cancel()
            self.waited += 1
            try:
                yield future
            except BaseException as error:
                raised = error


async def cancelled_step(at, server):
    """Cancel the second step at its waiting point `at`; return whether there was such a point."""
    env = AsyncRemoteEnv(client(server).host())
    async with asyncio.timeout(60):
        await env.reset(seed=1)
        await env.step(0)
        await env._connection.hang_up()  # so that connecting is among the points
        step, told = Cancelled(env.step(0), at), False
        try:
            told = (await step)[0].tolist()[:2] == [0, 2]
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
            assert (await env.reset())[0].tolist()[1] == 0
        assert told == (step.waited <= at)
        assert (await env.step(3))[0].tolist()[1] == (3 if told else 1)
        await env.close()
        assert (2 if not told else 3) <= applied(server) <= 3 and server.sessions.counts().sessions == 0
    return not told


def test_an_async_step_that_is_cancelled_anywhere_is_given_up_and_the_session_goes_on():
    points = 0
    while True:
        with serving() as server:
            if not asyncio.run(cancelled_step(points, server)):
                break
        points += 1
        assert points < 100
    assert points >= 3  # to connect, to write, to read


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [OSError("cut"), httpcore.ReadError("cut"), TimeoutError()])
def test_an_async_step_whose_network_fails_anywhere_is_told_once(monkeypatch, error, after):
    """Before each operation of the network, or after it was done: then what it brought is lost."""
    count = at = 0

    def failing(operation):
        async def fails(*arguments, **named):
            nonlocal count
            count, here = count + 1, count == at
            if here and not after:
                raise error
            result = await operation(*arguments, **named)
            if here:
                raise error
            return result

        return fails

    async def play(server):
        nonlocal count
        env = AsyncRemoteEnv(client(server).host())
        async with asyncio.timeout(60):
            await env.reset(seed=1)
            await env._connection.hang_up()
            count = 0
            assert (await env.step(0))[0].tolist()[:2] == [0, 1]
            assert (await env.step(0))[0].tolist()[:2] == [0, 2]
            done = count
            assert applied(server) == 2
            await env.close()
        return done

    for holder, name in ((_AsyncStream, "read"), (_AsyncStream, "write"), (AsyncConnection, "_connect")):
        monkeypatch.setattr(holder, name, failing(getattr(holder, name)))
    reached = True
    while reached:
        with serving() as server:
            reached = asyncio.run(play(server)) > at
        at += 1
        assert at < 100
    assert at > 5


def test_a_blocking_step_whose_network_fails_anywhere_is_told_once():
    """Connecting, writing and reading all ask how long they may take: there the failure is raised."""
    points = 0
    for at in range(50):
        with serving() as server:
            env = RemoteEnv(client(server).host())
            env.reset(seed=1)
            env._connection.hang_up()  # so that connecting is among the points
            deadline, count = env._connection._deadline, 0
            left = deadline.left

            def failing(timeout, at=at, left=left):
                nonlocal count
                count += 1
                if count == at + 1:
                    raise httpcore.ReadError("cut")
                return left(timeout)

            deadline.left = failing
            assert env.step(0)[0].tolist()[:2] == [0, 1]
            assert env.step(0)[0].tolist()[:2] == [0, 2]
            assert applied(server) == 2
            env.close()
        if count <= at:
            break
        points += 1
    assert 4 <= points < 50


CALLS = ("reset", "close")


@pytest.mark.parametrize("call", CALLS)
def test_an_async_reset_or_close_that_is_cancelled_anywhere_leaves_a_session_that_can_go_on(call):
    async def cancelled(server, at):
        env = AsyncRemoteEnv(client(server).host())
        async with asyncio.timeout(60):
            await env.reset(seed=1)
            await env.step(0)
            if call == "reset":
                await env.close()  # so that a session is opened, and the server described
            else:
                await env._connection.hang_up()  # so that connecting is among the points
            under_way = Cancelled(env.reset(seed=2) if call == "reset" else env.close(), at)
            try:
                await under_way
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
            reached = under_way.waited > at
            assert (await env.reset(seed=3))[1] == {"seed": 3}
            assert (await env.step(2))[0].tolist()[1] == 1
            await env.close()
        return reached

    points = 0
    while True:
        with serving() as server:
            if not asyncio.run(cancelled(server, points)):
                break
        points += 1
        assert points < 100
    assert points >= (4 if call == "reset" else 3)  # to connect, and to read what the server is, and the answer


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [OSError("cut"), httpcore.ReadError("cut"), TimeoutError()])
def test_an_async_reset_or_close_whose_network_fails_anywhere_does_what_it_should(monkeypatch, call, error):
    count = at = 0

    def failing(operation):
        async def fails(*arguments, **named):
            nonlocal count
            count, here = count + 1, count == at
            if here:
                raise error
            return await operation(*arguments, **named)

        return fails

    async def play(server):
        nonlocal count
        env = AsyncRemoteEnv(client(server).host())
        async with asyncio.timeout(60):
            await env.reset(seed=1)
            if call == "reset":
                await env.close()
            await env._connection.hang_up()
            count = 0
            if call == "reset":
                observation, info = await env.reset(seed=2)
                assert observation.tolist()[:2] == [0, 0] and info == {"seed": 2}
                done = count
                assert (await env.step(1))[0].tolist()[1] == 1
            else:
                await env.close()  # told once, whatever comes of it
                done = count
            await env.close()
        return done

    for holder, name in ((_AsyncStream, "read"), (_AsyncStream, "write"), (AsyncConnection, "_connect")):
        monkeypatch.setattr(holder, name, failing(getattr(holder, name)))
    reached = True
    while reached:
        with serving() as server:
            reached = asyncio.run(play(server)) > at
        at += 1
        assert at < 100
    assert at > (5 if call == "reset" else 2)
