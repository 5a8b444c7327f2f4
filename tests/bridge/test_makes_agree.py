"""What trainers of other makes need of a simulator, asked of all three ends: start capacity, one change in a turn, who deletes at a close."""

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
    return [request.getfixturevalue("csharp_probe")]


@pytest.fixture
def three(end: list[str | Path]) -> list[str | Path]:
    """A simulator with three worlds, new in one turn, and side-channel data that need room; it closes after three exchanges."""
    return [*end, "three", str(EXCHANGES)]


@pytest.mark.parametrize(("layout", "capacity"), [("0", 4), ("0", 24), ("0.3.0", 0), ("0.3.0", 20), ("0.3.2", 0), ("0.3.2", 4)])
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
def test_at_the_trainers_close_the_simulator_deletes(three: list[str | Path], layout: str, tmp_path: Path) -> None:
    trainer = RawTrainer(tmp_path, layout, known=False)
    trainer.start(*three)
    trainer.step()
    assert list(tmp_path.iterdir())
    trainer.give(CLOSE)
    assert trainer.end()[0] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_the_simulators_close_the_trainer_deletes(three: list[str | Path], layout: str, tmp_path: Path) -> None:
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
def test_decisions_and_ends_are_counted_apart_but_in_layout_0(end: list[str | Path], layout: str, tmp_path: Path) -> None:
    """Five agents that end and ask in one update need room for five; where the rows are shared the error names what the trainer is to be told."""
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
