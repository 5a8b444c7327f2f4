"""What is told of slots that fail."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.core.errors import EnvironmentFault
from tidemill.replay_training import slot_fault_notices as module
from tidemill.replay_training.slot_fault_notices import LOOK, TELL, SlotFaults


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands still until its `now` is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock


def slots(count: int) -> Any:
    return [SimpleNamespace(voids=True, resting=False, rests=0, faults=[]) for _ in range(count)]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (
            ["it was lost", "it has other spaces"],
            "the first fault was: slot 0: it was lost; the last: slot 1: it has other spaces$",
        ),
        (["it was lost", "it was lost"], "the first fault was: slot 0: it was lost$"),
        (
            ["step 3 (session 5f.0) was lost", "step 12 (session 5f.17) was lost"],
            r"the first fault was: slot 0: step 3 \(session 5f.0\) was lost$",
        ),
    ],
)
def test_an_exact_run_ends_with_a_slot_that_rests_by_the_first_cause_and_the_last_where_that_is_another(
    clock: Any, texts: list[str], told: str
) -> None:
    several = slots(3)
    health = SlotFaults(several, True, lambda text: None)
    for slot, text in zip(several, texts, strict=False):
        health.look()
        slot.faults.append(text)
        clock.now += 2 * LOOK
    several[1].rests = 1  # and steps again by now
    with pytest.raises(
        EnvironmentFault,
        match="^slot 1 fails again and again, and an exact run goes on with all of its slots or none; "
        f"{told}",
    ):
        health.look()


def test_of_slots_that_rest_is_told_how_many_there_are_now(clock: Any) -> None:
    several = slots(3)
    health = SlotFaults(several, False, lambda text: None)
    for slot in several[:2]:
        slot.faults.append("it was lost")
        slot.resting = True
    health.look()
    faults = {"slot/0/faults": 1.0, "slot/1/faults": 1.0}
    resting = {"slot/0/resting": 1.0, "slot/1/resting": 1.0}
    assert health.stats() == {
        "slots/healthy": 1.0,
        "slots/resting": 2.0,
        "slots/faults": 2.0,
        **faults,
        **resting,
    }
    several[0].resting = several[1].resting = False
    assert health.stats() == {"slots/healthy": 3.0, "slots/resting": 0.0, "slots/faults": 2.0, **faults}


def test_faults_are_told_now_and_then_and_what_was_kept_back_at_the_end(clock: Any) -> None:
    several, told = slots(4), list[str]()
    health = SlotFaults(several, False, told.append)
    for slot in several[:3]:
        slot.faults.append("it was lost")
        clock.now += 2 * LOOK
        health.look()
    assert told == ["slot 0: it was lost"]
    clock.now += TELL
    health.look()
    assert told[1:] == ["slot 2: it was lost (and 1 more)"]
    several[3].faults.append("it is gone")
    health.end()
    health.end()
    assert told[2:] == ["slot 3: it is gone"]


def test_what_is_waited_for_where_all_slots_rest_is_said_with_the_last_fault(clock: Any) -> None:
    several = slots(2)
    health = SlotFaults(several, False, lambda text: None)
    for number, slot in enumerate(several):
        slot.faults.append(f"fault {number}\nin detail")
        assert health.rest() == ""
        slot.resting = True
        clock.now += 2 * LOOK
        health.look()
    assert health.rest() == "its slots, which all fail again and again, and rest: slot 1: fault 1"
    several[0].resting = False
    assert health.rest() == ""
    assert SlotFaults([], False, lambda text: None).rest() == ""


def test_each_slots_first_rest_is_told_at_once_by_itself(clock: Any) -> None:
    several, told = slots(5), list[str]()
    health = SlotFaults(several, False, told.append)
    several[0].faults.append("it was lost")
    health.look()
    for slot, resting in zip(several[1:4], (True, True, False), strict=True):
        slot.faults += ["it was lost", "it is gone"]
        slot.resting = resting
    clock.now += 2 * LOOK
    health.look()
    several[2].faults.append("it was closed")  # while it rests
    clock.now += 2 * LOOK
    health.look()
    at_once = [
        f"slot {number} rests, and is tried again after pauses that grow: it failed 2 times, at last: it is "
        "gone"
        for number in (1, 2)
    ]
    assert told == ["slot 0: it was lost", *at_once]
    assert health.stats()["slots/resting"] == 2 and "slot/3/resting" not in health.stats()
    health.end()
    assert told[3:] == ["slot 2: it was closed (and 4 more)"]


def test_a_run_that_fails_tells_what_was_kept_back_before(clock: Any) -> None:
    several, told = slots(3), list[str]()
    health = SlotFaults(several, True, told.append)
    for slot in several:
        slot.faults.append("it was lost")
        clock.now += 2 * LOOK
        if slot is several[2]:
            slot.resting, slot.rests = True, 1
            with pytest.raises(EnvironmentFault):
                health.look()
        else:
            health.look()
    assert told == [
        "slot 0: it was lost",
        "slot 2 rests, and is tried again after pauses that grow: it failed 1 times, at last: it was lost",
        "slot 1: it was lost",
    ]
