"""Shows what a run's policies do: a video of the run's own environment."""

import math
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import TimeElapsedColumn

from tidemill.api.environment import Environment
from tidemill.core.errors import ConfigError, RunError, fault_of, message_of, no_exits, place
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.seeding import derive_seed
from tidemill.envs.space_values import brief
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.trained.episode_player import Player, closing_after, find_actors, load_policies
from tidemill.trained.load import Weights
from tidemill.trained.progress_bar import ProgressBar
from tidemill.workers.actor_environments import build_environment

SUFFIXES = (".mp4", ".mkv", ".mov")
FPS = 30  # of environments that do not say how fast they are to be watched
# pixels of the shorter side; smaller pictures (Atari's are 84 × 84) are enlarged by a
# whole number
SMALLEST = 336


@dataclass(frozen=True)
class Video:
    """What `play` made: the file, its frames and their rate, the returns of the first
    agent spec's episodes that ended in it."""

    path: Path
    frames: int
    fps: float
    returns: list[float]
    cut: bool
    """The last episode was still going on when the video was full."""


@forgiving_output()
@no_exits()
def play(
    run: str | Path,
    video: str | Path | None,
    *,
    episodes: int = 1,
    max_seconds: float = 120.0,
    fps: float | None = None,
    seed: int | None = None,
    deterministic: bool = True,
    checkpoint: str | int | Path | None = None,
    version: str | int | None = None,
    file: str | Path | None = None,
    actor: str | None = None,
    trust: Trust = False,
    quiet: bool = False,
) -> Video:
    """Play `episodes` episodes with the run's trained policies and write what is seen
    into `video`, one frame per environment step.

    max_seconds: length of the video at most
    fps: frames per second; None: as the environment is to be watched
        (``metadata["render_fps"]``), or 30 where it does not say
    seed: of the environment and of sampling; by default the experiment's
    quiet: show no progress

    The rest is as in `tidemill.evaluate`.
    """
    if video is None:
        raise RunError(
            f"there is no window to play in; have a video made: tidemill play {run} --video "
            f"{Path(run).name}.mp4"
        )
    path = Path(video)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--video {path}: the name must end in {', '.join(SUFFIXES)}")
    for name, value in (("episodes", episodes), ("max_seconds", max_seconds), ("fps", fps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value} must be a number above 0")
    ffmpeg = _ffmpeg()
    _draw_without_display()
    folder = RunFolder.open(Path(run))
    experiment = folder.experiment(file, trust).experiment
    group, actors = find_actors(experiment, actor)
    if not actors.environment.draws:
        raise RunError(
            f"{type(actors.environment).__name__} has no pictures: what it plays runs elsewhere, where it "
            f"may show itself; tidemill eval {run} plays episodes and tells their returns"
        )
    root = experiment.seed if seed is None else seed
    weights = Weights(checkpoint, version)
    environment = build_environment(
        actors.replace(environment=actors.environment.bare().scored()),
        1,
        derive_seed(root, "play", group),
        render=True,
    )
    returns: list[float] = []
    frames = 0
    with closing_after(environment):
        policies = load_policies(folder, experiment, actors, environment, weights, derive_seed(root, "play"))
        if experiment.curriculum:
            environment.enter_stage(experiment.curriculum[-1].options)
        player = Player(environment, actors.agents, policies, deterministic)
        player.tick()
        fps = fps or environment.render_fps or FPS
        with (
            _Writer(ffmpeg, path, fps) as writer,
            ProgressBar("video", max_seconds, quiet, TimeElapsedColumn()) as bar,
        ):
            writer.write(_picture(environment))
            frames += 1
            while player.episodes[0] < episodes and frames < max_seconds * fps:
                returns += [p.ret for p in player.tick() if p.spec == 0]
                writer.write(_picture(environment))
                frames += 1
                seconds, over = frames / fps, int(player.episodes[0])
                bar.show(seconds, f"{frames:,} frames, {seconds:.1f} s, {over} episodes over")
    return Video(path, frames, fps, returns, bool(player.episodes[0] < episodes))


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise RunError(
            'videos need ffmpeg, which is not installed. Install it with: pip install "tidemill[video]" '
            f"({error})"
        ) from None
    return imageio_ffmpeg


def _draw_without_display() -> None:
    """Tell the libraries that draw for Gymnasium not to look for a display where there is
    none. They read this when they are imported."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")


def _picture(environment: Environment) -> NDArray[np.uint8]:
    try:
        picture = environment.render()
    except BaseException as raised:  # drawing is the environment's own code, and its libraries'
        error = fault_of(raised)
        mujoco = (
            "; MuJoCo draws without a display by what the variable MUJOCO_GL says: egl or osmesa, whichever "
            "this machine has"
        )
        raise RunError(
            f"the environment cannot draw: {type(raised).__name__}: {message_of(raised)}{place(raised)}"
            + mujoco * ("mujoco" in sys.modules)
        ) from error
    if picture is None:
        raise RunError(
            "the environment draws no pictures: its render() gave None. One made by a function of your own "
            'must take render_mode and honour "rgb_array"; of a vector environment, take the plain one '
            "(Gymnasium) to be seen"
        )
    if not isinstance(picture, np.ndarray):
        raise RunError(
            f"the environment's render() gave {brief(picture)}; it must be one array [height, width, 3], as "
            'render_mode "rgb_array" asks for'
        )
    if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise RunError(f"the environment's picture has shape {picture.shape}; it must be [height, width, 3]")
    return video_frame(np.asarray(picture, np.uint8))


def video_frame(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the picture as video takes it: large enough to be seen, and of even height
    and width (the last row or column is doubled)."""
    factor = -(-SMALLEST // min(picture.shape[:2]))
    if factor > 1:
        picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width, _ = picture.shape
    return np.ascontiguousarray(np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge"))


class _Writer:
    """The video being written. It begins with the first frame, which fixes the size."""

    def __init__(self, ffmpeg: Any, path: Path, fps: float) -> None:
        self._ffmpeg, self._path, self._fps = ffmpeg, path, fps
        self._frames: Generator[None, Any, None] | None = None
        self._shape: tuple[int, ...] = ()

    def __enter__(self) -> "_Writer":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("ab").close()
        except OSError as error:
            raise RunError(f"video {self._path} cannot be written: {error.strerror}") from None
        return self

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame."""
        try:
            if self._frames is None:
                self._shape = frame.shape
                height, width, _ = frame.shape
                self._frames = self._ffmpeg.write_frames(
                    str(self._path), (width, height), fps=self._fps, quality=8, macro_block_size=2
                )
                assert self._frames is not None
                self._frames.send(None)
            if frame.shape != self._shape:
                raise RunError(
                    f"the environment's picture changed its shape from {self._shape} to {frame.shape}; a "
                    "video cannot"
                )
            self._frames.send(frame)
        except OSError as error:
            raise RunError(f"video {self._path} cannot be written: {error}") from None

    def __exit__(self, *exception: object) -> None:
        if self._frames is not None:
            self._frames.close()
        elif self._path.stat().st_size == 0:
            self._path.unlink()  # nothing was drawn
