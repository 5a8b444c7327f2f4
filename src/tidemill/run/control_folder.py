"""Orders to a run from a host other than its runner's, by its folder, which both see:
`tidemill pause|start|save|stop|status RUN` leave a line there, and the run answers it.

The files are the user's alone. A line is a typed request, of a bounded length, and
nothing else is understood. The run makes the files when it begins, and removes them when
it ends; each is opened anew to be looked at, so that a network share tells what has been
written elsewhere.
"""

import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tidemill.core.errors import Overtaken, RunError
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import open_plain
from tidemill.store.fence import check

FOLDER = "control"
_RUNNER, _REQUESTS, _ANSWERS = "runner.json", "requests", "answers"
_EVERY = 1.0  # seconds between two looks
_MOST = 1 << 16  # bytes of requests that are read at a time
_KEPT = 8  # answers, the newest
_LONGEST = 1 << 22  # bytes of what a command reads
ANSWER_S = 15.0
"""Seconds that a command waits for the answer of a run on another host."""


class Runner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run's runner is: the host's name, and the network whose sockets it sees."""

    host: str
    network: str


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order, under a number that nobody else has."""

    number: str
    order: str


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the run has answered to the request of this number."""

    number: str
    text: str


def own_network() -> str:
    """Return what tells this network, in which a unix socket is seen, from all others:
    of other machines, and of containers on this one."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return platform.node()


class ControlFolder:
    """The run's end. Where it cannot be made (a full disk), nobody is heard by it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER
        self._next, self._read = 0.0, 0
        self._answers: list[Answered] = []
        self.close()  # of a run that was killed
        with suppress(OSError):
            self._path.mkdir(mode=0o700)
            for name in (_REQUESTS, _ANSWERS):
                (self._path / name).touch(0o600)
            with open(self._path / _RUNNER, "wb", opener=private) as file:
                file.write(msgspec.json.encode(Runner(platform.node(), own_network())))

    def commands(self) -> Iterator[Asked]:
        """Yield what has come since the last look; the caller answers by `reply`. Raises
        `Overtaken` where the files are another runner's by now."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        with suppress(OSError):  # a share that does not answer just now
            check(self._path)
        data = b""
        with suppress(OSError, RunError):
            data = _read(self._path / _REQUESTS, self._read, _MOST)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == _MOST:
            whole = data  # a line without end is none
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield msgspec.json.decode(line, type=Asked)

    def reply(self, number: str, text: str) -> None:
        """Answer; whoever asked may be gone."""
        self._answers = [*self._answers, Answered(number, text)][-_KEPT:]
        aside = self._path / f".{_ANSWERS}"
        with suppress(OSError):
            with open(aside, "wb", opener=private) as file:
                file.writelines(msgspec.json.encode(answer) + b"\n" for answer in self._answers)
            aside.replace(self._path / _ANSWERS)

    def close(self) -> None:
        """Remove the files, unless they are another runner's by now."""
        with suppress(Overtaken):
            check(self._path)
            shutil.rmtree(self._path, ignore_errors=True)


def runner_elsewhere(folder: Path) -> str:
    """Return on which host the runner of the run in `folder` is, if that is another one
    than this; else ""."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        runner = msgspec.json.decode(_read(folder / FOLDER / _RUNNER), type=Runner)
        return "" if runner.network == own_network() else runner.host
    return ""


def _read(path: Path, start: int = 0, most: int = _LONGEST) -> bytes:
    """Return what a file of this user's holds from byte `start` on, `most` of it. Raises
    `OSError`, and `RunError` for another user's."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_uid not in (0, os.getuid()):
            raise RunError(f"{path}: another user wrote it; only the user who started a run may speak to it")
        file.seek(start)
        return file.read(most)


def ask(folder: Path, order: str, host: str) -> str:
    """Leave an order for the run in `folder`, whose runner is on `host`, and return its
    answer. Raises `RunError`."""
    path, number = folder / FOLDER, uuid.uuid4().hex
    deadline = time.monotonic() + ANSWER_S
    try:
        _read(path / _REQUESTS)  # it is this user's
        with os.fdopen(os.open(path / _REQUESTS, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb") as file:
            file.write(msgspec.json.encode(Asked(number, order)) + b"\n")
        while time.monotonic() < deadline and path.is_dir():
            time.sleep(0.1)
            for line in _read(path / _ANSWERS).splitlines():
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    answer = msgspec.json.decode(line, type=Answered)
                    if answer.number == number:
                        return answer.text
    except FileNotFoundError:  # it ended just now
        pass
    except OSError as error:
        raise RunError(
            f"{path}: it cannot be asked from this host: {error.strerror}; ask on host {host}"
        ) from None
    if not path.is_dir() and order == "stop":  # before its answer was read
        return "the run has ended"
    if not path.is_dir():
        raise RunError(f"{folder}: the run on host {host} ended before it answered")
    raise RunError(
        f"{folder}: the run on host {host} did not answer within {ANSWER_S:.0f} s: it was killed, or this "
        f"folder is not the one that it has; look there, or go on with it by: tidemill resume {folder}"
    )
