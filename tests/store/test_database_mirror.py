"""A copy of a parameter database on a host that does not see it, and what the runner
sends for it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.run.watching import wait_until

from tidemill.core.errors import DeadlineError, VersionGone
from tidemill.core.folder_thread import FolderThread
from tidemill.hosts.orders import WantVersion
from tidemill.launchers import versions_sent
from tidemill.launchers.versions_sent import VersionsSent
from tidemill.store import database_mirror
from tidemill.store.database_mirror import DatabaseMirror, MirroredDatabase, database_in
from tidemill.store.parameter_database import ParameterDatabase


def sends(folder: Path) -> VersionsSent:
    return VersionsSent(folder, FolderThread(folder, 60.0))


class Copied:
    """A database, its copy, and the two who fill that."""

    def __init__(self, folder: Path) -> None:
        self.database, self.sent = ParameterDatabase(folder / "run"), sends(folder / "run")
        self.mirror = DatabaseMirror(folder / "copy")
        found = database_in(folder / "copy")
        assert isinstance(found, MirroredDatabase) and type(database_in(folder / "run")) is ParameterDatabase
        self.copy, self.parts = found, list[int]()
        self.over = False

    def push(self, version: int) -> None:
        self.database.push("p", version, {"w": np.full(1000, float(version), np.float32)})

    def look(self) -> None:
        """Have the copy know which versions there are."""
        if (news := self.sent.news("b", now=True)) is not None:
            self.mirror.take_index(news.index)

    def serve(self) -> None:
        """Bring what is asked for, until it is over."""
        while not self.over:
            wanted = self.mirror.wanted()
            while wanted is not None:
                self.look()
                part = self.sent.part(WantVersion(*wanted))
                assert part is not None
                self.parts.append(len(part.data))
                wanted = self.mirror.take_part(part.policy, part.version, part.data, part.whole)


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Copied]:
    made = Copied(tmp_path)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.over = True
    thread.join()


def test_a_version_comes_once_in_parts_and_is_that_of_the_run(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_sent, "PART_BYTES", 1500)
    assert copied.copy.versions("p") == []
    for version in (1, 2):
        copied.push(version)
    copied.look()
    assert copied.sent.news("b", now=True) is None and copied.sent.news("c") is not None
    assert [version.version for version in copied.copy.versions("p")] == [1, 2]
    assert copied.copy.read("p", "latest") == copied.database.read("p", 2)
    came = list(copied.parts)
    assert len(came) == 3 and came[:2] == [1500, 1500]
    arrays, _ = copied.copy.load("p", 2)
    assert (arrays["w"] == 2).all() and copied.parts == came  # it is there
    copied.sent.forget("b")
    assert copied.sent.news("b") is not None


@pytest.mark.parametrize(
    ("policy", "version", "start"),
    [
        ("../run/p", 1, 0),
        ("p", 2, 0),
        ("p", -1, 0),
        ("p", 1, -1),
        ("p", 1, 1 << 63),
        ("p\0", 1, 0),
        ("", 1, 0),
    ],
)
def test_what_nobody_can_want_is_answered_as_gone(
    policy: str, version: int, start: int, tmp_path: Path
) -> None:
    database = ParameterDatabase(tmp_path / "run")
    database.push("p", 1, {"w": np.zeros(1000, np.float32)})
    part = sends(tmp_path / "run").part(WantVersion(policy, version, start))
    assert part is not None and part.data == b""


def test_what_was_collected_meanwhile_is_gone_there_too(copied: Copied) -> None:
    copied.push(1)
    copied.look()
    copied.push(2)
    copied.database.collect("p", 1)
    with pytest.raises(VersionGone, match="version 1 "):
        copied.copy.read("p", 1)
    assert copied.copy.read("p", 2) == copied.database.read("p", 2)


def test_what_has_come_is_not_sent_again_though_its_reader_asks_late_but_what_is_damaged(
    copied: Copied,
) -> None:
    copied.push(1)
    copied.look()
    read = copied.copy.read("p", 1)
    asked = copied.copy.folder / database_mirror._ASKED / "p" / "1"
    wait_until(lambda: not asked.exists(), 60, "it is known to have come")
    asked.touch()  # as by a reader that looked a moment before it came
    wait_until(lambda: not asked.exists(), 60, "that is taken back")
    assert len(copied.parts) == 1
    (copied.copy.folder / "p" / "1.safetensors").write_bytes(b"damaged")
    assert copied.copy.read("p", 1) == read and len(copied.parts) == 2


def test_what_was_not_read_for_longest_makes_room(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_mirror, "MOST_CACHED_BYTES", 9000)
    for version in (1, 2, 3):
        copied.push(version)
    copied.look()
    for version in (1, 2, 1, 3):
        copied.copy.read("p", version)
    # who brings the third one has placed it a moment before he makes room
    left = lambda: sorted(path.name for path in copied.copy.folder.glob("p/*"))  # noqa: E731
    wait_until(lambda: left() == ["1.safetensors", "3.safetensors"], 60, "the second one is gone")


def test_what_never_comes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_mirror, "PATIENCE_S", 0.05)
    made = Copied(tmp_path)
    made.push(1)
    made.look()
    with pytest.raises(DeadlineError, match=r"version 1 of policy \"p\" has not come"):
        made.copy.read("p", 1)
    assert made.mirror.wanted() == ("p", 1, 0)
