"""Processes that measure what an experiment's parts cost, for the probe of layouts
(`layouts/probe.py`), here or by the agent of another host, and for `tidemill bench`: they
are told what to measure, and end with whoever started them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import sleep
from typing import IO, Any, TextIO

import msgspec

from tidemill.api.environment import AgentInfo
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import ProbeAnswer
from tidemill.core.blas_threads import limit_threads
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, DeadlineError, RunError
from tidemill.core.killed_processes import await_end, kill_session
from tidemill.core.memory import keep_freed
from tidemill.core.run_marks import mark_started, new_mark
from tidemill.core.untrusted_files import read_json
from tidemill.core.user_code_loading import begin_to_work, environment_of_ours, load_file, own_path, travel

PROBE = "tidemill.layouts.probe"
"""The module of the process that measures what layouts follow from."""
MOST_BYTES = 64 << 10
"""The most bytes of an answer that are looked at."""


class MeasurementOrder(msgspec.Struct):
    """What a process is to measure. `agents` is for one that measures policies and
    learner alone; `runner` is the process that it ends with, `path` where that looks for
    modules."""

    experiment: dict[str, Any]
    source: str | None
    runner: int
    path: list[str]
    agents: list[AgentInfo] | None = None

    def load(self) -> Experiment:
        """Return the experiment, whose file is loaded first."""
        if self.source is not None:
            load_file(Path(self.source), "experiment file")
        return decode(Experiment, self.experiment)

    def pack(self) -> bytes:
        """Return what a process that `start` has started is told first."""
        content = msgspec.msgpack.encode(self)
        return len(content).to_bytes(4, "little") + content


def order_of(
    experiment: Experiment, source: Path | str | None, agents: list[AgentInfo] | None = None
) -> bytes:
    """Return what a process of this one's is told first that is to measure an
    experiment."""
    source = str(source) if source else None
    return MeasurementOrder(encode(experiment), source, os.getpid(), own_path(), agents).pack()


def start(
    module: str, errors: int | IO[str], *arguments: str, own_session: bool = True
) -> "subprocess.Popen[bytes]":
    """Start a process that runs `module`. In a session of its own all that its
    environment starts can be ended with it."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment_of_ours(**one),
        start_new_session=own_session,
    )


def answer_of(process: "subprocess.Popen[bytes]", order: bytes, seconds: float) -> ProbeAnswer:
    """Tell a process, which leads a session of its own, what to measure, and return what
    came of it within so many seconds. Raises `DeadlineError` where the kernel holds
    it."""
    try:
        answer, _ = process.communicate(order, seconds + 1)  # by then it has ended itself
        return ProbeAnswer(answer[:MOST_BYTES], process.returncode)
    except subprocess.TimeoutExpired:
        return ProbeAnswer(error=f"no answer after {seconds:g} s")
    finally:
        kill_session(process.pid)
        await_end(process, "the process that measures costs")


def probe(order: bytes, seconds: float) -> ProbeAnswer:
    """Have a process of its own measure what layouts follow from (`layouts/probe.py`),
    and return what came of it within so many seconds. Raises `DeadlineError`."""
    return answer_of(_probe(seconds), order, seconds)


def _probe(seconds: float) -> "subprocess.Popen[bytes]":
    return start(PROBE, subprocess.DEVNULL, str(seconds))


class Measurement:
    """A probe that a thread waits for.

    measured: what came of it, None as long as it goes on
    """

    measured: ProbeAnswer | None = None

    def __init__(self, order: bytes, seconds: float, ended: Callable[[], None]) -> None:
        """`ended`: called in the thread once `measured` is there."""
        self._process = _probe(seconds)
        self._thread = Thread(target=self._wait, args=(order, seconds, ended), name="measurement")
        try:
            self._thread.start()
        except BaseException:  # RuntimeError where there is no room for a thread
            kill_session(self._process.pid)
            raise

    def _wait(self, order: bytes, seconds: float, ended: Callable[[], None]) -> None:
        try:
            self.measured = answer_of(self._process, order, seconds)
        except (DeadlineError, OSError, MemoryError) as error:
            self.measured = ProbeAnswer(error=str(error) or "no memory is left")
        ended()

    def close(self) -> None:
        """End it, and wait for that."""
        if self.measured is None:
            kill_session(self._process.pid)
        self._thread.join()


def read_answer(measured: ProbeAnswer) -> Any:
    """Return what a process has measured, which may be another host's, and answer
    anything. Raises `RunError` with what kept it from it, and `ConfigError` where no run
    can be made of the experiment."""
    if measured.error:
        raise RunError(measured.error[:MOST_BYTES])
    if not measured.answer:
        raise RunError(
            f"the process that measures them ended with status {measured.status}"
            + " (too slow)" * (measured.status == -signal.SIGALRM)
        )
    try:
        content = read_json(measured.answer[:MOST_BYTES])
        if "refused" in content:
            raise ConfigError(str(content["refused"]))
        if "error" in content:
            raise RunError(str(content["error"]).partition("\n")[0])
        return content["measured"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"they make no sense: {error}") from None


# ---- in such a process -----------------------------------------------------------------


def obey() -> tuple[MeasurementOrder, TextIO]:
    """Make this process one that measures as workers work, and return what it is told and
    where its answers go: what an environment prints is no answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limit_threads(1)
    keep_freed()
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=MeasurementOrder)
    Thread(target=_end_with, args=(order.runner,), daemon=True).start()
    mark_started(new_mark())  # a next start ends what it leaves
    begin_to_work()
    travel(order.path)
    return order, answers


def _end_with(runner: int) -> None:
    """Wait until whoever started this is gone; end what was begun for it."""
    while os.getppid() == runner:
        sleep(0.2)
    end_session()
    os._exit(1)


def end_session() -> None:
    """End this process with what the environment has started, where it leads a session of
    its own."""
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
