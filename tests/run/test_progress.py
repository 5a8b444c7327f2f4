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
