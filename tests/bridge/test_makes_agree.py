"""What trainers of other makes need of a simulator, asked of all three ends: start
capacity, one change in a turn, who deletes at a close."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.bridge.conftest import Build
from tests.bridge.raw_trainer import CLOSE, RawTrainer

HERE = Path(__file__).parent
LAYOUTS = ("0", "0.3.0", "0.3.2")
EXCHANGES = 3


@pytest.fixture(params=["python", "c", "csharp"])
def end(request: pytest.FixtureRequest) -> list[str | Path]:
    """The command of the tests' simulators in each language."""
    if request.param == "python":
        return [sys.executable, HERE / "simulators.py"]
    if request.param == "c":
        build: Build = request.getfixturevalue("build_c")
        return [build(HERE / "probe.c", "-O1")]
    return [request.getfixturevalue("csharp") / "probe"]


@pytest.fixture
def three(end: list[str | Path]) -> list[str | Path]:
    """A simulator with three worlds, new in one turn, and side-channel data that need
    room; it closes after three exchanges."""
    return [*end, "three", str(EXCHANGES)]


@pytest.mark.parametrize(
    ("layout", "capacity"), [("0", 4), ("0", 24), ("0.3.0", 0), ("0.3.0", 20), ("0.3.2", 0), ("0.3.2", 4)]
)
def test_any_start_capacity_is_taken_and_what_is_new_in_a_turn_is_one_change(
    three: list[str | Path], layout: str, capacity: int, tmp_path: Path
) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False, capacity=capacity)
    trainer.start(*three)
    groups = trainer.step()
    assert sorted(groups) == ["a", "b", "c"] and all(group.decisions.ids == [0] for group in groups.values())
    assert trainer.changes == 1 or layout == "0"
    before = trainer.changes
    assert [group.decisions.rewards for group in trainer.step().values()] == [[1.0]] * 3
    assert trainer.changes == before  # there is room by now
    trainer.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_the_trainers_close_the_simulator_deletes(
    three: list[str | Path], layout: str, tmp_path: Path
) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(*three)
    trainer.step()
    assert list(tmp_path.iterdir())
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_the_simulators_close_the_trainer_deletes(
    three: list[str | Path], layout: str, tmp_path: Path
) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(*three)
    for _ in range(EXCHANGES):
        trainer.step()
    trainer.give()
    assert trainer.end()[0] == 0 and trainer.closed
    assert len(list(tmp_path.iterdir())) == (1 if layout == "0" else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_close_before_the_first_exchange_is_told(layout: str, build_c: Build, tmp_path: Path) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(build_c(HERE / "probe.c", "-O1"), "three", "0")
    assert trainer.end()[0] == 0 and trainer.closed
    assert len(list(tmp_path.iterdir())) == (1 if layout == "0" else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decisions_and_ends_are_counted_apart_but_in_layout_0(
    end: list[str | Path], layout: str, tmp_path: Path
) -> None:
    """Five agents that end and ask in one update need room for five; where the rows are
    shared the error names what the trainer is to be told."""
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(*end, "again")
    assert trainer.step()["again"].decisions.ids == [0, 1, 2, 3, 4]
    if layout == "0":
        trainer.give()
        _, out, error = trainer.end()
        assert 'seats={"again": ' in error and "layout 0.3.2" in error, (out, error)
        return
    for _ in range(2):
        group = trainer.step()["again"]
        assert group.max_agents == 5
        assert group.decisions.ids == group.ends.ids == [0, 1, 2, 3, 4]
        assert group.decisions.rewards == [10, 11, 12, 13, 14] and group.ends.rewards == [0, 1, 2, 3, 4]
    trainer.close()


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
@pytest.mark.parametrize("known", [True, False])
def test_a_second_simulator_is_told_that_there_is_one(
    end: list[str | Path], layout: str, known: bool, tmp_path: Path
) -> None:
    """Also where the first one has left the first file for a larger one, and in one
    line."""
    trainer = RawTrainer(tmp_path, layout, known=known)
    trainer.start(*end, "again")
    trainer.step()
    before = sorted(tmp_path.iterdir())
    second = subprocess.run(
        [*end, "again", "--memory-path", trainer.first], capture_output=True, text=True, timeout=240
    )
    assert second.returncode != 0
    said = second.stderr.strip().splitlines()[-1]
    if known:
        assert "nother simulator" in said and "has joined" in said and "trainer of its own" in said
    else:  # of another make: nobody holds a lock, and of layout 0 the first file is gone
        assert "nother simulator" in said or "cannot open" in said or "cannot be opened" in said
    assert sorted(tmp_path.iterdir()) == before
    trainer.close()


def test_an_editor_is_told_that_another_has_joined(end: list[str | Path], tmp_path: Path) -> None:
    """Its game would play alone otherwise, and nobody would know why."""
    folder = tmp_path / "ml-agents"
    folder.mkdir()
    trainer = RawTrainer(folder, name="default")
    trainer.start(*end, "again")
    trainer.step()
    assert not trainer.first.exists()
    second = subprocess.run(
        [*end, "again"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert second.returncode != 0 and "nother simulator" in second.stderr
    trainer.close()


# Folders of tests, and so the simulator, may be in the memory that is covered.
SMALL = """
mount --bind /dev/shm /mnt && mount -t tmpfs -o size={size}k none /dev/shm || exit 77
for folder in /mnt/pytest-of-*; do ln -s "$folder" /dev/shm; done
exec {python} -c '
import os, sys
from tidemill.bridge import Simulator
from tidemill.core.errors import TidemillError
before = os.listdir("/dev/shm")
try:
    with Simulator(sys.argv[1], sys.argv[2:]) as simulator:
        simulator.reset()
except TidemillError as error:
    print(error)
assert os.listdir("/dev/shm") == before, os.listdir("/dev/shm")
' "$@"
"""


@pytest.mark.parametrize("size", [8, 12])
def test_a_full_memory_disk_is_told_with_its_cure_and_nothing_crashes(
    end: list[str | Path], size: int
) -> None:
    """The trainer has room for its lock and its file, of a page each; the simulator for
    none, or for its lock and not for its larger file."""
    script = SMALL.format(size=size, python=sys.executable)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *end, "again"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    assert "--shm-size=1g" in done.stdout and (
        "No space left" in done.stdout or "no room" in done.stdout or "Disk full" in done.stdout
    ), done.stdout
    assert "SIG" not in done.stdout and "nother simulator" not in done.stdout
