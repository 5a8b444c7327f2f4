"""Recordings: what was exchanged comes back, in the place of the simulator or compared
with one; files that lie are refused."""

import stat
import struct
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.bridge.conftest import Build
from typer.testing import CliRunner

from tidemill.bridge import ActionTuple, Simulator
from tidemill.bridge.kit.record import RecordedSimulator, record
from tidemill.bridge.kit.recording import (
    MAGIC,
    Actions,
    End,
    Exchange,
    GroupSpec,
    Head,
    Observation,
    RecordedRows,
    Recording,
    RecordingWriter,
)
from tidemill.bridge.kit.replay_recording import compare
from tidemill.bridge.kit.trial_trainer import Program
from tidemill.bridge.protocol.side_channels import Channels, EnvironmentParameters, Statistics
from tidemill.bridge.worlds import corridor
from tidemill.cli.simulator import simulator as commands
from tidemill.core.errors import ConfigError, PeerLost, RecordingError, TidemillError

SIMULATORS = str(Path(__file__).parents[1] / "simulators.py")
REPLAY = (
    "import pathlib, sys; from tidemill.bridge.kit.playback import replay; played = "
    "replay(pathlib.Path(sys.argv[1])); print(played)"
)


def recorded(out, kind, layout="0.3.2", steps=6, actions=None, **more):
    """Record a simulator of `simulators.py`; return all steps that were seen, by exchange
    and group."""
    with RecordedSimulator(sys.executable, [SIMULATORS, kind], out=out, layout=layout, **more) as simulator:
        return played(simulator, steps, actions)


def played(simulator, steps=6, actions=None):
    seen = []
    simulator.reset()
    for step in range(steps):
        seen.append({name: simulator.get_steps(name) for name in simulator.behavior_specs})
        if actions is not None:
            actions(simulator, step)
        simulator.step()
    return seen


def plain(seen):
    """As lists, agents in order of their ids."""
    found = []
    for groups in seen:
        for name, pair in groups.items():
            for rows in pair:
                order = np.argsort(rows.agent_id)
                flags = rows.interrupted if hasattr(rows, "interrupted") else rows.forbidden
                found.append(
                    (
                        name,
                        *(
                            array[order].tolist()
                            for array in (rows.agent_id, rows.reward, *rows.obs)
                            if len(array)
                        ),
                    )
                )
                found.append(None if flags is None else flags[order].tolist())
    return found


def rich_actions(simulator, step):
    simulator.set_actions("rich", ActionTuple(None, np.array([[step % 3, 1], [2, 0]])))
    simulator.set_action_for_agent("rich", 1, ActionTuple(None, np.array([1, step % 2])))


@pytest.mark.parametrize("layout", ["0", "0.3.0", "0.3.2"])
def test_a_recording_takes_the_simulators_place_in_any_layout(layout, tmp_path):
    seen = recorded(tmp_path / "r", "rich", actions=rich_actions)
    with Simulator(sys.executable, ["-c", REPLAY, str(tmp_path / "r")], layout=layout) as simulator:
        assert plain(played(simulator, actions=rich_actions)) == plain(seen)
        with pytest.raises(PeerLost, match=r"the recording is over(.|\n)*differing=0"):
            simulator.step()


@pytest.mark.parametrize("kind", ["episodes", "late", "alternating", "hybrid"])
def test_ends_late_groups_and_hybrid_actions_come_back(kind, tmp_path):
    seen = recorded(tmp_path / "r", kind, steps=9)
    with Simulator(sys.executable, ["-c", REPLAY, str(tmp_path / "r")], layout="0.3.2") as simulator:
        assert plain(played(simulator, 9)) == plain(seen)


def test_other_actions_are_counted(tmp_path):
    recorded(tmp_path / "r", "rich", actions=rich_actions)
    with Simulator(sys.executable, ["-c", REPLAY, str(tmp_path / "r")]) as simulator:
        played(simulator, actions=lambda simulator, step: rich_actions(simulator, step) if step > 1 else None)
        with pytest.raises(PeerLost, match="differing=2"):
            simulator.step()


def test_resets_go_on_at_the_next_recorded_one_and_then_at_the_first(tmp_path):
    with RecordedSimulator(sys.executable, [SIMULATORS, "napping"], out=tmp_path / "r") as simulator:
        for steps in (1, 3):
            played(simulator, steps)
    with Simulator(sys.executable, ["-c", REPLAY, str(tmp_path / "r")]) as simulator:
        assert [len(played(simulator, steps)) for steps in (1, 2, 1)] == [1, 2, 1]
        with pytest.raises(PeerLost, match="the recorded trainer reset here, and this one stepped"):
            simulator.step()


def test_side_channels_come_back(tmp_path):
    parameters, told, again = EnvironmentParameters(), Statistics(), Statistics()
    parameters.set("level", 3.0)
    recorded(tmp_path / "r", "statistical", channels=Channels([parameters, told]))
    with Recording(tmp_path / "r") as recording:
        assert b"level" in recording[1].sent and recording[2].sent == b""
    with Simulator(
        sys.executable, ["-c", REPLAY, str(tmp_path / "r")], channels=Channels([again])
    ) as simulator:
        played(simulator)
    assert again.tally.take() == told.tally.take() != {}


def test_queries_are_recorded_and_skipped(tmp_path):
    with RecordedSimulator(
        sys.executable, [SIMULATORS, "rich"], out=tmp_path / "r", layout="0.3.2"
    ) as simulator:
        simulator.reset()
        simulator.set_actions("rich", ActionTuple(None, np.array([[2, 1], [0, 1]])))
        simulator.query()
        simulator.step()
    with Recording(tmp_path / "r") as recording:
        assert recording.commands == [0, 1, 4, 0]
        assert recording.actions(recording[3], "rich", 2).discrete.tolist() == [[2, 1], [0, 1]]
        assert compare(recording, Program(SIMULATORS, ("rich",), "0.3.2")) == 4
    with Simulator(sys.executable, ["-c", REPLAY, str(tmp_path / "r")]) as simulator:
        assert simulator.get_steps("rich")[0].reward.tolist() == [0, 0]
        played(simulator, 1)
        assert simulator.get_steps("rich")[0].reward.tolist() == [21, 1]


def test_the_same_world_in_another_language_answers_as_recorded(tmp_path, native: Build):
    out, program = tmp_path / "r", Program(str(native("corridor")), ("--seed", "5"))
    assert record(program, out, 60) == 62
    with Recording(out) as recording:
        assert compare(recording, Program(corridor.__file__, ("--seed", "5"), "0.3.2")) == 62
        told = []
        assert compare(recording, Program(str(native("corridor")), ("--seed", "6")), tell=told.append) < 62
        assert "observation 0 of agent" in told[0]
        assert compare(recording, Program(str(native("reach"))), tell=told.append) == 0
        assert told[-2:] == [
            'exchange 0: there is no group "corridor"',
            'exchange 0: there is a group "reach", which was not there',
        ]


def test_a_tolerance_lets_numbers_differ(tmp_path):
    recorded(tmp_path / "r", "rich", actions=rich_actions)
    writer, told = RecordingWriter(tmp_path / "other", "0", ""), []
    with Recording(tmp_path / "r") as recording:
        for number, exchange in enumerate(recording):
            asks, ends = exchange.steps["rich"]
            reward = np.frombuffer(asks.reward, np.float32) + np.float32(number == 4) / 64
            writer.add(changed(exchange, steps={"rich": (changed(asks, reward=reward.tobytes()), ends)}))
    writer.close()
    with Recording(tmp_path / "other") as recording:
        program = Program(SIMULATORS, ("rich",))
        assert compare(recording, program, tell=told.append) == 4
        assert told == ['exchange 4: group "rich": reward of agent 0 was [21.015625], and is [21.0]']
        assert compare(recording, program, 0.02) == len(recording)


def test_the_file_appears_whole_and_is_its_owners(tmp_path):
    out = tmp_path / "r"
    with RecordedSimulator(sys.executable, [SIMULATORS, "rich"], out=out) as simulator:
        simulator.reset()
        (aside,) = tmp_path.iterdir()
        assert aside.name.startswith(".r.") and stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [out] and stat.S_IMODE(out.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="--force"):
        RecordedSimulator(sys.executable, [SIMULATORS, "rich"], out=out)
    recorded(out, "single", replace=True)
    with Recording(out) as recording:
        assert list(recording.specs) == ["single"] and recording.head.program == "simulators.py"


def test_a_simulator_that_dies_leaves_what_came_before(tmp_path):
    with pytest.raises(PeerLost, match="the sky fell"):
        record(Program(SIMULATORS, ("mortal",)), tmp_path / "r")
    with Recording(tmp_path / "r") as recording:
        assert len(recording) == 13
    with pytest.raises(TidemillError):
        record(Program(SIMULATORS, ("nothing",)), tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_the_commands(tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(commands, [str(argument) for argument in arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout + done.stderr

    out = tmp_path / "r"
    assert run("record", SIMULATORS, "--out", out, "--steps", "4", "--", "rich") == (
        0,
        f"{out}: 6 exchanges\n",
    )
    assert run("replay", out, "--against", SIMULATORS, "--", "rich") == (
        0,
        "6 of 6 exchanges were answered as recorded\n",
    )
    # kinds of actions, which layout 0.3.2 alone has: the recording's layout is taken
    both = tmp_path / "both"
    assert (
        run("record", SIMULATORS, "--out", both, "--steps", "4", "--layout", "0.3.2", "--", "hybrid")[0] == 0
    )
    assert run("replay", both, "--against", SIMULATORS, "--", "hybrid") == (
        0,
        "6 of 6 exchanges were answered as recorded\n",
    )
    assert (
        "layout 0 takes one of them only"
        in run("replay", both, "--against", SIMULATORS, "--layout", "0", "--", "hybrid")[1]
    )
    status, text = run("replay", out, "--against", SIMULATORS, "--", "single")
    assert status == 1 and text.endswith("0 of 6 exchanges were answered as recorded\n")
    with Simulator(sys.executable, ["-m", "tidemill.cli.main", "simulator", "replay", str(out)]) as simulator:
        assert len(played(simulator, 4)) == 4
        with pytest.raises(PeerLost, match="6 exchanges of 6; in 3 steps the actions were others"):
            simulator.step()
    out.write_bytes(b"nonsense")
    assert run("replay", out, "--memory-path", tmp_path / "none")[0] == 1


# ---- files that lie --------------------------------------------------------------------

GROUP = GroupSpec("g", 2, (Observation((2,), (), 0),), 1, ())
ASK = RecordedRows(struct.pack("<i", 7), bytes(4), (bytes(8),), b"")
NONE = RecordedRows(b"", b"", (b"",), b"")
FIRST = Exchange(0, b"", {}, b"", (GROUP,), {"g": (ASK, NONE)})
NEXT = Exchange(0, b"", {"g": Actions(bytes(4), b"")}, b"", (), {"g": (ASK, NONE)})


def file_of(*records):
    data = MAGIC
    for record_ in records:
        body = record_ if isinstance(record_, bytes) else msgspec.msgpack.encode(record_)
        data += struct.pack("<iI", len(body), zlib.crc32(body)) + body
    return data


def read(path, data):
    path.write_bytes(data)
    with Recording(path) as recording:
        return [recording.steps(exchange, "g") for exchange in recording]


HEAD = Head(1, "0", "x")


def test_damage_anywhere_is_told(tmp_path):
    whole = file_of(HEAD, FIRST, NEXT, End(2))
    assert len(read(tmp_path / "r", whole)) == 2
    for i in range(len(whole)):
        for data in (whole[:i], whole[:i] + bytes([whole[i] ^ 0x80]) + whole[i + 1 :]):
            with pytest.raises(RecordingError):
                read(tmp_path / "r", data)


def changed(record_, **fields):
    return msgspec.structs.replace(record_, **fields)


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ((FIRST, End(1)), "no head"),
        ((Head(2, "0", ""), FIRST, End(1)), "version 2"),
        ((Head(1, "7", ""), FIRST, End(1)), "layout '7'"),
        ((HEAD, FIRST, HEAD, End(1)), "second head"),
        ((HEAD, FIRST, End(7)), "its end says 7"),
        ((HEAD, FIRST, End(1), End(1)), "more follows"),
        ((HEAD, End(0)), "0 exchanges"),
        ((HEAD, b"\xc1"), "cannot be"),
        ((HEAD, b"\x91" * 100_000), "cannot be"),
        ((HEAD, msgspec.msgpack.encode({"type": "exchange", "command": 0})), "cannot be"),
        ((HEAD, changed(FIRST, command=2)), "no command 2"),
        ((HEAD, changed(FIRST, groups=())), "no group 'g'"),
        ((HEAD, FIRST, changed(NEXT, groups=(GROUP,))), "appears twice"),
        ((HEAD, changed(FIRST, groups=(changed(GROUP, max_agents=2**40),))), "do not fit"),
        ((HEAD, changed(FIRST, groups=(changed(GROUP, max_agents=0),))), "at least 1"),
        ((HEAD, changed(FIRST, groups=(changed(GROUP, name="x" * 64),))), "1 to 63"),
        (
            (HEAD, changed(FIRST, groups=(changed(GROUP, observations=(Observation((2,), (2**40,), 0),)),))),
            "properties cannot be",
        ),
        (
            (HEAD, changed(FIRST, groups=(changed(GROUP, observations=(Observation((-2,), (), 0),)),))),
            "from 1 up",
        ),
        (
            (HEAD, changed(FIRST, steps={"g": (changed(ASK, agent_id=bytes(7)), NONE)})),
            "agent ids have 7 bytes where 4",
        ),
        (
            (HEAD, changed(FIRST, steps={"g": (changed(ASK, reward=bytes(8)), NONE)})),
            "rewards have 8 bytes where 4",
        ),
        (
            (HEAD, changed(FIRST, steps={"g": (changed(ASK, obs=(bytes(4),)), NONE)})),
            "an observation have 4 bytes where 8",
        ),
        ((HEAD, changed(FIRST, steps={"g": (changed(ASK, obs=()), NONE)})), "0 observations where 1"),
        (
            (HEAD, changed(FIRST, steps={"g": (changed(ASK, flags=b"\1"), NONE)})),
            "masks have 1 bytes where 0",
        ),
        (
            (HEAD, changed(FIRST, steps={"g": (NONE, changed(ASK, flags=b"\1\1"))})),
            "flags have 2 bytes where 1",
        ),
        (
            (
                HEAD,
                changed(FIRST, steps={"g": (RecordedRows(bytes(12), bytes(12), (bytes(24),), b""), NONE)}),
            ),
            "3 \\+ 0 rows",
        ),
        (
            (HEAD, changed(FIRST, steps={"g": (changed(ASK, reward=struct.pack("<f", np.nan)), NONE)})),
            "not finite",
        ),
        (
            (HEAD, FIRST, changed(NEXT, actions={"g": Actions(bytes(8), b"")})),
            "continuous actions have 8 bytes where 4",
        ),
        ((HEAD, FIRST, changed(NEXT, actions={"h": Actions(b"", b"")})), "no group 'h'"),
    ],
)
def test_records_that_cannot_be_are_refused_whatever_their_checksums_say(records, cause, tmp_path):
    with pytest.raises(RecordingError, match=cause):
        read(
            tmp_path / "r",
            file_of(*records, End(len(records) - 1))
            if not isinstance(records[-1], End)
            else file_of(*records),
        )


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordingError):
            Recording(path)
    with pytest.raises(ConfigError, match="no recording can be written"):
        RecordingWriter(tmp_path / "none" / "r", "0", "")
