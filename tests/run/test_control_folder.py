"""Orders to a run from another host than its runner's: by the folder that both see."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.networks import Network
from tests.hosts.hosts import networked
from tests.run.watching import Run, wait_until

from tidemill.core.errors import RunError
from tidemill.run import control_folder
from tidemill.run.control_folder import ControlFolder, ask, runner_elsewhere
from tidemill.run.control_socket import NoRun, tell
from tidemill.run.folder import RunFolder
from tidemill.run.status import read_status


@pytest.fixture
def elsewhere() -> Iterator[Network]:
    """A host that sees the same folders, and no socket of this one's."""
    with networked(1) as network:
        yield network


def test_a_run_is_told_from_another_host_that_sees_its_folder(tmp_path: Path, elsewhere: Network) -> None:
    often = "from tidemill.run import control_folder; control_folder._EVERY = 0.05"
    run = Run(tmp_path, "cartpole", code=often)
    try:
        run.wait_for_updates()
        with elsewhere.on(0):
            assert tell(run.path, "pause") == "paused"
            status = read_status(RunFolder.open(run.path))
            assert status is not None and status.state == "paused" and len(status.workers) == 3
            assert tell(run.path, "start") == "running"
            assert tell(run.path, "save") == "saving: a checkpoint is written"
            assert tell(run.path, "nonsense") == 'unknown command "nonsense"'
        assert (run.path / "control").stat().st_mode & 0o77 == 0
        assert all(file.stat().st_mode & 0o77 == 0 for file in (run.path / "control").iterdir())
        with elsewhere.on(0):
            said = tell(run.path, "stop")
        assert said in ("stopping: a final checkpoint is written", "the run has ended")
        status_, text = run.ended()
        assert status_ == 0, text
        assert not (run.path / "control").exists()
        with elsewhere.on(0), pytest.raises(NoRun, match="go on with it by"):
            tell(run.path, "stop")
    finally:
        run.kill_all()


def test_a_run_that_was_killed_does_not_answer(
    tmp_path: Path, elsewhere: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    ControlFolder(tmp_path)
    monkeypatch.setattr(control_folder, "ANSWER_S", 0.3)
    with elsewhere.on(0), pytest.raises(RunError, match=r"did not answer within .* it was killed, or"):
        tell(tmp_path, "stop")
    with pytest.raises(NoRun):  # here its socket would be seen
        tell(tmp_path, "stop")
    ControlFolder(tmp_path)  # the next run has files of its own
    assert (tmp_path / "control" / "requests").read_bytes() == b""


def answering(control: ControlFolder) -> threading.Thread:
    def answer() -> None:
        deadline, seen = time.monotonic() + 60, False
        while not seen and time.monotonic() < deadline:
            for request in control.commands():
                control.reply(request.number, f"did {request.order}")
                seen = True
            time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\x00\n",
        b'{"number": "\xff", "order": "stop"}\n',
        b'{"number": 1}\n',
        b'{"number": "1", "order": "x", "more": 1}\n',
        b"[" * 5000 + b"\n",
        bytes(200_000),
    ],
)
def test_garbage_is_passed_over(tmp_path: Path, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_folder, "_EVERY", 0.0)
    control = ControlFolder(tmp_path)
    (tmp_path / "control" / "requests").write_bytes(garbage)
    thread = answering(control)
    if not garbage.endswith(b"\n"):  # a line without end is dropped once it is too long
        wait_until(lambda: control._read >= len(garbage) - (1 << 16), 60, "it was read")
        with open(tmp_path / "control" / "requests", "ab") as file:
            file.write(b"\n")
    assert ask(tmp_path, "pause", "b") == "did pause"
    thread.join()
    control.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_keeps_few_answers(tmp_path: Path) -> None:
    control = ControlFolder(tmp_path)
    for number in range(100):
        control.reply(str(number), "x" * 1000)
    assert (tmp_path / "control" / "answers").stat().st_size < 10_000


def test_whose_runner_is_here_is_asked_by_its_socket(tmp_path: Path) -> None:
    ControlFolder(tmp_path)
    assert runner_elsewhere(tmp_path) == ""
    told = json.loads((tmp_path / "control" / "runner.json").read_text())
    (tmp_path / "control" / "runner.json").write_text(json.dumps({**told, "network": "other"}))
    assert runner_elsewhere(tmp_path) == told["host"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_not_believed(tmp_path: Path) -> None:
    ControlFolder(tmp_path)
    for name in ("requests", "answers"):
        os.chown(tmp_path / "control" / name, 65534, 65534)
    with pytest.raises(RunError, match="another user wrote it"):
        ask(tmp_path, "stop", "b")


def test_a_folder_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("a file")
    control = ControlFolder(tmp_path)
    assert list(control.commands()) == []
    control.reply("1", "x")
    control.close()
