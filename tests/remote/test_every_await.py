"""A fault at every point at which the client waits: the call succeeds or raises a named
error, and the session goes on from there. Never a hang."""

import asyncio

import httpcore
import pytest
from tests.remote.served import applied, client, serving

from tidemill.remote.connections import AsyncConnection, _AsyncStream
from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv


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


class Faulty:
    """The network's operations, counted from `begin` on: the one at number `at` fails by
    `error`, before it is done, or `after` it was: then what it brought is lost."""

    def __init__(self, monkeypatch, error, after=False):
        self.error, self.after, self.at, self.count = error, after, -1, 0
        for holder, name in ((_AsyncStream, "read"), (_AsyncStream, "write"), (AsyncConnection, "_connect")):
            monkeypatch.setattr(holder, name, self.failing(getattr(holder, name)))

    def begin(self, at):
        self.at, self.count = at, 0

    def failing(self, operation):
        async def fails(*arguments, **named):
            here = self.count == self.at
            self.count += 1
            if here and not self.after:
                raise self.error
            result = await operation(*arguments, **named)
            if here:
                raise self.error
            return result

        return fails


def points(play):
    """Return at how many points there can be a fault: `play(server, at)` has it at each,
    from 0 on, and tells whether there was such a point."""
    for at in range(100):
        with serving() as server:
            if not play(server, at):
                return at
    raise AssertionError("there is no end to them")


def points_in_loop(play):
    """The same, where `play` is played by an event loop."""

    async def played(server, at):
        async with asyncio.timeout(120):
            return await play(AsyncRemoteEnv(client(server).host()), server, at)

    return points(lambda server, at: asyncio.run(played(server, at)))


def test_an_async_step_that_is_cancelled_anywhere_is_given_up_and_the_session_goes_on():
    async def play(env, server, at):
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

    assert points_in_loop(play) >= 3  # to connect, to write, to read


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [OSError("cut"), httpcore.ReadError("cut"), TimeoutError()])
def test_an_async_step_whose_network_fails_anywhere_is_told_once(monkeypatch, error, after):
    network = Faulty(monkeypatch, error, after)

    async def play(env, server, at):
        await env.reset(seed=1)
        await env._connection.hang_up()
        network.begin(at)
        assert (await env.step(0))[0].tolist()[:2] == [0, 1]
        assert (await env.step(0))[0].tolist()[:2] == [0, 2]
        assert applied(server) == 2
        reached = network.count > at
        await env.close()
        return reached

    assert points_in_loop(play) > 5


def test_a_blocking_step_whose_network_fails_anywhere_is_told_once():
    """Connecting, writing and reading all ask how long they may take: there the failure
    is raised."""

    def play(server, at):
        env, count = RemoteEnv(client(server).host()), 0
        env.reset(seed=1)
        env._connection.hang_up()  # so that connecting is among the points
        deadline = env._connection._connection._deadline
        left = deadline.left

        def failing(timeout):
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
        return count > at

    assert points(play) >= 4


@pytest.mark.parametrize("call", ["reset", "close"])
def test_an_async_reset_or_close_that_is_cancelled_anywhere_leaves_a_session_that_can_go_on(call):
    async def play(env, server, at):
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
        assert (await env.reset(seed=3))[1] == {"seed": 3}
        assert (await env.step(2))[0].tolist()[1] == 1
        await env.close()
        return under_way.waited > at

    # to connect, and to read what the server is, and the answer
    assert points_in_loop(play) >= (4 if call == "reset" else 3)


@pytest.mark.parametrize("call", ["reset", "close"])
@pytest.mark.parametrize("error", [OSError("cut"), httpcore.ReadError("cut"), TimeoutError()])
def test_an_async_reset_or_close_whose_network_fails_anywhere_does_what_it_should(monkeypatch, call, error):
    network = Faulty(monkeypatch, error)

    async def play(env, server, at):
        await env.reset(seed=1)
        if call == "reset":
            await env.close()
        await env._connection.hang_up()
        network.begin(at)
        if call == "reset":
            observation, info = await env.reset(seed=2)
            assert observation.tolist()[:2] == [0, 0] and info == {"seed": 2}
        else:
            await env.close()  # told once, whatever comes of it
        reached = network.count > at
        if call == "reset":
            assert (await env.step(1))[0].tolist()[1] == 1
        await env.close()
        return reached

    assert points_in_loop(play) > (5 if call == "reset" else 2)
