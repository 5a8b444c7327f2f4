"""The runner's ends of what joins it to worker processes: its bell and its links."""

import contextlib
import os
import select
import socket
from collections.abc import Sequence

from tidemill.transports.shared import EventBell, SocketLink


class RunnerBell(EventBell):
    """The runner's bell, also rung by links, and by the ends of processes. Nobody plays
    an environment in the runner's thread."""

    def wait(self, seconds: float) -> bool:
        return self.hear(seconds)

    def forget(self, descriptor: int) -> None:
        """Be woken no more by a descriptor that has hung up, and would wake for ever."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)


class RunnerLink(SocketLink):
    """The runner's end. It rings the worker after each message, since a worker sleeps on
    its bell alone; and it hangs up when the worker's process is dead, even where the
    other end of the socket is still open in what the process forked."""

    def __init__(self, connection: socket.socket, bell: int, runner_bell: RunnerBell) -> None:
        super().__init__(connection)
        self._worker_bell, self._runner_bell = bell, runner_bell
        self._descriptors = [connection.fileno()]
        self._process = select.poll()
        runner_bell.also(connection.fileno())

    def watch(self, pidfd: int) -> None:
        """Take the process at the other end for the worker."""
        self._process.register(pidfd, select.POLLIN)
        self._runner_bell.also(pidfd)
        self._descriptors.append(pidfd)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        sent = super().send(message, descriptors)
        os.eventfd_write(self._worker_bell, 1)
        return sent

    def receive(self) -> list[bytes] | None:
        dead = bool(self._process.poll(0))
        messages = super().receive()
        if messages is None or (dead and not messages):
            self._forget()
            return None
        return messages

    def close(self) -> None:
        self._forget()
        super().close()

    def _forget(self) -> None:
        for descriptor in self._descriptors:
            self._runner_bell.forget(descriptor)
        self._descriptors.clear()
