"""Checkpoints: whole or not there."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tidemill.core.errors import CheckpointError, NewerCheckpoint
from tidemill.core.folder_thread import FolderThread
from tidemill.store import checkpoint
from tidemill.store.checkpoint import (
    MANIFEST,
    MOST_LATER,
    checkpoint_name,
    checkpoints,
    hangs,
    put_aside,
    read_checkpoint,
    read_newest,
    readable,
    write_checkpoint,
)

ARRAYS = {
    "policy": {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(7, np.int64),
        "turned": np.arange(6).reshape(2, 3).T,
    },
    "algorithm": {"empty": np.zeros((0, 4)), "flag": np.array([True, False])},
}


def write(folder: Path, update: int, keep: int = 100) -> Path:
    arrays = {
        file: {name: array + (update if array.dtype.kind != "b" else False) for name, array in c.items()}
        for file, c in ARRAYS.items()
    }
    return write_checkpoint(folder, checkpoint_name(update), arrays, {"updates": update}, keep)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arrays, facts = read_checkpoint(
        write_checkpoint(tmp_path, "update-3", ARRAYS, {"updates": 3, "name": "é"}, 1)
    )
    assert facts == {"updates": 3, "name": "é"}
    assert {*arrays} == {*ARRAYS}
    for file, content in ARRAYS.items():
        assert {*arrays[file]} == {*content}
        for name, array in content.items():
            assert arrays[file][name].shape == array.shape and arrays[file][name].dtype == array.dtype
            np.testing.assert_array_equal(arrays[file][name], array)


def test_order_and_collection_are_numeric(tmp_path: Path) -> None:
    for update in (9, 100, 10, 2, 1000):
        write(tmp_path, update)
    assert [p.name for p in checkpoints(tmp_path)] == [
        "update-2",
        "update-9",
        "update-10",
        "update-100",
        "update-1000",
    ]
    assert read_newest(tmp_path)[2] == {"updates": 1000}
    write(tmp_path, 99, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["update-100", "update-1000"]


def test_the_same_name_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write_checkpoint(tmp_path, "update-5", {"policy": {"w": np.zeros(1)}}, {"second": True}, 3)
    ((path, arrays, facts, warnings),) = [read_newest(tmp_path)]
    assert (
        path.name == "update-5" and {*arrays} == {"policy"} and facts == {"second": True} and warnings == []
    )


class Cut(BaseException):
    """What a writer that is killed does not catch."""


@pytest.mark.parametrize("after", [False, True])
def test_one_that_is_killed_while_it_replaces_the_only_checkpoint_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Before each system call, or after it. Whoever writes next leaves nothing of it."""
    count = at = 0

    def cutting(call: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count, here = count + 1, count == at
            if here and not after:
                raise Cut
            try:
                return call(*arguments, **named)
            finally:
                if here:
                    raise Cut

        return cut

    def replace(folder: Path) -> None:
        nonlocal count
        count = 0
        write_checkpoint(folder, "update-5", ARRAYS, {"second": True}, 1)

    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, cutting(getattr(os, name)))
    seen: list[dict[str, Any]] = []
    for number in range(1000):
        folder, at = tmp_path / str(number), -1
        write(folder, 5)
        at = number
        try:
            replace(folder)
            break
        except Cut:
            _, _, facts, warnings = read_newest(folder)
            assert warnings == []
            seen.append(facts)
        at = -1
        replace(folder)
        assert read_newest(folder)[2] == {"second": True} and [p.name for p in checkpoints(folder)] == [
            "update-5"
        ]
        assert not list(folder.glob("*.replaced"))
    assert (
        seen == sorted(seen, key=lambda facts: "second" in facts)
        and {"second": True} in seen
        and {"updates": 5} in seen
    )


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_one_that_is_killed_while_it_removes_an_old_checkpoint_leaves_no_part_of_it_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """Nothing would ever remove it: it is no checkpoint any more, and not aside
    either."""
    write(tmp_path, 1)
    unlink, done = os.unlink, []

    def cut(*arguments: Any, **named: Any) -> None:
        if len(done) == removed:
            raise Cut
        done.append(arguments)
        unlink(*arguments, **named)

    monkeypatch.setattr(os, "unlink", cut)
    with pytest.raises(Cut):
        write(tmp_path, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".update-1.{os.getpid()}", "update-2"]
    assert [p.name for p in checkpoints(tmp_path)] == ["update-2"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_undone_stays_aside_until_the_run_has_come_as_far_again(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        write(tmp_path, update)
    put_aside(checkpoints(tmp_path)[1:])
    assert names(tmp_path) == ["later-update-2", "later-update-3", "update-1"]
    write(tmp_path, 2)
    assert names(tmp_path) == ["later-update-3", "update-1", "update-2"]
    put_aside(checkpoints(tmp_path)[1:])  # again, before it had come as far
    assert names(tmp_path) == ["later-update-2", "later-update-3", "update-1"]
    write(tmp_path, 4)
    assert names(tmp_path) == ["update-1", "update-4"]


def test_of_what_is_undone_again_and_again_the_newest_stay(tmp_path: Path) -> None:
    for update in range(MOST_LATER + 3, 0, -1):
        put_aside([write(tmp_path, update)])
    assert names(tmp_path) == [f"later-update-{update}" for update in range(4, MOST_LATER + 4)]


def test_a_kill_leaves_nothing_aside_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each system call that puts one aside, or removes it."""
    count = at = 0

    def cutting(call: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise Cut
            return call(*arguments, **named)

        return cut

    def go_on(folder: Path) -> None:
        put_aside(checkpoints(folder)[1:])
        write(folder, 2)

    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, cutting(getattr(os, name)))
    for cut_at in range(1, 1000):
        folder = tmp_path / str(cut_at)
        at = 0
        write(folder, 1)
        put_aside([write(folder, 2)])
        shutil.copytree(folder / "later-update-2", folder / "update-2")
        count, at = 0, cut_at
        try:
            go_on(folder)
            break
        except Cut:
            at = 0
        go_on(folder)
        write(folder, 3)
        assert [path.name for path in checkpoints(folder)] == ["update-1", "update-2", "update-3"]
        others = {*names(folder)} - {"update-1", "update-2", "update-3"}
        assert all(name.startswith(".update-") for name in others)  # `RunFolder.tidy` removes these
    assert cut_at > 5


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".update-9.123").mkdir()
    (tmp_path / ".update-9.123" / MANIFEST).write_text("{}")
    for name in ("update-", "update--4", "update-x", "update-7.tmp", "other-8", "update-8"):
        (tmp_path / name).mkdir()
    for name in ("update-", "update--4", "update-x", "update-7.tmp", "other-8"):  # update-8 has no manifest
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "update-11").write_text("a file")
    assert [p.name for p in checkpoints(tmp_path)] == ["update-1"]
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("size", [0, 1, 8, 100])
def test_a_torn_file_is_noticed_and_passed_over(tmp_path: Path, size: int) -> None:
    write(tmp_path, 1)
    torn = write(tmp_path, 2)
    file = torn / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(torn)
    path, arrays, _, warnings = read_newest(tmp_path)
    assert path.name == "update-1" and arrays["policy"]["scalar"] == 8
    assert len(warnings) == 1 and "update-2" in warnings[0]


def test_one_altered_bit_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    file = path / "algorithm.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(path)


def test_an_altered_checksum_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["sha256"]["policy.safetensors"] = "0" * 64
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        '{"format": 0, "facts": {}, "sha256": {}}',
        '{"format": "2", "facts": {}, "sha256": {}}',
        '{"format": 1, "facts": {}}',
        '{"format": 1, "sha256": []}',
        "\xff",
    ],
)
def test_a_manifest_that_is_none_is_refused_and_passed_over(tmp_path: Path, manifest: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    (path / MANIFEST).write_bytes(manifest.encode("latin-1"))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    assert read_newest(tmp_path)[0].name == "update-1"


def test_one_whose_manifest_is_torn_is_passed_over_with_a_word_also_in_a_later_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "epoch_of", lambda folder: 2)
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:50])
    found = read_newest(tmp_path)
    assert found.path.name == "update-1"
    assert [str(path) in text for text in found.warnings] == [True]


def test_what_a_newer_version_has_written_is_named_and_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2) / MANIFEST).write_text('{"format": 99, "else": []}')
    for read in (read_newest, lambda folder: list(readable(folder))):
        with pytest.raises(NewerCheckpoint, match=r"update-2 has format 99; .* reads 1: a newer one"):
            read(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["update-1", "update-2"]


@pytest.mark.parametrize(
    "name", ["../policy.safetensors", "/etc/passwd", "a/../../b", "a/b/c", "a/..", "../b"]
)
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1)
    (path / MANIFEST).write_text(json.dumps({"format": 1, "facts": {}, "sha256": {name: "0" * 64}}))
    with pytest.raises(CheckpointError, match="lies elsewhere"):
        read_checkpoint(path)


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "policy.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"policy\.safetensors: No such file"):
        read_checkpoint(path)


def test_nothing_readable_is_an_error_never_a_start_from_scratch(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        read_newest(tmp_path)
    (write(tmp_path, 1) / "policy.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no readable checkpoint.*damaged"):
        read_newest(tmp_path)


def test_the_manifest_is_written_last_and_the_folder_renamed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    write_synced, rename = checkpoint.write_synced, Path.rename

    def written(path: Path, data: bytes, *go_on: Callable[[], None]) -> str:
        assert not checkpoints(tmp_path)
        checksum = write_synced(path, data, *go_on)
        done.append(path.name)
        return checksum

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(checkpoint, "write_synced", written)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path, 4)
    assert done == ["policy.safetensors", "algorithm.safetensors", MANIFEST, "rename update-4"]
    assert os.listdir(tmp_path) == ["update-4"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write(tmp_path, 1)
    write_synced, count = checkpoint.write_synced, [0]

    def full(path: Path, data: bytes, *go_on: Callable[[], None]) -> str:
        count[0] += 1
        if count[0] > at:
            raise OSError(28, "No space left on device")
        return write_synced(path, data, *go_on)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(CheckpointError, match="No space left on device; free space"):
        write(tmp_path, 2)
    assert os.listdir(tmp_path) == ["update-1"]
    assert read_newest(tmp_path)[2] == {"updates": 1}


def test_a_folder_that_cannot_be_written_leaves_no_part_of_its_checkpoint(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "rows.npy").write_bytes(b"x" * 4096)
        raise CheckpointError("the replay cannot be written")

    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match="the replay"):
        write_checkpoint(tmp_path, "update-2", ARRAYS, {}, 3, {"buffer": fails})
    assert [path.name for path in tmp_path.iterdir()] == ["update-1"]


def test_a_folder_of_files_is_kept_with_its_checksums(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "rows.bin").write_bytes(b"rows")

    path = write_checkpoint(tmp_path, checkpoint_name(1), {}, {}, 3, {"buffer": fill})
    assert read_checkpoint(path) == ({}, {}) and (path / "buffer" / "rows.bin").read_bytes() == b"rows"
    (path / "buffer" / "rows.bin").write_bytes(b"rowz")
    with pytest.raises(CheckpointError, match=r"buffer/rows\.bin is damaged"):
        read_checkpoint(path)


def test_a_share_whose_folders_cannot_be_listed_takes_no_checkpoint_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("tidemill.store.checkpoint.check", stale)
    with pytest.raises(CheckpointError, match="update-1 cannot be written: Stale file handle"):
        write_checkpoint(tmp_path / "run/checkpoints/policy", "update-1", ARRAYS, {}, 3)


def test_one_that_a_signal_broke_off_is_over_before_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def synced(file: int) -> None:
        done.append("next")
        if len(done) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert back.wait(60)
            done[0] = "broken off"
        real(file)

    back, real, done = threading.Event(), os.fsync, list[str]()
    monkeypatch.setattr(os, "fsync", synced)
    before = signal.signal(signal.SIGUSR1, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    threading.Timer(0.1, back.set).start()
    path = write(tmp_path, 2)
    assert done[0] == "broken off" and read_checkpoint(path)[1] == {"updates": 2}
    assert os.listdir(tmp_path) == [path.name]


def test_a_large_checkpoint_has_time_for_each_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, real, go_on = list[int](), os.fsync, FolderThread.go_on

    def synced(file: int) -> None:
        pieces.append(os.fstat(file).st_size)
        real(file)

    def goes_on(thread: FolderThread, seconds: float = 0.0) -> None:
        pieces.append(0)
        go_on(thread, seconds)

    monkeypatch.setattr(checkpoint, "PIECE", 100)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(FolderThread, "go_on", goes_on)
    write_checkpoint(tmp_path, "update-1", {"policy": {"w": np.arange(40)}}, {}, 3)
    # packed; each piece; the manifest, whose beginning is as long as any piece; its name
    assert pieces[:9] == [0, 0, 100, 0, 200, 0, 300, 0, (size := pieces[8])] and 300 < size <= 400
    assert (read_newest(tmp_path).arrays["policy"]["w"] == np.arange(40)).all()


def test_a_checkpoint_that_hangs_is_given_up_and_none_is_written_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder, other = run / "checkpoints/policy", tmp_path / "other/checkpoints/policy"
    (tmp_path / "other").mkdir()
    write_checkpoint(folder, "update-1", ARRAYS, {}, 3)
    back, real, made = threading.Event(), os.fsync, list[FolderThread]()

    def make(folder: Path, seconds: float) -> FolderThread:
        made.append(FolderThread(folder, 60.0))
        return made[-1]

    def hangs_there(file: int) -> None:
        if not back.is_set() and len(made) == 1:
            made[0].seconds = 0.0
            assert back.wait(60)
        real(file)

    monkeypatch.setattr(os, "fsync", hangs_there)
    monkeypatch.setattr(checkpoint, "FolderThread", make)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"update-2 cannot be .* does not answer since \d"):
            write_checkpoint(folder, "update-2", ARRAYS, {}, 3)
    assert hangs(run)
    write_checkpoint(other, "update-2", ARRAYS, {}, 3)  # where its run's last one goes
    with pytest.raises(CheckpointError, match="does not answer since"):
        write_checkpoint(run / "cuts/actor-0", "update-2", ARRAYS, {}, 3)
    back.set()
    until = time.monotonic() + 60
    while hangs(run):
        assert time.monotonic() < until
    assert [path.name for path in folder.iterdir()] == ["update-1"]  # the other never got its name
    write_checkpoint(folder, "update-3", ARRAYS, {}, 3)
    assert [path.name for path in checkpoints(folder)] == ["update-1", "update-3"]
