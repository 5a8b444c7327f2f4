"""What --print-config prints is what --config trains, and runs nothing that it names
without the user's word."""

import json
from pathlib import Path

import pytest
from tests.cli.test_cli import refused, tidemill

OWN = """
from pathlib import Path
from tidemill import Gymnasium, PPO, ActorCritic, Actors, Experiment, Limits, Trainer
Path(__file__).with_suffix(".ran").touch()

class OwnCritic(ActorCritic):
    pass

def experiment():
    actors = Actors(environment=Gymnasium(id="CartPole-v1"))
    return Experiment(name="own", policies={"policy": OwnCritic(hidden=(8,))}, limits=Limits(steps=500),
        workers={"actor": actors, "trainer": Trainer(algorithm=PPO())})
"""


@pytest.fixture(autouse=True)
def nothing_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_what_is_printed_can_be_given_back(tmp_path: Path) -> None:
    words = ("--set", "workers.trainer.algorithm.epochs=3", "--seed", 7, "--max-steps", 2_000)
    printed = tidemill("train", "CartPole-v1", *words, "--print-config")
    assert printed.exit_code == 0, printed.output
    (file := tmp_path / "experiment.json").write_text(printed.stdout)
    assert tidemill("train", "--config", file, "--print-config").stdout == printed.stdout
    result = tidemill("train", "--config", file, "--launch", "inline", "--run-dir", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert (
        json.loads((tmp_path / "run" / "config.json").read_text()) == json.loads(printed.stdout)["experiment"]
    )


def test_a_file_runs_no_code_that_it_names_without_a_word(tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text(OWN)
    printed = tidemill("train", f"{own}:experiment", "--print-config")
    (file := tmp_path / "experiment.json").write_text(printed.stdout)
    own.with_suffix(".ran").unlink()
    text = refused("train", "--config", file, "--launch", "inline", "--run-dir", tmp_path / "run")
    assert "--trust" in text and str(own) in text and not own.with_suffix(".ran").exists()
    assert not (tmp_path / "run").exists()
    words = ("--launch", "inline", "--run-dir", tmp_path / "run", "--trust")
    result = tidemill("train", "--config", file, *words)
    assert result.exit_code == 0 and (tmp_path / "run" / "summary.json").exists(), result.output


def test_what_is_no_configuration_is_refused_by_name(tmp_path: Path) -> None:
    (file := tmp_path / "odd.json").write_text("[]")
    assert "is no configuration" in refused("train", "--config", file)
    assert "cannot be read" in refused("train", "--config", tmp_path / "none.json")
    assert "name what to train" in refused("train")
    assert "name what to train" in refused("train", "CartPole-v1", "--config", file)
    assert "--set" in refused("train", "--config", file, "--algorithm", "dqn")


def test_a_file_of_an_earlier_version_is_read_as_a_saved_run_of_it(tmp_path: Path) -> None:
    printed = json.loads(tidemill("train", "CartPole-v1", "--print-config").stdout)
    printed["experiment"]["workers"]["actor"]["min_healthy_slots"] = 1
    (file := tmp_path / "experiment.json").write_text(json.dumps(printed))
    again = tidemill("train", "--config", file, "--print-config")
    assert again.exit_code == 0 and "min_healthy_slots" not in again.stdout
