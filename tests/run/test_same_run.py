"""A run's folder that is named again: the same run goes on, all else is refused."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.run.watching import EXPERIMENTS, Run, wait_until

from tidemill.core.errors import CheckpointError, ConfigError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.control_socket import tell
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.run.same_run import GIVEN, LOOKED_AT, asked_before, digest_of, left_unfinished
from tidemill.store.checkpoint import ENDED, checkpoints
from tidemill.training.result import Result
from tidemill.training.train import resume, train

experiments = load_file(EXPERIMENTS, "test")
UPDATES = 40


def run(folder: Path | None, stop_at: int | None = None, updates: int = UPDATES, **given: object) -> Result:
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


def test_a_run_that_is_going_on_is_not_told_as_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "mine", stop_at=5)
    (tmp_path / "mine" / "summary.json").unlink()
    going = RunFolder(tmp_path / "mine")
    going.lock()
    with pytest.raises(RunError, match="being written by another run"):
        run(going.path, quiet=False)
    assert capsys.readouterr().out == ""
    going.unlock()
    assert run(going.path, quiet=False).summary["status"] == "completed"
    assert "goes on with this run, which was killed (--anew starts anew)" in capsys.readouterr().out


def test_without_a_folder_an_unfinished_run_is_named_and_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(**given: object) -> str:
        run(None, stop_at=2, quiet=False, updates=3, **given)
        lines = capsys.readouterr().out.splitlines()
        return next((line for line in lines if "has this very run" in line), "")

    assert told() == ""
    (first,) = Path("runs").iterdir()
    assert told(seed=7) == ""
    own = f"note: {first} has this very run, which was interrupted; to go on with it: "
    line = told()
    assert line.startswith(own) and line.endswith(f" resume {first}. This is a new one")
    assert len([*Path("runs").iterdir()]) == 3


def test_the_newest_of_its_runs_decides_whether_one_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run(None, stop_at=2, updates=3)
    first, experiment = made.folder, made.folder / "config.json"
    digest = asked_before(RunFolder(first))[GIVEN]
    asked = RunFolder(first).experiment(EXPERIMENTS, True).experiment

    def told() -> bool:
        return left_unfinished(asked, digest) != ""

    def later(number: int, status: str) -> Path:
        path = Path(f"{first}-{number}")
        shutil.copytree(first, path)
        RunFolder(path).write("summary.json", {"status": status})
        return path

    assert experiment.is_file() and told() and left_unfinished(asked, "other") == ""
    assert left_unfinished(asked.replace(name="another"), digest) == ""
    running = RunFolder(first)
    running.lock()
    assert not told()
    running.unlock()
    shutil.rmtree(later(2, "interrupted") / "checkpoints")  # which has nothing to go on from
    assert told()
    later(3, "completed")
    assert not told()
    later(4, "killed")
    assert told()
    for number in range(5, 5 + LOOKED_AT):
        (later(number, "interrupted") / "launcher.json").write_text("{}")
    assert not told()


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
        resume(folder, limits={"updates": 2}, quiet=True)  # who names another limit wants to go further
    assert resume(folder, limits={"updates": 3}, quiet=True).summary.status == "completed"
    RunFolder(folder).write("summary.json", {**again, "status": "interrupted"})
    assert resume(folder, quiet=True).summary.status == "completed"


class TwoPolicies:
    """A run of two policies, in `folder`, of which the first at its limit ends the run.

    kept: `TrainerConfig.checkpoints`
    ahead, behind: the folders of their checkpoints; both may be at the limit
    """

    def __init__(self, folder: Path, kept: int) -> None:
        made = experiments.rows()
        every = {"checkpoint_seconds": 1e-9, "checkpoint_share": 1, "checkpoints": kept}
        workers = {
            name: config.replace(**every) if name.startswith("trainer") else config
            for name, config in made.workers.items()
        }
        self.folder, self._made = folder, made.replace(workers=workers)
        self.go_on()
        places = (folder / "checkpoints" / kind for kind in ("red", "blue"))
        self.behind, self.ahead = sorted(places, key=lambda place: self.numbers(place)[-1])
        assert self.numbers(self.ahead)[-1] == 6

    def go_on(self) -> Result:
        return train(self._made, run_dir=self.folder, source=EXPERIMENTS, launch="inline", layout="given")

    def kill(self) -> None:
        """As if it had been killed before its summary was written."""
        (self.folder / "summary.json").unlink()

    @staticmethod
    def numbers(place: Path) -> list[int]:
        return [int(path.name.removeprefix("update-")) for path in checkpoints(place)]


@pytest.fixture
def rows_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", str(tmp_path))


@pytest.mark.usefixtures("rows_into")
@pytest.mark.parametrize("kept", [9, 1])
def test_a_run_that_was_killed_between_the_last_checkpoints_of_its_policies_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    run = TwoPolicies(tmp_path / "mine", kept)
    run.kill()
    assert run.go_on().summary["status"] == "completed"
    assert "it is complete now" in capsys.readouterr().out
    run.kill()
    before, last = run.numbers(run.behind)[-2:]
    shutil.rmtree(run.behind / f"update-{last}")
    # nor had the other one removed yet what it replaced by its last one
    shutil.copytree(run.ahead / "update-6", run.ahead / "update-6.replaced")
    assert run.go_on().summary["updates"] == 6
    told = capsys.readouterr().out
    assert f"{run.ahead.name}, which had reached the limit, goes back to the one before" in told
    assert "it is complete now" not in told
    assert run.numbers(run.behind)[-1] > before
    with pytest.raises(RunError, match="already holds a run"):
        run.go_on()


@pytest.mark.usefixtures("rows_into")
def test_what_has_no_checkpoint_before_its_last_is_not_complete_and_its_run_goes_further(
    tmp_path: Path,
) -> None:
    run = TwoPolicies(tmp_path / "mine", 9)
    run.kill()
    for path in (*checkpoints(run.ahead)[:-1], checkpoints(run.behind)[-1]):
        shutil.rmtree(path)
    said = rf"{run.ahead.name} had reached the limit, {run.behind.name} had not, .*--max-steps N"
    with pytest.raises(CheckpointError, match=said):
        run.go_on()
    assert run.numbers(run.ahead) == [6]
    assert resume(run.folder, limits={"updates": 9}, quiet=True, trust=True).summary["updates"] == 9


@pytest.mark.usefixtures("rows_into")
@pytest.mark.parametrize("marked", [False, True])
def test_a_finished_run_of_several_policies_is_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], marked: bool
) -> None:
    """Where an earlier version has trained it, which marked no last checkpoints; or where
    all were at the limit and only marks were missing."""
    run = TwoPolicies(tmp_path / "mine", 9)
    run.kill()
    for path in (*checkpoints(run.ahead), *checkpoints(run.behind)):
        manifest = json.loads((path / "manifest.json").read_text())
        if path.parent == run.behind:
            manifest["facts"] |= {ENDED: 0, "updates": 6 if marked else 5}
        if not marked:
            del manifest["facts"][ENDED]
        (path / "manifest.json").write_text(json.dumps(manifest))
    before = run.numbers(run.ahead), run.numbers(run.behind)
    capsys.readouterr()
    assert run.go_on().summary["status"] == "completed"
    told = capsys.readouterr().out
    assert "it is complete now" in told and "goes back" not in told
    assert (run.numbers(run.ahead), run.numbers(run.behind)) == before


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
