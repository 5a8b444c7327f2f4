"""The simulator's end in C, driven by a trainer that is written by the letter of the
layouts."""

import os
import re
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.bridge.conftest import STRICT, Build
from tests.bridge.raw_trainer import CHANGE, CLOSE, RESET, STEP, Group, RawTrainer

from tidemill.bridge.world_side.language_files import sources_folder

SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LAYOUTS = ["0", "0.3.0", "0.3.2"]
PROBE = Path(__file__).parent / "probe.c"


@pytest.fixture(scope="session")
def sanitized(build_c: Build, c_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of the sanitizers where the compiler has their libraries."""
    file = tmp_path_factory.mktemp("sanitizers") / "empty.c"
    file.write_text("int main(void) { return 0; }\n")
    done = subprocess.run(
        [c_compiler, *SANITIZE, str(file), "-o", str(file.with_suffix(""))], capture_output=True
    )
    return SANITIZE if done.returncode == 0 else ("-O1", "-g")


@pytest.fixture
def probe(build_c: Build, sanitized: tuple[str, ...]) -> Path:
    return build_c(PROBE, *sanitized)


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RawTrainer]:
    made = RawTrainer(tmp_path, getattr(request, "param", "0"))
    yield made
    made.close()


def closed_cleanly(trainer: RawTrainer, folder: Path) -> str:
    """Close; check that the simulator ended well and took its own file away. Returns its
    output."""
    assert (folder / "memory.simulator").exists()
    trainer.give(CLOSE)
    code, out, error = trainer.end()
    assert (code, error) == (0, "")
    assert not (folder / "memory.simulator").exists()
    assert trainer.path.exists()  # the trainer's to remove
    return out


def scripted_reach(group: Group) -> np.ndarray:
    return np.clip(group.decisions.obs[0][:, :2].astype(float) / 0.1, -1, 1)


def scripted_corridor(group: Group) -> np.ndarray:
    seen = group.decisions.obs[0]
    left = seen[:, 7] < 0
    there = np.where(left, seen[:, 0], seen[:, 6]) == 1
    return np.stack([np.where(there, 0, np.where(left, 1, 2)), there], axis=1)


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
@pytest.mark.parametrize("name", ["reach", "corridor"])
def test_a_policy_returns_the_same_through_the_bridge_as_the_same_heuristic_within(
    name: str, native: Build, sanitized: tuple[str, ...], trainer: RawTrainer, tmp_path: Path
) -> None:
    program = native(name, *sanitized)
    alone = subprocess.run(
        [program, "--episodes", "150", "--seed", "7"], capture_output=True, text=True, check=True
    ).stdout
    found = re.fullmatch(r"mean return (-?[\d.]+) over (\d+) episodes\n", alone)
    assert found
    trainer.start(program, "--seed", "7")
    groups = trainer.step()
    returns: dict[int, float] = {}
    finished: list[float] = []
    while len(finished) < 150:
        group = groups[name]
        for ids, rewards in (
            (group.decisions.ids, group.decisions.rewards),
            (group.ends.ids, group.ends.rewards),
        ):
            for agent, reward in zip(ids, rewards, strict=True):
                returns[agent] = returns.get(agent, 0.0) + reward
        finished += [returns.pop(agent) for agent in group.ends.ids]
        if name == "reach":
            trainer.act(group, continuous=scripted_reach(group))
        else:
            trainer.act(group, discrete=scripted_corridor(group))
        groups = trainer.step()
    assert len(finished) == int(found[2])
    assert np.mean(finished) == pytest.approx(float(found[1]), abs=2e-4)
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0


def test_the_examples_groups_have_the_sizes_that_the_layout_gives_them(
    native: Build, sanitized: tuple[str, ...], tmp_path: Path
) -> None:
    for name, size in (("reach", 433), ("corridor", 691)):
        (tmp_path / name).mkdir()
        trainer = RawTrainer(tmp_path / name)
        trainer.start(native(name, *sanitized))
        group = trainer.step()[name]
        assert group.end - trainer.groups_at == size
        assert trainer.i32(0) == trainer.path.stat().st_size == 22 + size
        trainer.side = b"\0\0\0"
        assert trainer.i32(0) == trainer.path.stat().st_size == 18 + 26 + size
        trainer.close()


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_corridors_masks_forbid_the_walls_and_the_button_where_there_is_none(
    native: Build, sanitized: tuple[str, ...], trainer: RawTrainer
) -> None:
    trainer.start(native("corridor", *sanitized))
    rng = np.random.default_rng(1)
    seen = set()
    groups = trainer.step()
    for _ in range(200):
        group = groups["corridor"]
        cells = group.decisions.obs[0][:, :7].argmax(axis=1)
        for cell, mask in zip(cells, group.decisions.masks, strict=True):
            seen.add(int(cell))
            assert mask.tolist() == [0, cell == 0, cell == 6, 0, cell not in (0, 6)]
        trainer.act(
            group, discrete=np.stack([rng.integers(0, 3, len(cells)), rng.integers(0, 2, len(cells))], axis=1)
        )
        groups = trainer.step()
    assert seen == set(range(7))


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_rows_of_every_kind_arrive_whole_and_actions_go_to_who_asked(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.start(probe, "kinds")
    for t in range(4):
        groups = trainer.step()
        assert list(groups) == (["first"] if t < 2 else ["first", "second"])
        first = groups["first"]
        assert (first.max_agents, first.shapes, first.branches) == (6, [(2,), (3, 2, 1)], [3, 2])
        even = t % 2 == 0  # otherwise nothing but the large observation is set, and the rest has to be clear
        kinds = ([0, 3], [1, 2]) if even else ([3], [0, 1, 2])
        for rows, kept in zip((first.decisions, first.ends), kinds, strict=True):
            order = np.argsort(rows.ids)
            assert [rows.ids[i] for i in order] == [10 * t + agent for agent in kept]
            assert np.array(rows.rewards)[order] == pytest.approx(
                [t + agent / 10 if even else 0 for agent in kept]
            )
            assert rows.obs[0][order].tolist() == [[t, agent] if even else [0, 0] for agent in kept]
            assert rows.obs[1][order].reshape(-1, 6).tolist() == [
                [1000 * t + 100 * agent + j for j in range(6)] for agent in kept
            ]
        assert [first.ends.interrupted[i] for i in np.argsort(first.ends.ids)] == [
            agent == 2 for agent in kinds[1]
        ]
        masks = {
            agent: mask.tolist()
            for agent, mask in zip(first.decisions.ids, first.decisions.masks, strict=True)
        }
        assert masks == ({10 * t: [0] * 5, 10 * t + 3: [1, 0, 1, 0, 1]} if even else {10 * t + 3: [0] * 5})
        assert not first.ends.masks.any()
        if t != 1:  # without actions an agent gets zeros, not those of the step before
            trainer.act(first, discrete=[[agent % 3, 1] for agent in first.decisions.ids])
        if t == 2:
            trainer.act(groups["second"], continuous=[[0.5, -2.0]])
    out = closed_cleanly(trainer, tmp_path)
    assert out.splitlines()[:7] == [
        "t 0: 0 ",
        "first 0: 0 1",
        "first 3: 0 1",
        "t 1: 0 ",
        "first 13: 0 0",
        "t 2: 0 ",
        "first 20: 2 1",
    ]
    assert "first 23: 2 1\nsecond 5: 0.5 -2" in out


@pytest.mark.parametrize("trainer", ["0.3.2"], indirect=True)
def test_hybrid_actions_need_layout_0_3_2(probe: Path, trainer: RawTrainer, tmp_path: Path) -> None:
    trainer.start(probe, "hybrid")
    first = trainer.step()["first"]
    trainer.act(first, continuous=[[0.25, 1], [2, 3]], discrete=[[2, 0], [1, 1]])
    trainer.step()
    out = closed_cleanly(trainer, tmp_path)
    assert "first 0: 2 0 0.25 1\nfirst 3: 1 1 2 3\n" in out
    (tmp_path / "other").mkdir()
    for layout in ("0", "0.3.0"):
        other = RawTrainer(tmp_path / "other", layout, name=layout)
        other.start(probe, "hybrid")
        out = other.end()[1]
        assert (
            f"world 'first' has 2 continuous actions and 2 branches, and the trainer's layout {layout} "
            "carries one kind only" in out
        )


def test_errors_name_what_why_and_what_to_do(probe: Path) -> None:
    lines = subprocess.run([probe, "errors"], capture_output=True, text=True, check=True).stdout.splitlines()
    for line, text in zip(
        lines,
        [
            "has 64 characters; memory has room for 1 to 63",
            "63: made",
            "there is a world 'small' already",
            "max_agents 0 (at least 1)",
            "world 'c' has no actions",
            "branch 0 has 0 choices",
            "lower max_agents",
            "shape (4, -4, 0)",
            "in time: 0",
            "in time: 1",
            "too many: -1 world 'small' has had more than 2 requests in one exchange, which is its "
            "max_agents; create it with more",
            "its reward: -1",
            "exchange: -2 world 'small' has had more than 2 requests",
            "size: -1 world 'small', observation 0: 3 values given, its shape has 4",
            "exchange: -1 world 'small', observation 0: 3 values given",
            "index: -1 world 'small' has no observation 1",
            "mask: -1",
            "exchange: -1 world 'small' has no observation 1",
            "none: 1",
            "exchange: 0",
            "actions: 1",
            "action 1: -1 world 'small' has 1 actions",
        ],
        strict=True,
    ):
        assert text in line


@pytest.mark.parametrize("trainer", ["0", "0.3.2"], indirect=True)
def test_a_reset_drops_what_was_requested_and_the_next_rows_are_its_answer(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.start(probe, "kinds")
    assert sorted(trainer.step(RESET)["first"].decisions.ids) == [0, 3]
    assert trainer.layout == "0" or not trainer.head[14]  # the simulator clears it
    assert trainer.step()["first"].decisions.ids == [13]
    assert sorted(trainer.step(RESET)["first"].decisions.ids) == [0, 3]
    out = closed_cleanly(trainer, tmp_path)
    assert [line for line in out.splitlines() if line.startswith("t ")] == [
        "t 0: 2 ",
        "t 0: 0 ",
        "t 1: 2 ",
        "t 0: 3 ",
    ]


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_rows_may_be_filled_by_many_threads(probe: Path, trainer: RawTrainer, tmp_path: Path) -> None:
    trainer.start(probe, "threads")
    for _ in range(20):
        crowd = trainer.step()["crowd"].decisions
        assert sorted(crowd.ids) == list(range(240))
        ids = np.array(crowd.ids, np.float32)
        assert np.array_equal(crowd.rewards, ids)
        assert np.array_equal(crowd.obs[0], np.stack([ids, -ids, 2 * ids, np.ones(240)], axis=1))
        assert len(trainer.side) == 240 * (16 + 4 + 4 + 5 + 4 + 4)  # a statistic from each, whole
    closed_cleanly(trainer, tmp_path)


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_files_grow_from_both_ends_until_the_name_is_full_and_the_first_world_without_room_is_named(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.start(probe, "grow", "300")
    # the body's first name has an underscore already
    room = 255 - len("memory") - (0 if trainer.layout == "0" else 1)
    count = 0
    while trainer.changes < room:
        trainer.give()
        trainer.wait()
        count += 1
        if count % 40 == 1:
            groups = trainer.groups()
            assert len(groups) == count
            assert [groups[f"world{w}"].decisions.obs[0][0, 0] for w in (0, count - 1)] == [0, count - 1]
        for _ in range(count % 3):  # none, one, or two in a row
            if trainer.changes < room:
                trainer.grow(trainer.capacity + 8)
    trainer.give()
    code, out, error = trainer.end()
    assert (code, error) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith(
        f"exchange: -2 world 'world{count}' cannot be registered: the memory file cannot grow any more"
    )
    assert trainer.closed
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith("r"))
    assert (
        names == ["memory" + "_" * room] if trainer.layout == "0" else ["memory", "memory" + "_" * (room + 1)]
    )


def test_made_files_are_for_the_user_alone_and_one_left_behind_is_in_nobodys_way(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    (tmp_path / "memory_").write_bytes(b"of one who was killed")
    trainer.start(probe, "grow", "1")
    trainer.step()
    assert trainer.path.name == "memory_"
    assert [path.stat().st_mode & 0o777 for path in (trainer.path, tmp_path / "memory.simulator")] == [
        0o600,
        0o600,
    ]


OWN = uuid.UUID(bytes_le=bytes(range(1, 17)))
PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400")
ENGINE = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
STATISTICS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
PROPERTIES = uuid.UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7")
TYPES = {OWN: 1007, PARAMETERS: 3, ENGINE: 2, STATISTICS: 4, PROPERTIES: 1}


def text(value: str) -> bytes:
    return struct.pack("<i", len(value)) + value.encode()


def message(channel: uuid.UUID, data: bytes, older: bool = False) -> bytes:
    key = struct.pack("<i", TYPES[channel]) if older else channel.bytes_le
    return key + struct.pack("<i", len(data)) + data


def parameter(key: str, value: float) -> bytes:
    return message(PARAMETERS, text(key) + struct.pack("<if", 0, value))


def drawn(out: str, exchange: int) -> np.ndarray:
    return np.array(
        [line.split()[1:] for line in out.splitlines() if line.startswith("drawn")][exchange], float
    )


@pytest.mark.parametrize("older", [False, True], ids=["uuid", "type"])
@pytest.mark.parametrize("trainer", ["0", "0.3.2"], indirect=True)
def test_side_channels_carry_bytes_both_ways_and_the_standard_ones_are_understood(
    older: bool, probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.start(probe, "older-channels" if older else "channels")
    began = message(STATISTICS, text("began") + struct.pack("<fi", 1.5, 1), older) + message(
        PROPERTIES, text("height") + struct.pack("<f", 0.25), older
    )
    trainer.step()
    assert trainer.side == began
    unknown = (struct.pack("<i", 99) if older else bytes(16)) + struct.pack("<i", 3) + b"???"
    if older:
        engine = message(ENGINE, struct.pack("<iiifi", 640, 480, 3, 2.5, 60), older)
    else:
        settings = [("<iii", 0, 640, 480), ("<ii", 1, 3), ("<if", 2, 2.5), ("<ii", 3, 60), ("<ii", 4, 30)]
        engine = b"".join(message(ENGINE, struct.pack(*setting)) for setting in settings)
    long = bytes(range(256)) * 40
    trainer.side = b"".join(
        [
            message(PARAMETERS, text("mass") + struct.pack("<if", 0, 2.5), older),
            unknown,
            message(OWN, long, older),
            engine,
            message(PROPERTIES, text("height") + struct.pack("<f", 0.75), older),
            message(PARAMETERS, text("drawn") + struct.pack("<iiiff", 1, 5, 0, 2, 4), older),
        ]
    )
    trainer.step()
    assert trainer.side == 2 * message(OWN, long, older)
    trainer.side = message(PARAMETERS, text("drawn") + struct.pack("<iiiff", 1, 5, 1, 10, 2), older)
    trainer.step()
    assert trainer.side == b""
    trainer.side = message(
        PARAMETERS, text("drawn") + struct.pack("<iiii4f", 1, 5, 2, 4, 0, 1, 10, 13), older
    )
    trainer.step()
    out = closed_cleanly(trainer, tmp_path)
    assert ("engine: 15 640x480 3 2.5 60 0" if older else "engine: 31 640x480 3 2.5 60 30") in out
    assert "mass 2.5, height 0.75" in out
    uniform, gaussian, ranges = drawn(out, 0), drawn(out, 1), drawn(out, 2)
    assert 2 <= uniform.min() < 2.1 < 3.9 < uniform.max() < 4
    assert gaussian.mean() == pytest.approx(10, abs=0.5) and gaussian.std() == pytest.approx(2, abs=0.4)
    assert all(0 <= value < 1 or 10 <= value < 13 for value in ranges)
    assert np.mean(ranges >= 10) == pytest.approx(0.75, abs=0.1)


@pytest.mark.parametrize("trainer", ["0.3.2"], indirect=True)
def test_a_query_exchanges_side_channels_without_a_step(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.start(probe, "channels")
    trainer.step()
    for payload in (b"question", b"a longer one" * 30):
        data = message(OWN, payload)
        trainer.grow(len(data) + 4)  # so that the answer, which is twice as long, has no room
        trainer.side = data
        trainer.head[28] = 1
        trainer.give()
        trainer.wait()
        assert trainer.head[28] == 0
        assert trainer.side == 2 * message(OWN, payload)
    assert "exchange" not in closed_cleanly(trainer, tmp_path).replace("exchange: 3", "")


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (OWN.bytes_le + struct.pack("<i", 5) + b"four", "a message of 5 bytes begins"),
        (OWN.bytes_le + struct.pack("<i", -1), "a message of -1 bytes begins"),
        (OWN.bytes_le[:7], "a message of -1 bytes begins"),
        (message(PARAMETERS, struct.pack("<i", 2**31 - 1)), "is not what its channel"),
        (message(PARAMETERS, text("a") + struct.pack("<i", 9)), "is not what its channel"),
        (
            message(PARAMETERS, text("a") + struct.pack("<iiii", 1, 5, 2, 2**31 - 2)),
            "is not what its channel",
        ),
        (message(PARAMETERS, text("a") + struct.pack("<ifi", 0, 1.0, 0)), "is not what its channel"),
        (message(PROPERTIES, text("\xe9")[:5] + struct.pack("<f", 1.0)), "is not what its channel"),
        (message(ENGINE, struct.pack("<i", 5)), "is not what its channel"),
    ],
)
def test_torn_side_channels_are_an_error_and_nothing_beyond_them_is_read(
    data: bytes, cause: str, probe: Path, trainer: RawTrainer
) -> None:
    trainer.start(probe, "channels")
    trainer.step()
    trainer.side = data
    trainer.give()
    code, out, error = trainer.end()
    assert (code, error) == (0, "")
    assert "exchange: -6" in out and cause in out


@pytest.mark.parametrize("beyond", [1, 10, None, 2**31 - 1])
@pytest.mark.parametrize("trainer", ["0", "0.3.2"], indirect=True)
def test_a_length_of_side_channels_beyond_their_room_is_an_error(
    beyond: int | None, probe: Path, trainer: RawTrainer
) -> None:
    trainer.start(probe, "channels")
    trainer.step()
    length = -1 if beyond is None else beyond if beyond > 10 else trainer.capacity - 4 + beyond
    struct.pack_into("<i", trainer.body, trainer.side_at, length)
    trainer.give()
    assert f"exchange: -6 the trainer says that {length} bytes are on the side channels" in trainer.end()[1]


@pytest.mark.parametrize(
    ("continuous", "discrete", "cause"),
    [
        (
            None,
            [[3, 0], [0, 0]],
            "the trainer chose 3 in branch 0 for agent 0; the branch has choices 0 to 2",
        ),
        (
            None,
            [[0, 0], [1, -1]],
            "the trainer chose -1 in branch 1 for agent 3; the branch has choices 0 to 1",
        ),
        ([[0, 0], [0, np.nan]], None, "action 1 of agent 3 is NaN or infinite"),
        ([[-np.inf, 0], [0, 0]], None, "action 0 of agent 0 is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("trainer", ["0.3.2"], indirect=True)
def test_impossible_actions_are_refused_by_name(
    continuous: object, discrete: object, cause: str, probe: Path, trainer: RawTrainer
) -> None:
    trainer.start(probe, "hybrid")
    trainer.act(trainer.step()["first"], continuous, discrete)
    trainer.give()
    out = trainer.end()[1]
    assert "t 0: -6" in out and cause in out


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((22, 1), "layout 1"),
        ((0, 3, 1), "layout 0.3.1"),
        ((0, 4, 0), "layout 0.4.0"),
        ((0, 0, 0), "layout 0.0.0"),
    ],
)
def test_other_layouts_are_refused_and_the_trainers_file_stays(
    version: tuple[int, ...], said: str, probe: Path, trainer: RawTrainer
) -> None:
    for number, value in enumerate(version):
        trainer.i32(4 * number, value)
    trainer.start(probe, "ends", "1")
    code, _, error = trainer.end()
    assert code == 3 and f"speaks {said}, and tidemill.h speaks 0, 0.3.0 and 0.3.2" in error
    assert trainer.path.exists()


def spoiled(trainer: RawTrainer, change: str, path: Path) -> None:
    """Make the new file what it must not be."""
    zero = trainer.layout == "0"
    if change == "capacity":
        trainer.i32(10 if zero else 20, 2**31 - 1)
    elif change == "negative":
        trainer.i32(10 if zero else 20, -4)
    elif change == "groups":
        struct.pack_into("<i", trainer.head, trainer.groups_at - 4 if zero else 24, 1000)
    elif change == "spec":
        trainer.body[trainer.groups_at + 3] ^= 1
    elif change == "short":
        os.truncate(path, 30)
    elif change == "empty":
        os.truncate(path, 0)
    elif change == "gone":
        path.unlink()
    elif change == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change", ["capacity", "negative", "groups", "spec", "short", "empty", "gone", "link"]
)
@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_a_file_that_lies_is_an_error_and_the_game_goes_on_without_the_trainer(
    change: str, probe: Path, trainer: RawTrainer
) -> None:
    trainer.start(probe, "ends", "3")
    trainer.step()
    trainer.grow(trainer.capacity + 8, lambda path: spoiled(trainer, change, path))
    # of layout 0 the file that was cut short has the turn, too
    if trainer.layout != "0" or change not in ("short", "empty"):
        trainer.give()
    code, out, error = trainer.end()
    assert (code, error) == (0, "")
    assert re.match(r"exchange: -[46] .*\nexchange: 0 \nexchange: 0 \n$", out)


def test_every_byte_of_the_header_may_be_wrong(probe: Path, tmp_path: Path) -> None:
    """No answer, an error or an end, but neither a crash (the sanitizers look on) nor a
    file made where none should be."""
    for layout, size in (("0", 22), ("0.3.2", 29)):
        for place in range(size):
            for bits in (0x01, 0xFF):
                folder = tmp_path / f"{layout}-{place}-{bits}"
                folder.mkdir()
                trainer = RawTrainer(folder, layout, known=False)
                trainer.give()
                if layout == "0":
                    trainer.i32(10, 24) if place % 2 else None
                trainer.head[place] ^= bits
                done = subprocess.run(
                    [probe, "nothing", "--memory-path", trainer.path],
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert done.returncode in (0, 3), done.stderr
                assert "Sanitizer" not in done.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_a_running_bridge_may_be_wrong(layout: str, probe: Path, tmp_path: Path) -> None:
    """An answer, an error or an end; the sanitizers see to it that nothing outside is
    read or written."""
    names = (str(number) for number in range(1000))

    def start() -> RawTrainer:
        trainer = RawTrainer(tmp_path, layout, known=False, name=next(names))
        trainer.start(probe, "kinds")
        for _ in range(3):
            trainer.step()
        return trainer

    trainer, started = start(), 1
    turn = {"0": [8]}.get(layout, [12, 13])  # whose turn it is: nobody would wait for the other
    for part in ("head",) if layout == "0" else ("head", "body"):
        for place in range(len(getattr(trainer, part))):
            if part == "head" and place in turn:
                continue
            memory = getattr(trainer, part)
            before = memory[place]
            memory[place] ^= 0xFF
            command = (
                memory[place]
                if (layout, place) == ("0", 9)
                else CLOSE
                if (part, place) == ("head", 15)
                else STEP
            )
            trainer.give(command)
            assert trainer.process is not None
            try:
                trainer.wait()
            except AssertionError:
                assert trainer.process.poll() is not None, f"{part} {place}: neither an answer nor an end"
            if trainer.closed or trainer.process.poll() is not None:
                code, out, error = trainer.end()
                assert (code, error) == (0, "")
                assert re.search(r"^t \d+: (-[1-9] .+|3 )$", out.splitlines()[-1])
                trainer, started = start(), started + 1
            else:
                getattr(trainer, part)[place] = before
    trainer.close()
    assert started > 3


def killed_trainer(folder: Path, layout: str, known: bool, *simulator: str | Path) -> str:
    """A process of its own is the trainer: it starts the simulator, steps and is killed.
    Returns what the simulator said."""
    script = f"""
import os, signal, sys
from pathlib import Path
from tests.bridge.raw_trainer import RawTrainer
trainer = RawTrainer(Path({str(folder)!r}), {layout!r}, known={known})
words = [*{[str(part) for part in simulator]!r}, "--memory-path", str(trainer.first)]
os.posix_spawn({str(simulator[0])!r}, words, os.environ)
trainer.step()
if {"idle" in simulator}:
    trainer.give()
else:
    trainer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = trainer.communicate(timeout=240)  # the simulator's words, too: until it ends
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
    assert "Traceback" not in error and "Sanitizer" not in error, error
    return out


@pytest.mark.parametrize("known", [True, False], ids=["tidemill", "other"])
@pytest.mark.parametrize("layout", ["0", "0.3.0"])
def test_a_trainers_death_is_noticed_and_its_files_go(
    known: bool, layout: str, probe: Path, tmp_path: Path
) -> None:
    out = killed_trainer(tmp_path, layout, known, probe, "ends", "4")
    assert "exchange: -7 the trainer of" in out
    assert out.count("exchange: 0 ") == 3  # one with the trainer, two without
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("others", [[], ["memory.txt", "thesis"]])
def test_a_dead_trainers_own_folder_goes_whole_but_for_what_is_not_the_bridges(
    others: list[str], probe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tidemill-of-its-own"
    folder.mkdir()
    for name in ("memory_____", *others):
        (folder / name).write_bytes(b"made just before the end")
    assert "exchange: -7" in killed_trainer(folder, "0", True, probe, "ends", "2")
    assert sorted(path.name for path in folder.iterdir()) == others if others else not folder.exists()


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_who_requests_nothing_notices_the_trainers_death_all_the_same(
    layout: str, probe: Path, tmp_path: Path
) -> None:
    out = killed_trainer(tmp_path, layout, True, probe, "idle", "1")
    assert out.startswith("exchange: 0 \nexchange: -7 the trainer of")


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_who_requests_nothing_takes_the_first_command_and_the_end(probe: Path, trainer: RawTrainer) -> None:
    trainer.start(probe, "idle", "0")
    trainer.give(RESET)
    assert trainer.process is not None and trainer.process.stdout is not None
    assert trainer.process.stdout.readline() == "exchange: 2 \n"
    if trainer.layout == "0":  # it keeps the turn, and sees the command beside it
        trainer.head[9] = CLOSE
    else:
        trainer.head[15] = 1
    assert trainer.end()[1] == "exchange: 3 \n"


def test_a_deadline_is_an_error_that_leaves_the_exchange_open(probe: Path, trainer: RawTrainer) -> None:
    trainer.give()  # before it waits for that
    trainer.start(probe, "deadline", "5000")
    trainer.wait()
    assert trainer.process is not None and trainer.process.stdout is not None
    assert trainer.process.stdout.readline().startswith("exchange: -8 no actions from the trainer for 0.2 s")
    trainer.step()
    while not (line := trainer.process.stdout.readline()).startswith("exchange: 0"):
        assert line.startswith("exchange: -8")


def test_a_request_while_the_trainer_thinks_beyond_its_deadline_is_refused(
    probe: Path, trainer: RawTrainer
) -> None:
    trainer.give()  # before it waits for that
    trainer.start(probe, "hasty", "3")
    trainer.wait()
    assert trainer.process is not None and trainer.process.stdout is not None
    assert trainer.process.stdout.readline().startswith("exchange: -8")
    assert trainer.process.stdout.readline().startswith(
        "exchange: -1 world 'ending': a request while the trainer still thinks"
    )


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_without_atomics_and_futexes_one_thread_is_served_all_the_same(
    native: Build, trainer: RawTrainer
) -> None:
    trainer.start(native("corridor", "-O1", "-DTM_ONE_THREAD", "-DTM_NO_FUTEX"))
    groups = trainer.step(RESET)
    for _ in range(50):
        trainer.act(groups["corridor"], discrete=scripted_corridor(groups["corridor"]))
        groups = trainer.step()
        assert all(
            reward in (0, np.float32(-0.02), np.float32(0.98)) for reward in groups["corridor"].ends.rewards
        )
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0


def test_the_simulators_own_end_is_told_to_the_trainer(probe: Path, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        trainer = RawTrainer(tmp_path, layout, name=layout)
        trainer.start(probe, "ends", "2")
        trainer.step()
        trainer.step()
        trainer.give()
        assert trainer.end()[0] == 0
        assert trainer.closed and not (tmp_path / f"{layout}.simulator").exists()
        assert trainer.path.exists()  # the trainer's to delete


def test_the_file_of_a_dead_trainer_is_refused_and_an_editors_one_ignored(
    probe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ml-agents"
    folder.mkdir()
    trainer = RawTrainer(folder, name="default")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer.lock.close()
    named = subprocess.run(
        [probe, "ends", "1", "--memory-path", "default"], env=environment, capture_output=True, text=True
    )
    assert (named.returncode, named.stderr) == (
        3,
        f"the trainer of {trainer.path} is dead; a living one has to start this simulator\n",
    )
    alone = subprocess.run([probe, "ends", "1"], env=environment, capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (0, "exchange: 0 \n")


def test_an_editor_finds_the_trainer_that_waits_for_one(probe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ml-agents"
    folder.mkdir()
    trainer = RawTrainer(folder, name="default")
    trainer.process = subprocess.Popen(
        [probe, "ends", "1"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert list(trainer.step()) == ["ending"]
    trainer.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_of_another_trainer_that_closes_are_deleted(
    layout: str, probe: Path, tmp_path: Path
) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(probe, "ends", "2")
    trainer.step()
    trainer.give(CLOSE)
    assert trainer.end()[1] == "exchange: 3 \ntrainer: 0\nexchange: 0 \n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trainer", ["0.3.0", "0.3.2"], indirect=True)
def test_a_trainer_that_has_not_given_a_turn_yet_is_waited_for(
    probe: Path, trainer: RawTrainer, tmp_path: Path
) -> None:
    trainer.head[12] = trainer.head[13] = 0  # neither waits: so some trainers begin
    trainer.start(probe, "ends", "2")
    while not (tmp_path / "memory.simulator").exists():
        time.sleep(0.001)
    time.sleep(0.2)  # enough to find those out that do not wait
    assert trainer.i32(16) == 1  # no world was registered
    assert list(trainer.step()) == ["ending"]


def test_a_second_simulator_at_the_same_file_is_refused(probe: Path, trainer: RawTrainer) -> None:
    trainer.start(probe, "ends", "100")
    trainer.step()
    second = subprocess.run(
        [probe, "ends", "1", "--memory-path", trainer.path], capture_output=True, text=True
    )
    assert second.returncode == 3
    assert "another simulator" in second.stderr
    trainer.step()  # the first one's peace is not disturbed


def test_a_waiting_simulator_sleeps(probe: Path, trainer: RawTrainer) -> None:
    trainer.start(probe, "ends", "100")
    for _ in range(50):
        trainer.step()
    assert trainer.process is not None
    stat, begun = Path(f"/proc/{trainer.process.pid}/stat"), time.monotonic()
    before = sum(int(part) for part in stat.read_text().split()[13:15])
    with pytest.raises(subprocess.TimeoutExpired):
        trainer.process.wait(1.0)
    spent = sum(int(part) for part in stat.read_text().split()[13:15]) - before
    assert spent <= 0.3 * os.sysconf("SC_CLK_TCK") * (time.monotonic() - begun)


def test_the_example_of_the_page_plays_with_a_trainer_and_without(
    build_c: Build, trainer: RawTrainer, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulators-c.md").read_text()
    file = tmp_path / "line.c"
    file.write_text(page.split("```c\n")[1].split("```")[0])
    program = build_c(file, "-O1")
    assert (
        subprocess.run([program], capture_output=True, text=True, check=True).stdout
        == 3 * "arrived after 4 steps\n"
    )
    trainer.start(program)
    trainer.side = parameter("stride", 0.5)
    line = trainer.step(RESET)["line"]
    for place in (0.5, 1.0):
        trainer.act(line, discrete=[[1]])
        line = trainer.step()["line"]
        assert (line.ends if place == 1 else line.decisions).obs[0].tolist() == [[place]]
    assert trainer.side == message(STATISTICS, text("line/steps") + struct.pack("<fi", 2.0, 0))


def test_the_header_may_be_included_by_many_files_with_the_implementation_in_one(
    build_c: Build, c_compiler: str, tmp_path: Path
) -> None:
    (tmp_path / "one.c").write_text(
        '#include "tidemill.h"\nint one(void);\nint one(void) { return '
        "tm_bridge_has_trainer(tm_bridge_open(0, 0)); }\n"
    )
    (tmp_path / "two.c").write_text(
        '#define TIDEMILL_IMPLEMENTATION\n#include "tidemill.h"\n#include "one.c"\nint main(void) { '
        "tm_bridge_close(0); return one(); }\n"
    )
    include = f"-I{sources_folder() / 'native'}"
    strict = [c_compiler, *STRICT, "-Wconversion", "-Wshadow", include]
    assert subprocess.run([*strict, "-c", "one.c", "-o", "one.o"], cwd=tmp_path).returncode == 0
    assert subprocess.run([*strict, "two.c", "-o", "two", "-lm"], cwd=tmp_path).returncode == 0


def test_a_change_command_from_nobody_leads_to_no_endless_search(probe: Path, trainer: RawTrainer) -> None:
    trainer.start(probe, "ends", "1")
    trainer.step()
    trainer.give(CHANGE)
    assert "exchange: -4 cannot open the memory file" in trainer.end()[1]


@pytest.mark.parametrize("trainer", LAYOUTS, indirect=True)
def test_agents_that_only_a_reset_makes_come_after_a_first_answer_without_any(
    probe: Path, trainer: RawTrainer
) -> None:
    trainer.start(probe, "born")
    assert trainer.step()["born"].decisions.ids == []
    assert trainer.step(RESET)["born"].decisions.ids == [1]
    assert trainer.step()["born"].decisions.ids == [1]
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0
