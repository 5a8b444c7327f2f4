"""Marks of runs: whoever is started by an environment is known to be of that run, also
where it has left its session and its parents (a daemon). Two things carry a mark, which
processes inherit:

* an environment variable. Linux shows the variables that a program began with, as they
  lie in its memory now: so what forks, and becomes no other program, has it, too;
* a number in place of a limit that Linux keeps for each process and does not heed (locks
  of files, RLIMIT_LOCKS). Nobody drops it with a daemon's other belongings (variables,
  descriptors, session, parents), and nobody else sets it. Where the system does not let
  it be set (a sandbox, a hard limit of it) the variable is all that there is.

A mark names the runner (the namespace of its process id, that, and when it began), a
number that it gives to no other of its workers, the worker and its life:
``4026531836.1234.56789.7/actor-0/1``. A worker's own process has another variable, which
names whoever started it likewise: whose child it is tells nothing, since of a container
the first process may be its run, and adopts those of others.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

VARIABLE = "TIDEMILL_RUN"
STARTER = "TIDEMILL_STARTER"
ROOM = " " * 240
"""What the variable holds in the process of a worker, which is not marked itself."""
_NAMES = (VARIABLE.encode(), STARTER.encode())
_PROC = Path("/proc")
_GONE = 5.0  # seconds that a process which was killed has to be gone
_LIMIT = 10  # RLIMIT_LOCKS, which Python has no name for
_BITS = {"namespace": 20, "pid": 22, "began": 8, "number": 13}  # of each in the limit, 63 in all

_numbers = count(1)
_is_command = False  # this process
_own: list[str] = []  # marks of what environments have started in it


def new_mark() -> str:
    """Return a mark that nobody has yet. The limit knows 8,192 of a process apart."""
    return f"{this_process()}.{next(_numbers)}"


def this_process() -> str:
    """Return what names this process, and no later one of the same number."""
    return f"{_namespace()}.{os.getpid()}.{_began(os.getpid())}"


def mark_started(mark: str) -> None:
    """Have `mark` found in whatever this process starts from now on, also in what Python
    merely forks, as `multiprocessing` does. A worker's process, which began with `ROOM`
    in its variable for that, stays as it is."""
    if not _sees_itself():
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    place, text = getenv(VARIABLE.encode()), f"{mark}\0".encode()
    if place is not None and len(text) <= len(ROOM) and os.environ.get(VARIABLE) == ROOM:
        os.register_at_fork(after_in_child=lambda: ctypes.memmove(place, text, len(text)))
    os.environ[VARIABLE] = mark
    _set_limit(_number(mark))


def begin_command() -> None:
    """Take this process for a command of ours, and for no program of a user's, which
    starts things itself: `marking_own` marks what environments start in it."""
    global _is_command
    _is_command = True


@contextmanager
def marking_own() -> Iterator[None]:
    """Have whatever this process starts within this marked by the number alone, where it
    is a command of ours, and end what earlier ones have left that were killed."""
    if not (_is_command and _sees_itself()):
        yield
        return
    end_orphans()
    number = _limit(os.getpid())
    _own.append(new_mark())
    _set_limit(_number(_own[-1]))
    try:
        yield
    finally:
        _set_limit(number)


def end_own() -> list[str]:
    """Kill what was started within `marking_own` and has left this process's session, and
    take the mark from whatever else was, so that the next start leaves that alone, too.
    Return who was killed, in words."""
    words = list[str]()
    while _own:
        find = partial(_strays, mark := _own.pop(), os.getsid(0))
        if found := find():
            words += found.values()
            _end(find)
        for pid in marked(mark):
            _set_limit(None, pid)
    return words


def marked(mark: str) -> list[int]:
    """Return the processes that carry `mark`, that of the worker itself among them."""
    number = _number(mark)
    return [
        each.pid for each in _processes() if each.variables.get(VARIABLE) == mark or each.number == number
    ]


def _strays(mark: str, session: int) -> dict[int, str]:
    """Return the processes that carry `mark` and are not in a session, each in words."""
    words = {}
    for pid in marked(mark):
        with suppress(OSError):  # it is gone by now
            if os.getsid(pid) != session:
                words[pid] = f"process {pid} ({(_PROC / str(pid) / 'comm').read_text().strip()})"
    return words


def end_marked(mark: str, session: int = 0) -> list[str]:
    """Kill every process that carries `mark`, and those that these start meanwhile.
    Return which of them were not in a session, in words."""
    if not marked(mark):
        return []
    words = _strays(mark, session)
    _end(partial(marked, mark))
    return list(words.values())


def orphans() -> list[int]:
    """Return the processes whose mark names a runner that is gone; of workers, which end
    by themselves, what they started alone."""
    found = []
    for each in _processes():
        mark = each.variables.get(VARIABLE)
        if not (_lives(each.number) if mark is None else lives(mark)):
            found.append(each.pid)
    return found


def left_alone() -> list[int]:
    """Return the workers' processes that live although whoever started them is gone, and
    `orphans`."""
    starters = {each.pid: each.variables.get(STARTER, "") for each in _processes()}
    return sorted({*orphans(), *(pid for pid, starter in starters.items() if not lives(starter))})


def end_left_alone() -> list[int]:
    """Kill whoever is `left_alone`, give them 5 s to be gone, and return who they
    were."""
    pids = left_alone()
    _end(left_alone)
    return pids


def end_orphans() -> None:
    """Kill every process whose mark names a runner that is gone."""
    _end(orphans)


def _end(find: Callable[[], Collection[int]]) -> None:
    """Kill those who are found until there are none, for a while."""
    until = monotonic() + _GONE
    while (pids := find()) and monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.005)


class _Process(NamedTuple):
    """A process of this user: the variables of ours that it began with, and the number in
    its limit, None where there is none."""

    pid: int
    variables: Mapping[str, str]
    number: int | None


def _processes() -> Iterator[_Process]:
    """Yield all of this user but this one itself, and those that are over."""
    for folder in _PROC.iterdir() if _sees_itself() else ():
        with suppress(OSError, ValueError):
            if (pid := int(folder.name)) != os.getpid() and folder.stat().st_uid == os.getuid():
                pairs = (each.partition(b"=") for each in (folder / "environ").read_bytes().split(b"\0"))
                ours = {name.decode(): value.decode() for name, _, value in pairs if name in _NAMES}
                number = _limit(pid)
                if ours or (number is not None and not _over(pid)):
                    yield _Process(pid, ours, number)


def _sees_itself() -> bool:
    """True where the system tells of processes by the numbers by which this one knows
    them: on Linux, but for a container that sees its host's."""
    with suppress(OSError):
        return os.readlink(_PROC / "self") == str(os.getpid())
    return False


def _over(pid: int) -> bool:
    """True of a process of which its parent has merely not taken note that it is gone."""
    return _stat(pid)[0] in "ZX"


def _limit(pid: int) -> int | None:
    """Return the number in a process's limit; None where it has none, or may not be
    looked at."""
    import resource  # no module of every system's

    with suppress(OSError, ValueError):
        if (soft := resource.prlimit(pid, _LIMIT)[0]) != resource.RLIM_INFINITY:
            return soft
    return None


def _set_limit(number: int | None, pid: int = 0) -> None:
    """Put a number into a process's limit (0: this one's), where that is allowed; None:
    none."""
    import resource  # no module of every system's

    with suppress(OSError, ValueError):
        hard = resource.prlimit(pid, _LIMIT)[1]
        resource.prlimit(pid, _LIMIT, (hard if number is None else number, hard))


def _number(mark: str) -> int:
    """Return the number that stands for a mark."""
    packed = 0
    for bits, part in zip(_BITS.values(), mark.partition("/")[0].split("."), strict=True):
        packed = packed << bits | int(part) % (1 << bits)
    return packed


def _lives(number: int | None) -> bool:
    """True of the number in a limit whose runner lives, and of one that cannot be judged,
    or is none of ours."""
    parts = {}
    for name, bits in reversed(_BITS.items()):
        parts[name], number = (number or 0) % (1 << bits), (number or 0) >> bits
    began = _began(parts["pid"])
    ours = parts["namespace"] == _namespace() % (1 << _BITS["namespace"])
    return not (ours and parts["namespace"]) or (
        began >= 0 and began % (1 << _BITS["began"]) == parts["began"]
    )


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
    with suppress(OSError, IndexError, ValueError):
        return int(_stat(pid)[19])
    return -1


def _stat(pid: int) -> Sequence[str]:
    """Return what proc(5) tells of a process from its state on: the name before that may
    have spaces and brackets."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
