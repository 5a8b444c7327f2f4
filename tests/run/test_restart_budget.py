"""How many more lives workers have, and how long each waits to begin."""

from unittest.mock import Mock

import pytest

from tidemill import Actors, Scripted
from tidemill.core.errors import RunError
from tidemill.run.member import Member
from tidemill.run.restart_budget import RestartBudget


class Clock:
    """A budget of many actors, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 8, restarts: int = 100) -> None:
        self.now = 0.0
        monkeypatch.setattr("tidemill.run.restart_budget.awake", lambda: self.now)
        actors = Actors(environment=Scripted(), count=count, restarts=restarts)
        self.members = {f"actor-{number}": Member(actors, Mock()) for number in range(count)}
        self.budget = RestartBudget(Mock(restarts=True, moves=lambda name: False), self.members)

    def dies(self, name: str, ran: bool) -> float:
        """Return the seconds that its next life waits, and let these go by."""
        pause = self.budget.spend(name, [name], "it was killed", ran)
        self.now += pause
        return pause

    def runs(self, name: str) -> None:
        """Have its next life run."""
        self.members[name].life += 1
        self.budget.note_running(name)


def test_next_lives_of_a_worker_that_dies_again_and_again_wait_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    clock.budget.note_running("actor-0")
    assert [clock.dies("actor-0", ran=True) for _ in range(8)] == [0, 0, 1, 2, 4, 8, 16, 30]
    assert clock.dies("actor-1", ran=True) == 0  # another one's are its own
    clock.now += 61.0
    assert clock.dies("actor-0", ran=True) == 0


def test_each_of_many_has_all_of_its_lives_however_many_others_die(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, count=200, restarts=5)
    for name in clock.members:
        clock.runs(name)
    clock.now = 61.0
    for number in range(150):
        assert clock.dies(f"actor-{number}", ran=True) == 0
        clock.now += 0.01
        clock.runs(f"actor-{number}")
    for _ in range(5):
        clock.now += 61.0
        assert clock.dies("actor-199", ran=True) == 0
        clock.runs("actor-199")
    clock.now += 61.0
    with pytest.raises(RunError, match="death 6 of actor-199 within 600 s; 5 are allowed"):
        clock.dies("actor-199", ran=True)


@pytest.mark.parametrize("late", [False, True])
def test_what_all_of_a_group_die_of_as_they_begin_to_run_is_one_error(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the run's start, or where all die at once that had run for long, and go on
    dying."""
    clock = Clock(monkeypatch, count=200, restarts=5)
    for name in clock.members:
        clock.runs(name)
    if late:
        clock.now = 1000.0
        for name in clock.members:
            assert clock.dies(name, ran=True) == 0
            clock.runs(name)
    for number in range(5):
        clock.now += 1.0
        assert clock.dies(f"actor-{number}", ran=True) == 0
    said = r"death 6 within 60 s of actor \(actor-0, .*, actor-5\) that had run for less than 60 s; 5 are"
    with pytest.raises(RunError, match=said):
        clock.dies("actor-5", ran=True)


def test_a_pause_makes_no_life_young_and_rare_deaths_of_the_young_end_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, count=200, restarts=5)
    for name in clock.members:
        clock.runs(name)
    clock.now = 61.0
    for number in range(20):
        clock.budget.note_running(f"actor-{number}")  # again, in the same life
        assert clock.dies(f"actor-{number}", ran=True) == 0
    for number in range(100):
        clock.now += 13.0
        clock.runs(f"actor-{number}")
        assert clock.dies(f"actor-{number}", ran=True) == 0


def test_of_a_group_that_never_ran_three_deaths_in_a_minute_are_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    clock.dies("actor-3", ran=False)
    clock.dies("actor-5", ran=False)
    with pytest.raises(
        RunError,
        match=r"actor-6 is gone, death 3 within 60 s of actor \(actor-3, actor-5, actor-6\), of which none",
    ):
        clock.dies("actor-6", ran=False)


def test_what_dies_by_chance_before_it_runs_has_another_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for name in ("actor-3", "actor-5", "actor-6", "actor-6", "actor-5"):
        clock.dies(name, ran=False)
        clock.now += 31.0


def test_else_three_of_one_worker_are_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.budget.note_running("actor-0")
    for name in ("actor-3", "actor-5", "actor-3", "actor-5"):
        clock.dies(name, ran=False)
    clock.budget.note_running("actor-3")
    clock.dies("actor-3", ran=False)
    with pytest.raises(RunError, match="actor-5 is gone, death 3 before it ran"):
        clock.dies("actor-5", ran=False)


def test_one_that_dies_late_as_it_begins_does_not_do_so_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom that is: its run would never begin."""
    clock = Clock(monkeypatch)
    for _ in range(2):
        clock.dies("actor-0", ran=False)
        clock.now += 1000.0
    with pytest.raises(RunError, match="actor-0 is gone, death 3 before it ran"):
        clock.dies("actor-0", ran=False)
