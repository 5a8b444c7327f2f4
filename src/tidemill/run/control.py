"""The run's socket: `tidemill pause|start|stop RUN` speak to it. A unix socket in the run's folder, readable by its owner alone."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.core.errors import RunError

COMMANDS = ("pause", "start", "stop")
_NAME = "control.sock"
_TIMEOUT = 10.0  # seconds that a command waits for the run's answer


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a path to the socket that is short enough for the system's limit (about 100 characters)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)


class ControlSocket:
    """The run's end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._path.unlink(missing_ok=True)  # the folder's lock is held: it is a dead run's
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with _address(folder) as address:
                self._socket.bind(address)
        finally:
            os.umask(mask)
        self._socket.listen(4)
        self._socket.setblocking(False)

    def commands(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the commands that have arrived, each with the connection to answer on (the caller answers with `reply`)."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            connection.settimeout(1.0)
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
        self._path.unlink(missing_ok=True)


def tell(folder: Path, command: str) -> str:
    """Send `command` to the run in `folder` and return its answer. Raises `RunError` when nothing runs there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        try:
            with _address(folder) as address:
                connection.connect(address)
            connection.sendall(command.encode())
            return connection.recv(4096).decode(errors="replace")
        except (FileNotFoundError, ConnectionRefusedError):
            raise RunError(f"{folder}: no run is going on there; start one with: tidemill resume {folder}") from None
        except TimeoutError:
            raise RunError(f"{folder}: the run did not answer within {_TIMEOUT:.0f} s; its main process hangs") from None
