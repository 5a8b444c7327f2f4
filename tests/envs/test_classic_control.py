"""Classic control by whole arrays answers what Gymnasium's own code does, bit by bit."""

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver
from tests.testing.ticking import by_looks

from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.batch_lanes import BATCHES, BatchLanes
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.native.library import VARIABLE, choices
from tidemill.testing.check_env import check_environment

NAMES = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
LANES = 8
ALL = np.ones(LANES, bool)


def pair(name, seed=7, **settings):
    """Both forms, each in a driver."""
    return [
        Driver(Gymnasium(id=name, vectorized=vectorized, **settings).build(LANES, seed))
        for vectorized in (True, False)
    ]


def swung(name, seen, actions):
    """`actions` with those of odd lanes replaced by ones that reach the goal: with the
    movement, so that it grows, and under CartPole's falling pole, so that it stays."""
    given = actions.copy()
    if name == "CartPole-v1":
        given[1::2] = seen[1::2] @ [0.05, 0.1, 1, 0.4] > 0
        return given
    moving = seen[1::2, {"Acrobot-v1": 4, "Pendulum-v1": 2}.get(name, 1)] > 0
    if given.ndim > 1:
        given[1::2] = np.where(moving, 1, -1)[:, None]
    else:
        given[1::2] = np.where(moving == (name != "Acrobot-v1"), 2, 0)
    return given


def play(name, drivers, ticks, resets=None):
    """Play both alike; assert that they tell the same, and return how many episodes ended
    and were cut."""
    rng, seen, ends = np.random.default_rng(3), None, np.zeros(2, int)
    space = drivers[0].spaces[0].action
    for tick in range(ticks):
        actions = (
            rng.uniform(-2.5, 2.5, (LANES, 1)).astype(np.float32)
            if hasattr(space, "shape")
            else rng.integers(0, space.n, LANES)
        )
        if seen is not None:
            actions = swung(name, seen, actions)
        reset = None if resets is None else resets(tick)
        (ours,), (theirs,) = [driver.tick(reset, [{"action": actions.copy()}]) for driver in drivers]
        assert np.array_equal(ours.reset, theirs.reset)
        ours, theirs = ours.tick, theirs.tick
        for part in ("reward", "done", "truncated", "present", "restarted"):
            assert np.array_equal(getattr(ours, part), getattr(theirs, part)), (tick, part)
        rows = theirs.present
        assert np.array_equal(ours.observation["obs"][rows], theirs.observation["obs"][rows]), tick
        seen = theirs.observation["obs"]
        ends += theirs.done.sum(), theirs.truncated.sum()
    return ends.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_steps_of_every_lane_are_gymnasiums_in_every_bit(name):
    drivers = pair(name)
    assert [type(driver.environment) for driver in drivers][1] is LaneLoop
    assert isinstance(drivers[0].environment, BatchLanes)
    ended, cut = play(name, drivers, 1000)
    assert cut > 3
    assert (ended > 3) == (name != "Pendulum-v1")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("native", dict.fromkeys(("off", choices()[-1])))
def test_own_limits_forced_resets_and_finished_lanes_that_wait_are_gymnasiums(name, native, monkeypatch):
    monkeypatch.setenv(VARIABLE, native)

    def resets(tick):
        return ALL if tick == 0 else np.arange(LANES) == tick % 60

    _, cut = play(name, pair(name, max_episode_steps=40), 300, resets)
    assert cut > 10


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_options_of_later_resets_are_gymnasiums(name):
    drivers = pair(name, seed=5)
    play(name, drivers, 3)
    options = {"x_init": 0.5, "y_init": 0.25} if name == "Pendulum-v1" else {"low": -0.5, "high": -0.45}
    for driver in drivers:
        driver.environment.enter_stage(options)
        driver.environment.seed(99)
    play(name, drivers, 30, lambda tick: ALL if tick in (0, 9) else ~ALL)


def test_arguments_of_the_constructor_count():
    drivers = pair("Pendulum-v1", kwargs={"g": 2.5})
    assert isinstance(drivers[0].environment, BatchLanes)
    play("Pendulum-v1", drivers, 50)


def test_options_that_gymnasium_refuses_name_the_lane():
    environment = Gymnasium(id="MountainCar-v0").build(LANES, 0)
    environment.enter_stage({"low": 1, "high": 0})
    with pytest.raises(EnvironmentFault, match=r"MountainCar-v0: lane 0 raised ValueError while resetting"):
        Driver(environment).tick()


def test_an_action_that_is_no_number_is_told():
    driver = Driver(Gymnasium(id="Pendulum-v1").build(LANES, 0))
    driver.tick()
    with pytest.raises(EnvironmentFault, match="lane 0 is not finite"):
        driver.tick(actions=[{"action": np.full((LANES, 1), np.nan, np.float32)}])


def test_what_is_asked_of_gymnasium_is_gymnasiums():
    class Own(gymnasium.envs.classic_control.PendulumEnv):
        pass

    def wrapped():
        return gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), -1.0, 1.0)

    for config in (
        Gymnasium(id="Pendulum-v1", vectorized=False),
        Gymnasium(id="Pendulum-v1", threads=1),
        Gymnasium(make=Own),
        Gymnasium(make=wrapped),
        Gymnasium(id="Blackjack-v1"),
    ):
        environment = config.build(LANES, 0)
        assert type(environment) is LaneLoop, config
        environment.close()
    drawn = Gymnasium(id="Pendulum-v1").build(LANES, 0, render=True)
    assert type(drawn) is LaneLoop
    assert type(Gymnasium(id="Pendulum-v1").build(BatchLanes.fewest - 1, 0)) is LaneLoop
    assert isinstance(Gymnasium(id="Pendulum-v1").build(BatchLanes.fewest, 0), BatchLanes)


def test_each_class_in_the_table_is_one_that_gymnasium_registers():
    specs = gymnasium.registry.values()
    entries = {spec.entry_point for spec in specs} | {spec.vector_entry_point for spec in specs}
    for name in BATCHES:
        module, _, kind = name.partition(":")
        assert {name, f"{module.rpartition('.')[0]}:{kind}"} & entries


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_of_environments_holds(name, monkeypatch):
    monkeypatch.setattr(BatchLanes, "fewest", 2)  # as many as the check builds
    by_looks(monkeypatch)
    looked = []
    findings = check_environment(
        Gymnasium(id=name), seconds=0.1, look=lambda _, environment: looked.append(environment) or []
    )
    assert isinstance(looked[0], BatchLanes)
    assert [finding for finding in findings if finding.level == "fail"] == []


def test_groups_are_the_one_that_there_is():
    with pytest.raises(ConfigError, match="one agent"):
        Gymnasium(id="Pendulum-v1").build(LANES, 0).bind([[0], [0]])
