"""What a run reports besides metrics."""

from unittest.mock import Mock

import pytest

from tidemill import Experiment, PolicyWorkers
from tidemill.run import report as report_module
from tidemill.run.member import Member
from tidemill.run.report import RunReport

MEMBERS = {
    name: Member(PolicyWorkers(policies=("policy",)), Mock(), life=2)
    for name in ("actor-0", "actor-1", "trainer-0")
}


def test_what_is_told_of_a_worker_is_an_event_of_its_life() -> None:
    report = RunReport(Experiment(name="test", policies={}, workers={}), MEMBERS)
    report.notify_for("actor-1", "a lane was made anew", 4)
    report.notify_of("trainer-0", "trainer-0 is silent")
    assert [(e.what, e.worker, e.life, e.cause, e.steps) for e in report.events] == [
        ("told", "actor-1", 3, "actor-1: a lane was made anew", 4),
        ("told", "trainer-0", 3, "trainer-0 is silent", 0),
    ]
    assert report.notices == ["actor-1: a lane was made anew", "trainer-0 is silent"]
    assert report.of_events == {*report.notices}  # it is no second event


def test_what_was_told_long_before_a_worker_waited_or_by_itself_is_no_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, report = [0.0], RunReport(Experiment(name="test", policies={}, workers={}), MEMBERS)
    monkeypatch.setattr(report_module, "awake", lambda: now[0])
    for name, ago in (("actor-0", 5000.0), ("actor-1", 500.0), ("trainer-0", 400.0), ("actor-0", 300.0)):
        now[0] = 10_000.0 - ago
        report.notify_for(name, f"told {ago:.0f} s ago")
    now[0] = 10_000.0
    first = ".\nMeanwhile, first: "
    for waited, told in (
        (600.0, f"{first}actor-1: told 500 s ago\nand last: actor-0: told 300 s ago"),
        (350.0, f"{first}actor-0: told 300 s ago"),
        (100.0, ""),
        (0.0, ""),
    ):
        assert report.meanwhile("trainer-0", waited) == told


def test_what_stands_among_the_events_is_known_to() -> None:
    report = RunReport(Experiment(name="test", policies={}, workers={}), MEMBERS)
    report.notify("a notice")
    report.notify_of_event("of an event")
    assert report.notices == ["a notice", "of an event"] and report.of_events == {"of an event"}
