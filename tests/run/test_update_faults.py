"""Runs some of whose updates are not finite: they go on, look back, go back, and never
keep weights that are not finite."""

import json
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest

import tidemill
from tidemill import PPO, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer
from tidemill.algorithms.dqn import DQN, DQNLearner
from tidemill.algorithms.ppo import PPOLearner, PPOLoss
from tidemill.api.algorithm import UpdateFault
from tidemill.core.errors import CheckpointError, ConfigError, RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.nets.torch_network import TorchNetwork
from tidemill.run.events import read_events
from tidemill.store.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.trained.replay_fault import replay_fault
from tidemill.workers.update_faults import IN_A_ROW, UpdateFaults


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that has a learner's updates, by number from 1, find NaN in what
    they are given; it returns the list of (time, seat) where."""

    def set_up(spoilt, learner=PPOLearner):
        name = "update" if learner is DQNLearner else "_update"
        count, places, update = {}, [], getattr(learner, name)

        def counted(self, samples, *args, **kwargs):
            count[self] = count.get(self, 0) + 1
            if count[self] in spoilt and samples:
                replay = learner is DQNLearner
                places.append((0, 1) if replay else tuple(np.argwhere(samples[0].trained())[5].tolist()))
                samples[0]["obs"][places[-1]] = np.nan
            return update(self, samples, *args, **kwargs)

        monkeypatch.setattr(learner, name, counted)
        return places

    return set_up


def run(folder, updates, launch="inline", **settings):
    made = {"lanes": 4, "sample_steps": 16, "minibatch_size": 32, "learning_rate": 1e-3, **settings}
    made |= {"checkpoint_seconds": 1e-9, "checkpoint_share": 1, "limits.updates": updates}
    return tidemill.train(
        "CartPole-v1", steps=10**6, launch=launch, layout="given", run_dir=folder, log="", quiet=True, **made
    )


def kept(folder, policy="policy"):
    """Return the updates of the checkpoints, all of which are finite."""
    found = []
    for path in checkpoints(folder / "checkpoints" / policy):
        arrays, facts = read_checkpoint(path)
        for part in ("policy", "algorithm"):
            assert all(np.isfinite(a).all() for a in arrays[part].values() if a.dtype.kind == "f")
        found.append(facts["updates"])
    return found


def test_an_update_that_is_not_finite_is_left_out_recorded_and_found_again(tmp_path, spoil, capsys):
    places = spoil({3})
    found = run(tmp_path / "run", 6, fault_records=2)
    assert (found.summary.status, found.summary.updates) == ("completed", 6)
    assert [record["skipped"] for record in read_metrics(tmp_path / "run")] == [0, 0, 1, 1, 1, 1]
    assert kept(tmp_path / "run")[-1] == 6
    told = capsys.readouterr().err
    assert told.count("update 3 was cut short") == 1
    assert "tidemill replay-fault RUN 3" in told
    assert "--set workers.trainer.algorithm.learning_rate=" in told
    (event,) = (event for event in read_events(tmp_path / "run") if "update 3 was cut short" in event.cause)
    each = [record["step"] for record in read_metrics(tmp_path / "run")]
    assert (event.what, event.worker, event.life) == ("told", "trainer-0", 1)
    assert event.steps == each[2] - each[1]  # what was left out
    report = replay_fault(tmp_path / "run")
    assert report.record.name == "update-3"
    ((row, lane),) = places
    assert report.where.endswith(f"row {row}, lane {lane} of sample 0 from actor-0")
    assert report.where.startswith("input obs[")
    assert {oct(file.stat().st_mode & 0o777) for file in report.record.iterdir()} == {"0o600"}


def test_records_are_bounded(tmp_path, spoil):
    spoil({1, 3, 5, 6})
    run(tmp_path / "run", 7, fault_records=2)
    records = tmp_path / "run" / "faults" / "trainer-0"
    assert [path.name for path in checkpoints(records)] == ["update-5", "update-6"]
    with pytest.raises(
        RunError, match=r"there is no record 3 in .* there are: trainer-0 update-5, trainer-0 update-6"
    ):
        replay_fault(tmp_path / "run", 3)


def test_without_records_there_is_nothing_to_look_at(tmp_path, spoil):
    spoil({1})
    run(tmp_path / "run", 2, fault_records=0)
    with pytest.raises(RunError, match="no record of an update that was left out"):
        replay_fault(tmp_path / "run")


def test_three_in_a_row_lead_back_to_the_last_checkpoint_with_a_smaller_rate(tmp_path, spoil, capsys):
    spoil({3, 4, 5})
    run(tmp_path / "run", 7, fault_rate_factor=0.5, checkpoints=10)
    assert "with the weights of checkpoint update-2, with learning_rate = 0.0005" in capsys.readouterr().err
    assert kept(tmp_path / "run") == [1, 2, 6, 7]
    records = read_metrics(tmp_path / "run")
    (back,) = (event for event in read_events(tmp_path / "run") if "in a row were left out" in event.cause)
    assert (back.worker, back.life) == ("trainer-0", 1)
    assert back.steps == records[3]["step"] - records[1]["step"]  # the fifth is not counted yet
    assert [record["learning_rate"] for record in records if "learning_rate" in record][-1] == 5e-4
    manifest = json.loads((tmp_path / "run/checkpoints/policy/update-7/manifest.json").read_text())
    assert manifest["facts"]["settings"] == {"learning_rate": 5e-4}
    assert manifest["facts"]["skipped"] == 3


def test_a_run_that_never_recovers_ends_with_the_cause_and_finite_weights(tmp_path, spoil):
    spoil(range(3, 100))
    with pytest.raises(
        RunError, match="3 updates in a row were left out, and no other checkpoint is there than those"
    ):
        run(tmp_path / "run", 50)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # back to update 2, to update 1, and then there is none
    assert summary["status"] == "failed"
    assert kept(tmp_path / "run")[:2] == [1, 2]


def test_a_run_that_goes_back_again_and_again_ends_with_the_cause(tmp_path, spoil, capsys):
    """Although an update is done, and saved, in between."""
    spoil([n for n in range(3, 400) if n % 4])
    said = (
        r"gone back to a checkpoint 5 times in \d+ s and 20 updates, which has not helped: .*learning_rate="
    )
    with pytest.raises(RunError, match=said) as caught:
        run(tmp_path / "run", 200)
    assert "or have each return make it smaller" in str(caught.value)
    assert "go on from the last one by: " in str(caught.value)
    assert capsys.readouterr().err.count("training goes on with the weights of checkpoint") == 5
    # 5 to 7, 9 to 11, … are left out, and each time the one before was saved
    assert kept(tmp_path / "run")[-3:-1] == [20, 24]


def test_returns_to_a_checkpoint_are_forgotten_once_both_time_and_updates_have_gone_by(monkeypatch):
    now, faults = [0.0], UpdateFaults(Mock())
    monkeypatch.setattr("tidemill.workers.update_faults.awake", lambda: now[0])
    for updates in range(0, 50, 10):
        assert not faults.too_often(updates)
        faults.went_back(updates)
    assert "5 times in 0 s and 50 updates" in faults.too_often(50)
    assert faults.too_often(100_000)  # short updates
    now[0] = 601.0
    assert faults.too_often(1000)  # long ones
    assert not faults.too_often(1001)


def test_one_update_that_spoils_the_weights_is_not_told_as_several_in_a_row():
    faults, fault = UpdateFaults(Mock()), UpdateFault("", "", {})
    told = [faults.note(fault, 0, Mock(), Mock(), {}) for _ in range(IN_A_ROW)]
    assert "3 in a row lead back" in told[0] and not any(told[1:])
    assert faults.go_back and faults.left_out == "3 updates in a row were left out"
    faults.went_back(0)
    faults.in_a_row = IN_A_ROW  # as `Learner` sets it
    faults.note(fault, 0, Mock(), Mock(), {})
    assert faults.go_back and faults.left_out == "an update was left out"
    others = UpdateFaults(Mock())
    others.in_a_row = IN_A_ROW
    assert "what spoils the weights leads back" in others.note(fault, 0, Mock(), Mock(), {})


def test_a_run_that_is_not_finite_from_the_start_ends_with_the_cause_and_finite_weights(tmp_path, spoil):
    spoil(range(100))
    with pytest.raises(RunError, match="no checkpoint is there to go back to"):
        run(tmp_path / "run", 50)
    assert len(kept(tmp_path / "run")) == 1


@pytest.mark.parametrize("launch", ["inline", "threads"])
def test_equal_trainers_leave_out_the_same_updates_and_go_back_together(tmp_path, spoil, launch, capsys):
    spoil({3, 4, 5})
    made = {"workers.actor.count": 2, "workers.trainer.count": 2, "workers.actor.lanes": 4}
    made |= {"workers.actor.agents.0.sample_steps": 16}
    run(tmp_path / "run", 8, launch, checkpoints=10, **made)
    assert capsys.readouterr().err.count("with the weights of checkpoint update-2") == 1
    assert kept(tmp_path / "run")[:2] == [1, 2]
    assert read_metrics(tmp_path / "run")[-1]["skipped"] == 3


def test_equal_trainers_go_back_together_again_after_a_checkpoint_that_the_first_wrote(
    tmp_path, spoil, capsys
):
    spoil({3, 4, 5, 8, 9, 10})
    made = {"workers.actor.count": 2, "workers.trainer.count": 2, "workers.actor.lanes": 4}
    made |= {"workers.actor.agents.0.sample_steps": 16}
    run(tmp_path / "run", 12, checkpoints=10, **made)
    told = capsys.readouterr().err
    assert told.count("with the weights of checkpoint update-2") == 1
    assert told.count("with the weights of checkpoint update-7") == 1


def test_a_replay_memory_goes_on_with_the_next_batch(tmp_path, spoil):
    spoil({3, 5, 6, 7}, DQNLearner)
    found = tidemill.train(
        "CartPole-v1", algorithm="dqn", steps=400, launch="inline", layout="given", run_dir=tmp_path / "run",
        log="", quiet=True, warm_up=100, checkpoint_seconds=1e-9, checkpoint_share=1,
    )  # fmt: skip
    assert found.summary.status == "completed"
    assert read_metrics(tmp_path / "run")[-1]["skipped"] == 4
    kept(tmp_path / "run")
    report = replay_fault(tmp_path / "run", 3)
    assert report.where.startswith("input obs[1")
    assert "row 1 of the minibatch" in report.where


class Overflows(gymnasium.Env):
    """Tells an observation once, in its 155th step, by which no gradient is finite."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        seen = self.np_random.normal(size=2).astype(np.float32)
        return seen * np.float32(1e38 if self.steps == 155 else 1), 1.0, self.steps % 10 == 0, False, {}


def test_a_replay_memory_does_not_come_back_to_what_spoilt_an_update(tmp_path, capsys):
    found = tidemill.train(
        Overflows, algorithm="dqn", steps=400, launch="inline", layout="given", run_dir=tmp_path / "run",
        log="", quiet=True, warm_up=100, hidden=(8,), lanes=1,
    )  # fmt: skip
    assert found.summary.status == "completed"
    skipped = read_metrics(tmp_path / "run")[-1]["skipped"]
    assert 0 < skipped <= 2  # two transitions hold it
    assert "transitions of that update are never drawn again" in capsys.readouterr().err


def test_an_update_of_a_noisy_network_is_looked_at_again(tmp_path):
    """Its ε follows a schedule, which means nothing to it, and of which the record has a
    number."""
    tidemill.train(
        Overflows, algorithm=DQN(), steps=200, launch="inline", layout="given", run_dir=tmp_path / "run",
        log="", quiet=True, warm_up=100, hidden=(8,), noise=0.5, lanes=1,
    )  # fmt: skip
    report = replay_fault(tmp_path / "run")
    assert report.where.startswith(("layer ", "gradient "))


@dataclass(frozen=True, kw_only=True)
class Masking(TorchNetwork):
    """Has a mask of -inf, which it adds before a softmax; tells NaN to whoever trains
    it."""

    def network(self, spaces, outputs):
        import torch

        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, outputs + 1)
                self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

            def forward(self, observation):
                seen = (observation["obs"] + self.mask).softmax(-1)
                told = self.layer(seen if torch.is_inference_mode_enabled() else seen * torch.nan)
                return told[:, :-1], told[:, -1]

        return Network()


def test_masks_of_ones_own_network_are_not_what_an_update_failed_by(tmp_path):
    actors = Actors(environment=Gymnasium(id="CartPole-v1"), lanes=4, agents=(AgentSpec(sample_steps=16),))
    experiment = Experiment(
        name="masking",
        policies={"policy": Masking()},
        workers={"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=32))},
        limits=Limits(updates=2),
    )
    tidemill.train(
        experiment, launch="inline", layout="given", run_dir=tmp_path / "run", source=__file__, log="",
        quiet=True,
    )  # fmt: skip
    report = replay_fault(tmp_path / "run", 1, trust=True)
    assert report.where.startswith("layer mul (test_update_faults.py, line ")


class Forbids(Overflows):
    """Allows nothing in its 100th step."""

    observation_space = gymnasium.spaces.Dict(
        {"seen": Overflows.observation_space, "action_mask": gymnasium.spaces.MultiBinary(2)}
    )

    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        return {"seen": seen, "action_mask": np.ones(2, np.int8)}, info

    def step(self, action):
        seen, *told = super().step(action)
        return {"seen": seen, "action_mask": np.full(2, self.steps != 98, np.int8)}, *told


def test_a_run_whose_masks_allow_nothing_ends_with_what_it_has_trained(tmp_path):
    with pytest.raises(RunError, match="action_mask allows no action"):
        tidemill.train(
            Forbids, steps=10**4, launch="inline", layout="given", run_dir=tmp_path / "run", log="",
            quiet=True, lanes=2, sample_steps=16, minibatch_size=16, checkpoint_seconds=1e9,
        )  # fmt: skip
    trained = read_metrics(tmp_path / "run")[-1]["update"]
    assert trained > 1 and kept(tmp_path / "run")[-1] == trained


def test_the_rate_to_try_is_a_usual_one(tmp_path, spoil, capsys):
    spoil({2})
    run(tmp_path / "run", 3, learning_rate=1e5)
    assert "--set workers.trainer.algorithm.learning_rate=0.0003" in capsys.readouterr().err


class Pays(Overflows):
    """Pays so much in its first episode that these rewards have no finite sum."""

    def step(self, action):
        seen, _, *ends = super().step(action)
        return seen, 3e38 if self.steps in (3, 6) else 1.0, *ends


@pytest.mark.filterwarnings("ignore:overflow")
def test_versions_are_kept_whatever_an_episode_returns(tmp_path, capsys):
    tidemill.train(
        Pays, algorithm="dqn", steps=120, launch="inline", layout="given", run_dir=tmp_path / "run", log="",
        quiet=True, warm_up=100, hidden=(8,), lanes=1, database_seconds=1e-9,
    )  # fmt: skip
    assert "was not kept" not in capsys.readouterr().err
    kept = ParameterDatabase(tmp_path / "run/parameters").versions("policy")
    assert [version.version for version in kept][-1] > 0


def test_an_exact_run_ends_where_it_would_have_to_go_back(tmp_path, spoil):
    spoil(range(3, 100), DQNLearner)
    with pytest.raises(RunError, match="an exact run, or one with a journal, does not go back"):
        tidemill.train(
            "CartPole-v1", algorithm="dqn", steps=400, launch="inline", run_dir=tmp_path / "run", log="",
            quiet=True, warm_up=100, slots=2, exact=True,
        )  # fmt: skip
    assert kept(tmp_path / "run")


@pytest.mark.parametrize("factor", [0, 1, -0.5])
def test_factors_that_do_not_make_rates_smaller_are_refused(tmp_path, factor):
    with pytest.raises(ConfigError, match=r"fault_rate_factor = .* must lie between 0 and 1"):
        run(tmp_path / "run", 1, fault_rate_factor=factor)


def test_a_factor_needs_a_rate_that_is_a_number(tmp_path):
    with pytest.raises(ConfigError, match=r"fault_rate_factor = 0\.5 multiplies learning_rate"):
        tidemill.train("CartPole-v1", fault_rate_factor=0.5, run_dir=tmp_path / "run", layout="given")


def test_the_command_shows_where(tmp_path, spoil):
    from typer.testing import CliRunner

    from tidemill.cli.main import app

    spoil({2})
    run(tmp_path / "run", 3)
    shown = CliRunner().invoke(app, ["replay-fault", str(tmp_path / "run"), "2"])
    assert shown.exit_code == 0, shown.output
    assert "first: input obs[" in shown.output
    assert str(Path("faults") / "trainer-0" / "update-2") in shown.output


def test_the_debugger_stops_where_the_number_was_read(tmp_path, spoil, monkeypatch):
    stopped = []
    monkeypatch.setattr("pdb.post_mortem", stopped.append)
    spoil({2})
    run(tmp_path / "run", 3)
    replay_fault(tmp_path / "run", debugger=True)
    (traceback,) = stopped
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code.co_name == "trace_minibatch"
    assert isinstance(traceback.tb_frame.f_locals["loss"], PPOLoss)


def test_a_record_that_lacks_arrays_is_named(tmp_path, spoil):
    spoil({2})
    run(tmp_path / "run", 3)
    record = tmp_path / "run/faults/trainer-0/update-2"
    arrays, facts = read_checkpoint(record)
    del arrays["minibatch"]["place"]
    write_checkpoint(record.parent, "update-2", arrays, facts, 5)
    with pytest.raises(CheckpointError, match="does not hold what PPO needs: KeyError"):
        replay_fault(tmp_path / "run")
    write_checkpoint(record.parent, "update-2", arrays, {**facts, "settings": {"kind": "Impala"}}, 5)
    with pytest.raises(CheckpointError, match="is no record of an update of this run"):
        replay_fault(tmp_path / "run")
