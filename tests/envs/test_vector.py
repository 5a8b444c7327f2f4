import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.envs import games
from tests.envs.driver import Driver
from tests.run.hanging_halves import InHalves
from tests.run.watching import wait_until

from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs import vector
from tidemill.envs.vector import GymnasiumVector, VectorLanes

GAMES = str(Path(games.__file__))


def build(**settings):
    lanes = settings.pop("lanes", 3)
    return GymnasiumVector(make=f"{GAMES}:vector", **settings).build(lanes, 50)


def test_cartpole_resets_by_itself_on_the_tick_that_the_target_names():
    environment = GymnasiumVector(id="CartPole-v1").build(4, 0)
    assert (environment.same_step, environment.resets_any) == (False, False)
    driver = Driver(environment)
    before, resets = None, 0
    for _ in range(150):
        (told,) = driver.tick()
        first = told.reset
        resets += int(first.sum())
        assert np.all(np.abs(told.tick.observation["obs"][first]) <= 0.05)  # where CartPole begins
        assert np.all(told.tick.reward[first] == 0)
        assert not np.any((told.tick.done | told.tick.truncated)[first])
        if before is not None:
            assert np.array_equal(first, before.done | before.truncated)
        before = told.tick
    assert resets > 8


@pytest.mark.parametrize(
    ("mode", "autoreset"), [("NextStep", "next-step"), ("SameStep", "same-step"), ("Disabled", "disabled")]
)
def test_every_mode_tells_the_same_episodes(mode, autoreset):
    """Lane i plays episodes of 2 + i steps; each episode's rows are steps 0 … T with the
    final one closing it."""
    environment = build(kwargs={"mode": mode})
    assert environment.autoreset == autoreset
    assert environment.same_step == (mode != "NextStep")
    driver = Driver(environment)
    rows = [[] for _ in range(3)]  # (step, reward that brought it, done)
    for _ in range(15):
        (told,) = driver.tick()
        for lane in range(3):
            if told.tick.restarted[lane]:
                rows[lane].append(
                    (told.tick.final["obs"][lane, 1], told.tick.reward[lane], told.tick.done[lane])
                )
                rows[lane].append((told.tick.observation["obs"][lane, 1], 0, False))
            else:
                rows[lane].append(
                    (told.tick.observation["obs"][lane, 1], told.tick.reward[lane], told.tick.done[lane])
                )
    for lane, length in enumerate((2, 3, 4)):
        episode = [(0, 0, False), *((t, t, t == length) for t in range(1, length + 1))]
        assert rows[lane] == (episode * 15)[: len(rows[lane])]
        assert len(rows[lane]) >= 15


def test_seed_goes_to_the_first_reset():
    (told,) = Driver(build()).tick()
    assert told.tick.observation["obs"][:, 0].tolist() == [50, 51, 52]


def test_seed_goes_to_the_constructor_where_that_takes_it():
    # which the usual int holds
    environment = GymnasiumVector(make=f"{GAMES}:seeded", seed_argument="number").build(3, (7 << 31) + 50)
    (told,) = Driver(environment).tick()
    assert told.tick.observation["obs"][:, 0].tolist() == [50, 51, 52]


def test_next_step_refuses_a_reset_of_a_lane_that_goes_on():
    driver = Driver(build())
    driver.tick()
    with pytest.raises(EnvironmentFault, match="lane 1 has not finished"):
        driver.tick(reset=np.array([False, True, False]))


def test_disabled_resets_any_lane_and_lets_the_others_go_on():
    driver = Driver(build(kwargs={"mode": "Disabled", "lengths": (9,)}))
    driver.tick()
    driver.tick()
    (told,) = driver.tick(reset=np.array([False, True, False]))
    assert told.tick.observation["obs"][:, 1].tolist() == [2, 0, 2]
    assert told.tick.reward.tolist() == [2, 0, 2]
    assert not told.tick.restarted.any()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_nested_observations_in_every_mode(mode):
    driver = Driver(build(kwargs={"mode": mode, "kind": "Nested", "lengths": (2,)}, lanes=2))
    driver.tick()
    driver.tick()
    (told,) = driver.tick()
    seen = told.tick.final if mode != "NextStep" else told.tick.observation
    assert seen["obs.step"].tolist() == [2, 2]
    assert seen["obs.place.0"][:, 0, 0].tolist() == [2, 2]


def test_an_environment_that_publishes_nothing_must_be_declared():
    with pytest.raises(ConfigError, match="autoreset"):
        build(kwargs={"publish": False})
    assert build(kwargs={"publish": False}, autoreset="next-step").autoreset == "next-step"


def test_a_declaration_that_contradicts_the_environment_is_refused():
    with pytest.raises(ConfigError, match='publishes autoreset "next-step"'):
        build(autoreset="same-step")


def test_what_has_no_vector_form_says_what_to_use():
    with pytest.raises(ConfigError, match=r'use Gymnasium\(id="Acrobot-v1"\)'):
        GymnasiumVector(id="Acrobot-v1").build(2, 0)
    with pytest.raises(ConfigError, match="is not known; take one of"):
        GymnasiumVector(id="CartPole-v1", autoreset="never")


def test_what_is_no_vector_of_so_many_lanes_is_refused(monkeypatch):
    vector = games.vector
    monkeypatch.setattr(games, "vector", lambda num_envs: vector(num_envs + 1))
    with pytest.raises(ConfigError, match="asked for num_envs = 3 and has 4"):
        GymnasiumVector(make="tests.envs.games:vector").build(3, 0)
    monkeypatch.setattr(games, "vector", lambda num_envs: gymnasium.make("CartPole-v1"))
    with pytest.raises(ConfigError, match=r"no gymnasium\.vector\.VectorEnv: it has no num_envs"):
        GymnasiumVector(make="tests.envs.games:vector").build(3, 0)


def test_a_reset_that_returns_no_pair_is_named():
    env = games.vector(2)
    env.reset = lambda **_: np.zeros((2, 2), np.float32)
    with pytest.raises(EnvironmentFault, match=r"Counters: reset must return \(observations, infos\)"):
        Driver(VectorLanes(env, "Counters", 0, "next-step")).tick()


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        (np.zeros((2, 3), np.float32), "shape"),
        (np.full((2, 2), np.nan, np.float32), "lane 0 is not finite"),
        (np.zeros((2, 2), "U1"), "dtype"),
    ],
)
def test_faulty_answers_are_named(observation, says):
    env = games.vector(2)
    driver = Driver(VectorLanes(env, "Counters", 0, "next-step"))
    driver.tick()
    env.step = lambda actions: (observation, np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {})
    with pytest.raises(EnvironmentFault, match=says):
        driver.tick()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            (np.zeros((2, 2), np.float32), np.zeros(2), np.zeros(2, bool), {}),
            r"step must return \(observations, .*\), not 4 values",
        ),
        (np.zeros((2, 2), np.float32), "not this ndarray"),
        (
            (np.zeros((2, 2), np.float32), 0.5, np.zeros(2, bool), np.zeros(2, bool), {}),
            r"an array of 2 lanes; reward has the shape \(\)",
        ),
        (
            (np.zeros((2, 2), np.float32), np.zeros(2), np.zeros(1, bool), np.zeros(2, bool), {}),
            r"has the shape \(1,\)",
        ),
    ],
)
def test_a_step_that_returns_something_else_is_named(result, says):
    env = games.vector(2)
    driver = Driver(VectorLanes(env, "Counters", 0, "next-step"))
    driver.tick()
    env.step = lambda actions: result
    with pytest.raises(EnvironmentFault, match=says):
        driver.tick()


def test_an_environment_that_raises_is_named():
    env = games.vector(2)
    driver = Driver(VectorLanes(env, "Counters", 0, "next-step"))
    driver.tick()

    def step(actions):
        raise KeyError("lost")

    env.step = step
    with pytest.raises(EnvironmentFault, match="Counters: raised KeyError while stepping"):
        driver.tick()


def test_infos_that_are_none_at_an_end_are_named():
    env = games.vector(2, mode="SameStep")
    driver = Driver(VectorLanes(env, "Counters", 0, "same-step"))
    driver.tick()
    step = env.step
    env.step = lambda actions: (*step(actions)[:4], None)
    driver.tick()
    with pytest.raises(EnvironmentFault, match='finished in same-step mode, but infos has no "final_obs"'):
        driver.tick()


def test_where_somebody_looks_at_the_time_the_thread_of_recv_waits_for_what_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(vector, "_AHEAD_S", 0.05)
    monkeypatch.setattr(vector, "_CLOSING_S", 0.05)
    flag, rung = tmp_path / "hung", threading.Event()
    lanes = InHalves(flag=str(flag)).build(2, 0)
    driver = Driver(lanes)
    lanes.on_ready(rung.set)
    driver.tick()  # resets, and rings nobody
    for _ in range(19):
        driver.tick()
        assert rung.wait(60)  # an answer is there a moment before it rings
        rung.clear()
    lanes.send([{"action": np.zeros(2, np.int64)}], np.zeros(2, bool))
    try:
        wait_until(flag.exists, 60, "it hangs")
        time.sleep(0.1)
        assert not lanes.ready()  # nobody does: others have that thread
        lanes.watch(None)
        assert lanes.ready()
        lanes.close()
        assert lanes.env is None and not rung.is_set()
    finally:
        Path(f"{flag}.over").touch()
