"""Whatever becomes of a run's output, the run goes on to its end; a terminal that closes
ends it well."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.run.watching import EXPERIMENTS, ended_well, leftovers, wait_until, workers_of

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full, and processes need Linux"),
]
ENDLESS = "limits.updates=1000000"
# a run to which signals are one that a busy machine keeps apart for up to a minute
AT_ONCE = """
from tidemill.cli.main import app
from tidemill.run import interrupts
interrupts.ONE = 60.0
app()
"""


def tidemill(folder: Path, function: str, launch: str, *more: str) -> list[str]:
    words = [
        "-m",
        "tidemill.cli.main",
        "train",
        f"{EXPERIMENTS}:{function}",
        "--run-dir",
        str(folder / "run"),
        "--layout",
        "given",
    ]
    return [sys.executable, *words, "--launch", launch, *(word for each in more for word in ("--set", each))]


@pytest.fixture
def begin() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    begun: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        begun.append(subprocess.Popen(*arguments, **options))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("launch", ["processes", "inline"])
def test_a_reader_that_has_seen_enough_a_full_disk_and_a_poor_encoding_end_no_run(
    tmp_path: Path, begin: Callable[..., "subprocess.Popen[bytes]"], launch: str
) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    with open("/dev/full", "wb") as full:
        run = begin(
            tidemill(tmp_path, "speaks", launch, "limits.updates=10"), cwd=tmp_path, env=environment,
            stdout=subprocess.PIPE, stderr=full
        )  # fmt: skip
    assert run.stdout is not None
    # there the environment has taken the output by then
    assert b"steps 0" in run.stdout.readline() or launch == "inline"
    run.stdout.close()
    assert run.wait(60) == 0
    ended_well(tmp_path / "run", "completed", "10 updates")


def test_help_and_errors_of_usage_end_quietly_too() -> None:
    words = [sys.executable, "-m", "tidemill.cli.main"]
    with open("/dev/full", "wb") as full:
        helped = subprocess.run([*words, "--help"], stdout=full, stderr=subprocess.PIPE)
        assert (helped.returncode, helped.stderr) == (0, b"")
        refused = subprocess.run([*words, "trian"], stdout=subprocess.PIPE, stderr=full)
        assert (refused.returncode, refused.stdout) == (2, b"")


def on_terminal(
    begin: Callable[..., "subprocess.Popen[bytes]"], folder: Path, words: list[str]
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start it in the foreground of a terminal of its own, and return it and the
    terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}

    def hear() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # which makes it the session's

    run = begin(
        words,
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=hear,
    )
    os.close(theirs)
    return run, ours


def read_until_updates(run: "subprocess.Popen[bytes]", folder: Path, terminal: int) -> bytes:
    seen = b""
    metrics = folder / "run" / "metrics.jsonl"
    bar = "█".encode()  # of the live view, which knows where time goes a moment later
    while not (metrics.exists() and metrics.stat().st_size and b"updates" in seen and bar in seen):
        assert run.poll() is None, seen
        seen += os.read(terminal, 1 << 16)
    return seen


def test_a_terminal_that_is_held_is_nothing_and_one_that_closes_ends_the_run_with_a_final_checkpoint(
    tmp_path: Path, begin: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    run, terminal = on_terminal(begin, tmp_path, tidemill(tmp_path, "cartpole", "processes", ENDLESS))
    read_until_updates(run, tmp_path, terminal)
    os.write(terminal, b"\x13")  # Ctrl-S: nothing is shown any more, and the run goes on
    metrics = tmp_path / "run" / "metrics.jsonl"
    time.sleep(1.0)  # by then somebody has drawn
    size = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > size, 60, "it goes on")
    os.close(terminal)
    assert run.wait(90) == 128 + signal.SIGHUP
    ended_well(tmp_path / "run", "interrupted", "SIGHUP")


def test_under_nohup_a_terminal_that_closes_is_nothing(
    tmp_path: Path, begin: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    """Nor are its signals, two SIGTERM at once are one, and no worker dies of what is
    sent to all."""
    python, _, _, *train = tidemill(tmp_path, "cartpole", "processes", ENDLESS)
    words = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", python, "-c", AT_ONCE, *train]
    run, terminal = on_terminal(begin, tmp_path, words)
    read_until_updates(run, tmp_path, terminal)
    os.close(terminal)
    metrics = tmp_path / "run" / "metrics.jsonl"
    size = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > size + 5000, 60, "it goes on for some updates")
    assert run.poll() is None
    every = [run.pid, *(process.pid for process in workers_of(run.pid).values())]
    assert len(every) == 4
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        for pid in reversed(every):
            with suppress(ProcessLookupError):  # it has ended by now
                os.kill(pid, number)
    assert run.wait(60) == 128 + signal.SIGTERM
    ended_well(tmp_path / "run", "interrupted", "SIGTERM")
    assert leftovers(tmp_path / "run") == []
