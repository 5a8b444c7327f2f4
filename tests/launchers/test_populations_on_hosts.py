"""Populations on two hosts, where the manager, a member's trainer or a host dies."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launchers.host_launchers import TwoHosts
from tests.launchers.test_hosts import agents_of
from tests.run.cut_experiments import training_population
from tests.run.test_cuts import differences
from tests.run.test_exact_versions import told
from tests.run.watching import worker_name
from tests.workers.test_population import SOURCE, check_run, lineage, two

from tidemill import Experiment, train
from tidemill.run import ending
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.store.checkpoint import read_newest

UPDATES = 40  # of which the runner hears a little later, and kills then


class OneMemberOnB(TwoHosts):
    """A member's workers stand on the other host, and the actor of the other member."""

    on_b = ("actor-0-0", "trainer-0-0", "actor-1-0")

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(self.on_b, "b"))


def kill(name: str) -> None:
    """Kill a worker of this process's run, on any host, or host b's agent."""
    below = psutil.Process().children(recursive=True)
    found = {"b": agents_of(below)["b"]}
    for process in below:
        with suppress(psutil.Error):  # it has ended meanwhile
            found[worker_name(process)] = process
    found[name].kill()


def of(run: Path, what: str) -> list[str]:
    """Return of which workers an event of this kind is written down."""
    return [event.worker for event in read_events(run) if event.what == what]


def decisions(run: Path) -> dict[Any, dict[str, float]]:
    """Return what a population told, by env steps and names, but for the last decision,
    which nobody waits for."""
    last = min(read_newest(run / "checkpoints" / policy).facts["steps"] for policy in exact().trained())
    return {(each["step"], *each): each for each in told(run) if each["step"] < last}


def exact() -> Experiment:
    """Two members in lockstep, of which one learns nothing at first."""
    return training_population(UPDATES)


def test_an_exact_population_decides_the_same_where_its_manager_and_a_member_s_host_die(
    tmp_path: Path,
) -> None:
    alone, run, dying = tmp_path / "alone", tmp_path / "run", ["population-0", "b"]
    train(exact(), launch="inline", run_dir=alone, quiet=True)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        control.save()
        deaths = 2 - len(dying)
        if dying and metrics["update"] > 4 * deaths + 2 and len(of(run, "went back")) == deaths:
            kill(dying.pop(0))

    train(exact(), launch=OneMemberOnB, layout="given", run_dir=run, quiet=True, on_update=on_update)
    assert sorted(of(run, "died")) == ["actor-0-0", "actor-1-0", "population-0", "trainer-0-0"]
    assert RunFolder.open(run).read("placement.json")["b"]["workers"] == []
    for policy in exact().trained():
        assert differences(alone, run, policy=policy) == []
    first, second = decisions(alone), decisions(run)
    assert first == second and {name for _, *names in first for name in names} >= {
        "population/0/from",
        "population/1/from",
    }


def test_members_go_on_from_others_once_a_trainer_and_the_manager_live_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do is a matter of time, and what they have is not: see `check_run`."""
    monkeypatch.setattr(ending, "CLOSE_DEADLINE", 120.0)  # nobody is ended by force, and leaves a tag
    made = two("update > 1000000", sample_steps=128, steps=4000)  # the runner has time
    run, dying = tmp_path / "run", ["trainer-0-0", "population-0"]
    next_look, before = 0.0, 0  # seconds, and times that a member had gone on from the other

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        nonlocal next_look, before
        if time.monotonic() < next_look:
            return
        next_look = time.monotonic() + 0.1
        if len(of(run, "lives")) < 2 - len(dying) or (times := len(lineage(run))) <= before:
            return
        before = times
        if dying:
            kill(dying.pop(0))
        else:
            control.stop()

    train(
        made,
        launch=OneMemberOnB,
        layout="given",
        run_dir=run,
        source=SOURCE,
        quiet=True,
        on_update=on_update,
    )
    assert of(run, "died") == of(run, "lives") == ["trainer-0-0", "population-0"]
    assert check_run(run) > 0
