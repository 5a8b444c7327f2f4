"""Environments of one's own with `async def`: on one event loop, the rows of serial
ones."""

import asyncio
import threading
import time
from contextlib import suppress

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.core.asyncio_loops import Loop
from tidemill.core.errors import BrokenOff, ConfigError, EnvironmentFault
from tidemill.core.step_deadlines import StepTimes
from tidemill.core.thread_loop import own
from tidemill.envs.asynchronous import Asynchronous, AsyncLanes
from tidemill.envs.lanes import LaneLoop
from tidemill.transports.local import LocalBell

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
                case "exit":
                    raise SystemExit(3)
                case "broken off":
                    raise BrokenOff
                case "cancel":
                    raise asyncio.CancelledError
                case "give up":
                    raise GeneratorExit
                case "its own deadline":
                    raise TimeoutError("no word from the arm")
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
def patience(monkeypatch):
    """Ends are waited for with time."""
    for module in ("lane_coroutines", "asynchronous"):
        monkeypatch.setattr(f"tidemill.envs.{module}.CLOSE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def the_loop_is_gone():
    yield
    assert own.loop is None


def test_rows_are_those_of_serial_lanes_and_all_wait_in_the_thread_that_plays_them():
    envs = [Slow(0.002) for _ in range(7)]
    drivers = [
        Driver(AsyncLanes(envs, "Slow", 4, StepTimes())),
        Driver(LaneLoop([gymnasium.make(CARTPOLE) for _ in range(7)], CARTPOLE, 4)),
    ]
    for _ in range(60):
        (left,), (right,) = (driver.tick() for driver in drivers)
        assert np.array_equal(left.tick.observation["obs"], right.tick.observation["obs"])
        assert np.array_equal(left.tick.reward, right.tick.reward) and np.array_equal(
            left.tick.done, right.tick.done
        )
    assert set.union(*(env.threads for env in envs)) == {threading.get_ident()}
    for driver in drivers:
        driver.environment.close()
        driver.environment.close()
    assert [env.closed for env in envs] == [1] * 7


class Meeting(Slow):
    """Its steps take until so many of its kind wait at once."""

    waiting = 0

    async def step(self, action):
        Meeting.waiting += 1
        while Meeting.waiting < 200:
            await asyncio.sleep(0.005)
        return await super().step(action)


def test_hundreds_of_targets_wait_at_once_and_each_rings_when_it_is_ready(monkeypatch):
    monkeypatch.setattr(Meeting, "waiting", 0)
    targets, bell, rung = (
        [AsyncLanes([Meeting()], "Slow", n, StepTimes()) for n in range(200)],
        LocalBell(),
        [],
    )
    drivers = [Driver(target) for target in targets]

    def waker(number):
        def wake():
            rung.append(number)
            bell.ring()

        return wake

    for number, target in enumerate(targets):
        target.on_ready(waker(number))
    for reset in (True, False):
        for target in targets:
            target.send([{"action": np.zeros(1, np.int64)}], np.array([reset]))
        while len(rung) < 200:
            assert bell.wait(60)
        assert sorted(rung) == list(range(200))
        rung.clear()
        for target, driver in zip(targets, drivers, strict=True):
            assert target.ready()
            target.recv(driver.ticks)
    for target in targets:
        target.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ZeroDivisionError while stepping"),
        ("hang", r"did not answer within 1 s"),
        ("cancel", "CancelledError"),
        ("give up", "GeneratorExit"),
        ("its own deadline", "raised TimeoutError while stepping .*no word from the arm"),
    ],
)
def test_a_lane_that_fails_is_named_and_the_others_close(fault, words):
    envs = [Slow(), Slow(fault=fault)]
    driver = Driver(AsyncLanes(envs, "Slow", 0, StepTimes(60.0)))
    driver.tick(), driver.tick(), driver.tick()
    if fault == "hang":
        driver.environment._times.given = 1.0
    with pytest.raises(EnvironmentFault, match=words):
        driver.tick()
    driver.environment.close()
    assert [env.closed for env in envs] == [1, 1]


def test_closing_breaks_off_what_hangs():
    envs = [Slow(fault="hang")]
    driver = Driver(AsyncLanes(envs, "Slow", 0, StepTimes()))
    driver.tick(), driver.tick(), driver.tick()
    driver.environment.send([{"action": np.zeros(1, np.int64)}], np.zeros(1, bool))
    assert not driver.environment.ready()
    driver.environment.close()
    assert envs[0].closed == 1


class Stubborn(Slow):
    """Does not let itself be cancelled in its third step, until it is freed."""

    freed = False

    async def step(self, action):
        while self.steps == 1 and not self.freed:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)
        return await super().step(action)


def test_one_that_does_not_let_itself_be_broken_off_is_closed_when_it_has_ended(monkeypatch):
    monkeypatch.setattr("tidemill.envs.lane_coroutines.CLOSE_SECONDS", 0.05)
    loop = Loop.take()  # of other environments
    envs = [Slow(), Stubborn()]
    driver = Driver(AsyncLanes(envs, CARTPOLE, 3, StepTimes()))
    for _ in range(2):
        driver.tick()
    driver.environment.send([{"action": np.zeros(2, np.int64)}], np.zeros(2, bool))
    loop.run(0.02)
    driver.environment.close()
    assert [env.closed for env in envs] == [1, 0]
    envs[1].freed = True
    until = time.monotonic() + 60
    while not envs[1].closed and time.monotonic() < until:
        loop.run(0.01)
    assert envs[1].closed == 1
    loop.give_back()


def test_it_is_named_by_what_makes_it():
    environment = Asynchronous(make=f"{__file__}:Slow", kwargs={"most": 0.001}).build(2, 0)
    Driver(environment).tick()
    environment.close()
    with pytest.raises(ConfigError, match="no async def reset"):
        Asynchronous(make=f"{__file__}:Plain").build(1, 0)
    with pytest.raises(ConfigError, match='did you mean "most"'):
        Asynchronous(make=f"{__file__}:Slow", kwargs={"mst": 1}).build(1, 0)
    with pytest.raises(ConfigError, match="deadline_s = 0"):
        Asynchronous(make="x:y", deadline_s=0)


def test_answers_that_came_meanwhile_ring_together():
    """Many targets, as the slots of an actor are: whoever plays them finds all that has
    come."""
    targets = [AsyncLanes([Slow()], "slow", seed, StepTimes()) for seed in range(5)]
    bell = LocalBell()
    rung = []
    begun = np.ones(1, np.bool_)
    for number, target in enumerate(targets):
        target.on_ready(lambda number=number: rung.append(number))
        target.send([{"action": np.zeros(1, np.int64)}], begun)
        assert rung == []
    while not rung:
        assert bell.wait(60)
    assert rung == list(range(5)) and all(target.ready() for target in targets)
    for target in targets:
        target.close()


def test_whoever_only_looks_whether_it_is_ready_has_it_go_on():
    target = AsyncLanes([Slow(0.001)], "slow", 0, StepTimes())
    target.send([{"action": np.zeros(1, np.int64)}], np.ones(1, np.bool_))
    until = time.monotonic() + 60
    while not target.ready():
        assert time.monotonic() < until
    target.close()


@pytest.mark.parametrize(("fault", "error"), [("exit", SystemExit), ("broken off", BrokenOff)])
def test_a_lane_that_wants_to_exit_or_meets_a_second_ctrl_c_is_its_player_s_to_tell(fault, error):
    driver = Driver(AsyncLanes([Slow(fault=fault)], "slow", 0, StepTimes()))
    driver.tick(), driver.tick(), driver.tick()
    with pytest.raises(error):
        driver.tick()
    driver.environment.close()


def test_another_thread_closes_what_is_played_here():
    """As a slot does with an environment that failed, while its actor goes on with the
    others."""
    env, bell = Slow(fault="hang"), LocalBell()
    driver = Driver(AsyncLanes([env], "slow", 0, StepTimes()))
    driver.tick(), driver.tick(), driver.tick()
    driver.environment.send([{"action": np.zeros(1, np.int64)}], np.zeros(1, np.bool_))
    closing = threading.Thread(target=driver.environment.close)
    closing.start()
    while closing.is_alive() or own.loop is not None:
        bell.wait(0.05)
    assert env.closed == 1
