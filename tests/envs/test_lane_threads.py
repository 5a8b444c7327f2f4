"""Lanes that step in threads: the same rows, faults and ends as lanes that step one after
the other."""

import threading
import time
from asyncio import CancelledError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.envs.driver import Driver
from tests.envs.games import Counter, Delayed, Hanging, Nested

from tidemill.core.config import set_path
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs import lane_threads as crew
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.presets.experiments import experiment_for


def names():
    return [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, names()


def same_rows(serial, threaded, ticks, force=()):
    """Drive both with the same actions and resets, and compare all that they tell."""
    drivers = [Driver(serial, seed=3), Driver(threaded, seed=3)]
    for number in range(ticks):
        reset = None
        if number in force:  # one lane is begun anew in the middle of its episode
            reset = np.logical_and.reduce([over.all(axis=1) for over in drivers[0].over])
            reset[number % serial.lanes] = True
        (left,), (right,) = (driver.tick(reset=None if reset is None else reset.copy()) for driver in drivers)
        assert np.array_equal(left.reset, right.reset)
        for name in ("reward", "done", "truncated", "present", "restarted"):
            assert np.array_equal(getattr(left.tick, name), getattr(right.tick, name)), (number, name)
        for name, array in left.tick.observation.items():
            assert np.array_equal(array, right.tick.observation[name]), (number, name)
    serial.close()
    threaded.close()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    threads=st.integers(1, 12),
    seed=st.integers(0, 2**20),
    force=st.sets(st.integers(1, 14), max_size=3),
)
def test_rows_are_those_of_serial_lanes_whatever_the_delays(lengths, threads, seed, force):
    serial = LaneLoop([Counter(length=n) for n in lengths], "Counter", seed)
    threaded = LaneLoop([Delayed(length=n, most=0.001) for n in lengths], "Delayed", seed, threads)
    same_rows(serial, threaded, 15, force)


@pytest.mark.parametrize(
    ("env_id", "limit"),
    [("CartPole-v1", 20), ("CartPole-v1", None), ("Pendulum-v1", 30), ("FrozenLake-v1", 7)],
)
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_gymnasiums_own_environments_give_the_same_rows(env_id, limit, threads):
    config = Gymnasium(id=env_id, max_episode_steps=limit)
    same_rows(config.build(5, 11), config.replace(threads=threads).build(5, 11), 150, {40, 41, 90})


def test_nested_spaces_give_the_same_rows():
    same_rows(
        LaneLoop([Nested() for _ in range(4)], "Nested", 1),
        LaneLoop([Nested() for _ in range(4)], "Nested", 1, 4),
        20,
        {3},
    )


def test_a_finished_lane_idles_until_its_reset():
    envs = [Delayed(length=2), Delayed(length=3)]
    driver, nothing = Driver(LaneLoop(envs, "Delayed", 0, 2)), np.zeros(2, bool)
    driver.tick()
    for present in ([True, True], [True, True], [False, True]):
        (told,) = driver.tick(reset=nothing)
        assert told.tick.present.tolist() == present
    assert [len(env.given) for env in envs] == [2, 3]
    driver.environment.close()


def test_send_returns_at_once_and_one_ring_says_that_all_lanes_have_answered():
    loop = LaneLoop([Delayed(length=50, most=0.02) for _ in range(8)], "Delayed", 0, 8)
    rings = threading.Semaphore(0)
    loop.on_ready(rings.release)
    driver = Driver(loop)
    actions, reset = [{"action": np.zeros(8, np.int64)}], np.ones(8, bool)
    for number in range(20):
        loop.send(actions, reset)
        assert rings.acquire(timeout=60)
        assert loop.ready()
        loop.recv(driver.ticks)
        assert driver.ticks[0].observation["obs"][:, 1].tolist() == [number] * 8
        reset = np.zeros(8, bool)
    assert not rings.acquire(blocking=False)
    loop.close()


@pytest.mark.parametrize(("threads", "groups"), [(1, 1), (3, 3), (7, 7), (9, 7)])
def test_a_lane_keeps_to_one_thread(threads, groups):
    envs = [Delayed(length=5, most=0.0005) for _ in range(7)]
    driver = Driver(LaneLoop(envs, "Delayed", 0, threads))
    for _ in range(12):
        driver.tick()
    assert all(len(env.threads) == 1 for env in envs)
    assert len(set.union(*(env.threads for env in envs))) == groups
    assert threading.get_ident() not in envs[0].threads
    driver.environment.close()


def three_ticks(driver):
    for _ in range(3):
        driver.tick()


@pytest.mark.parametrize(
    "fault", ["raise", "shape", "dtype", "nan", "reward", "reward shape", "old", "reset"]
)
def test_faults_say_what_they_say_of_serial_lanes(fault):
    said = []
    for threads in (0, 2):
        loop = LaneLoop(
            [Counter(length=9), Counter(length=9, fault=fault), Counter(length=9)], "Counter", 100, threads
        )
        with pytest.raises(EnvironmentFault) as raised:
            three_ticks(Driver(loop))
        loop.close()
        said.append((str(raised.value), type(raised.value.__cause__)))
    assert said[0] == said[1]
    assert "lane 1" in said[0][0]


class Cancelling(Counter):
    """Uses what was cancelled."""

    def step(self, action):
        raise CancelledError("the call of the arm")


@pytest.mark.parametrize("threads", [0, 1])
def test_a_lane_in_which_something_was_cancelled_is_named(threads):
    environment = LaneLoop([Cancelling()], "arm", 0, threads)
    driver = Driver(environment)
    driver.tick()
    with pytest.raises(
        EnvironmentFault, match=r"lane 0 raised CancelledError while stepping .*the call of the arm"
    ):
        driver.tick()
    environment.close()


def test_the_first_lane_that_raised_is_told_however_many_did():
    loop = LaneLoop([Counter(), *(Delayed(fault="raise", most=0.01) for _ in range(5))], "Delayed", 0, 6)
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    with pytest.raises(EnvironmentFault, match="lane 1 raised ZeroDivisionError while stepping"):
        driver.tick()
    loop.close()


def test_an_environment_that_exits_ends_the_actor_not_its_thread():
    loop = LaneLoop([Counter(), Delayed(fault="exit")], "Delayed", 0, 2)
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    with pytest.raises(SystemExit, match="enough"):
        driver.tick()
    loop.close()


def test_a_lane_that_hangs_is_never_ready_and_holds_up_no_close(monkeypatch):
    monkeypatch.setattr(crew, "CLOSE_SECONDS", 0.2)
    envs = [Delayed(), Hanging(), Delayed()]
    loop = LaneLoop(envs, "Hanging", 0, 3)
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    loop.send([{"action": np.zeros(3, np.int64)}], np.zeros(3, bool))
    time.sleep(0.1)
    assert not loop.ready()
    loop.close()
    loop.close()  # which come to an end, though nobody has freed it
    until = time.monotonic() + 60
    while not (envs[0].closed and envs[2].closed) and time.monotonic() < until:
        time.sleep(0.005)  # their own threads close them where the machine is too slow for `close`
    assert [bool(env.closed) for env in envs] == [True, False, True] and not loop.wait_closed(0)
    envs[1].freed.set()
    # its own thread has closed it
    assert loop.wait_closed(60) and envs[1].closed == next(iter(envs[1].threads))


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_close_waits_for_what_is_under_way(ticks, monkeypatch):
    monkeypatch.setattr(crew, "CLOSE_SECONDS", 60.0)
    envs = [Delayed(length=50, most=0.05) for _ in range(4)]
    loop = LaneLoop(envs, "Delayed", 0, 4)
    driver = Driver(loop)
    for _ in range(ticks):
        driver.tick()
    loop.send([{"action": np.zeros(4, np.int64)}], np.full(4, ticks == 0))
    loop.close()
    assert not [name for name in names() if name.startswith("Delayed")]
    assert all(env.closed for env in envs)


def test_the_number_of_threads_is_a_setting():
    with pytest.raises(ConfigError, match="threads = -1"):
        Gymnasium(id="CartPole-v1", threads=-1)
    experiment = experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"))
    assert (
        set_path(experiment, "workers.actor.environment.threads", "64").workers["actor"].environment.threads
        == 64
    )


def test_more_threads_than_the_machine_lets_start_are_named_with_the_cure(monkeypatch):
    start, begun = threading.Thread.start, []

    def few(thread):
        if len(begun) == 3:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(ConfigError, match=r"no more threads start .*fewer slots or lanes"):
        Gymnasium(id="CartPole-v1", threads=8).build(8, 0)
