"""What a run is given as a secret reaches its environment, and stands in nothing that is
written or told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    Trainer,
    evaluate,
    resume,
    train,
)
from tidemill.bench.tune import Trial, Tuning, source_text
from tidemill.cli.main import app
from tidemill.core.errors import ConfigError, RunError
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import layout_of

SECRET = "hunter2-of-the-sea"
ENVIRONMENT = f"""
import gymnasium, numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, token, url="", at=10**9):
        if token != {SECRET[::-1]!r}[::-1] or url not in ("", "https://me:" + token + "@host/"):
            raise ValueError(f"no such token: {{token}}")
        self.token, self.at = token, at

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        self.steps += 1
        self.at -= 1
        if self.at < 0:
            raise ConnectionError(f"https://me:{{self.token}}@host/ hung up")
        return np.zeros(2, np.float32), 1.0, self.steps == 5, False, {{}}
"""


def experiment(folder: Path, **kwargs: Any) -> Experiment:
    (folder / "env.py").write_text(ENVIRONMENT)
    actors = Actors(
        environment=Gymnasium(make=f"{folder}/env.py:Env", kwargs=kwargs),
        lanes=2,
        agents=(AgentSpec(sample_steps=8),),
    )
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=16), database_seconds=1e-3)}
    return Experiment(
        name="one", policies={"policy": ActorCritic(hidden=(4,))}, workers=workers, limits=Limits(updates=2)
    )


def nothing_tells(*folders: Path) -> None:
    """Nothing in any of these files holds the secret, nor is called so; they hold
    something."""
    files = [
        path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != "env.py"
    ]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes() or SECRET in path.name] == []


def test_a_secret_of_a_command_line_is_nowhere_and_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def tidemill(*words: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill.cli.main", *words], cwd=tmp_path,
            env={**os.environ, **more}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert "Traceback" not in done.stderr and (done.returncode == 0) == ("error: " not in done.stderr), (
            done.stderr
        )
        return done.stdout + done.stderr

    url = f"url=https://me:{SECRET}@host/"
    said = tidemill(
        "train",
        "env.py:Env",
        "--env-arg",
        f"token={SECRET}",
        "--env-arg",
        url,
        "--run-dir",
        "run",
        "--set",
        "limits.updates=2",
    )
    kwargs = json.loads((tmp_path / "run" / "config.json").read_bytes())["workers"]["actor"]["environment"][
        "kwargs"
    ]
    assert kwargs == {"token": "env:TIDEMILL_TOKEN", "url": "env:TIDEMILL_URL"}
    assert "token=<secret>" in json.loads((tmp_path / "run" / "versions.json").read_bytes())["command"]
    run = str(tmp_path / "run")
    for words in (("eval", run, "--episodes", "2"), ("resume", run, "--max-steps", "100000")):
        said += (refused := " ".join(CliRunner().invoke(app, words).output.split()))
        assert refused.startswith(
            "error: token is read from the environment variable TIDEMILL_TOKEN, which is not set; secrets "
            "are not saved with runs"
        )
    said += tidemill(
        "eval", "run", "--episodes", "2", TIDEMILL_TOKEN=SECRET, TIDEMILL_URL=url.removeprefix("url=")
    )
    assert "mean return" in said and SECRET not in said
    nothing_tells(tmp_path)


@pytest.mark.parametrize("launch", ["processes", "threads"])
def test_a_reference_is_enough_for_a_run_and_all_that_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    monkeypatch.setenv("MINE", SECRET)
    for number, reference in enumerate(("env:MINE", f"file:{tmp_path}/secret.txt")):
        folder = tmp_path / str(number)
        train(
            experiment(tmp_path, token=reference), launch=launch, run_dir=folder, quiet=True, layout="given"
        )
        assert resume(folder, launch=launch, limits={"updates": 3}, quiet=True).summary["updates"] == 3
        assert evaluate(folder, 1).specs[0].mean == 5.0
        nothing_tells(folder)


def test_what_an_environment_says_of_its_secret_is_not_told_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for launch in ("processes", "threads"):
        made = experiment(tmp_path, token=SECRET, at=40).replace(limits=Limits(updates=10_000))
        with pytest.raises(RunError, match=r"https://me:<secret>@host/ hung up") as caught:
            train(made, launch=launch, run_dir=tmp_path / launch, layout="given")
        assert SECRET not in str(caught.value) + "".join(capsys.readouterr())
        assert list((tmp_path / launch).rglob("*")) and not [
            p for p in (tmp_path / launch).rglob("*.json") if SECRET in p.read_text()
        ]
        assert SECRET not in (tmp_path / launch / "logs" / "traceback.log").read_text()
    with pytest.raises(ConfigError, match=r"no such token: <secret>") as refused:
        train(experiment(tmp_path, token="another-one"), run_dir=tmp_path / "measured", layout="measure")
    assert "another-one" not in str(refused.value) + "".join(capsys.readouterr())


def test_a_tuned_experiment_is_written_without_its_secrets(tmp_path: Path) -> None:
    made = experiment(tmp_path, token=SECRET)
    trial = Trial(layout_of(made), ["given", "auto"], 1.0)
    costs = Costs(env=1e-5, wall=1e-5, infer=1e-5, call=1e-5, train=1e-5, rows=1, parallel=True)
    text = source_text(Tuning(made, costs, 2, [trial]), tmp_path / "tuned.py", None)
    assert SECRET not in text and "env:TIDEMILL_TOKEN" in text
