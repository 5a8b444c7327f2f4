"""What is told of slots that fail."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.core.errors import EnvironmentFault
from tidemill.workers.health import Health


def slots(count: int) -> Any:
    return [SimpleNamespace(voids=True, quarantined=False, faults=[]) for _ in range(count)]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (
            ["it was lost", "it has other spaces"],
            "the first fault was: slot 0: it was lost; the last: slot 1: it has other spaces$",
        ),
        (["it was lost", "it was lost"], "the first fault was: slot 0: it was lost$"),
        (["step 3 (session 5f.0) was lost", "step 12 (session 5f.17) was lost"], r"the first fault was: slot 0: step 3 \(session 5f.0\) was lost$"),
    ],
)
def test_too_few_healthy_slots_are_told_with_the_first_cause_and_with_the_last_where_that_is_another(texts: list[str], told: str) -> None:
    several = slots(3)
    health = Health(several, 2, lambda text: None)
    for slot, text in zip(several, texts, strict=False):
        health.look()
        slot.faults.append(text)
        slot.quarantined = True
        time.sleep(0.03)  # longer than from one look to the next
    with pytest.raises(EnvironmentFault, match=f"^1 of 3 slots are healthy, and min_healthy_slots = 2; {told}"):
        health.look()
    assert health.stats() == {"slots/quarantined": 2.0, "slots/faults": 2.0, "slot/0/faults": 1.0, "slot/1/faults": 1.0}
