"""The socket that `tidemill pause|start|stop` speak to."""

import os
import select
import socket as sockets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Scripted, Trainer
from tidemill.api.control_messages import Notice, pack, unpack_up
from tidemill.core.errors import RunError
from tidemill.run.control_socket import ControlSocket, NoRun, _address, tell
from tidemill.store.checkpoint import write_checkpoint

LINUX = sys.platform.startswith("linux")
DEADLINE = 60.0  # seconds; nothing here takes a tenth of it


def until(future: "Future[str]", socket: ControlSocket) -> list[str]:
    """Serve the socket until the answer has arrived; return the commands that came."""
    seen, deadline = [], time.monotonic() + DEADLINE
    while not future.done() and time.monotonic() < deadline:
        for command, connection in socket.commands():
            seen.append(command)
            ControlSocket.reply(connection, f"did {command}")
        time.sleep(1e-3)
    return seen


def test_a_message_may_tell_the_name_of_a_file_that_is_no_utf_8() -> None:
    assert unpack_up(pack(Notice("cannot open caf\udce9.xml"))) == Notice("cannot open caf?.xml")


def test_commands_arrive_and_are_answered(tmp_path: Path) -> None:
    socket = ControlSocket(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        for command in ("pause", "start", "stop"):
            answer = pool.submit(tell, tmp_path, command)
            assert until(answer, socket) == [command]
            assert answer.result(DEADLINE) == f"did {command}"
    socket.close()


def test_of_a_run_that_does_not_answer_the_last_record_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = ControlSocket(tmp_path)  # it listens, and nobody serves it
    monkeypatch.setattr("tidemill.run.control_socket._TIMEOUT", 0.05)
    with pytest.raises(RunError, match=r"within 0.05 s: its main process hangs, or.* that takes long$"):
        tell(tmp_path, "status")
    for record, known in (
        ('{"step": 4096, "update": 1200}', "update 1,200"),
        ('{"trainer-1-0/step": 9, "trainer-1-0/update": 7}', "update 7"),
        ('{"step": 4100, "evaluation/return": 3}', "env step 4,100"),
    ):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f"{record}\n")
        os.utime(file.name, (time.time() - 100,) * 2)
        with pytest.raises(RunError, match=rf"takes long; its last record, of {known}, is 1\d\d s old$"):
            tell(tmp_path, "status")
    socket.close()


@pytest.mark.skipif(not LINUX or os.getuid() != 0, reason="only root can become another user")
def test_nobody_else_may_speak_to_a_run(tmp_path: Path) -> None:
    socket = ControlSocket(tmp_path)
    code = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + sys.argv[1])
connection.sendall(b"stop")
print("connected", flush=True)
connection.recv(9)
"""
    stranger = subprocess.Popen(
        [sys.executable, "-c", code, _address(tmp_path)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert stranger.stdout is not None and stranger.stdout.readline() == b"connected\n"
    assert list(socket.commands()) == []
    stranger.communicate(timeout=DEADLINE)
    socket.close()


def test_elsewhere_than_on_linux_the_socket_is_a_file_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.run.control_socket.sys.platform", "darwin")
    monkeypatch.chdir(tmp_path)  # a path to a socket must be short
    umask = os.umask
    before = umask(0)
    monkeypatch.setattr(os, "umask", None)  # it is all threads', of which another may begin a run, too
    try:
        socket = ControlSocket(Path())
    finally:
        umask(before)
    mode = (tmp_path / "control.sock").stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    socket._socket.close()  # as kill -9 does: the file stays
    with pytest.raises(RunError, match="no run is going on there"):
        tell(Path(), "stop")
    ControlSocket(Path()).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not LINUX, reason="elsewhere it is a file")
def test_on_linux_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    ControlSocket(tmp_path)._socket.close()  # as kill -9 does
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match="no run is going on there"):
        tell(tmp_path, "stop")


def test_one_folder_has_one_socket(tmp_path: Path) -> None:
    socket = ControlSocket(tmp_path)
    if LINUX:
        with pytest.raises(RunError, match="cannot be made"):
            ControlSocket(tmp_path)
    socket.close()
    ControlSocket(tmp_path).close()


def test_where_nothing_runs_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run is going on there$"):
        tell(tmp_path, "pause")
    write_checkpoint(tmp_path / "checkpoints" / "policy", "update-1", {}, {}, 1)
    with pytest.raises(RunError, match=r"no run is going on there; go on with it by: .*tidemill resume"):
        tell(tmp_path, "pause")


def test_a_run_that_ends_before_it_answers_is_none(tmp_path: Path) -> None:
    socket = ControlSocket(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tell, tmp_path, "status")
        select.select([socket._socket], [], [], DEADLINE)
        socket.close()
        with pytest.raises(NoRun, match="no run is going on there"):
            answer.result(DEADLINE)


def test_who_hangs_up_before_the_answer_does_no_harm(tmp_path: Path) -> None:
    socket = ControlSocket(tmp_path)
    with sockets.socket(sockets.AF_UNIX) as hasty:
        hasty.connect(_address(tmp_path))
        hasty.sendall(b"pause")
    ((command, connection),) = socket.commands()
    ControlSocket.reply(connection, "paused")
    assert command == "pause"
    assert list(socket.commands()) == []
    socket.close()


@pytest.mark.skipif(not LINUX, reason="elsewhere whoever finds no room is refused")
def test_who_finds_others_waiting_waits_too(tmp_path: Path) -> None:
    socket, others = ControlSocket(tmp_path), list[sockets.socket]()
    with suppress(BlockingIOError):  # there is room for no more
        while len(others) < 100:
            others.append(sockets.socket(sockets.AF_UNIX))
            others[-1].settimeout(DEADLINE)
            others[-1].connect(_address(tmp_path))
            others[-1].sendall(b"pause")
    assert len(others) < 100
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tell, tmp_path, "status")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        assert until(answer, socket) == ["pause"] * (len(others) - 1) + ["status"]
        assert answer.result(DEADLINE) == "did status"
    for each in (*others, socket):
        each.close()


def answers_of(
    path: Path, commands: Sequence[str], trainers: int = 1, **settings: Any
) -> tuple[Any, list[str]]:
    """Return how a run ended, and what it has answered to these commands after its first
    update."""
    actors = Actors(environment=Scripted(), lanes=4, count=trainers, agents=(AgentSpec(sample_steps=8),))
    trainer = Trainer(algorithm=PPO(epochs=1), count=trainers, max_policy_lag=0 if trainers > 1 else None)
    # without a limit: it ends when it is told to
    experiment = Experiment(
        name="told",
        policies={"policy": ActorCritic()},
        workers={"actor": actors, "trainer": trainer},
        **settings,
    )
    results = []
    run = threading.Thread(
        target=lambda: results.append(
            tidemill.train(experiment, launch="inline", layout="given", run_dir=path, quiet=True)
        )
    )
    run.start()
    metrics, deadline = path / "metrics.jsonl", time.monotonic() + DEADLINE
    while not (metrics.exists() and metrics.stat().st_size):  # until the first update
        assert time.monotonic() < deadline and run.is_alive()
        time.sleep(0.01)
    answers = [tell(path, command) for command in commands]
    run.join(DEADLINE)
    return results[0].summary, answers


def test_a_run_is_paused_started_and_stopped(tmp_path: Path) -> None:
    path = tmp_path / "run"
    summary, answers = answers_of(path, ("pause", "start", "nonsense", "stop"))
    assert answers == [
        "paused",
        "running",
        'unknown command "nonsense"',
        "stopping: a final checkpoint is written",
    ]
    assert (summary["status"], summary["reason"]) == ("completed", "tidemill stop")
    assert (path / "checkpoints" / "policy" / f"update-{summary['updates']}").is_dir()
    with pytest.raises(RunError, match="no run is going on"):
        tell(path, "pause")


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_save_in_a_pause_of_an_exact_run_says_when_it_comes(tmp_path: Path, trainers: int) -> None:
    """Equal trainers come to rest together only while the run goes on."""
    commands = ("pause", "save", "start", "save", "stop")
    _, answers = answers_of(tmp_path / "run", commands, trainers, exact_resume=True)
    now, later = "saving: a checkpoint is written", "saving once the run goes on: "
    assert answers[3] == now and answers[1].startswith(now if trainers == 1 else later)
