"""Runs as a user starts them, and everything that they hold: processes (orphans too),
descriptors, files."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest

EXPERIMENTS = Path(__file__).with_name("experiments.py")
MARK = "TIDEMILL_TEST_RUN"
SLOWER = dict.fromkeys(("cartpole", "equal"), ("--set", "workers.trainer.algorithm.seconds=0.02"))
"""What has a run that is only to go on leave the processor to others."""


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll until it is true; fail after so many seconds. What is dear to look at, such
    as all processes of the machine, is looked at less often."""
    deadline = time.monotonic() + seconds
    used = time.thread_time()
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(min(max(0.005, 4 * (time.thread_time() - used)), 0.1))
        used = time.thread_time()


def _hear_signals() -> None:
    """As in a terminal, whoever started the tests: a child of nohup, or of a shell's
    background job, is born deaf to some."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes with this mark of a test in their variables, or, as a decimal
    fraction, among their arguments."""
    own, bare, found = f"{MARK}={mark}".encode(), f"0.{int(mark, 16)}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, psutil.Error):  # of a zombie there is nothing to read
            variables, words = ((place / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
            if own in variables or bare in words:
                found.append(psutil.Process(int(place.name)))
    return found


class Run:
    """`tidemill train` of one of EXPERIMENTS, in a session of its own (a terminal's
    foreground group) and an empty folder. `code` is run before the command begins."""

    def __init__(
        self, folder: Path, function: str, *arguments: str, launch: str = "processes", code: str = ""
    ) -> None:
        words = (f"{EXPERIMENTS}:{function}", "--run-dir", "run", "--launch", launch)
        words += (*SLOWER.get(function, ()), *arguments)
        command = f"from tidemill.cli.main import app\n{code}\napp()"
        self._start(folder, *(("-c", command) if code else ("-m", "tidemill.cli.main")), "train", *words)

    def _start(self, folder: Path, *command: str, **environment: str) -> None:
        self.path, self.temporary = folder / "run", folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.output = (folder / "output.txt").open("w+b")
        environment |= {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.main = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=self.output, stderr=self.output,
            start_new_session=True, preexec_fn=_hear_signals,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """Everything that this run started, also what lost its parent, or (`BareDaemon`)
        its variables; itself included while it lives."""
        return processes_of(self.mark)

    def wait_for_worker(self, name: str) -> psutil.Process:
        """Return a worker's process, as soon as there is one."""
        found: list[psutil.Process] = []

        def look() -> bool:
            assert self.main.poll() is None, self.ended()
            found[:] = [p for p in psutil.Process(self.main.pid).children() if worker_name(p) == name]
            return bool(found)

        wait_until(look, 60, f"{name} starts")
        return found[0]

    def wait_for_updates(self) -> None:
        self.wait_for_file(self.path / "metrics.jsonl", "the first update")

    def wait_for_file(self, path: Path, what: str) -> None:
        """Wait until there is something in a file (or it is a flag), while the run goes
        on."""

        def look() -> bool:
            assert self.main.poll() is None, self.ended()
            return path.exists() and (path.suffix == "" or path.stat().st_size > 0)

        wait_until(look, 120, what)

    def ended(self, seconds: float = 120.0) -> tuple[int, str]:
        """Return exit status and output. Everything is gone by then."""
        try:
            status = self.main.wait(seconds)
        finally:
            for process in self.processes():
                if self.main.poll() is None:
                    process.kill()
            self.output.seek(0)
        text = self.output.read().decode()
        self.output.close()
        return status, text

    def nothing_is_left(self, seconds: float = 60.0) -> None:
        """Also of one that was killed, but for what was being written aside then: that
        goes with the next start."""
        wait_until(lambda: not self.processes(), seconds, "no process of the run is left")
        if self.main.returncode == -signal.SIGKILL and self.path.exists():
            RunFolder(self.path).tidy()
        left = [*self.temporary.iterdir(), *leftovers(self.path)]
        assert not left, f"{left} are left"

    def summary(self) -> Any:
        return RunFolder(self.path).read("summary.json")

    def signal_group(self, number: int) -> None:
        os.killpg(self.main.pid, number)

    def kill_all(self) -> None:
        """For a test that failed: leave nothing to the others."""
        for process in self.processes():
            with suppress(psutil.Error):  # it ends by itself, with the main process
                process.send_signal(signal.SIGKILL)
        self.main.wait()


def ended_well(folder: Path, status: str, reason: str) -> None:
    """A complete summary, and a final checkpoint of the last update."""
    summary = RunFolder(folder).read("summary.json")
    assert {
        "status",
        "env_steps",
        "seconds",
        "steps_per_second",
        "updates",
        "mean_return",
        "episodes",
        "dropped",
    } <= set(summary)
    assert (summary["status"], reason in summary["reason"]) == (status, True), summary
    path, arrays, facts, warnings = read_newest(folder / "checkpoints" / "policy")
    assert (
        warnings == []
        and path.name == f"update-{summary['updates']}"
        and facts["steps"] == summary["env_steps"]
    )
    assert (arrays["policy"]["w"] == summary["updates"]).all()
    assert leftovers(folder) == []


def worker_name(process: psutil.Process) -> str:
    """Return which worker a process is: its output goes to the log of that name."""
    return log_of(process).stem


def workers_of(main: int) -> dict[str, psutil.Process]:
    """Return the worker processes of a run by the names of their logs: the main process
    has other children, too, such as one that waits for the next life."""
    children = psutil.Process(main).children()
    return {log.stem: child for child in children if (log := log_of(child)).suffix == ".log"}


def log_of(process: psutil.Process) -> Path:
    """Return where a process's output goes."""
    try:
        return Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    except OSError:
        return Path()


def leftovers(folder: Path) -> list[Path]:
    """Return sockets and half-written things in a run's folder."""
    return [
        p
        for p in folder.rglob("*")
        if p.is_socket() or p.name.startswith(".") or p.name.endswith((".tmp", "-journal"))
    ]


def check_versions(folder: Path) -> int:
    """Check that every version in the run's parameter database is whole, and none of a
    half-done update (each update adds 1 to the weights). Return how many there are."""
    database = RunFolder(folder).database()
    versions = database.versions("policy")
    for version in versions:
        assert (database.load("policy", version.version)[0]["w"] == version.version).all()
    assert set(database.tags("policy").values()) <= {version.version for version in versions}
    return len(versions)


def links(pid: int) -> Iterator[str]:
    """Yield what a process's descriptors point to."""
    for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            yield os.readlink(descriptor)
        except OSError:
            continue


def segments(pid: int) -> int:
    """Return the number of shared-memory segments of streams that a process holds (a
    mapping keeps a descriptor of its own)."""
    segments = {link for link in links(pid) if "memfd:tidemill" in link}
    return len({link for link in segments if "memfd:tidemill stacks" not in link})


def bells(pid: int) -> int:
    """Return the number of eventfds and pidfds that a process holds."""
    return sum("eventfd" in link or "pidfd" in link for link in links(pid))
