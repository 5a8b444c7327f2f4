"""What a run reports besides metrics."""

import pytest

from tidemill import Experiment
from tidemill.run import report as report_module
from tidemill.run.report import RunReport


def test_what_was_told_long_before_a_worker_waited_or_by_itself_is_no_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, report = [0.0], RunReport(Experiment(name="test", policies={}, workers={}))
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
    report = RunReport(Experiment(name="test", policies={}, workers={}))
    report.notify("a notice")
    report.notify_of_event("of an event")
    assert report.notices == ["a notice", "of an event"] and report.of_events == {"of an event"}
