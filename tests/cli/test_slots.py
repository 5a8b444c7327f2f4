"""Slots and ratios from the command line."""

import re
from pathlib import Path

import pytest
from tests.cli.test_cli import refused, tidemill
from threadpoolctl import threadpool_limits

from tidemill import Actors, Gymnasium
from tidemill.core.config import encode
from tidemill.core.errors import ConfigError
from tidemill.launchers.inline import InlineLauncher
from tidemill.launchers.table import LAUNCHERS
from tidemill.launchers.threads import ThreadsLauncher
from tidemill.metrics.json_lines import read_metrics
from tidemill.presets.experiments import experiment_for
from tidemill.run.folder import RunFolder
from tidemill.training.replay_slots import with_slots


@pytest.mark.parametrize("exact", [(), ("--exact",)])
def test_a_run_with_slots_and_its_retraining(tmp_path: Path, exact: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    small = (
        "--max-steps",
        1200,
        "--set",
        "workers.trainer.buffer.warm_up=200",
        "--set",
        "workers.trainer.journal=true",
    )
    result = tidemill(
        "train",
        "CartPole-v1",
        "--algorithm",
        "dqn",
        "--launch",
        "threads",
        "--slots",
        4,
        "--ratio",
        "1/4",
        "--run-dir",
        folder,
        *exact,
        *small,
    )
    assert result.exit_code == 0, result.output
    last = read_metrics(folder)[-1]
    assert last["limiter/committed"] == 1200 and 240 <= last["limiter/tasks"] <= 250
    evaluated = tidemill("eval", folder, "--episodes", 12)
    assert evaluated.exit_code == 0, evaluated.output
    with threadpool_limits(2):  # as a process of its own on two cores finds its libraries
        again = tidemill("retrain", folder)
    assert (
        again.exit_code == 0
        and "1,200 steps stored, 0 lost" in again.output
        and "the same weights" in again.output
    )
    journal = folder / "journal-policy.bin"
    journal.write_bytes(journal.read_bytes()[:-2000])
    again = tidemill("retrain", folder)
    assert again.exit_code == 1 and "updates: the journal ends before the " in again.output


def test_what_cannot_be_is_refused() -> None:
    dqn = ("train", "CartPole-v1", "--algorithm", "dqn")
    assert (
        "PPO learns from what its own policy has just done. Take what has a replay memory, --algorithm dqn"
        in refused("train", "CartPole-v1", "--slots", 4)
    )
    assert 'ratio = "1/4"' in refused(*dqn, "--ratio", "0.25")
    assert "must be above 0" in refused(*dqn, "--ratio", "0/4")
    assert "slots = 0" in refused(*dqn, "--slots", 0)
    assert "slack = 0" in refused(*dqn, "--slots", 4, "--set", "workers.trainer.slack=0")


def test_settings_are_changed_in_what_has_the_slots() -> None:
    dqn = ("train", "CartPole-v1", "--algorithm", "dqn", "--slots", 4)
    assert "failures = 0" in refused(*dqn, "--set", "workers.actor.environment.failures=0")


def test_settings_that_are_gone_are_refused_with_what_replaced_them_and_read_in_the_folder_of_an_older_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dqn = ("train", "CartPole-v1", "--algorithm", "dqn", "--slots", 4)
    told = (
        "Actors has no setting min_healthy_slots any more: slots that fail rest and come back; a run ends "
        "when no step is stored for "
    )
    assert told + "ReplayTrainer.max_no_progress_s" in refused(
        *dqn, "--set", "workers.actor.min_healthy_slots=3"
    )
    with pytest.raises(ConfigError, match="^" + told):
        Actors(environment=Gymnasium(id="CartPole-v1"), min_healthy_slots=3)  # type: ignore[call-arg]
    experiment = with_slots(experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"), "dqn"), 4)
    folder = RunFolder.create(tmp_path / "run", experiment, None)
    older = encode(experiment)
    older["workers"]["actor"] |= {"min_healthy_slots": 3}
    older["workers"]["actor"]["environment"] |= {"window_s": 60.0}
    folder.write("config.json", older)
    assert folder.experiment()[0] == experiment
    assert re.search(
        r"note: .*config.json: experiment.workers.actor.min_healthy_slots = 3 is left out: .*\n$",
        capsys.readouterr().err,
    )


def test_settings_that_need_one_another_go_in_either_order() -> None:
    dqn = ("train", "CartPole-v1", "--algorithm", "dqn", "--slots", 4)
    buffer = "workers.trainer.buffer."
    # the preset's warm_up is 1,000
    pair = [("--set", f"{buffer}capacity=400"), ("--set", f"{buffer}warm_up=300")]
    for first, second in (pair, pair[::-1]):
        assert "failures = 0" in refused(
            *dqn, *first, *second, "--set", "workers.actor.environment.failures=0"
        )
    assert "warm_up = 1,000 transitions are more than capacity = 400" in refused(*dqn, *pair[0])


def test_a_run_that_trained_nothing_says_so(tmp_path: Path) -> None:
    result = tidemill(
        "train",
        "CartPole-v1",
        "--algorithm",
        "dqn",
        "--launch",
        "inline",
        "--max-steps",
        200,
        "--run-dir",
        tmp_path / "run",
    )
    assert result.exit_code == 0 and "note: nothing was trained" in result.stderr
    result = tidemill("resume", tmp_path / "run", "--max-steps", 1200)
    assert result.exit_code == 0 and "nothing was trained" not in result.output


def test_a_resumed_run_is_launched_as_it_was_unless_told_otherwise(tmp_path: Path) -> None:
    folder, launched = tmp_path / "run", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name, made in (("threads", ThreadsLauncher), ("inline", InlineLauncher)):
            patch.setattr(
                made,
                "launch",
                lambda self, job, name=name, launch=made.launch: (launched.append(name), launch(self, job))[
                    1
                ],
            )
        dqn = ("train", "CartPole-v1", "--algorithm", "dqn", "--slots", 2, "--run-dir", folder, "--max-steps")
        for number, words in enumerate(
            [(*dqn, 100, "--launch", "threads"), (), ("--launch", "inline"), ()], 1
        ):
            result = tidemill(
                *(words if number == 1 else ("resume", folder, "--max-steps", 100 * number, *words))
            )
            assert result.exit_code == 0, result.output
    assert [name for name, before in zip(launched, [None, *launched], strict=False) if name != before] == [
        "threads",
        "inline",
    ]
    assert RunFolder.open(folder).launcher(LAUNCHERS) == "inline"
    (folder / "launcher.json").write_text('{"launcher": ["threads"]}')
    assert "launcher.json does not name a launcher; say one with --launch" in refused("resume", folder)
    (folder / "launcher.json").write_text('{"launcher": "theirs.py:Launcher"}')
    assert 'by "theirs.py:Launcher", which is not one of Tidemill' in refused("resume", folder)
    (folder / "launcher.json").unlink()
    assert RunFolder.open(folder).launcher(LAUNCHERS) == "processes"  # of an earlier version


def test_an_actor_of_slots_and_its_trainer_take_turns_unless_a_slack_is_set_or_it_is_said_who_does(
    tmp_path: Path,
) -> None:
    dqn = (
        "train",
        "CartPole-v1",
        "--algorithm",
        "dqn",
        "--slots",
        2,
        "--launch",
        "threads",
        "--max-steps",
        20,
    )
    for number, (words, together) in enumerate(
        [
            ((), ["actor", "trainer"]),
            (("workers.trainer.slack=6",), []),
            (("together=[]",), []),
            (("workers.trainer.slack=6", 'together=["actor","trainer"]'), ["actor", "trainer"]),
        ]
    ):
        folder = tmp_path / str(number)
        result = tidemill(*dqn, "--run-dir", folder, *(word for text in words for word in ("--set", text)))
        assert result.exit_code == 0, result.output
        assert RunFolder.open(folder).read("config.json")["together"] == together
