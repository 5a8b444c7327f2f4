from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tidemill.api.environment import EnvironmentConfig
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.errors import ConfigError
from tidemill.envs.atari import Atari
from tidemill.envs.envpool import EnvPool
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.presets import environment_names
from tidemill.presets.environment_names import FAMILIES, Family, environment_from, is_named
from tidemill.remote.rest_config import Rest


@pytest.mark.parametrize(
    ("text", "kwargs", "config"),
    [
        ("CartPole-v1", {}, Gymnasium(id="CartPole-v1")),
        ("LunarLander-v3", {"gravity": -5}, Gymnasium(id="LunarLander-v3", kwargs={"gravity": -5})),
        ("my.games:Chess-v2", {}, Gymnasium(id="my.games:Chess-v2")),
        ("my.games:board/Chess", {}, Gymnasium(id="my.games:board/Chess")),
        ("my.games:make_chess", {"size": 8}, Gymnasium(make="my.games:make_chess", kwargs={"size": 8})),
        ("games/chess.py:Chess", {}, Gymnasium(make="games/chess.py:Chess")),
        ("http://127.0.0.1:8477", {}, Rest(url="http://127.0.0.1:8477")),
        (
            "rest:https://games.example/chess",
            {"deadline_s": 5.0},
            Rest(url="https://games.example/chess", deadline_s=5.0),
        ),
        ("simulator:", {"layout": 0}, SimulatorEnvironment(layout="0")),
        ("ALE/Pong-v5", {"noop_max": 0}, Atari(id="ALE/Pong-v5", noop_max=0)),
        (
            "envpool:Pong-v5",
            {"num_threads": 1, "frame_skip": 2},
            EnvPool(id="Pong-v5", num_threads=1, kwargs={"frame_skip": 2}),
        ),
        ("ALE/own.py:Game", {}, Gymnasium(make="ALE/own.py:Game")),
        ("pettingzoo:zoo:make", {"n": 2}, PettingZoo(make="zoo:make", kwargs={"n": 2})),
        ("pettingzoo:mpe2.simple_tag_v3", {}, PettingZoo(make="mpe2.simple_tag_v3")),
        ("pettingzoo:own.maze_v1", {}, PettingZoo(make="own.maze_v1")),
        ("PongNoFrameskip-v4", {}, Atari(id="ALE/Pong-v5")),
    ],
)
def test_what_is_typed_becomes_a_configuration(text, kwargs, config):
    assert environment_from(text, kwargs) == config


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "pettingzoo.classic.tictactoe_v3": (
            "pettingzoo:pettingzoo.classic.tictactoe_v3",
            "pettingzoo:classic.tictactoe_v3",
            "pettingzoo:classic/tictactoe-v3",
            "pettingzoo:tictactoe_v3",
            "pettingzoo.classic.tictactoe_v3",
            "pettingzoo.classic:tictactoe_v3",
        ),
        "mpe2.simple_spread_v3": (
            "pettingzoo:pettingzoo.mpe.simple_spread_v3",
            "pettingzoo:mpe.simple_spread_v3",
            "pettingzoo:simple_spread_v3",
            "mpe2:simple_spread_v3",
            "mpe2.simple_spread_v3",
        ),
    }.items(),
)
def test_an_environment_of_several_agents_has_all_its_usual_names(module, names):
    assert [environment_from(name) for name in names] == [PettingZoo(make=module)] * len(names)


def test_an_unknown_environment_of_several_agents_is_told_with_the_nearest():
    with pytest.raises(
        ConfigError, match='called "tictactoe_v2", and no module; did you mean "tictactoe_v3"'
    ):
        environment_from("pettingzoo:tictactoe_v2")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("HalfCheetah-v3", '"HalfCheetah-v5", or "HalfCheetah-v4"'),
        ("LunarLander-v2", 'did you mean "LunarLander-v3"'),
        ("Taxi-v3", 'did you mean "Taxi-v4"'),
        ("simple_spread_v3", '"pettingzoo:simple_spread_v3"'),
        ("HalfCheetahBulletEnv-v0", 'pip install "pybullet-envs-gymnasium"'),
    ],
)
def test_a_name_of_before_is_answered_with_that_of_today(name, cure):
    with pytest.raises(ConfigError) as told:
        environment_from(name).build(1, 0)
    assert cure in str(told.value)


def test_an_old_name_of_a_game_is_answered_with_that_of_today_each_time():
    pytest.importorskip("ale_py")
    for name in ("Pong-v4", "PongDeterministic-v4", "PongNoFrameskip-v0", "Pong-v4"):
        with pytest.raises(ConfigError, match='take "ALE/Pong-v5": frames skipped'):
            environment_from(name).build(1, 0)


def test_errors_say_what_to_type():
    with pytest.raises(ConfigError, match=r"FILE\.py:NAME"):
        environment_from("module:")
    with pytest.raises(ConfigError, match='did you mean "noop_max"'):
        environment_from("ALE/Pong-v5", {"noop_mx": 1})
    with pytest.raises(ConfigError, match='did you mean "deadline_s"'):
        environment_from("http://127.0.0.1:8477", {"dedline": 1})
    with pytest.raises(ConfigError, match="no address of a server"):
        environment_from("rest:games.example")


@dataclass(frozen=True, kw_only=True)
class Maze(EnvironmentConfig):
    size: int = 1

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        return cls(size=int(name.removeprefix("maze:")), **settings)


def test_a_family_of_ones_own_is_a_file_and_a_line(monkeypatch):
    line = Family("maze:SIZE", ("maze:",), __name__, "Maze")
    assert not is_named("maze:9")
    monkeypatch.setattr(environment_names, "FAMILIES", (*FAMILIES, line))
    assert is_named("maze:9") and environment_from("maze:9").size == 9
