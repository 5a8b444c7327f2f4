"""Time in which a process was stopped is no time."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.core import clock
from tidemill.core.clock import LATE, PLACES, TICK, Clock, awake, noticing_stops, stopped

STOPPED = """
import sys
from time import monotonic
from tidemill.core import clock
clock.TICK, clock.LATE = 0.05, 0.5
with clock.noticing_stops():
    before = monotonic(), clock.awake()
    print("ready", flush=True)
    sys.stdin.readline()
    print(monotonic() - before[0], clock.awake() - before[1], flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
def test_a_stop_is_left_out() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(process.pid, signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    passed, alive = map(float, process.stdout.readline().split())
    assert process.wait() == 0
    assert passed > 3.0 and alive < passed - 2.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time as it is set, from when stops are noticed on."""
    now = SimpleNamespace(time=100.0, used=7.0)
    stops = clock._Stops()
    stops.noticing, stops.seen, stops.used = 1, now.time, now.used
    monkeypatch.setattr(clock, "_stops", stops)
    monkeypatch.setattr(clock, "monotonic", lambda: now.time)
    monkeypatch.setattr(clock, "process_time", lambda: now.used)
    return now


def test_who_looks_first_after_a_stop_finds_it_left_out_and_time_goes_on(now: Any) -> None:
    assert awake() == 100.0
    now.time += TICK + LATE - 0.1  # a busy machine
    assert awake() == pytest.approx(100.0 + TICK + LATE - 0.1)
    before = awake()
    now.time += 3600.0
    assert before <= awake() <= before + TICK + 1e-6
    assert stopped() == pytest.approx(3600.0 - TICK)
    now.time += 1.0
    assert awake() == pytest.approx(before + TICK + 1.0)


def test_a_stop_is_blamed_on_nobody(now: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: now.time)
    own = Clock()
    own.enter("environment")
    now.time += 0.25
    assert awake() == 100.25
    now.time += 3600.0
    awake()
    own.enter("train")
    now.time += 0.75
    shares = own.time_shares()
    assert shares["environment"] == pytest.approx((0.25 + TICK) / (1.0 + TICK))
    assert shares["environment"] + shares["train"] == pytest.approx(1.0)


def test_a_call_that_lets_no_thread_look_but_computes_is_no_stop(now: Any) -> None:
    now.time, now.used = now.time + 60.0, now.used + 40.0
    assert (awake(), stopped()) == (160.0, 0.0)


def test_nobody_looks_after_the_last_has_left() -> None:
    def looking() -> int:
        return [thread.name for thread in threading.enumerate()].count("noticing stops")

    before = looking(), clock._stops.noticing
    with noticing_stops(), noticing_stops():
        assert looking() == before[0] + 2
    assert (looking(), clock._stops.noticing) == before
    earlier = time.monotonic() - stopped()
    assert earlier <= awake() <= time.monotonic() - stopped()


def test_shares_add_up() -> None:
    own = Clock()
    assert own.enter("train") == "python"
    time_shares = own.time_shares()
    assert set(time_shares) == set(PLACES) and sum(time_shares.values()) == pytest.approx(1.0)
