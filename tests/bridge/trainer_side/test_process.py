"""Simulators as processes: how they start and end, what is told when they die, and that
nothing stays behind."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil
import pytest

from tidemill.bridge import ActionTuple, Simulator
from tidemill.bridge.protocol import files
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.core.errors import ConfigError, PeerLost, SimulatorError

WORLD = """
import os, sys
from tidemill.bridge import Bridge, World
bridge = Bridge()
world = bridge.add(World("w", 2, [(3,)], continuous_size=1))
tick = 0
print("pid", os.getpid(), flush=True)
while True:
    for agent in range(2):
        world.request_decision(agent).set_observation(0, [agent, tick, os.getpid()])
    tick += 1
    if not bridge.exchange():
        break
with open(sys.argv[1], "w") as file:
    file.write(bridge.reason)
"""

TRAINER = """
import os, sys, time
from pathlib import Path
from tidemill.bridge import Simulator
from tidemill.bridge.protocol import files
files._MEMORY = Path(sys.argv[4])
simulator = Simulator(sys.argv[1], [sys.argv[2]], layout=sys.argv[3])
print(simulator._meeting.path, int(simulator.get_steps("w")[0].obs[0][0, 2]), flush=True)
time.sleep(60)
"""


PATIENCE = 120.0  # seconds until a test gives up


@pytest.fixture
def script(tmp_path):
    """Give a function that makes an executable Python script."""

    def make(text, name="simulator"):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o700)
        return path

    return make


def files_of(simulator):
    folder = simulator._meeting.path.parent
    return [folder, *folder.iterdir()] if folder.exists() else []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_executable_is_started_driven_and_ended(script, tmp_path, layout):
    with Simulator(script(WORLD), [str(tmp_path / "reason")], layout=layout) as simulator:
        simulator.reset()
        for tick in range(3):
            decisions, _ = simulator.get_steps("w")
            assert decisions.obs[0][:, :2].tolist() == [[0, tick + 1], [1, tick + 1]]
            simulator.set_actions("w", ActionTuple(np.ones((2, 1), np.float32)))
            simulator.step()
        folder = files_of(simulator)[0]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        simulator.close(PATIENCE)
    assert (tmp_path / "reason").read_text() == "the trainer closed the bridge"
    assert files_of(simulator) == []


def test_what_cannot_be_run_is_told_with_a_cure(script, tmp_path):
    (tmp_path / "plain").write_text("x")
    (tmp_path / "noise").write_bytes(b"\x00\x01\x02")
    (tmp_path / "noise").chmod(0o700)
    wrong = {"nothing": "no simulator", "plain": "chmod", "": "folder", "noise": "cannot be run"}
    for path, says in ((tmp_path / name, says) for name, says in wrong.items()):
        with pytest.raises((ConfigError, SimulatorError), match=says):
            Simulator(path)


def test_a_simulator_that_ends_at_once_is_told_with_the_end_of_its_output(script):
    path = script(
        "import sys\nfor i in range(200): print('line', i)\nprint('no license found', "
        "file=sys.stderr)\nsys.exit(3)"
    )
    with pytest.raises(
        PeerLost, match=r"(?s)exit code 3 before it first answered.*line 199\nno license found"
    ):
        Simulator(path)


def test_a_simulator_that_writes_much_is_not_held_up(script, tmp_path):
    path = script(WORLD.replace("    tick += 1", "    tick += 1\n    print('x' * 100_000, flush=True)"))
    with Simulator(path, [str(tmp_path / "reason")]) as simulator:
        for _ in range(5):
            simulator.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_simulator_is_noticed_though_a_step_may_take_any_time(script, tmp_path, layout):
    simulator = Simulator(script(WORLD), [str(tmp_path / "reason")], layout=layout)
    os.kill(int(simulator.get_steps("w")[0].obs[0][0, 2]), signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"SIGKILL.*\npid"):
        simulator.step()
    assert files_of(simulator) == []
    with pytest.raises(SimulatorError, match="is closed"):
        simulator.step()


def wait_until(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_a_killed_trainer_is_noticed_by_its_simulator_and_the_next_start_leaves_nothing(
    script, tmp_path, layout
):
    reason = tmp_path / "reason"
    world = script(WORLD)
    trainer = subprocess.Popen(
        [script(TRAINER, "trainer"), world, reason, layout, tmp_path], stdout=subprocess.PIPE, text=True
    )
    memory = trainer.stdout.readline().split()[0]
    trainer.kill()
    trainer.wait()
    wait_until(lambda: reason.exists() and reason.read_text())
    assert "died" in reason.read_text()
    # another test's trainer, which looks for what the dead left, may be at it as well
    wait_until(lambda: not os.path.exists(os.path.dirname(memory)))


def test_both_killed_leave_nothing_after_the_next_start(script, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    world = script(WORLD)
    trainer = subprocess.Popen(
        [script(TRAINER, "trainer"), world, tmp_path / "reason", "0", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    memory, simulator = trainer.stdout.readline().split()
    os.kill(int(simulator), signal.SIGSTOP)  # so that it does not tidy up
    trainer.kill()
    trainer.wait()
    with contextlib.suppress(ProcessLookupError):  # its guard may have been quicker
        os.kill(int(simulator), signal.SIGKILL)
    assert os.listdir(os.path.dirname(memory))
    with Simulator(world, [str(tmp_path / "reason")]):
        assert not os.path.exists(os.path.dirname(memory))


DEAF = """
import mmap, subprocess, sys, time
file = open(sys.argv[-1], "r+b")
memory = mmap.mmap(file.fileno(), 22)
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1], "w") as told:
    told.write(str(child.pid))
memory[8] = 0
time.sleep(600)
"""


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_simulator_that_does_not_notice_ends_with_its_killed_trainer_and_so_does_what_it_started(
    script, tmp_path
):
    code = (
        "import os, signal, sys\nfrom tidemill.bridge import Simulator\ns = Simulator(sys.argv[1], "
        "[sys.argv[2]])\n"
    )
    code += "print(s._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", code, script(DEAF), tmp_path / "child"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    pids = [int(done.stdout), int((tmp_path / "child").read_text())]
    wait_until(lambda: not any(map(lives, pids)))


def test_nobody_guards_a_simulator_that_has_ended(script, tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Simulator(script(DEAF), [str(tmp_path / "child")]) as simulator:
        # the simulator, its child, and the guard
        assert len({child.pid for child in psutil.Process().children(recursive=True)} - before) == 3
        simulator.close(0.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_living_trainers_do_not_disturb_one_another(script, tmp_path):
    world = script(WORLD)
    several = [Simulator(world, [str(tmp_path / f"reason{i}")]) for i in range(3)]
    for _ in range(3):
        for simulator in several:
            simulator.begin()
        for simulator in several:
            simulator.finish()
    assert len({simulator._meeting.path for simulator in several}) == 3
    for simulator in several:
        simulator.close()


def test_a_simulator_that_does_not_end_is_ended(script):
    path = script(
        WORLD.replace(
            "with open",
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\nwith open",
        )
    )
    simulator = Simulator(path)
    pid = int(simulator.get_steps("w")[0].obs[0][0, 2])
    simulator.close(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


HASTY = """
import mmap, sys, time
file = open(sys.argv[-1], "r+b")
memory = mmap.mmap(file.fileno(), 22)
for _ in range(2):
    while memory[8] != 1:
        time.sleep(0.001)
    time.sleep(0.2)  # the trainer closes meanwhile
    memory[9], memory[8] = 0, 0
while memory[8] != 1:
    time.sleep(0.001)
with open(sys.argv[1], "w") as heard:
    heard.write(str(memory[9]))
"""


def test_a_close_that_a_simulator_wrote_over_is_said_again(script, tmp_path):
    simulator = Simulator(script(HASTY), [str(tmp_path / "heard")])
    simulator.begin()
    simulator.close(PATIENCE)
    assert (tmp_path / "heard").read_text() == "3"


WAITING = """
import contextlib, time
begins = b""
while begins != bytes([22]):
    time.sleep(0.01)
    with contextlib.suppress(FileNotFoundError):  # between the dead one's file and the new one
        with open({default!r}, "rb") as file:
            begins = file.read(1)
"""


def test_an_editor_joins_at_the_default_file_and_the_files_of_a_dead_trainer_are_replaced(
    script, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / "ml-agents"
    folder.mkdir()
    for name in ("default", "default__", "default.trainer", "default.simulator"):
        (folder / name).write_bytes(struct.pack("<iiHii", 47, 0, 1, 4, 0) + b"left by somebody who died")
    (folder / "default2").write_text("another's")
    default = str(folder / "default")
    editor = script(WAITING.format(default=default) + WORLD)
    process = subprocess.Popen([editor, tmp_path / "reason"], stdout=subprocess.DEVNULL)
    try:
        with Simulator() as simulator:
            simulator.step()
            pid = int((folder / "default.simulator").read_text())
            assert pid == process.pid
            process.kill()
            process.wait()
            with pytest.raises(PeerLost, match=f"process {pid}"):
                simulator.step()
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in folder.iterdir()] == ["default2"]
