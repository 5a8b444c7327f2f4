"""What has run out is said, with what mends it."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidemill.core.resource_shortage import why


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_what_has_run_out_is_named_with_its_cure() -> None:
    for number, cure in (
        (errno.EAGAIN, "ulimit -u"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOMEM, "make lanes"),
    ):
        assert why(error(number)).startswith(f"{os.strerror(number)}: no ") and cure in why(error(number))
    assert "no more processes or threads" in why(RuntimeError("can't start new thread"))


def test_where_no_inode_is_left_space_is_not_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))
    assert why(full) == "No space left on device"
    # the last one makes inodes of what space is free: of none
    for files, left, free, said in (
        (1000, 0, 5, True),
        (0, 0, 5, False),
        (1000, 7, 5, False),
        (1000, 0, 0, False),
    ):
        facts = SimpleNamespace(f_files=files, f_favail=left, f_bavail=free)
        monkeypatch.setattr(os, "statvfs", lambda folder, facts=facts: facts)
        assert ("no inode is left (df -i)" in why(full)) is said


def test_all_else_is_what_it_says() -> None:
    assert why(error(errno.ENOSPC)) == "No space left on device"
    assert (why(RuntimeError("odd")), why(ValueError("bad")), why(OSError("plain"))) == (
        "odd",
        "bad",
        "plain",
    )


LIMITED = """
import os, resource
from tidemill.core.memory import MemfdSegment
from tidemill.core.resource_shortage import why
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    MemfdSegment(os.memfd_create("test")).create(20_000)
except OSError as error:
    print(why(error))
"""


def test_a_limit_of_files_is_one_of_shared_memory_and_told_in_bytes() -> None:
    said = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True).stdout
    assert (
        said
        == "File too large: no file or piece of shared memory may be larger (the limit is 10,000 bytes); "
        "raise it: ulimit -f unlimited\n"
    )
