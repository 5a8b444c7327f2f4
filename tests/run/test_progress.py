"""What is recorded of workers between two updates."""

from unittest.mock import Mock

import pytest
from tests.run import experiments

from tidemill import PPO
from tidemill.api.control_messages import WorkerStatistics
from tidemill.run.member import Member, how_merged
from tidemill.run.progress import Progress
from tidemill.workers.trainer_config import Trainer


def beat(seconds: float, **shares: float) -> WorkerStatistics:
    return WorkerStatistics(
        1, {}, {"seconds": seconds, **{f"share/{place}": share for place, share in shares.items()}}
    )


def update(number: int) -> WorkerStatistics:
    return WorkerStatistics(
        1,
        {"step": 10.0 * number, "update": float(number), "dropped": 0.0},
        {"seconds": float(number)},
        update=True,
    )


def recorded(progress: Progress, members: dict[str, Member], *updates: WorkerStatistics) -> dict[str, float]:
    for message in updates:
        progress.count_update("trainer-0", message, members)
    return progress.record(members)


def told(number: int, **values: float) -> WorkerStatistics:
    message = update(number)
    message.values.update({name.replace("__", "/"): value for name, value in values.items()})
    return message


def test_a_record_of_several_updates_has_the_mean_of_what_each_measured_and_the_newest_counts() -> None:
    progress, members = Progress(), {"trainer-0": Member(Mock(), Mock())}
    first = [
        told(n, loss=loss, lag__max=lag, dropped=n)
        for n, loss, lag in ((1, 1.0, 0.0), (2, 2.0, 5.0), (3, 6.0, 1.0))
    ]
    progress.environment_statistics.merge({"score": ("average", 4.0, 2), "falls": ("sum", 1.0, 1)})
    for message in first:
        progress.count_update("trainer-0", message, members)
        progress.environment_statistics.merge({"score": ("average", 9.0, 1), "falls": ("sum", 1.0, 1)})
    assert not progress.recorded
    record = progress.record(members)
    assert progress.recorded
    assert record == {
        "step": 30.0, "update": 3.0, "dropped": 3.0, "episodes": 0.0, "loss": 3.0, "lag/max": 5.0,
        "environment/score": 31.0 / 5, "environment/falls": 4.0, "time/seconds": 3.0,
        "time/steps_per_second": 10.0,
    }  # fmt: skip
    assert recorded(progress, members, told(4, loss=8.0))["loss"] == 8.0  # and nothing of those before


def test_an_update_that_stands_for_several_weighs_as_much_and_what_was_waited_is_summed() -> None:
    """A trainer with a ratio tells of its tasks now and then: means of those since it
    told last, and of the ones before where there were none."""
    progress, members = Progress(), {"trainer-0": Member(Mock(), Mock())}
    recorded(progress, members, told(10, loss=7.0, limiter__training_waited=1.0))
    accounts = ((40, 1.0, 0.5, -3.0), (40, 1.0, 0.25, -4.0), (50, 5.0, 0.125, 2.0))
    record = recorded(
        progress,
        members,
        *(
            told(n, loss=loss, limiter__training_waited=waited, limiter__debt_min=debt)
            for n, loss, waited, debt in accounts
        ),
    )
    assert (record["loss"], record["limiter/training_waited"], record["limiter/debt_min"]) == (
        (30 * 1.0 + 10 * 5.0) / 40,
        0.875,
        -4.0,
    )
    assert recorded(progress, members, told(50, loss=5.0))["loss"] == 5.0  # nothing was trained since


def test_what_becomes_of_a_name_follows_from_its_last_word() -> None:
    names = ("lag/max", "max", "kl_min", "loss/softmax", "admin", "time_waited", "max_entropy")
    assert [how_merged(name) for name in names] == [
        "largest",
        "largest",
        "smallest",
        "average",
        "average",
        "sum",
        "average",
    ]


def test_of_two_trainers_one_record_has_both() -> None:
    members = {name: Member(Mock(limited=True), Mock()) for name in ("red-0", "blue-0")}
    progress = Progress()
    for name, message in (
        ("red-0", told(1, loss=1.0)),
        ("blue-0", told(1, loss=3.0)),
        ("red-0", told(2, loss=2.0)),
    ):
        progress.count_update(name, message, members)
    record = progress.record(members)
    assert (
        record["red-0/loss"],
        record["blue-0/loss"],
        record["red-0/update"],
        record["blue-0/update"],
        record["update"],
    ) == (
        1.5,
        3.0,
        2.0,
        1.0,
        2.0,
    )


def test_shares_are_those_of_all_the_time_since_the_last_record() -> None:
    member, progress = Member(Mock(), Mock()), Progress()
    members = {"trainer-0": member}
    member.note_statistics(beat(0.3, train=0.0, wait=1.0))
    member.note_statistics(beat(0.1, train=1.0, wait=0.0))
    record = recorded(progress, members, update(1))
    assert (record["time/trainer-0/train"], record["time/trainer-0/wait"]) == pytest.approx((0.25, 0.75))
    # nothing newer was heard
    assert recorded(progress, members, update(2))["time/trainer-0/wait"] == pytest.approx(0.75)
    member.note_statistics(beat(0.2, train=0.5, wait=0.5))
    assert recorded(progress, members, update(3))["time/trainer-0/wait"] == pytest.approx(0.5)


def test_of_a_limiter_the_newest_is_known_and_all_that_was_waited() -> None:
    progress, members = Progress(), {"trainer-0": Member(Mock(), Mock())}
    for number, told in enumerate(
        (
            {"committed": 4.0, "training_waited": 0.5, "balance": 3.0},
            {"committed": 8.0, "training_waited": 0.25},
        )
    ):
        message = update(number + 1)
        message.values.update({f"limiter/{name}": value for name, value in told.items()})
        progress.count_update("trainer-0", message, members)
    assert progress.limiters == {"trainer-0": {"committed": 8.0, "training_waited": 0.75, "balance": 3.0}}


def test_iterations_are_noted_and_no_other_measurements() -> None:
    progress = Progress()
    progress.note_iteration(10, {"evaluation/return": 3.0})
    progress.note_iteration(20, {"iteration/number": 1.0, "iteration/training_return": 2.0})
    assert progress.iterations == [{"step": 20.0, "number": 1.0, "training_return": 2.0}]


def test_the_clock_goes_on_while_no_update_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tidemill.run.progress.awake", lambda: now[0])
    progress = Progress(seconds=50.0)  # of an earlier life
    progress.begin(experiments.cartpole())
    members = {"trainer-0": Member(Trainer(policy="policy", algorithm=PPO()), Mock())}
    now[0] = 107.0
    assert progress.clock == 50.0  # its workers start
    progress.mark()
    now[0] = 117.0
    assert progress.clock == 60.0
    progress.count_update("trainer-0", update(61), members)
    assert progress.clock == 61.0
    now[0] = 120.0
    assert progress.clock == 64.0
    progress.pause()
    now[0] = 1_000.0
    assert progress.clock == 64.0
    progress.go_on()
    now[0] = 1_002.0
    assert progress.clock == 66.0


def test_what_a_crash_would_cost_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds since the oldest of the policies' newest checkpoints, of those that were
    updated since, and most env steps of one since its own; before each has one, all of
    this life."""
    now = [100.0]
    monkeypatch.setattr("tidemill.run.progress.awake", lambda: now[0])
    progress = Progress(steps=1_000)
    progress.begin(experiments.cartpole())
    assert progress.trained == {"policy"}
    first, second = "policy", "other"
    progress.trained.add(second)
    members = {policy: Member(Trainer(policy=policy, algorithm=PPO()), Mock()) for policy in (first, second)}

    def is_updated(policy: str, updates: int, steps: int) -> None:
        message = update(updates)
        message.values["step"] = steps
        progress.count_update(policy, message, members)

    is_updated(first, 14, 1_400)
    is_updated(second, 13, 1_300)
    now[0] = 110.0
    progress.note_saved(first, 1_400, 14)
    is_updated(first, 15, 1_500)
    assert progress.crash_cost == (10.0, 500)
    now[0] = 112.0
    progress.note_saved(second, 1_300, 13)
    assert progress.crash_cost == (2.0, 100)  # the other one is as it was saved
    is_updated(second, 14, 1_400)
    assert progress.crash_cost == (2.0, 100)
    assert progress.steps == 1_500
    is_updated(first, 20, 2_000)
    now[0] = 130.0
    progress.note_saved(first, 2_000, 20)
    assert progress.crash_cost == (18.0, 100)
    progress.note_saved(second, 1_400, 14)  # which makes no update any more
    now[0] = 140.0
    assert progress.crash_cost == (10.0, 0)
    is_updated(first, 30, 3_000)
    assert progress.crash_cost == (10.0, 1_000)
    now[0] = 142.0
    progress.note_saved(first, 3_000, 30)
    now[0] = 145.0
    assert progress.crash_cost == (3.0, 0)
    is_updated(first, 31, 3_100)
    progress.pause()
    now[0] = 1000.0
    assert progress.crash_cost == (3.0, 100)
    progress.note_saved(first, 3_100, 31)
    assert progress.crash_cost == (0.0, 0)
    now[0] = 2000.0
    progress.go_on()
    now[0] = 2005.0
    is_updated(second, 15, 1_500)  # it is as it was saved at 130.0, 15 s of training before the pause
    assert progress.crash_cost == (20.0, 100)
    is_updated(first, 32, 3_200)
    progress.note_saved(second, 1_500, 15)
    assert progress.crash_cost == (5.0, 100)


def test_what_only_the_last_checkpoint_tells_of_is_counted_once():
    """A trainer that dies behind its last update, and before it has told it, leaves its
    next life none to tell of."""
    progress = Progress()
    progress.begin(experiments.cartpole())
    progress.count(update(99))
    progress.recorded = True
    progress.note_saved("policy", progress.steps, 99)
    progress.count_saved()
    assert progress.recorded and progress.updates == 99
    progress.note_saved("policy", progress.steps + 64, 100)
    progress.count_saved()
    record = progress.record({})
    assert (record["update"], progress.updates) == (100.0, 100) and record["step"] == progress.steps > 0
    progress.go_back(Progress(updates=40, steps=2_000), Progress(), ["policy"])  # from damaged ones
    progress.count_saved()
    assert (progress.updates, progress.steps) == (40, 2_000)
