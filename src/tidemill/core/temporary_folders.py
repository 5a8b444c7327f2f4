"""Folders of temporary files that name the process they are of, so that those of one that
was killed, and could not remove them, are known."""

import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from tidemill.core.errors import RunError
from tidemill.core.run_marks import lives, this_process

_PREFIX = "tidemill-of-"
_NAME = re.compile(rf"{_PREFIX}(\d+\.\d+\.\d+)-[a-z0-9_]{{8}}")


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for this process, which is removed as it ends. Raises `RunError`."""
    try:
        return tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{this_process()}-")
    except OSError as error:
        raise RunError(
            f"no folder of temporary files can be made: {error.strerror}; let the environment variable "
            "TMPDIR name a folder in which there is room and in which you may write"
        ) from None


def folders_left() -> list[Path]:
    """Return this user's folders whose processes are gone. Raises `OSError` where nobody
    could make one."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            about = path.lstat()
            own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            # a run of such a name may have its last weights there (`store/refuge.py`)
            kept = (path / "checkpoints").exists()
            if own and not kept and (name := _NAME.fullmatch(path.name)) and not lives(name[1]):
                found.append(path)
    return found
