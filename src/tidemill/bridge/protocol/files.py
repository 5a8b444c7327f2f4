"""The files of a bridge: where they lie, who owns them, and that none stays behind.

Beside the first memory file PATH lie two small ones that only peers of this kind know:
`PATH.trainer` and `PATH.simulator`. Each holds its owner's process id, and its owner
holds a lock (flock) on it, which the kernel gives back however the owner ends. So whoever
gets the lock knows that the other side is dead.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

from tidemill.bridge.protocol.image import layout_of
from tidemill.core.errors import ConfigError, ImageError, SimulatorError

TRAINER_SUFFIX, SIMULATOR_SUFFIX = ".trainer", ".simulator"
NEW_SUFFIX = ".new"  # of the first file, while it is being made
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = "tidemill-"
_YOUNG = 60.0  # seconds for which a folder without a lock may be one that is just being made
_MEMORY = Path("/dev/shm")  # memory that no disk is behind


def shared_folder() -> Path:
    """Return the folder in which simulators of other makes look, `ml-agents` in the
    temporary directory. Errors: ConfigError where that is none in which files can be
    made: Python would take another one, and a simulator would look in vain."""
    given = os.environ.get("TMPDIR")
    try:
        if given and not Path(tempfile.gettempdir()).samefile(given):
            tempfile.TemporaryFile(dir=given).close()  # somebody has chosen another one in this process
        return Path(tempfile.gettempdir(), "ml-agents")
    except OSError as error:
        where = f"TMPDIR = {given}" if given else "the temporary directory"
        raise ConfigError(
            f"no memory file can be made in {where}: {error.strerror or error}. Let the environment variable "
            "TMPDIR name a folder in which there is room and in which you may write, for the trainer and "
            "for the simulator alike"
        ) from None


def _file_error(folder: Path, error: OSError) -> str:
    """Return why nothing can be made in a folder, and what to do."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        cure = (
            "let the environment variable TMPDIR name a folder in which you may write, or take another path "
            "(memory_path)"
        )
        return f"{error.strerror}; {cure}"
    larger = ", make it larger (mount -o remount,size=1G /dev/shm; of a container: --shm-size=1g)" * (
        _MEMORY in (folder, *folder.parents)
    )
    return f"{error.strerror}; remove what is not needed in {folder.parent}{larger}, or lower max_agents"


def editor_path() -> Path:
    """Return the file at which an editor and its trainer meet."""
    return shared_folder() / "default"


def create_file(path: Path, size: int) -> mmap.mmap:
    """Make a file of zeros that only its owner may read, and map it. What has that name
    is removed, never followed."""
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, _NEW, 0o600)
    except OSError as error:
        raise SimulatorError(
            f"the memory file {path} cannot be made: {_file_error(path.parent, error)}"
        ) from None
    try:
        if hasattr(os, "posix_fallocate"):
            # where memory is short, an error here and not a crash at the first write
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink()
        raise SimulatorError(
            f"no room for {size} bytes in {path.parent}: {_file_error(path.parent, error)}"
        ) from None
    finally:
        os.close(descriptor)


def open_file(path: Path) -> mmap.mmap:
    """Map a file that the other side made."""
    try:
        descriptor = os.open(path, _OLD)
    except OSError as error:
        raise ImageError(f"the memory file {path} cannot be opened: {error.strerror}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or not about.st_size:
            raise ImageError(f"the memory file {path} is empty, or no plain file")
        return mmap.mmap(descriptor, about.st_size)
    except OSError as error:
        raise ImageError(
            f"the memory file {path} of {about.st_size} bytes cannot be mapped: {error.strerror}"
        ) from None
    finally:
        os.close(descriptor)


class Lock:
    """A companion file that its owner holds: it is there, and locked, for as long as the
    owner lives."""

    def __init__(self, path: Path) -> None:
        """Make it, in place of one whose owner is dead; BlockingIOError where a living
        one holds it, SimulatorError where it cannot be made."""
        self.path = path
        self._descriptor = -1
        try:
            while not self._make():
                pass
            os.write(self._descriptor, b"%d\n" % os.getpid())
        except (BlockingIOError, FileNotFoundError):
            raise
        except OSError as error:
            self.release()
            raise SimulatorError(f"{path} cannot be made: {_file_error(path.parent, error)}") from None

    def _make(self) -> bool:
        try:
            descriptor, new = os.open(self.path, _NEW, 0o600), True
        except FileExistsError:
            descriptor, new = os.open(self.path, _OLD), False
        try:
            _take(descriptor)
            with contextlib.suppress(FileNotFoundError):
                # nobody removed it in between
                ours = os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(descriptor))
                if ours and new:
                    self._descriptor = os.dup(descriptor)  # the lock is the copy's, too
                    return True
                if ours:
                    self.path.unlink()  # whoever watches a dead owner's file is to see that it is dead
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Remove it."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _take(descriptor: int) -> None:
    for pause in (0.01, 0.01, 0.0):  # others hold it for an instant when they look whether its owner lives
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not pause:
                raise
            time.sleep(pause)


class PeerWatch:
    """The other side's companion, to see whether its owner lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def find(cls, path: Path) -> "PeerWatch | None":
        """Return a watch of the companion at `path`; None where there is none."""
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _OLD)
            if os.fstat(descriptor).st_size:
                return cls(descriptor)
            os.close(descriptor)  # its owner is just about to lock it
        return None

    def alive(self) -> bool:
        """Whether its owner lives."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    @property
    def owner(self) -> str:
        """Its owner's process id, as text."""
        return os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip() or "?"

    def close(self) -> None:
        """Look no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Rendezvous:
    """Where a trainer and its simulator meet: the first memory file's `path`, held by
    this trainer until `leave`."""

    def __init__(self, path: Path, folder: Path | None) -> None:
        self.path = path
        self._folder = folder  # one of our own, removed with all that is in it
        try:
            self._lock = Lock(Path(f"{path}{TRAINER_SUFFIX}"))
        except BlockingIOError:
            owner = owner_of(Path(f"{path}{TRAINER_SUFFIX}")) or "?"
            raise ConfigError(
                f"another trainer (process {owner}) holds {path}; close it, or let one of the two meet its "
                "simulator at another file (memory_path)"
            ) from None
        if folder is None and not _replaceable(path):
            self._lock.release()
            raise ConfigError(
                f"{path} is no memory file, and would be replaced by one; meet at another one (memory_path), "
                "or remove it"
            )
        remove_memory(self.path)  # of a dead owner

    @classmethod
    def own(cls, layout_files: int) -> "Rendezvous":
        """Make a folder of our own for a simulator that this trainer starts; those of
        dead owners are removed."""
        root = (
            _MEMORY if layout_files == 1 and os.access(_MEMORY, os.W_OK | os.X_OK) else shared_folder().parent
        )
        if layout_files == 2:  # it looks in its own folder for a name
            root = shared_folder()
        prefix = f"{_FOLDER}{os.getuid()}-"
        _sweep(root, prefix)
        while True:
            folder = root / f"{prefix}{secrets.token_hex(6)}"
            try:
                root.mkdir(exist_ok=True)
                folder.mkdir(0o700)
            except OSError as error:
                raise ConfigError(
                    f"no folder for memory files can be made in {root}: {_file_error(root, error)}"
                ) from None
            try:
                return cls(folder / "memory", folder)
            except SimulatorError:
                folder.rmdir()
                raise
            except (ConfigError, FileNotFoundError):
                # another trainer, which looked for what the dead left, was quicker: it
                # has removed it
                continue

    @classmethod
    def at(cls, path: Path) -> "Rendezvous":
        """Meet at a given file, where an editor looks."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, None)
        except OSError as error:
            raise ConfigError(
                f"no memory file can be made at {path}: {_file_error(path.parent, error)}"
            ) from None

    @property
    def argument(self) -> str:
        """What a simulator is told after ``--memory-path``: the whole path, or the name
        in the shared folder, where it looks by itself."""
        shared = shared_folder()
        return str(self.path.relative_to(shared) if self.path.is_relative_to(shared) else self.path)

    def leave(self) -> None:
        """Remove all files."""
        remove_memory(self.path)
        self._lock.release()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def _replaceable(path: Path) -> bool:
    """Whether there is nothing at `path`, or a memory file."""
    if not path.is_file():
        return not os.path.lexists(path)
    try:
        with path.open("rb") as file:
            layout_of(file.read(64))
    except (OSError, ImageError):
        return False
    return True


def owner_of(path: Path) -> str | None:
    """Return the process id of a companion's owner, as text; None where there is none
    that lives."""
    watch = PeerWatch.find(path)
    if watch is None:
        return None
    owner = watch.owner if watch.alive() else None
    watch.close()
    return owner


def remove_memory(path: Path) -> None:
    """Remove the memory files that began at `path`, whatever they grew to or were going
    to be, and the simulator's companion. What a simulator has put in their place that is
    neither a file nor an empty folder stays."""
    for entry in path.parent.iterdir():
        rest = entry.name.removeprefix(path.name)
        if entry.name.startswith(path.name) and (
            not rest.strip("_") or rest in (SIMULATOR_SUFFIX, NEW_SUFFIX)
        ):
            with contextlib.suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def remove_dead(path: Path) -> None:
    """Remove the files of a trainer that died, as its simulator; where others may meet as
    well that is left to the next trainer."""
    if path.parent.name.startswith(_FOLDER):
        with contextlib.suppress(OSError):
            remove_memory(path)
            Path(f"{path}{TRAINER_SUFFIX}").unlink(missing_ok=True)
            path.parent.rmdir()  # which stays where anything else is in it: it was somebody's then


def folders_of_the_dead() -> list[Path]:
    """Return this user's folders of memory files whose trainers have died, wherever
    `Rendezvous.own` makes them. The next one there removes them."""
    found = (folder for root in _roots() for folder in root.glob(f"{_FOLDER}{os.getuid()}-*"))
    return [folder for folder in found if _is_of_the_dead(folder)]


def remove_folders_of_the_dead() -> None:
    """Remove what `folders_of_the_dead` returns."""
    for root in _roots():
        _sweep(root, f"{_FOLDER}{os.getuid()}-")


def _roots() -> list[Path]:
    """Return where `Rendezvous.own` makes folders."""
    roots = [_MEMORY]
    with contextlib.suppress(ConfigError):
        roots += [shared_folder().parent, shared_folder()]
    return list(dict.fromkeys(roots))


def _is_of_the_dead(folder: Path) -> bool | None:
    """Return whether a folder is that of a trainer that has died; None of one without a
    lock: it is just being made, or was not made to the end."""
    with contextlib.suppress(OSError):
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return False
        if (watch := PeerWatch.find(folder / f"memory{TRAINER_SUFFIX}")) is None:
            return None
        dead = not watch.alive()
        watch.close()
        return dead
    return False


def _sweep(root: Path, prefix: str) -> None:
    """Remove the folders of trainers that died."""
    for folder in root.glob(prefix + "*"):
        dead = _is_of_the_dead(folder)
        with contextlib.suppress(OSError, ConfigError, SimulatorError):  # ConfigError: it lives
            if dead:
                Rendezvous(folder / "memory", folder).leave()
            elif dead is None and time.time() - folder.lstat().st_mtime > _YOUNG:
                (folder / f"memory{TRAINER_SUFFIX}").unlink(missing_ok=True)
                folder.rmdir()
