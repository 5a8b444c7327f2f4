"""A worker's process, as the runner starts it and as it learns what to do: its order
comes over the socket that is its standard input, with the descriptors that it names.

So a process can be started before anybody knows what for (`Spares`), and import what
workers need meanwhile: a command begins with some (`start_early`) while it imports what
it needs itself, and ends those that its run has no use for; a run has one for whoever
dies next.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tidemill.core.killed_processes import await_end
from tidemill.core.run_marks import ROOM, STARTER, VARIABLE, this_process
from tidemill.core.user_code_loading import environment_of_ours

# without the working directory among its places of modules
COMMAND = (sys.executable, "-P", "-m", "tidemill.launchers.entry")
SPARE = "tidemill spare"  # what `ps` calls one that has no order yet
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ends a run; a worker leaves it to the runner
ASK_FOR_STACK = getattr(signal, "SIGRTMIN", 0) + 7
"""The signal upon which a worker's process writes down where its threads are, if need be
in the midst of what holds Python's lock. None of those that environments and batch
systems use."""
_BATCH = 250  # descriptors in a message, of which Linux allows 253
_ORDER_S = 20.0  # seconds that a process has to take its order
_LENGTH = 8  # bytes of each of the two numbers that an order begins with


class WorkerProcess:
    """A worker's process that waits for its order. `output`: where its own goes until
    then.

    place: directory that it was started in, and cores that it may use
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: int = subprocess.DEVNULL
    ) -> None:
        self.command, self.environment, self.place = tuple(command), dict(environment), _place()
        self._socket, theirs = socket.socketpair()
        with theirs, _signals_blocked():
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                self.command,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is the runner's to handle
            )

    def send(self, order: bytes, descriptors: Sequence[int]) -> None:
        """Send the process its order, and descriptors, of which it gets copies."""
        import resource  # no module of every system's

        # it died at once, or is stopped and finds the end of its order: its links say so
        with self._socket, contextlib.suppress(OSError):
            self._socket.settimeout(_ORDER_S)
            resource.prlimit(  # this process may have raised its own since
                self.process.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
            )
            numbers = (len(order), len(descriptors))
            self._socket.sendall(b"".join(number.to_bytes(_LENGTH, "little") for number in numbers) + order)
            for first in range(0, len(descriptors), _BATCH):
                socket.send_fds(self._socket, [b"\0"], descriptors[first : first + _BATCH])

    def let_go(self) -> None:
        """Have a process that gets no order end by itself."""
        self._socket.close()

    def end(self) -> None:
        """End a process that gets no order."""
        self.let_go()
        self.process.kill()
        await_end(self.process, "a worker's process that got no order")


def environment(math_threads: int) -> dict[str, str]:
    """Return the environment variables of a worker's process that this one starts, whose
    matrix products have so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # what threadpoolctl sets once it is imported, here as there
    own = environment_of_ours(**dict.fromkeys(names, str(math_threads)))
    return {"KMP_DUPLICATE_LIB_OK": "True", **own, VARIABLE: ROOM, STARTER: this_process()}


class Spares:
    """Worker processes that were started before anybody knew what for.

    waiting: those that have no order yet; some may have died
    """

    def __init__(self) -> None:
        self.waiting: list[WorkerProcess] = []
        self._left: list[WorkerProcess] = []  # which nobody can take any more

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start one with this command and these environment variables. Raises `OSError`
        where the system refuses it."""
        self.waiting.append(WorkerProcess(command, variables))

    def take(self, command: Sequence[str], variables: Mapping[str, str]) -> WorkerProcess | None:
        """Return one that lives, and was started as one would be now; None where there is
        none."""
        if (found := self._found(command, variables)) is not None:
            self.waiting.remove(found)
        return found

    def has(self, command: Sequence[str], variables: Mapping[str, str]) -> bool:
        """True while there is one to take. Where there is none, those that wait are let
        go: they were started by other surroundings than there are."""
        if self._found(command, variables) is not None:
            return True
        for process in self.waiting:
            process.let_go()
        self._left += self.waiting
        self.waiting = []
        return False

    def _found(self, command: Sequence[str], variables: Mapping[str, str]) -> WorkerProcess | None:
        wanted = tuple(command), variables, _place()
        for process in self.waiting:
            own = process.command, process.environment, process.place
            if own == wanted and process.process.poll() is None:
                return process
        return None

    def drop_killed(self) -> bool:
        """Drop those that SIGKILL has ended. False where there are none."""
        killed = [process for process in self.waiting if process.process.poll() == -signal.SIGKILL]
        self.waiting = [process for process in self.waiting if process not in killed]
        self._left += killed
        return bool(killed)

    def end(self) -> None:
        """End all that nobody needs."""
        for processes in (self.waiting, self._left):
            while processes:
                processes.pop().end()


def _place() -> tuple[str, frozenset[int]]:
    """Return this process's directory, "" where it is gone, and the cores that it may
    use."""
    directory = ""
    with contextlib.suppress(OSError):
        directory = os.getcwd()
    return directory, frozenset(os.sched_getaffinity(0))


EARLY = Spares()
"""Those of a command, for whatever run it will begin."""


def start_early(count: int) -> None:
    """Start so many processes for whatever run this command will begin."""
    atexit.register(EARLY.end)
    for _ in range(count):
        EARLY.start(COMMAND, environment(1))


def receive_order(gone: int = -1) -> tuple[bytes, list[int]] | None:
    """Return what this process was sent, and its copies of the descriptors; None where
    whoever started it has no order for it, or is `gone` (its pidfd; -1: none). Standard
    input is empty from then on."""
    with socket.socket(fileno=os.dup(0)) as connection:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        either = select.poll()
        for descriptor in (connection.fileno(), gone):
            if descriptor >= 0:
                either.register(descriptor, select.POLLIN)

        def come() -> bool:
            return connection.fileno() in dict(either.poll())

        def receive(length: int) -> bytes:
            data = bytearray()
            while len(data) < length and come() and (piece := connection.recv(length - len(data))):
                data += piece
            return bytes(data)

        head = receive(2 * _LENGTH)
        length, count = (int.from_bytes(part, "little") for part in (head[:_LENGTH], head[_LENGTH:]))
        order = receive(length)
        descriptors: list[int] = []
        while len(descriptors) < count:
            if not come():
                return None
            data, received, _, _ = socket.recv_fds(connection, 1, _BATCH)
            if not data:
                return None
            descriptors += received
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # what an environment starts must not keep them open
    return (order, descriptors) if length and len(order) == length else None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have processes that are started within this begin with `ENDING` and `ASK_FOR_STACK`
    blocked, until they can handle them, which would else end them: a batch system signals
    all, and the runner asks who is still starting, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, ASK_FOR_STACK))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
