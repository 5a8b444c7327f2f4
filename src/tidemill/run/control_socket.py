"""The run's socket: `tidemill pause|start|save|stop|status RUN` speak to it; from other
hosts they leave their orders in the folder (`control_folder.py`). Both ends of it belong
to one user.

On Linux it is an abstract unix socket, named by the folder's device and inode: nothing is
left behind however the run ends. Elsewhere it is a file in the run's folder, readable by
its owner alone.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tidemill.core.errors import RunError
from tidemill.metrics.json_lines import FILE as METRICS
from tidemill.metrics.json_lines import last_records
from tidemill.run.control_folder import ask, runner_elsewhere
from tidemill.run.folder import RunFolder

_NAME = "control.sock"
_LONGEST = 1 << 22  # bytes of an answer
_TIMEOUT = 10.0  # seconds that a command waits for the run's answer


class NoRun(RunError):
    """No run is going on in a folder."""


def _address(folder: Path) -> str:
    if not sys.platform.startswith("linux"):
        return str(folder / _NAME)
    found = folder.stat()
    return f"\0tidemill-{found.st_dev:x}-{found.st_ino:x}"


def _same_user(connection: socket.socket) -> bool:
    """An abstract name has no permissions: whoever is at the other end must be this user,
    or root."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user in (0, os.getuid())


class ControlSocket:
    """The run's end."""

    def __init__(self, folder: Path) -> None:
        address = _address(folder)
        self._path = None if address.startswith("\0") else Path(address)
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # the folder's lock is held: it is a dead run's
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address)
            if self._path is not None:
                # nobody connects before `listen`; the umask would be all threads'
                self._path.chmod(0o600)
        except OSError as error:
            self._socket.close()
            raise RunError(
                f"{folder}: its control socket cannot be made: {error.strerror}; name another folder with "
                "--run-dir"
            ) from None
        self._socket.listen(4)
        self._socket.setblocking(False)

    def commands(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the commands that have arrived, each with the connection to answer on
        (the caller answers with `reply`)."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # nobody, or no more files may be open
                return
            connection.settimeout(1.0)
            if not _same_user(connection):
                connection.close()
                continue
            try:
                yield connection.recv(64).decode(errors="replace").strip(), connection
            except OSError:
                connection.close()

    @staticmethod
    def reply(connection: socket.socket, text: str) -> None:
        """Answer and hang up; whoever asked may be gone."""
        with suppress(OSError):
            connection.sendall(text.encode())
        connection.close()

    def close(self) -> None:
        """Remove the socket."""
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _connect(connection: socket.socket, address: str) -> None:
    """Connect, once there is room: as many as may wait for the run may do so already.
    Raises `BlockingIOError` where there is none for `_TIMEOUT`."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.02)


def tell(folder: Path, command: str) -> str:
    """Send `command` to the run in `folder` and return its answer. Raises `NoRun` when
    nothing runs there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        try:
            _connect(connection, _address(folder))
            if not _same_user(connection):
                raise RunError(
                    f"{folder}: another user answers there; only the user who started a run may {command} it"
                )
            connection.sendall(command.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while len(answer) < _LONGEST and (part := connection.recv(1 << 16)):
                answer += part
            return answer.decode(errors="replace")
        except (FileNotFoundError, ConnectionError):  # there is none, or it has ended just now
            if host := runner_elsewhere(folder):
                return ask(folder, command, host)
            if RunFolder(folder).led():
                raise NoRun(
                    f"{folder}: its run is starting (its layout is measured, say), or ending, and takes no "
                    f"orders just now; {command} it in a moment, or end its runner by Ctrl-C"
                ) from None
            again = RunFolder(folder).how_to_go_on()
            cure = f"; go on with it by: {again}" if again else ""
            raise NoRun(f"{folder}: no run is going on there{cure}") from None
        except (TimeoutError, BlockingIOError):
            raise RunError(
                f"{folder}: the run did not answer within {_TIMEOUT:g} s: its main process hangs, or, where "
                "workers take turns in it (--launch inline), is in an update, or in an environment, that "
                f"takes long{_last_record(folder)}"
            ) from None


def _last_record(folder: Path) -> str:
    """Return what a run that does not answer has recorded last, and when, in words that
    go on from others; "" of one without."""
    with suppress(OSError, LookupError, ValueError):
        age = time.time() - (folder / METRICS).stat().st_mtime
        record = last_records(folder)[-1]
        updates = [f"{value:,.0f}" for name, value in record.items() if name.split("/")[-1] == "update"]
        known = f"update {updates[0]}" if updates else f"env step {record['step']:,.0f}"
        return f"; its last record, of {known}, is {age:,.0f} s old"
    return ""
