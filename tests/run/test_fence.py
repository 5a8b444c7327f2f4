"""Several runners of one folder, on a share that keeps no locks: the newest one leads,
and the others write nothing."""

import errno
import fcntl
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.run.watching import EXPERIMENTS, Run, wait_until

from tidemill import PPO, ActorCritic, Gymnasium, Limits
from tidemill.api.stream import Offered
from tidemill.core.errors import Overtaken, RunError
from tidemill.core.schema import Field
from tidemill.core.user_code_loading import load_file
from tidemill.replay.retrain_journal import JournalReader, JournalWriter, Task, journal_path
from tidemill.run.control_folder import FOLDER, ControlFolder
from tidemill.run.folder import RunFolder
from tidemill.store import fence
from tidemill.store.checkpoint import checkpoints, read_newest, write_checkpoint
from tidemill.store.fence import EPOCHS, check, hold, let_go, newest, take, take_lives
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.training.train import resume, train

experiments = load_file(EXPERIMENTS, "test")

# another host: the folder's lock is not kept there, and sockets are its own; it stops
# between two writes once there is a file called "stop"
ANOTHER_HOST = """
import errno, fcntl, os, signal
from tidemill.cli.main import app
from tidemill.run import control_socket, folder
from tidemill.run.run_lifecycle import RunLifecycle

def watch(self, controller, watch=RunLifecycle._watch):
    watch(self, controller)
    if os.path.exists("stop"):
        os.unlink("stop")
        os.kill(os.getpid(), signal.SIGSTOP)

def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

class NoLocks:
    LOCK_EX, LOCK_NB, flock = fcntl.LOCK_EX, fcntl.LOCK_NB, staticmethod(flock)

folder.fcntl, RunLifecycle._watch = NoLocks, watch
control_socket._address = lambda path: f"\\0tidemill-test-{os.getpid()}"
app()
"""


class Elsewhere(Run):
    """A run that is led from a host of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._start(folder, "-c", ANOTHER_HOST, *words)


def whole(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return all files of a run, but for logs, which workers write."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and "logs" not in path.parts
    }


def test_a_runner_that_was_stopped_while_another_one_resumed_ends_and_writes_nothing(tmp_path: Path) -> None:
    old = Elsewhere(tmp_path, "train", f"{EXPERIMENTS}:cartpole", "--run-dir", "run", "--layout", "given")
    new = None
    try:
        wait_until(lambda: checkpoints(old.path / "checkpoints" / "policy"), 60, "a checkpoint")
        old.wait_for_updates()
        (tmp_path / "stop").touch()
        stopped = psutil.Process(old.main.pid)
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, 60, "it is stopped")
        (tmp_path / "again").mkdir()
        new = Elsewhere(tmp_path / "again", "resume", str(tmp_path / "run"), "--max-steps", "1000000000")
        new.path = tmp_path / "run"
        new.wait_for_file(new.path / EPOCHS / "2", "it leads")
        size = lambda: (new.path / "metrics.jsonl").stat().st_size  # noqa: E731
        first = size()
        wait_until(lambda: size() != first, 60, "it writes")
        os.killpg(new.main.pid, signal.SIGINT)
        status, text = new.ended()
        assert status == 130, text
        (new.path / FOLDER).mkdir()
        (new.path / FOLDER / "requests").touch()  # as a runner has it that goes on
        before = whole(tmp_path / "run")
        stopped.resume()
        status, text = old.ended()
        assert status == 1, text
        assert text.count("is led by another runner, which began later (epoch 2, this one's is 1") >= 1
        assert "Traceback" not in text
        assert whole(tmp_path / "run") == before
        old.nothing_is_left()
    finally:
        for run in (old, new):
            if run is not None:
                run.kill_all()


def test_each_who_begins_at_once_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: take(tmp_path), range(16)))
    assert sorted(taken) == list(range(1, 17)) and newest(tmp_path) == 16
    let_go(tmp_path)
    check(tmp_path)  # who works for no epoch is kept from nothing


@pytest.fixture
def overtaken(tmp_path: Path) -> Path:
    """A run for whose epoch 1 this process works, and which another one leads."""
    take(tmp_path)
    write_checkpoint(tmp_path / "checkpoints" / "policy", "update-7", {"policy": {"w": np.ones(2)}}, {}, 3)
    ParameterDatabase(tmp_path / "parameters").push("policy", 1, {"w": np.ones(2, np.float32)})
    (tmp_path / EPOCHS / "2").touch()
    return tmp_path


def test_nothing_is_written_for_an_epoch_that_is_over(overtaken: Path) -> None:
    before = whole(overtaken)
    with pytest.raises(Overtaken, match=r"epoch 2, this one's is 1"):
        write_checkpoint(overtaken / "checkpoints" / "policy", "update-8", {"policy": {}}, {}, 3)
    with pytest.raises(Overtaken):
        ParameterDatabase(overtaken / "parameters").push("policy", 2, {"w": np.ones(2, np.float32)})
    assert whole(overtaken) == before


def test_nothing_is_written_by_a_life_whose_next_one_has_begun(tmp_path: Path) -> None:
    """As where a host was taken for lost, and lives on."""
    epoch = take(tmp_path)
    hold(tmp_path, epoch, {"trainer-0": 1})
    try:
        take_lives(tmp_path, epoch, {"actor-0": 5, "trainer-0": 1})
        check(tmp_path)
        take_lives(tmp_path, epoch, {"trainer-1": 2})
        check(tmp_path)
        take_lives(tmp_path, epoch, {"actor-0": 6, "trainer-0": 2})
        with pytest.raises(Overtaken, match=r"life 3 of trainer-0 has begun elsewhere, .* life 2 writes"):
            write_checkpoint(tmp_path / "checkpoints" / "policy", "update-7", {"policy": {}}, {}, 3)
        assert not list(tmp_path.glob("checkpoints/*/*"))
        # of each worker that of its newest life, none of the runner before
        names = {"actor-0.6", "trainer-0.2", "trainer-1.2"}
        assert {*os.listdir(tmp_path / EPOCHS)} == {str(epoch), *(f"{epoch}.{name}" for name in names)}
        later = take(tmp_path)
        take_lives(tmp_path, later, {"trainer-0": 1})
        assert {*os.listdir(tmp_path / EPOCHS)} == {str(epoch), str(later), f"{later}.trainer-0.1"}
        hold(tmp_path, later, {"trainer-0": 1})
        check(tmp_path)
    finally:
        let_go(tmp_path)


def test_a_journal_is_the_newer_runner_s_alone(tmp_path: Path) -> None:
    take(tmp_path)
    offered = [Offered({"obs": Field((2,), "float32")}, (1, 1), 2, 1)]
    path = journal_path(tmp_path, "policy")
    journal = JournalWriter(path, offered, {}, None)
    journal.task(0.5)
    end = journal.sync()
    journal.task(0.6)  # which waits to be written
    (tmp_path / EPOCHS / "2").touch()
    before = path.read_bytes()
    assert len(before) == end
    with pytest.raises(Overtaken):
        journal.sync()
    journal.task(0.7)
    journal.close()
    with pytest.raises(Overtaken):  # a later life of that runner's trainer
        JournalWriter(path, offered, {}, 0)
    assert path.read_bytes() == before
    hold(tmp_path, 2)
    newer = JournalWriter(path, offered, {}, end)
    newer.task(0.8)
    newer.close()
    assert list(JournalReader(path).records()) == [Task(0.5), Task(0.8)]


def test_who_is_overtaken_follows_no_order_that_is_left_for_the_other_one(overtaken: Path) -> None:
    control = ControlFolder(overtaken)
    (overtaken / FOLDER / "requests").write_bytes(b'{"number": "1", "order": "stop"}\n')
    before = whole(overtaken)
    with pytest.raises(Overtaken):
        list(control.commands())
    control.close()
    assert whole(overtaken) == before


def test_a_checkpoint_of_a_newer_epoch_is_newer_whatever_its_number(overtaken: Path) -> None:
    folder = overtaken / "checkpoints" / "policy"
    hold(overtaken, 2)
    write_checkpoint(folder, "update-5", {"policy": {"w": np.zeros(2)}}, {}, 3)
    assert [path.name for path in checkpoints(folder)] == ["update-7", "update-5"]
    assert read_newest(folder).path.name == "update-5"
    write_checkpoint(folder, "update-6", {"policy": {"w": np.zeros(2)}}, {}, 2)
    assert [path.name for path in checkpoints(folder)] == ["update-5", "update-6"]  # the old one goes first


@pytest.fixture(autouse=True)
def no_epochs_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_held", {})


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("exact", [False, True])
def test_a_resume_that_is_refused_takes_the_run_from_nobody(tmp_path: Path, exact: bool) -> None:
    made = experiments.experiment(Gymnasium(id="CartPole-v1"), algorithm=PPO())
    policies = {"policy": ActorCritic(hidden=(4,))}
    made = made.replace(policies=policies, limits=Limits(updates=2), exact_resume=exact)
    train(made, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True, launch="inline")
    if exact:  # a later one, of which no whole cut is
        last = tmp_path / "run" / "checkpoints" / "policy" / "update-2"
        shutil.copytree(last, last.with_name("update-3"))
    before = whole(tmp_path / "run")
    with pytest.raises(RunError, match="has already reached its limit of 2 updates"):
        resume(tmp_path / "run", quiet=True)
    assert whole(tmp_path / "run") == before


@pytest.mark.usefixtures("without_locks")
def test_a_start_where_another_one_was_quicker_takes_the_run_from_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "run", RunFolder.lock
    made = experiments.cartpole()

    def late(self: RunFolder) -> None:
        monkeypatch.setattr(RunFolder, "lock", lock)
        RunFolder.create(path, made, None)
        lock(self)

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder.create(path, made, None)
    assert newest(path) == 1
    let_go(path)
