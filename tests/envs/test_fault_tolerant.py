"""Slots: a lost step is voided and never made up, the environment is made anew, and one
that keeps failing is left out."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.envs.games import Hanging

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.cores import keep_to
from tidemill.core.errors import BrokenOff, ConfigError, EnvironmentFault, EnvironmentHangs
from tidemill.envs.fault_tolerant import SlotEnvironment, Slots
from tidemill.envs.hanging_threads import HANGING
from tidemill.envs.parallel_build import close_all
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.vector import GymnasiumVector

SPACES = Spaces(Box((2,), "float32"), Discrete(2))
PLACES = ("send", "ready", "recv")
FRAGILE = ("fails", "error", "unmade", "stuck", "other")


@dataclass(frozen=True, kw_only=True)
class Fragile(EnvironmentConfig):
    """Shows (number of this copy, its sends). `fails` has (copy, send, where)."""

    fails: tuple[tuple[int, int, str], ...] = ()
    error: type[BaseException] = ConnectionResetError
    unmade: tuple[int, ...] = ()  # copies that cannot be made
    stuck: tuple[int, ...] = ()  # copies that are made once `gate` is open
    other: int = -1  # the copy that has other spaces
    built: ClassVar[list["FragileEnvironment"]] = []
    attempts: ClassVar[list[int]] = [0]
    gate: ClassVar[threading.Event]
    waiting: ClassVar[list[int]] = []

    def build(self, lanes: int, seed: int, render: bool = False) -> "FragileEnvironment":
        number = Fragile.attempts[0]
        Fragile.attempts[0] += 1
        if number in self.unmade:
            raise ConnectionRefusedError(f"copy {number} cannot be made")
        if number in self.stuck:
            Fragile.waiting.append(number)
            assert Fragile.gate.wait(60)
        Fragile.built.append(FragileEnvironment(self, number))
        return Fragile.built[-1]


class FragileEnvironment(Environment):
    def __init__(self, config: Fragile, number: int) -> None:
        self.config, self.number, self.sends, self.closed, self.options = config, number, -1, 0, None
        self.cores = os.sched_getaffinity(0)
        spaces = SPACES if number != config.other else Spaces(Box((3,), "float32"), Discrete(2))
        self.agents, self.lanes = (AgentInfo("agent", spaces),), 1

    def _go(self, place: str) -> None:
        if (self.number, self.sends, place) in self.config.fails:
            raise self.config.error(f"copy {self.number}, send {self.sends}, {place}")

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        assert [list(group) for group in groups] == [[0]]

    def send(self, actions: Any, reset: Any) -> None:
        assert not self.closed and (self.sends >= 0 or reset.all())
        self.sends += 1
        self._go("send")

    def ready(self) -> bool:
        self._go("ready")
        return (self.number, self.sends, "hang") not in self.config.fails

    def recv(self, ticks: Sequence[Tick]) -> None:
        ticks[0].observation["obs"][:] = self.number, self.sends
        self._go("recv")
        ticks[0].reward[:] = 7
        ticks[0].done[:] = ticks[0].truncated[:] = ticks[0].restarted[:] = False
        ticks[0].present[:] = True

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def close(self) -> None:
        self.closed += 1


class Driver:
    """Steps a slot as a target does."""

    def __init__(self, **settings: Any) -> None:
        Fragile.built.clear()
        Fragile.attempts[0] = 0
        Fragile.gate = threading.Event()
        Fragile.waiting.clear()
        fragile = {name: settings.pop(name) for name in FRAGILE if name in settings}
        self.slot = Slots(environment=Fragile(**fragile), **{"backoff_s": 0.0, **settings}).build(1, 5)
        self.slot.bind([[0]])
        self.rung = threading.Event()
        self.slot.on_ready(self.rung.set)
        self.tick = Tick.allocate(SPACES.observation, 1, {}, False)
        self.reset = True

    def step(self, seconds: float = 120.0) -> tuple[float, float] | str | None:
        """One tick: what was seen, or "voided"; None when nothing came."""
        self.slot.send([{"action": np.zeros(1, np.int64)}], np.array([self.reset]))
        deadline = time.monotonic() + seconds
        while not self.slot.ready():
            if time.monotonic() > deadline:
                return None
            self.rung.wait(0.002)
            self.rung.clear()
        self.tick.reward[:], self.tick.voided[:] = np.nan, True
        self.slot.recv([self.tick])
        self.reset = bool(self.tick.voided[0])
        assert not self.tick.done[0] and not self.tick.truncated[0]
        if self.reset:
            assert not self.tick.observation["obs"].any() and not self.tick.reward[0]
            return "voided"
        assert self.tick.reward[0] == 7
        return tuple(self.tick.observation["obs"][0].tolist())


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_raises_is_voided_and_the_next_episode_is_of_a_new_environment(place: str) -> None:
    driver = Driver(fails=((0, 2, place),))
    assert [driver.step() for _ in range(6)] == [(0, 0), (0, 1), "voided", (1, 0), (1, 1), (1, 2)]
    assert [env.closed for env in Fragile.built] == [1, 0]
    assert (
        len(driver.slot.faults) == 1
        and f"copy 0, send 2, {place}" in driver.slot.faults[0]
        and "a step is lost" in driver.slot.faults[0]
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_reset_that_raises_is_tried_again_and_voids_nothing(place: str) -> None:
    driver = Driver(fails=((0, 0, place), (1, 0, place)))
    assert [driver.step() for _ in range(2)] == [(2, 0), (2, 1)]
    assert all("a reset is lost" in text for text in driver.slot.faults) and len(driver.slot.faults) == 2


class Panic(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [Panic, GeneratorExit])
def test_whatever_a_step_raises_is_voided(error: type[BaseException], place: str) -> None:
    driver = Driver(fails=((0, 1, place),), error=error)
    assert [driver.step() for _ in range(3)] == [(0, 0), "voided", (1, 0)]
    assert f"a step is lost: {error.__name__}: copy 0, send 1, {place}" in driver.slot.faults[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BrokenOff])
def test_what_ends_a_run_is_no_fault_of_a_slot(error: type[BaseException]) -> None:
    driver = Driver(fails=((0, 1, "recv"),), error=error)
    driver.step()
    with pytest.raises(error):
        driver.step()


def test_an_environment_that_cannot_be_made_again_is_tried_again() -> None:
    driver = Driver(fails=((0, 1, "send"),), unmade=(1, 2))
    assert [driver.step() for _ in range(3)] == [(0, 0), "voided", (3, 0)]
    assert "copy 1 cannot be made" in driver.slot.faults[1]


def only_what_hangs_takes_time(patch: pytest.MonkeyPatch) -> None:
    """Have the clock of deadlines go on by a second with each look at one that hangs, and
    stand still else: a busy machine gives up nobody."""
    now, ready = 100.0, FragileEnvironment.ready

    def look(environment: FragileEnvironment) -> bool:
        nonlocal now
        answered = ready(environment)
        now += not answered
        return answered

    patch.setattr("tidemill.envs.fault_tolerant.awake", lambda: now)
    patch.setattr(FragileEnvironment, "ready", look)


@pytest.mark.parametrize("at", [0, 2])
def test_one_that_hangs_is_given_up_at_its_deadline(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only_what_hangs_takes_time(monkeypatch)
    driver = Driver(fails=((0, at, "hang"),), deadline_s=0.05)
    seen = [driver.step() for _ in range(4)]
    assert seen == ([(1, 0), (1, 1), (1, 2), (1, 3)] if at == 0 else [(0, 0), (0, 1), "voided", (1, 0)])
    assert "did not answer within 0.05 s" in driver.slot.faults[0]


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def give_up(slot: SlotEnvironment, copy: int) -> None:
    """Let the deadline of the copy that is being made be over, once that hangs."""
    wait_until(lambda: copy in Fragile.waiting)
    slot._times.given, before = 0.01, HANGING.count
    try:
        wait_until(lambda: slot.ready() or HANGING.count > before)
    finally:
        slot._times.given = 60.0


def test_copies_whose_making_hangs_are_counted_until_they_come_back() -> None:
    driver = Driver(fails=((0, 1, "send"),), stuck=(1, 2), deadline_s=60.0)
    assert [driver.step() for _ in range(2)] == [(0, 0), "voided"]
    driver.slot.send([{"action": np.zeros(1, np.int64)}], np.array([True]))
    for copy in (1, 2):
        give_up(driver.slot, copy)
        assert HANGING.count == copy
        text = driver.slot.faults[-1]
        assert "another one was not made within 0.01 s: " in text and "build (test_fault_tolerant.py:" in text
    wait_until(driver.slot.ready)
    driver.slot.recv([driver.tick])
    assert driver.tick.observation["obs"][0].tolist() == [3, 0]
    Fragile.gate.set()
    wait_until(lambda: not HANGING.count)
    wait_until(lambda: sum(copy.closed for copy in Fragile.built) == 3)  # what nobody waits for
    assert not next(copy for copy in Fragile.built if copy.number == 3).closed


def test_more_than_so_many_that_hang_end_it_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.envs.hanging_threads.LEAST_BOUND", 2)
    driver = Driver(fails=((0, 1, "send"),), stuck=(1, 2, 3, 4), deadline_s=60.0)
    assert [driver.step() for _ in range(2)] == [(0, 0), "voided"]
    driver.slot.send([{"action": np.zeros(1, np.int64)}], np.array([True]))
    for copy in (1, 2, 3):
        give_up(driver.slot, copy)
    with pytest.raises(EnvironmentHangs, match=r"not made within 0.01 s: .* 3 threads of this process hang"):
        give_up(driver.slot, 4)
    driver.slot.close()
    Fragile.gate.set()
    wait_until(lambda: not HANGING.count)


class Login(Hanging):
    """One that somebody is logged in to until it is closed."""

    open: ClassVar[list["Login"]] = []

    def __init__(self) -> None:
        super().__init__()
        Login.open.append(self)

    def close(self) -> None:
        super().close()
        Login.open.remove(self)


def hung(**settings: Any) -> tuple[Environment, Login]:
    """A slot whose step was lost since it hangs, and what hangs."""
    Login.open.clear()
    before = HANGING.count
    slot = Slots(
        environment=Gymnasium(make="tests.envs.test_fault_tolerant:Login", threads=1),
        deadline_s=60.0,
        backoff_s=0.0,
        **settings,
    ).build(1, 0)
    slot.bind([[0]])
    tick, reset = Tick.allocate(slot.agents[0].spaces.observation, 1, {}, False), True
    for number in range(3):
        slot.send([{"action": np.zeros(1, np.int64)}], np.array([reset]))
        if number == 2:  # it hangs in the second step
            wait_until(lambda: "step (" in slot._inner.doing())
            slot._times.given = 0.05
        wait_until(slot.ready)
        slot._times.given = 60.0
        slot.recv([tick])
        reset = False
    assert tick.voided[0] and slot.faults
    wait_until(lambda: HANGING.count > before)  # who makes it anew has left it to its thread
    return slot, Login.open[0]


def test_what_hung_is_closed_by_its_own_thread_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.envs.lane_threads.CLOSE_SECONDS", 0.05)
    slot, stuck = hung()
    assert not slot.wait_closed(0.2) and not stuck.closed and stuck in Login.open
    stuck.freed.set()
    assert slot.wait_closed(60) and {stuck.closed} == stuck.threads
    close_all([slot])
    wait_until(lambda: not Login.open)  # also what was being made in its place


@pytest.mark.parametrize("seconds", [0.3, 240.0])
def test_the_end_waits_for_what_hung_earlier_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("tidemill.envs.lane_threads.CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("tidemill.envs.parallel_build.LEAVE_SECONDS", 120.0 if seconds < 1 else 0.2)
    slot, stuck = hung()
    coming_back = threading.Timer(seconds, stuck.freed.set)
    coming_back.start()
    close_all([slot])
    assert (stuck not in Login.open) == (seconds < 1)
    coming_back.cancel()
    stuck.freed.set()
    assert slot.wait_closed(60)
    wait_until(lambda: not Login.open)


def test_an_episode_that_takes_longer_than_it_may_is_cut_with_the_step_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("tidemill.envs.fault_tolerant.awake", lambda: now)
    slot = Slots(environment=Fragile(), max_episode_seconds=10.0).build(1, 0)
    slot.bind([[0]])
    tick, cut, reset = Tick.allocate(SPACES.observation, 1, {}, False), [], True
    for _ in range(9):
        slot.send([{"action": np.zeros(1, np.int64)}], np.array([reset]))
        now += 4  # a reset takes as long as a step, and does not count
        assert slot.ready()
        slot.recv([tick])
        assert not tick.voided[0] and not tick.done[0] and (reset or tick.reward[0] == 7)  # what came counts
        reset = bool(tick.truncated[0])
        cut.append(reset)
    assert cut == [False, False, False, True] * 2 + [False]


def test_one_that_keeps_failing_rests_after_its_void_was_told_and_comes_back() -> None:
    fails = tuple((copy, 1, "recv") for copy in range(4))
    driver = Driver(fails=fails, failures=3)
    assert [driver.step() for _ in range(6)] == [(0, 0), "voided", (1, 0), "voided", (2, 0), "voided"]
    assert driver.slot.resting and len(driver.slot.faults) == 3
    # a reset that came says nothing of steps
    assert [driver.step() for _ in range(2)] == [(3, 0), "voided"] and driver.slot.resting
    assert [driver.step() for _ in range(2)] == [(4, 0), (4, 1)] and not driver.slot.resting


def test_faults_count_against_steps_and_not_against_the_clock() -> None:
    """Two among the last three steps, or two of which the second comes three steps
    later."""
    for between, resting in ((1, True), (2, False)):
        driver = Driver(fails=((0, 1, "recv"), (1, 1 + between, "recv")), failures=2, window_steps=3)
        assert [driver.step() for _ in range(4 + between)][-1] == "voided" and driver.slot.resting == resting


@pytest.mark.parametrize("place", ["raises", "hangs"])
def test_a_share_of_steps_that_fails_for_ever_takes_no_slot_away(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 % of all steps, and a step in three, over and over: faults that once took every
    slot within hours."""
    only_what_hangs_takes_time(monkeypatch)
    for every, steps in ((33, 700), (3, 60)):
        fails = tuple((copy, every, "recv" if place == "raises" else "hang") for copy in range(steps))
        driver = Driver(
            fails=fails, backoff_s=1e-6, max_backoff_s=1e-5, deadline_s=0.005 if place == "hangs" else None
        )
        seen = [driver.step() for _ in range(steps)]
        assert seen.count("voided") == steps // (every + 1) and len(Fragile.built) >= seen.count("voided")


def test_rests_grow_shrink_with_steps_that_come_and_differ_between_slots() -> None:
    def pauses(seed: int) -> list[float]:
        slot = Slots(environment=Fragile(), backoff_s=10.0, max_backoff_s=150.0, failures=2).build(1, seed)
        slot.bind([[0]])
        told = []
        for number in range(8):
            if number == 7:  # the service is back for a while
                slot._inner = Fragile().build(1, 0)
                for _ in range(4):
                    slot.send([{}], np.zeros(1, np.bool_))
                    slot.recv([Tick.allocate(SPACES.observation, 1, {}, False)])
            slot.send([{}], np.ones(1, np.bool_))
            slot._fail(EnvironmentFault("lost"))
            assert slot._mending is not None and slot._mending.pause is not None
            told.append(slot._mending.pause)
        slot.close()
        return told

    first, second = pauses(1), pauses(2)
    for number, pause in enumerate(first):
        # 6 times doubled, 4 times halved, and once more
        middle = min(10 * 2 ** (number if number < 7 else 3), 100)
        assert middle / 2 <= pause <= middle * 1.5
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_one_that_is_made_anew_has_every_core_for_what_it_starts() -> None:
    every = os.sched_getaffinity(0)

    def work() -> None:
        keep_to(min(every))
        driver = Driver(fails=((0, 1, "send"),))
        assert [driver.step() for _ in range(3)] == [(0, 0), "voided", (1, 0)]
        keep_to(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert Fragile.built[1].cores == every


def test_another_environment_in_its_place_is_named() -> None:
    driver = Driver(fails=((0, 1, "send"),), other=1)
    assert [driver.step() for _ in range(3)] == [(0, 0), "voided", (2, 0)]
    assert "other spaces" in driver.slot.faults[1] and Fragile.built[1].closed == 1


def test_a_stage_reaches_an_environment_that_is_made_anew() -> None:
    driver = Driver(fails=((0, 1, "send"),))
    driver.slot.enter_stage({"level": 3})
    assert [driver.step() for _ in range(3)] == [(0, 0), "voided", (1, 0)]
    assert [env.options for env in Fragile.built] == [{"level": 3}] * 2


def test_one_that_is_closed_while_it_is_made_anew_leaves_nothing_open() -> None:
    before = set(threading.enumerate())
    driver = Driver(fails=((0, 1, "send"),), backoff_s=30.0)
    assert [driver.step() for _ in range(2)] == [(0, 0), "voided"]
    driver.slot.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
    assert [env.closed for env in Fragile.built] == [1]


def test_what_cannot_be_is_refused() -> None:
    slots = Slots(environment=Fragile())
    with pytest.raises(ConfigError, match="ring=4"):
        slots.build(4, 1)
    for wrong in (
        {"deadline_s": 0.0},
        {"backoff_s": -1.0},
        {"backoff_s": float("nan")},
        {"max_backoff_s": 0.1},
        {"failures": 0},
        {"failures": 21},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Slots(environment=Fragile(), **wrong)
    with pytest.raises(ConfigError, match=r"max_episode_seconds = 0\.0 must be above 0"):
        Slots(environment=Fragile(), max_episode_seconds=0.0)
    with pytest.raises(
        ConfigError, match=r"max_episode_seconds = 5\.0: this environment resets finished lanes by itself"
    ):
        Slots(
            environment=GymnasiumVector(id="CartPole-v1", autoreset="next-step"), max_episode_seconds=5.0
        ).build(1, 0)
    with pytest.raises(
        ConfigError, match="Slots has no setting window_s any more: faults count against steps"
    ):
        Slots(environment=Fragile(), window_s=60.0)
    with pytest.raises(ConfigError, match="Slots in Slots"):
        Slots(environment=slots)
    Fragile.attempts[0] = 0
    with pytest.raises(ConnectionRefusedError):
        Slots(environment=Fragile(unmade=(0,))).build(1, 1)
