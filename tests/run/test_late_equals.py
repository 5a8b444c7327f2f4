"""Equal trainers that are late to answer as one of them has died: one that hangs begins a
next life, and that is told; one that is in an update is waited for."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.run.test_supervisor import lives, process_of
from tests.run.watching import EXPERIMENTS, leftovers, wait_until

from tidemill.api.launcher import Call
from tidemill.core.user_code_loading import load_file
from tidemill.run import equal_lives
from tidemill.run.events import read_events
from tidemill.run.run_control import RunControl
from tidemill.run.silence import in_update
from tidemill.run.status import status_of
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")
PAIRS = "actor-0+trainer-0", "actor-1+trainer-1"


def kill_the_other(path: Path, flag: Path) -> None:
    """Kill the process that has not written its name into `flag`."""
    wait_until(lambda: flag.exists() and flag.read_text(), 120, "one of them is held")
    (other,) = {*PAIRS} - {flag.read_text()}
    process = process_of(path, other)
    assert process is not None
    process.kill()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hangs", [True, False])
def test_who_hangs_as_an_equal_one_dies_is_told_and_who_is_in_an_update_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    path, flag, since = tmp_path / "run", tmp_path / "held", list[float]()
    monkeypatch.setattr(equal_lives, "ANSWER", 0.2)
    known, notices = dict[str, tuple[str, int]](), list[str]()

    def seen_in_update(calls: Sequence[Call]) -> bool:
        if not calls:  # it could not be read in time
            return not hangs
        if found := in_update(calls):
            flag.with_suffix(".over").touch()  # it was late, and is in its update
            monkeypatch.setattr(equal_lives, "ANSWER", 100.0)
        return found

    monkeypatch.setattr(equal_lives, "in_update", seen_in_update)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if len(lives(path)) == (4 if hangs else 2):
            since.append(metrics["update"])
            if len(since) == 10:
                workers = status_of(control._controller).workers
                known.update((worker.name, (worker.state, worker.life)) for worker in workers)
                notices.extend(control._controller.state.report.notices)
                control.stop("it goes on")

    killer = threading.Thread(target=kill_the_other, args=(path, flag))
    killer.start()
    made = experiments.equal_with(str(flag), hangs)
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    killer.join()
    assert (result.summary["status"], result.summary["reason"]) == ("completed", "it goes on")
    held = flag.read_text().split("+")
    other = "actor-1+trainer-1" if "actor-0" in held else "actor-0+trainer-0"
    died = {event.worker: event.cause for event in read_events(path) if event.what == "died"}
    assert sorted(died) == sorted([*other.split("+"), *(held if hangs else ())])
    assert known == {name: ("running", 1 + (name in died)) for pair in PAIRS for name in pair.split("+")}
    late = [text for text in notices if text.startswith(f"{held[1]} is gone: it has not answered for ")]
    assert len(late) == hangs and flag.with_suffix(".over").exists() != hangs
    if hangs:
        assert died[held[0]] == died[held[1]] and "step (environments.py:" in died[held[1]]
        assert f"since {other.split('+')[1]} died" in died[held[1]]
        assert f"; life 2 of {held[1]} begins with {other.replace('+', ', ')}" in late[0]
    assert any(event.what == "went back" for event in read_events(path)) == hangs
    assert leftovers(path) == []
