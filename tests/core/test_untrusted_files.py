"""What is read of a file that anybody may have written: plain files that memory can hold,
and JSON of a depth that cannot hurt."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from tidemill.core.untrusted_files import DEPTH, open_plain, read_json, read_plain


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "file") == b"content"
    assert read_plain(tmp_path / "link", links=True) == b"content"
    with open_plain(tmp_path / "file") as file:
        assert not os.get_inheritable(file.fileno())


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name, links, what in (
        ("fifo", False, "a FIFO"),
        ("link", True, "a FIFO"),
        ("link", False, "a link"),
        ("device", False, "a link"),
        ("device", True, "a device"),
        ("folder", False, "a folder"),
    ):
        with pytest.raises(OSError, match=f"it is {what}, and not a plain file"):
            read_plain(tmp_path / name, links)
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/s")
        with pytest.raises(OSError, match="a socket"):
            read_plain(Path(short) / "s")


def test_a_file_with_holes_allocates_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(OSError, match=r"it says that it has 4,398.0 GB, and .* of memory are free"):
        read_plain(tmp_path / "holes")


def test_json_is_as_deep_as_it_may_be() -> None:
    fits = "[" * DEPTH + "]" * DEPTH
    assert str(read_json(fits)) == fits
    assert read_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for text in (f"[{fits}]", '{"a":' * (DEPTH + 1) + "1" + "}" * (DEPTH + 1), "[" * 1_000_000):
        with pytest.raises(ValueError, match=f"nested deeper than {DEPTH} levels"):
            read_json(text)
    with pytest.raises(ValueError, match="Expecting property name"):
        read_json("{]")
