"""Workers of a run with a replay memory die at any moment: an actor's death undoes
nothing, and what is in the memory was lived once."""

import re
import sys
from collections import Counter
from fractions import Fraction
from math import floor
from pathlib import Path

import psutil
import pytest
from tests.run.journaled import journaled_steps
from tests.run.test_deaths import with_deaths
from tests.run.watching import EXPERIMENTS, leftovers, log_of

from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.run_control import RunControl
from tidemill.store.checkpoint import read_newest
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")


def test_a_policy_worker_without_a_life_left_stays_dead_where_the_trainer_lives_again(
    tmp_path: Path,
) -> None:
    """With the trainer begin those again who play its policy, but for that one: another
    one answers for it."""
    path, struck, since = tmp_path / "run", list[str](), list[float]()
    made = experiments.numbered_memory(False)
    servers = made.workers["server"].replace(count=2, restarts=1)
    expected = Counter(["server-0", "server-1", "actor-0", "actor-1", "trainer-0"])

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        events = read_events(path)
        lives = Counter(event.worker for event in events if event.what == "lives")
        answered = any("From now on server-1 answers for it" in event.cause for event in events)
        followed = [True, lives["server-0"] == 1, answered, lives >= expected]
        if not followed[len(struck)]:
            return
        if len(struck) == 3:
            since.append(metrics["update"])
            if len(since) > 20:
                control.stop()
            return
        struck.append(["server-0", "server-0", "trainer-0"][len(struck)])
        log = path / "logs" / f"{struck[-1]}.log"
        for process in [p for p in psutil.Process().children() if log_of(p) == log]:
            process.kill()

    result = train(
        made.replace(workers={**made.workers, "server": servers}),
        run_dir=path,
        source=EXPERIMENTS,
        quiet=True,
        layout="given",
        on_update=on_update,
    )
    assert result.summary["status"] == "completed"
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == struck
    assert Counter(event.worker for event in events if event.what == "lives") == expected
    steps, _ = journaled_steps(path)
    assert len(steps) == len(set(steps))
    assert leftovers(path) == []


@pytest.mark.parametrize("slots", [False, True])
def test_an_actor_that_dies_loses_its_steps_in_flight_and_undoes_nothing(tmp_path: Path, slots: bool) -> None:
    """Where the trainer dies all who gather for it go back with it."""
    path = tmp_path / "run"
    turns = [["actor-0", "server-0"], ["actor-1", "actor-1"]]
    if slots:
        turns = [["actor-0"], ["actor-1", "trainer-0"]]
    result = with_deaths(experiments.numbered_memory(slots), path, turns, seed=3)
    assert result.summary["status"] == "completed"
    events = read_events(path)
    died = Counter(event.worker for event in events if event.what == "died")
    killed = Counter(name for names in turns for name in names)
    # who goes back with the trainer is dead by then, whoever was killed first
    assert died == killed or (slots and killed - died == Counter(["actor-1"]))
    assert len([event for event in events if event.what == "went back"]) == slots
    # what began has come, or is void, and what came is trained
    facts = read_newest(path / "checkpoints" / "policy").facts
    n = facts["limiter"]
    assert n["started"] == n["committed"] + n["voided"] and n["committed"] == facts["steps"]
    owed = floor((n["committed"] - n["waived"]) * Fraction(1, 2))
    assert n["tasks"] == facts["updates"] == owed == result.summary["updates"]
    void = [int(word) for event in events for word in re.findall(r"(\d+) env steps that actor", event.cause)]
    assert max(void, default=0) <= 3  # of an actor that had three lanes
    flying = [record["limiter/in_flight"] for record in read_metrics(path) if "update" in record]
    assert max(flying) <= 6  # those of the dead are void by the time that others come
    # it was lived, once; of each lane of the dead an episode is cut, if one was open
    steps, cut = journaled_steps(path)
    assert len(steps) == len(set(steps)) == n["committed"]
    if not slots:
        # and what was granted as the run ended, and could not be used, or came too late
        assert sum(void) <= n["voided"] <= sum(void) + 2 * 3
        # who was killed may not have taken a step before, and both that live have
        assert len({copy for copy, _, _ in steps}) in range(3 * 2, 3 * 5 + 1, 3) and len(cut) <= 3 * 3
    assert leftovers(path) == []
