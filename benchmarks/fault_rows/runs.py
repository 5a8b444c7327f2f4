"""Runs of the experiments beside this file, as a user starts them, and all that they say,
hold and leave."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from fault_rows.taken import FOLDER, TAKEN

from tidemill.core.errors import RunError
from tidemill.launchers.worker_process import SPARE
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import control_socket
from tidemill.run.events import Event, read_events
from tidemill.store.checkpoint import FoundCheckpoint, checkpoints, read_newest

EXPERIMENTS = Path(__file__).with_name("experiments.py")
PATIENCE = 60.0  # seconds after which what does not come counts as never
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class BrokenPromise(Exception):
    """What should have followed from a fault did not."""


control_socket._TIMEOUT = 0.5  # seconds: what does not answer is asked again


def begin(group: Path | None) -> None:
    """In the new process of a run: hear signals as in a terminal, whoever started this (a
    shell's background job is born deaf to some), and join a control group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


class Run:
    """A run in `path`, by one of the launchers; all else of it is in `folder`. The
    experiment is one beside this file, or FILE.py:NAME.

    before: words before the commands of its main process
    variables: of that, besides this process's own
    """

    before: Sequence[str] = ()
    variables: Mapping[str, str] = {}

    def __init__(
        self, experiment: str, launch: str, folder: Path, path: Path, group: Path | None, *words: str
    ) -> None:
        self.folder, self.path, self.launch, self._group = folder, path, launch, group
        (folder / "faults" / TAKEN).mkdir(parents=True)
        (folder / "config").mkdir()
        (folder / "tmp").mkdir()
        words = words if "--log" in words else (*words, "--log", "")
        words = words if "--layout" in words else (*words, "--layout", "given")
        file, _, name = experiment.rpartition(":")
        self._start("train", f"{file or EXPERIMENTS}:{name}", "--launch", launch, "--run-dir", str(self.path),
                    *words)  # fmt: skip

    def _start(self, *words: str) -> None:
        variables = {**self.variables, FOLDER: str(self.folder / "faults")}
        variables["TMPDIR"] = str(self.folder / "tmp")
        variables["XDG_CONFIG_HOME"] = str(self.folder / "config")
        with (self.folder / "output.txt").open("ab") as output:
            self.main = subprocess.Popen(
                [*self.before, sys.executable, "-m", "tidemill.cli.main", *words], stdout=output,
                stderr=output, env={**os.environ, **variables}, start_new_session=True,
                preexec_fn=lambda: begin(self._group),
            )  # fmt: skip

    def resume(self) -> None:
        """Go on with it, once its main process is gone."""
        self.main.wait(PATIENCE)
        self._start("resume", str(self.path))

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def wait_for(
        self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE, alive: bool = True
    ) -> Any:
        """Wait until something holds, and return what that is; `alive`: the main process
        must not have ended before."""
        until = time.monotonic() + seconds
        while not (found := holds()):
            if alive and self.main.poll() is not None:
                if found := holds():
                    break
                raise BrokenPromise(f"the run ended before this: {what}: {self.output[-400:]}")
            if time.monotonic() > until:
                raise BrokenPromise(f"not within {seconds:.0f} s: {what}: {self.output[-400:]}")
            time.sleep(0.005)
        return found

    def wait_for_updates(self, more: int = 1) -> None:
        """Wait for so many records of updates after those that there are."""
        wanted = self.records() + more
        self.wait_for(lambda: self.records() >= wanted, "updates")

    def records(self) -> int:
        """Return how many lines of metrics there are."""
        with suppress(OSError):
            return (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def newest(self) -> dict[str, float]:
        """Return the newest record of an update."""
        with suppress(OSError):
            for line in reversed((self.path / "metrics.jsonl").read_bytes()[-20_000:].splitlines()):
                with suppress(ValueError):
                    if "update" in (record := json.loads(line)):
                        return dict(record)
        return {}

    def status(self) -> dict[str, Any]:
        """Return what the run tells of itself, {} where it does not answer."""
        with suppress(RunError, OSError, msgspec.DecodeError):
            return dict(msgspec.json.decode(control_socket.tell(self.path, "status")))
        return {}

    def events(self, what: str, text: str = "", since: float = 0.0) -> list[Event]:
        """Return what happened of one kind, whose cause says so."""
        return [
            event
            for event in read_events(self.path)
            if event.what == what and event.time >= since and re.search(text, event.cause)
        ]

    def event(self, what: str, text: str = "", since: float = 0.0, seconds: float = PATIENCE) -> Event:
        """Wait for such an event, and return the first."""
        found = self.wait_for(lambda: self.events(what, text, since), f"{what}: {text}", seconds)
        return found[0]  # type: ignore[no-any-return]

    def suffer(self, fault: str) -> float:
        """Have whoever takes faults take this one, and return when it happened."""
        (self.folder / "faults" / fault).touch()
        happened = self.folder / "faults" / TAKEN / fault
        self.wait_for(happened.exists, f"{fault} happens")
        at = happened.stat().st_mtime
        happened.unlink()
        return at

    def checkpoint(self) -> FoundCheckpoint:
        """Return the newest checkpoint that is whole."""
        (folder,) = (self.path / "checkpoints").iterdir()
        return read_newest(folder)

    def checkpoints(self) -> list[Path]:
        """Return all of them, the oldest first."""
        return checkpoints(self.path / "checkpoints" / "policy")

    def end(self, seconds: float = PATIENCE) -> int:
        """Tell the run to end, and return its exit status."""
        self.main.send_signal(signal.SIGTERM)
        return self.ended(seconds)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Wait for its end, and return its exit status."""
        try:
            return self.main.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BrokenPromise(f"it did not end within {seconds:.0f} s: {self.output[-400:]}") from None

    def updates_told(self) -> list[int]:
        """Return the numbers of all updates that have a record."""
        return [int(record["update"]) for record in read_metrics(self.path) if "update" in record]

    def kill(self) -> None:
        """Leave nothing, whatever the run was."""
        for process in [psutil.Process(pid) for pid in marked(self.folder) if psutil.pid_exists(pid)]:
            with suppress(psutil.Error):
                process.kill()
        self.main.wait()


@contextmanager
def run_of(experiment: str, launch: str, *words: str, **places: Path) -> Iterator[Run]:
    """A run that has begun to train. It is told to end, if it has not, and must leave
    nothing."""
    with started(experiment, launch, *words, **places) as run:
        run.wait_for_updates()
        yield run


@contextmanager
def started(
    experiment: str, launch: str, *words: str, path: Path | None = None, group: Path | None = None
) -> Iterator[Run]:
    """A run that was started just now, in a folder of its own, or in `path`, and in a
    control group. It is told to end, if it has not, and must leave nothing."""
    with tempfile.TemporaryDirectory(prefix="tidemill-faults-") as name:
        run = Run(experiment, launch, Path(name), path or Path(name) / "run", group, *words)
        try:
            yield run
            if run.main.poll() is None:
                run.end()
            until = time.monotonic() + PATIENCE
            while (left := run_leaves(run)) and time.monotonic() < until:
                time.sleep(0.05)
            if left:
                raise BrokenPromise(f"it left {left}")
        finally:
            run.kill()


def run_leaves(run: Run) -> str:
    """Return what a run that is over has left, in words."""
    found = [f"{len(pids)} processes"] if (pids := marked(run.folder)) else []
    files = [path.name for path in (run.folder / "tmp").iterdir()]
    files += [
        path.name
        for path in (run.path.rglob("*") if run.path.exists() else ())
        if path.is_socket() or path.name.startswith(".") or path.name.endswith((".tmp", "-journal"))
    ]
    return ", ".join([*found, *files])


def marked(folder: Path) -> list[int]:
    """Return the processes, this one aside, whose variables or words name a folder of
    temporary files, or one within it."""
    named, found = os.fsencode(folder), []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if b") Z " in (process / "stat").read_bytes():
                continue
            if named in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def left_behind(folder: Path) -> str:
    """Return how much a run has left whose folder of temporary files is `folder`."""
    files = [path.name for path in folder.iterdir() if path.name not in ("run", "output.txt")]
    return f"{len(marked(folder))} processes, {len(files)} files"


def processes(main: int) -> dict[str, psutil.Process]:
    """Return the worker processes of a run, by the names of their logs. The main process
    has other children, too, such as one that waits for the next life."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(main).children():
            with suppress(OSError):
                if (log := Path(os.readlink(f"/proc/{process.pid}/fd/1"))).suffix == ".log":
                    found[log.stem] = process
    return found


def wait_for_spare(run: Run) -> None:
    """Wait until a process waits for the next life of whoever dies."""

    def waits() -> bool:
        with suppress(psutil.NoSuchProcess):
            return any(child.name() == SPARE for child in psutil.Process(run.main.pid).children())
        return False

    run.wait_for(waits, "a spare process")
    time.sleep(2.0)  # it has what it needs by then
