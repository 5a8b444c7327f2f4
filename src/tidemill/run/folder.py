"""A run's folder: what was asked for, what happened, and what can be gone on from.

config.json      the experiment, resolved            versions.json    of Python, packages, machine, git
source.json      the files behind it, SHA-256        metrics.jsonl    of updates (and TensorBoard events)
checkpoints/     POLICY/update-N                     summary.json     how it ended
parameters/      the parameter database
logs/            what workers printed, tracebacks      memory.json      what it takes, as planned when it began
layout.json      how it was laid out, and why            episodes.json    the last ones before its checkpoints
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import strftime
from typing import Any

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.core.checkpoint import checkpoints
from tidemill.core.config import check_name, decode, encode, without_retired
from tidemill.core.errors import ConfigError, RunError, TidemillError
from tidemill.core.private import private, private_folder
from tidemill.core.source import file_digest, load_file, named_files
from tidemill.core.versions import PARAMETERS, ParameterDatabase
from tidemill.run.provenance import Source, versions

CONFIG, EPISODES, MEMORY, SOURCE = "config.json", "episodes.json", "memory.json", "source.json"
SUMMARY, VERSIONS = "summary.json", "versions.json"


class RunFolder:
    """The folder of one run. `lock` keeps two runs from sharing it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._made: list[Path] = []  # by `create`, for `discard`; the run's own folder first, then those above it
        self._found: set[Path] = set()

    @classmethod
    def create(cls, path: Path | None, experiment: Experiment, source: Source | None) -> "RunFolder":
        """Make a new run's folder, None: one under ./runs that nobody else has, lock it and write what is known at the start. Raises `RunError` when
        it is taken or cannot be written."""
        content = encode(experiment)  # raises for what is no plain data, before anything is made
        if path is not None:
            check_name("run", path.resolve().name)
            cls(path)._refuse_taken(experiment)
        folder = cls(path or Path("runs"))
        try:
            if path is None:
                folder.path = path = new_folder(experiment)
                folder._made = [path, path.parent]
            else:
                folder._made = private_folder(path)
            folder._found = set(path.iterdir())
            folder.lock()
            folder._refuse_taken(experiment)  # again: by somebody who was quicker
            if not folder._found:
                path.chmod(0o700)
            folder.write(CONFIG, content)
            folder.write(VERSIONS, versions())
            folder.write_source(source, content)
        except OSError as error:
            if path is not None:
                folder.discard()
            raise RunError(f"run folder {folder.path} cannot be written: {error.strerror}; name another with --run-dir") from None
        return folder

    def _refuse_taken(self, experiment: Experiment) -> None:
        path = self.path
        if (path / CONFIG).exists():
            other = self.experiment_name()
            if other != experiment.name:
                raise RunError(f'{path} holds a run of another experiment ("{other}", not "{experiment.name}"); name another folder with --run-dir')
            raise RunError(f"{path} already holds a run; go on with it by: {command()} resume {path}, or name another folder with --run-dir")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file, not a folder; name another with --run-dir")

    def discard(self, keep: str = "") -> None:
        """Remove all that was made since `create`, but for what is called `keep`: the run never began."""
        for path in set(self.path.iterdir()) - self._found - {self.path / keep} if self.path.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.unlock()
        with suppress(OSError):
            for path in self._made:
                path.rmdir()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that was. Raises `RunError` when there is none."""
        if not (path / CONFIG).is_file():
            runs = sorted(str(p.parent) for p in path.glob(f"*/{CONFIG}"))[:5] if path.is_dir() else []
            hint = f"; there are runs in it: {', '.join(runs)}" if runs else ""
            raise RunError(f"{path} is not a run's folder (it has no {CONFIG}){hint}")
        return cls(path)

    def lock(self) -> None:
        """Hold the folder while this process lives, however it ends. Raises `RunError` when another run does."""
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the folder itself: no file to leave behind
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise RunError(f"{self.path} is being written by another run; stop it with: {command()} stop {self.path}") from None
        except OSError:
            pass  # a network share without such locks: nothing keeps two runs apart there

    def unlock(self) -> None:
        """Let others have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def tidy(self) -> None:
        """Remove what writers that were killed left aside. The folder is locked and no worker lives."""
        for path in (*self.path.glob(".*.json.*"), *self.path.glob("metrics.tmp"), *self.path.glob("checkpoints/*/.update-*")):
            if re.fullmatch(r"\..+\.json\.\d+|metrics\.tmp|\.update-\d+\.\d+", path.name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(TidemillError):  # what is wrong with it is said to whoever uses it
            self.database().tidy()

    def database(self) -> ParameterDatabase:
        """Return the run's parameter database."""
        return ParameterDatabase(self.path / PARAMETERS)

    def write(self, name: str, content: Any) -> None:
        """Write plain data as JSON, aside and renamed."""
        aside = self.path / f".{name}.{os.getpid()}"
        try:
            with open(aside, "wb", opener=private) as file:
                file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            aside.rename(self.path / name)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            error.filename = str(self.path / name)  # a write that fails names no file by itself
            raise

    def write_source(self, source: Source | None, config: Any) -> None:
        """Write down the files behind a run as they are now: its own, and those that its encoded configuration names."""
        named = {name: file_digest(Path(name)) for name in named_files(config) if Path(name).is_file()}
        if source is not None or named:
            self.write(SOURCE, {"file": source and source.file, "sha256": source and source.sha256, "named": named})

    def read(self, name: str) -> Any:
        """Return the plain data in one of the folder's JSON files."""
        try:
            return json.loads((self.path / name).read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name} cannot be read: {error}") from None

    def experiment_name(self) -> str:
        """Return the name of the experiment in the folder."""
        content = self.read(CONFIG)
        return str(content.get("name")) if isinstance(content, dict) else "?"

    def source(self, file: Path | None = None) -> Source | None:
        """Return the file that the experiment came from, or `file` when it is given.

        Raises `RunError` when the recorded one has changed, or when the configuration names code (``FILE.py:NAME``) that has changed or was never
        recorded; giving a file accepts it as it is.
        """
        try:
            recorded, digests = self._recorded()
        except RunError:
            if file is None:
                raise
            recorded, digests = None, {}
        accepted = file.resolve() if file is not None else None
        if recorded is not None:
            digests = {recorded.file: recorded.sha256, **digests}
        known = {Path(name).resolve(): digest for name, digest in digests.items()}
        named = [Path(name).resolve() for name in named_files(self.read(CONFIG))]
        for path in named:
            if path.is_file() and path != accepted and file_digest(path) != known.get(path):
                raise RunError(
                    f"{self.path / CONFIG} names code in {path}, which "
                    + ("has changed since the run" if path in known else "the run never recorded")
                    + "; look into the file, then restore it or accept it with --file FILE.py"
                )
        if file is not None and (recorded is None or accepted not in named or _is(recorded, accepted)):
            return Source.of(file)
        if recorded is not None and (not Path(recorded.file).is_file() or file_digest(Path(recorded.file)) != recorded.sha256):
            raise RunError(f"{recorded.file}, which defined this run, has changed or is gone; say which file to use with --file FILE.py")
        return recorded

    def _recorded(self) -> tuple[Source | None, dict[str, str]]:
        """Return what source.json says: the experiment's own file, and the digests of others by path. Older ones lack the others."""
        if not (self.path / SOURCE).exists():
            return None, {}
        content = self.read(SOURCE)
        try:
            named = {str(name): str(digest) for name, digest in content.get("named", {}).items()}
            return None if content["file"] is None else Source(str(content["file"]), str(content["sha256"])), named
        except (KeyError, TypeError, AttributeError):
            raise RunError(f"{self.path / SOURCE} does not name a file; say which with --file FILE.py") from None

    def experiment(self, file: Path | None = None) -> tuple[Experiment, Source | None]:
        """Return the run's experiment, and the file that its own classes come from."""
        source = self.source(file)
        if source is not None:
            load_file(Path(source.file), "--file")
        try:
            content, told = without_retired(self.read(CONFIG))
            for text in told:
                print(f"note: {self.path / CONFIG}: {text}", file=sys.stderr)
            return decode(Experiment, content), source
        except ConfigError as error:
            raise RunError(f"{self.path / CONFIG}: {error}") from None

    def checkpoints(self, policy: str) -> Path:
        """Return the folder of a policy's checkpoints."""
        return self.path / "checkpoints" / policy

    def has_checkpoints(self, policies: Iterable[str]) -> bool:
        """True when there is one of each of these policies, so that the run can go on."""
        return all(checkpoints(self.checkpoints(policy)) for policy in policies)


def _is(source: Source | None, path: Path | None) -> bool:
    return source is not None and Path(source.file).resolve() == path


def command() -> str:
    """Return what to type here for ``tidemill``: it need not be on the PATH."""
    if shutil.which("tidemill"):
        return "tidemill"
    script = Path(sys.executable or "python").with_name("tidemill")
    if not script.is_file():
        return "python -m tidemill.cli.main"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))


def new_folder(experiment: Experiment) -> Path:
    """Make a folder under ./runs that nobody else has, also who asks at the same time, and return it. Raises `OSError`."""
    stem = f"{experiment.name}-s{experiment.seed}-{strftime('%Y%m%d-%H%M%S')}"[:60]
    path, number = Path("runs") / stem, 1
    while path not in private_folder(path):
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path
