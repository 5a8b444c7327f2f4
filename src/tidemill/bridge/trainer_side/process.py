"""The simulator's process: started, watched, ended, and what it last wrote."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidemill.core.errors import ConfigError, SimulatorError
from tidemill.core.killed_processes import await_end

_LINES, _LINE_BYTES = 30, 2000  # of its output are kept
_READING = 3.0  # seconds that what it wrote has for being read, once it has ended
_QUIET = 0.2  # seconds without anything to read after which nothing more is waited for
_ENDING = 5.0  # seconds that the kernel has for its end, on a busy machine
_EXITING = 4  # the flag of a process that is ending, in /proc/PID/stat (PF_EXITING)
# Waits for the end of its input, which nobody writes to: it comes when the process that
# holds the other end is gone, however it went. What ends by itself then has time for it.
# (A signal at the parent's death, PR_SET_PDEATHSIG, comes when the thread ends that
# started a simulator.)
_GUARD = 'read _; sleep 2; kill -TERM "-$1" && sleep 2 && kill -KILL "-$1"'


class SimulatorProcess:
    """An executable that was started; its output goes nowhere, but its end is kept for
    errors. Where this process is killed it is ended, too, and what it started itself: a
    small shell beside it sees to that.
    """

    def __init__(
        self, path: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        check_executable(path)
        try:
            self._process = subprocess.Popen(
                [os.path.abspath(path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is ours to handle, and what it starts itself ends with it
            )
        except OSError as error:
            raise SimulatorError(
                f"{path} cannot be run: {error.strerror}. Does a script name its interpreter in its first "
                "line (#!)?"
            ) from None
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._reader = threading.Thread(target=self._read, name=f"output of {path.name}", daemon=True)
        self._reader.start()
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", str(self._process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C, or a kill of our whole group, is not to end it
            )
        except OSError as error:
            self.end()
            raise SimulatorError(
                f"a process that looks after {path} cannot be started: {error.strerror}"
            ) from None

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            while line := stream.readline(_LINE_BYTES):
                self._lines.append(line)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Return its exit code, negative where a signal ended it; None while it runs."""
        return self._process.poll()

    def ended(self, seconds: float = 0.0) -> str | None:
        """Return how it ended, as part of a sentence; None where it still runs after so
        many seconds, and is not just ending."""
        code = self._await(seconds)
        if code is None:
            return None
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def output(self, seconds: float = 0.0) -> str:
        """Return the end of its output, as the last part of an error; all of it that
        there is once it has ended, for which this waits so long."""
        if self._await(seconds) is not None:
            self._read_out()
        text = b"".join(self._lines).decode(errors="replace").strip()
        return f". The end of its output:\n{text}" if text else ". It wrote nothing"

    def _await(self, seconds: float) -> int | None:
        for limit in (seconds, _ENDING):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(limit)
            if not self._ends():
                break
        return self._process.poll()

    def _ends(self) -> bool:
        """True where the kernel is at its end."""
        try:
            told = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return bool(int(told[6]) & _EXITING)

    def _read_out(self) -> None:
        """Let all that it wrote be read. Something that it started itself may still hold
        the pipe."""
        until = time.monotonic() + _READING
        while self._reader.is_alive() and time.monotonic() < until:
            empty = not self._unread()
            self._reader.join(_QUIET)
            if empty and not self._unread():
                break

    def _unread(self) -> int:
        """Return how many bytes wait to be read."""
        stream, count = self._process.stdout, array("i", [0])
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # it was closed
            fcntl.ioctl(stream.fileno(), termios.FIONREAD, count)
        return count[0]

    def unguard(self) -> None:
        """Have it left alone where this process is killed."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.kill()
            await_end(self._guard, "the process that looks after a simulator")
            self._guard.stdin.close()
            self._guard = None

    def end(self) -> None:
        """End it where it has not ended, and whatever it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await_end(self._process, "the simulator")
        self.unguard()
        self._reader.join(1.0)


def command_of(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the executable, and its first arguments, that a simulator's path stands for:
    FILE.py is run by this Python, FILE.exe by Mono."""
    if not path.endswith((".py", ".exe")):
        return path, ()
    if not Path(path).is_file():
        raise ConfigError(f'there is no file "{path}"')
    if path.endswith(".py"):
        return sys.executable, (path,)
    mono = shutil.which("mono")
    if mono is None:
        raise ConfigError(f'"{path}" needs Mono, which is not installed: apt-get install mono-runtime')
    return mono, (path,)


def check_executable(path: Path) -> None:
    """Raise ConfigError where there is nothing to run."""
    if not path.exists():
        raise ConfigError(f"there is no simulator at {path}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the executable in it")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path} is not executable; is it the simulator? If so: chmod +x {path}")
