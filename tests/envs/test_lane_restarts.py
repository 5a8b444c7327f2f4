"""Environments that are made anew after a fault: single lanes, or all of them together,
and what they tell in that tick."""

import errno
import gc
import socket
import weakref
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver
from tests.envs.games import Counter
from tests.remote.served import port_of_ones_own
from tests.run.watching import wait_until

from tidemill.api.environment import Environment, NotReady
from tidemill.core.errors import BrokenOff, EnvironmentAway, EnvironmentFault, RemoteUnavailable
from tidemill.envs.frame_stack import FrameStack
from tidemill.envs.lane_restarts import LaneRestarts, RestartedTogether, cause_of, may_come_back
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.space_values import brief
from tidemill.envs.step_limit import StepLimit
from tidemill.envs.vector import VectorLanes
from tidemill.testing.scripted import Scripted


class Panic(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str fails")


class Vector(gymnasium.vector.VectorEnv):
    """Lane i's episodes have 4 + i steps; it shows (life, lane, step). In its `fault`-th
    step it fails as `kind` says."""

    def __init__(self, mode: str, life: int, fault: int, kind: str, lanes: int = 2) -> None:
        self.num_envs, self.life, self.fault, self.kind = lanes, life, fault, kind
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
        self.mode, self.steps, self.calls = mode, np.zeros(lanes, int), 0
        self.over = np.zeros(lanes, bool)
        self.closed = False

    def _seen(self):
        lanes = np.arange(self.num_envs)
        return np.stack([np.full(self.num_envs, self.life), lanes, self.steps], 1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.steps[mask] = 0
        return self._seen(), {}

    def step(self, actions):
        self.calls += 1
        if self.calls == self.fault and self.kind == "raise":
            raise ZeroDivisionError("the pole is gone")
        if self.calls == self.fault and self.kind == "panic":
            raise Panic("the pole is gone")
        self.steps += 1
        if self.mode == "NextStep":
            self.steps[self.over] = 0
        over = self.steps == 4 + np.arange(self.num_envs)
        seen, infos = self._seen(), {}
        reward = np.where(self.over & (self.mode == "NextStep"), 0.0, 1.0)
        self.over = over
        if self.mode == "SameStep" and over.any():
            infos["final_obs"] = seen.copy()
            self.steps[over] = 0
            seen = self._seen()
        if self.calls == self.fault and self.kind == "nan":
            seen[1, 2] = np.nan
        return seen, reward, over, np.zeros(self.num_envs, bool), infos

    def close(self, **_: Any) -> None:
        self.closed = True


def together(mode: str, faults: list[int], kind: str, most: int = 9) -> tuple[Environment, list[Vector], Any]:
    """`faults[life]` is the step in which that life fails; 0: none."""
    made: list[Vector] = []
    told: list[str] = []

    def build(added: int) -> VectorLanes:
        made.append(Vector(mode, len(made), faults[len(made)], kind))
        mode_of = {"NextStep": "next-step", "SameStep": "same-step", "Disabled": "disabled"}[mode]
        return VectorLanes(made[-1], "vector", added, mode_of)  # type: ignore[arg-type]

    restarts = LaneRestarts(most, 60.0, told.append)
    return RestartedTogether(build(0), build, restarts), made, (restarts, told)


@pytest.mark.parametrize("kind", ["raise", "panic", "nan"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_all_lanes_of_a_vector_are_cut_and_begin_anew(mode, kind):
    environment, made, (restarts, told) = together(mode, [3, 0], kind)
    driver = Driver(environment)
    seen = [driver.tick()[0].tick for _ in range(7)]
    for number, tick in enumerate(seen):
        lost = number == 3
        if number >= 2:  # before, nobody has said anything about it
            assert tick.voided.tolist() == [lost, lost]
        if lost:
            assert tick.restarted.tolist() == [True, True]
            assert tick.reward.tolist() == [0, 0]
            assert not (tick.done | tick.truncated).any()
            assert tick.present.all()
        assert tick.observation["obs"][:, 0].tolist() == [number >= 3] * 2
        assert tick.observation["obs"][:, 2].tolist() == [number % 3] * 2 or number == 6
    assert [each.closed for each in made] == [True, False]
    assert restarts.count == 1
    assert len(told) == 1
    assert told[0].startswith("vector: ")


def test_a_lane_that_was_to_be_reset_has_lost_nothing():
    """Lane 0 ends with step 4; the step that would reset it fails."""
    environment, _, _ = together("NextStep", [5, 0], "raise")
    driver = Driver(environment)
    for _ in range(5):
        (told,) = driver.tick()
    assert told.tick.done.tolist() == [True, False]
    (told,) = driver.tick()
    assert told.reset.tolist() == [True, False]
    assert told.tick.voided.tolist() == told.tick.restarted.tolist() == [False, True]
    assert told.tick.observation["obs"].tolist() == [[1, 0, 0], [1, 1, 0]]


def test_the_tick_after_a_fault_is_like_any_other():
    environment, _, _ = together("SameStep", [1, 1, 1, 2, 0], "raise")
    driver = Driver(environment)
    flags = [driver.tick()[0].tick.voided.tolist() for _ in range(8)][1:]
    assert flags == [[True, True]] * 3 + [[False, False], [True, True]] + [[False, False]] * 2


def test_a_frame_stack_begins_anew():
    environment, _, _ = together("NextStep", [3, 0], "raise")
    driver = Driver(FrameStack(environment, [2]))
    steps = [driver.tick()[0].tick.observation["obs"][0, :, 2].tolist() for _ in range(6)]
    assert steps == [[0, 0], [0, 1], [1, 2], [0, 0], [0, 1], [1, 2]]


def test_a_step_limit_counts_anew():
    environment, _, _ = together("Disabled", [2, 0], "raise")
    driver = Driver(StepLimit(environment, 3))
    cut = [driver.tick()[0].tick.truncated.tolist() for _ in range(6)]
    assert cut == [[False, False]] * 5 + [[True, True]]


def test_lanes_by_whole_arrays():
    """What steps by whole arrays, one lane's NaN ends all lanes' episodes."""
    told: list[str] = []
    config = Gymnasium(id="CartPole-v1")
    environment = RestartedTogether(
        config.build(8, 0), lambda added: config.build(8, added), LaneRestarts(3, 60.0, told.append)
    )
    assert not isinstance(environment._inner, LaneLoop)
    driver = Driver(environment)
    driver.tick()
    driver.tick()
    environment._inner._stepped = None
    step = environment._inner._step

    def broken(actions):
        seen, reward, done = step(actions)
        seen[5] = np.nan
        return seen, reward, done

    environment._inner._step = broken
    (told_now,) = driver.tick()
    assert told_now.tick.voided.all()
    assert np.isfinite(told_now.tick.observation["obs"]).all()
    assert np.all(np.abs(told_now.tick.observation["obs"]) <= 0.05)  # where CartPole begins
    assert "obs of agent agent in lane 5 is not finite" in told[0]
    (told_now,) = driver.tick()
    assert not told_now.tick.voided.any()


def test_whatever_a_reset_by_whole_arrays_raises_is_its_lane_s_fault(monkeypatch):
    environment = Gymnasium(id="CartPole-v1").build(8, 0)
    assert not isinstance(environment, LaneLoop)
    driver = Driver(environment)

    def reset(**_: Any) -> Any:
        raise Panic("poisoned")

    monkeypatch.setattr(environment.env, "reset", reset)
    with pytest.raises(EnvironmentFault, match="lane 0 raised Panic while resetting: poisoned"):
        driver.tick()


def test_all_agents_of_an_environment_begin_anew():
    first, later = Scripted(agents=3, fault="raise", fault_tick=4, shortest=9), Scripted(agents=3)
    told: list[str] = []
    environment = RestartedTogether(
        first.build(2, 0), lambda added: later.build(2, added), LaneRestarts(1, 60.0, told.append)
    )
    driver = Driver(environment)
    for number in range(6):
        (tick,) = [each.tick for each in driver.tick()]
        assert (number < 4) or tick.voided.all() == (number == 4)
        assert tick.observation["obs"][:, 3].tolist() == [number % 4] * 6


# ---- single lanes ----------------------------------------------------------------------


class Once(gymnasium.Env):
    """Fails in its third step; can be made so often."""

    left = 0

    def __init__(self, size: int = 2) -> None:
        if Once.left == 0:
            raise OSError("no licence left")
        Once.left -= 1
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,))
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("segment lost")
        return np.zeros(self.observation_space.shape, np.float32), 0.0, False, False, {}


def loop_of(left: int, make_one=Once) -> Driver:
    Once.left = left
    loop = LaneLoop([Once(), Once()], "once", 0, make_one=make_one)
    assert loop.restart_lanes(LaneRestarts(100, 60.0, lambda text: None))
    driver = Driver(loop)
    for _ in range(3):
        driver.tick()
    return driver


def test_an_environment_that_cannot_be_made_a_second_time_is_named():
    driver = loop_of(left=3)
    with pytest.raises(
        EnvironmentFault,
        match=r"once: lane 1 failed, and cannot be made a second time \(OSError: no licence left "
        r"\(.*, line \d+, in __init__\)\);.*lane_restarts=None.*segment lost \(.*, line \d+, in step\)$",
    ):
        driver.tick()


def test_one_that_comes_back_as_another_is_named():
    driver = loop_of(left=9, make_one=lambda: Once(3))
    with pytest.raises(EnvironmentFault, match="lane 0 came back with other spaces than it had"):
        driver.tick()


class Exhausted(Counter):
    """Reads `left` numbers, which it has in an iterator, and then raises what that
    raises; in a reset likewise."""

    def __init__(self, left: int) -> None:
        super().__init__(length=9)
        self.numbers = iter(range(left))

    def reset(self, *, seed=None, options=None):
        next(self.numbers)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        next(self.numbers)
        return super().step(action)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_lane_whose_iterator_ends_is_one_that_raised(lane, left, threads):
    """StopIteration, which ends a loop over the lanes without an error."""
    envs = [Exhausted(left if each == lane else 99) for each in range(3)]
    told: list[str] = []
    loop = LaneLoop(envs, "exhausted", 0, threads, make_one=lambda: Exhausted(99))
    loop.restart_lanes(LaneRestarts(1, 60.0, told.append))
    driver = Driver(loop)
    voided = [driver.tick()[0].tick.voided.tolist() for _ in range(4)]
    loop.close()
    assert len(told) == 1 and f"lane {lane} raised StopIteration" in told[0]
    assert voided[2] == [left > 0 and each == lane for each in range(3)]
    assert not np.any([voided[0], voided[1], voided[3]])


class Raising(Counter):
    """Raises `error` in its call number `at`, its reset being the first, and as it is
    closed."""

    def __init__(self, error: BaseException | None = None, at: int = 0) -> None:
        super().__init__(length=9)
        self.error, self.left = error, at if error else 99

    def _see(self):
        self.left -= 1
        if self.error and self.left < 0:
            raise self.error
        return super()._see()

    def close(self) -> None:
        if self.error:
            raise self.error


RAISED = [Panic("slice index out of range"), GeneratorExit("over"), Wordless()]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_lane_raises_costs_that_lane_alone(error, at, threads):
    envs = [Raising(), Raising(error, at), Raising()]
    told: list[str] = []
    loop = LaneLoop(envs, "raising", 0, threads, make_one=Raising)
    loop.restart_lanes(LaneRestarts(1, 60.0, told.append))
    driver = Driver(loop)
    voided = [driver.tick()[0].tick.voided.tolist() for _ in range(4)]
    loop.close()
    said = "its __str__ raised RuntimeError" if isinstance(error, Wordless) else str(error)
    assert len(told) == 1 and f"lane 1 raised {type(error).__name__} while" in told[0] and said in told[0]
    assert voided[2] == [False, at == 2, False]
    assert not np.any([voided[0], voided[1], voided[3]])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), BrokenOff()], ids=repr)
@pytest.mark.parametrize("threads", [0, 2])
def test_what_ends_a_run_is_no_fault_of_a_lane(error, threads):
    loop = LaneLoop([Raising(), Raising(error, 2)], "raising", 0, threads, make_one=Raising)
    loop.restart_lanes(LaneRestarts(9, 60.0, lambda text: None))
    driver = Driver(loop)
    driver.tick()
    driver.tick()
    with pytest.raises(type(error)):
        driver.tick()


class Whole(LaneLoop):
    """One's own environment, which raises `error` in its third `place`."""

    error: BaseException | None = None
    place = ""

    def restart_lanes(self, permit):
        return False

    def _go(self, place: str) -> None:
        if place == self.place:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3 and self.error:
                raise self.error

    def send(self, actions, reset):
        self._go("send")
        super().send(actions, reset)

    def recv(self, ticks):
        self._go("recv")
        super().recv(ticks)

    def close(self):
        if self.error:
            raise self.error


def whole(error: BaseException, place: str, told: list[str]) -> Driver:
    first = Whole([Counter(9)], "whole", 0)
    first.error, first.place = error, place
    restarts = LaneRestarts(1, 60.0, told.append)
    return Driver(RestartedTogether(first, lambda added: LaneLoop([Counter(9)], "whole", added), restarts))


@pytest.mark.parametrize("place", ["send", "recv"])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_ones_own_environment_raises_it_is_made_anew(error, place):
    told: list[str] = []
    driver = whole(error, place, told)
    assert [driver.tick()[0].tick.voided.tolist() for _ in range(4)][2:] == [[True], [False]]
    said = "its __str__ raised RuntimeError" if isinstance(error, Wordless) else str(error)
    assert len(told) == 1 and told[0].startswith(f"{type(error).__name__}: {said}; the step is void")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), BrokenOff()], ids=repr)
def test_what_ends_a_run_is_no_fault_of_ones_own_environment(error):
    driver = whole(error, "recv", [])
    driver.tick()
    driver.tick()
    with pytest.raises(type(error)):
        driver.tick()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_lane_that_was_made_anew_is_not_held_in_memory(threads):
    """Whatever the collector of garbage does."""
    gone: list[weakref.ref] = []

    def make():
        gone.append(weakref.ref(made := Once()))
        return made

    Once.left, enabled = 3, gc.isenabled()
    gc.disable()
    try:
        loop = LaneLoop([make()], "once", 0, threads, make_one=make)
        loop.restart_lanes(LaneRestarts(9, 600.0, lambda text: None))
        driver = Driver(loop)
        for _ in range(9):
            driver.tick()
        assert [each() is None for each in gone] == [True, True, False]
        loop.close()
    finally:
        if enabled:
            gc.enable()


class Connected(Once):
    """Connects to `port`, as it is made or as it is reset; the connection breaks in its
    third step."""

    def __init__(self, port, resets=False):
        self.port, self.resets = port, resets
        Once.left = 1
        super().__init__()
        if not resets:
            self.connect()

    def connect(self):
        with socket.create_connection(("127.0.0.1", self.port)):
            pass

    def reset(self, *, seed=None, options=None):
        if self.resets:
            self.connect()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        try:
            return super().step(action)
        except RuntimeError as error:
            raise ConnectionResetError("gone") from error


def begin(driver):
    """Begin a tick that fails, and is not over."""
    loop = driver.environment
    loop.send([{"action": np.zeros(loop.lanes, np.int64)}], np.zeros(loop.lanes, bool))
    wait_until(lambda: loop.ready() or loop.away, 120, "all lanes have answered")
    with pytest.raises(NotReady):
        loop.recv(driver.ticks)


def test_each_target_tells_the_causes_of_its_own_faults():
    told = []
    restarts = LaneRestarts(9, 600.0, told.append)
    for number in (0, 1, 1, 0, 1):
        restarts(EnvironmentFault(f"the arm is stuck in step {number}"), f"target {number}: ")
    restarts.end()
    restarts(EnvironmentAway("nobody is there"), "target 0: ")
    restarts(EnvironmentFault("the arm is stuck in step 9"), "target 1: ")
    first, second, *more, away = told
    assert first.startswith("target 0: the arm") and second.startswith("target 1: the arm")
    assert more == [
        "2 more of: target 1: the arm is stuck in step 1",
        "1 more of: target 0: the arm is stuck in step 0",
    ]
    assert away.startswith("target 0: nobody")
    assert restarts.away == {"target 0: ": "target 0: nobody is there", "target 1: ": ""}


@pytest.mark.parametrize(("resets", "threads"), [(False, 0), (True, 0), (True, 2)])
def test_lanes_whose_server_is_away_are_tried_again_after_pauses_that_grow(resets, threads, monkeypatch):
    now, told = [0.0], []
    for where in ("lane_restarts", "lanes"):
        monkeypatch.setattr(f"tidemill.envs.{where}.awake", lambda: now[0])
    monkeypatch.setattr("tidemill.envs.lane_restarts._VARIED", 1.0)
    restarts = LaneRestarts(5, 600.0, told.append)
    with port_of_ones_own() as port:
        with socket.create_server(("127.0.0.1", port)):
            loop = LaneLoop(
                [Connected(port, resets), Connected(port, resets)],
                "connected",
                0,
                threads,
                make_one=lambda: Connected(port, resets),
            )
            assert loop.restart_lanes(restarts)
            driver = Driver(loop)
            for _ in range(3):
                driver.tick()
        begin(driver)
        tried = []
        while now[0] < 60.0:  # both lanes are away, which is one fault each time
            assert loop.away and not loop.ready()
            if len(restarts._lately) > len(tried):
                tried.append(now[0])
            now[0] += 0.5
        # the first at once: in the same second as the step, which counted
        assert tried == [0.0, 5.0, 15.0, 35.0]
        with socket.create_server(("127.0.0.1", port)):
            now[0] = 75.0
            while not loop.ready():
                pass
        loop.recv(driver.ticks)
        (tick,) = driver.ticks
        assert not loop.away and tick.voided.all() and tick.restarted.all()
        assert sum("it is tried again in 5 s, and later after longer pauses" in text for text in told) == 1
        driver.tick()
        assert not driver.ticks[0].voided.any()
        loop.close()


def test_beyond_the_budget_a_server_that_stays_away_is_the_last_cause(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tidemill.envs.lane_restarts._VARIED", 1.0)
    for where in ("lane_restarts", "lanes"):
        monkeypatch.setattr(f"tidemill.envs.{where}.awake", lambda: now[0])
    with port_of_ones_own() as port:
        with socket.create_server(("127.0.0.1", port)):
            loop = LaneLoop([Connected(port)], "connected", 0, make_one=lambda: Connected(port))
            loop.restart_lanes(LaneRestarts(2, 600.0, lambda text: None))
            driver = Driver(loop)
            for _ in range(3):
                driver.tick()
        begin(driver)
        assert not loop.ready()
        now[0] += 5.0
        assert not loop.ready()
        now[0] += 10.0
        with pytest.raises(
            EnvironmentFault,
            match=r"ConnectionResetError while stepping.*gone.*made anew 2 times.*the last fault: "
            r".*lane 0 cannot be made anew now \(ConnectionRefusedError",
        ):
            loop.ready()
        loop.close()


def test_a_vector_whose_server_is_away_is_made_anew_once_that_is_back(monkeypatch):
    now, made, away, told = [0.0], [], [True], []
    monkeypatch.setattr("tidemill.envs.lane_restarts.awake", lambda: now[0])
    monkeypatch.setattr("tidemill.envs.lane_restarts._VARIED", 1.0)

    def build(added):
        if made and away[0]:
            raise ConnectionRefusedError("nobody listens")
        made.append(Vector("NextStep", len(made), 0 if made else 3, "raise"))
        return VectorLanes(made[-1], "vector", added, "next-step")

    restarts = LaneRestarts(9, 600.0, told.append)
    environment = RestartedTogether(build(0), build, restarts)
    driver = Driver(environment)
    for _ in range(3):
        driver.tick()
    environment.send([{"action": np.zeros(2, np.int64)}], np.zeros(2, bool))
    for now[0], count in ((0.0, 2), (4.9, 2), (5.0, 3), (14.9, 3), (15.0, 4)):
        assert not environment.ready() and environment.away and restarts.count == count
    assert environment.render() is None and environment.statistics() == {} and made[0].closed
    with pytest.raises(NotReady):
        environment.recv(driver.ticks)
    away[0], now[0] = False, 35.0
    assert environment.ready()
    environment.recv(driver.ticks)
    (tick,) = driver.ticks
    assert tick.voided.all() and tick.restarted.all() and not environment.away
    assert tick.observation["obs"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert told[1].startswith(
        "vector cannot be made anew now (ConnectionRefusedError: nobody listens); it is tried again in 5 s"
    )
    environment.close()
    assert made[1].closed


def test_what_is_no_connection_s_fault_is_not_waited_for():
    """The step was lost with a connection; what keeps it from being made is another
    thing."""
    for error in (OSError("no licence left"), ValueError("x")):
        error.__context__ = KeyError("y")
        assert not may_come_back(error)
    for error in (ConnectionRefusedError(), RemoteUnavailable("x"), OSError(errno.EHOSTUNREACH, "x")):
        outer = ValueError("wrapped")
        outer.__cause__ = error
        assert may_come_back(outer)
    error = ValueError("x")
    error.__cause__ = error
    assert not may_come_back(error)


def test_what_cannot_be_made_anew_says_so():
    Once.left = 1
    assert not LaneLoop([Once()], "once", 0).restart_lanes(lambda fault: 1)


def test_the_window_forgets(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tidemill.envs.lane_restarts.awake", lambda: now[0])
    restarts = LaneRestarts(2, 10.0, lambda text: None)
    for now[0] in (0.0, 6.0, 11.0, 17.0, 22.0):
        restarts(EnvironmentFault(f"lane 1 broke at {now[0]}"))
    with pytest.raises(EnvironmentFault, match=r"lane 1 broke at 17.0. Its actor's lanes were made anew 2"):
        restarts(EnvironmentFault("lane 1 broke at last"))


def test_causes_are_told_apart_whatever_the_lane():
    assert cause_of("lane 3 raised KeyError with action 7: x") == cause_of(
        "lane 14 raised KeyError with action 2: x"
    )
    assert cause_of("lane 3 raised KeyError") != cause_of("lane 3 raised ValueError")


def test_faults_that_differ_by_what_they_print_are_told_once_and_shortly():
    told: list[str] = []
    restarts, rng = LaneRestarts(99, 60.0, told.append), np.random.default_rng(0)
    for lane in range(20):
        printed = rng.normal(size=lane).astype(np.float32) * 10.0 ** rng.integers(-9, 9)
        printed[rng.random(lane) < 0.3] = np.nan
        flags = rng.random(lane) < 0.5
        restarts(EnvironmentFault(f"lane {lane}: reset returned {brief(printed)}, {flags} instead of a pair"))
        restarts(EnvironmentFault(f"lane {lane} raised ValueError: {printed!r}{'x' * 5000}"))
    restarts.end()
    assert len(told) == 4 and max(map(len, told)) < 700
    assert told[2].startswith("19 more of: lane 0: reset returned")


class Staged(gymnasium.Env):
    """Its episodes are as long as their stage says; the first copy raises in step 2."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails=False):
        self.fails = fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = options["length"]
        return np.float32([self.left]), {}

    def step(self, action):
        self.left -= 1
        if self.fails:
            raise RuntimeError("broken")
        return np.float32([self.left]), 0.0, self.left == 0, False, {}


def test_what_was_made_anew_in_a_later_stage_is_played_again_in_that():
    def made(fails):
        return LaneLoop([Staged(fails)], "staged", 0)

    def wrapped(fails):
        environment = RestartedTogether(
            made(fails), lambda added: made(False), LaneRestarts(3, 60.0, lambda text: None)
        )
        environment.keep_episodes()
        for length in (2, 5):
            environment.enter_stage({"length": length})
        return environment

    first, second = wrapped(True), wrapped(False)
    driver = Driver(first)
    seen = [driver.tick()[0].tick.observation["obs"].item() for _ in range(4)]
    assert seen == [5, 5, 4, 3]
    assert second.load_state(first.state()) == {}
