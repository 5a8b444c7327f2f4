"""Growth by changing files: from either side, as often as names allow, with peers that
grow earlier or later than ours."""

import mmap
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bridge.images import spec_of

from tidemill.bridge.protocol.open_memory import create_memory, join_memory
from tidemill.bridge.protocol.tables import CHANGE_FILE, CLOSE, LAYOUTS, RESET, SIMULATOR, STEP, TRAINER
from tidemill.bridge.trainer_side.steps import StepReader, clear_actions
from tidemill.core.errors import EnvironmentFault, ImageError, SimulatorError

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
SPEC = spec_of([(2,)], continuous=1, agents=2)


def look():
    """Nobody has to wait in these tests: who waits is waited for by nobody."""
    raise AssertionError("it is not this side's turn")


def pair(folder, layout):
    """Both sides in one thread, the trainer having the turn."""
    trainer = create_memory(LAYOUTS[layout], folder / "m", TRAINER)
    return trainer, join_memory(folder / "m")


def turn(giver, taker, command=STEP):
    giver.hand_over(command)
    return taker.receive(look)


@LAYOUT
def test_two_hundred_changes_from_both_sides_and_the_one_that_cannot_be_made_is_named(tmp_path, layout):
    trainer, simulator = pair(tmp_path, layout)
    assert turn(trainer, simulator) == STEP
    for i in range(60):
        simulator.put(b"", [(f"g{i}", SPEC)])
        struct.pack_into("<f", simulator.data, simulator.groups[i].places["reward"], i)
        assert turn(simulator, trainer) == STEP
        assert [group.name for group in trainer.groups] == [f"g{k}" for k in range(i + 1)]
        trainer.put(bytes(2 * (i + 10) ** 2))
        assert turn(trainer, simulator) == STEP
        assert simulator.take_side_channel() == bytes(2 * (i + 10) ** 2)
    more, refused = 0, ""
    while not refused and more < 250:
        try:
            simulator.put(b"", [(f"h{more}", SPEC)])
            more += 1
        except SimulatorError as error:
            refused = str(error)
    changes = 255 - len("m") - (1 if layout != "0" else 0)
    assert (
        changes > 200 and f"after {changes} changes" in refused and f'cannot take world "h{more}"' in refused
    )
    simulator.put(b"goes on")
    assert turn(simulator, trainer) == STEP
    assert len(trainer.groups) == 60 + more and trainer.take_side_channel() == b"goes on"
    for i in range(60):
        assert struct.unpack_from("<f", trainer.data, trainer.groups[i].places["reward"])[0] == i
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == (1 if layout == "0" else 2)


@LAYOUT
def test_what_is_new_in_a_turn_needs_one_change_of_the_body(tmp_path, layout):
    """The original trainer of layouts 0.3 dies of a second one; in layout 0 each group is
    a change."""
    trainer, simulator = pair(tmp_path, layout)
    turn(trainer, simulator)
    simulator.put(bytes(100), [(name, SPEC) for name in "abc"])
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["m", "m_", "m__", "m___"] if layout == "0" else ["m", "m_", "m__"]
    )
    turn(simulator, trainer)
    assert trainer.take_side_channel() == bytes(100)
    assert [group.name for group in trainer.groups] == ["a", "b", "c"]
    for length in (300, 800):  # a peer that changes more than once is followed
        trainer.put(b"x" * length)
    assert turn(trainer, simulator, RESET) == RESET
    assert simulator.take_side_channel() == b"x" * 800 and simulator.take_side_channel() == b""
    assert [group.name for group in simulator.groups] == ["a", "b", "c"]


def test_room_is_made_only_where_it_is_short(tmp_path):
    trainer, simulator = pair(tmp_path, "0")
    trainer.put(b"")
    assert trainer.path.name == "m"
    trainer.put(bytes(10))
    assert trainer.path.name == "m_" and len(trainer.data) == 22 + 2 * 10 + 20 - 4
    trainer.put(bytes(2 * 10 + 20 - 4))
    assert trainer.path.name == "m_"
    turn(trainer, simulator)
    assert simulator.take_side_channel() == bytes(36) and simulator.path.name == "m_"


@pytest.mark.parametrize("early", [True, False])
def test_peers_that_grow_early_or_late_are_followed(tmp_path, early):
    """Some grow where the data have C − 4 bytes or more, some where they have more;
    written by hand, as another program does it."""
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    path, file = tmp_path / "m", simulator.data
    for length in (0, 16, 17, 36):
        capacity = struct.unpack_from("<i", file, 10)[0]
        if length >= capacity - 4 if early else length > capacity - 4:
            bigger = 2 * length + 20
            content = bytearray(file[:14]) + bytearray(bigger) + bytearray(file[14 + capacity :])
            struct.pack_into("<i", content, 0, len(content))
            struct.pack_into("<i", content, 10, bigger)
            path = path.with_name(path.name + "_")
            path.write_bytes(content)
            file[9], file[8] = CHANGE_FILE, TRAINER
            with path.open("r+b") as stream:
                file = mmap.mmap(stream.fileno(), 0)
        struct.pack_into("<i", file, 14, length)
        file[18 : 18 + length] = b"d" * length
        file[9], file[8] = STEP, TRAINER
        assert trainer.receive(look) == STEP
        assert trainer.take_side_channel() == b"d" * length
        trainer.hand_over(STEP)
        assert file[8] == SIMULATOR
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@LAYOUT
def test_who_is_told_to_close_hears_it(tmp_path, layout):
    trainer, simulator = pair(tmp_path, layout)
    assert turn(trainer, simulator) == STEP
    assert not simulator.peer_closed()
    trainer.hand_over(CLOSE)
    assert simulator.peer_closed() and simulator.receive(look) == CLOSE


def test_a_side_channel_begins_with_room_for_16_bytes_in_layouts_of_two_files(tmp_path):
    """The original simulator dies at its first answer where its body has 4 bytes."""
    for layout, size in (("0", 22), ("0.3.0", 20), ("0.3.2", 20)):
        (tmp_path / layout).mkdir()
        trainer = create_memory(LAYOUTS[layout], tmp_path / layout / "m", TRAINER)
        assert len(trainer.data) == size
        trainer.close()


@pytest.mark.parametrize("layout", ["0.3.0", "0.3.2"])
def test_a_header_that_says_0_means_the_body_of_4_bytes_that_the_original_trainer_makes(tmp_path, layout):
    made = create_memory(LAYOUTS[layout], tmp_path / "m", TRAINER)
    made.hand_over(STEP)
    made.close()
    os.truncate(tmp_path / "m_", 4)
    with (tmp_path / "m").open("r+b") as stream:
        stream.seek(20)
        stream.write(bytes(4))
    simulator = join_memory(tmp_path / "m")
    assert simulator.receive(look) == STEP and simulator.take_side_channel() == b""
    simulator.put(b"", [("g", SPEC)])
    assert simulator._header["capacity"] == 4
    with (tmp_path / "m").open("rb") as stream:
        assert struct.unpack_from("<iii", stream.read(), 16) == (2, 4, len(simulator.data) - 4)


def test_a_change_to_a_file_that_is_not_there_is_refused(tmp_path):
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    with pytest.raises(ImageError, match=r"m_ cannot be opened"):
        turn(simulator, trainer, CHANGE_FILE)


def test_a_change_to_a_link_is_not_followed(tmp_path):
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    (tmp_path / "m_").symlink_to(tmp_path / "m")
    with pytest.raises(ImageError, match=r"m_ cannot be opened"):
        turn(simulator, trainer, CHANGE_FILE)


def test_a_file_that_is_in_the_way_is_replaced_and_not_followed(tmp_path):
    other = tmp_path / "precious"
    other.write_bytes(b"precious")
    trainer, simulator = pair(tmp_path, "0")
    (tmp_path / "m_").symlink_to(other)
    trainer.put(bytes(100))
    turn(trainer, simulator)
    assert other.read_bytes() == b"precious" and simulator.take_side_channel() == bytes(100)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (4, 7, "version 7"),
        (0, 10_000, "10000 bytes"),
        (10, -4, "capacity is -4"),
        (10, 2**31 - 1, "side channel of 2147483647"),
        (18, -3, "-3 groups"),
        (18, 9, "group at byte"),
    ],
)
def test_a_header_that_was_spoilt_is_refused(tmp_path, place, value, says):
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    struct.pack_into("<i", simulator.data, place, value)
    with pytest.raises(ImageError, match=says):
        turn(simulator, trainer)


@LAYOUT
@pytest.mark.parametrize("length", [-1, 17, 2**31 - 1])
def test_side_channel_data_longer_than_their_room_are_refused(tmp_path, layout, length):
    trainer, simulator = pair(tmp_path, layout)
    turn(trainer, simulator)
    struct.pack_into("<i", simulator.data, 14 if layout == "0" else 0, length)
    turn(simulator, trainer)
    with pytest.raises(
        ImageError, match=f"side channel has {length} bytes, and room for {0 if layout == '0' else 16}"
    ):
        trainer.take_side_channel()


def test_a_file_that_was_cut_is_refused(tmp_path):
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    simulator.put(b"", [("g", SPEC)])
    turn(simulator, trainer)
    turn(trainer, simulator)
    os.truncate(trainer.path, 100)
    trainer.data[8] = TRAINER  # still in the page that is left
    with pytest.raises(ImageError, match="cut"):
        trainer.receive(look)


@pytest.mark.parametrize("command", [4, 77, 255])
def test_an_unknown_command_is_refused(tmp_path, command):
    trainer, simulator = pair(tmp_path, "0")
    turn(trainer, simulator)
    with pytest.raises(ImageError, match=f"command {command}"):
        turn(simulator, trainer, command)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (16, 0, "body 0"),
        (16, 400, "body"),
        (20, 10**6, "does not fit|file has"),
        (24, 10**6, "body file has"),
        (24, -1, "-1 bytes"),
        (4, 4, "version 0.4.2"),
    ],
)
def test_a_header_of_two_files_that_was_spoilt_is_refused(tmp_path, place, value, says):
    trainer, simulator = pair(tmp_path, "0.3.2")
    turn(trainer, simulator)
    with (tmp_path / "m").open("r+b") as stream:
        stream.seek(place)
        stream.write(struct.pack("<i", value))
    with pytest.raises(ImageError, match=says):
        turn(simulator, trainer)


HOSTILE = st.sampled_from([-(2**31), -1, 0, 1, 3, 63, 255, 65536, 2**30, 2**31 - 1]) | st.integers(
    -(2**31), 2**31 - 1
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 2**16), HOSTILE), min_size=1, max_size=4))
def test_whatever_a_simulator_writes_ends_in_a_typed_error(tmp_path, layout, changes):
    trainer, simulator = pair(tmp_path, layout)
    turn(trainer, simulator)
    simulator.put(b"", [("g", spec_of([(2,)], branches=(2, 3), agents=4))])
    first = tmp_path / "m"
    spoilt = [simulator.data] if layout == "0" else [simulator.data, simulator._first]
    for place, value in changes:
        memory = spoilt[place % len(spoilt)]
        struct.pack_into("<i", memory, place % (len(memory) - 4), value)
    try:
        simulator.hand_over(STEP)
        trainer.receive(look)
        trainer.take_side_channel()
        for group in trainer.groups:
            StepReader(trainer.layout, group).read(trainer.data)
            clear_actions(trainer.data, group)
        trainer.put(bytes(50))
    except (SimulatorError, EnvironmentFault, AssertionError) as error:
        # AssertionError: `look`, the turn itself was spoilt
        assert not isinstance(error, AssertionError) or "this side's turn" in str(error)
    trainer.close()
    for path in tmp_path.iterdir():
        path.unlink()
    assert not first.exists()
