"""Checkpoints on disk: a folder of safetensors files and a manifest with their checksums,
written aside and renamed.

A checkpoint is whole or it is not there: files are written into a hidden folder and
synced, the manifest last, and the folder renamed. Names sort by number, and a folder
without a valid manifest is never taken for a checkpoint. One of the same name is renamed
first (`REPLACED`) and removed last: where a writer is killed between, it still counts.
Those of a newer epoch of the run count as newer, whatever their numbers (`fence.py`).
Records of faults (`workers/fault_records.py`) are written, numbered and removed likewise.
One that is undone, since its run has gone back behind it, is put aside (`LATER`) until
the run has come as far again: what it went back to might turn out to be damaged.

A disk, or a network share, may hang without an error: each is written in a thread, and
given up where that does not come back. What it has written then never gets its name, but
where it was about to be renamed: that one is whole, and comes late. Until it is back
nothing else is written into that run's folder.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.core.errors import CheckpointError, NewerCheckpoint, Overtaken, SchemaError
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.core.private_files import private, private_folder
from tidemill.core.resource_shortage import why
from tidemill.core.safetensors_io import pack, unpack
from tidemill.core.schema import Array, Arrays
from tidemill.core.untrusted_files import open_plain, read_json, read_plain
from tidemill.store.fence import check, epoch_of

MANIFEST = "manifest.json"
REPLACED = "replaced"
LATER = "later-"
MOST_LATER = 4  # that are put aside in a folder, the newest ones
AWAY = "the run's folder was removed or renamed, or its disk is away"
PATIENCE = 8.0
"""Seconds that a piece of a checkpoint may take to be written: a disk, or share, that
takes longer hangs. A signal leaves a run 18 s."""
PIECE = 1 << 23
"""Bytes of a piece."""
PACKED = 10_000_000
"""Bytes that are packed in memory in a second, if need be."""
FILLING = 3600.0
"""Seconds that a folder of a checkpoint may take to be filled: a replay memory may be
tens of GB."""
FORMAT = 1
ENDED = "ended"
"""What checkpoints in a run of several policies have among their facts: the epoch in a
policy's last one, 0 in those before."""
_hanging = dict[str, FolderThread]()  # by the run's folder: what was given up there
STEP = "step"
"""What records of an actor are called by; those of a trainer are by their update, as
checkpoints are."""


def checkpoint_name(update: int) -> str:
    """Return the name of the checkpoint after `update` finished updates."""
    return f"update-{update}"


def step_name(number: int) -> str:
    """Return the name of an actor's record of a fault."""
    return f"{STEP}-{number}"


def _place(path: Path) -> tuple[int, bool]:
    """Return a checkpoint's number, -1 for what is none, and whether it is not the one
    that was replaced: so those of an epoch sort by age."""
    head, _, number = path.stem.rpartition("-")
    named = head in ("update", STEP) and number.isdecimal() and path.suffix in ("", f".{REPLACED}")
    return int(number) if named else -1, not path.suffix


def write_checkpoint(
    folder: Path,
    name: str,
    arrays: Mapping[str, Mapping[str, Array]],
    facts: Mapping[str, Any],
    keep: int,
    folders: Mapping[str, Callable[[Path], None]] | None = None,
    spared: Callable[[], Collection[str]] = tuple,
) -> Path:
    """Write ``folder/name`` with one file per entry of `arrays`, a folder per entry of
    `folders`, whose files that function writes, and `facts` (plain data) in its manifest;
    then remove all but the newest `keep` and those whose names `spared` returns, and what
    was put aside of as far as this one.

    Raises `CheckpointError` (with the folder and the system's reason) when it cannot be
    written, also since the disk does not answer, and `Overtaken`; the checkpoints before
    it stay.
    """
    run, target = str(folder.parent.parent), folder / name
    for other, hung in _hanging.copy().items():  # what they were about to write is held in memory
        if not hung.busy:
            _hanging.pop(other, None)
    thread = _hanging.get(run) or FolderThread(folder, PATIENCE)
    try:
        return thread.do(lambda: _write(thread, target, arrays, facts, keep, folders or {}, spared))
    except Unanswered as error:
        raise CheckpointError(
            f"checkpoint {target} cannot be written: {error.strerror}, and nothing more is written there "
            "until it does; look whether its server, or device, is well"
        ) from None
    finally:
        if thread.busy:
            _hanging[run] = thread
        thread.close()


def hangs(run: Path) -> bool:
    """Return whether a checkpoint in a run's folder was given up, since its disk, or
    share, did not answer, and still does not."""
    thread = _hanging.get(str(run))
    return thread is not None and thread.hangs


def _write(
    thread: FolderThread,
    target: Path,
    arrays: Mapping[str, Mapping[str, Array]],
    facts: Mapping[str, Any],
    keep: int,
    folders: Mapping[str, Callable[[Path], None]],
    spared: Callable[[], Collection[str]],
) -> Path:
    """See `write_checkpoint`. It is called in `thread`, and stops where nobody waits for
    it any more."""
    folder, name = target.parent, target.name
    aside = folder / f".{name}.{os.getpid()}"
    try:
        check(folder)
        if not folder.parent.parent.is_dir():  # else a folder would be made that is no run's
            raise FileNotFoundError(errno.ENOENT, AWAY)
        for place in (folder.parent, folder):
            private_folder(place)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        sums = {}
        for file, content in arrays.items():
            thread.go_on(sum(array.nbytes for array in content.values()) / PACKED)
            data = pack(content)
            sums[f"{file}.safetensors"] = write_synced(aside / f"{file}.safetensors", data, thread.go_on)
        for inner, write in folders.items():
            thread.go_on(FILLING)
            (aside / inner).mkdir(mode=0o700)
            write(aside / inner)
            sums |= {f"{inner}/{file.name}": _digest(file) for file in _synced(aside / inner)}
        thread.go_on()
        manifest = {"format": FORMAT, "epoch": epoch_of(folder), "facts": dict(facts), "sha256": sums}
        write_synced(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
        replaced = target.with_name(f"{name}.{REPLACED}")
        check(folder)
        thread.go_on()  # from here on it counts, although nobody may wait for it any more
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        aside.rename(target)
        sync(folder)
        _remove(replaced)
    except (Overtaken, CheckpointError, Unanswered):  # or what writes a folder has said what it was
        shutil.rmtree(aside, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {target} cannot be written: {why(error)}; free space or make the folder writable"
        ) from None
    try:
        if surplus := checkpoints(folder)[:-keep]:
            stay = spared()
            for old in surplus:
                thread.go_on()
                if old.name not in stay:
                    _remove(old)
    except Unanswered:
        raise
    except OSError:  # it is written, and the disk away since: they go with the next one
        return target
    for number, later in _later(folder):
        if number <= _place(target)[0]:
            _remove(later)
    return target


def put_aside(paths: Iterable[Path]) -> None:
    """Put aside checkpoints that are undone. What has the new name is of the same number,
    at which the run was before. Raises `OSError`."""
    folders = set()
    for path in paths:
        aside = path.with_name(f"{LATER}{path.name}")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        folders.add(path.parent)
    for folder in folders:
        for _, old in _later(folder)[:-MOST_LATER]:
            _remove(old)


def _later(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints that were put aside, and their numbers, in that order; also
    those of which a part was removed."""
    names = {path: path.name.removeprefix(LATER) for path in folder.glob(f"{LATER}update-*")}
    return sorted((number, path) for path, name in names.items() if (number := _place(Path(name))[0]) >= 0)


def _remove(path: Path) -> None:
    """Remove a checkpoint, if it is there, aside: what a writer that is killed meanwhile
    leaves of it is for whoever resumes to tidy up."""
    if path.exists():
        aside = path.with_name(f".{path.stem.removeprefix(LATER)}.{os.getpid()}")
        with suppress(OSError):  # the folder is not writable any more
            path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first: in the order of epochs, and in numeric
    order within one. One whose manifest cannot be read counts as of the newest, so that
    it is passed over with a word."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if _place(p)[0] >= 0 and (p / MANIFEST).exists())
    epochs = {path: _epoch(path) for path in found}
    newest = max((epoch for epoch in epochs.values() if epoch is not None), default=0)
    return sorted(epochs, key=lambda path: (newest if epochs[path] is None else epochs[path], *_place(path)))


def _epoch(path: Path) -> int | None:
    """Return the epoch in which a checkpoint was written, 0 where it does not say; None
    where its manifest cannot be read."""
    with suppress(OSError, ValueError):
        manifest = read_json(read_plain(path / MANIFEST))
        if isinstance(manifest, dict):
            epoch = manifest.get("epoch")
            return epoch if type(epoch) is int else 0
    return None


def read_checkpoint(path: Path) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Return (arrays by file name, facts). Files in folders are checked, and left to
    whoever wrote them.

    Raises `CheckpointError` when a file is missing, torn or altered, and
    `NewerCheckpoint`.
    """
    try:
        if path.is_symlink():
            raise CheckpointError(
                f"checkpoint {path} is a link; put the folder itself there, or name where it leads"
            )
        manifest = read_json(read_plain(path / MANIFEST))
        if (number := manifest["format"]) != FORMAT:
            text = f"checkpoint {path} has format {number!r:.20}; this version of Tidemill reads {FORMAT}"
            if type(number) is not int or number < FORMAT:
                raise CheckpointError(text)
            raise NewerCheckpoint(
                f"{text}: a newer one has written it. Go on with that; or move this checkpoint away, and the "
                "one before is the newest"
            )
        arrays: dict[str, Arrays] = {}
        for file, checksum in manifest["sha256"].items():
            inner, _, plain = file.rpartition("/")
            if Path(plain).name != plain or Path(inner).name != inner or ".." in (inner, plain):
                raise CheckpointError(f'checkpoint {path} names "{file}", which lies elsewhere')
            if inner:
                if _digest(path / file) != checksum:
                    raise CheckpointError(f"checkpoint file {path / file} is damaged (its checksum differs)")
                continue
            data = read_plain(path / file)
            if sha256(data).hexdigest() != checksum:
                raise CheckpointError(f"checkpoint file {path / file} is damaged (its checksum differs)")
            arrays[file.removesuffix(".safetensors")] = unpack(data)[0]
        if not isinstance(manifest["facts"], dict):
            raise CheckpointError(
                f"the manifest of checkpoint {path} says no facts, but {manifest['facts']!r}"
            )
        return arrays, manifest["facts"]
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error.filename}: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, SchemaError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from None


class FoundCheckpoint(NamedTuple):
    """A checkpoint as it was read: arrays by file name, and facts; `warnings` for newer
    ones that had to be passed over."""

    path: Path
    arrays: dict[str, Arrays]
    facts: dict[str, Any]
    warnings: list[str]


def read_newest(folder: Path) -> FoundCheckpoint:
    """Return the newest readable checkpoint.

    Raises `CheckpointError` when there is none: never silently from scratch; and
    `NewerCheckpoint`.
    """
    warnings: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return FoundCheckpoint(path, *read_checkpoint(path), warnings)
        except NewerCheckpoint:
            raise
        except CheckpointError as error:
            warnings.append(str(error))
    raise CheckpointError(
        f"no readable checkpoint in {folder}: {'; '.join(warnings) or 'there is none'}. To train anew: the "
        "command that began it, with --anew"
    )


def readable(folder: Path) -> Iterator[FoundCheckpoint]:
    """Yield the readable checkpoints, the newest first. Raises `NewerCheckpoint`."""
    for path in reversed(checkpoints(folder)):
        try:
            yield FoundCheckpoint(path, *read_checkpoint(path), [])
        except NewerCheckpoint:
            raise
        except CheckpointError:
            continue


def write_synced(path: Path, data: bytes, go_on: Callable[[], None] = lambda: None) -> str:
    """Write a new file that only its owner may read, and have it on the disk; return its
    checksum. `go_on` is called before each piece."""
    digest, whole = sha256(), memoryview(data)
    with open(path, "xb", opener=private) as file:
        for start in range(0, max(len(data), 1), PIECE):
            go_on()
            piece = whole[start : start + PIECE]
            digest.update(piece)
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest()


def sync(folder: Path) -> None:
    """Have a folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _synced(folder: Path) -> list[Path]:
    """Return the files of a folder, once they are on the disk."""
    files = sorted(folder.iterdir())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync(folder)
    return files


def _digest(path: Path) -> str:
    with open_plain(path) as file:
        return file_digest(file, "sha256").hexdigest()
