"""Who owns the files of a bridge, and that those of the dead are removed and those of the
living are not."""

import errno
import os

import pytest

from tidemill.bridge import Bridge
from tidemill.bridge.protocol import files
from tidemill.bridge.protocol.files import (
    Lock,
    PeerWatch,
    Rendezvous,
    create_file,
    editor_path,
    open_file,
    remove_dead,
)
from tidemill.core.errors import ConfigError, ImageError, SimulatorError


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    return tmp_path


def test_a_lock_is_held_by_one_and_says_by_whom(tmp_path):
    lock = Lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "lock")
    watch = PeerWatch.find(tmp_path / "lock")
    assert watch.alive() and watch.owner == str(os.getpid())
    lock.release()
    assert not watch.alive() and not (tmp_path / "lock").exists()
    assert PeerWatch.find(tmp_path / "lock") is None


def test_a_lock_taken_over_from_the_dead_does_not_make_them_live(tmp_path):
    old = Lock(tmp_path / "lock")
    watch = PeerWatch.find(tmp_path / "lock")
    os.close(old._descriptor)  # as the kernel does when a process is killed: the file stays
    assert not watch.alive()
    new = Lock(tmp_path / "lock")
    assert not watch.alive() and PeerWatch.find(tmp_path / "lock").alive()
    new.release()


def test_a_companion_that_is_not_locked_yet_is_not_taken_for_a_dead_owners(tmp_path):
    (tmp_path / "lock").touch()
    assert PeerWatch.find(tmp_path / "lock") is None


def test_folders_of_the_dead_are_removed_and_others_are_not(root):
    living, dead = Rendezvous.own(1), Rendezvous.own(1)
    for meeting in (living, dead):
        create_file(meeting.path, 10).close()
        create_file(meeting.path.with_name("memory__"), 10).close()
        (meeting.path.parent / "memory.simulator").touch()
    os.close(dead._lock._descriptor)
    young, old, other = (
        root / name for name in (f"tidemill-{os.getuid()}-young", f"tidemill-{os.getuid()}-old", "else")
    )
    for folder in (young, old, other):
        folder.mkdir()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    (root / f"tidemill-{os.getuid()}-link").symlink_to(other)
    assert dead.path.parent in files.folders_of_the_dead()
    assert not {living.path.parent, young, other} & {*files.folders_of_the_dead()}
    third = Rendezvous.own(1)
    assert not dead.path.parent.exists() and not old.exists()
    assert living.path.exists() and third.path.parent.exists() and young.exists() and other.exists()
    for meeting in (living, third):
        meeting.leave()
        assert not meeting.path.parent.exists()


def test_a_meeting_leaves_nothing_and_takes_nothing_of_others(tmp_path):
    meeting = Rendezvous.at(tmp_path / "sub" / "default")
    for name in (
        "default",
        "default_",
        "default___",
        "default.simulator",
        "default.new",
        "default2",
        "default_x",
        "xdefault",
    ):
        (tmp_path / "sub" / name).touch()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Rendezvous.at(tmp_path / "sub" / "default")
    meeting.leave()
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == ["default2", "default_x", "xdefault"]


def test_where_nothing_can_be_made_that_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no memory file can be made"):
        Rendezvous.at(tmp_path / "file" / "default")


def test_a_file_that_is_no_memory_is_not_replaced(tmp_path):
    (tmp_path / "thesis").write_text("an executable, say, whose path was given as memory_path by mistake")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for wrong in ("thesis", "folder", "pipe"):
        with pytest.raises(ConfigError, match=f"{wrong} is no memory file"):
            Rendezvous.at(tmp_path / wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe", "thesis"]


def test_files_are_their_owners_alone_and_whole(tmp_path):
    memory = create_file(tmp_path / "m", 5000)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o600 and memory[:] == bytes(5000)
    memory[4999] = 7
    assert open_file(tmp_path / "m")[4999] == 7


def test_what_is_no_plain_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    for name in ("empty", "link", "none", "folder"):
        with pytest.raises(ImageError, match=name):
            open_file(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageError, match="plain file"):
        open_file(tmp_path / "pipe")


def test_more_than_there_is_room_for_is_told(tmp_path):
    with pytest.raises(SimulatorError, match="no room"):
        create_file(tmp_path / "m", 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_simulator_tidies_up_only_where_no_other_trainer_may_meet(tmp_path):
    for name in ("tidemill-0-abc", "ml-agents"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory").touch()
        remove_dead(tmp_path / name / "memory")
    assert [path.name for path in tmp_path.iterdir()] == ["ml-agents"]


def test_what_is_not_the_bridges_stays_whatever_the_folder_is_called(tmp_path):
    """A trainer may be told to meet its simulator in any folder (memory_path)."""
    others = ["memory.txt", "memory_2", "thesis"]
    for name in ("memory", "memory__", "memory.trainer", "memory.simulator", "memory.new", *others):
        (tmp_path / "tidemill-project" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tidemill-project" / name).touch()
    remove_dead(tmp_path / "tidemill-project" / "memory")
    assert sorted(path.name for path in (tmp_path / "tidemill-project").iterdir()) == others


def test_a_folder_in_a_files_place_is_told_and_in_nobodys_way(tmp_path):
    meeting = Rendezvous.at(tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    with pytest.raises(SimulatorError, match="memory cannot be made"):
        create_file(tmp_path / "memory", 22)
    meeting.leave()
    assert list(tmp_path.iterdir()) == []


def test_looking_for_the_dead_leaves_no_descriptors_open(root):
    living = Rendezvous.own(1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Rendezvous.own(1).leave()
    assert len(os.listdir("/proc/self/fd")) <= before
    living.leave()


@pytest.mark.parametrize("given", ["nowhere", "file"])
def test_a_temporary_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, given):
    """Python would take another one without a word, and the simulator look for the memory
    in vain."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path / given))
    monkeypatch.setattr("tempfile.tempdir", None)
    for make in (lambda: Rendezvous.own(2), editor_path):
        with pytest.raises(
            ConfigError,
            match=f"TMPDIR = {tmp_path / given}.*: (No such file|Not a directory).*in which you may write",
        ):
            make()
    assert not Bridge().has_trainer  # which plays alone there


def test_a_disk_without_room_is_told_with_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.write", full)
    with pytest.raises(
        SimulatorError,
        match="memory.trainer cannot be made: No space left on device; remove what is not needed in "
        f"{tmp_path}",
    ):
        Rendezvous(tmp_path / "folder" / "memory", (tmp_path / "folder").mkdir())
    assert not list((tmp_path / "folder").iterdir())
