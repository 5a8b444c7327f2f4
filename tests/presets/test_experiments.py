"""Experiments that the library ships."""

from functools import partial
from pathlib import Path

import pytest

import tidemill
from tidemill import Atari, Gymnasium, PettingZoo
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_attribute
from tidemill.presets.base import Presets
from tidemill.presets.experiments import ALGORITHMS, experiment_for
from tidemill.presets.ppo import TUNED, ppo

A2C = load_attribute(f"{Path(__file__).parents[2]}/examples/own_algorithm.py:A2C", "test")
A2C_PRESETS = Presets(partial(ppo, algorithm=A2C(), steps=5_000), {}, {}, ())


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("Hopper-v5", Gymnasium(id="Hopper-v5")),
        ("pettingzoo:mpe2.simple_v3", PettingZoo(make="mpe2.simple_v3")),  # one agent
        ("pettingzoo:mpe2.simple_adversary_v3", PettingZoo(make="mpe2.simple_adversary_v3")),  # two kinds
    ],
)
def test_what_nobody_tuned_trains_on_small_minibatches(name, environment):
    """8 lanes × 256 rows, minibatches of 64, 10 epochs; at 64 × 128, 2,048 and 4 an
    update of 8,192 had 16 steps of Adam, and learned little."""
    assert name not in TUNED
    workers = experiment_for(name, environment).workers
    actor = workers["actor"]
    trainers = [worker for name, worker in workers.items() if name.startswith("trainer")]
    assert actor.lanes == 8 and {spec.sample_steps for spec in actor.agents} == {256}
    assert {(trainer.algorithm.minibatch_size, trainer.algorithm.epochs) for trainer in trainers} == {
        (64, 10)
    }


@pytest.mark.parametrize(
    ("agents", "lanes", "steps"),
    # about 4,096 rows an update: 256 of 3 agents in 4 lanes, 40 of 100 in one
    [(2, 8, 256), (3, 4, 256), (8, 2, 256), (16, 1, 256), (100, 1, 40), (200, 1, 32)],
)
def test_many_agents_have_fewer_lanes_and_shorter_samples(agents, lanes, steps):
    """50 agents of MAgent's battle were at -0.8 after 4,133 steps with 3,200 rows an
    update, and at -5.6 after 6,104 with 102,400."""
    game = PettingZoo(make="mpe2.simple_spread_v3", kwargs={"N": agents})
    actor = experiment_for("pettingzoo:mpe2.simple_spread_v3", game).workers["actor"]
    assert (actor.lanes, actor.agents[0].sample_steps) == (lanes, steps)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_what_learns_at_each_step_begins_soon_and_has_one_lane(algorithm):
    """A warm-up of 5,000 steps was a quarter of Pendulum's 20,000, and eight lanes began
    eight episodes with what one had learnt."""
    workers = experiment_for("Hopper-v5", Gymnasium(id="Hopper-v5"), algorithm).workers
    assert (workers["actor"].lanes, workers["trainer"].buffer.warm_up) == (1, 100)


@pytest.mark.parametrize("algorithm", ["dqn", "qrdqn"])
def test_a_replay_memory_of_atari_games_keeps_single_frames(algorithm):
    """Stacks of four would take four times the memory."""
    name = "ALE/Pong-v5"
    assert experiment_for(name, Atari(id=name), algorithm).workers["trainer"].buffer.frame_stack == 4


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3"])
def test_what_one_agent_trains_by_refuses_several_by_its_own_name(algorithm):
    game = PettingZoo(make="mpe2.simple_spread_v3")
    with pytest.raises(
        ConfigError, match=f"^{algorithm} trains one agent from a replay memory, and spread is"
    ):
        experiment_for("spread", game, algorithm)


def test_the_presets_of_an_algorithm_of_ones_own_are_a_file_and_a_line(monkeypatch, tmp_path):
    with pytest.raises(tidemill.ConfigError, match='no algorithm "a2c" has presets'):
        experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"), "a2c")
    monkeypatch.setitem(ALGORITHMS, "a2c", f"{__file__}:A2C_PRESETS")
    result = tidemill.train(
        "CartPole-v1", algorithm="a2c", launch="inline", run_dir=tmp_path / "run", quiet=True
    )
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 5_000
