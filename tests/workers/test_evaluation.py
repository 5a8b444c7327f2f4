"""The evaluation manager: which games count, what is told of them, which version is the
best one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.workers.arena import Arena, Games, judge

from tidemill import AgentSpec, Buffers, Drawn, Evaluation, Fixed, Stage
from tidemill.api.control_messages import EnterStage, Facts, Notice, SampleFacts, pack
from tidemill.core.errors import ConfigError, DatabaseError, VersionGone
from tidemill.store.recorded_results import RecordedResults
from tidemill.streams import sources
from tidemill.workers import evaluation


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "LOOK", 0.0)
    monkeypatch.setattr(sources, "LOOK", 0.0)


# ---- which games count -----------------------------------------------------------------


def test_each_seat_plays_its_share_so_that_short_games_are_not_favoured(tmp_path: Path) -> None:
    games = Games(tmp_path, lanes=2, games=4)
    games.push(3)
    assert games.evaluate() == []
    for number in range(6):
        games.play(3, 10.0 * number, seat=0, length=1)
    games.play(3, 200.0, seat=1, length=9)
    assert games.evaluate() == []
    games.play(3, 300.0, seat=1, length=11)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == (0 + 10 + 200 + 300) / 4
    assert told.values["evaluation/length"] == (1 + 1 + 9 + 11) / 4
    assert told.values["evaluation/games"] == 4 and told.values["evaluation/discarded"] == 0


def test_seats_are_those_of_all_targets_of_all_actors(tmp_path: Path) -> None:
    games = Games(tmp_path, lanes=1, ring=2, count=2, games=5)
    games.push(0)
    games.evaluate()
    assert len(games.producers) == 4
    for number in range(2 * 4):  # 5 games of 4 seats: 2 of each
        assert games.evaluate() == []
        games.play(0, float(number), channel=number % 4)
    (told,) = games.evaluate()
    assert told.values["evaluation/games"] == 8 and told.values["evaluation/return"] == 3.5


def test_what_other_versions_have_played_or_more_than_one_is_discarded_and_counted(tmp_path: Path) -> None:
    games = Games(tmp_path, games=2)
    games.push(4, 7)
    games.evaluate()
    assert games.database.tags("policy")["evaluating"] == 7
    games.play(4, 100.0)  # late
    games.play(4, 100.0, last=7)  # in which the version changed
    games.play(7, 100.0, last=9)
    games.play(-1, 100.0, last=-1)
    games.play(7, 1.0)
    games.play(7, 2.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == 1.5 and told.values["evaluation/discarded"] == 4
    games.push(8)
    games.evaluate()
    games.play(7, 100.0)
    for _ in range(2):
        games.play(8, 3.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == 3.0 and told.values["evaluation/discarded"] == 5


@pytest.mark.parametrize("late", [False, True])
def test_a_game_more_than_a_round_takes_is_as_nothing_before_its_end_and_after(
    late: bool, tmp_path: Path
) -> None:
    """Which of two judges sends the last game of a round is chance."""
    games = Games(tmp_path, count=2, games=2, updates=2)
    games.push(0)
    games.play(0, 1.0)
    games.play(0, 100.0)  # in the tick that ended the round of its target
    if not late:
        games.evaluate()
    games.play(0, 3.0, channel=1)
    told = games.evaluate()
    games.push(1, 2)
    games.evaluate()
    games.play(2, 5.0), games.play(0, 7.0, last=2, channel=1)
    games.play(2, 7.0, channel=1)
    told += games.evaluate()
    assert [each.values["evaluation/return"] for each in told] == [2.0, 6.0]
    assert [each.values["evaluation/discarded"] for each in told] == [0, 1]


def test_while_there_is_no_new_version_the_actors_wait(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1, slots=2)
    assert games.play(0, 1.0) and games.play(0, 2.0) and not games.play(0, 3.0)
    assert games.evaluate() == [] and not games.play(0, 3.0)  # nothing was pushed
    games.push(0)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == 1.0
    assert games.play(0, 3.0) and not games.play(0, 4.0)
    assert games.evaluate() == [] and not games.play(0, 4.0)
    games.push(1)
    assert games.evaluate() == []
    assert games.worker._discarded == 2 and games.play(1, 5.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == 5.0


def test_it_says_what_is_due_to_it_while_a_version_is_played(tmp_path: Path) -> None:
    games = Games(tmp_path, games=2)
    games.evaluate()
    assert not games.worker._lacks()  # nothing was pushed
    games.push(0)
    games.evaluate()
    games.play(0, 1.0)
    games.evaluate()
    assert games.worker._lacks() == {"policy": "evaluation/return"}
    games.play(0, 1.0)
    games.evaluate()
    assert not games.worker._lacks()
    waited_for = Games(tmp_path / "waited for", games=2, updates=1)
    waited_for.push(0)
    waited_for.evaluate()
    assert waited_for.worker._frozen is not None and not waited_for.worker._lacks()  # training waits for it


def test_a_poll_takes_all_that_waits(tmp_path: Path) -> None:
    """In one thread everybody else has a turn between two polls."""
    games = Games(tmp_path, ring=3, games=12)
    games.push(0)
    for number in range(12):
        games.play(0, 1.0, channel=number % 3)
    assert games.worker._poll().batch_count == 12
    (told,) = games.evaluate()
    assert told.values["evaluation/games"] == 12


def test_finding_a_version_wakes_the_worker_for_what_already_waits(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1)
    games.play(0, 1.0)
    bell = games.worker.context.endpoints.bell
    while bell.wait(0):
        pass
    games.worker._poll()
    assert not bell.wait(0)
    games.push(0)
    games.worker._freeze()
    assert bell.wait(0)


def test_the_newest_version_is_taken_and_each_at_most_once(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1)
    games.push(9, 10, 11)  # as numbers, not as text
    games.play(11, 1.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/version"] == 11 and told.step == 1100
    games.play(11, 1.0)
    assert games.evaluate() == []
    games.begin()  # a resumed run
    assert games.evaluate() == []
    games.push(12)
    games.play(12, 2.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/version"] == 12


def test_a_version_is_kept_while_it_is_evaluated(tmp_path: Path) -> None:
    games = Games(tmp_path, games=2)
    games.push(1)
    games.play(1, 1.0)
    games.evaluate()
    games.push(2, 3, 4)
    assert games.database.collect("policy", 1) == [2, 3]
    games.play(1, 2.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/version"] == 1 and games.results(1)["evaluation/return"] == 1.5
    games.play(4, 9.0), games.play(4, 9.0)
    games.evaluate()
    games.evaluate()
    assert games.database.tags("policy") == {"best": 4, "evaluating": 4, "latest": 4}
    assert games.database.collect("policy", 1) == [1]
    with pytest.raises(VersionGone, match=r"version 1 .* was collected.* that are kept: 4"):
        games.database.tag("policy", "x", 1)


def test_a_new_stage_begins_anew_with_a_version_of_its_own(tmp_path: Path) -> None:
    games = Games(tmp_path, games=2)
    games.push(1)
    games.play(1, 1.0)
    assert games.evaluate() == []
    games.ends["evaluation-0"][1].send(pack(EnterStage(1)))
    games.worker._obey()
    games.play(1, 1.0)
    assert games.evaluate() == []
    games.push(2)
    games.play(2, 5.0), games.play(2, 7.0)
    (told,) = games.evaluate()
    assert (
        told.stage == 1 and told.values["evaluation/return"] == 6.0 and told.values["evaluation/version"] == 2
    )
    assert "evaluation/return" not in games.results(1)


# ---- what is told ----------------------------------------------------------------------


def test_the_interval_is_the_mean_s_at_95_per_cent(tmp_path: Path) -> None:
    games = Games(tmp_path, games=5)
    games.push(2)
    games.evaluate()
    for reached in (1.0, 2.0, 3.0, 4.0, 5.0):
        games.play(2, reached)
    (told,) = games.evaluate()
    # variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5; of the mean 0.5; 1.96 · √0.5 = 1.385929…
    assert told.values["evaluation/return"] == 3.0
    assert told.values["evaluation/return_low"] == pytest.approx(3 - 1.385929, abs=1e-6)
    assert told.values["evaluation/return_high"] == pytest.approx(3 + 1.385929, abs=1e-6)
    mean = games.database.versions("policy")[0].means["evaluation/return"]
    assert (mean.count, mean.mean, mean.margin) == (5, 3.0, pytest.approx(1.385929, abs=1e-6))
    assert games.results(2) == {"evaluation/return": 3.0, "evaluation/length": 5.0}
    assert {*told.values} == {*Evaluation().measures()} - {"evaluation/info/"}


def test_of_one_game_the_interval_is_the_game(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1, name="once")
    games.push(0)
    games.play(0, -2.0)
    (told,) = games.evaluate()
    assert (
        told.values["once/return_low"]
        == told.values["once/return"]
        == told.values["once/return_high"]
        == -2.0
    )


def test_a_draw_is_half_a_win(tmp_path: Path) -> None:
    games = Games(tmp_path, games=4, drawn=10.0)
    games.push(0)
    games.evaluate()
    for reached in (9.0, 10.0, 11.0, 500.0):
        games.play(0, reached)
    (told,) = games.evaluate()
    assert (
        told.values["evaluation/win_rate"] == 2.5 / 4 and games.results(0)["evaluation/win_rate"] == 2.5 / 4
    )
    assert {*told.values} == {*Evaluation(drawn=10.0).measures()} - {"evaluation/elo", "evaluation/info/"}, (
        "nobody was played"
    )


# ---- the best one ----------------------------------------------------------------------


def test_the_best_tag_moves_only_upward_and_a_resumed_run_knows_how_high_it_is(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1)
    best = {}
    for version, reached in ((0, 5.0), (1, 3.0), (2, 5.0), (3, 6.0), (4, -1.0)):
        games.push(version)
        games.play(version, reached)
        assert len(games.evaluate()) == 1
        best[version] = games.database.tags("policy")["best"]
    assert best == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3}
    games.begin()
    for version, reached in ((5, 5.5), (6, 6.5)):
        games.push(version)
        games.play(version, reached)
        assert len(games.evaluate()) == 1
        best[version] = games.database.tags("policy")["best"]
    assert best[5] == 3 and best[6] == 6


def test_the_best_version_is_one_of_the_present_stage(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1)
    games.experiment = games.experiment.replace(curriculum=(Stage(until="step > 100"), Stage()))

    def enter(stage: int) -> None:
        games.ends["evaluation-0"][1].send(pack(EnterStage(stage)))
        games.worker._obey()

    def reach(version: int, reached: float) -> int:
        games.push(version)
        games.play(version, reached)
        assert len(games.evaluate()) == 1
        return games.database.tags("policy")["best"]

    games.begin()
    enter(0)
    assert [reach(0, 500.0), reach(1, 400.0)] == [0, 0]
    enter(1)
    assert [reach(2, 50.0), reach(3, 40.0), reach(4, 60.0)] == [2, 2, 4], (
        "version 0 was better where it was easier"
    )
    assert games.results(0)["evaluation/stage"] == 1 and games.results(4)["evaluation/stage"] == 2
    games.begin()
    enter(1)
    assert [reach(5, 55.0), reach(6, 65.0)] == [4, 6], "also in a resumed run"


def test_a_best_version_that_a_resumed_run_goes_back_behind_is_forgotten(tmp_path: Path) -> None:
    games = Games(tmp_path, games=1)
    games.push(0, 1)
    games.play(1, 100.0)
    games.evaluate()
    games.begin()
    games.database.rewind("policy", 0)  # by its trainer, which begins after evaluation was configured
    games.play(0, 2.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/version"] == 0 and games.database.tags("policy")["best"] == 0


# ---- opponents -------------------------------------------------------------------------


def test_who_plays_rated_versions_is_rated_by_theirs(tmp_path: Path) -> None:
    games = Games(tmp_path, agents=2, games=4, drawn=0.0)
    games.push(0)
    games.evaluate()
    for reached in (1.0, -1.0, 1.0, -1.0):
        games.play(0, reached, against=(0, 0))  # itself: nobody is rated yet
    (told,) = games.evaluate()
    assert told.values["evaluation/elo"] == 1000.0 == games.results(0)["evaluation/elo"]
    games.push(1)
    games.evaluate()
    for reached in (1.0, 1.0, -1.0, 1.0):
        games.play(1, reached, against=(0, 0))
    (told,) = games.evaluate()
    # 3 of 4, and the draw that is assumed: 3.5 of 5, odds of 7 to 3
    first = 1000 + 400 * np.log10(7 / 3)
    assert told.values["evaluation/elo"] == pytest.approx(first) == games.results(1)["evaluation/elo"]
    games.push(2, 3)
    games.evaluate()
    # a win against each: 2.5 of 3 against ratings of which their mean is one
    for against in ((0, 0), (1, 0)):
        games.play(3, 1.0, against=against)
    games.play(3, -1.0, against=(3, 0))  # itself
    games.play(3, -1.0, against=(0, 1))  # of another policy
    (told,) = games.evaluate()
    mean = (1000 + first) / 2
    opponents, rating = np.array([1000, first, mean]), told.values["evaluation/elo"]
    assert (1 / (1 + 10 ** ((opponents - rating) / 400))).sum() == pytest.approx(2.5)
    assert told.values["evaluation/win_rate"] == 0.5


def test_an_opponent_that_was_not_rated_counts_as_the_newest_one_before_it_that_was(tmp_path: Path) -> None:
    games = Games(tmp_path, agents=2, games=2, drawn=0.0)
    games.push(0, 1, 4)
    games.evaluate()
    games.play(4, 0.0, against=(4, 0)), games.play(4, 0.0, against=(4, 0))
    assert games.evaluate()[0].values["evaluation/elo"] == 1000.0
    games.push(5, 6, 7, 8)
    games.evaluate()
    # 7 counts as 4; nobody before 1 was rated
    games.play(8, 1.0, against=(7, 0)), games.play(8, 1.0, against=(1, 0))
    # 1 of 1, and the draw that is assumed: 1.5 of 2, odds of 3 to 1
    (told,) = games.evaluate()
    assert told.values["evaluation/elo"] == pytest.approx(1000 + 400 * np.log10(3))
    games.push(9)
    games.evaluate()
    games.database.untag("policy", "best")
    games.database.collect("policy", 1)
    assert {version.version for version in games.database.versions("policy")} == {9}, (
        "every rated one was collected"
    )
    games.play(9, 0.0, against=(9, 0)), games.play(9, 0.0, against=(8, 0))
    (told,) = games.evaluate()
    assert told.values["evaluation/elo"] == pytest.approx(1000 + 400 * np.log10(3))


def test_who_plays_only_itself_or_older_ones_is_not_rated_once_others_are(tmp_path: Path) -> None:
    games = Games(tmp_path, agents=2, games=2, drawn=0.0)
    games.push(0, 3)
    games.evaluate()
    games.play(3, 0.0, against=(0, 0)), games.play(3, 0.0, against=(0, 0))
    games.evaluate()
    games.push(4)
    games.evaluate()
    games.play(4, 1.0, against=(0, 0)), games.play(4, -1.0, against=(4, 0))
    (told,) = games.evaluate()
    assert "evaluation/elo" not in told.values and "evaluation/elo" not in games.results(4)


def test_it_is_noted_which_versions_beat_whom_was_evaluated(tmp_path: Path) -> None:
    games = Games(tmp_path, agents=2, games=7, drawn=0.0)
    games.push(0, 1, 2, 3)
    games.evaluate()
    for version, policy, reached in (
        (0, 0, 1.0),
        (0, 0, 1.0),
        (1, 0, -1.0),
        (1, 0, 0.0),
        (2, 1, -1.0),
        (-1, 0, -1.0),
        (3, 0, 1.0),
    ):
        games.play(3, reached, against=(version, policy))
    (told,) = games.evaluate()
    assert told.values["evaluation/win_rate"] == 3.5 / 7
    beats = {v.version: v.means.get("evaluation/beats") for v in games.database.versions("policy")}
    assert beats[2] is None, "that was a version of another policy, and one that changed within the game"
    assert {version: (mean.count, mean.mean) for version, mean in beats.items() if mean} == {
        0: (2, 0.0),
        1: (2, 0.75),
        3: (1, 0.0),
    }


def test_an_opponent_that_was_collected_while_it_played_is_left_out(tmp_path: Path) -> None:
    games = Games(tmp_path, agents=2, games=2, drawn=0.0)
    games.push(0, 1, 2)
    games.evaluate()
    games.play(2, 1.0, against=(0, 0)), games.play(2, 1.0, against=(1, 0))
    assert games.database.collect("policy", 2) == [0]
    (told,) = games.evaluate()
    assert told.values["evaluation/win_rate"] == 1.0 and games.results(1) == {"evaluation/beats": 0.0}


# ---- with actors -----------------------------------------------------------------------


def test_actors_play_what_is_evaluated(tmp_path: Path) -> None:
    """Real ones, of many lanes, one lane, and a ring; versions come while they play."""
    for number, shape in enumerate(
        ({"lanes": 5}, {"lanes": 1, "ring": 3}, {"lanes": 2, "ring": 2, "count": 2})
    ):
        arena = Arena(
            tmp_path / str(number),
            {"judge": judge(agents=2, **shape), "evaluation": Evaluation(games=10, drawn=0.0)},
        )
        arena.push(0)
        names = [name for name, _ in arena.experiment.members() if name.startswith("judge")]
        actors = [arena.build(name) for name in names]
        (facts, *_) = [actor._configure(Facts()) for actor in actors]
        worker = arena.build("evaluation-0")
        worker._configure(facts)
        for one in (worker, *actors):
            one.start()
        seen: list[Any] = []
        for turn in range(4000):
            if turn % 40 == 0:
                arena.push(turn // 40)
                arena.database.collect("policy", 2)
            for one in (worker, *actors):
                one._poll()
            seen += [message.values for message in arena.told("evaluation-0") if hasattr(message, "values")]
            if len(seen) >= 3:
                break
        assert len(seen) >= 3, shape
        versions = [values["evaluation/version"] for values in seen]
        assert versions == sorted(set(versions))
        seats = 5 if number == 0 else 3 if number == 1 else 8
        assert all(values["evaluation/games"] == -(-10 // seats) * seats for values in seen)


# ---- what cannot be --------------------------------------------------------------------

FACTS = Facts(samples={"evaluation": SampleFacts(1, 0, 1, "concise")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "full"}, 'has mode = "full".*set mode = "concise"'),
        (
            {"parameters": Drawn(tag="evaluatin")},
            r'has parameters = .*tag=.evaluatin.*set parameters = Drawn\(tag="evaluating"\)',
        ),
        ({"parameters": Fixed()}, r'set parameters = Drawn\(tag="evaluating"\)'),
        ({"policy": "other"}, 'has policy = "other".*set policy = "policy"'),
    ],
)
def test_actors_that_play_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arena = Arena(tmp_path, {"judge": judge(**changes), "evaluation": Evaluation()})
    with pytest.raises(ConfigError, match=f'judge-0: agent spec "red_0".*{message}'):
        Evaluation().check(arena.experiment)


def test_episodes_come_from_actors_alone(tmp_path: Path) -> None:
    between = Buffers(samples="gathered", into="evaluation", process=())
    arena = Arena(
        tmp_path, {"judge": judge(samples="gathered"), "buffers": between, "evaluation": Evaluation()}
    )
    with pytest.raises(ConfigError, match='buffers-0 fills sample stream "evaluation"'):
        Evaluation().check(arena.experiment)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Evaluation(samples="more", name="more"), 'both move the tag "best"'),
        (Evaluation(samples="more", name="more", tag="best", best="b"), 'both move the tag "best"'),
        (Evaluation(samples="more", tag="t", best="b"), 'both have name = "evaluation"'),
    ],
)
def test_two_evaluations_do_not_share_tags_or_names(tmp_path: Path, other: Evaluation, message: str) -> None:
    more = judge(samples="more", parameters=Drawn(tag=other.tag))
    arena = Arena(tmp_path, {"judge": judge(), "more": more, "evaluation": Evaluation(), "second": other})
    with pytest.raises(ConfigError, match=f"evaluation and second {message}"):
        Evaluation().check(arena.experiment)


def test_evaluations_of_different_policies_share_names_and_tags(tmp_path: Path) -> None:
    more, second = judge(samples="more", policy="other"), Evaluation(samples="more", policy="other")
    arena = Arena(tmp_path, {"judge": judge(), "more": more, "evaluation": Evaluation(), "second": second})
    second.check(arena.experiment)
    assert arena.experiment.measured_by_several() == {*second.measures()}
    for policy in ("policy", "other"):
        assert arena.experiment.recorded(policy) == {"version", "age", *Evaluation().records()}


def test_evaluation_needs_a_folder(tmp_path: Path) -> None:
    arena = Arena(tmp_path, {"judge": judge(), "evaluation": Evaluation()})
    context = arena.context("evaluation-0")
    context.folder = None
    with pytest.raises(ConfigError, match="the run keeps no folder"):
        Evaluation().build(context)._configure(FACTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 2}, "one worker evaluates"),
        ({"games": 0}, "games = 0 must be at least 1"),
        ({"tag": "best"}, 'tag and best are both "best"'),
        ({"tag": "12"}, 'tag "12" is not a name'),
        ({"best": "latest"}, 'the tag "latest" moves by itself'),
        ({"name": "my evaluation"}, '"my evaluation/return" cannot name metadata'),
        ({"name": ""}, '"/return" cannot name metadata'),
        ({"drawn": float("nan")}, "drawn = nan is no return of a drawn game"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Evaluation(**settings)


def test_parameters_are_for_inline_policies() -> None:
    with pytest.raises(ConfigError, match='is for inline policies, and inference stream "ask"'):
        AgentSpec(inference="ask", parameters=Drawn(tag="evaluating"))


def test_a_full_disk_holds_an_evaluation_up_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    games, reported = Games(tmp_path, games=1), []
    report = games.worker.report
    monkeypatch.setattr(games.worker, "report", lambda told: (reported.append(told), report(told)))
    monkeypatch.setattr("tidemill.workers.evaluation.AGAIN", 0.0)
    games.push(3)
    games.evaluate()

    def full(*_: Any) -> None:
        raise DatabaseError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(RecordedResults, "add", full)
        for reached in (1.0, 2.0, 3.0):
            games.play(3, reached)
            assert games.evaluate() == []
            assert not games.worker._lacks()  # that was told
    games.play(3, 4.0)
    (told,) = games.evaluate()
    assert told.values["evaluation/return"] == 1.0  # the first game of the seat, as if nothing had been
    assert [told.text for told in reported if isinstance(told, Notice)] == [
        "no space left. Evaluation goes on when it can be written again",
        "the parameter database is written again: evaluation goes on",
    ]
