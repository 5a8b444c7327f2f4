"""Lanes in threads that hang: they are left with their threads, made anew, and the others
go on as if nothing had happened."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.envs.driver import Driver
from tests.envs.games import Counter, Hanging

from tidemill.core import step_deadlines
from tidemill.core.clock import awake
from tidemill.core.errors import EnvironmentFault, EnvironmentHangs
from tidemill.core.step_deadlines import FIRST, KNOWN, LEAST, StepTimes, deadline
from tidemill.envs import hanging_threads, lane_threads
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.hanging_threads import HANGING
from tidemill.envs.lane_restarts import LaneRestarts
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.remote.rest_config import Rest

PATIENCE = 60.0  # seconds until a test gives up


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = threading.active_count()
    yield
    until = time.monotonic() + PATIENCE
    while (threading.active_count() > before or HANGING.count) and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before and not HANGING.count


class HangingReset(Counter):
    """Hangs in its reset until it is `freed`."""

    def __init__(self) -> None:
        super().__init__()
        self.freed, self.closed = threading.Event(), 0

    def reset(self, **given):
        self.freed.wait()
        return super().reset(**given)

    def close(self):
        self.closed = threading.get_ident()


def watched(envs, made, threads, deadline_s=PATIENCE, most=9):
    """Lanes that are left after `deadline_s`, and the texts that are told of them.
    `made`: what takes their places, in order."""
    told, left = [], iter(made)
    loop = LaneLoop(envs, "Hanging", 0, threads, make_one=lambda: next(left))
    loop.restart_lanes(LaneRestarts(most, 600.0, told.append))
    loop.watch(deadline_s)
    return loop, told


def hangs_alone(crew, lane):
    """True once the threads of all other lanes have finished this tick, but for those
    that come after it in its own."""
    return len(crew._left) == 1 and [owner for _, owner in crew._under_way if owner] == [[lane]]


def wait_until(holds):
    until = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    assert holds()


def tick_in_which(lane, loop, driver):
    """A tick in which `lane` hangs, and is left once all others have come back that
    could: however slow the machine is, nobody else is."""
    crew, before, lanes = loop._stepper, HANGING.count, loop.lanes
    loop.send([{"action": np.full(lanes, 5)}], np.zeros(lanes, bool))
    wait_until(lambda: hangs_alone(crew, lane))
    crew._times.given = 0.01

    def left():
        assert loop.ready() in (True, False)
        return HANGING.count > before

    wait_until(left)
    crew._times.given = PATIENCE
    loop.recv(driver.ticks)
    return driver.ticks[0]


def hang(loop, driver, times):
    """Let lane 0 hang in so many second steps."""
    for _ in range(times):
        loop.send([{"action": np.full(loop.lanes, 5)}], np.zeros(loop.lanes, bool))
        loop.recv(driver.ticks)
        tick_in_which(0, loop, driver)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lane", [0, 1, 2])
def test_the_step_is_void_and_the_others_have_their_rows(threads, lane):
    envs = [Counter(length=9) for _ in range(3)]
    envs[lane] = hung = Hanging(length=9)
    loop, told = watched(envs, [Counter(length=9)], threads)
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    assert not HANGING.count
    third = tick_in_which(lane, loop, driver)
    others = [other for other in range(3) if other != lane]
    assert third.voided.tolist() == third.restarted.tolist() == [n == lane for n in range(3)]
    assert third.observation["obs"][others, 1].tolist() == [2, 2]
    assert third.observation["obs"][lane, 1] == 0
    (fourth,) = driver.tick()
    assert not fourth.tick.voided.any()
    assert fourth.tick.observation["obs"][:, 1].tolist() == [1 if n == lane else 3 for n in range(3)]
    (text,) = told
    assert text.startswith(f"Hanging: lane {lane} has not come back from a step for ")
    assert "step (games.py:" in text and "lane_threads" not in text and "1 of which hang now" in text
    assert HANGING.count == 1 and not hung.closed
    hung.freed.set()
    wait_until(lambda: not HANGING.count)
    assert hung.threads == {hung.closed}  # its own thread has closed it
    loop.close()
    assert all(len(env.given) == 3 for env in envs if env is not hung)


def test_a_reset_that_hangs_in_place_of_a_lane_is_left_likewise():
    hung, again = Hanging(), HangingReset()

    def anew():
        yield again
        crew._times.given = PATIENCE  # this one has time
        yield Counter()

    loop, told = watched([hung, Counter(length=9)], anew(), 2)
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    crew = loop._stepper
    loop.send([{"action": np.full(2, 5)}], np.zeros(2, bool))
    wait_until(lambda: hangs_alone(crew, 0))
    crew._times.given = 0.01  # lane 1 is not under way, nor is it watched in the reset
    loop.recv(driver.ticks)
    tick = driver.ticks[0]
    assert tick.voided.tolist() == [True, False]
    assert tick.observation["obs"][:, 1].tolist() == [0, 2]
    assert [" from a reset for " in text for text in told] == [False, True]
    assert HANGING.count == 2
    hung.freed.set()
    again.freed.set()
    loop.close()
    assert loop.wait_closed(PATIENCE) and hung.closed and again.closed


def test_close_waits_no_longer_for_what_was_left_before(monkeypatch):
    monkeypatch.setattr(lane_threads, "CLOSE_SECONDS", 1000.0)
    hung, other = Hanging(), Counter()
    loop, _ = watched([hung], [other], 1)
    driver = Driver(loop)
    driver.tick()
    hang(loop, driver, 1)
    loop.close()
    assert not hung.closed and not loop.wait_closed(0)
    hung.freed.set()
    assert loop.wait_closed(PATIENCE) and hung.closed


def test_the_budget_of_restarts_holds_for_lanes_that_hang():
    envs = [Hanging() for _ in range(3)]
    loop, _ = watched(envs[:1], envs[1:], 1, most=2)
    driver = Driver(loop)
    driver.tick()
    with pytest.raises(EnvironmentFault, match=r"Hanging: lane 0 has not come back .*lane_restarts = 2"):
        hang(loop, driver, 3)
    for env in envs:
        env.freed.set()
    loop.close()


def test_more_threads_than_may_are_not_left(monkeypatch):
    monkeypatch.setattr(hanging_threads, "LEAST_BOUND", 2)
    envs = [Hanging() for _ in range(4)]
    loop, told = watched(envs[:1], envs[1:], 1)
    driver = Driver(loop)
    driver.tick()
    with pytest.raises(EnvironmentHangs, match=r"3 threads of this process hang .*more than 2") as raised:
        hang(loop, driver, 3)
    assert raised.value.too_many and told
    with pytest.raises(EnvironmentHangs):  # no budget permits it
        LaneRestarts(9, 600.0, told.append)(raised.value)
    for env in envs:
        env.freed.set()
    loop.close()
    loop.close()
    assert loop.wait_closed(PATIENCE)


def test_without_leave_to_restart_a_lane_that_hangs_ends_it():
    hung = Hanging()
    loop = LaneLoop([hung], "Hanging", 0, 1)
    loop.watch(PATIENCE)
    driver = Driver(loop)
    driver.tick()
    with pytest.raises(EnvironmentHangs, match="lane 0 has not come back from a step"):
        hang(loop, driver, 1)
    loop.close()
    assert not hung.closed  # nobody else touches it
    hung.freed.set()
    assert loop.wait_closed(PATIENCE) and hung.threads == {hung.closed}


class Sleeping(Counter):
    """Steps take some 0.1 ms, now less, now more."""

    def step(self, action):
        time.sleep(random.random() * 0.0002)
        return super().step(action)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_lane_that_comes_back_as_its_time_is_over_is_one_or_the_other(monkeypatch, threads):
    """Thread and watch are after one lane at the same moment: each row is that of its
    step, or void, and none of both or of neither."""
    monkeypatch.setattr(lane_threads, "LOOK", 0.0)
    monkeypatch.setattr(hanging_threads, "LEAST_BOUND", 10_000)
    envs = [Sleeping(length=1000) for _ in range(3)]
    loop = LaneLoop(envs, "Sleeping", 0, threads, make_one=lambda: Sleeping(length=1000))
    loop.restart_lanes(lambda fault: 1)
    driver = Driver(loop)
    driver.tick()
    loop.watch(1e-4)
    steps, voided, ticks, until = np.zeros(3), 0, 0, time.monotonic() + PATIENCE
    while ticks < 60 or not voided:  # some are, sooner or later
        assert time.monotonic() < until
        ticks += 1
        loop.send([{"action": np.zeros(3, np.int64)}], np.zeros(3, bool))
        while not loop.ready():
            time.sleep(1e-5)  # who keeps Python's lock, or the core, meets nobody
        loop._stepper.watch(PATIENCE)  # what takes its place has time for its reset
        loop.recv(driver.ticks)
        loop._stepper.watch(1e-4)
        lost = driver.ticks[0].voided
        voided += int(lost.sum())
        steps = np.where(lost, 0, steps + 1)
        assert driver.ticks[0].observation["obs"][:, 1].tolist() == steps.tolist()
    loop.close()
    assert loop.wait_closed(PATIENCE)


def test_deadlines_follow_from_what_steps_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_deadlines, "awake", lambda: now[0])
    assert deadline(None, None) == deadline(None, 0.01, resetting=True) == FIRST
    assert deadline(None, 0.01) == LEAST and deadline(None, 2.0) == 40.0
    assert deadline(0.5, 2.0) == deadline(0.5, None, resetting=True) == 0.5
    times = StepTimes()
    for number in range(KNOWN - 1):
        times.add(float(number))
    assert times.p99() is None and times.deadline(False) == FIRST
    times.add(7.0)
    assert times.p99() == 98.0 and times.deadline(False) == 1960.0 and times.deadline(True) == FIRST
    for _ in range(10_000):
        times.add(0.001)
    assert times.deadline(False) == 1960.0  # which is looked at now and then
    now[0] += 2.0
    assert times.deadline(False) == LEAST
    assert StepTimes(2.5).deadline(True) == StepTimes(2.5).least == 2.5


def test_steps_are_known_and_resets_are_not_among_them():
    envs = [Counter(length=4) for _ in range(2)]
    loop, told = watched(envs, [], 2, deadline_s=None)
    driver = Driver(loop)
    for _ in range(51):  # a reset and four steps, ten times, and a reset
        driver.tick()
    assert len(loop._stepper._times._newest) == 80 and not told
    loop.close()


class Timed:
    """An environment that notes the deadline that it is told, as those that break off
    calls themselves do."""

    timed_calls, single = True, False

    def __init__(self, deadline_s=None, start_seconds=0.0):
        self.deadline_s, self.start_seconds, self.told = deadline_s, start_seconds, []
        self.starts = threading.Event()
        self.starts.set()

    def build(self, lanes, seed, render=False):
        self.starts.wait()
        loop = LaneLoop([Counter()], "timed", seed)
        loop.watch = self.told.append
        return loop


@pytest.mark.parametrize(
    ("slots", "own", "actor", "inner", "outer"),
    [
        (None, None, 20.0, 20.0, 20.0),
        (None, None, None, None, None),
        (7.0, None, 20.0, 7.0, 7.0),
        (None, 60.0, 20.0, 60.0, 60.0),
    ],
)
def test_a_slot_and_what_breaks_off_its_calls_itself_have_one_deadline_the_nearest_that_is_set(
    slots, own, actor, inner, outer
):
    config = Slots(environment=Timed(own), deadline_s=slots)
    slot = config.build(1, 0)
    slot.watch(actor)
    assert config.environment.told[-1] == inner and slot._times.given == outer and slot._grace > 0
    slot.close()
    assert not Gymnasium(id="CartPole-v1").timed_calls and Rest(url="http://127.0.0.1:1").timed_calls


def test_a_slot_leaves_a_simulator_the_time_for_its_start():
    made = Timed(start_seconds=300.0)
    slot = Slots(environment=made, deadline_s=20.0, backoff_s=0.0).build(1, 0)
    made.starts.clear()
    slot._fail(EnvironmentFault("it died"))  # another one is being started
    slot._since = awake() - 200
    assert not slot.ready() and len(slot.faults) == 1
    wait_until(lambda: "build (" in slot._mending.doing())
    slot._since = awake() - 400
    assert not slot.ready() and "another one was not made within 305 s: " in slot.faults[1]
    made.starts.set()
    slot.close()


def test_a_slot_tells_where_its_step_hangs(tmp_path):
    flag = tmp_path / "go on"
    made = Gymnasium(make=f"{__file__}:HangsAtOnce", kwargs={"flag": str(flag)}, threads=1)
    slot = Slots(environment=made, deadline_s=PATIENCE).build(1, 0)
    driver = Driver(slot)
    actions = [{"action": np.full(1, 5)}]
    slot.send(actions, np.ones(1, bool))
    wait_until(slot.ready)
    slot.recv(driver.ticks)
    slot.send(actions, np.zeros(1, bool))
    wait_until(lambda: "step (" in slot._inner.doing())
    slot._times.given = 0.02
    wait_until(slot.ready)
    slot.recv(driver.ticks)
    assert driver.ticks[0].voided.all()
    (text,) = slot.faults
    assert text.startswith("a step is lost: it did not answer within 0.02 s: ") and not slot.resting
    assert "step (test_hanging_lanes.py:" in text
    slot.close()
    flag.touch()
    assert slot.wait_closed(PATIENCE)


class HangsAtOnce(Counter):
    """Hangs in its first step until there is a file `flag`."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = Path(flag)

    def step(self, action):
        while not self.flag.exists():
            time.sleep(0.005)
        return super().step(action)
