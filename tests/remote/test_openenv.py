"""OpenEnv servers: a real WebSocket server that speaks their protocol for CartPole."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import gymnasium
import numpy as np
import pytest
import websockets
import websockets.sync.server
from tests.envs.driver import Driver
from tests.remote.served import port_of_ones_own

from tidemill.core.config import encode
from tidemill.core.errors import (
    ConfigError,
    EnvironmentFault,
    ProtocolFault,
    RemoteFault,
    RemoteTimeout,
    RemoteUnavailable,
    ReplyLost,
    SessionLost,
)
from tidemill.core.step_deadlines import StepTimes
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.remote import openenv
from tidemill.remote.openenv import OpenEnv, OpenEnvSession


class CartPole:
    """Translates CartPole as the server below plays it."""

    def __init__(self):
        env = gymnasium.make("CartPole-v1")
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def observation(self, said):
        return np.array(said["state"], np.float32)

    def action(self, action):
        return {"push": int(action)}


@contextmanager
def serving(fault="", at=3, token=None, port=0):
    """A server whose session goes wrong in its step `at`. Without the token none is
    opened."""
    sessions = []

    async def session(socket):
        env, steps = gymnasium.make("CartPole-v1"), 0
        sessions.append(socket)
        async for raw in socket:
            message = json.loads(raw)
            match message["type"]:
                case "reset":
                    state, _ = env.reset(seed=message["data"].get("seed"))
                    reward, done = None, False
                case "step":
                    steps += 1
                    state, reward, ended, cut, _ = env.step(message["data"]["push"])
                    done = ended or cut
                case "close":
                    break
            answer = {
                "type": "observation",
                "data": {"observation": {"state": state.tolist()}, "reward": reward, "done": done},
            }
            if message["type"] == "step" and steps == at:
                match fault:
                    case "drop":
                        await socket.close()
                        return
                    case "stall":
                        await socket.wait_closed()
                    case "error":
                        answer = {"type": "error", "data": {"message": "as asked", "code": "EXECUTION_ERROR"}}
                    case "html":
                        await socket.send("<html>")
                        continue
                    case "half":
                        answer = {"type": "observation", "data": {}}
                    case "nan":
                        answer["data"]["reward"] = float("nan")
                    case dict():
                        answer["data"] = {
                            key: value
                            for key, value in (answer["data"] | fault).items()
                            if value != "missing"
                        }
            await socket.send(json.dumps(answer))

    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    ports = []

    async def main():
        def known(connection, request):
            said = request.headers.get("authorization")
            return None if token is None or said == f"Bearer {token}" else connection.respond(401, "no token")

        async with websockets.serve(
            session, "127.0.0.1", port, close_timeout=0.1, process_request=known
        ) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield (
            OpenEnv(url=f"http://127.0.0.1:{ports[0]}", translate=f"{__file__}:CartPole", deadline_s=120.0),
            sessions,
        )
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@pytest.fixture
def port():
    with port_of_ones_own() as number:
        yield number


@contextmanager
def hurried(environment, deadline_s):
    """Have its calls end at this deadline meanwhile."""
    times = environment.envs[0]._times
    patient, times.given = times.given, deadline_s
    try:
        yield
    finally:
        times.given = patient


def test_rows_are_those_of_the_environment_itself():
    with serving() as (config, sessions):
        drivers = [Driver(config.build(3, 5)), Driver(Gymnasium(id="CartPole-v1").build(3, 5))]
        for _ in range(80):
            (left,), (right,) = (driver.tick() for driver in drivers)
            assert np.array_equal(left.tick.observation["obs"], right.tick.observation["obs"])
            assert np.array_equal(left.tick.reward, right.tick.reward) and np.array_equal(
                left.tick.done, right.tick.done
            )
        assert len(sessions) == 3
        for driver in drivers:
            driver.environment.close()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("drop", ReplyLost, "connection was lost"),
        ("stall", RemoteTimeout, "no answer within 0.5 s"),
        ("error", RemoteFault, "EXECUTION_ERROR: as asked"),
        ("html", RemoteFault, "no JSON"),
        ("half", RemoteFault, "no observation"),
    ],
)
def test_what_goes_wrong_is_named_and_the_next_reset_opens_another_session(fault, error, words):
    with serving(fault) as (config, sessions):
        environment = config.build(1, 5)
        driver = Driver(environment)
        driver.tick(), driver.tick(), driver.tick()
        with hurried(environment, 0.5 if fault == "stall" else 120.0), pytest.raises(error, match=words):
            driver.tick()
        with pytest.raises(SessionLost, match="reset opens one"):
            driver.tick(reset=np.zeros(1, bool))
        (told,) = driver.tick(reset=np.ones(1, bool))
        assert told.tick.present.all() and len(sessions) == 2
        environment.close()


def test_a_server_that_starts_again_is_tried_until_it_is_there(port):
    with serving(port=port) as (config, _):
        environment, refused = config.build(1, 5), config.build(1, 5)
        driver = Driver(environment)
        driver.tick(), driver.tick()
    with pytest.raises(ReplyLost, match="connection was lost"):
        driver.tick()
    with pytest.raises(RemoteUnavailable, match="no session could be opened"):
        Driver(refused).tick()  # it has never answered
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(lambda: driver.tick(reset=np.ones(1, bool))[0])
        assert wait([told], 0.3).not_done  # it is being tried
        with serving(port=port) as (_, sessions):
            assert told.result(120).tick.present.all() and len(sessions) == 1
            environment.close()
    refused.close()


def test_a_server_that_stays_away_is_given_up_at_the_deadline(port):
    with serving(port=port) as (config, _):
        environment = config.build(1, 5)
        driver = Driver(environment)
        driver.tick(), driver.tick()
    with pytest.raises(ReplyLost, match="connection was lost"):
        driver.tick()
    with (
        hurried(environment, 0.5),
        pytest.raises(RemoteUnavailable, match=r"no session could be opened within 0\.5 s"),
    ):
        driver.tick(reset=np.ones(1, bool))
    environment.close()


def test_a_reward_that_is_no_number_is_named():
    with serving("nan") as (config, _):
        driver = Driver(config.build(1, 5))
        driver.tick(), driver.tick(), driver.tick()
        with pytest.raises(EnvironmentFault, match="no JSON"):  # which has no NaN
            driver.tick()
        driver.environment.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"reward": "missing"}, "reward is missing; it must be a number, or null"),
        ({"reward": "1.5"}, r"reward is '1\.5'; it must be a number"),
        ({"done": "missing"}, "done is missing; it must be true or false"),
        ({"done": "false"}, "done is 'false'; it must be true or false"),
        ({"done": None}, "done is None; it must be true or false"),
    ],
)
def test_an_answer_that_lacks_a_field_or_has_a_wrong_one_is_an_error_that_names_it(fault, words):
    with serving(fault) as (config, _):
        driver = Driver(config.build(1, 5))
        driver.tick(), driver.tick(), driver.tick()
        with pytest.raises(ProtocolFault, match=words):
            driver.tick()
        driver.environment.close()


def test_a_reward_of_null_is_none():
    with serving({"reward": None}) as (config, _):
        driver = Driver(config.build(1, 5))
        assert [driver.tick()[0].tick.reward[0] for _ in range(4)] == [0, 1, 1, 0]
        driver.environment.close()


def test_a_token_is_sent_and_not_saved(monkeypatch):
    with serving(token="secret-token") as (config, sessions):
        environment = config.build(1, 5)
        with pytest.raises(RemoteUnavailable, match=r"401.*takes this token"):
            Driver(environment).tick()
        environment.close()
        monkeypatch.setenv("TIDEMILL_TOKEN", "secret-token")
        environment = config.build(1, 5)
        Driver(environment).tick()
        assert len(sessions) == 1 and "secret" not in str(encode(config))
        environment.close()


def test_episodes_are_cut_at_the_limit():
    with serving() as (config, _):
        driver = Driver(config.replace(max_episode_steps=4).build(1, 5))
        told = [driver.tick()[0].tick for _ in range(5)]
        assert [bool(tick.truncated[0]) for tick in told] == [False] * 4 + [True] and not told[-1].done[0]
        driver.environment.close()


def test_what_cannot_be_is_refused(port):
    with serving(port=port) as (config, _):
        pass
    environment = config.build(1, 0)
    with pytest.raises(RemoteUnavailable, match="no session could be opened"):
        Driver(environment).tick()
    environment.close()
    with pytest.raises(ConfigError, match="has no observation_space"):
        config.replace(translate="tests.envs.driver:copy_of").replace(translate="builtins:object").build(1, 0)
    for url in ("localhost:8000", "http://[::1", "http://a..b"):
        with pytest.raises(ConfigError, match="no address"):
            OpenEnv(url=url, translate="x:y")


def test_what_answers_in_place_of_a_server_is_one_that_is_away(monkeypatch):
    """Where none has answered there before it is a wrong address."""
    monkeypatch.setattr("tidemill.remote.openenv._answered", set())

    async def begin(config):
        session = OpenEnvSession(config, CartPole(), StepTimes(120.0))
        try:
            await session.reset()
        finally:
            await session.close()

    def other(socket):
        for _ in socket:
            socket.send('{"hello": "there"}')

    with port_of_ones_own() as port:
        served = serving(port=port)
        config, _ = served.__enter__()
        asyncio.run(begin(config))
        served.__exit__(None, None, None)
        with websockets.sync.server.serve(other, "127.0.0.1", port) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                with pytest.raises(
                    RemoteUnavailable, match=r"not of OpenEnv's protocol.*else answers in the"
                ):
                    asyncio.run(begin(config))
                openenv._answered.clear()
                with pytest.raises(RemoteFault, match="not of OpenEnv's protocol") as raised:
                    asyncio.run(begin(config))
                assert type(raised.value) is RemoteFault
            finally:
                server.shutdown()
                thread.join()
