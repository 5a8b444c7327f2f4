"""Workers of a run with a replay memory die at any moment: an actor's death undoes
nothing, the trainer's leaves all others alive, and what is in the memory was lived
once."""

import re
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from math import floor
from pathlib import Path

import psutil
import pytest
from tests.launchers.host_launchers import TwoHosts
from tests.run.journaled import journaled_steps
from tests.run.test_deaths import with_deaths
from tests.run.watching import EXPERIMENTS, leftovers, log_of

import tidemill
from tidemill.api.launcher import Launcher
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.store.checkpoint import read_newest
from tidemill.training.result import Result
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")


def limited(path: Path, result: Result) -> dict[str, int]:
    """Return the limiter's counts at a run's end: what began has come, or is void, but
    for what was in flight there, as the last checkpoint may have been written with the
    last update, and what came is trained."""
    facts = read_newest(path / "checkpoints" / "policy").facts
    n: dict[str, int] = facts["limiter"]
    assert n["voided"] <= result.summary["voided"] == n["started"] - n["committed"]
    assert n["committed"] == facts["steps"] == result.summary["env_steps"]
    owed = floor((n["committed"] - n["waived"]) * Fraction(1, 2))
    assert n["tasks"] == facts["updates"] == owed == result.summary["updates"]
    return n


def test_a_policy_worker_without_a_life_left_stays_dead_where_the_trainer_lives_again(
    tmp_path: Path,
) -> None:
    """Another one answers for it, and the trainer begins again alone."""
    path, struck, since = tmp_path / "run", list[str](), list[float]()
    made = experiments.numbered_memory(False)
    servers = made.workers["server"].replace(count=2, restarts=1)
    expected = Counter(["server-0", "trainer-0"])

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
    steps, _ = journaled_steps(path, midway=True)
    assert len(steps) == len(set(steps))
    assert leftovers(path) == []


@pytest.mark.parametrize(("slots", "launch"), [(True, "processes"), (False, TwoHosts)])
def test_an_actor_that_dies_loses_its_steps_in_flight_and_undoes_nothing(
    tmp_path: Path, slots: bool, launch: str | type[Launcher]
) -> None:
    """Also one that dies together with the trainer, which goes back; and on each of two
    hosts."""
    path = tmp_path / "run"
    turns = [["actor-0", "server-0"], ["actor-1", "actor-1"]]
    if slots:
        turns = [["actor-0"], ["actor-1", "trainer-0"]]
    result = with_deaths(experiments.numbered_memory(slots), path, turns, 3, launch)
    assert result.summary["status"] == "completed"
    if launch is TwoHosts:
        placed = RunFolder.open(path).read("placement.json")
        assert "actor-0" in placed["b"]["workers"] and "actor-1" in placed["runner"]["workers"]
    events = read_events(path)
    died = Counter(event.worker for event in events if event.what == "died")
    killed = Counter(name for names in turns for name in names)
    assert died == killed
    assert len([event for event in events if event.what == "went back"]) == slots
    n = limited(path, result)
    void = [int(word) for event in events for word in re.findall(r"(\d+) env steps that actor-", event.cause)]
    assert max(void, default=0) <= 3  # of an actor that had three lanes
    flying = [record["limiter/in_flight"] for record in read_metrics(path) if "update" in record]
    assert max(flying) <= 6  # those of the dead are void by the time that others come
    # it was lived, once; of each lane of the dead an episode is cut, if one was open
    steps, cut = journaled_steps(path, midway=slots)
    assert len(steps) == len(set(steps)) == n["committed"]
    if not slots:
        # and what was granted as the run ended, and could not be used, or came too late
        assert sum(void) <= n["voided"] <= sum(void) + 2 * 3
        # who was killed may not have taken a step before, and both that live have
        assert len({copy for copy, _, _ in steps}) in range(3 * 2, 3 * 5 + 1, 3) and len(cut) <= 3 * 3
    assert leftovers(path) == []


@pytest.mark.parametrize("slots", [False, True])
def test_a_trainer_that_dies_has_all_others_wait_for_it(tmp_path: Path, slots: bool) -> None:
    """As its memory warms up, twice in a row, as it trains, and as it saves, at the
    latest at the limit: actors keep their processes and environments, and their episodes
    go on; the run ends at its limit of steps exactly. That each death comes
    depends on no time: there is a checkpoint after the first update, and one at the
    end."""
    path, flags, pids = tmp_path / "run", tmp_path / "flags", defaultdict[str, set[int]](set)
    flags.mkdir()
    deaths = ("stored 3", "stored 1", "trained 40", "trained 7", "saved 1")
    made = experiments.numbered_memory(slots)
    trainer = made.workers["trainer"].replace(
        algorithm=experiments.DiesAgain(deaths=deaths, flags=str(flags)),
        buffer=tidemill.Replay(capacity=60_000, warm_up=50, steps=3),
        checkpoint_seconds=0.1,
    )
    limits = made.limits.replace(updates=None, steps=600)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        for process in psutil.Process().children():
            pids[log_of(process).stem].add(process.pid)

    result = train(
        made.replace(workers={**made.workers, "trainer": trainer}, limits=limits),
        run_dir=path,
        source=EXPERIMENTS,
        quiet=True,
        layout="given",
        on_update=on_update,
    )
    assert result.summary["status"] == "completed" and result.summary["env_steps"] == 600
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == ["trainer-0"] * len(deaths)
    assert {event.worker for event in events if event.what in ("lives", "lost")} == {"trainer-0"}
    assert [len(pids[name]) for name in ("actor-0", "actor-1", "server-0")] == [1, 1, 1]
    n = limited(path, result)
    steps, cut = journaled_steps(path, midway=True)
    assert len(steps) == len(set(steps)) == n["committed"]
    # each environment was made once, and episodes go on where the trainer has gone back
    assert len({copy for copy, _, _ in steps}) == 2 * 3 and 0 < len(cut) <= len(deaths) * 2 * 3
    assert leftovers(path) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sac", "slots"), [(False, True), (True, False)])
def test_whoever_dies_with_the_trainer_what_is_learnt_from_was_lived_once(
    tmp_path: Path, sac: bool, slots: bool
) -> None:
    path = tmp_path / "run"
    turns = [["trainer-0", "actor-0"], ["server-0", "trainer-0"], ["actor-1", "trainer-0", "trainer-0"]]
    result = with_deaths(experiments.numbered_learner(sac, slots), path, turns, seed=5)
    assert result.summary["status"] == "completed"
    events = read_events(path)
    died = Counter(event.worker for event in events if event.what == "died")
    assert died == Counter(name for names in turns for name in names)
    n = limited(path, result)
    steps, _ = journaled_steps(path, midway=True)
    assert len(steps) == len(set(steps)) == n["committed"]
    assert leftovers(path) == []
