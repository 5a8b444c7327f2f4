"""How a worker's process is started, gets its order, and ends where it gets none."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.run.watching import Run, wait_until, workers_of

from tidemill.launchers import worker_process
from tidemill.launchers.worker_process import (
    ASK_FOR_STACK,
    COMMAND,
    EARLY,
    SPARE,
    Spares,
    WorkerProcess,
    environment,
)
from tidemill.run.events import read_events

ECHO = """
import os, sys
from tidemill.launchers.worker_process import receive_order
order, (answer, *others) = receive_order()
assert not any(map(os.get_inheritable, others)), "what an environment starts would keep them open"
assert sys.stdin.read() == ""
os.write(answer, order + b":" + b"".join(os.pread(number, 4, 0) for number in others))
"""


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    EARLY.end()


def sent(order: bytes, numbers: list[int], tmp_path: Path) -> bytes:
    """Return what a process answers to `order` and files that hold `numbers`."""
    files = []
    for number in numbers:
        files.append(os.open(tmp_path / "number", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        os.write(files[-1], number.to_bytes(4, "little"))
        os.unlink(tmp_path / "number")
    ours, theirs = os.pipe()
    worker = WorkerProcess([sys.executable, "-P", "-c", ECHO], environment(1))
    worker.send(order, [theirs, *files])
    for file in (theirs, *files):
        os.close(file)
    with open(ours, "rb") as answer:
        said = answer.read()
    assert worker.process.wait(120) == 0
    return said


@pytest.mark.parametrize("count", [0, 1, 249, 250, 600])
def test_a_process_gets_its_order_and_all_descriptors_in_their_order(count: int, tmp_path: Path) -> None:
    numbers = list(range(count))
    answer = sent(b"x" * 300_000, numbers, tmp_path)  # more than a socket holds
    assert answer == b"x" * 300_000 + b":" + b"".join(number.to_bytes(4, "little") for number in numbers)


def test_one_that_takes_no_order_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_ORDER_S", 0.1)
    process = WorkerProcess(["sleep", "60"], os.environ)
    process.send(bytes(1 << 24), [])  # more than the system keeps
    assert process.process.poll() is None
    process.end()


def test_one_whose_order_is_cut_short_ends_with_who_sent_it() -> None:
    """Though somebody else, a fork of the sender, holds the socket's other end."""
    code = (
        "import os, sys; from tidemill.launchers.worker_process import receive_order;"
        "print(receive_order(os.pidfd_open(int(sys.argv[1]))))"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "60"]) as sender:
        words = [sys.executable, "-c", code, str(sender.pid)]
        with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, text=True) as receiver:
            ours.sendall((100).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"half of it")
            wait_until(lambda: not select.select([theirs], [], [], 0)[0], 60, "it has read that")
            sender.kill()
            assert receiver.communicate(timeout=60)[0] == "None\n"


def test_one_that_gets_no_order_ends_by_itself_when_its_starter_is_killed() -> None:
    code = (
        "import os, time\nfrom tidemill.launchers.worker_process import EARLY, start_early\n"
        "start_early(2)\nprint(*[early.process.pid for early in EARLY.waiting], flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        early = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.send_signal(signal.SIGKILL)
    assert len(early) == 2
    assert psutil.wait_procs(early, 60)[1] == []


def test_a_process_that_was_started_early_is_taken_only_if_it_was_started_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares, variables = Spares(), environment(1)
    for _ in range(2):
        spares.start(COMMAND, variables)
    early = [*spares.waiting]
    assert spares.take([*COMMAND, "--"], variables) is None
    assert spares.take(COMMAND, environment(2)) is None
    assert spares.take(COMMAND, {**variables, "ANOTHER_RUN": "1"}) is None
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        assert spares.take(COMMAND, variables) is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "sched_getaffinity", lambda _: {0, 1, 1000})
        assert spares.take(COMMAND, variables) is None
    assert spares.waiting == early and spares.has(COMMAND, variables)
    alone = Spares()
    alone.start(COMMAND, variables)
    (let_go,) = alone.waiting
    assert not alone.has(COMMAND, environment(2))
    assert let_go.process.wait(120) == 0
    assert alone.waiting == []
    alone.end()
    taken = [spares.take(list(COMMAND), variables) for _ in range(3)]
    assert taken == [*early, None]
    for worker in early:
        worker.end()


def test_a_dead_one_is_not_taken() -> None:
    spares = Spares()
    for _ in range(2):
        spares.start(COMMAND, environment(1))
    dead, alive = spares.waiting
    dead.process.kill()
    dead.process.wait()
    assert spares.take(COMMAND, environment(1)) is alive
    assert not spares.has(COMMAND, environment(1))
    alive.end()
    spares.end()


# what has a run begin with a spare process
AT_ONCE = "from tidemill.launchers import processes; processes.SPARE_AFTER_S = 0.0"


def spares_of(run: Run) -> list[psutil.Process]:
    """Return the processes of a run that wait for whoever dies next."""
    found = []
    for child in psutil.Process(run.main.pid).children():
        with contextlib.suppress(psutil.Error):  # it is gone
            if child.name() == SPARE and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def spare_of(run: Run) -> psutil.Process:
    """Return the one process that waits for whoever dies next, once there is one."""
    wait_until(lambda: spares_of(run), 60, "there is a spare process")
    (spare,) = spares_of(run)
    return spare


def next_life(run: Run, name: str) -> int:
    """Kill a worker's process; return the number of its next life's."""

    def lives() -> int:
        return sum((event.what, event.worker) == ("lives", name) for event in read_events(run.path))

    before = lives()
    run.wait_for_worker(name).kill()
    wait_until(lambda: lives() > before, 60, f"{name} lives again")
    return run.wait_for_worker(name).pid


def test_who_dies_lives_again_in_a_process_that_has_waited_for_that(tmp_path: Path) -> None:
    """Then there is another one. Where it is gone, a life begins in a new process all the
    same. None is left, however the run ends."""
    run = Run(tmp_path, "cartpole", "--set", "limits.seconds=600", code=AT_ONCE)
    try:
        run.wait_for_updates()
        for name in ("server-0", "trainer-0"):
            spare = spare_of(run)
            assert next_life(run, name) == spare.pid
        spare = spare_of(run)
        spare.kill()
        wait_until(lambda: spare.status() == psutil.STATUS_ZOMBIE, 60, "it is dead")
        assert next_life(run, "actor-0") != spare.pid
        spare_of(run)
        run.main.send_signal(signal.SIGKILL)
        run.main.wait()
        run.nothing_is_left()
    finally:
        run.kill_all()


# what has the main process fork one that lives on, once all run
FORKING = f"""
import os, threading, time
from pathlib import Path
{AT_ONCE}
def fork():
    while not Path("run/metrics.jsonl").exists() or not os.path.getsize("run/metrics.jsonl"):
        time.sleep(0.01)
    if (child := os.fork()):
        Path("forking").write_text(str(child))
        Path("forking").rename("forked")
    else:
        time.sleep(600)
        os._exit(0)
threading.Thread(target=fork, daemon=True).start()
"""


def test_who_is_killed_leaves_no_worker_though_what_it_forked_lives_on(tmp_path: Path) -> None:
    """That holds the other ends of all of its sockets."""
    run = Run(tmp_path, "cartpole", "--set", "limits.seconds=600", code=FORKING)
    try:
        run.wait_for_file(run.folder / "forked", "it forks")
        spare = spare_of(run)
        left = [spare.pid, *(worker.pid for worker in workers_of(run.main.pid).values())]
        assert len(left) == 4
        run.main.send_signal(signal.SIGKILL)
        run.main.wait()
        wait_until(lambda: not any(map(psutil.pid_exists, left)), 60, "no worker is left")
        assert psutil.pid_exists(int((run.folder / "forked").read_text()))
    finally:
        run.kill_all()


def test_a_run_whose_first_death_is_its_last_has_nobody_wait(tmp_path: Path) -> None:
    none = [
        word
        for group in ("actor", "server", "trainer")
        for word in ("--set", f"workers.{group}.restarts=null")
    ]
    run = Run(tmp_path, "cartpole", "--set", "limits.updates=30", *none, code=AT_ONCE)
    try:
        run.wait_for_updates()
        assert spares_of(run) == []
        assert run.ended()[0] == 0
        run.nothing_is_left()
    finally:
        run.kill_all()


def command(tmp_path: Path, *words: str, first: str = "") -> "subprocess.Popen[str]":
    code = f"import sys; sys.argv[0] = 'tidemill'\n{first}\nfrom tidemill.cli.entry import main; main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *words],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# the beginning of a command that starts three processes early, and writes down which
OF_THREE = """
import tidemill.cli.entry as entry
from tidemill.launchers import worker_process
from pathlib import Path
def start_early(count):
    worker_process.start_early(count)
    Path("early").write_text(" ".join(str(early.process.pid) for early in worker_process.EARLY.waiting))
entry.cores, entry.start_early = lambda: 3, start_early
"""


def test_a_command_s_early_processes_become_its_workers_and_the_others_end(tmp_path: Path) -> None:
    """Three are started; a run of two takes two of them, whose output goes to its log."""
    words = ("train", "CartPole-v1", "--layout", "given", "--run-dir", "run", "--set", "limits.seconds=600")
    with command(tmp_path, *words, first=OF_THREE) as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size, 120, "the first update")
        early = set(map(int, (tmp_path / "early").read_text().split()))
        workers = workers_of(run.pid).values()
        logs = {os.readlink(f"/proc/{worker.pid}/fd/1") for worker in workers}
        limits = {worker.rlimit(psutil.RLIMIT_NOFILE) for worker in workers}
        assert limits == {psutil.Process(run.pid).rlimit(psutil.RLIMIT_NOFILE)}
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 128 + signal.SIGTERM
    assert len(workers) == 2 and len(early) == 3, (workers, early)
    assert {worker.pid for worker in workers} < early
    assert {Path(log).name for log in logs} == {"actor-0.log", "trainer-0.log"}
    wait_until(lambda: not any(map(psutil.pid_exists, early)), 60, "no process is left")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["train", "CartPole-v7"], 1, "CartPole"),
        (["train", "CartPole-v1", "--max-steps", "x"], 2, "max-steps"),
        (["train", "CartPole-v1", "--help"], 0, "Train an agent"),
        (["resume", "nothing-there"], 1, "nothing-there"),
    ],
)
def test_a_command_that_trains_nothing_says_why_and_leaves_no_process(
    words: list[str], status: int, said: str, tmp_path: Path
) -> None:
    with command(tmp_path, *words) as run:
        early: set[int] = set()
        while run.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                early |= {child.pid for child in psutil.Process(run.pid).children()}
            time.sleep(0.01)
        output, errors = run.communicate()
    assert run.returncode == status, errors
    assert said in re.sub(r"\x1b\[[0-9;]*m", "", output + errors)
    assert "Traceback" not in errors
    wait_until(lambda: not any(map(psutil.pid_exists, early)), 60, "no process is left")


def test_one_that_is_asked_where_its_threads_are_before_it_can_answer_lives_on() -> None:
    """The runner asks whoever starts for long."""
    worker = WorkerProcess(COMMAND, environment(1))
    worker.process.send_signal(ASK_FOR_STACK)
    worker._socket.close()
    assert worker.process.wait(120) == 0
