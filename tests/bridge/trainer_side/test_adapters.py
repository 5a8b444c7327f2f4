from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test

from tidemill.api.spaces import Box, Dict, Discrete
from tidemill.bridge.trainer_side.adapter import flatten
from tidemill.bridge.trainer_side.gymnasium import SimulatorEnv, SimulatorVectorEnv
from tidemill.bridge.trainer_side.pettingzoo import SimulatorParallelEnv
from tidemill.bridge.worlds import corridor, reach
from tidemill.core.errors import ConfigError, EnvironmentFault, SchemaError

SIMULATORS = str(Path(__file__).parents[1] / "simulators.py")


@pytest.fixture
def opened():
    """Open environments that are closed at the end."""
    made = []

    def open_(kind, *arguments, **settings):
        made.append(kind(*arguments, **settings))
        return made[-1]

    yield open_
    for env in made:
        env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_check_passes(opened):
    env = opened(SimulatorEnv, SIMULATORS, arguments=("single",))
    check_env(env, skip_render_check=True)
    assert isinstance(env.action_space, gymnasium.spaces.MultiDiscrete) and env.observation_space.shape == (
        2,
    )
    observation, info = env.reset(seed=3)
    assert observation.tolist() == [0, 3] and [mask.tolist() for mask in info["action_mask"]] == [
        [1, 1, 0],
        [1, 1],
    ]
    rewards = []
    for row in range(1, 5):
        observation, reward, terminated, truncated, info = env.step(np.array([1, 1]))
        rewards.append(reward)
        assert observation.tolist() == [row, 3] and (terminated, truncated) == (row == 4, False)
    assert rewards == [11, 11, 11, 11]
    assert env.reset(options={"first": 7})[0].tolist() == [7, 3]


def test_pettingzoos_own_check_passes(opened):
    env = opened(SimulatorParallelEnv, corridor.__file__)
    parallel_api_test(env, num_cycles=60)
    observations, infos = env.reset(seed=1)
    assert env.agents == ["corridor_0"] and observations["corridor_0"].tolist() == [
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        observations["corridor_0"][7],
        0,
    ]
    assert [mask.tolist() for mask in infos["corridor_0"]["action_mask"]] == [[1, 1, 1], [1, 0]]
    for step in range(1, 10):
        env.step({agent: np.array([0, 0]) for agent in env.agents})
        assert env.agents == [f"corridor_{agent}" for agent in range(step + 1)]


def test_a_vector_environment_has_the_agents_of_all_simulators(opened):
    envs = opened(SimulatorVectorEnv, reach.__file__, simulators=2)
    assert envs.num_envs == 20 and envs.single_action_space.shape == (2,)
    first, _ = envs.reset(seed=1)
    again, _ = envs.reset(seed=1)
    assert (
        np.array_equal(first, again)
        and envs.observation_space.contains(first)
        and not np.array_equal(first[:10], first[10:])
    )
    observation, ended, begins = first, np.zeros(20, bool), 0
    for _ in range(60):
        position = observation[:, 2:]
        observation, reward, terminated, truncated, _ = envs.step(np.clip(observation[:, :2] / 0.1, -1, 1))
        begins += ended.sum()
        assert (reward[ended] == 0).all()  # the first observation of the next episode
        assert (np.abs(observation[~ended][:, 2:] - position[~ended]) <= 0.1001).all() and (
            reward[terminated] > 1
        ).all()
        ended = terminated | truncated
    assert begins > 20


def test_a_vector_environment_tells_final_observations_where_agents_begin_again_at_once(opened):
    envs = opened(
        SimulatorVectorEnv, SIMULATORS, arguments=("episodes",), seats={"group": 3}, autoreset="same-step"
    )
    observation, _ = envs.reset()
    assert observation.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    for _ in range(6):
        before = observation
        observation, _, terminated, truncated, infos = envs.step(np.zeros((3, 1), np.float32))
        for row in np.flatnonzero(terminated | truncated).tolist():
            agent, episode, last = infos["final_obs"][row].tolist()
            assert (
                [agent, episode] == before[row, :2].tolist()
                and last == 2 + (agent + episode) % 3
                and observation[row, 2] == 0
            )
    wrong = opened(SimulatorVectorEnv, SIMULATORS, arguments=("after",), autoreset="same-step")
    with pytest.raises(EnvironmentFault, match='autoreset = "next-step"'):
        [wrong.step(np.zeros((3, 1), np.float32)) for _ in range(5) if _ or wrong.reset()]


def test_simulators_that_do_not_fit_say_what_does(opened):
    env = opened(SimulatorEnv, reach.__file__)
    with pytest.raises(EnvironmentFault, match=r"10 agents at a time.*SimulatorVectorEnv"):
        env.reset()
    with pytest.raises(ConfigError, match='did you mean "reach"'):
        SimulatorEnv(reach.__file__, group="reech")
    some = opened(SimulatorVectorEnv, SIMULATORS, arguments=("alternating",))
    with pytest.raises(EnvironmentFault, match=r"agent 0 asked for no action.*PettingZoo"):
        some.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (np.array([1.5, 0.0]), r"must be integers of shape \[2\], and was float64"),
        (np.array([1, 1], bool), "was bool"),
        (1, r"of shape \[\]: 1"),
        ([1, 1, 1], r"shape \[3\]"),
        ([[1], [1, 2]], "differ in length"),
        (None, "was object"),
        ([1, 2], r"must be at least 0 and below \(3, 2\), and has 2"),
        ([-1, 0], "has -1"),
    ],
)
def test_an_action_that_is_none_of_the_space_is_refused_and_changes_nothing(opened, action, said):
    env = opened(SimulatorEnv, SIMULATORS, arguments=("single",))
    env.reset(seed=3)
    with pytest.raises(SchemaError, match=said):
        env.step(action)
    assert env.step(np.array([1, 1]))[0].tolist() == [1, 3]


def test_actions_of_many_agents_are_looked_at_likewise(opened):
    envs = opened(SimulatorVectorEnv, reach.__file__)
    envs.reset()
    for actions, said in (
        (np.full((10, 2), np.nan, np.float32), "must be finite, and has nan"),
        (np.zeros((10, 1), np.float32), r"shape \[10, 2\], and was float32 of shape \[10, 1\]"),
        (np.zeros(2, np.float32), r"shape \[2\]"),
        ("left", "was <U4"),
    ):
        with pytest.raises(SchemaError, match=said):
            envs.step(actions)
    many = opened(SimulatorParallelEnv, corridor.__file__)
    many.reset(seed=1)
    for given, said in (
        ({}, 'actions lacks agent "corridor_0"'),
        ({"corridor_0": [0, 0], "coridor_1": [0, 0]}, 'did you mean "corridor_1"'),
        ({"corridor_0": [0, 1.5]}, "must be integers"),
    ):
        with pytest.raises(SchemaError, match=said):
            many.step(given)
    assert len(many.step({"corridor_0": [0, 0]})[0]) == 2


def test_an_action_of_both_kinds_is_a_dict_of_both():
    space = Dict({"continuous": Box((1,), "float32"), "discrete": Discrete(3)})
    arrays = {"action.continuous": np.zeros((2, 1), np.float32), "action.discrete": np.zeros(2, np.int64)}
    flatten(space, {"continuous": [0.5], "discrete": np.int64(2)}, arrays, "action", 1)
    assert arrays["action.continuous"].tolist() == [[0], [0.5]] and arrays["action.discrete"].tolist() == [
        0,
        2,
    ]
    for given in ({"continuous": [0.5]}, [0.5], {"continuous": [0.5], "discrete": 1, "third": 1}):
        with pytest.raises(SchemaError, match="must be a dict of continuous, discrete"):
            flatten(space, given, arrays, "action", 1)
