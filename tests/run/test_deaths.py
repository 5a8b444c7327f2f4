"""Workers die at any moment, and what is trained on is what was lived: no row twice, none
torn, none of an undone life."""

import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.run.watching import EXPERIMENTS, check_versions, leftovers, log_of, wait_until

from tidemill import PPO, ActorCritic
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.events import read_events
from tidemill.run.run_control import RunControl
from tidemill.store.checkpoint import checkpoints, read_newest
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")
KILLED = ["actor-0", "server-0", "trainer-0", "actor-1", "trainer-0"]


def kill_in_turn(path: Path, over: threading.Event, draw: random.Random) -> None:
    """Kill one worker after another, some time after the last one lives again, a trainer
    once there is a checkpoint; return when they all do."""
    for number, name in enumerate([*KILLED, ""]):
        while sum(event.what == "lives" for event in read_events(path)) < number:
            if over.wait(0.05):
                return
        while name == "trainer-0" and not checkpoints(path / "checkpoints" / "policy"):
            if over.wait(0.05):
                return
        if not name or over.wait(draw.uniform(0.05, 0.5)):
            return
        log = path / "logs" / f"{name}.log"
        while not (found := [p for p in psutil.Process().children() if log_of(p) == log]):
            if over.wait(0.05):
                return
        found[0].kill()


def test_every_row_that_is_trained_was_lived_once(tmp_path: Path) -> None:
    path, over, since = tmp_path / "run", threading.Event(), list[float]()
    made = experiments.numbered(str(tmp_path / "sample"))
    killer = threading.Thread(target=kill_in_turn, args=(path, over, random.Random(5)))

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killer.is_alive():
            since.append(metrics["update"])
            if since[-1] - since[0] >= 20:  # what lay in slots as the last one died is trained on
                control.stop()

    killer.start()
    try:
        result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
    finally:
        over.set()
        killer.join()
    assert result.summary["status"] == "completed"
    assert [event.worker for event in read_events(path) if event.what == "died"] == KILLED
    # What an undone update has written down is written over by the one in its place.
    count = int(read_newest(path / "checkpoints" / "policy").arrays["algorithm"]["count"])
    seen: set[tuple[int, ...]] = set()
    lives = set[int]()
    for number in range(count):
        with np.load(tmp_path / f"sample-{number}.npz") as file:
            rows = dict(file)
        where = rows["obs"].astype(np.int64)
        final = rows["done"] | rows["truncated"]
        assert (rows["version"][~final] >= 0).all()
        lives |= set((rows["version"][~final] >> 32).tolist())
        acted, following = where[:-1][~final[:-1]], where[1:][~final[:-1]]
        assert (following - acted == [0, 0, 1]).all()
        paid = experiments.Numbered.paid(*following.T)
        assert (rows["reward"][:-1][~final[:-1]] == paid).all()
        here = set(map(tuple, acted.tolist()))
        assert len(here) == len(acted) and seen.isdisjoint(here)
        seen |= here
    assert len(lives) > 1
    updates = [record["update"] for record in read_metrics(path)]
    assert updates == sorted(set(updates)) and updates[-1] == result.summary["updates"]
    assert leftovers(path) == []
    check_versions(path)


@pytest.mark.parametrize(("saved", "trainers"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_a_trainer_that_dies_as_it_ends_ends_in_its_next_life(
    tmp_path: Path, saved: bool, trainers: int
) -> None:
    """At the limit, and not an update beyond it; equal trainers lose nothing."""
    path = tmp_path / "run"
    made = experiments.dies_at_last(str(tmp_path / "died"), saved, trainers)
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True)
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 50)
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == ["actor-0", "trainer-0"]
    (back,) = [event for event in events if event.what == "went back"]
    assert (back.steps == 0) == (saved or trainers > 1)
    updates = [record["update"] for record in read_metrics(path) if "update" in record]
    assert updates == sorted(set(updates)) and updates[-1] == 50
    assert checkpoints(path / "checkpoints" / "policy")[-1].name == "update-50"
    assert read_newest(path / "checkpoints" / "policy").arrays["policy"]["w"][0] == 50
    assert leftovers(path) == []


def test_a_change_of_settings_is_told_to_the_next_life_of_who_was_dead(tmp_path: Path) -> None:
    path, killed, until = tmp_path / "run", list[psutil.Process](), time.monotonic() + 120
    made = experiments.cartpole()
    trainer = made.workers["trainer"].replace(algorithm=PPO(learning_rate=1e-3), checkpoint_seconds=60.0)
    made = made.replace(
        policies={"policy": ActorCritic(hidden=(4,))},
        workers={**made.workers, "trainer": trainer},
    )  # without a limit: it ends once it is seen

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["learning_rate"] == 1e-5 or time.monotonic() > until:
            control.stop()
        if not killed:
            killed.extend(p for p in psutil.Process().children() if log_of(p).name == "trainer-0.log")
            killed[0].kill()
            wait_until(lambda: killed[0].status() == psutil.STATUS_ZOMBIE, 60, "it is dead")
            control.change(learning_rate=1e-5)

    train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update, layout="given")
    assert [event.worker for event in read_events(path) if event.what == "died"] == ["trainer-0"]
    assert read_metrics(path)[-1]["learning_rate"] == 1e-5
    assert read_newest(path / "checkpoints" / "policy").facts["settings"] == {"learning_rate": 1e-5}
