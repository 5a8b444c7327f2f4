"""Disks that are full, and folders that cannot be written any more: training goes on, and
what was trained is kept somewhere."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.replay.arrivals import Play
from tests.run import spoilt

import tidemill
from tidemill import Replay
from tidemill.core.errors import CheckpointError, RunError
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder, command
from tidemill.run.same_run import put_aside
from tidemill.store.checkpoint import checkpoints, read_newest, write_checkpoint
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.workers import cut_files

BLOCK = 1 << 16


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a disk of its own needs the right to mount one (run as root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no room on a disk. A version that is being pushed goes on to free and to take
    some: what comes first then, and whether there is some after all, is a matter of
    time."""
    await_pushes()
    with open(place / "filler", "wb", buffering=0) as file:
        for size in (BLOCK, 512):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def fill_after_three(disk: Path, metrics: dict[str, float], control: object) -> None:
    """Fill a disk with a run's third update."""
    if metrics["update"] == 3:
        fill(disk)


def await_pushes() -> None:
    """Wait until no version is being pushed."""
    for thread in threading.enumerate():
        if thread.name == "push":
            thread.join(60)


def run(folder: Path, updates: int, on_update, what="CartPole-v1", **settings):
    return tidemill.train(
        what, steps=10**6, launch="inline", layout="given", run_dir=folder, log="csv", quiet=True,
        on_update=on_update, lanes=4, sample_steps=16, minibatch_size=32, checkpoint_seconds=1e-9,
        checkpoint_share=1, **{"database_seconds": 1e-9, "limits.updates": updates, **settings},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is tried again at once."""
    monkeypatch.setattr("tidemill.workers.checkpoint_pace.AGAIN", 1e-9)
    monkeypatch.setattr("tidemill.metrics.spool.RETRY", 0.01)


def test_on_a_full_disk_training_goes_on_and_when_there_is_room_all_catches_up(
    disk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = []

    def on_update(metrics, control):
        await_pushes()  # each of those in between fails
        match metrics["update"]:
            case 3:
                fill(disk)
            case 9:
                kept.extend(path.name for path in checkpoints(disk / "run/checkpoints/policy"))
                (disk / "filler").unlink()

    found = run(disk / "run", 12, on_update)
    assert (found.summary.status, found.summary.updates) == ("completed", 12)
    assert "update-3" in kept or "update-2" in kept  # the last good ones stayed
    assert [record["update"] for record in read_metrics(disk / "run")] == list(range(1, 13))
    assert (disk / "run/metrics.csv").read_text().count("\n") == 13
    assert read_newest(disk / "run/checkpoints/policy").facts["updates"] == 12
    assert ParameterDatabase(disk / "run/parameters").versions("policy")[-1].version == 12
    told = capsys.readouterr().err
    assert told.count("cannot be written: No space left on device") == 2  # a checkpoint, a version
    assert told.count("checkpoints are written again") == 1
    assert told.count("versions are kept again") == 1
    # of each file without room in its last block: once, and once when it is over
    assert len({record.getMessage() for record in caplog.records}) == len(caplog.records) in (2, 4)


def test_a_memory_without_room_on_the_disk_leaves_what_there_is_to_others(disk: Path) -> None:
    play = Play(Replay(capacity=1000, warm_up=6))
    for _ in range(600):
        play.tick(0, "step")
    folder = disk / "memory"
    folder.mkdir()
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - 3 * 4096)
    with pytest.raises(CheckpointError, match=r"it takes 0.\d MB, of which 0.0 MB are free there"):
        play.buffer.save(folder)
    assert not list(folder.iterdir())
    (disk / "filler").unlink()
    play.buffer.save(folder)


def test_a_step_that_fails_on_a_full_disk_is_counted_and_a_later_one_is_recorded_again(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.workers.step_faults.MOST_A_MINUTE", 10_000)
    found = []

    def on_update(metrics, control):
        await_pushes()
        if metrics["update"] in (3, 8):
            found.append([path.name for path in checkpoints(disk / "run/faults/actor-0")])
        match metrics["update"]:
            case 3:
                fill(disk)
            case 8:
                (disk / "filler").unlink()

    what = tidemill.Gymnasium(make=f"{spoilt.__file__}:Spoilt", kwargs={"fault": "raise"})
    settings = {"lane_restarts": 10_000, "lane_fault_records": 3}
    result = run(disk / "run", 12, on_update, what, **settings)
    assert result.summary.status == "completed"
    then, still = found
    assert len(then) == 3 and {*still} <= {*then}
    assert checkpoints(disk / "run/faults/actor-0")[0].name not in then
    told = capsys.readouterr().err
    assert told.count("Steps that environments fail in are counted, and not recorded") == 1
    # a record has them where the actor has told of its time since the one before
    unrecorded, restarts = (
        max(record.get(f"time/actor-0/lanes/{name}", 0) for record in read_metrics(disk / "run"))
        for name in ("unrecorded", "restarts")
    )
    assert 0 < unrecorded < restarts


def test_while_parts_of_cuts_cannot_be_written_the_newest_whole_cut_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is room for checkpoints, and none for what an actor has in hand."""
    full, write = [False], cut_files.write_checkpoint

    def written(folder: Path, *given: object, **more: object) -> object:
        if full[0] and folder.name == "actor-0":
            raise CheckpointError("no space is left")
        return write(folder, *given, **more)

    def on_update(metrics, control):
        full[0] = metrics["update"] >= 3
        if metrics["update"] == 12:
            last.extend(path.name for path in checkpoints(tmp_path / "run/checkpoints/policy"))

    last = list[str]()
    monkeypatch.setattr(cut_files, "write_checkpoint", written)
    assert run(tmp_path / "run", 12, on_update, exact_resume=True).summary.updates == 12
    assert last[0] in ("update-2", "update-3") and len(last) == 4
    assert capsys.readouterr().err.count("a resumed run goes on from the cut before") == 1
    full[0] = False
    seen = list[float]()
    tidemill.resume(
        tmp_path / "run", limits={"updates": 14}, quiet=True, on_update=lambda m, _: seen.append(m["update"])
    )
    assert seen[0] in (3, 4) and seen[-1] == 14


@pytest.mark.parametrize("exact", [False, True])
def test_at_the_end_on_a_full_disk_the_last_weights_go_elsewhere_and_can_be_gone_on_from(
    exact: bool,
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))

    with pytest.raises(tidemill.TidemillError, match=r"summary.json cannot be written") as failed:
        run(disk / "run", 6, partial(fill_after_three, disk), exact_resume=exact)
    (refuge,) = (tmp_path / "elsewhere").iterdir()
    # it is at its limit: without a higher one it would be refused
    assert f"complete but for that, and its last checkpoint is in {refuge}" in str(failed.value)
    assert f"with a higher limit, by: {command()} resume {refuge} --max-steps N" in str(failed.value)
    told = capsys.readouterr().err
    assert f"The last checkpoint is in {refuge} instead" in told
    anew = " with new episodes, not exactly," if exact else ""
    assert f"go on from there{anew} with a higher limit by: tidemill resume {refuge}" in told
    with pytest.raises(tidemill.TidemillError, match="already reached its limit of 6 updates"):
        tidemill.resume(refuge, quiet=True)
    assert refuge.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o077 for file in refuge.rglob("*")} == {0}
    before = read_newest(refuge / "checkpoints/policy")
    assert before.facts["updates"] == 6
    found = tidemill.resume(refuge, limits={"updates": 8}, quiet=True)
    assert found.summary.updates == 8


def test_a_run_whose_last_checkpoint_alone_has_no_room_ends_with_an_error_that_says_where_it_is(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))

    def on_update(metrics, control):
        if metrics["update"] == 3:
            fill(disk)
            os.truncate(disk / "filler", (disk / "filler").stat().st_size - 3 * 4096)

    with pytest.raises(tidemill.TidemillError, match="did not take the run's last checkpoint") as failed:
        run(disk / "run", 6, on_update, database_seconds=None)
    (refuge,) = (tmp_path / "elsewhere").iterdir()
    assert f"its last checkpoint is in {refuge}" in str(failed.value)
    assert read_newest(refuge / "checkpoints/policy").facts["updates"] == 6
    own = json.loads((disk / "run/summary.json").read_text())
    assert (own["status"], own["updates"]) == ("failed", 6)
    (disk / "filler").unlink()
    # what is elsewhere does not count any more, although it is newer
    found = tidemill.resume(disk / "run", limits={"updates": 5}, quiet=True)
    assert (found.summary.status, found.summary.updates) == ("completed", 5)
    assert f"{refuge} has a later checkpoint of this run, of update 6, which" in capsys.readouterr().err


def test_a_run_whose_folder_is_renamed_tells_it_and_its_last_checkpoint_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))

    def on_update(metrics, control):
        if metrics["update"] == 3:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(tidemill.TidemillError, match="complete but for that, and its last checkpoint is in"):
        run(tmp_path / "run", 6, on_update, database_seconds=None, exact_resume=True)
    told = capsys.readouterr().err
    text = r"policy/update-\d+ cannot be written: the run's folder was removed or renamed"
    assert len(re.findall(text, told)) == 2
    assert not (tmp_path / "run").exists()
    assert checkpoints(tmp_path / "moved/checkpoints/policy")[-1].name in ("update-2", "update-3")
    (refuge,) = (tmp_path / "elsewhere").iterdir()
    assert tidemill.resume(refuge, limits={"updates": 7}, quiet=True).summary.updates == 7


def test_where_there_is_no_room_elsewhere_either_the_last_good_checkpoint_is_named(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk / "elsewhere"))

    with pytest.raises(tidemill.TidemillError, match=r"checkpoint .* cannot be written: No space") as failed:
        run(disk / "run", 6, partial(fill_after_three, disk), database_seconds=None)
    assert f"Nor could it be written into {disk}/elsewhere/tidemill-run-" in str(failed.value)
    assert f"go on from the last one by: {command()} resume {disk / 'run'}" in str(failed.value)
    assert not [*(disk / "elsewhere").iterdir()]


def test_a_folder_in_the_refuges_place_that_is_not_the_users_own_is_not_written_into(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.store.refuge import refuge_of

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))

    def on_update(metrics, control):
        if metrics["update"] == 1:
            refuge_of(disk / "run").mkdir(mode=0o755)
            fill(disk)

    with pytest.raises(tidemill.TidemillError, match=r"checkpoint .* cannot be written: No space left"):
        run(disk / "run", 3, on_update)
    (refuge,) = (tmp_path / "elsewhere").iterdir()
    assert not [*refuge.iterdir()]


def test_a_disk_that_becomes_read_only_as_a_run_starts_is_named(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def versions(known: object) -> dict[str, str]:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return {}

    monkeypatch.setattr("tidemill.run.folder.versions", versions)
    with pytest.raises(
        tidemill.TidemillError,
        match=r"^run folder .*/run cannot be written: Read-only file system; name another with --run-dir$",
    ):
        run(disk / "run", 3, lambda metrics, control: None)


READ_ONLY = """
import os, sys, tempfile
from pathlib import Path
import tidemill
import tidemill.workers.checkpoint_pace as pace

place, closed = Path(sys.argv[1]), sys.argv[2:] == ["closed"]
pace.AGAIN = 1e-9

def on_update(metrics, control):
    if closed:
        (place / "run").chmod(0 if metrics["update"] >= 3 else 0o700)
        return
    mode = {2: 0o500, 5: 0o700}.get(metrics["update"])
    for path in ("checkpoints/policy", "parameters/policy", "parameters"):
        if mode is not None:
            (place / "run" / path).chmod(mode)

def run(folder, updates, **settings):
    return tidemill.train(
        "CartPole-v1", steps=10**6, launch="inline", layout="given", run_dir=folder, log="", quiet=True,
        lanes=4, sample_steps=16, minibatch_size=32, checkpoint_seconds=1e-9, checkpoint_share=1,
        database_seconds=1e-9, **{"limits.updates": updates, **settings},
    )

run(place / "first", 1)  # whatever is imported is, before another user cannot
if os.getuid() == 0:
    os.chown(place, 65534, 65534)
    os.setgid(65534), os.setuid(65534)
    os.environ["XDG_CONFIG_HOME"] = str(place)
tempfile.tempdir = str(place)
found = run(place / "run", 8, on_update=on_update)
print(found.summary.status, found.summary.updates)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach: those of pytest are closed to them, and closed
    again whenever somebody else starts it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def test_checkpoints_that_may_not_be_read_are_none_to_go_on_from(open_folder: Path) -> None:
    """As those of another user, who asks then."""
    place = RunFolder(open_folder / "run")
    policy = place.checkpoints("policy")
    place.path.mkdir()
    write_checkpoint(policy, "update-1", {}, {}, 1)
    assert place.how_to_go_on().endswith(f" resume {place.path}")
    for folder, mode in ((place.path, 0o755), (policy.parent, 0o755), (policy, 0)):
        folder.chmod(mode)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        assert place.how_to_go_on() == ""
    finally:
        if root:
            os.seteuid(0)
        policy.chmod(0o700)


@pytest.mark.parametrize("look", [RunFolder.open, put_aside, lambda place: RunFolder(place).lock()])
def test_a_run_s_folder_that_may_not_be_read_is_named(
    open_folder: Path, look: Callable[[Path], object]
) -> None:
    """As that of another user, and as any on a share that is away."""
    place = open_folder / "run"
    place.mkdir()
    (place / "config.json").write_text("{}")
    place.chmod(0)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(RunError, match=rf"{place} cannot be .*: Permission denied; let yourself read it"):
            look(place)
    finally:
        if root:
            os.seteuid(0)
        place.chmod(0o700)


def test_a_folder_that_is_read_only_for_a_while_stops_nothing(open_folder: Path) -> None:
    """Where this user may write anywhere, another one tries."""
    place = open_folder / "place"
    place.mkdir()
    (place / "script.py").write_text(READ_ONLY)
    done = subprocess.run(
        [sys.executable, str(place / "script.py"), str(place)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["completed", "8"]
    assert len(re.findall("checkpoint .* cannot be written: Permission denied", done.stderr)) == 1
    assert done.stderr.count("checkpoints are written again") == 1
    assert read_newest(place / "run/checkpoints/policy").facts["updates"] == 8


def test_the_last_weights_of_a_run_whose_folder_may_not_be_read_go_elsewhere(open_folder: Path) -> None:
    """As those of one whose share has gone away."""
    place = open_folder / "place"
    place.mkdir()
    (place / "script.py").write_text(READ_ONLY)
    words = [sys.executable, str(place / "script.py"), str(place), "closed"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert "summary.json cannot be written: Permission denied" in done.stderr
    (refuge,) = place.glob("tidemill-run-*")
    assert f"its last checkpoint is in {refuge}: move that folder" in done.stderr
    assert read_newest(refuge / "checkpoints/policy").facts["updates"] == 8
    assert tidemill.resume(refuge, limits={"updates": 9}, quiet=True, trust=True).summary.updates == 9
    (place / "run").chmod(0o700)
