"""A look inside memory files: what is printed, from valid and from damaged ones."""

import hashlib
import json
import os
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.bridge.images import image_of, spec_of
from typer.testing import CliRunner

from tidemill.bridge import ActionTuple, Simulator
from tidemill.bridge.kit.dump import dump, text_of
from tidemill.bridge.protocol.image import layout_of, read_image
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.cli.simulator import simulator as commands
from tidemill.core.errors import ImageError

SIMULATORS = str(Path(__file__).parents[1] / "simulators.py")
VECTOR, CHOICES = spec_of([(4,)], continuous=2), spec_of([(2,), (2, 3, 1)], branches=(3, 2), agents=4)
ROW_KEYS = ["n_agents", "obs", "reward", "done", "max_step", "agent_id", "masks", "action"]
SPEC_KEYS = ["name", "max_agents", "continuous", "action_size", "branches", "observation_shapes"]


def written(folder, layout, groups, **more):
    """Write an image; return the arguments of `dump`."""
    first, body = image_of(layout, groups, **more)
    (folder / "memory").write_bytes(first)
    if body is None:
        return (folder / "memory",)
    (folder / "memory_").write_bytes(body)
    return folder / "memory_", folder / "memory"


def printed(*arguments):
    """Run the command; return its status, its output as JSON (None where there is none),
    and what it complains of."""
    done = CliRunner().invoke(commands, ["dump", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    valid = (
        json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        if done.stdout
        else None
    )
    return done.exit_code, valid, done.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_prints_what_a_group_is(layout, tmp_path):
    file, *header = written(
        tmp_path, layout, {"vector": VECTOR, "choices": CHOICES}, side_channel=b"\x01\xff!", rows=4
    )
    status, image, complaint = printed(file, *(["--header", header[0]] if header else []))
    assert (status, complaint) == (0, "")
    assert (image["layout"], image["command"], image["side_channel_bytes"], image["side_channel"]) == (
        layout,
        0,
        3,
        "01ff21",
    )
    assert [[group[key] for key in SPEC_KEYS] for group in image["groups"]] == [
        ["vector", 10, True, 2, [], [[4]]],
        ["choices", 4, False, 2, [3, 2], [[2], [2, 3, 1]]],
    ]


def test_rows_are_printed_as_they_lie(tmp_path):
    (file,) = written(tmp_path, "0", {"choices": CHOICES}, rows=4)
    (group,) = dump(file)["groups"]
    assert list(group) == SPEC_KEYS + ROW_KEYS
    assert (
        group["n_agents"] == 4
        and group["agent_id"] == [100, 101, 103, 102]
        and group["reward"] == [0, 1, 3, 2]
    )
    assert group["done"] == [False, False, False, True] and group["max_step"] == [False] * 4
    assert group["obs"] == [
        [[10 * i] * 2 for i in (0, 1, 3, 2)],
        [[[[10 * i + 1]] * 3] * 2 for i in (0, 1, 3, 2)],
    ]
    assert group["masks"] == [[1, 0, 1, 0, 1]] * 4 and group["action"] == [[0, 0]] * 4


@pytest.mark.parametrize("layout", ["0.3.0", "0.3.2"])
def test_decisions_and_terminations_are_apart_in_layout_3(layout, tmp_path):
    (group,) = dump(*written(tmp_path, layout, {"choices": CHOICES}, rows=4))["groups"]
    decisions, terminations = group["decisions"], group["terminations"]
    assert list(decisions) == list(terminations) == ROW_KEYS
    assert (decisions["n_agents"], decisions["agent_id"], decisions["reward"]) == (
        3,
        [100, 101, 103],
        [0, 1, 3],
    )
    assert (
        decisions["masks"] == [[1, 0, 1, 0, 1]] * 3 and decisions["action"] == group["action"] == [[0, 0]] * 3
    )
    assert (
        terminations["n_agents"],
        terminations["agent_id"],
        terminations["done"],
        terminations["max_step"],
    ) == (1, [102], [True], [False])
    assert (
        terminations["obs"] == [[[20, 20]], [[[[21]] * 3] * 2]]
        and terminations["masks"] is terminations["action"] is None
    )


def test_hybrid_actions_are_a_row_of_floats_and_choices(tmp_path):
    file, header = written(tmp_path, "0.3.2", {"both": spec_of([(1,)], continuous=2, branches=(4,))}, rows=2)
    memory = bytearray(file.read_bytes())
    (group,) = read_image(LAYOUTS["0.3.2"], header.read_bytes(), memory).groups
    struct.pack_into("<4f", memory, group.places["continuous_actions"], 0.5, 1.5, 2.5, 3.5)
    struct.pack_into("<2i", memory, group.places["discrete_actions"], 3, 1)
    file.write_bytes(memory)
    (group,) = dump(file, header)["groups"]
    assert (group["continuous"], group["action_size"], group["branches"]) == (True, 3, [4])
    assert group["action"] == [[0.5, 1.5, 3], [2.5, 3.5, 1]]


@pytest.mark.parametrize(("turn", "command"), [(0, 0), (1, 1), (0, 2), (1, 3)])
def test_turn_and_command(turn, command, tmp_path):
    (file,) = written(tmp_path, "0", {})
    memory = bytearray(file.read_bytes())
    memory[8], memory[9] = turn, command
    file.write_bytes(memory)
    assert [dump(file)[key] for key in ("turn", "command", "groups")] == [turn, command, []]


@pytest.mark.parametrize(
    ("flags", "turn", "command"),
    [
        ((1, 0, 0, 0), 0, 0),
        ((0, 1, 1, 0), 1, 1),
        ((0, 1, 0, 1), 1, 3),
        ((1, 1, 0, 0), None, 0),
        ((0, 1, 0, 0, 1), 1, 4),
    ],
)
def test_turn_and_command_of_layout_3_are_told_in_the_same_numbers(flags, turn, command, tmp_path):
    file, header = written(tmp_path, "0.3.2", {})
    memory = bytearray(header.read_bytes())
    memory[12:16], memory[28] = bytes(flags[:4]), flags[4] if flags[4:] else 0
    header.write_bytes(memory)
    assert [dump(file, header)[key] for key in ("turn", "command")] == [turn, command]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    (file,) = written(tmp_path, "0", {"vector": VECTOR}, rows=2)
    memory = bytearray(file.read_bytes())
    (group,) = read_image(LAYOUTS["0"], memory).groups
    struct.pack_into("<2f", memory, group.places["obs"] + 4, np.nan, np.inf)
    struct.pack_into("<f", memory, group.places["reward"], -np.inf)
    file.write_bytes(memory)
    status, image, _ = printed(file)
    assert status == 0
    assert image["groups"][0]["obs"][0][0] == [0, None, None, 0] and image["groups"][0]["reward"] == [None, 1]


def test_a_header_finds_its_body(tmp_path):
    body, header = written(tmp_path, "0.3.0", {"vector": VECTOR}, rows=1)
    assert dump(header) == dump(body, header)


def damaged(layout):
    """Every way in which a byte of a valid image can be another, and every length at
    which it can end."""
    whole = b"".join(
        part or b""
        for part in image_of(layout, {"a": spec_of([(1,)], branches=(2,), agents=1)}, b"x", rows=1)
    )
    for i in range(len(whole)):
        for value in (0, 0xFF):
            yield whole[:i] + bytes([value]) + whole[i + 1 :]
        yield whole[:i]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files_give_one_error_or_an_image(layout, tmp_path):
    header_bytes = LAYOUTS[layout].header_bytes
    refused = 0
    for bytes_ in damaged(layout):
        (tmp_path / "memory").write_bytes(bytes_ if layout == "0" else bytes_[:header_bytes])
        (tmp_path / "memory_").write_bytes(bytes_[header_bytes:])
        try:
            text = text_of(
                dump(tmp_path / "memory")
                if layout == "0"
                else dump(tmp_path / "memory_", tmp_path / "memory")
            )
        except ImageError as error:
            refused += 1
            assert str(error)
        else:
            json.loads(text)
    assert refused > 50


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 21, b"a stray!", b"\xff" * 500, struct.pack("<ii", 400, 7) + bytes(400)]
)
def test_the_command_ends_with_a_status_and_a_line_where_there_is_no_image(content, tmp_path):
    (tmp_path / "memory").write_bytes(content)
    status, image, complaint = printed(tmp_path / "memory")
    assert status == 1 and image is None and complaint.startswith("error: ") and complaint.count("\n") == 1


def test_wrong_files_are_named(tmp_path):
    body, header = written(tmp_path, "0.3.0", {"vector": VECTOR})
    with pytest.raises(ImageError, match=r"name its header, too"):
        dump(body)
    with pytest.raises(ImageError, match="is no header"):
        dump(header, body)
    header.write_bytes(header.read_bytes()[:16] + struct.pack("<i", 2**31 - 1) + header.read_bytes()[20:])
    with pytest.raises(ImageError, match="a name that no file has"):
        dump(header)
    (single,) = written(tmp_path, "0", {"vector": VECTOR})
    with pytest.raises(ImageError, match="dump it alone"):
        dump(body, single)
    os.mkfifo(tmp_path / "pipe")
    for path, cause in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "no plain file"),
        (tmp_path / "pipe", "no plain file"),
    ):
        with pytest.raises(ImageError, match=cause):
            dump(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_running_simulator_is_looked_into_without_a_change(layout):
    with Simulator(sys.executable, [SIMULATORS, "rich"], layout=layout) as simulator:
        simulator.reset()
        simulator.set_actions("rich", ActionTuple(None, np.array([[2, 1], [0, 1]])))
        simulator.step()
        first = simulator._meeting.path
        while layout == "0" and not first.exists():
            first = first.with_name(first.name + "_")
        files = [
            path for path in first.parent.iterdir() if path.name.startswith("memory") and path.suffix == ""
        ]
        before = {
            path: (
                stat.S_IMODE(path.stat().st_mode),
                path.stat().st_mtime_ns,
                hashlib.sha256(path.read_bytes()).digest(),
            )
            for path in files
        }
        assert layout_of(first.read_bytes()) == layout
        image = dump(first)
        assert before == {
            path: (
                stat.S_IMODE(path.stat().st_mode),
                path.stat().st_mtime_ns,
                hashlib.sha256(path.read_bytes()).digest(),
            )
            for path in files
        }
        (group,) = image["groups"]
        rows = group.get("decisions", group)
        decisions, _ = simulator.get_steps("rich")
        assert (image["turn"], rows["agent_id"], rows["reward"]) == (0, decisions.agent_id.tolist(), [21, 1])
        assert rows["obs"] == [array.tolist() for array in decisions.obs] and rows["action"] == [
            [2, 1],
            [0, 1],
        ]
        assert rows["obs"][0] == [[0, 1], [1, 1]]
        simulator.step()
        assert dump(first)["groups"][0].get("decisions", dump(first)["groups"][0])["obs"][0] == [
            [0, 2],
            [1, 2],
        ]
