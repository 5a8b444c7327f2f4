"""What an environment answers that no row can hold is one error that names it, in every
kind of environment; nothing becomes something else."""

import re
import time

import numpy as np
import pytest
from tests.envs import odd
from tests.envs.driver import Driver
from tests.testing.ticking import by_looks

from tidemill.api.environment import Tick
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from tidemill.core.errors import EnvironmentFault
from tidemill.core.step_deadlines import StepTimes
from tidemill.envs.aec import AECLanes
from tidemill.envs.aliased_arrays import TICKS
from tidemill.envs.asynchronous import AsyncLanes
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.multi_agent import AgentView
from tidemill.envs.parallel import ParallelLanes
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.spaces import from_gymnasium
from tidemill.envs.tick_check import TickCheck
from tidemill.envs.vector import VectorLanes
from tidemill.testing.check_env import check_environment

CASES = odd.cases()


def agents(kind, one):
    def made(envs):
        space, action = from_gymnasium(envs[0].observation_space), from_gymnasium(envs[0].action_space)
        ids = one.possible_agents
        return kind(
            [one(env) for env in envs],
            "Odd",
            0,
            ids,
            [AgentView(space)] * len(ids),
            [action] * len(ids),
            False,
            0,
            False,
        )

    return made


KINDS = {
    "lanes": lambda envs: LaneLoop(envs, "Odd", 0),
    "threads": lambda envs: LaneLoop(envs, "Odd", 0, threads=2),
    "async": lambda envs: AsyncLanes([odd.Async(env) for env in envs], "Odd", 0, StepTimes()),
    "vector": lambda envs: VectorLanes(odd.Vector(envs), "Odd", None, "next-step"),
    "parallel": agents(ParallelLanes, odd.Together),
    "turns": agents(AECLanes, odd.Turns),
}


def tick(driver, begin=False):
    """Step every lane by action 0, or reset it."""
    environment = driver.environment
    actions = [{"action": np.zeros(len(tick.reward), np.int64)} for tick in driver.ticks]
    environment.send(actions, np.full(environment.lanes, begin))
    until = time.monotonic() + 60
    while not environment.ready():
        assert time.monotonic() < until
        time.sleep(1e-4)  # its threads have the next move
    environment.recv(driver.ticks)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_is_named(kind, name):
    space, good, bad, says = CASES[name]
    if kind == "vector" and name in {
        "observation: flat",
        "observation: part",
        "observation: deep part",
        "reward: array",
        "terminated: array",
        "observation: nothing",
        "observation: ragged",
    }:
        pytest.skip("no array has such rows")
    environment = KINDS[kind]([odd.One(space, good, good), odd.One(space, good, bad)])
    try:
        driver = Driver(environment)
        tick(driver, begin=True)
        with pytest.raises(EnvironmentFault, match=says) as raised:
            tick(driver)
        assert str(raised.value).startswith("Odd: ")
        # of an array of all lanes, a wrong dtype is everybody's
        assert kind == "vector" or "lane 1" in str(raised.value)
    finally:
        environment.close()


def test_what_is_no_bool_and_no_float_but_says_the_same_is_taken():
    answer = (np.zeros(4), np.array(1.5), 0)  # float64 for float32, an array without axes, 0 for False
    driver = Driver(
        LaneLoop(
            [
                odd.One(odd.FLAT, answer, answer),
                odd.One(odd.FLAT, answer, (answer[0], np.int8(2), np.bool_(True))),
            ],
            "Odd",
            0,
        )
    )
    tick(driver, begin=True)
    tick(driver)
    (told,) = driver.ticks
    assert (told.reward.tolist(), told.done.tolist()) == ([1.5, 2], [False, True])


def test_whole_numbers_of_a_wider_dtype_are_taken_where_they_fit():
    answer = (np.array([0, 200, 255]), 0.0, False)
    driver = Driver(LaneLoop([odd.One(odd.BYTES, answer, answer)] * 2, "Odd", 0))
    tick(driver, begin=True)
    assert driver.ticks[0].observation["obs"].tolist() == [[0, 200, 255]] * 2


def test_choices_are_looked_at_in_every_row_and_in_final_ones():
    space = Dict(
        {
            "one": Discrete(3, start=7),
            "two": MultiDiscrete((2, 4)),
            "bits": MultiBinary(2),
            "box": Box((1,), "float32"),
        }
    )
    look, told = TickCheck(space, "Odd", ("x", "y")), Tick.allocate(space, 4, {}, same_step=True)
    look(told)
    for name, value, says in (
        ("one", 3, "is 10"),
        ("one", -1, "is 6"),
        ("two", [0, 4], "is [0 4]"),
        ("bits", [-1, 0], "is [-1  0]"),
    ):
        for rows, which in ((told.observation, "obs"), (told.final, "final obs")):
            before = rows[f"obs.{name}"].copy()
            rows[f"obs.{name}"][3] = value
            told.restarted[3] = True
            with pytest.raises(
                EnvironmentFault, match=re.escape(f"Odd: {which}.{name} of agent y in lane 1 {says}")
            ):
                look(told)
            told.restarted[3] = False
            rows[f"obs.{name}"][:] = before
    told.final["obs.one"][:] = 99  # of seats that did not begin anew: it means nothing
    look(told)


def test_a_slot_tells_what_it_was_answered_and_voids_the_step():
    number = list(CASES).index("terminated: text")
    environment = Slots(environment=Gymnasium(make=f"{odd.__file__}:named", kwargs={"number": number})).build(
        1, 0
    )
    try:
        driver = Driver(environment)
        tick(driver, begin=True)
        tick(driver)
        assert driver.ticks[0].voided[0]
        assert "terminated of agent agent is 'False'; it must be one bool" in environment.faults[0]
    finally:
        environment.close()


@pytest.mark.parametrize(
    "name", ["observation: flat", "observation: uint16", "reward: text", "terminated: none"]
)
def test_check_env_fails_with_the_value(name, monkeypatch):
    by_looks(monkeypatch)
    config = Gymnasium(make=f"{odd.__file__}:named", kwargs={"number": list(CASES).index(name)})
    (finding,) = (finding for finding in check_environment(config, seconds=0.2) if finding.level == "fail")
    assert re.search(CASES[name][3], finding.message)


# ---- shared memory ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "view", "parts", "mapping", "buffer", "list"])
@pytest.mark.parametrize("lanes", ["lanes", "threads=1", "async", "parallel", "turns"])
def test_lanes_that_share_an_array_are_told_what_each_of_them_saw(lanes, kind):
    envs = [odd.Sharing(kind) for _ in range(3)]
    environment = LaneLoop(envs, "Sharing", 0, threads=1) if lanes == "threads=1" else KINDS[lanes](envs)
    try:
        driver = Driver(environment)
        tick(driver, begin=True)
        for step in range(1, TICKS + 4):
            tick(driver)
            (seen,) = driver.ticks[0].observation.values()
            agents = len(environment.agents)
            assert seen[::agents].tolist() == [[env.number, step] for env in envs]
        assert environment.shared
    finally:
        environment.close()


def test_targets_of_a_ring_that_share_an_array_are_told_what_each_of_them_saw():
    envs = [odd.Sharing() for _ in range(2)]
    drivers = [Driver(LaneLoop([env], "Sharing", 0)) for env in envs]
    nothing = [{"action": np.zeros(1, np.int64)}]
    for step in range(TICKS + 3):
        for driver in drivers:
            driver.environment.send(nothing, np.full(1, step == 0))
        for driver, env in zip(drivers, envs, strict=True):
            driver.environment.recv(driver.ticks)
            assert driver.ticks[0].observation["obs"].tolist() == [[env.number, step]]


def test_lanes_that_share_an_array_in_threads_are_refused_unless_nobody_writes_it():
    def play(kind):
        environment = LaneLoop([odd.Sharing(kind) for _ in range(2)], "Sharing", 0, threads=2)
        try:
            driver = Driver(environment)
            for step in range(TICKS + 2):
                tick(driver, begin=step == 0)
        finally:
            environment.close()

    with pytest.raises(
        EnvironmentFault, match=r"Sharing: copies of it in different threads write .*threads = 0"
    ):
        play("")
    play("still")


def test_an_array_of_each_lane_s_own_is_not_copied_and_what_is_told_stays():
    class Own(odd.Sharing):
        def __init__(self):
            super().__init__()
            self.array = np.zeros(2, np.float32)

    envs = [Own() for _ in range(2)]
    environment = LaneLoop(envs, "Own", 0)
    driver = Driver(environment)
    for step in range(TICKS + 3):
        tick(driver, begin=step == 0)
        assert driver.ticks[0].observation["obs"].tolist() == [[env.number, step] for env in envs]
    assert not environment.shared and not environment._aliases.active


def test_lists_of_each_lane_s_own_are_no_shared_array():
    answer = ([0.0, 1.0, 2.0, 3.0], 0.0, False)
    environment = LaneLoop(
        [odd.One(odd.FLAT, (list(answer[0]), 0.0, False), answer) for _ in range(2)], "Lists", 0
    )
    driver = Driver(environment)
    tick(driver, begin=True)
    assert driver.ticks[0].observation["obs"].tolist() == [answer[0]] * 2
    assert not environment.shared


@pytest.mark.parametrize("masked", [False, True])
def test_agents_that_are_told_at_once_may_see_one_array_and_the_usual_mask_is_nobody_s(masked):
    class Own(odd.Sharing):
        def __init__(self):
            super().__init__()
            self.array = np.zeros(2, np.float32)

    envs = [odd.Together(Own()) for _ in range(2)]
    space, action = Box((2,), "float32"), Discrete(2)
    sight = AgentView(space, Box((2,), "int8", (0.0,), (1.0,)) if masked else None)
    environment = ParallelLanes(envs, "Own", 0, ["x", "y"], [sight] * 2, [action] * 2, False, 0, False)
    driver = Driver(environment)
    for step in range(TICKS + 2):
        tick(driver, begin=step == 0)
        seen = driver.ticks[0].observation["obs.observation" if masked else "obs"]
        assert seen.tolist() == [[env.env.number, step] for env in envs for _ in range(2)]
    assert not environment.shared and not environment._aliases.active


def test_rewards_that_a_reset_of_some_lanes_overwrites_are_those_of_the_step():
    class Reusing(odd.Vector):
        paid = np.zeros(2)

        def step(self, actions):
            seen, _, ends, cuts, _ = super().step(actions)
            self.paid[:] = 1, 2
            return seen, self.paid, ends | (np.arange(2) == 1), cuts, {}

        def reset(self, *, seed=None, options=None):
            self.paid[:] = 0
            return super().reset()

    answer = (np.zeros(4, np.float32), 0.0, False)
    driver = Driver(
        VectorLanes(
            Reusing([odd.One(odd.FLAT, answer, answer) for _ in range(2)]), "Reusing", None, "disabled"
        )
    )
    tick(driver, begin=True)
    tick(driver)
    assert driver.ticks[0].reward.tolist() == [1, 2]


def test_check_env_says_that_copies_share_an_array(monkeypatch):
    by_looks(monkeypatch)
    found = {
        finding.name: finding
        for finding in check_environment(Gymnasium(make=f"{odd.__file__}:Sharing"), seconds=0.2)
    }
    assert found["copies"].level == "warn" and "one array" in found["copies"].message


def test_a_final_observation_that_the_next_episode_has_overwritten_is_refused():
    class Same(odd.Vector):
        def step(self, actions):
            seen, rewards, ends, cuts, _ = super().step(actions)
            return seen, rewards, np.ones_like(ends), cuts, {"final_obs": seen}

    answer = (np.zeros(4, np.float32), 0.0, False)
    driver = Driver(VectorLanes(Same([odd.One(odd.FLAT, answer, answer)] * 2), "Same", None, "same-step"))
    tick(driver, begin=True)
    with pytest.raises(
        EnvironmentFault, match=r'obs in infos\["final_obs"\] is the memory of what the lane sees next'
    ):
        tick(driver)
