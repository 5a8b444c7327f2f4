"""What is recorded of workers between two updates."""

from unittest.mock import Mock

import pytest

from tidemill.api.control import Statistics
from tidemill.run.progress import Member, Progress


def beat(seconds: float, **shares: float) -> Statistics:
    return Statistics(1, {}, {"seconds": seconds, **{f"share/{place}": share for place, share in shares.items()}})


def update(number: int) -> Statistics:
    return Statistics(1, {"step": 10.0 * number, "update": float(number), "dropped": 0.0}, {"seconds": float(number)}, update=True)


def test_shares_are_those_of_all_the_time_since_the_last_record() -> None:
    member, progress = Member(Mock(), Mock()), Progress()
    members = {"trainer-0": member}
    member.told_regularly(beat(0.3, train=0.0, wait=1.0))
    member.told_regularly(beat(0.1, train=1.0, wait=0.0))
    record = progress.count_update("trainer-0", update(1), members)
    assert (record["time/trainer-0/train"], record["time/trainer-0/wait"]) == pytest.approx((0.25, 0.75))
    assert progress.count_update("trainer-0", update(2), members)["time/trainer-0/wait"] == pytest.approx(0.75)  # nothing newer was heard
    member.told_regularly(beat(0.2, train=0.5, wait=0.5))
    assert progress.count_update("trainer-0", update(3), members)["time/trainer-0/wait"] == pytest.approx(0.5)


def test_of_a_limiter_the_newest_is_known_and_all_that_was_waited() -> None:
    progress, members = Progress(), {"trainer-0": Member(Mock(), Mock())}
    for number, told in enumerate(({"committed": 4.0, "training_waited": 0.5, "balance": 3.0}, {"committed": 8.0, "training_waited": 0.25})):
        message = update(number + 1)
        message.values.update({f"limiter/{name}": value for name, value in told.items()})
        progress.count_update("trainer-0", message, members)
    assert progress.limiters == {"trainer-0": {"committed": 8.0, "training_waited": 0.75, "balance": 3.0}}


def test_iterations_are_noted_and_no_other_measurements() -> None:
    progress = Progress()
    progress.note_iteration(10, {"evaluation/return": 3.0})
    progress.note_iteration(20, {"iteration/number": 1.0, "iteration/training_return": 2.0})
    assert progress.iterations == [{"step": 20.0, "number": 1.0, "training_return": 2.0}]
