import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver
from tests.envs.games import Counter, Nested

from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium

GAMES = str(Path(__file__).with_name("games.py"))


class Alone(Counter):
    """It takes a file that there may be but one of."""

    def __init__(self, path: str) -> None:
        super().__init__(length=2)
        Path(path).touch(exist_ok=False)


def test_a_copy_that_wants_what_another_one_has_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match=r"FileExistsError: .*; give each copy its own, or close the one"):
        Gymnasium(make=Alone, kwargs={"path": str(tmp_path / "lock")}).build(2, 0)


class Numbered(Counter):
    """Each copy counts; `wrong` says what the last of three does."""

    made = closed = 0

    def __init__(self, wrong: str) -> None:
        super().__init__()
        type(self).made += 1
        self.wrong = wrong if self.made == 3 else ""
        if self.wrong == "raises":
            raise ValueError("no more arms")
        if self.wrong == "does":
            self.action_space = gymnasium.spaces.Discrete(4)
        if self.wrong == "sees":
            self.observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)

    def close(self) -> None:
        type(self).closed += 1
        raise ValueError(f"arm {self.closed} is held")


@pytest.fixture
def numbered(monkeypatch):
    monkeypatch.setattr(Numbered, "made", 0)
    monkeypatch.setattr(Numbered, "closed", 0)
    return lambda wrong="": Gymnasium(make=Numbered, kwargs={"wrong": wrong}).build(3, 0)


@pytest.mark.parametrize("wrong", ["does", "sees"])
def test_a_lane_of_other_spaces_is_refused_and_all_are_closed(numbered, wrong):
    with pytest.raises(ConfigError, match="lane 2 has other spaces than lane 0: "):
        numbered(wrong)
    assert Numbered.closed == 3


def test_those_that_were_made_are_closed_where_one_cannot_be(numbered):
    with pytest.raises(ConfigError, match="no more arms"):
        numbered("raises")
    assert Numbered.closed == 2


def test_all_lanes_are_closed_whatever_that_raises(numbered):
    loop = numbered()
    with pytest.raises(ValueError, match="arm 1 is held"):
        loop.close()
    assert Numbered.closed == 3


def counters(lanes=3, seed=100, **kwargs):
    return LaneLoop([Counter(length=2 + i, **kwargs) for i in range(lanes)], "Counter", seed)


def test_cartpole_lanes_are_those_of_gymnasium_step_for_step():
    lanes, seed = 3, 7
    driver = Driver(Gymnasium(id="CartPole-v1", max_episode_steps=20).build(lanes, seed))
    bare = [gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(lanes)]
    first = [True] * lanes
    for _ in range(120):
        (told,) = driver.tick()
        for lane, env in enumerate(bare):
            if told.reset[lane]:
                observation, _ = env.reset(seed=seed + lane if first[lane] else None)
                reward, terminated, truncated, first[lane] = 0.0, False, False, False
            else:
                observation, reward, terminated, truncated, _ = env.step(int(told.actions["action"][lane]))
            assert np.array_equal(told.tick.observation["obs"][lane], observation)
            assert told.tick.reward[lane] == reward
            assert told.tick.done[lane] == terminated
            assert told.tick.truncated[lane] == (truncated and not terminated)
            assert told.tick.present[lane]


def test_a_lane_is_seeded_once_and_reset_when_told():
    driver = Driver(counters())
    (told,) = driver.tick()
    assert told.tick.observation["obs"].tolist() == [[100, 0], [101, 0], [102, 0]]
    driver.tick()
    (told,) = driver.tick(reset=np.array([False, False, True]))
    assert told.tick.observation["obs"].tolist() == [[100, 2], [101, 2], [-1, 0]]
    assert told.tick.reward.tolist() == [2, 2, 0]
    assert told.tick.done.tolist() == [True, False, False]


def test_a_finished_lane_idles_until_its_reset():
    driver = Driver(counters(lanes=2))
    nothing = np.zeros(2, bool)
    driver.tick()
    driver.tick()
    (told,) = driver.tick(reset=nothing)
    assert told.tick.done.tolist() == [True, False]
    (told,) = driver.tick(reset=nothing)
    assert told.tick.done.tolist() == [False, True]
    assert told.tick.present.tolist() == [False, True]
    assert told.tick.reward.tolist() == [0, 3]
    (told,) = driver.tick(reset=np.array([True, False]))
    assert told.tick.present.tolist() == [True, False]
    assert told.tick.observation["obs"].tolist() == [[-1, 0], [101, 3]]


def test_an_end_at_the_limit_is_an_end():
    driver = Driver(counters(lanes=1, both=True))
    for _ in range(3):
        (told,) = driver.tick()
    assert told.tick.done[0]
    assert not told.tick.truncated[0]


def test_discrete_actions_get_their_start():
    loop = counters(lanes=2)
    driver = Driver(loop)
    driver.tick()
    driver.tick(actions=[{"action": np.array([0, 2])}])
    assert [env.given for env in loop.envs] == [[5], [7]]


def test_nested_spaces_arrive_leaf_by_leaf():
    loop = LaneLoop([Nested(), Nested()], "Nested", 0)
    driver = Driver(loop)
    driver.tick()
    actions = {
        "action.0": np.array([[5, -5], [0.5, 0]], np.float32),
        "action.1.a": np.array([0, 1]),
        "action.1.b": np.array([[1, 2], [0, 1]]),
    }
    (told,) = driver.tick(actions=[actions])
    seen = told.tick.observation
    assert seen["obs.step"].tolist() == [1, 1]
    assert seen["obs.place.0"].tolist() == [[[1, 1], [1, 1]]] * 2
    assert seen["obs.place.1"].tolist() == [[1, 0, 1]] * 2
    box, parts = loop.envs[0].given[0]
    assert box.tolist() == [1, -1]  # clipped to the bounds
    assert box.dtype == np.float32
    assert parts["a"] == 3
    assert parts["b"].tolist() == [1, 2]


def test_rows_may_lie_apart_in_memory():
    driver = Driver(counters(lanes=2))
    wide = np.zeros((2, 5), np.float32)
    driver.ticks[0].observation["obs"] = wide[:, 1:3]
    driver.tick()
    assert wide.tolist() == [[0, 100, 0, 0, 0], [0, 101, 0, 0, 0]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "raise",
            r"Counter: lane 1 raised ZeroDivisionError while stepping with action \d: the pole is gone",
        ),
        ("shape", r"lane 1: obs of agent agent has shape \(3,\); the observation space says \(2,\)"),
        ("dtype", r"lane 1: obs of agent agent has dtype <U1"),
        (
            "nan",
            r"obs of agent agent in lane 1 is not finite: \[100. *nan\]|obs of agent agent in lane 1 is not "
            r"finite: \[101. *nan\]",
        ),
        ("reward", r"reward of agent agent in lane 1 is not finite: inf"),
        (
            "reward shape",
            r"lane 1: reward is array.*, and must be one number: a wrapper weighs several objectives",
        ),
        ("old", r"lane 1: step returned .* instead of \(observation, reward, terminated, truncated, info\)"),
    ],
)
def test_a_fault_names_the_lane_and_what_was_wrong(fault, says):
    driver = Driver(LaneLoop([Counter(length=9), Counter(length=9, fault=fault)], "Counter", 100))
    driver.tick()
    driver.tick()
    with pytest.raises(EnvironmentFault, match=says) as raised:
        driver.tick()
    if fault == "raise":
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_reset_that_raises_says_so():
    with pytest.raises(EnvironmentFault, match="lane 0 raised RuntimeError while resetting: no more games"):
        Driver(LaneLoop([Counter(fault="reset")], "Counter", 0)).tick()


def test_large_finite_numbers_are_no_fault():
    loop = counters(lanes=2, seed=2_000_000)
    loop.envs[0]._see = lambda: np.full(2, 3e38, np.float32)
    (told,) = Driver(loop).tick()
    assert told.tick.observation["obs"][0].tolist() == [np.float32(3e38)] * 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id": "CartPol-v1"}, 'did you mean "CartPole-v1"'),
        ({"id": "CartPole-v1", "kwargs": {"sutton_barto_rewad": True}}, 'did you mean "sutton_barto_reward"'),
        ({"id": "no_such_module:Thing-v0"}, 'no module "no_such_module"'),
        ({"id": "numpy.linalg:Qwxyz-v0"}, 'importing numpy.linalg registers none.*"numpy.envs:Qwxyz-v0"'),
        ({"id": "gymnasium.envs:Qwxyz-v0"}, r"gymnasium registers \S.*, …\."),
        ({"make": "no_such_file.py:make"}, "no file no_such_file.py"),
        ({"make": f"{GAMES}:Countr"}, 'did you mean "Counter"'),
        ({"make": f"{GAMES}:not_an_env"}, r"is no gymnasium.Env$"),
        ({"make": f"{GAMES}:of_the_old_gym"}, r"is no gymnasium.Env; it is the old gym's, .* shimmy\.GymV21"),
        ({"make": f"{GAMES}:Counter", "kwargs": {"lenght": 3}}, 'did you mean "length"'),
        ({"make": "games"}, "module:NAME"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(config, says):
    with pytest.raises(ConfigError, match=says):
        Gymnasium(**config).build(1, 0)


@pytest.mark.parametrize(
    "config", [{}, {"id": "CartPole-v1", "make": "a:b"}, {"id": "CartPole-v1", "max_episode_steps": -1}]
)
def test_impossible_settings_are_refused_at_once(config):
    with pytest.raises(ConfigError):
        Gymnasium(**config)


def test_a_missing_package_names_the_command_that_mends_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError, match=r'pip install "gymnasium\[box2d\]"'):
        Gymnasium(id="LunarLander-v3").build(1, 0)


def test_an_environment_of_ones_own_by_file_with_a_limit():
    environment = Gymnasium(make=f"{GAMES}:Counter", kwargs={"length": 50}, max_episode_steps=2).build(1, 0)
    driver = Driver(environment)
    for _ in range(3):
        (told,) = driver.tick()
    assert told.tick.truncated[0]
    assert not told.tick.done[0]


def test_an_environment_that_changes_its_arguments_changes_no_other_s_nor_the_configuration():
    config = Gymnasium(make=f"{GAMES}:Eating", kwargs={"lengths": [3, 5]})
    environment = config.build(lanes=2, seed=0)
    assert [env.unwrapped.length for env in environment.envs] == [3, 3]
    assert config == Gymnasium(make=f"{GAMES}:Eating", kwargs={"lengths": [3, 5]})


def test_an_environment_s_own_limit_cuts_each_episode_by_its_own_steps():
    environment = Gymnasium(id="MountainCar-v0").build(3, 0)  # 200 steps, and random actions do not end it
    assert environment.max_episode_steps == 200
    driver, cut = Driver(environment), []
    for tick in range(1, 620):
        (told,) = driver.tick(np.array([True, False, False]) if tick == 51 else None)
        cut += [(tick, lane) for lane in np.flatnonzero(told.tick.truncated).tolist()]
    assert cut == [(201, 1), (201, 2), (251, 0), (402, 1), (402, 2), (452, 0), (603, 1), (603, 2)]


def test_a_lane_that_waits_for_its_reset_is_not_cut_again():
    driver = Driver(
        Gymnasium(make=f"{GAMES}:Counter", kwargs={"length": 50}, max_episode_steps=1).build(2, 0)
    )
    driver.tick()
    (told,) = driver.tick()
    assert told.tick.truncated.all()
    for _ in range(2):
        (told,) = driver.tick(np.zeros(2, bool))
        assert not told.tick.truncated.any() and not told.tick.present.any()


def test_actions_are_what_an_action_space_samples():
    given = []

    class Seeing(Counter):
        def step(self, action):
            given.append(action)
            return super().step(action)

    driver = Driver(LaneLoop([Seeing(length=9)], "Seeing", 0))
    driver.tick()
    driver.tick()
    assert type(given[0]) is type(gymnasium.spaces.Discrete(2).sample())


def test_limit_0_lifts_the_limit():
    assert not isinstance(
        Gymnasium(id="CartPole-v1", max_episode_steps=0).make_one(), gymnasium.wrappers.TimeLimit
    )


def test_a_picture_comes_from_lane_0_alone():
    environment = Gymnasium(id="CartPole-v1").build(2, 0, render=True)
    Driver(environment).tick()
    picture = environment.render()
    assert picture is not None
    assert picture.ndim == 3
    assert picture.dtype == np.uint8
    assert environment.envs[1].render_mode is None
    environment.close()
    environment.close()


@pytest.mark.parametrize(
    "config", [Gymnasium(make=f"{GAMES}:Counter"), Gymnasium(id="tests.envs.games:TidemillCounter-v0")]
)
def test_an_environment_without_pictures_has_none(config):
    environment = config.build(1, 0, render=True)
    Driver(environment).tick()
    assert environment.render() is None


def test_configurations_are_plain_data():
    config = Gymnasium(id="CartPole-v1", kwargs={"sutton_barto_reward": True})
    assert decode(Gymnasium, encode(config)) == config


def test_importing_configurations_imports_no_simulator_and_no_torch():
    code = (
        "import sys\n"
        "from tidemill.envs import atari, lanes, vector\n"
        "from tidemill.testing import check_env, scripted\n"
        "from tidemill.presets import environment_names\n"
        "print([m for m in ('gymnasium', 'torch', 'ale_py', 'mujoco') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
