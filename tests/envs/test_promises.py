"""What environments promise of the length of their episodes."""

import pytest
from tests.envs.games import __file__ as games

from tidemill.envs.atari import Atari
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.vector import GymnasiumVector
from tidemill.testing.scripted import Free, Scripted


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (Gymnasium(id="CartPole-v1"), 500),
        (Gymnasium(id="CartPole-v1", max_episode_steps=70), 70),
        (Gymnasium(id="CartPole-v1", max_episode_steps=0), 0),
        (Gymnasium(make=f"{games}:Counter"), 0),
        (Gymnasium(make=f"{games}:Counter", max_episode_steps=9), 9),
        (GymnasiumVector(id="CartPole-v1"), 500),
        (GymnasiumVector(id="CartPole-v1", max_episode_steps=70), 70),
        (GymnasiumVector(make=f"{games}:vector"), 0),
        (Atari(id="ALE/Pong-v5", max_episode_steps=300), 300),
        (PettingZoo(make="mpe2.simple_spread_v3:parallel_env"), 0),
        (PettingZoo(make="mpe2.simple_spread_v3:parallel_env", max_episode_steps=5), 5),
        (Scripted(longest=7), 7),
        (Free(), 0),
    ],
)
def test_the_most_steps_of_an_episode_are_told_where_they_are_known(config, steps):
    environment = config.build(2, 0)
    assert environment.max_episode_steps == steps
    environment.close()
