"""The fence of a run: of several runners that have its folder, the newest one leads it,
and no other one writes there.

A start, a resume and a job that was queued again each take the run's next *epoch*: a file
of that name, which one of them can make and no other one. Locks are not relied on, which
many a network share does not keep. Who writes what others read (checkpoints, versions,
metrics, how the run ended) looks whether there is a higher epoch, right before it does.
"""

import os
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

from tidemill.core.errors import Overtaken
from tidemill.core.private_files import private, private_folder

EPOCHS = "epochs"
"""In a run's folder: an empty file per epoch."""
_held: dict[str, int] = {}  # epochs for which this process works, by the run's real path


def newest(run: Path) -> int:
    """Return the newest epoch that anybody has taken, 0 for none."""
    try:
        # a folder's names as a network share knows them now: opening it asks
        names = os.listdir(run / EPOCHS)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def taken_at(run: Path) -> float:
    """Return when the newest epoch was taken, in seconds since 1970, inf where nobody
    knows."""
    try:
        return (run / EPOCHS / str(newest(run))).stat().st_mtime
    except OSError:
        return inf


def take(run: Path) -> int:
    """Take the run's next epoch for this process, and return it. Raises `OSError`."""
    private_folder(run / EPOCHS)
    epoch = newest(run)
    while True:
        epoch += 1
        with suppress(FileExistsError):
            open(run / EPOCHS / str(epoch), "xb", opener=private).close()
            hold(run, epoch)
            return epoch


def hold(run: str | Path, epoch: int) -> None:
    """Work for this epoch of a run from now on; 0: for none."""
    _held[os.path.realpath(run)] = epoch
    _run_of.cache_clear()


def let_go(run: Path) -> None:
    """Work for the run no more."""
    _held.pop(os.path.realpath(run), None)
    _run_of.cache_clear()


def epoch_of(path: Path) -> int:
    """Return the epoch for which this process writes to `path`, which lies in a run's
    folder; 0 for none."""
    return _run_of(path)[1]


def check(path: Path) -> None:
    """Raise `Overtaken` where a newer runner leads the run in whose folder `path`
    lies."""
    run, epoch = _run_of(path)
    if epoch and (found := newest(run)) > epoch:
        raise Overtaken(
            f"{run} is led by another runner, which began later (epoch {found}, this one's is {epoch}): a "
            "job that was queued again, or a resume elsewhere. This one ends, and has written nothing since; "
            "`tidemill status` on the other's host says how it does, and `tidemill stop` ends it there"
        )


@cache  # where a folder really lies is asked with each record
def _run_of(path: Path) -> tuple[Path, int]:
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if epoch := _held.get(str(folder), 0):
            return folder, epoch
    return real, 0
