"""Signals of a run that nobody acts on yet."""

import signal

import pytest
from tests.run.watching import wait_until

from tidemill.run import interrupts
from tidemill.run.interrupts import Interrupts


@pytest.mark.parametrize("heard", [False, True])
def test_a_signal_that_nobody_acts_on_is_told_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    monkeypatch.setattr(interrupts, "UNHEARD", 0.0)
    told: list[str] = []
    with Interrupts() as signals:
        signals.armed, signals.heard, signals.tell = True, heard, told.append
        signal.raise_signal(signal.SIGTERM)
        timer, _ = signals._timers
        wait_until(lambda: not timer.is_alive(), 60, "its time is over")
    assert [text.partition(":")[0] for text in told] == ["SIGTERM has come"] * (not heard)
