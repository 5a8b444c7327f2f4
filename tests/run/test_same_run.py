"""A run's folder that is named again: the same run goes on, all else is refused."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.run.watching import EXPERIMENTS, Run, wait_until

from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.control_socket import tell
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.run.same_run import digest_of
from tidemill.store.checkpoint import checkpoints
from tidemill.training.result import Result
from tidemill.training.train import resume, train

experiments = load_file(EXPERIMENTS, "test")
UPDATES = 40


def run(folder: Path, stop_at: int | None = None, updates: int = UPDATES, **given: object) -> Result:
    """Train CartPole inline, and end that by SIGTERM after so many updates."""

    def on_update(metrics: dict[str, float], _: RunControl) -> None:
        if stop_at is not None and metrics["update"] >= stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    made = experiments.cartpole()
    made = made.replace(limits=made.limits.replace(updates=updates))
    settings = {"source": EXPERIMENTS, "quiet": True, "launch": "inline", "on_update": on_update, **given}
    return train(made, run_dir=folder, **settings)


def test_an_interrupted_run_goes_on_and_all_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    first = run(folder, stop_at=5)
    assert first.summary["status"] == "interrupted" and 5 <= first.summary["updates"] < UPDATES
    with pytest.raises(RunError, match=r"already holds a run; go on with it by: .* start anew by --anew"):
        run(folder, updates=UPDATES + 1)  # other limits are another configuration
    with pytest.raises(RunError, match="already holds a run"):
        run(folder, seed=7)
    with pytest.raises(RunError, match="already holds a run"):
        run(folder, layout="given")
    second = run(folder)
    assert second.summary["status"] == "completed" and second.summary["updates"] == UPDATES
    updates = [row["update"] for row in read_metrics(folder) if "update" in row]
    assert updates == sorted(set(updates)) and updates[0] <= 5
    with pytest.raises(RunError, match="already holds a run"):  # it is complete
        run(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_that_goes_on_again_and_again_is_the_same_but_with_other_limits(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run(folder, stop_at=5)
    assert run(folder, stop_at=10).summary["updates"] >= 10
    assert run(folder).summary["status"] == "completed"
    resume(folder, limits={"updates": UPDATES + 5}, quiet=True)
    with pytest.raises(RunError, match="already holds a run"):
        run(folder)


def test_a_run_that_was_killed_once_its_limit_was_reached_is_completed_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    whole, metrics = run(folder, updates=3).summary, folder / "metrics.jsonl"
    (folder / "summary.json").unlink()
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    again = run(folder, updates=3, quiet=False).summary
    told = capsys.readouterr().out
    assert "it was killed once it had reached its limit of 3 updates (3): it is complete now" in told
    assert "has reached its limit of 3 updates" in again.reason
    for name in ("status", "env_steps", "updates", "mean_return", "dropped"):
        assert again[name] == whole[name], name
    assert RunFolder(folder).read("summary.json") == {**again}
    assert [row["update"] for row in read_metrics(folder)] == [1, 2, 3]
    for refused in (lambda: resume(folder, quiet=True), lambda: run(folder, updates=3)):
        with pytest.raises(RunError, match=r"already (reached its limit of 3 updates|holds a run)"):
            refused()
    RunFolder(folder).write("summary.json", {**again, "status": "interrupted"})
    with pytest.raises(RunError, match="already reached its limit of 2 updates"):
        resume(folder, limits={"updates": 2}, quiet=True)  # who names a limit wants to go further
    assert resume(folder, quiet=True).summary.status == "completed"


def test_a_run_that_was_killed_between_the_last_checkpoints_of_its_policies_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", str(tmp_path))
    made, folder = experiments.rows(), tmp_path / "mine"
    every = {"checkpoint_seconds": 1e-9, "checkpoint_share": 1, "checkpoints": 9}
    workers = {
        name: config.replace(**every) if name.startswith("trainer") else config
        for name, config in made.workers.items()
    }
    made = made.replace(workers=workers)

    def go_on() -> Result:
        return train(made, run_dir=folder, source=EXPERIMENTS, launch="inline", layout="given")

    def killed(kept: int) -> None:
        """As if it had been killed when the last of so many checkpoints was written."""
        (folder / "summary.json").unlink()
        for path in checkpoints(places[1])[kept:]:
            shutil.rmtree(path)

    go_on()
    places = [folder / "checkpoints" / kind for kind in ("red", "blue")]
    ahead, behind = ([path.name for path in checkpoints(place)] for place in places)
    if len(ahead) < 6:
        places.reverse()
        ahead, behind = behind, ahead
    assert ahead[-1] == "update-6" and len(behind) > 3, "the first at its limit ends the run"
    killed(len(behind))
    assert go_on().summary["status"] == "completed"
    assert "it is complete now" in capsys.readouterr().out
    killed(3)
    # nor had the other one removed yet what it replaced by its last one
    shutil.copytree(places[0] / "update-6", places[0] / "update-6.replaced")
    assert go_on().summary["updates"] == 6
    told = capsys.readouterr().out
    assert f"{places[0].name}, which had reached the limit, goes back to the one before" in told
    assert "it is complete now" not in told
    assert len(checkpoints(places[1])) > 3
    with pytest.raises(RunError, match="already holds a run"):
        go_on()


def test_a_file_that_was_edited_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LENGTH = 1\n")
    first = digest_of(experiments.cartpole(), file, "auto")
    assert digest_of(experiments.cartpole(), file, "auto") == first
    file.write_text("LENGTH = 2\n")
    assert digest_of(experiments.cartpole(), file, "auto") != first


def test_anew_puts_the_old_run_aside(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run(folder, stop_at=5)
    held = RunFolder(folder)
    held.lock()
    with pytest.raises(RunError, match="being written by another run"):
        run(folder, anew=True)
    held.unlock()
    assert run(folder, anew=True, updates=3).summary["updates"] == 3
    (aside,) = set(tmp_path.iterdir()) - {folder}
    assert aside.name.startswith("mine-until-")
    assert RunFolder(aside).read("summary.json")["status"] == "interrupted"
    assert resume(aside, quiet=True).summary["updates"] == UPDATES  # it can be gone on with there
    assert run(tmp_path / "new", anew=True, updates=3).summary["updates"] == 3
    (linked := tmp_path / "linked").symlink_to(folder)
    assert run(linked, anew=True, updates=2).summary["updates"] == 2
    assert not linked.is_symlink() and RunFolder(folder).read("summary.json")["updates"] == 3
    with pytest.raises(ConfigError, match="anew"):
        train(experiments.cartpole(), anew=True, source=EXPERIMENTS)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_a_run_that_was_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    """One that would train without an end."""
    saved = tmp_path / "run" / "checkpoints" / "policy"

    def newest() -> int:
        return max((int(path.name.removeprefix("update-")) for path in checkpoints(saved)), default=0)

    killed = Run(tmp_path, "cartpole")
    try:
        killed.wait_for_updates()
        wait_until(newest, 60, "a checkpoint")
    finally:
        killed.kill_all()
    killed.nothing_is_left()
    updates = newest()
    again = Run(tmp_path, "cartpole")
    try:
        wait_until(lambda: newest() > updates, 60, "it goes on")
        tell(again.path, "stop")
        status, text = again.ended()
    finally:
        again.kill_all()
    assert status == 0 and "goes on with this run, which was killed (--anew starts anew)" in text, text
    assert again.summary()["updates"] > updates
    again.nothing_is_left()
