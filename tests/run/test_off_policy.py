"""DQN and SAC train as users run them, by their presets, and their runs can be gone on
with, evaluated and loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.envs.test_pettingzoo import SPREAD

import tidemill
from tidemill import (
    DQN,
    SAC,
    Atari,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    PrioritisedReplay,
    QNetwork,
    ReplayActors,
    ReplayTrainer,
    SquashedGaussian,
)
from tidemill.api.schedule import LinearSchedule
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.user_code_loading import load_attribute
from tidemill.presets.environment_names import environment_from
from tidemill.presets.experiments import ALGORITHMS, experiment_for
from tidemill.store.checkpoint import read_newest

LIMITED = Path(__file__).with_name("limited.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def train(experiment, folder, steps, window=100, launch="inline", **replay):
    trainer = experiment.workers["trainer"]
    trainer = trainer.replace(buffer=trainer.buffer.replace(**replay))
    experiment = experiment.replace(
        workers={**experiment.workers, "trainer": trainer},
        limits=experiment.limits.replace(steps=steps, window=window),
    )
    result = tidemill.train(experiment, launch=launch, run_dir=folder, quiet=True)
    assert result.summary["status"] == "completed"
    return result.summary, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def preset(name, algorithm):
    return experiment_for(name, environment_from(name, {}), algorithm)


def test_dqn_learns_cartpole(tmp_path):
    summary, metrics = train(preset("CartPole-v1", "dqn"), tmp_path / "run", 6_000, window=30)
    returns = [line["return/mean"] for line in metrics if "return/mean" in line]
    assert summary["mean_return"] > returns[0] + 20
    # the ratio is exact, whatever the warm-up was exactly
    assert abs(summary["updates"] - (6_000 - 1_000) / 2) < 20
    policy = tidemill.load(tmp_path / "run")
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)


def test_qr_dqn_learns_cartpole(tmp_path):
    experiment = preset("CartPole-v1", "qrdqn")
    quick = experiment.workers["trainer"].algorithm.replace(
        learning_rate=1e-3, target_steps=400, epsilon=LinearSchedule(1, 0.05, to_step=3_700)
    )
    trainer = experiment.workers["trainer"].replace(algorithm=quick)
    experiment = experiment.replace(workers={**experiment.workers, "trainer": trainer})
    summary, metrics = train(experiment, tmp_path / "run", 6_000, window=30, warm_up=500)
    returns = [line["return/mean"] for line in metrics if "return/mean" in line]
    assert summary["mean_return"] > returns[0] + 50
    assert tidemill.load(tmp_path / "run").act(np.zeros(4, np.float32)) in (0, 1)


def test_the_example_is_what_the_command_does():
    example = load_attribute(f"{EXAMPLES / 'dqn.py'}:experiment", "experiment")()
    command = preset("CartPole-v1", "dqn")
    assert (example.workers, example.policies, example.limits) == (
        command.workers,
        command.policies,
        command.limits,
    )


def test_sac_learns_to_swing_the_pendulum(tmp_path):
    experiment = load_attribute(f"{EXAMPLES / 'sac.py'}:experiment", "experiment")()
    _, metrics = train(experiment, tmp_path / "run", 3_500, window=4)
    returns = [line["return/mean"] for line in metrics if "return/mean" in line]
    assert returns[-1] > returns[0] + 100
    assert metrics[-1]["temperature"] < 1
    policy = tidemill.load(tmp_path / "run")
    assert -2 <= policy.act(np.zeros(3, np.float32))[0] <= 2


def test_td3_learns_to_swing_the_pendulum(tmp_path):
    tidemill.train(
        "Pendulum-v1",
        algorithm="td3",
        steps=5_000,
        seed=1,
        launch="inline",
        run_dir=tmp_path / "run",
        quiet=True,
        lanes=4,
        hidden=(64, 64),
        batch_size=64,
        warm_up=1_000,
        learning_rate=3e-3,
        critic_learning_rate=3e-3,
    )
    played = tidemill.evaluate(tmp_path / "run", episodes=10, seed=5).specs[0]
    assert played.mean > -900  # -1,500 before; -375 was seen, and -125 with the preset after 9,000


def test_rainbow_trains_in_threads_and_is_evaluated_without_its_noise(tmp_path):
    experiment = load_attribute(f"{EXAMPLES / 'dqn.py'}:rainbow", "experiment")()
    summary, metrics = train(experiment, tmp_path / "run", 900, launch="threads", warm_up=200)
    assert summary["updates"] > 300
    assert metrics[-1]["epsilon"] == 0 and 0 < metrics[-1]["q/mean"] < 100
    policy = tidemill.load(tmp_path / "run")
    assert len({policy.act(np.full(4, 0.1, np.float32)) for _ in range(20)}) == 1


def test_a_run_goes_on_with_its_replay(tmp_path):
    train(preset("CartPole-v1", "dqn"), tmp_path / "run", 1_500, warm_up=200)
    result = tidemill.resume(tmp_path / "run", limits={"steps": 2_500}, launch="inline", quiet=True)
    assert result.summary["env_steps"] >= 2_500
    assert abs(result.summary["updates"] - (2_500 - 200) / 2) < 20


def test_algorithms_have_presets_for_all_environments_that_they_can_act_in():
    assert [*ALGORITHMS] == ["ppo", "dqn", "qrdqn", "sac", "td3"]
    assert preset("MinAtar/Breakout-v1", "dqn").limits.steps == 1_000_000
    for algorithm, name in (("dqn", "Acrobot-v1"), ("sac", "Pendulum-v1"), ("td3", "Pendulum-v1")):
        assert preset(name, algorithm).workers["trainer"].buffer.replays
    with pytest.raises(ConfigError, match=r"no algorithm .dnq. has presets.*dqn"):
        preset("CartPole-v1", "dnq")
    with pytest.raises(ConfigError, match="an environment of several"):
        experiment_for("pettingzoo:spread", PettingZoo(make=SPREAD), "sac")
    with pytest.raises(TidemillError, match="or SAC with SquashedGaussian"):
        tidemill.train(
            experiment_for("Pendulum-v1", Gymnasium(id="Pendulum-v1"), "dqn"), launch="inline", quiet=True
        )


def test_minatars_games_are_found_by_their_names_and_seen_by_the_convolution(tmp_path):
    summary, _ = train(
        preset("MinAtar/Breakout-v1", "dqn"), tmp_path / "run", 700, warm_up=100, capacity=5_000
    )
    assert summary["updates"] > 100
    assert tidemill.load(tmp_path / "run").act(np.zeros((10, 10, 4), bool)) in range(3)


@pytest.mark.parametrize(
    ("algorithm", "walk"), [("dqn", "Walk"), ("dqn", "PicturedWalk"), ("sac", "SteeredWalk")]
)
def test_an_exact_run_is_the_same_to_the_last_bit_whatever_takes_how_long(algorithm, walk, tmp_path):
    """Of four slots whose steps take what time they like, with everything random that
    these algorithms draw: noise, priorities, actions. Pictures go through torch."""
    found = []
    for latency in ("none", "random"):
        environment = Gymnasium(make=f"{LIMITED}:{walk}", kwargs={"latency": latency}, threads=1)
        if algorithm == "dqn":
            policy, learner = QNetwork(hidden=(16,), noise=0.5, atoms=11), DQN(target_steps=10)
        else:
            policy, learner = SquashedGaussian(hidden=(16, 16)), SAC()
        replay = PrioritisedReplay(capacity=4_000, warm_up=20, steps=2)
        trainer = ReplayTrainer(
            algorithm=learner, buffer=replay, batch_size=8, ratio="1/2", exact=True, database_seconds=None
        )
        actors = ReplayActors(environment=environment, lanes=1, ring=4)
        experiment = Experiment(
            name="exact",
            policies={"policy": policy},
            workers={"actor": actors, "trainer": trainer},
            limits=Limits(steps=160),
        )
        result = tidemill.train(
            experiment, launch="threads", run_dir=tmp_path / latency, source=LIMITED, quiet=True
        )
        assert result.summary["status"] == "completed" and result.summary["updates"] > 50
        _, arrays, *_ = read_newest(tmp_path / latency / "checkpoints" / "policy")
        found.append(
            {
                f"{file}.{name}": array
                for file in ("policy", "algorithm")
                for name, array in arrays[file].items()
            }
        )
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


def test_atari_games_are_kept_as_single_frames_and_seen_by_the_convolutions(tmp_path):
    summary, _ = train(preset("ALE/Pong-v5", "dqn"), tmp_path / "run", 40, warm_up=16, capacity=400)
    assert summary["updates"] >= 4  # every stack that was made again was compared with the one that came
    assert tidemill.load(tmp_path / "run").act(np.zeros((4, 84, 84), np.uint8)) in range(6)


def test_a_replay_memory_keeps_single_frames_of_games_that_go_on_after_a_lost_life(tmp_path):
    pytest.importorskip("ale_py")
    experiment = experiment_for("ALE/Breakout-v5", Atari(id="breakout", num_threads=1), "dqn")
    summary, _ = train(experiment, tmp_path / "run", 640, capacity=2_000, warm_up=600)
    # eight games of five lives of 20 to 30 steps
    assert summary["episodes"] > 10
