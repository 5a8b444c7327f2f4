"""What becomes of equal trainers where one dies: who waits, who begins a next life with
it, and how they join."""

import pytest
from tests.run.watching import EXPERIMENTS

from tidemill.api.control_messages import Rejoin, State, Stay, Staying, WorkerStatistics, unpack_down
from tidemill.api.launcher import Call
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.core.user_code_loading import load_file
from tidemill.run import equal_lives
from tidemill.run.equal_lives import SAVING, EqualLives
from tidemill.run.member import Member
from tidemill.run.silence import HUNG, TIMES
from tidemill.transports.local import LocalBell, LocalLink

experiments = load_file(EXPERIMENTS, "test")
FIRST, SECOND, THIRD = (f"trainer-{rank}" for rank in range(3))


class Trainers:
    """Three equal trainers that run, and what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(equal_lives, "awake", lambda: self.now)
        made = experiments.numbered_equals("", None)
        self.members, self.ends = {}, {}
        for name, config in made.members():
            down, self.ends[name] = LocalLink.pair(LocalBell(), LocalBell())
            self.members[name] = Member(config, down, State.RUNNING)
        self.calls = dict[str, list[Call]]()
        self.lives = EqualLives(made, self.members, lambda name: "", lambda name: self.calls.get(name, []))

    def told(self, name: str) -> list[object]:
        return [unpack_down(message) for message in self.ends[name].receive() or ()]

    def answer(self, name: str, updates: int, saved: bool | None = None) -> None:
        """Answer what it was asked last."""
        asked = [message for message in self.told(name) if isinstance(message, Stay)]
        self.members[name].awaits = Staying(asked[-1].number, updates, saved)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Trainers:
    return Trainers(monkeypatch)


def test_one_of_those_that_live_saves_and_all_join_by_the_versions_that_they_have(trainers: Trainers) -> None:
    lives = trainers.lives
    lives.ask([SECOND, "actor-1"], [FIRST, THIRD])
    assert lives.settle([SECOND], [FIRST, THIRD]) is None
    trainers.answer(FIRST, 5)
    assert lives.settle([SECOND], [FIRST, THIRD]) is None
    trainers.answer(THIRD, 5)
    assert lives.settle([SECOND], [FIRST, THIRD]) is None
    assert trainers.told(THIRD) == []
    trainers.members[FIRST].awaits = None
    (asked,) = trainers.told(FIRST)
    assert isinstance(asked, Stay) and (asked.lost, asked.save) == ((SECOND,), True)
    trainers.members[FIRST].awaits = Staying(asked.number, 5, True)
    assert lives.settle([SECOND], [FIRST, THIRD]) == {}
    join = Rejoin(1, 0, 5)
    assert lives.join([SECOND, "actor-1"], [FIRST, THIRD], sure=True) == ({SECOND: join}, [])
    lives.starts("actor-1")
    assert trainers.told(FIRST) == trainers.told(THIRD) == []
    lives.starts(SECOND)
    assert trainers.told(FIRST) == trainers.told(THIRD) == [join]
    lives.starts(SECOND)  # once
    assert trainers.told(FIRST) == []


def test_who_lacks_an_update_that_another_has_done_begins_a_next_life(trainers: Trainers) -> None:
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(FIRST, 5)
    trainers.answer(THIRD, 6)
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) == {
        FIRST: f"it lacks an update that another one had done when {SECOND} died"
    }
    assert trainers.lives.settle([FIRST, SECOND], [THIRD]) is None
    trainers.answer(THIRD, 6, saved=True)
    assert trainers.lives.settle([FIRST, SECOND], [THIRD]) == {}
    joins, undone = trainers.lives.join([FIRST, SECOND], [THIRD], sure=True)
    assert joins[FIRST] == joins[SECOND] == Rejoin(1, VERSIONS_OF_LIFE, VERSIONS_OF_LIFE + 6)
    assert undone == []


@pytest.mark.parametrize("saving", [False, True])
def test_who_does_not_answer_in_time_or_ends_begins_a_next_life(trainers: Trainers, saving: bool) -> None:
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.members[FIRST].awaits = Staying(0, 5, True)  # of an earlier death
    trainers.answer(THIRD, 5)
    trainers.members[FIRST].saving = saving
    trainers.now += equal_lives.ANSWER + SAVING * saving - 0.1
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) is None
    trainers.now += 0.2
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) is None  # what has come meanwhile is heard first
    waited = equal_lives.ANSWER + SAVING * saving + 0.1
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) == {
        FIRST: f"it has not answered for {waited:.0f} s since {SECOND} died"
    }
    trainers.members[THIRD].state = State.COMPLETED
    assert trainers.lives.settle([FIRST, SECOND], [THIRD]) == {
        THIRD: f"it had ended when {FIRST} and {SECOND} died"
    }


def test_who_is_in_an_update_is_waited_for_but_not_for_ever(trainers: Trainers) -> None:
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(THIRD, 5)
    trainers.calls[FIRST] = [
        Call("grad", "/home/own.py", 7), Call("_poll", "/lib/tidemill/workers/trainer.py", 9)
    ]  # fmt: skip
    trainers.members[FIRST].statistics["longest_poll"] = HUNG / 4

    def waited() -> tuple[float, dict[str, str]]:
        """Return for how long it is waited for, and what is said then."""
        began, gone = trainers.now, dict[str, str]()
        while not gone and trainers.now - began < 10 * HUNG:
            trainers.now += 0.5
            gone = trainers.lives.settle([SECOND], [FIRST, THIRD]) or {}
        return trainers.now - began, gone

    seconds, gone = waited()
    assert TIMES * HUNG / 4 <= seconds <= TIMES * HUNG / 4 + 2 * equal_lives.ANSWER
    assert f"since {SECOND} died" in gone[FIRST] and "(grad (own.py:7)" in gone[FIRST]
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(THIRD, 5)
    trainers.members[FIRST].statistics.clear()
    assert HUNG <= waited()[0] <= HUNG + 2 * equal_lives.ANSWER
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(THIRD, 5)
    trainers.calls[FIRST].insert(0, Call("step", "/lib/tidemill/envs/lanes.py", 3))  # its actor's turn
    assert waited()[0] <= 2 * equal_lives.ANSWER


def test_who_has_answered_while_nobody_listened_is_not_late(trainers: Trainers) -> None:
    trainers.lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(THIRD, 5)
    trainers.now += 10 * equal_lives.ANSWER  # a callback took so long
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) is None
    trainers.answer(FIRST, 5)
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) is None  # one of them saves
    trainers.answer(FIRST, 5, saved=True)
    assert trainers.lives.settle([SECOND], [FIRST, THIRD]) == {}


def test_where_nothing_can_be_saved_or_nobody_is_left_all_go_back(trainers: Trainers) -> None:
    trainers.lives.ask([SECOND, THIRD], [FIRST])
    trainers.answer(FIRST, 5, saved=False)
    assert trainers.lives.settle([SECOND, THIRD], [FIRST]) == {
        FIRST: f"what it knows could not be saved when {SECOND} and {THIRD} died"
    }
    for life in (1, 2):
        joins, undone = trainers.lives.join([FIRST, SECOND, THIRD], [], sure=True)
        join = Rejoin(life, life * VERSIONS_OF_LIFE, life * VERSIONS_OF_LIFE)
        assert joins == dict.fromkeys([FIRST, SECOND, THIRD], join) and undone == ["policy"]


def test_what_the_dead_alone_have_told_is_undone(trainers: Trainers) -> None:
    trainers.members[FIRST].updated(WorkerStatistics(1, {"update": 6.0}, update=True))
    trainers.lives.ask([FIRST, SECOND], [THIRD])
    trainers.answer(THIRD, 5, saved=True)
    assert trainers.lives.settle([FIRST, SECOND], [THIRD]) == {}
    joins, undone = trainers.lives.join([FIRST, SECOND], [THIRD], sure=True)
    assert joins[FIRST] == Rejoin(1, VERSIONS_OF_LIFE, VERSIONS_OF_LIFE + 5) and undone == ["policy"]


def test_where_the_dead_may_have_published_more_all_go_on_as_a_later_life(trainers: Trainers) -> None:
    trainers.lives.ask([FIRST], [SECOND, THIRD])
    for name in (SECOND, THIRD):
        trainers.answer(name, 5, saved=True)
    assert trainers.lives.settle([FIRST], [SECOND, THIRD]) == {}
    joins, _ = trainers.lives.join([FIRST], [SECOND, THIRD], sure=False)
    assert joins == {FIRST: Rejoin(1, VERSIONS_OF_LIFE, VERSIONS_OF_LIFE + 5)}


def test_another_death_has_those_wait_on_that_were_about_to_go_on(trainers: Trainers) -> None:
    lives = trainers.lives
    lives.ask([SECOND], [FIRST])
    trainers.answer(FIRST, 5, saved=True)
    assert lives.settle([SECOND], [FIRST]) == {}
    lives.join([SECOND], [FIRST], sure=True)
    lives.ask([SECOND], [FIRST])  # its next life has died before it started
    assert lives.settle([SECOND], [FIRST]) is None
    trainers.answer(FIRST, 5, saved=True)
    assert lives.settle([SECOND], [FIRST]) == {}
    joins, _ = lives.join([SECOND], [FIRST], sure=True)
    lives.starts(SECOND)
    assert trainers.told(FIRST) == [joins[SECOND]] == [Rejoin(2, 0, 5)]


def test_who_dies_as_it_waits_is_not_told_what_it_was_to_be_told(trainers: Trainers) -> None:
    lives = trainers.lives
    lives.ask([SECOND], [FIRST, THIRD])
    trainers.answer(FIRST, 5, True)
    trainers.answer(THIRD, 5)
    assert lives.settle([SECOND], [FIRST, THIRD]) == {}
    lives.join([SECOND], [FIRST, THIRD], sure=True)
    lives.ask([SECOND, THIRD], [FIRST])  # before the second one has started
    trainers.answer(FIRST, 5, True)
    assert lives.settle([SECOND, THIRD], [FIRST]) == {}
    joins, _ = lives.join([SECOND, THIRD], [FIRST], sure=True)
    again = Rejoin(2, VERSIONS_OF_LIFE, VERSIONS_OF_LIFE + 5)
    assert joins == dict.fromkeys([SECOND, THIRD], again)
    lives.starts(SECOND)
    lives.starts(THIRD)
    assert trainers.told(FIRST) == [again] and trainers.told(THIRD) == trainers.told(SECOND) == []


def test_a_run_that_resumes_exactly_has_none(trainers: Trainers) -> None:
    made = experiments.numbered_equals("", 0).replace(exact_resume=True)
    assert EqualLives(made, trainers.members, lambda name: "", lambda name: ()).among([FIRST]) == []
