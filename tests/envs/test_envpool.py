"""EnvPool's environments, where EnvPool is installed."""

import sys

import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.core.errors import ConfigError
from tidemill.envs.envpool import EnvPool
from tidemill.testing.check_env import check_environment


def test_what_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r'"envpool:Pong-v5" needs a package .* pip install "envpool'):
        EnvPool(id="Pong-v5").build(1, 0)


def test_settings_that_are_not_the_tasks_are_refused():
    with pytest.raises(ConfigError, match='"seed" is chosen by'):
        EnvPool(id="Pong-v5", kwargs={"seed": 3})
    with pytest.raises(ConfigError, match='"num_threads" is a setting beside kwargs'):
        EnvPool(id="Pong-v5", kwargs={"num_threads": 3})
    with pytest.raises(ConfigError, match="num_threads = -1"):
        EnvPool(id="Pong-v5", num_threads=-1)
    with pytest.raises(ConfigError, match="max_episode_steps = 0"):
        EnvPool(id="Pong-v5", max_episode_steps=0)


def test_rewards_of_training_are_told_and_left_for_a_score():
    config = EnvPool(id="Pong-v5", kwargs={"reward_clip": True, "episodic_life": True, "frame_skip": 4})
    assert config.rewarded == "rewards clipped to -1, 0 and 1 and of one life"
    assert config.scored() == EnvPool(id="Pong-v5", kwargs={"frame_skip": 4})
    assert EnvPool(id="Pong-v5").rewarded == ""
    assert config.preset_name("envpool:Pong-v5") == "Pong-v5"


@pytest.fixture
def pool():
    """A maker of environments, which are closed in the end. EnvPool is 740 MB: it is
    installed by hand."""
    pytest.importorskip("envpool", reason='EnvPool is not installed (pip install "envpool>=1.2.5")')
    made = []

    def make(name, lanes=3, seed=0, render=False, **settings):
        made.append(EnvPool(id=name, **settings).build(lanes, seed, render))
        return made[-1]

    yield make
    for environment in made:
        environment.close()
        environment.close()


def still(driver, actions):
    """Observations after a tick of these actions."""
    (told,) = driver.tick(actions=[{"action": actions.copy()}])
    return told.tick.observation["obs"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_finished_lane_begins_on_the_next_tick_and_the_others_go_on(pool, threads):
    environment = pool("CartPole-v1", num_threads=threads)
    driver, ends = Driver(environment), 0
    assert (environment.same_step, environment.resets_any) == (False, True)
    over = np.ones(3, bool)
    for _ in range(120):
        (told,) = driver.tick()
        tick, seen = told.tick, told.tick.observation["obs"]
        assert np.array_equal(told.reset, over)
        assert np.all(np.abs(seen[over]) <= 0.05)  # where CartPole begins
        assert np.array_equal(tick.reward, np.where(over, 0, 1))
        assert not np.any((tick.done | tick.truncated)[over])
        over = tick.done | tick.truncated
        assert np.all(np.abs(seen[over][:, 2]) > 0.2)  # the last one is the episode's own
        ends += over.sum()
    assert ends > 8


def test_an_episode_at_its_limit_is_cut_and_not_ended(pool):
    environment = pool("Pendulum-v1", max_episode_steps=4)
    assert environment.max_episode_steps == 4
    driver, cut = Driver(environment), []
    for tick in range(11):
        (told,) = driver.tick()
        assert not told.tick.done.any()
        if told.tick.truncated.all():
            cut.append(tick)
    assert cut == [4, 9]


def test_lanes_have_seeds_of_their_own_and_what_was_played_is_played_again(pool):
    def played(seed, lanes):
        driver = Driver(pool("Pendulum-v1", lanes, seed))
        return np.stack([still(driver, np.zeros((lanes, 1), np.float32)) for _ in range(5)])

    assert np.array_equal(played(7, 3), played(7, 3))
    assert np.array_equal(played(7, 3)[:, 1:], played(8, 2))  # lane i has seed + i
    assert not np.array_equal(played(7, 2), played(9, 2))


@pytest.mark.parametrize("threads", [1, 2])
def test_some_lanes_are_reset_while_the_others_go_on(pool, threads):
    driver = Driver(pool("CartPole-v1", num_threads=threads))
    for _ in range(5):
        before = still(driver, np.ones(3, np.int64))
    (told,) = driver.tick(np.array([False, True, False]), [{"action": np.ones(3, np.int64)}])
    seen = told.tick.observation["obs"]
    assert np.all(np.abs(seen[1]) <= 0.05)
    assert told.tick.reward.tolist() == [1, 0, 1]
    assert np.all(seen[[0, 2], 1] > before[[0, 2], 1])  # pushed on
    assert np.all(still(driver, np.ones(3, np.int64))[:, 1] > seen[:, 1])


def test_frames_are_stacked_bytes(pool):
    driver = Driver(pool("Breakout-v5", 2))
    for _ in range(4):
        (before,) = driver.tick()
    (told,) = driver.tick()
    seen = told.tick.observation["obs"]
    assert (seen.shape, seen.dtype) == ((2, 4, 84, 84), np.uint8)
    assert np.array_equal(seen[:, :3], before.tick.observation["obs"][:, 1:])


def test_parts_of_an_observation_have_names(pool):
    environment = pool("CheetahRun-v1", 2)
    (told,) = Driver(environment).tick()
    assert {key: part.shape for key, part in told.tick.observation.items()} == {
        "obs.position": (2, 8),
        "obs.velocity": (2, 9),
    }
    part = environment.agents[0].spaces.observation.spaces["velocity"]
    assert part.bounds()[0].max() == -np.inf


def test_pictures_are_drawn_where_they_can_be(pool):
    environment = pool("CartPole-v1", 2, render=True)
    Driver(environment).tick()
    assert environment.render().shape == (400, 600, 3)
    assert pool("HalfCheetah-v5", 1, render=True).render() is None


def test_tasks_and_settings_that_there_are_not_are_told_with_the_nearest(pool):
    with pytest.raises(ConfigError, match=r'no such task; did you mean "CartPole-v1"'):
        pool("CartPol-v1")
    with pytest.raises(ConfigError, match=r"list_all_envs\(\) lists"):
        pool("Zzzzzzz")
    with pytest.raises(ConfigError, match='has no argument "frameskip"; did you mean "frame_skip"'):
        pool("HalfCheetah-v5", kwargs={"frameskip": 1})
    with pytest.raises(ConfigError, match="lanes = 0"):
        pool("CartPole-v1", 0)


def test_infos_are_those_of_the_task(pool):
    environment = pool("HalfCheetah-v5", 2)
    driver = Driver(environment)
    driver.tick()
    driver.tick()
    (info, _) = environment.episode_infos(0, [0, 1])
    assert {"x_position", "reward_run"} <= info.keys()
    assert not {"env_id", "players", "elapsed_step"} & info.keys()


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5", "CheetahRun-v1", "FrozenLake-v1"])
def test_the_contract_of_environments_holds(pool, name):
    findings = check_environment(EnvPool(id=name, num_threads=1), seconds=0.2)
    assert [finding for finding in findings if finding.level == "fail"] == []
