"""Where a run's last checkpoint goes that its own folder does not take: a folder of
temporary files, from which the run can be gone on with."""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tidemill.core.private_files import private
from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.store.checkpoint import checkpoints

CONFIG, EXACT = "config.json", "exact_resume"
COPIED = (
    CONFIG, "source.json", "launcher.json", "versions.json", "layout.json", "episodes.json",
)  # fmt: skip
"""What a resumed run needs, or goes on with, of its folder: all but checkpoints, and what
may be large (`METRICS`)."""
METRICS = "metrics.jsonl"


def refuge_of(run: Path) -> Path:
    """Return the folder under ``$TMPDIR`` that stands in for that of `run`, whether it is
    there or not: the same for all who ask in one run, another one for another run that
    is made in the same place. It is asked for as the run starts, whose folder may be gone
    at its end. Raises `OSError`."""
    made = run.stat().st_ino, (run / "versions.json").stat().st_mtime_ns
    digest = sha256(f"{run.resolve()} {made}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tidemill-{run.name[:40]}-{digest}"


def make_refuge(refuge: Path) -> None:
    """Make the `refuge_of` a run, unless it is there. Raises `OSError`."""
    with suppress(FileExistsError):
        refuge.mkdir(mode=0o700)
    found = refuge.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "this folder is not the user's own", str(refuge))


def copy_of_run(run: Path, refuge: Path, policies: Collection[str], own: str) -> None:
    """Copy `COPIED` into a run's refuge, and the newest checkpoint of each of `policies`
    but the caller's `own`, which is about to be written: of a run whose folder is gone,
    or away, what can be read. Raises `OSError` where the refuge does not take it."""
    for name in COPIED:
        data = b""
        with suppress(OSError):
            data = (run / name).read_bytes()
        if data:
            with open(refuge / name, "wb", opener=private) as file:
                file.write(data)
    with suppress(FileNotFoundError):
        _without_cuts(refuge / CONFIG)
    for policy in policies:
        there, newest = refuge / "checkpoints" / policy, list[Path]()
        with suppress(OSError):
            newest = checkpoints(run / "checkpoints" / policy)[-1:]
        if policy != own and newest and newest[0].name not in {path.name for path in checkpoints(there)}:
            shutil.copytree(newest[0], there / newest[0].name, symlinks=True)


def copy_metrics(run: Path, refuge: Path) -> None:
    """Copy a run's metrics into its refuge, once its checkpoint is there; where they have
    no room, none of them."""
    try:
        with open(run / METRICS, "rb") as source, open(refuge / METRICS, "wb", opener=private) as file:
            shutil.copyfileobj(source, file)
    except OSError:
        (refuge / METRICS).unlink(missing_ok=True)


def _without_cuts(config: Path) -> None:
    """Let a run that resumes exactly go on with new episodes: its cuts are not there."""
    content = read_json(read_plain(config))
    if content.get(EXACT):
        with open(config, "wb", opener=private) as file:
            file.write(json.dumps({**content, EXACT: False}, indent=2).encode())


def abandon(refuge: Path) -> None:
    """Remove the user's own refuge where it holds no checkpoint, nor any that is being
    written."""
    if refuge.is_dir() and not any((refuge / "checkpoints").glob("*/*")):
        shutil.rmtree(refuge, ignore_errors=True)


def kept_in(refuge: Path) -> set[tuple[Path, int]]:
    """Return the checkpoints in a refuge, each with when it was written: an earlier life
    of the run may have left some there."""
    return {
        (path, path.stat().st_mtime_ns)
        for policy in (refuge / "checkpoints").glob("*")
        for path in checkpoints(policy)
    }
