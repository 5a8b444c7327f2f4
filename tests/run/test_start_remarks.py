"""What is said at the start of runs that may end otherwise than their users expect."""

import re
from dataclasses import replace

import pytest
from tests.cli.test_cli import tidemill
from tests.remote.served import serving

from tidemill import ActorCritic, train
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.native import library
from tidemill.native.library import VARIABLE
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian
from tidemill.presets.off_policy import DQN_PRESETS
from tidemill.presets.ppo import ppo
from tidemill.remote.openenv import OpenEnv
from tidemill.remote.rest_config import Rest
from tidemill.run.start_remarks import numpy_instead, remarks
from tidemill.training.experiment_from import with_settings
from tidemill.training.replay_slots import with_slots

SERVER = Rest(url="http://127.0.0.1:9")


@pytest.fixture
def with_core(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tidemill.run.start_remarks.unavailable", lambda setting: None)


def test_why_numpy_computes_is_told_where_the_core_is_missing(monkeypatch, tmp_path):
    experiment = ppo("x", Gymnasium(id="CartPole-v1"))
    monkeypatch.setattr(library, "BUILT", tmp_path / "libkernels.so.1")
    monkeypatch.setenv(VARIABLE, "off")
    assert not [*remarks(experiment)]
    monkeypatch.delenv(VARIABLE)
    (told,) = remarks(experiment)
    assert "numpy computes MLPs, since the native core cannot be used" in told and "was not built" in told
    (told,) = remarks(DQN_PRESETS.general("x", Gymnasium(id="CartPole-v1")))
    assert "was not built" in told


def test_a_core_of_another_version_is_told_and_the_run_goes_on_by_numpy(monkeypatch, tmp_path, capsys):
    if library.unavailable("auto"):
        pytest.skip("there is no native core")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "digest", lambda: 0x99)
    made = ppo("x", Gymnasium(id="CartPole-v1"))
    result = train(made, steps=3000, launch="inline", run_dir=tmp_path / "run")
    assert result.summary["status"] == "completed"
    told = " ".join(capsys.readouterr().out.split())
    assert "note: numpy computes MLPs, since the native core cannot be used: " in told
    assert "was built of other sources than are there now, of another version of Tidemill, say" in told


def test_which_setting_keeps_a_policy_out_of_the_core_is_told(with_core):
    experiment = ppo("x", Gymnasium(id="Pendulum-v1"))
    slow = replace(experiment, policies={"policy": ActorCritic(sde_steps=4)})
    (told,) = remarks(slow)
    assert told.endswith("the native core has no sde_steps = 4")
    (told,) = remarks(replace(experiment, policies={"policy": ActorCritic(layer_norm=True)}))
    assert told.endswith("the native core has no layer_norm")


@pytest.mark.parametrize(
    ("policy", "slow"),
    [
        (QNetwork(quantiles=25), "quantiles = 25"),
        (QNetwork(atoms=51), "atoms = 51"),
        (QNetwork(noise=0.5), "noise = 0.5"),
        (QNetwork(noise=0.5, atoms=51), "noise = 0.5 and atoms = 51"),
        (SquashedGaussian(sde_steps=8), "sde_steps = 8"),
    ],
)
def test_what_numpy_adds_to_layers_of_the_core_is_told(with_core, monkeypatch, policy, slow):
    experiment = ppo("x", Gymnasium(id="Pendulum-v1"))
    (told,) = numpy_instead(replace(experiment, policies={"policy": policy}))
    assert told == (
        f"numpy computes what {slow} of policy policy adds: where it is an MLP on a CPU, the native core can "
        "compute its layers alone"
    )
    assert not list(numpy_instead(replace(experiment, policies={"policy": policy.replace(native="off")})))
    monkeypatch.setenv(VARIABLE, "off")
    assert not list(numpy_instead(replace(experiment, policies={"policy": policy})))


def test_what_plays_on_a_server_without_slots_is_told_what_they_would_spare_it(with_core):
    (told,) = remarks(ppo("x", SERVER, lanes=16))
    assert told == (
        "PPO plays 16 sessions of the server. Each step of 16 lanes takes as long as the slowest. Where a "
        "step is lost, the episodes of all of them are cut, and begin anew (lane_restarts). Slots wait for "
        "nobody, and a lost step is that slot's alone: --slots 16 --algorithm dqn or qrdqn (Discrete "
        "actions), sac or td3 (Box)"
    )
    (told,) = remarks(DQN_PRESETS.general("x", OpenEnv(url="http://127.0.0.1:9", translate="x:y")))
    assert told.startswith("DQN plays 8 sessions") and told.endswith(
        "are cut, and begin anew (lane_restarts). Slots wait for nobody, and a lost step is that slot's "
        "alone: --slots 8"
    )
    (told,) = remarks(ppo("x", SERVER, lanes=1))
    assert "1 session of the server. Where a step is lost" in told


def test_slots_and_environments_in_the_process_need_no_word(with_core):
    assert not [
        *remarks(with_slots(DQN_PRESETS.general("x", SERVER), 4)),
        *remarks(ppo("x", Gymnasium(id="CartPole-v1"))),
    ]


def test_what_wrappers_cost_is_told_where_lanes_would_step_at_once(with_core):
    (told,) = remarks(ppo("x", Gymnasium(id="CartPole-v1", wrap=("frame-skip(2)",))))
    assert told == (
        "lanes of CartPole-v1 step one after the other, since wrappers are around each (frame-skip(2)); "
        "without, all would step at once"
    )
    assert not [
        *remarks(ppo("x", Gymnasium(id="Taxi-v4", wrap=("flatten",)))),
        *remarks(ppo("x", Gymnasium(id="CartPole-v1", threads=2, wrap=("flatten",)))),
    ]


def test_a_batch_size_that_means_minibatches_is_told_so(with_core):
    experiment = ppo("x", Gymnasium(id="CartPole-v1"))
    (told,) = remarks(with_settings(experiment, {"batch_size": 64})[0])
    assert told == (
        "batch_size = 64 of trainer is less than one sample has, and samples are taken whole: batches have "
        "2,048 rows and more. What Stable-Baselines3 calls so is minibatch_size here (64)"
    )
    assert not [*remarks(with_settings(experiment, {"batch_size": 4096})[0])]


def test_it_is_printed_when_a_run_starts(tmp_path):
    lanes = ("--set", "workers.actor.lanes=4", "--set", "workers.actor.agents.0.sample_steps=8")
    with serving() as server:
        result = tidemill(
            "train",
            server.url,
            "--launch",
            "inline",
            "--max-steps",
            32,
            "--run-dir",
            tmp_path / "run",
            *lanes,
        )
    assert result.exit_code == 0, result.output
    assert re.search(r"note: PPO plays 4 sessions of the server\. Each step of 4 lanes", result.output)
