"""Marks of runs: by an environment variable that processes inherit, whoever is started by
an environment is known to be of that run, also where it has left its session and its
parents (a daemon). Linux, which shows the variables that a program began with, as they
lie in its memory now: so what forks, and becomes no other program, is marked, too
(`mark_forks`). Who was started with no variables at all is not known.

A mark names the runner (the namespace of its process id, that, and when it began), the
run, the worker and its life: ``4026531836.1234.56789.a1b2c3d4/actor-0/1``. A worker's own
process has another variable, which names whoever started it likewise: whose child it is
tells nothing, since of a container the first process may be its run, and adopts those of
others.
"""

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep

VARIABLE = "TIDEMILL_RUN"
STARTER = "TIDEMILL_STARTER"
ROOM = " " * 240
"""What the variable holds in a program's process that may `mark_forks`."""
_PROC = Path("/proc")
_GONE = 5.0  # seconds that a process which was killed has to be gone


def new_mark() -> str:
    """Return a mark of a run of this process."""
    return f"{this_process()}.{token_hex(4)}"


def this_process() -> str:
    """Return what names this process, and no later one of the same number."""
    return f"{_namespace()}.{os.getpid()}.{_began(os.getpid())}"


def mark_forks(mark: str) -> None:
    """Have `mark` found in whatever is forked from this process by Python, as
    `multiprocessing` does. This one itself, which began with `ROOM` for it, stays as it
    is. To be called before the variable is set."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    place, text = getenv(VARIABLE.encode()), f"{mark}\0".encode()
    if place is not None and len(text) <= len(ROOM) and os.environ.get(VARIABLE) == ROOM:
        os.register_at_fork(after_in_child=lambda: ctypes.memmove(place, text, len(text)))


def marked(mark: str) -> list[int]:
    """Return the processes that have begun with `mark`."""
    return [pid for pid, found in _all_with(VARIABLE) if found == mark]


def end_marked(mark: str) -> None:
    """Kill every process that has begun with `mark`."""
    _kill(marked(mark))


def orphans() -> list[int]:
    """Return the processes whose mark names a runner that is gone."""
    return [pid for pid, mark in _all_with(VARIABLE) if not lives(mark)]


def left_alone() -> list[int]:
    """Return the workers' processes that live although whoever started them is gone, and
    `orphans`."""
    workers = [pid for pid, starter in _all_with(STARTER) if not lives(starter)]
    return sorted({*workers, *orphans()} - {os.getpid()})


def end_left_alone() -> list[int]:
    """Kill whoever is `left_alone`, give them 5 s to be gone, and return who they
    were."""
    _kill(pids := left_alone())
    until = monotonic() + _GONE
    while not {*pids}.isdisjoint(left_alone()) and monotonic() < until:
        sleep(0.02)
    return pids


def end_orphans() -> None:
    """Kill every process whose mark names a runner that is gone."""
    _kill(orphans())


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _all_with(name: str) -> Iterator[tuple[int, str]]:
    """Yield the processes of this user that began with a variable, and its value."""
    wanted, own = f"{name}=".encode(), os.getuid()
    for folder in _PROC.iterdir() if (_PROC / "self").exists() else ():
        with suppress(OSError, ValueError):
            pid = int(folder.name)
            if folder.stat().st_uid != own:
                continue
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(wanted):
                    yield pid, variable.removeprefix(wanted).decode()


def lives(mark: str) -> bool:
    """True of a mark, or a starter's name, whose runner lives, and of one that cannot be
    judged: of a container that counts its processes for itself."""
    with suppress(ValueError):
        namespace, pid, began, *_ = mark.partition("/")[0].split(".")
        return int(namespace) != _namespace() or _began(int(pid)) == int(began)
    return True


def _namespace() -> int:
    """Return the number of this process's namespace of process ids, 0 where there are
    none."""
    with suppress(OSError):
        return (_PROC / "self/ns/pid").stat().st_ino
    return 0


def _began(pid: int) -> int:
    """Return when a process began, in ticks since the machine did; -1 of none."""
    with suppress(OSError, IndexError, ValueError):  # proc(5): the name may have spaces and brackets
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    return -1
