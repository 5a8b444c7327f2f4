"""Environments of one's own with `async def`: on one event loop, the rows of serial ones."""

import asyncio
import threading
import time

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.rings import Together, ring
from tidemill.envs.asynchronous import Asynchronous, AsyncLanes
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.tasks import Loop

CARTPOLE = "CartPole-v1"


class Slow:
    """CartPole whose every call waits for a while."""

    def __init__(self, most=0.0, fault=""):
        self.env, self.most, self.fault = gymnasium.make(CARTPOLE), most, fault
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self.steps, self.closed, self.threads = 0, 0, set()

    async def wait(self):
        self.threads.add(threading.get_ident())
        await asyncio.sleep(self.most * (self.steps % 3) / 2)

    async def reset(self, *, seed=None, options=None):
        await self.wait()
        return self.env.reset(seed=seed)

    async def step(self, action):
        self.steps += 1
        await self.wait()
        if self.steps == 3:
            match self.fault:
                case "raise":
                    raise ZeroDivisionError("the pole is gone")
                case "hang":
                    await asyncio.Event().wait()
                case "cancel":
                    raise asyncio.CancelledError
        return self.env.step(action)

    async def close(self):
        self.closed += 1


class Plain:
    observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    async def step(self, action):
        return 0, 0.0, False, False, {}


@pytest.fixture(autouse=True)
def the_loop_is_gone():
    yield
    assert Loop._shared is None


def test_rows_are_those_of_serial_lanes_and_all_wait_in_one_thread():
    envs = [Slow(0.002) for _ in range(7)]
    drivers = [Driver(AsyncLanes(envs, "Slow", 4)), Driver(LaneLoop([gymnasium.make(CARTPOLE) for _ in range(7)], CARTPOLE, 4))]
    for _ in range(60):
        (left,), (right,) = (driver.tick() for driver in drivers)
        assert np.array_equal(left.tick.observation["obs"], right.tick.observation["obs"])
        assert np.array_equal(left.tick.reward, right.tick.reward) and np.array_equal(left.tick.done, right.tick.done)
    (thread,) = set.union(*(env.threads for env in envs))
    assert thread != threading.get_ident()
    for driver in drivers:
        driver.environment.close()
        driver.environment.close()
    assert [env.closed for env in envs] == [1] * 7


def test_hundreds_of_targets_wait_at_once_and_each_rings_when_it_is_ready():
    targets, rings = [AsyncLanes([Slow(0.2)], "Slow", n) for n in range(200)], threading.Semaphore(0)
    drivers = [Driver(target) for target in targets]
    for target in targets:
        target.on_ready(rings.release)
    since = time.monotonic()
    for reset in (True, False):
        for target in targets:
            target.send([{"action": np.zeros(1, np.int64)}], np.array([reset]))
        for _ in targets:
            assert rings.acquire(timeout=20)
        for target, driver in zip(targets, drivers, strict=True):
            assert target.ready()
            target.recv(driver.ticks)
    assert time.monotonic() - since < 15  # one after the other would take 20 s
    for target in targets:
        target.close()


@pytest.mark.parametrize(
    ("fault", "words"), [("raise", "ZeroDivisionError while stepping"), ("hang", r"did not answer within 0\.3 s"), ("cancel", "CancelledError")]
)
def test_a_lane_that_fails_is_named_and_the_others_close(fault, words):
    envs = [Slow(), Slow(fault=fault)]
    driver = Driver(AsyncLanes(envs, "Slow", 0, deadline=0.3))
    driver.tick(), driver.tick(), driver.tick()
    with pytest.raises(EnvironmentFault, match=words):
        driver.tick()
    driver.environment.close()
    assert [env.closed for env in envs] == [1, 1]


def test_closing_breaks_off_what_hangs():
    envs = [Slow(fault="hang")]
    driver = Driver(AsyncLanes(envs, "Slow", 0))
    driver.tick(), driver.tick(), driver.tick()
    driver.environment.send([{"action": np.zeros(1, np.int64)}], np.zeros(1, bool))
    assert not driver.environment.ready()
    driver.environment.close()
    assert envs[0].closed == 1


def test_it_is_named_by_what_makes_it():
    environment = Asynchronous(make=f"{__file__}:Slow", kwargs={"most": 0.001}).build(2, 0)
    Driver(environment).tick()
    environment.close()
    with pytest.raises(ConfigError, match="no async def reset"):
        Asynchronous(make=f"{__file__}:Plain").build(1, 0)
    with pytest.raises(ConfigError, match='did you mean "most"'):
        Asynchronous(make=f"{__file__}:Slow", kwargs={"mst": 1}).build(1, 0)
    with pytest.raises(ConfigError, match="deadline = 0"):
        Asynchronous(make="x:y", deadline=0)


def test_the_loop_is_woken_once_for_what_is_sent_together_and_whoever_waits_once_for_what_came_together():
    """Many targets on one loop, as the slots of an actor are: each hand-over costs a thread its turn."""
    loop, told, rung, done = Loop.take(), [], [], threading.Event()
    waking = loop.loop.call_soon_threadsafe

    def counted(*arguments):
        told.append(arguments)
        return waking(*arguments)

    loop.loop.call_soon_threadsafe = counted
    targets = [AsyncLanes([Slow()], "slow", seed) for seed in range(5)]
    awake = []

    def bell():
        rung.append(len(awake))
        if len(awake) == 5:
            done.set()

    def waker(number):
        def wake():
            awake.append(number)
            ring(bell)

        return wake

    try:
        for number, target in enumerate(targets):
            target.on_ready(waker(number))
        actions = [{"action": np.zeros(1, np.int64)}]
        with Together():
            for target in targets:
                target.send(actions, np.ones(1, np.bool_))
            assert told == []
        assert done.wait(20)
        assert len(told) == 1
        assert rung == [5]
    finally:
        for target in targets:
            target.close()
        loop.give_back()
