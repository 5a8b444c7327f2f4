"""Where a run's last checkpoint goes that its own folder does not take: a folder of
temporary files, from which the run can be gone on with."""

import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tidemill.core.private_files import private
from tidemill.store.checkpoint import checkpoints

COPIED = (
    "config.json", "source.json", "launcher.json", "versions.json", "layout.json", "episodes.json",
    "metrics.jsonl",
)  # fmt: skip
"""What a resumed run needs, or goes on with, of its folder: all but checkpoints."""


def refuge_of(run: Path) -> Path:
    """Return the folder under ``$TMPDIR`` that stands in for that of `run`, whether it is
    there or not: the same for all who ask in one run, another one for another run that
    is made in the same place."""
    made = run.stat().st_ino, (run / "versions.json").stat().st_mtime_ns
    digest = sha256(f"{run.resolve()} {made}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tidemill-{run.name[:40]}-{digest}"


def copy_of_run(run: Path, policies: Collection[str], own: str) -> Path:
    """Make the `refuge_of` a run, with copies of `COPIED` and of the newest checkpoint of
    each of `policies` but the caller's `own`, which is about to be written; return it.
    Raises `OSError`."""
    refuge = refuge_of(run)
    with suppress(FileExistsError):
        refuge.mkdir(mode=0o700)
    found = refuge.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "this folder is not the user's own", str(refuge))
    for name in COPIED:
        with suppress(FileNotFoundError):
            content = (run / name).read_bytes()
            with open(refuge / name, "wb", opener=private) as file:
                file.write(content)
    for policy in policies:
        there = refuge / "checkpoints" / policy
        newest = checkpoints(run / "checkpoints" / policy)[-1:]
        if policy != own and newest and newest[0].name not in {path.name for path in checkpoints(there)}:
            shutil.copytree(newest[0], there / newest[0].name, symlinks=True)
    return refuge
