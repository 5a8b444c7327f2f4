"""A run that is stopped, as a whole or in part, and let go on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.run.watching import EXPERIMENTS, ended_well, wait_until, workers_of

from tidemill.core import clock
from tidemill.metrics.json_lines import read_metrics
from tidemill.transports.shared import SocketLink

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="looks into /proc, and processes need Linux"
    ),
]
# who is silent is told sooner than in 5 s
WATCHFUL = "from tidemill.run import silence; silence.LEAST = 0.5; from tidemill.cli.main import app; app()"
STOP = clock.TICK + clock.LATE + 1.0  # seconds: longer than looks at the time are apart without a stop


def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        WATCHFUL,
        "train",
        f"{EXPERIMENTS}:cartpole",
        "--run-dir",
        "run",
        "--layout",
        "given",
    ]
    folder, output, began = tmp_path / "run", tmp_path / "output.txt", time.monotonic()
    with output.open("wb") as file:  # a process group of its own in a session with others: a job of a shell
        main = subprocess.Popen(words, cwd=tmp_path, stdout=file, stderr=file, process_group=0)
    try:
        _stop_in_all_ways(main, folder, output.read_text, began)
        main.terminate()
        assert main.wait(120) == 128 + signal.SIGTERM, output.read_text()
        ended_well(folder, "interrupted", "SIGTERM")
    finally:
        for process in psutil.Process(main.pid).children() if main.poll() is None else ():
            process.kill()
        main.kill()
        main.wait()


def _stop_in_all_ways(
    main: "subprocess.Popen[bytes]", folder: Path, output: Callable[[], str], began: float
) -> None:
    def seconds() -> float:
        return max(
            (record["time/seconds"] for record in read_metrics(folder) if "time/seconds" in record),
            default=0.0,
        )

    def goes_on() -> None:
        before = (folder / "metrics.jsonl").stat().st_size
        wait_until(lambda: (folder / "metrics.jsonl").stat().st_size > before, 60, "updates go on")

    wait_until(lambda: (folder / "metrics.jsonl").exists() and seconds() > 0, 60, "the first update")
    workers = {name: process.pid for name, process in workers_of(main.pid).items()}
    assert set(workers) == {"actor-0", "server-0", "trainer-0"}

    # all of it, as a batch system does: that is no time of training
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (main.pid, *workers.values()):
            os.kill(pid, number)
        time.sleep(STOP if number == signal.SIGSTOP else 0)
    for _ in range(5):  # beyond what was under way
        goes_on()
    # of the time since the command was given the stop is left out, but for a look
    assert seconds() < time.monotonic() - began - (STOP - clock.TICK)

    # Ctrl-Z reaches the main process alone: the workers pause with it
    os.kill(main.pid, signal.SIGTSTP)
    wait_until(
        lambda: psutil.Process(main.pid).status() == psutil.STATUS_STOPPED, 60, "the main process is stopped"
    )

    def idle() -> bool:
        busy = sum(psutil.Process(pid).cpu_times().user for pid in workers.values())
        time.sleep(0.3)
        return sum(psutil.Process(pid).cpu_times().user for pid in workers.values()) - busy < 0.1

    wait_until(idle, 60, "the workers pause")
    os.kill(main.pid, signal.SIGCONT)
    goes_on()

    # one worker alone: it is named, and its environment is not
    os.kill(workers["actor-0"], signal.SIGSTOP)
    wait_until(lambda: "actor-0 is stopped" in output(), 60, "a notice")
    assert f"let it go on by: kill -CONT {workers['actor-0']}" in output()
    os.kill(workers["actor-0"], signal.SIGCONT)
    goes_on()


def test_a_worker_that_ends_while_nobody_listens_is_heard_all_the_same() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker, runner = SocketLink(ours), SocketLink(theirs)
    sent = [bytes([number]) * 10_000 for number in range(200)]
    for message in sent:
        assert worker.send(message)
    assert worker._unsent  # more than a socket holds
    finish = threading.Thread(target=worker.finish)
    finish.start()
    heard: list[bytes] = []
    while len(heard) < len(sent):
        heard += runner.receive() or []
    finish.join(60)
    assert heard == sent and not finish.is_alive()
    for message in sent:
        worker.send(message)
    runner.close()
    worker.finish()  # nobody is there any more
    worker.close()
