"""The fence of a run: of several runners that have its folder, the newest one leads it,
and no other one writes there.

A start, a resume and a job that was queued again each take the run's next *epoch*: a file
of that name, which one of them can make and no other one. Locks are not relied on, which
many a network share does not keep. Who writes what others read (checkpoints, versions,
metrics, how the run ended) looks whether there is a higher epoch, right before it does.
Likewise of the lives of workers: one whose host is taken for lost may live on, and sees
the folder.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

from tidemill.core.errors import Overtaken
from tidemill.core.private_files import private, private_folder

EPOCHS = "epochs"
"""In a run's folder: an empty file per epoch, and one, "EPOCH.WORKER.LIFE", of each
worker that was begun anew after its host was lost."""
_held: dict[str, int] = {}  # epochs for which this process works, by the run's real path
_lives: dict[str, Mapping[str, int]] = {}  # and which lives of workers it is


def newest(run: Path) -> int:
    """Return the newest epoch that anybody has taken, 0 for none."""
    return _newest(_names(run))


def _newest(names: list[str]) -> int:
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _names(run: Path) -> list[str]:
    try:
        # a folder's names as a network share knows them now: opening it asks
        return os.listdir(run / EPOCHS)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _begun(names: list[str]) -> Iterator[tuple[str, int, str, int]]:
    """Yield each name that is of a life, its epoch, the worker, and the life."""
    for name in names:
        epoch, _, rest = name.partition(".")
        worker, _, life = rest.rpartition(".")
        if epoch.isdecimal() and life.isdecimal():
            yield name, int(epoch), worker, int(life)


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


def take_lives(run: Path, epoch: int, lives: Mapping[str, int]) -> None:
    """Have no life of these workers before the ones given write into a run's folder any
    more. Raises `OSError`."""
    private_folder(run / EPOCHS)
    before = _names(run)
    for worker, life in lives.items():
        open(run / EPOCHS / f"{epoch}.{worker}.{life}", "ab", opener=private).close()
    for name, of_epoch, worker, life in _begun(before):
        if of_epoch < epoch or life < lives.get(worker, 0):
            (run / EPOCHS / name).unlink(missing_ok=True)


def hold(run: str | Path, epoch: int, lives: Mapping[str, int] | None = None) -> None:
    """Work for this epoch of a run from now on, 0: for none, as these lives of
    workers."""
    _held[os.path.realpath(run)], _lives[os.path.realpath(run)] = epoch, lives or {}
    _run_of.cache_clear()


def let_go(run: Path) -> None:
    """Work for the run no more."""
    for known in (_held, _lives):
        known.pop(os.path.realpath(run), None)
    _run_of.cache_clear()


def epoch_of(path: Path) -> int:
    """Return the epoch for which this process writes to `path`, which lies in a run's
    folder; 0 for none."""
    return _run_of(path)[1]


def check(path: Path) -> None:
    """Raise `Overtaken` where a newer runner leads the run in whose folder `path` lies,
    or a later life of a worker has begun that this process is."""
    run, epoch = _run_of(path)
    names = _names(run) if epoch else []
    if (found := _newest(names)) > epoch:
        raise Overtaken(
            f"{run} is led by another runner, which began later (epoch {found}, this one's is {epoch}): a "
            "job that was queued again, or a resume elsewhere. This one ends, and has written nothing since; "
            "`tidemill status` on the other's host says how it does, and `tidemill stop` ends it there"
        )
    own = _lives.get(str(run), {})
    for _, of_epoch, worker, life in _begun(names):
        if of_epoch == epoch and life > own.get(worker, life):
            raise Overtaken(
                f"life {life + 1} of {worker} has begun elsewhere, since this one's host was taken for lost: "
                f"life {own[worker] + 1} writes nothing any more"
            )


@cache  # where a folder really lies is asked with each record
def _run_of(path: Path) -> tuple[Path, int]:
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if epoch := _held.get(str(folder), 0):
            return folder, epoch
    return real, 0
