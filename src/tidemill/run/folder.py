"""A run's folder: what was asked for, what happened, and what can be gone on from.

config.json      the experiment, resolved
source.json      the experiment's own file
versions.json    of Python, packages, machine, git
launcher.json    what launched it last
layout.json      how it was laid out, and why
placement.json   on several hosts: which worker stands on which
memory.json      what it takes, as planned when it began
metrics.jsonl    of updates (and TensorBoard events)
logs/            what workers printed, tracebacks
checkpoints/     POLICY/update-N
faults/          TRAINER/update-N, ACTOR/step-N: what led to what was not finite
epochs/          which runner leads it (`store/fence.py`)
parameters/      the parameter database
episodes.json    the last ones before its checkpoints
summary.json     how it ended
"""

import fcntl
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from heapq import nlargest
from pathlib import Path
from time import monotonic, sleep, strftime
from typing import Any, NamedTuple

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.core.config import brought_up_to_date, check_name, decode, encode
from tidemill.core.errors import ConfigError, Overtaken, RunError, TidemillError
from tidemill.core.private_files import private, private_folder
from tidemill.core.resource_shortage import cause_of, why
from tidemill.core.secrets import check_revealed, hide, known
from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.core.user_code_loading import expect, load_file, own_code
from tidemill.run.source_info import installed, source_file, versions
from tidemill.run.trust import Trust, allow, links, named, remember
from tidemill.store.checkpoint import checkpoints
from tidemill.store.database_locks import BUSY
from tidemill.store.fence import check, let_go, take
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase

CONFIG = "config.json"
EPISODES = "episodes.json"
LAUNCHER = "launcher.json"
MEMORY = "memory.json"
PLACES = "placement.json"
SOURCE = "source.json"
SUMMARY, VERSIONS = "summary.json", "versions.json"
RUNS = Path("runs")  # where new ones are made
LONGEST = 60  # characters of their names, but for the number of those of the same second
MOMENT = 0.5  # seconds for which a lock is waited for that others hold for an instant


class OpenedRun(NamedTuple):
    """A run's experiment, the file that its own classes come from, and the digests of all
    files that it may run, by path."""

    experiment: Experiment
    source: Path | None
    files: dict[str, str]


class RunFolder:
    """The folder of one run. `lock` keeps two runs from sharing it.

    epoch: the run's that `lead` has taken, 0 before
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        self._lock = -1
        # by `create`, for `discard`; the run's own folder first, then those above it
        self._made: list[Path] = []
        self._found: set[Path] = set()

    @classmethod
    def create(cls, path: Path | None, experiment: Experiment, source: Path | None) -> "RunFolder":
        """Make a new run's folder, None: one under ./runs that nobody else has, lock it
        and write what is known at the start. Raises `RunError` when it is taken or cannot
        be written."""
        content = encode(experiment)  # raises for what is no plain data, before anything is made
        wanted = path or Path("runs")
        try:
            name = wanted.resolve().name
        except FileNotFoundError:
            raise RunError(
                f"{wanted} cannot be made: the working directory was removed; go to another one, or give "
                "--run-dir from the root on"
            ) from None
        if path is not None:
            check_name("run", name)
            cls(path)._refuse_taken(experiment)
        folder = cls(wanted)
        try:
            if path is None:
                folder.path = path = new_folder(experiment)
                folder._made = [path, path.parent]
            else:
                folder._made = private_folder(path)
            folder._found = set(path.iterdir())
            folder.lock()
            folder._refuse_taken(experiment)  # again: by somebody who was quicker
            folder.lead()
            if not folder._found:
                path.chmod(0o700)
            folder.write_experiment(experiment, source)
            folder.write(VERSIONS, versions(known(content)))
        except RunError:
            folder.unlock()
            raise
        except OSError as error:
            if path is not None:
                folder.discard()
            raise RunError(
                f"run folder {folder.path} cannot be written: {why(error)}; name another with --run-dir"
            ) from None
        return folder

    def _refuse_taken(self, experiment: Experiment) -> None:
        path = self.path
        if (path / CONFIG).exists():
            other = self.experiment_name()
            if other != experiment.name:
                raise RunError(
                    f'{path} holds a run of another experiment ("{other}", not "{experiment.name}"); name '
                    "another folder with --run-dir"
                )
            if self._lock < 0 and self.led():
                raise self._written_by_another()
            again = self.how_to_go_on()
            going = f"go on with it by: {again}, " if again else "it has no checkpoint to go on from: "
            raise RunError(
                f"{path} already holds a run; {going}start anew by --anew (in Python anew=True), which puts "
                "it aside, or name another folder with --run-dir"
            )
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file, not a folder; name another with --run-dir")

    def discard(self, keep: Sequence[str] = ()) -> None:
        """Remove all that was made since `create`, but for what is called so: the run
        never began. Raises `Overtaken` where it is another runner's by now."""
        check(self.path)
        kept = self._found | {self.path / name for name in keep}
        for path in set(self.path.iterdir()) - kept if self.path.is_dir() else ():
            with suppress(OSError):  # a disk that became read-only: what is said is why the run ended
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.unlock()
        with suppress(OSError):
            for path in self._made:
                path.rmdir()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that was. Raises `RunError` when there is none, or
        it cannot be looked into."""
        if not holds_run(path):
            runs = sorted(str(p.parent) for p in path.glob(f"*/{CONFIG}"))[:5] if path.is_dir() else []
            hint = f"; there are runs in it: {', '.join(runs)}" if runs else ""
            if not path.exists():
                raise RunError(
                    f"{path} is not a run's folder: there is none (one that failed as it began keeps none)"
                )
            raise RunError(f"{path} is not a run's folder (it has no {CONFIG}){hint}")
        return cls(path)

    def from_root(self) -> None:
        """Name the folder from the root on: an environment may take this process to
        another working directory (`os.chdir`)."""
        self.path = self.path.absolute()
        self._made = [path.absolute() for path in self._made]
        self._found = {path.absolute() for path in self._found}

    def lock(self) -> None:
        """Hold the folder while this process lives, however it ends. Raises `RunError`
        when another run does."""
        # the folder itself: no file to leave behind
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"run folder {self.path} cannot be locked: {why(error)}; let yourself read it"
            ) from None
        until = monotonic() + MOMENT  # who only looks (`led`) has it for an instant
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic() < until:
                    sleep(0.01)
                    continue
                self.unlock()
                raise self._written_by_another() from None
            except OSError:
                return  # a network share without such locks: whoever comes later leads the run

    def _written_by_another(self) -> RunError:
        stop = f"{command()} stop {self.path}"
        return RunError(f"{self.path} is being written by another run; stop it with: {stop}")

    def led(self) -> bool:
        """True while a runner has the folder locked; False also where a network share
        keeps no locks."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(folder)
        return False

    def lead(self) -> None:
        """Take the run's next epoch: from now on nobody else writes into the locked
        folder. Raises `RunError`."""
        try:
            self.epoch = take(self.path)
        except OSError as error:
            self.unlock()
            cure = "free the disk, or let yourself write there"
            if isinstance(error, NotADirectoryError):
                cure = "a folder belongs there: move that file elsewhere"
            raise RunError(f"run folder {self.path} cannot be written: {cause_of(error)}; {cure}") from None

    def unlock(self) -> None:
        """Let others have the folder."""
        let_go(self.path)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def tidy(self) -> None:
        """Remove what writers that were killed left aside. The folder is locked and no
        worker lives. What another process keeps locked is left to the next time."""
        for path in (
            *self.path.glob(".*.json.*"),
            *self.path.glob("metrics*.tmp"),
            *self.path.glob("checkpoints/*/.update-*"),
            *self.path.glob("cuts/*/.update-*"),
            *self.path.glob("faults/*/.*-*"),
        ):
            if re.fullmatch(r"\..+\.json\.\d+|metrics(\.csv)?\.tmp|\.(update|step)-\d+\.\d+", path.name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(TidemillError):  # what is wrong with it is said to whoever uses it
            self.database(MOMENT).tidy()

    def database(self, patience: float = BUSY) -> ParameterDatabase:
        """Return the run's parameter database; `patience`: seconds that a call waits for
        another process's lock."""
        return ParameterDatabase(self.path / PARAMETERS, patience)

    def write(self, name: str, content: Any) -> None:
        """Write plain data as JSON, aside and renamed. Raises `Overtaken`."""
        aside = self.path / f".{name}.{os.getpid()}"
        try:
            with open(aside, "wb", opener=private) as file:
                file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            check(self.path)
            aside.rename(self.path / name)
        except Overtaken:
            aside.unlink(missing_ok=True)
            raise
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            error.filename = str(self.path / name)  # a write that fails names no file by itself
            raise

    def write_experiment(self, experiment: Experiment, source: Path | None) -> None:
        """Write down the experiment and its own file, and note all that it names as what
        this user has had done."""
        self.write(CONFIG, hide(encode(experiment)))
        if source is not None:
            self.write(SOURCE, {"file": str(source)})
        remember(named(self.read(CONFIG), source))

    def read(self, name: str) -> Any:
        """Return the plain data in one of the folder's JSON files."""
        try:
            return read_json(read_plain(self.path / name))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None

    def launcher(self, known: Collection[str]) -> str:
        """Return which of the `known` launchers the run was launched by last; "processes"
        where nobody wrote it down, as earlier versions did not."""
        content = self.read(LAUNCHER) if (self.path / LAUNCHER).exists() else {"launcher": "processes"}
        name = content.get("launcher") if isinstance(content, dict) else None
        if not isinstance(name, str):
            raise RunError(f"{self.path / LAUNCHER} does not name a launcher; say one with --launch")
        if name not in known:
            raise RunError(
                f'the run was launched by "{name[:100]}", which is not one of Tidemill\'s launchers '
                f"({', '.join(known)}); say it again with --launch"
            )
        return name

    def logged(self, known: Collection[str], usual: str) -> list[str]:
        """Return which of the `known` metric sinks the run wrote to last; the `usual` one
        where nobody wrote that down, as earlier versions did not."""
        content = self.read(LAUNCHER) if (self.path / LAUNCHER).exists() else {}
        names = content.get("log", [usual]) if isinstance(content, dict) else [usual]
        return [name for name in names if name in known] if isinstance(names, list) else [usual]

    def experiment_name(self) -> str:
        """Return the name of the experiment in the folder."""
        content = self.read(CONFIG)
        return str(content.get("name")) if isinstance(content, dict) else "?"

    def _source(self, config: Any, file: Path | None) -> Path | None:
        """Return the file that the experiment came from, or `file` when it is given:
        unless the configuration names that one as another's."""
        recorded: Path | None = None
        with suppress(RunError) if file is not None else nullcontext():
            recorded = self._recorded()
        if file is not None and (
            recorded is None or file == recorded or str(file) not in named(config).files
        ):
            return file
        if recorded is not None and not recorded.is_file():
            raise RunError(
                f"{recorded}, which defined this run, is gone; say which file to use with --file FILE.py"
            )
        return recorded

    def _recorded(self) -> Path | None:
        """Return what source.json says."""
        if not (self.path / SOURCE).exists():
            return None
        content = self.read(SOURCE)
        try:
            return None if content["file"] is None else Path(str(content["file"])).resolve()
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{self.path / SOURCE} does not name a file; say which with --file FILE.py"
            ) from None

    def experiment(
        self,
        file: str | Path | None = None,
        trust: Trust = False,
        *,
        environments: bool = True,
        writes: bool = False,
    ) -> OpenedRun:
        """Return the run's experiment, once the user's word allows what the folder names:
        `file` is the word for that one alone, `trust` for all.

        What was looked at is then what this process runs (`core.user_code.expect`).
        Without `environments` none is built of it; where the caller `writes` into the
        folder, its links count, too. Raises `Untrusted`, and `RunError` for what cannot
        be read.
        """
        config, file = self.read(CONFIG), source_file(Path(file)) if file is not None else None
        source = self._source(config, file)
        found = named(config, source, environments)
        found.things += links(self.path) if writes else []
        allow(self.path, found, trust, own_code([file] if file is not None else []))
        if environments:
            check_revealed(config)
        expect(found.files)
        if source is not None:
            load_file(source, "--file")
        try:
            content, told = brought_up_to_date(config)
            for text in told:
                print(f"note: {self.path / CONFIG}: {text}", file=sys.stderr)
            return OpenedRun(decode(Experiment, content), source, found.files)
        except ConfigError as error:
            raise RunError(f"{self.path / CONFIG}: {error}{self._begun_by_another()}") from None

    def _begun_by_another(self) -> str:
        """Return by which version of Tidemill the run was begun, "" if by this one, or if
        that is not known: to follow a message."""
        own, other = installed("tidemill"), None
        with suppress(RunError, KeyError, TypeError):
            other = self.read(VERSIONS)["packages"]["tidemill"]
        if not isinstance(other, str) or other == own:
            return ""
        return f" (the run was begun by Tidemill {other:.20}, and this is {own})"

    def checkpoints(self, policy: str) -> Path:
        """Return the folder of a policy's checkpoints."""
        return self.path / "checkpoints" / policy

    def has_checkpoints(self, policies: Iterable[str]) -> bool:
        """True when there is one of each of these policies, so that the run can go on."""
        return all(checkpoints(self.checkpoints(policy)) for policy in policies)

    def how_to_go_on(self) -> str:
        """Return what to type to go on with the run; "" where it has no checkpoint, or
        none that may be read."""
        written = False
        with suppress(OSError):
            written = any(map(checkpoints, self.path.glob("checkpoints/*")))
        if not written:
            return ""
        summary: Any = None
        with suppress(RunError):
            summary = self.read(SUMMARY)
        complete = isinstance(summary, dict) and summary.get("status") == "completed"
        return f"{command()} resume {as_typed(self.path)}{' --max-steps N' * complete}"


def holds_run(path: Path) -> bool:
    """Return whether there is a run in the folder `path`. Raises `RunError` where that
    cannot be looked into."""
    try:
        return (path / CONFIG).is_file()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; let yourself read it, or look whether its disk, or "
            "share, is there"
        ) from None


def command() -> str:
    """Return what to type here for ``tidemill``: it need not be on the PATH."""
    if shutil.which("tidemill"):
        return "tidemill"
    script = Path(sys.executable or "python").with_name("tidemill")
    if not script.is_file():
        return "python -P -m tidemill.cli.entry"
    return shlex.quote(as_typed(script))


def as_typed(path: Path) -> str:
    """Return a path as one would type it here: without the working directory where it
    lies in that (and that is still there)."""
    with suppress(OSError, ValueError):
        return str(Path(os.path.abspath(path)).relative_to(Path.cwd()))
    return str(path)


def new_folder(experiment: Experiment) -> Path:
    """Make a folder under ./runs that nobody else has, also who asks at the same time,
    and return it. Raises `OSError`."""
    stem = f"{_begin(experiment)}{strftime('%Y%m%d-%H%M%S')}"[:LONGEST]
    path, number = RUNS / stem, 1
    while path not in private_folder(path):
        number += 1
        path = RUNS / f"{stem}-{number}"
    return path


def newest_folders(experiment: Experiment, most: int) -> list[Path]:
    """Return the newest folders, so many at most, that are called as `new_folder` calls
    those of this experiment's name and seed."""
    begin, names = _begin(experiment)[:LONGEST], list[str]()
    with suppress(OSError):
        names = [name for name in os.listdir(RUNS) if name.startswith(begin)]
    return [RUNS / name for name in nlargest(most, names)]


def _begin(experiment: Experiment) -> str:
    return f"{experiment.name}-s{experiment.seed}-"
