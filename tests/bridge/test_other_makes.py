"""Peers of other makes, written byte by byte as others wrote them: they wake nobody, know
no companion files, and begin in ways of their own."""

import mmap
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tidemill.bridge import ActionTuple, Bridge, Simulator, World
from tidemill.bridge.protocol import two_files
from tidemill.core.errors import PeerLost


def mapped(path):
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def wait(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.0005)


def group_0(name, agents, size, actions):
    """A continuous group of layout 0 with one observation."""
    head = (
        bytes([len(name)])
        + name
        + bytes(63 - len(name))
        + struct.pack("<iBiiiii", agents, 1, actions, 1, size, 0, 0)
    )
    return head + bytes(4 + agents * (4 * size + 10 + 4 * actions))


class OldSimulator(threading.Thread):
    """Layout 0. It hands straight back with no group, answers the first reset, and adds
    its group on the way; it never clears what was there."""

    def __init__(self, path, steps):
        super().__init__(daemon=True)
        self.path, self.steps, self.got, self.fault = path, steps, [], None

    def run(self):
        try:
            self.play()
        except BaseException as error:
            self.fault = error
            raise

    def receive(self, file):
        wait(lambda: file[8] == 1)
        return file[9]

    def play(self):
        wait(self.path.exists)
        file = mapped(self.path)
        assert self.receive(file) == 0
        file[9], file[8] = 0, 0
        assert self.receive(file) == 1  # reset
        base = 18 + struct.unpack_from("<i", file, 10)[0]
        struct.pack_into("<i", file, base - 4, 1)
        content = bytearray(file) + group_0(b"old", 3, 2, 1)
        struct.pack_into("<i", content, 0, len(content))
        new = self.path.with_name(self.path.name + "_")
        new.write_bytes(content)
        file[9], file[8] = 2, 0
        file = mapped(new)
        dynamic = base + 64 + 4 + 1 + 4 + 4 + 12
        for step in range(self.steps):
            struct.pack_into("<i", file, dynamic, 3)
            struct.pack_into("<6f", file, dynamic + 4, *[step, 0, step, 1, step, 2])
            struct.pack_into("<3f", file, dynamic + 28, 1, 2, 3)
            # max_step of a row that runs is left from before
            file[dynamic + 40 : dynamic + 46] = bytes([0, step == 2, 0, 0, 1, 0])
            struct.pack_into("<3i", file, dynamic + 46, 4, 5, 6)
            file[9], file[8] = 0, 0
            command = self.receive(file)
            self.got.append(struct.unpack_from("<3f", file, dynamic + 58))
            if command == 3:
                new.unlink(missing_ok=True)
                return


def test_an_old_simulator_is_driven(tmp_path):
    peer = OldSimulator(tmp_path / "m", 100)
    peer.start()
    with Simulator(memory_path=tmp_path / "m") as simulator:
        assert list(simulator.behavior_specs) == []
        simulator.reset()
        spec = simulator.behavior_specs["old"]
        assert (spec.max_agents, spec.observation_specs[0].shape, spec.action_spec.continuous_size) == (
            3,
            (2,),
            1,
        )
        for step in range(5):
            decisions, terminals = simulator.get_steps("old")
            running = [0, 2] if step == 2 else [0, 1, 2]
            assert decisions.obs[0].tolist() == [
                [step, i] for i in running
            ] and decisions.agent_id.tolist() == [4 + i for i in running]
            assert terminals.agent_id.tolist() == ([5] if step == 2 else []) and all(terminals.interrupted)
            simulator.set_actions(
                "old", ActionTuple(np.array([[10 * step + i] for i in running], np.float32))
            )
            simulator.step()
    peer.join(60)
    assert peer.fault is None and peer.got[:5] == [
        (0, 1, 2),
        (10, 11, 12),
        (20, 0, 22),
        (30, 31, 32),
        (40, 41, 42),
    ]
    assert list(tmp_path.iterdir()) == []


class OldTrainer:
    """Layout 0 from the other end: it spins, wakes nobody, holds no lock, and leaves
    deleting to the simulator."""

    def __init__(self, path):
        self.path = path
        path.write_bytes(struct.pack("<iiBBiii", 22, 0, 0, 0, 4, 0, 0))
        self.file = mapped(path)

    def exchange(self, command=0):
        self.file[9], self.file[8] = command, 1
        while True:
            wait(lambda: self.file[8] == 0)
            if self.file[9] != 2:
                return
            old, self.path = self.path, self.path.with_name(self.path.name + "_")
            self.file = mapped(self.path)
            old.unlink()


@pytest.mark.parametrize("first", [0, 1])
def test_an_old_trainer_drives_a_world(tmp_path, first):
    trainer = OldTrainer(tmp_path / "m")
    results = []

    def simulate():
        bridge = Bridge(tmp_path / "m")
        world = bridge.add(World("w", 2, [(2,)], continuous_size=1))
        for tick in range(100):
            world.request_decision(3).set_observation(0, [tick, 1]).set_reward(tick)
            going = bridge.exchange()
            results.append([event.continuous.tolist() for event in world.actions()])
            if not going:
                return

    thread = threading.Thread(target=simulate, daemon=True)
    thread.start()
    trainer.exchange(first)
    base = 22
    dynamic = base + 64 + 4 + 1 + 4 + 4 + 12
    seen = struct.unpack_from("<iff", trainer.file, dynamic)
    assert seen == (1, first, 1)
    assert struct.unpack_from("<i", trainer.file, dynamic + 4 + 16 + 8 + 4)[0] == 3
    struct.pack_into("<f", trainer.file, dynamic + 4 + 2 * (8 + 10), 5.5)
    trainer.exchange()
    trainer.file[9], trainer.file[8] = 3, 1
    thread.join(60)
    assert not thread.is_alive()
    assert results[-2:] == [[[5.5]], [[0.0]]] and (results[0] == []) == (first == 1)
    assert list(tmp_path.iterdir()) == []


class OldSimulator3(threading.Thread):
    """Layout 0.3.0 and 0.3.2. It says that it joined before it first waits, makes several
    bodies in one turn, and clears the flags that it reads."""

    def __init__(self, path, version):
        super().__init__(daemon=True)
        self.path, self.version, self.resets, self.got = path, version, 0, []

    def body(self, number):
        return self.path.with_name(self.path.name + "_" * number)

    def run(self):
        wait(self.path.exists)
        header = mapped(self.path)
        wait(lambda: header[13])  # the trainer has made the file and may not have waited yet
        self.version_seen = struct.unpack_from("<iii", header, 0)
        header[13] = 0
        time.sleep(0.05)
        self.hurried = header[13] != 0  # the next command came before we waited for it
        capacity = struct.unpack_from("<i", header, 20)[0]
        if self.version == 2:
            spec = (
                b"\x03new"
                + struct.pack("<ii", 2, 1)
                + struct.pack("<7i", 2, 0, 0, 1, 0, 0, 0)
                + struct.pack("<ii", 1, 1)
                + struct.pack("<i", 3)
            )
            rows = 2 * (8 + 4 + 4 + 3), 2 * (4 + 4)
        else:
            spec = b"\x03new" + struct.pack("<iBii", 2, 0, 1, 3) + struct.pack("<4i", 1, 2, 0, 0)
            rows = 2 * (8 + 4 + 4 + 3), 2 * 4
        decisions = capacity + len(spec)
        terminations = decisions + 4 + rows[0]
        actions = terminations + 4 + 2 * (8 + 4 + 1 + 4)
        size = actions + rows[1]
        for number in (2, 3):
            with self.body(number).open("wb") as file:
                file.write(bytes(capacity) + spec + bytes(size - capacity - len(spec)))
            struct.pack_into("<i", header, 16, number)
        struct.pack_into("<i", header, 24, size - capacity)
        body = mapped(self.body(3))
        for step in range(100):
            struct.pack_into("<iffff", body, decisions, 1, step, 7, 0, 0)
            struct.pack_into("<i", body, decisions + 4 + 16 + 8, 40)
            body[decisions + 4 + 16 + 8 + 8 + 1] = 1
            struct.pack_into("<i", body, terminations, step % 2)
            struct.pack_into("<f", body, terminations + 4 + 16, 9)
            body[terminations + 4 + 16 + 8] = 1
            struct.pack_into("<i", body, terminations + 4 + 16 + 8 + 2, 41)
            header[12] = 1
            header[13] = 0
            wait(lambda: not header[12] or header[15])
            if header[15]:
                time.sleep(0.2)
                self.found = sorted(
                    path.name for path in self.path.parent.iterdir() if path.name in ("m", "m___")
                )
                self.path.unlink()
                self.body(3).unlink()
                return
            self.resets += header[14]
            header[14] = 0
            self.got.append(struct.unpack_from("<i", body, actions + (8 if self.version == 2 else 0))[0])


@pytest.mark.parametrize("version", [0, 2])
def test_an_old_simulator_with_two_files_is_driven(tmp_path, version, monkeypatch):
    # however long its thread sleeps on a busy machine
    monkeypatch.setattr(two_files, "_SETTLE", 120.0)
    monkeypatch.setattr("tidemill.bridge.trainer_side.simulator._TIDIES", 120.0)
    peer = OldSimulator3(tmp_path / "m", version)
    peer.start()
    with Simulator(memory_path=tmp_path / "m", layout=f"0.3.{version}") as simulator:
        simulator.reset()
        assert peer.version_seen == (0, 3, version)
        spec = simulator.behavior_specs["new"]
        assert spec.action_spec.branches == (3,) and spec.action_spec.continuous_size == (
            1 if version == 2 else 0
        )
        for _ in range(4):
            decisions, terminals = simulator.get_steps("new")
            step = int(decisions.obs[0][0, 0])
            assert decisions.obs[0].tolist() == [[step, 7]] and decisions.agent_id.tolist() == [40]
            assert decisions.forbidden.tolist() == [[False, True, False]]
            assert (
                terminals.agent_id.tolist() == [41] * (step % 2)
                and terminals.reward.tolist() == [9] * (step % 2)
                and terminals.interrupted.all()
            )
            simulator.set_actions("new", ActionTuple(discrete=np.array([[step % 3]], np.int32)))
            simulator.step()
            assert peer.got[step] == step % 3
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("m_")] == ["m___"]
        simulator.close(120.0)
    peer.join(60)
    assert not peer.hurried and peer.resets == 1 and list(tmp_path.iterdir()) == []
    assert peer.found == ["m", "m___"]  # who has not closed deletes: they were left to it


def test_a_simulator_that_writes_another_version_is_told(tmp_path):
    def other():
        wait((tmp_path / "m").exists)
        file = mapped(tmp_path / "m")
        wait(lambda: file[8] == 1)
        struct.pack_into("<i", file, 4, 5)
        file[8] = 0

    threading.Thread(target=other, daemon=True).start()
    with pytest.raises(Exception, match="version 5"):
        Simulator(memory_path=tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_simulator_that_closes_at_once_is_told(tmp_path):
    def other():
        wait((tmp_path / "m").exists)
        file = mapped(tmp_path / "m")
        wait(lambda: file[8] == 1)
        file[9], file[8] = 3, 0

    threading.Thread(target=other, daemon=True).start()
    with pytest.raises(PeerLost, match="closed the bridge"):
        Simulator(memory_path=tmp_path / "m")


DYING = '''
import struct, subprocess, sys
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<iiBBiii", 22, 0, 1, 0, 4, 0, 0))
world = f"""
from tidemill.bridge import Bridge, World
bridge = Bridge()
world = bridge.add(World("w", 1, [(1,)], 1))
world.request_decision(0)
assert not bridge.exchange()
with open({sys.argv[2]!r}, "w") as file:
    file.write(bridge.reason)
"""
subprocess.Popen([sys.executable, "-c", world, "--memory-path", sys.argv[1]])
input()
'''


def test_the_death_of_an_old_trainer_that_is_the_parent_is_noticed(tmp_path):
    reason = tmp_path / "reason"
    trainer = subprocess.Popen([sys.executable, "-c", DYING, tmp_path / "m", reason], stdin=subprocess.PIPE)
    wait((tmp_path / "m_").exists)  # the world has added itself
    trainer.kill()
    trainer.wait()
    wait(lambda: reason.exists() and reason.read_text())
    assert reason.read_text() == f"the trainer (process {trainer.pid}) died"
    assert [path.name for path in tmp_path.iterdir()] == ["reason"]
