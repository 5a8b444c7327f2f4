"""Environments whose steps take long, and who has turns in their thread: an actor's poll
has many steps, and is left once anybody there is told something."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.run.experiments import equal
from tests.run.watching import Run, ended_well, wait_until
from typer.testing import CliRunner

from tidemill.api.control_messages import State
from tidemill.cli.main import app
from tidemill.core.clock import awake
from tidemill.run import ending
from tidemill.run.events import read_events
from tidemill.run.interrupts import GRACE
from tidemill.run.member import Member
from tidemill.run.run_state import RunState

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
EARLY = "from tidemill.run import interrupts\ninterrupts.HURRY = 1.0"
"""A signal's time runs out sooner: until then, inline, a poll goes on."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(function: str, launch: str, code: str = "") -> Run:
        runs.append(Run(tmp_path, function, "--layout", "given", launch=launch, code=code))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


@pytest.mark.parametrize("by", ["signal", "stop"])
def test_a_trainer_finishes_after_one_of_its_actor_s_steps(start: Callable[..., Run], by: str) -> None:
    """And not after those of its whole ring, which take longer than it has."""
    run = start("snoozes_by_turns", "processes")
    run.wait_for_file(run.folder / "snoozing", "the environment takes its time")
    if by == "signal":
        run.main.send_signal(signal.SIGTERM)
    else:
        assert CliRunner().invoke(app, ["stop", str(run.path)]).exit_code == 0
    status, text = run.ended()
    assert status == (143 if by == "signal" else 0), text
    ended_well(
        run.path,
        "interrupted" if by == "signal" else "completed",
        "SIGTERM" if by == "signal" else "tidemill stop",
    )
    run.nothing_is_left()


def test_inline_a_signal_whose_time_runs_out_ends_a_poll(start: Callable[..., Run]) -> None:
    run = start("snoozes_long", "inline", EARLY)
    run.wait_for_file(run.folder / "snoozing", "the environment takes its time")
    run.main.send_signal(signal.SIGTERM)
    status, text = run.ended()
    assert status == 143 and "broken off" not in text, text
    ended_well(run.path, "interrupted", "SIGTERM")
    run.nothing_is_left()


def test_an_equal_trainer_answers_after_one_of_its_actor_s_steps(start: Callable[..., Run]) -> None:
    """So that it counts as living when the other one has died, and both come to an end,
    which takes several turns."""
    run = start("equals_snooze", "processes")
    run.wait_for_updates()
    run.wait_for_worker("actor-1+trainer-1").kill()

    def lives() -> bool:
        return sum(event.what == "lives" for event in read_events(run.path)) == 2

    wait_until(lives, 60, "those who died live again")
    assert CliRunner().invoke(app, ["stop", str(run.path)]).exit_code == 0
    status, text = run.ended()
    assert status == 0, text
    ended_well(run.path, "completed", "tidemill stop")
    events = read_events(run.path)
    assert {event.worker for event in events if event.what == "died"} == {"actor-1", "trainer-1"}
    assert not any(event.what == "went back" for event in events)
    run.nothing_is_left()


@pytest.mark.parametrize(
    ("statistics", "seconds"), [({"tick_longest": 16.0}, 16), ({"tick_p99": 7.0}, 7), ({}, 0)]
)
def test_who_has_turns_with_slow_lanes_has_time_for_one_more_tick(
    statistics: dict[str, float], seconds: int
) -> None:
    """Also where fewer than 100 are known; and what helps is said."""
    made = equal()
    state = RunState(made)
    for name, config in made.members():
        state.members[name] = Member(config, Mock(), State.RUNNING)
    state.members["actor-1"].statistics = statistics
    launcher = SimpleNamespace(takes_turns=False, condition=lambda name: "")
    stalls = Mock(trains=lambda name: False)
    run = ending.Ending(made, launcher, state, Mock(), stalls, Mock())  # type: ignore[arg-type]
    before = awake()
    run._extend()
    assert run.deadline is not None
    assert before <= run.deadline - ending.EXIT_DEADLINE - seconds <= awake()
    assert state.interrupts.grace == GRACE + seconds
    told = run._slow_turns({"trainer-1"})
    assert (f"A tick of actor-1 takes {seconds} s" in told and "take fewer lanes" in told) is (seconds > 0)
    assert run._slow_turns({"trainer-0"}) == ""  # in another process
    forced = run._why_forced("actor-1", state.members["actor-1"])
    assert ("was in a tick" in forced) is (seconds > 0) and ("hangs" in forced) is (seconds == 0)
