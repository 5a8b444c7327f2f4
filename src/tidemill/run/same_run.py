"""A run's folder that is named again: the same run goes on where that cannot be a
mistake, and starting anew needs a word, which puts the old one aside."""

import hashlib
import os
from pathlib import Path
from time import strftime
from typing import Any

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.core.config import encode
from tidemill.core.errors import RunError
from tidemill.core.resource_shortage import why
from tidemill.core.secrets import hide
from tidemill.run.folder import LAUNCHER, SUMMARY, RunFolder, as_typed, holds_run, newest_folders

GIVEN = "given"
"""In the file of how it was launched: a digest of what was asked for."""
LOOKED_AT = 5
"""Folders under ./runs, the newest ones, in which an unfinished run is looked for."""


def digest_of(experiment: Experiment, source: Path | None, layout: str) -> str:
    """Return a digest of what `train` was asked for: the experiment as it was given, its
    file, the layout's name."""
    code = "" if source is None else hashlib.sha256(source.read_bytes()).hexdigest()
    asked = [hide(encode(experiment)), None if source is None else str(source), code, layout]
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()


def asked_before(folder: RunFolder) -> dict[str, Any]:
    """Return what the folder says of what was asked for, {} where it says nothing: an
    earlier version wrote it, or its limits were changed since."""
    try:
        content = folder.read(LAUNCHER)
    except RunError:
        return {}
    known = content.get(GIVEN) if isinstance(content, dict) else None
    return {GIVEN: known} if isinstance(known, str) else {}


def unfinished(path: Path, experiment: Experiment, digest: str) -> str:
    """Return how the run in `path` ended, in words, where it is the one that is asked for
    and has not come to its end: "" where it is none, another one, has failed or is
    complete, or has no checkpoint to go on from."""
    folder = RunFolder(path)
    if not holds_run(path) or asked_before(folder) != {GIVEN: digest}:
        return ""
    return cut_short(folder) if folder.has_checkpoints(experiment.trained()) else ""


def left_unfinished(experiment: Experiment, digest: str) -> str:
    """Return a sentence for who begins a run that has no folder yet, where the newest one
    under ./runs with this very run, and with something to go on from, is unfinished, and
    nobody goes on with it; else ""."""
    for path in newest_folders(experiment, LOOKED_AT):
        folder = RunFolder(path)
        if asked_before(folder) != {GIVEN: digest} or not folder.has_checkpoints(experiment.trained()):
            continue
        ended = "" if folder.led() else unfinished(path, experiment, digest)
        return (
            f"{as_typed(path)} has this very run, which was {ended}; to go on with it: "
            f"{folder.how_to_go_on()}. This is a new one"
            if ended
            else ""
        )
    return ""


def cut_short(folder: RunFolder) -> str:
    """Return how the run in `folder` ended before its end: "killed" or "interrupted"; ""
    where it is complete or has failed."""
    try:
        summary = folder.read(SUMMARY) if (folder.path / SUMMARY).exists() else {"status": "killed"}
    except RunError:
        return ""
    status = summary.get("status") if isinstance(summary, dict) else None
    return status if status in ("killed", "interrupted") else ""


def put_aside(path: Path) -> Path | None:
    """Rename the run in `path`, so that another one may begin there. Return where it is
    now; None where there is none. Raises `RunError` where it is going on, or cannot be
    renamed."""
    if not holds_run(path):
        return None
    folder = RunFolder(path)
    folder.lock()
    folder.lead()
    try:
        whole = path.absolute() if path.is_symlink() else path.resolve()  # of a link, the link
        stem = f"{whole.name[:40]}-until-{strftime('%Y%m%d-%H%M%S')}"
        aside, number = whole.with_name(stem), 1
        while os.path.lexists(aside):
            number += 1
            aside = whole.with_name(f"{stem}-{number}")
        whole.rename(aside)
    except OSError as error:
        raise RunError(
            f"{as_typed(path)} cannot be put aside: {why(error)}; name another folder with --run-dir"
        ) from None
    finally:
        folder.unlock()
    return aside
