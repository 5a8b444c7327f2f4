"""`tidemill params`: lists, tags and exports versions, of a run that was made for it."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.cli.test_cli import refused, tidemill

import tidemill as front
from tidemill.cli.params import listing
from tidemill.run.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    small = (
        "workers.actor.lanes=8",
        "workers.trainer.algorithm.epochs=1",
        "workers.trainer.database_updates=1",  # by seconds, a busy disk would leave some out
    )
    result = tidemill(
        "train",
        "CartPole-v1",
        "--launch",
        "inline",
        "--max-steps",
        2000,
        "--run-dir",
        path,
        *(w for s in small for w in ("--set", s)),
    )
    assert result.exit_code == 0, result.output
    return path


def listed(*words: object) -> list[list[str]]:
    """Return the words of each row of the table."""
    result = tidemill("params", *words)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines() if line.split()[:1] == ["policy"]][1:]


def test_versions_are_listed_newest_first_with_tags(run: Path) -> None:
    database = RunFolder.open(run).database()
    known = [version.version for version in database.versions("policy")]
    assert known[0] == 0 and len(known) > 2
    rows = listed(run)
    assert [int(row[1]) for row in rows] == known[::-1]
    assert "latest" in rows[0] and "latest" not in rows[1]
    steps = RunFolder.open(run).read("summary.json")["env_steps"]
    assert f"{steps:,}" in rows[0]


def test_tags_move_by_the_command_and_keep_their_version(run: Path) -> None:
    database = RunFolder.open(run).database()
    assert '"first" points to version 0 of policy policy' in tidemill("params", run, "tag", "first", 0).output
    assert '"also" points to version 0' in tidemill("params", run, "tag", "also", "first").output
    assert {tag for tag in database.tags("policy") if tag != "latest"} == {"also", "first"}
    assert listed(run, "--where", "version < 1")[0][-2:] == ["also,", "first"]
    assert 'has no tag "also" any more' in tidemill("params", run, "untag", "also").output
    assert "also" not in database.tags("policy")
    assert 'did you mean "first"' in refused("params", run, "untag", "frst")
    assert "moves by itself" in refused("params", run, "tag", "latest", 0)
    assert "was never pushed" in refused("params", run, "tag", "x", 10**6)


def test_results_are_shown_and_asked_for(run: Path) -> None:
    database = RunFolder.open(run).database()
    database.results.add("policy", 0, {"win_rate": [1.0, 0.0, 1.0, 1.0]})
    database.results.add("policy", database.tags("policy")["latest"], {"win_rate": 0.9})
    shown = tidemill("params", run).output
    assert "0.75 ± 0.49" in shown and " 0.9 " in shown
    assert [row[1] for row in listed(run, "--where", "win_rate > 0.7 and win_rate < 0.8")] == ["0"]
    assert [row[1] for row in listed(run, "--where", "order by win_rate limit 1")] == ["0"]
    assert 'did you mean "win_rate"' in refused("params", run, "--where", "winrate > 0.7")
    assert 'found "or"' in refused("params", run, "--where", "win_rate > 0.7 or version > 1")


def test_the_table_fits_into_what_there_is_room_for(run: Path) -> None:
    """The names of groups stand over their first column; intervals, and what matters
    least, give way."""
    database = RunFolder.open(run).database()
    results = {
        "chance": ("length", "return", "win_rate"),
        "evaluation": ("beats", "elo", "length", "return", "win_rate"),
    }
    for name in (f"{group}/{what}" for group, names in results.items() for what in names):
        database.results.add("policy", 0, {name: [1.25, 3.5, 7.75]})
    database.tag("policy", "a-long-tag", 0)
    database.tag("policy", "another-long-tag", 0)
    for width, has in ((220, "4.2 ± 3.7"), (170, "length"), (115, "age")):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(listing(RunFolder.open(run), None, "version < 1", width))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width and "…" not in captured.get() and has in captured.get(), (
            width,
            captured.get(),
        )
        assert lines[1].split() == ["chance", "evaluation"]


def test_an_exported_file_plays_without_its_run(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.safetensors"
    result = tidemill("params", run, "export", "latest", file)
    assert result.exit_code == 0 and str(file) in result.output, result.output
    policy, whole = front.load(file), front.load(run, version="latest")
    observation = np.array([0.1, 0.2, -0.1, 0.3], np.float32)
    assert (policy.name, policy.update, policy.steps, policy.spaces) == (
        whole.name,
        whole.update,
        whole.steps,
        whole.spaces,
    )
    assert policy.answer(observation) == whole.answer(observation)
    assert "exists already" in refused("params", run, "export", 0, file)
    assert tidemill("params", run, "export", 0, file, "--force").exit_code == 0
    assert front.load(file).update == 0


def test_eval_and_play_take_a_version(run: Path, tmp_path: Path) -> None:
    result = tidemill("eval", run, "--episodes", 2, "--version", 0)
    assert result.exit_code == 0 and "update 0" in result.output, result.output
    latest = RunFolder.open(run).database().tags("policy")["latest"]
    assert f"update {latest} " in tidemill("eval", run, "--episodes", 2, "--version", "latest").output
    assert "was never pushed" in refused("eval", run, "--version", 10**6)
    assert 'did you mean "latest"' in refused("eval", run, "--version", "lates")
    assert "take one of the two" in refused("eval", run, "--version", 0, "--checkpoint", 1)
    pytest.importorskip("imageio_ffmpeg")
    assert (
        tidemill("play", run, "--version", 0, "--video", tmp_path / "v.mp4", "--max-seconds", 0.1).exit_code
        == 0
    )


def test_what_params_cannot_do_is_said(run: Path, tmp_path: Path) -> None:
    assert 'cannot "tagg"; did you mean "tag"' in refused("params", run, "tagg", "x", 1)
    assert f"write: tidemill params {run} export VERSION|TAG FILE" in refused(
        "params", run, "export", "latest"
    )
    for folder in (".", tmp_path):
        assert f"{folder} is a folder; name a file in it" in refused(
            "params", run, "export", "latest", folder, "--force"
        )
    assert 'no versions of a policy "polcy"; did you mean "policy"' in refused(
        "params", run, "--policy", "polcy"
    )
    assert "not a run's folder" in refused("params", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no versions" in refused("params", tmp_path)
    assert "versions of 0 policies" in refused("params", tmp_path, "tag", "x", 1)


def test_what_was_collected_is_said_with_what_is_there(run: Path) -> None:
    database = RunFolder.open(run).database()
    kept = database.versions("policy")[-1].version
    gone = database.versions("policy")[0].version  # whichever others a busy disk has let through
    for tag in database.tags("policy").keys() - {"latest"}:
        database.untag("policy", tag)
    database.collect("policy", 2)
    for words in (
        ("eval", run, "--version", gone),
        ("play", run, "--version", gone, "--video", run / "v.mp4"),
        ("params", run, "tag", "x", gone),
    ):
        said = refused(*words)
        assert (
            f'version {gone} of policy "policy" was collected' in said
            and f"The newest that are kept: {kept}, " in said
        ), said
