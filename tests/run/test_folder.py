"""Run folders: nothing is written over, and what has changed is noticed."""

import fcntl
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    Experiment,
    Gymnasium,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
    evaluate,
    resume,
    train,
)
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import file_digest
from tidemill.run.folder import CONFIG, SOURCE, RunFolder, command
from tidemill.store.checkpoint import write_checkpoint
from tidemill.store.parameter_database import BUSY


def experiment(name: str = "one", **environment: str) -> Experiment:
    workers = {
        "actor": Actors(environment=Gymnasium(**(environment or {"id": "CartPole-v1"}))),
        "trainer": Trainer(algorithm=PPO()),
    }
    return Experiment(name=name, policies={"policy": ActorCritic()}, workers=workers)


def test_an_experiment_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", experiment(), None).unlock()
    assert RunFolder.open(tmp_path / "run").experiment() == (experiment(), None, {})
    assert RunFolder.open(tmp_path / "run").read("versions.json")["packages"]["tidemill"]
    assert not list((tmp_path / "run").glob(".*"))  # no lock, nothing half written


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_that_a_run_is_of_is_noted_and_what_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_DIR")
    checkout, outside = tmp_path / "checkout", tmp_path / "outside"
    checkout.mkdir()
    outside.mkdir()

    def git(*words: str) -> str:
        who = "-c", "user.name=one", "-c", "user.email=one@example.com", "-c", "commit.gpgsign=false"
        done = subprocess.run(["git", *who, *words], cwd=checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def noted(number: int) -> object:
        RunFolder.create(tmp_path / f"run-{number}", experiment(), None).unlock()
        return RunFolder.open(tmp_path / f"run-{number}").read("versions.json")["git"]

    monkeypatch.chdir(outside)
    assert noted(0) is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    monkeypatch.chdir(checkout)
    assert noted(1) == {"commit": git("rev-parse", "HEAD"), "changed": []}
    (checkout / "new.py").touch()
    assert noted(2) == {"commit": git("rev-parse", "HEAD"), "changed": ["?? new.py"]}


def test_a_folder_that_holds_a_run_is_not_taken_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", experiment(), None).unlock()
    with pytest.raises(RunError, match=r"already holds a run; it has no checkpoint .*: start anew by"):
        RunFolder.create(tmp_path / "run", experiment(), None)
    write_checkpoint(tmp_path / "run" / "checkpoints" / "policy", "update-1", {}, {}, 1)
    with pytest.raises(RunError, match=r"already holds a run; go on with it by: .*tidemill.* resume"):
        RunFolder.create(tmp_path / "run", experiment(), None)
    with pytest.raises(RunError, match=r'another experiment \("one", not "two"\).*--run-dir'):
        RunFolder.create(tmp_path / "run", experiment("two"), None)
    assert RunFolder.open(tmp_path / "run").experiment_name() == "one"


def test_two_runs_cannot_write_one_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    with pytest.raises(RunError, match=r"being written by another run; stop it with: .*tidemill.* stop"):
        RunFolder.open(tmp_path / "run").lock()
    # there is no checkpoint yet, and it is no run to go on with or to put aside
    with pytest.raises(RunError, match="being written by another run"):
        RunFolder.create(tmp_path / "run", experiment(), None)
    folder.unlock()
    second = RunFolder.open(tmp_path / "run")
    second.lock()
    second.unlock()


def test_who_only_looks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tidemill status` does, which has the folder for an instant."""
    made = RunFolder.create(tmp_path / "run", experiment(), None)
    made.unlock()
    look = os.open(made.path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr("tidemill.run.folder.MOMENT", 60.0)
    monkeypatch.setattr("tidemill.run.folder.sleep", lambda seconds: os.close(look))
    made.lock()
    assert made.led()
    made.unlock()


def test_what_never_began_leaves_nothing(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "new" / "run", experiment(), None).discard()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    RunFolder.create(tmp_path / "old", experiment(), None).discard()
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes.txt"]


def test_what_killed_writers_left_aside_is_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    kept = {path.name for path in folder.path.iterdir()} | {".mine"}
    for name in (".mine", ".summary.json.123", "metrics.tmp"):
        (folder.path / name).touch()
    (folder.checkpoints("policy") / ".update-7.123").mkdir(parents=True)
    (folder.checkpoints("policy") / "update-6").mkdir()
    folder.tidy()
    assert {path.name for path in folder.path.iterdir()} == kept | {"checkpoints"}
    assert [path.name for path in folder.checkpoints("policy").iterdir()] == ["update-6"]


def test_what_another_process_keeps_locked_is_not_waited_for(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    database = folder.database()
    database.push("policy", 1, {"w": np.zeros(1)})
    left = database.folder / "policy" / ".2.safetensors"
    left.touch()
    lock = os.open(left.parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    began = awake()
    folder.tidy()
    assert awake() - began < BUSY / 2 and left.exists()
    os.close(lock)
    folder.tidy()
    assert not left.exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file is a file, not a folder; name another with --run-dir"):
        RunFolder.create(tmp_path / "file", experiment(), None)
    with pytest.raises(RunError, match=r"cannot be written: Not a directory; name another with --run-dir"):
        RunFolder.create(tmp_path / "file" / "run", experiment(), None)
    run = RunFolder.create(tmp_path / "run", experiment(), None)
    run.unlock()
    shutil.rmtree(run.path / "epochs")
    (run.path / "epochs").touch()
    with pytest.raises(RunError, match=r"Not a directory: \S+/run/epochs; a folder belongs there: move that"):
        run.lead()


@pytest.mark.skipif(
    not Path("/proc/self").exists(),
    reason="needs Linux's /proc, where nobody can make a folder, root included",
)
def test_an_unwritable_place_is_named() -> None:
    with pytest.raises(RunError, match=r"/proc/run cannot be written: .*; name another with --run-dir"):
        RunFolder.create(Path("/proc/run"), experiment(), None)


def test_a_folder_that_is_no_run_names_the_runs_inside(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run's folder \(it has no config.json\)$"):
        RunFolder.open(tmp_path)
    RunFolder.create(tmp_path / "inside", experiment(), None).unlock()
    with pytest.raises(RunError, match=r"there are runs in it: .*inside"):
        RunFolder.open(tmp_path)


def test_runs_that_start_in_one_second_get_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More processes than one make them at once: whoever finds a name taken takes the
    next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tidemill.run.folder.strftime", lambda _: "20260101-000000")
    barrier = threading.Barrier(8)

    def make(_: int) -> RunFolder:
        barrier.wait(60)
        return RunFolder.create(None, experiment(), None)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(make, range(8)))
    names = ["one-s1-20260101-000000", *(f"one-s1-20260101-000000-{number}" for number in range(2, 9))]
    assert sorted(str(folder.path) for folder in folders) == [f"runs/{name}" for name in names]
    for folder in folders:
        folder.discard()
    assert not list(tmp_path.iterdir())


def test_of_runs_that_name_one_folder_at_once_one_gets_it_and_the_others_leave_it_alone(
    tmp_path: Path,
) -> None:
    barrier = threading.Barrier(8)

    def make(_: int) -> RunFolder | str:
        barrier.wait(60)
        try:
            return RunFolder.create(tmp_path / "new" / "run", experiment(), None)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make, range(8)))
    (folder,) = (each for each in made if isinstance(each, RunFolder))
    assert all(
        "being written by another run" in each or "already holds a run" in each
        for each in made
        if isinstance(each, str)
    )
    assert folder.experiment() == (experiment(), None, {})


@pytest.mark.parametrize("found", [None, 0o755])
def test_what_a_run_writes_is_its_owners_alone_whatever_the_umask(tmp_path: Path, found: int | None) -> None:
    path = tmp_path / "elsewhere" / "run"
    if found is not None:
        path.mkdir(found, parents=True)
    mask = os.umask(0)
    try:
        trainer = ReplayTrainer(
            algorithm=DQN(),
            buffer=Replay(capacity=1000, warm_up=20, mapped=True),
            batch_size=8,
            ratio=1,
            journal=True,
        )
        workers = {
            "actor": ReplayActors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": trainer,
        }
        made = Experiment(
            name="one", policies={"policy": QNetwork()}, workers=workers, limits=Limits(steps=100)
        )
        train(made, launch="threads", run_dir=path, quiet=True)
        resume(path, launch="threads", limits={"steps": 200}, quiet=True)
        evaluate(path, 1)
    finally:
        os.umask(mask)
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in (path, *path.rglob("*"))}
    names = {entry.name for entry in modes}
    assert {"config.json", "metrics.jsonl", "index.sqlite", "manifest.json", "journal-policy.bin"} <= names
    assert {"events", "evaluation"} <= {name.partition(".")[0].partition("-")[0] for name in names}
    assert {
        entry: mode for entry, mode in modes.items() if mode != (0o700 if entry.is_dir() else 0o600)
    } == {}


def test_a_folder_that_holds_other_things_keeps_its_mode_and_what_is_written_into_it_is_its_owners(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o755)
    (path / "notes.txt").touch()
    RunFolder.create(path, experiment(), None).unlock()
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in (path, path / "config.json")] == [0o755, 0o600]


def test_names_that_are_no_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'run ".hidden" is not a name'):
        RunFolder.create(tmp_path / ".hidden", experiment(), None)


def test_a_source_that_is_gone_asks_for_the_file(tmp_path: Path) -> None:
    file, moved = tmp_path / "mine.py", tmp_path / "moved.py"
    file.write_text("VALUE = 1\n")
    folder = RunFolder.create(tmp_path / "run", experiment(), file)
    assert folder.experiment() == (experiment(), file, {str(file): file_digest(file)})
    file.rename(moved)
    with pytest.raises(RunError, match=r"mine\.py, which defined this run, is gone; .* --file"):
        folder.experiment()
    assert folder.experiment(moved)[:2] == (experiment(), moved)
    with pytest.raises(RunError, match=r"no file .*mine\.py"):
        folder.experiment(file)


def test_torn_files_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    folder.write(SOURCE, {"something": "else"})
    with pytest.raises(RunError, match=r"source\.json does not name a file; say which with --file"):
        folder.experiment()
    (folder.path / SOURCE).unlink()
    folder.write(CONFIG, {"kind": "Experiment", "nmae": "one"})
    with pytest.raises(RunError, match=r'config\.json: .*"nmae"; did you mean "name"'):
        folder.experiment()
    (folder.path / CONFIG).write_text("{")
    with pytest.raises(RunError, match=r"config\.json cannot be read"):
        folder.experiment()


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(), None)
    before = {path.name for path in folder.path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*/summary\.json'"):
            folder.write("summary.json", {"reason": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in folder.path.iterdir()} == before


def test_the_command_is_named_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert command() == "tidemill"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    assert command() == "python -P -m tidemill.cli.entry"
    (binaries / "tidemill").touch()
    assert command() == str(binaries / "tidemill")
    monkeypatch.chdir(tmp_path)
    assert command() == os.path.join(".venv", "bin", "tidemill")
