"""What `tidemill status` tells of a run that goes on, of one that is over, and of one
that was killed."""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.run.experiments import cartpole
from tests.run.watching import Run, wait_until

from tidemill import Limits
from tidemill.core.errors import RunError
from tidemill.metrics.json_lines import last_records
from tidemill.run.control_socket import NoRun, tell
from tidemill.run.folder import RunFolder
from tidemill.run.status import read_status, render_status
from tidemill.store.checkpoint import checkpoints
from tidemill.training.train import train
from tidemill.workers.learner import Learner

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(function: str) -> Run:
        runs.append(Run(tmp_path / str(len(runs)), function))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def shown(path: Path) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(render_status(RunFolder.open(path)))
    return output.getvalue()


def test_a_run_tells_how_it_is_while_it_goes_on_and_how_it_ended(start: Callable[..., Run]) -> None:
    run = start("cartpole")
    run.wait_for_updates()
    actor = run.wait_for_worker("actor-0")
    assert actor.name() == "actor-0"  # as `ps` and `top` show it
    actor.kill()

    def second_life() -> bool:
        """All run, and have told since where their time goes."""
        status = read_status(RunFolder.open(run.path))
        assert status is not None
        lives = [(w.name, w.life) for w in status.workers if w.state == "running" and w.does and w.shares]
        return lives == [("actor-0", 2), ("server-0", 1), ("trainer-0", 1)] and status.lag is not None

    wait_until(second_life, 60, "the actor lives again")
    status = read_status(RunFolder.open(run.path))
    assert status is not None and status.state == "running" and status.updates > 0
    text = shown(run.path)
    assert "a crash would cost" in text and "versions on average" in text
    assert re.search(r"actor-0 +2 +running +(works|waits for|is silent) .*%", text), text
    # events are written now and then
    wait_until(lambda: "it did not run for" in shown(run.path), 60, "its next life is an event")
    assert "its process was killed by SIGKILL" in shown(run.path)
    tell(run.path, "stop")
    run.ended()
    text = shown(run.path)
    assert "completed" in text and "tidemill stop" in text and "SIGKILL" in text
    assert re.search(r"\nlag +\d+\.\d versions on average\n", text), text
    assert re.search(
        r"Its workers(?s:.*)actor-0 +2 +1 +\d\d:\d\d:\d\d its process was killed by SIGKILL .*%", text
    ), text
    assert re.search(r"server-0 +1 +\w.*%.*\n +trainer-0 +1 +\w.*%", text), text


def test_a_run_that_was_killed_says_what_to_type(start: Callable[..., Run]) -> None:
    run = start("cartpole")
    wait_until(lambda: checkpoints(run.path / "checkpoints" / "policy"), 60, "a checkpoint")
    names = ("actor-0", "server-0", "trainer-0")

    def of_all_workers() -> bool:
        return {f"time/{name}/wait" for name in names} <= {*chain(*last_records(run.path))}

    wait_until(of_all_workers, 60, "a record of each worker's time")
    run.main.kill()
    run.ended()
    text = shown(run.path)
    assert "it was killed" in text and "resume" in text
    last = text.partition("What it recorded last")[2]
    steps, updates = (int(last_records(run.path)[-1][name]) for name in ("step", "update"))
    assert re.search(rf"env steps +{steps:,}\nupdates +{updates:,}\n", last), text
    assert re.search(r"lag +\d+\.\d versions on average\n", last), text
    for name in names:
        assert re.search(rf"{name} +1 +\w.*%", last), text


def test_a_run_that_is_starting_was_not_killed(tmp_path: Path) -> None:
    """As while its layout is measured: its runner has the folder, and no workers."""
    folder = RunFolder.create(tmp_path / "run", cartpole(), None)
    try:
        assert "it is starting" in shown(folder.path)
        with pytest.raises(NoRun, match=r"its run is starting .*; stop it in a moment"):
            tell(folder.path, "stop")
        with pytest.raises(RunError, match="being written by another run"):
            RunFolder(folder.path).lock()  # who looks lets nobody else have it
    finally:
        folder.unlock()
    text = shown(folder.path)
    assert "it was killed" in text and "no checkpoint is there" in text and "resume" not in text
    assert re.search(r"actor-0 +1 *\n +server-0 +1 *\n +trainer-0 +1 *\n", text), text


def test_what_stands_in_a_folder_is_shown_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": ')
    text = shown(tmp_path)
    assert "it was killed" in text and f"damaged: {tmp_path}/config.json" in text
    (tmp_path / "config.json").write_text("{}")
    assert "damaged" not in shown(tmp_path)
    for torn in ("", '{"status": "comp', "[1]", '"completed"', "{}"):
        (tmp_path / "summary.json").write_text(torn)
        assert "it was killed" in shown(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "\\u001b[2Jcompleted"}')
    told = {"time": 1e300, "what": "told", "worker": "[red]arm[/red]", "cause": "\x1b[31mred"}
    died = {
        "time": -1e300,
        "what": "died",
        "worker": "\x1b[red]-" + 5000 * "9",
        "life": 2**60,
        "cause": "[red]\x1b",
    }
    (tmp_path / "events.jsonl").write_text(
        f"{json.dumps(died)}\n{json.dumps(told)}\n[]\n{json.dumps(told)[:40]}"
    )
    (tmp_path / "config.json").write_text(
        '{"workers": {"\\u001b": {"count": 1e9}, "b": {"count": 2}, "c": 1}}'
    )
    record = {"update": 1e308, "x\x1b/lag/mean": None, "return/\x1b[red]/mean": 3.0, "time/b-0/wait": 1e300}
    (tmp_path / "metrics.jsonl").write_text(f"[]\n{json.dumps(record)}\n{{\n" + '{"update": "1"}')
    text = shown(tmp_path)
    assert r"x\x1b nan versions" in text
    (tmp_path / "summary.json").unlink()
    assert r"mean return \x1b[red]" in shown(tmp_path) and "\x1b" not in shown(tmp_path)
    assert r"\x1b[2Jcompleted" in text and r"\x1b[31mred" in text and "[red]arm[/red]" in text
    assert "\x1b" not in text


def test_who_died_before_all_had_begun_is_shown_and_who_died_in_a_command_before_is_not(
    tmp_path: Path,
) -> None:
    made = cartpole()
    folder = RunFolder.create(tmp_path / "run", made, None)
    folder.unlock()
    told = [
        {"time": 10.0, "what": "began"},
        {"time": 11.0, "what": "died", "worker": "server-0", "life": 1, "cause": "it was killed before"},
        {"time": 21.0, "what": "died", "worker": "actor-0", "life": 1, "cause": "it was killed"},
        {"time": 22.0, "what": "lives", "worker": "actor-0", "life": 2},
        {"time": 23.0, "what": "began"},
    ]
    (folder.path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in told))
    (epoch,) = (folder.path / "epochs").iterdir()
    os.utime(epoch, (20.0, 20.0))
    (folder.path / "summary.json").write_text('{"status": "completed"}')
    text = shown(folder.path).partition("Its workers")[2].partition("What happened last")[0]
    assert re.search(r"actor-0 +2 +1 +\d\d:\d\d:\d\d it was killed *\n", text)
    assert re.search(r"server-0 +1 *\n", text)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        RunFolder.open(tmp_path)


def test_inline_it_is_written_that_a_run_has_begun_before_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes."""
    seen: list[str] = []
    update = Learner.update

    def look(learner: Learner, batch: Any) -> Any:
        seen.append((tmp_path / "run" / "events.jsonl").read_text())
        return update(learner, batch)

    monkeypatch.setattr(Learner, "update", look)
    train(cartpole().replace(limits=Limits(updates=1)), run_dir=tmp_path / "run", launch="inline", quiet=True)
    assert '"began"' in seen[0]
