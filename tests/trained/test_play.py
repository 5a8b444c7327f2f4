"""Videos of a policy at play."""

import io
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from rich.console import Console

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    EnvironmentConfig,
    Experiment,
    Gymnasium,
    Limits,
    Scripted,
    Trainer,
)
from tidemill.core.errors import ConfigError, RunError
from tidemill.trained import progress_bar
from tidemill.trained.play import _picture, play, video_frame

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def train(folder: Path, environment: EnvironmentConfig) -> Path:
    actors = Actors(environment=environment, lanes=4, agents=(AgentSpec(sample_steps=16),))
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO(epochs=1))}
    experiment = Experiment(
        name="seen", policies={"policy": ActorCritic()}, workers=workers, limits=Limits(updates=2)
    )
    return tidemill.train(experiment, launch="inline", run_dir=folder / "run", quiet=True).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), Gymnasium(id="CartPole-v1"))


def frames_of(path: Path) -> list[Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def test_a_video_shows_every_step_of_the_episode(run: Path, tmp_path: Path) -> None:
    video = play(run, tmp_path / "new" / "v.mp4", episodes=2, seed=1)
    frames = frames_of(video.path)
    assert len(video.returns) == 2 and not video.cut
    # the first observation of each episode is seen, too
    assert len(frames) == video.frames == sum(video.returns) + 2
    assert frames[0].shape == (400, 600, 3)
    assert frames[0].mean() > 200 and (frames[0] < 30).any()  # a black cart on white ground
    assert not np.array_equal(frames[0], frames[5])


def test_a_video_is_cut_at_its_limit(run: Path, tmp_path: Path) -> None:
    video = play(run, tmp_path / "v.mp4", max_seconds=0.2, fps=25)
    assert (video.frames, video.cut, video.returns) == (5, True, [])
    assert len(frames_of(video.path)) == 5


def test_a_video_runs_as_fast_as_the_environment_says_and_what_is_written_is_shown(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress_bar, "Console", lambda **_: terminal)
    video = play(run, tmp_path / "v.mp4", seed=1, max_seconds=0.1)
    assert video.fps == gymnasium.spec("CartPole-v1").make().metadata["render_fps"] == 50
    assert (video.frames, next(imageio_ffmpeg.read_frames(str(video.path)))["fps"]) == (5, 50)
    assert "5 frames, 0.1 s" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert play(run, tmp_path / "w.mp4", seed=1, fps=12.5, max_seconds=0.4).frames == 5
    for fps in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"fps = .* must be a number above 0"):
            play(run, tmp_path / "w.mp4", fps=fps)


def test_small_pictures_are_enlarged_and_odd_ones_filled_up() -> None:
    small = np.arange(84 * 80 * 3, dtype=np.uint8).reshape(84, 80, 3)
    frame = video_frame(small)
    assert frame.shape == (420, 400, 3)
    np.testing.assert_array_equal(frame[::5, ::5], small)
    odd = np.zeros((401, 601, 3), np.uint8)
    assert video_frame(odd).shape == (402, 602, 3)
    assert video_frame(np.zeros((400, 600, 3), np.uint8)).shape == (400, 600, 3)


def test_without_a_file_the_command_that_makes_a_video_is_said(run: Path) -> None:
    with pytest.raises(RunError, match=r"tidemill play .*run --video run\.mp4"):
        play(run, None)


def test_without_ffmpeg_the_command_that_installs_it_is_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(RunError, match=r'pip install "tidemill\[video\]"'):
        play(run, tmp_path / "v.mp4")


def test_impossible_wishes_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.mp4"):
        play(run, tmp_path / "v.gif")
    with pytest.raises(ConfigError, match="fps = 0 must be a number above 0"):
        play(run, tmp_path / "v.mp4", fps=0)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: "):
        play(run, tmp_path / "file" / "v.mp4")


def test_an_environment_without_pictures_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    run = train(tmp_path, Scripted())
    with pytest.raises(RunError, match="draws no pictures"):
        play(run, tmp_path / "v.mp4")
    assert not (tmp_path / "v.mp4").exists()


class Panic(BaseException):
    """As what code in Rust raises."""


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        ([np.zeros((4, 4, 3), np.uint8)], r"render\(\) gave \[array.*it must be one array"),
        (np.zeros((0, 0, 3), np.uint8), r"shape \(0, 0, 3\); it must be"),
        (Panic("no GPU"), r"cannot draw: Panic: no GPU \(.*mock.py, line \d+, in .*\)$"),
    ],
)
def test_what_is_no_picture_is_named(drawn: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    environment = Mock(render=Mock(side_effect=[drawn]))
    with pytest.raises(RunError, match=says):
        _picture(environment)


def test_who_cannot_draw_by_mujoco_is_told_what_that_draws_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", Mock())
    with pytest.raises(RunError, match=r"no GPU.*; MuJoCo draws without a display by"):
        _picture(Mock(render=Mock(side_effect=Panic("no GPU"))))
