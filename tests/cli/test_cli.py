"""The command line, from the words typed to the words printed."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tidemill.cli.main import app


def tidemill(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: object) -> str:
    """Return the message of a command that must fail: one line, no traceback."""
    result = tidemill(*words)
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.output.startswith("error: ") and "Traceback" not in result.output
    return str(result.output)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    small = ("--set", "workers.actor.lanes=8", "--set", "workers.trainer.algorithm.epochs=1")
    result = tidemill(
        "train", "CartPole-v1", "--launch", "inline", "--max-steps", 2000, "--run-dir", path, *small
    )
    assert result.exit_code == 0, result.output
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    assert f"tidemill eval {shown}" in result.output and f"tidemill play {shown}" in result.output
    return path


def test_version_tells_the_version() -> None:
    result = tidemill("--version")
    assert result.exit_code == 0 and result.output == f"tidemill {version('tidemill')}\n"


def test_a_run_at_a_limit_goes_on_with_a_higher_one_of_its_kind(tmp_path: Path) -> None:
    small = ("--launch", "inline", "--layout", "given", "--set", "workers.trainer.algorithm.epochs=1")
    assert tidemill("train", "CartPole-v1", "--max-updates", 2, "--run-dir", tmp_path, *small).exit_code == 0
    said = refused("resume", tmp_path)
    assert (
        "has already reached its limit of 2 updates (2); go further with a higher one: --max-updates N"
        in said
    )
    assert tidemill("resume", tmp_path, "--max-updates", 3).exit_code == 0
    assert json.loads((tmp_path / "summary.json").read_bytes())["updates"] == 3
    said = refused("resume", tmp_path, "--max-updates", 9, "--max-seconds", 0.001)
    assert "its limit of 0.001 seconds" in said and "--max-seconds N" in said


def test_a_layout_that_was_shown_runs_again(tmp_path: Path) -> None:
    text = "actors=1,trainers=1,together,lanes=4,sample_steps=16,ring=1,slots=1,threads=0"
    small = ("--set", "workers.trainer.algorithm.epochs=1", "--max-steps", 200)
    result = tidemill("train", "CartPole-v1", "--run-dir", tmp_path / "run", "--layout", text, *small)
    assert result.exit_code == 0, result.output
    assert (
        "layout: 1 process, an actor of 4 lanes × 16 steps and a trainer by turns, as told; a batch has 64 "
        "rows" in result.output
    )
    assert json.loads((tmp_path / "run" / "layout.json").read_bytes())["layout"] == text
    config = json.loads((tmp_path / "run" / "config.json").read_bytes())
    assert (config["together"], config["workers"]["actor"]["lanes"]) == (["actor", "trainer"], 4)
    given = tidemill("train", "CartPole-v1", "--run-dir", tmp_path / "given", "--layout", "given", *small)
    assert (
        given.exit_code == 0
        and "layout:" not in given.output
        and not (tmp_path / "given" / "layout.json").exists()
    )


def test_eval_prints_a_table_with_an_interval(run: Path) -> None:
    result = tidemill("eval", run, "--episodes", 5, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "95 % interval" in result.output
    (file,) = run.glob("evaluation-*.json")
    found = json.loads(file.read_bytes())
    assert (found["episodes"], found["seed"], found["deterministic"]) == (5, 3, True)
    mean, (low, high) = found["specs"][0]["mean"], found["specs"][0]["interval"]
    assert all(f"{value:.2f}" in result.output for value in (mean, low, high))


def test_eval_takes_a_checkpoint_and_draws_actions_when_told(run: Path) -> None:
    checkpoint = next((run / "checkpoints" / "policy").iterdir())
    result = tidemill(
        "eval", run, "--episodes", 2, "--stochastic", "--checkpoint", checkpoint.name.removeprefix("update-")
    )
    assert result.exit_code == 0, result.output
    assert "no checkpoint" in refused("eval", run, "--checkpoint", "update-1000000")


def test_eval_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    assert "not a run's folder" in refused("eval", tmp_path)
    assert "episodes = 0 must be at least 1" in refused("eval", run, "--episodes", 0)


def test_play_writes_a_video(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    result = tidemill("play", run, "--video", tmp_path / "v.mp4", "--max-seconds", 0.1)
    assert result.exit_code == 0, result.output
    assert "5 frames" in result.output and "cut at 0.1 s" in result.output
    assert (tmp_path / "v.mp4").stat().st_size > 0


def test_play_without_a_file_says_what_to_type(run: Path) -> None:
    assert f"tidemill play {run} --video run.mp4" in refused("play", run)


def test_check_env_passes_a_sound_environment() -> None:
    result = tidemill("check-env", "CartPole-v1", "--seed", 1)
    assert result.exit_code == 0, result.output
    assert "determinism" in result.output and "fail" not in result.output


def test_check_env_fails_for_an_unsound_one(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("""
import gymnasium, numpy as np

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size=4):
        self.size = size

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.size, np.float32), {}

    def step(self, action):
        return np.zeros(self.size, np.float32), 0.0, False, False, {}
""")
    result = tidemill("check-env", f"{file}:Broken")
    assert result.exit_code == 1
    assert "fail" in result.output and "(4,)" in result.output
    sound = tidemill("check-env", f"{file}:Broken", "--env-arg", "size=3")
    assert sound.exit_code == 0, sound.output


def test_an_environment_in_a_file_is_trained_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the class, or as what a function returns; named by a path from here, and played
    from elsewhere later."""
    (tmp_path / "own.py").write_text("""
import gymnasium

class Pole(gymnasium.Wrapper):
    def __init__(self, limit=9):
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=limit))

def pole(limit=9):
    return Pole(limit)
""")
    monkeypatch.chdir(tmp_path)
    small = ("--launch", "inline", "--layout", "given", "--set", "workers.actor.lanes=2", "--max-steps", 200)
    for name in ("Pole", "pole"):
        result = tidemill("train", f"own.py:{name}", "--env-arg", "limit=5", "--run-dir", name, *small)
        assert result.exit_code == 0, result.output
        config = json.loads((tmp_path / name / "config.json").read_bytes())
        assert (config["name"], config["workers"]["actor"]["environment"]["kwargs"]) == (name, {"limit": 5})
        assert json.loads((tmp_path / name / "summary.json").read_bytes())["mean_return"] <= 5
        monkeypatch.chdir(tmp_path / name)
        result = tidemill("eval", tmp_path / name, "--episodes", 2)
        assert result.exit_code == 0, result.output
        monkeypatch.chdir(tmp_path)


def test_check_env_looks_at_the_environments_of_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
from tidemill import PPO, ActorCritic, Actors, Experiment, Scripted, Trainer

def environment():
    return Scripted(agents=2)

def experiment():
    workers = {"actor": Actors(environment=environment()), "trainer": Trainer(algorithm=PPO())}
    return Experiment(name="mine", policies={"policy": ActorCritic()}, workers=workers)
""")
    for name in ("experiment", "environment"):
        result = tidemill("check-env", f"{file}:{name}")
        assert result.exit_code == 0, result.output
        assert "2 agent(s)" in result.output


def test_check_env_says_what_is_wrong_with_a_name() -> None:
    result = tidemill("check-env", "CartPole-v7")
    assert result.exit_code == 1
    assert "CartPole-v1" in result.output or "CartPole" in result.output
    assert "did you mean" in refused("check-env", f"{__file__}:tidemil")


def test_where_nothing_runs_pause_says_so(run: Path) -> None:
    for command in ("pause", "start", "stop"):
        assert "no run is going on there" in refused(command, run)


@pytest.mark.parametrize(
    ("raises", "told"),
    [
        ("raise SystemExit(0)", r"sys.exit(0) was called by the environment, or another part"),
        ("raise type('Panic', (BaseException,), {})('no arm')", "Panic: no arm"),
    ],
)
@pytest.mark.parametrize("command", ["check-env", "train"])
def test_what_a_users_code_raises_is_no_success(
    command: str, raises: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(f"def experiment():\n    {raises}\n")
    text = refused(command, f"{tmp_path / 'own.py'}:experiment")
    assert told in text and "own.py, line 2, in experiment)" in text


def test_an_interrupt_says_where_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's code may have raised it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def experiment():\n    raise KeyboardInterrupt\n")
    result = tidemill("check-env", f"{tmp_path / 'own.py'}:experiment")
    assert result.exit_code == 130
    assert result.output == f"interrupted: KeyboardInterrupt ({tmp_path / 'own.py'}, line 2, in experiment)\n"
