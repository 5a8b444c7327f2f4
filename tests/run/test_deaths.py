"""Workers die at any moment, and what is trained on is what was lived: no row twice, none
torn, none of an undone life."""

import errno
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.run import watched_weights
from tests.run.environments import Numbered
from tests.run.watched_weights import Watched
from tests.run.watching import EXPERIMENTS, check_versions, leftovers, log_of, wait_until

from tidemill import PPO, ActorCritic, Experiment, Gymnasium
from tidemill.api.control_messages import ENDED
from tidemill.api.launcher import Launcher
from tidemill.core.errors import RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import equal_lives, restart_budget, run_lifecycle
from tidemill.run.equal_lives import EqualLives
from tidemill.run.events import read_events
from tidemill.run.run_control import RunControl
from tidemill.run.supervisor import Burial, Supervisor
from tidemill.store.checkpoint import checkpoints, read_newest
from tidemill.training.result import Result
from tidemill.training.train import train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux"),
]
experiments = load_file(EXPERIMENTS, "test")
KILLED = ["actor-0", "server-0", "trainer-0", "actor-1", "trainer-0"]


@pytest.fixture(autouse=True)
def _whoever_lives_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is."""
    monkeypatch.setattr(equal_lives, "ANSWER", 100.0)


def kill_in_turn(
    path: Path, over: threading.Event, draw: random.Random, turns: Sequence[Sequence[str]]
) -> None:
    """Kill the processes of some workers after others, by their logs, some time after the
    last ones live again; return when they all do. A process that is named twice is killed
    again as soon as it lives, a trainer not before there is a checkpoint. Those of other
    hosts are children of these hosts' agents."""
    descendants = partial(psutil.Process().children, recursive=True)
    lives, metrics = Counter[str](), path / "metrics.jsonl"
    for names in [*turns, ()]:
        while not (metrics.exists() and metrics.stat().st_size) or not (
            Counter(event.worker for event in read_events(path) if event.what == "lives") >= lives
        ):
            if over.wait(0.05):
                return
        while "trainer-0" in names and not checkpoints(path / "checkpoints" / "policy"):
            if over.wait(0.05):
                return
        if not names or over.wait(draw.uniform(0.05, 0.5)):
            return
        killed = set[psutil.Process]()
        for name in names:
            log = path / "logs" / f"{name}.log"
            while not (found := {p for p in descendants() if log_of(p) == log} - killed):
                if over.wait(0.005):
                    return
            for process in found:
                process.kill()
            killed |= found
        lives.update(worker for name in dict.fromkeys(names) for worker in name.split("+"))


def acted_rows(file: Path, versions: set[int]) -> list[tuple[int, ...]]:
    """Return where the rows of a sample say that somebody acted, which fit each other."""
    with np.load(file) as arrays:
        rows = dict(arrays)
    where = rows["obs"].astype(np.int64)
    final = rows["done"] | rows["truncated"]
    assert (rows["version"][~final] >= 0).all()
    # each was answered for what it saw: see `experiments.ByObservation`
    assert (rows["action"] == (1000 * where @ (1, 2, 3)) % 7 % 2)[~final].all()
    versions |= set((rows["version"][~final] >> 32).tolist())
    acted, following = where[:-1][~final[:-1]], where[1:][~final[:-1]]
    assert (following - acted == [0, 0, 1]).all()
    assert (rows["reward"][:-1][~final[:-1]] == Numbered.paid(*following.T)).all()
    return list(map(tuple, acted.tolist()))


def test_every_row_that_is_trained_was_lived_once(tmp_path: Path) -> None:
    path, over, since = tmp_path / "run", threading.Event(), list[float]()
    made = experiments.numbered(str(tmp_path / "sample"))
    turns = [[name] for name in KILLED]
    killer = threading.Thread(target=kill_in_turn, args=(path, over, random.Random(5), turns))

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
    samples = int(read_newest(path / "checkpoints" / "policy").arrays["algorithm"]["count"])
    seen: set[tuple[int, ...]] = set()
    lives = set[int]()
    for number in range(samples):
        acted = acted_rows(tmp_path / f"sample-{number}.npz", lives)
        here = set(acted)
        assert len(here) == len(acted) and seen.isdisjoint(here)
        seen |= here
    assert len(lives) > 1
    updates = [record["update"] for record in read_metrics(path)]
    assert updates == sorted(set(updates)) and updates[-1] == result.summary["updates"]
    assert leftovers(path) == []
    check_versions(path)


def test_what_a_buffer_worker_had_taken_or_not_as_it_died_is_trained_on_or_counted(tmp_path: Path) -> None:
    """Of each lane what was trained on lies side by side: nothing between is missing but
    what the run says is void."""
    path = tmp_path / "run"
    made = experiments.numbered_behind_buffers(str(tmp_path / "sample"))
    result = with_deaths(made, path, [["buffers-0"]] * 2, seed=5)
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == ["buffers-0"] * 2
    samples = int(read_newest(path / "checkpoints" / "policy").arrays["algorithm"]["count"])
    rows = [row for n in range(samples) for row in acted_rows(tmp_path / f"sample-{n}.npz", set())]
    assert result.summary["status"] == "completed" and len(rows) == len(set(rows))
    trained = dict[int, list[int]]()  # of each lane how many steps it had taken before
    for copy, episode, at in sorted(rows):
        before = sum(3 + (copy + earlier) % 29 for earlier in range(episode))
        trained.setdefault(copy, []).append(before + at)
    gaps = [steps for steps in trained.values() if steps != list(range(len(steps)))]
    void = sum(event.samples for event in events if event.what == "lost")
    assert len(gaps) <= 4 * void, [steps[:3] for steps in gaps]


def test_another_policy_worker_answers_for_one_that_has_no_life_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead was asked is asked of it, also by next lives of who asks, and of its
    own next lives, until it has none left, either: no row is lost, comes twice, or has
    the answer to another."""
    monkeypatch.setattr(restart_budget, "YOUNG", 0.0)  # each counts its own deaths alone
    path, done, over = tmp_path / "run", Counter[str](), threading.Event()
    made = experiments.numbered(str(tmp_path / "sample"))
    servers = made.workers["server"].replace(count=2, restarts=1)
    answered = "From now on server-1 answers for it: the run goes on without server-0"
    struck = [
        ("server-0", "lives", ""),
        ("server-0", "told", answered),
        ("server-1", "lives", ""),
        ("actor-0", "lives", ""),
        ("server-1", "ended", ""),
    ]

    def strike() -> None:
        try:
            kill_each()
        finally:
            over.set()

    def kill_each() -> None:
        for name, what, cause in struck:
            before = Counter(done)

            def both_go_on(before: Counter[str] = before) -> bool:
                # after five samples, 16 ticks of 4 steps each, some is trained
                return all(400 < done[actor] != before[actor] for actor in ("actor-0", "actor-1"))

            wait_until(lambda: over.is_set() or both_go_on(), 60, f"steps, before {name} dies")
            log = path / "logs" / f"{name}.log"
            for process in [p for p in psutil.Process().children() if log_of(p) == log]:
                process.suspend()  # so that something waits for its answer
                time.sleep(0.3)
                process.kill()

            def followed(name: str = name, what: str = what, cause: str = cause) -> bool:
                events = [e for e in read_events(path) if e.what == what and cause in e.cause]
                return any(e.worker in (name, "") for e in events)

            wait_until(lambda: over.is_set() or followed(), 60, f"{name}: {what}")

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        for name, member in control._controller.state.members.items():
            done[name] = member.progress
        if over.is_set():  # somebody waits in vain
            control.stop()

    killer = threading.Thread(target=strike)
    killer.start()
    try:
        with pytest.raises(RunError, match="death 2 of server-1 within 600 s; 1 are allowed"):
            train(
                made.replace(workers={**made.workers, "server": servers}),
                run_dir=path,
                source=EXPERIMENTS,
                quiet=True,
                layout="given",
                on_update=on_update,
            )
    finally:
        over.set()
        killer.join()
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == [name for name, *_ in struck]
    samples = int(read_newest(path / "checkpoints" / "policy").arrays["algorithm"]["count"])
    rows = list[tuple[int, ...]]()
    for number in range(samples):
        rows += acted_rows(tmp_path / f"sample-{number}.npz", set())
        with np.load(tmp_path / f"sample-{number}.npz") as sample:
            expected = np.floor(1000 * sample["obs"].astype(np.float64) @ [1, 2, 3]) / 1000
            real = ~(sample["done"] & (sample["version"] < 0))
            np.testing.assert_allclose(sample["value"][real], expected[real], rtol=1e-6)
    assert len(rows) == len(set(rows))
    lived = dict[int, list[tuple[int, ...]]]()
    for copy, *at in rows:
        lived.setdefault(copy, []).append(tuple(at))
    assert len(lived) == 12  # four lanes of two actors, one of which has lived twice
    for copy, steps in lived.items():
        every = ((episode, at) for episode in count() for at in range(3 + (copy + episode) % 29))
        assert sorted(steps) == list(islice(every, len(steps)))
    assert leftovers(path) == []


def with_deaths(
    made: Experiment,
    path: Path,
    turns: Sequence[Sequence[str]],
    seed: int,
    launch: str | type[Launcher] = "processes",
) -> Result:
    """Train until 20 updates after all who were killed live again, and have done
    something."""
    over, more = threading.Event(), [20]
    killer = threading.Thread(target=kill_in_turn, args=(path, over, random.Random(seed), turns))

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        more[0] -= not killer.is_alive()
        if more[0] < 0 and all(member.progress for member in control._controller.state.members.values()):
            control.stop()

    killer.start()
    try:
        return train(
            made,
            launch=launch,
            run_dir=path,
            source=EXPERIMENTS,
            quiet=True,
            on_update=on_update,
            layout="given",
        )
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize(
    ("lag", "killed", "stays"),
    [
        (None, [[1], [0, 0], [0]], 2),  # the second one in the midst of its making, too
        (0, [[1], [0, 1]], 2),
        (None, [[1, 2], [2]], 0),
    ],
)
def test_equal_trainers_that_live_stay_and_lose_nothing(
    tmp_path: Path, lag: int | None, killed: list[list[int]], stays: int
) -> None:
    """Nor do their actors: their episodes go on. What the dead had not trained on of
    older versions is dropped, and counted; nothing is trained on twice."""
    turns = [[f"actor-{rank}+trainer-{rank}" for rank in ranks] for ranks in killed]
    for seed in range(7, 11):
        path, into = tmp_path / f"run-{seed}", tmp_path / f"samples-{seed}"
        into.mkdir()
        result = with_deaths(experiments.numbered_equals(str(into), lag), path, turns, seed)
        events = read_events(path)
        died = Counter(event.worker for event in events if event.what == "died")
        # a kill may come between the parts that the dead has sent to each of the others:
        # one of these lacks an update then that the other has done, and begins again
        if all("lacks an update" not in event.cause for event in events):
            break
    assert result.summary["status"] == "completed"
    assert died == Counter(worker for names in turns for name in names for worker in name.split("+"))
    assert {event.worker for event in events if event.what in ("lost", "went back")} == set()
    assert [event for event in events if f"-{stays}" in event.worker] == []
    # an update that was undone is done again by others in the place of who has died
    of = dict[tuple[int, str], set[Path]]()
    for file in sorted(into.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        update, log, pid, _ = file.stem.split()
        same = of.setdefault((int(update), log), set())
        if any(other.stem.split()[2] != pid for other in same):
            same.clear()
        same.add(file)
    of_stays = [update for update, log in of if log.endswith(f"-{stays}")]
    assert sorted(of_stays) == list(range(result.summary["updates"]))
    seen, steady = set[tuple[int, ...]](), dict[int, list[tuple[int, ...]]]()
    for (_, log), files in of.items():
        for file in files:
            acted = acted_rows(file, set())
            here = set(acted)
            assert len(here) == len(acted) and seen.isdisjoint(here)
            seen |= here
            for copy, *at in acted if log.endswith(f"-{stays}") else ():
                steady.setdefault(copy, []).append(tuple(at))
    assert len(steady) == 4  # in all of its lanes not a step is missing
    for copy, lived in steady.items():
        every = ((episode, at) for episode in count() for at in range(3 + (copy + episode) % 29))
        assert sorted(lived) == list(islice(every, len(lived)))
    assert (
        read_newest(path / "checkpoints" / "policy").arrays["policy"]["w"] == result.summary["updates"]
    ).all()
    updates = [record["update"] for record in read_metrics(path) if "update" in record]
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
    back = [event.steps for event in events if event.what == "went back"]
    assert len(back) == (trainers == 1) and (0 in back) == (saved and trainers == 1)
    updates = [record["update"] for record in read_metrics(path) if "update" in record]
    assert updates == sorted(set(updates)) and updates[-1] == 50
    assert checkpoints(path / "checkpoints" / "policy")[-1].name == "update-50"
    assert read_newest(path / "checkpoints" / "policy").arrays["policy"]["w"][0] == 50
    assert leftovers(path) == []


def test_a_trainer_that_dies_while_the_runs_share_is_away_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(run_lifecycle, "go_back_to_cut", away)
    made, path = experiments.dies_at_last(str(tmp_path / "died"), True, 1), tmp_path / "run"
    with pytest.raises(RunError, match=r"run cannot be read or written: Transport .*, and a worker has died"):
        train(made, run_dir=path, source=EXPERIMENTS, quiet=True)
    assert leftovers(path) == []


@pytest.mark.parametrize("late", [False, True])
def test_an_equal_trainer_that_ends_alone_has_saved_for_one_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The run is over, before that lives again or, `late`, while its next life begins."""
    path, leave = tmp_path / "run", tmp_path / "died.leave"
    settle, revive = EqualLives.settle, Supervisor._revive

    def settle_late(lives: EqualLives, *names: Sequence[str]) -> dict[str, str] | None:
        if settled := settle(lives, *names):
            return settled
        if settled is None or lives._members["trainer-1"].state in ENDED:
            return settled
        leave.touch()
        return None  # as if its answer had not come yet

    def revive_and_tell(supervisor: Supervisor, burial: Burial) -> None:
        revive(supervisor, burial)
        leave.touch()

    if late:
        monkeypatch.setattr(Supervisor, "_revive", revive_and_tell)
    else:
        monkeypatch.setattr(EqualLives, "settle", settle_late)
    made = experiments.dies_at_last(str(tmp_path / "died"), True, 2, leaves=True)
    result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True)
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 50)
    events = read_events(path)
    assert [event.worker for event in events if event.what == "died"] == ["actor-0", "trainer-0"]
    assert late or not [event for event in events if event.what == "lives"]
    assert checkpoints(path / "checkpoints" / "policy")[-1].name == "update-50"
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


def test_weights_of_equal_trainers_are_the_same_to_the_last_bit_in_all_lives(tmp_path: Path) -> None:
    """And so are settings that change while one is dead."""
    path, record, killed = tmp_path / "run", tmp_path / "weights", list[psutil.Process]()
    record.mkdir()
    made = experiments.experiment(
        Gymnasium(id="CartPole-v1"),
        algorithm=Watched(record=str(record), minibatch_size=32),
        checkpoint_seconds=60.0,
        count=2,
    )
    actors = made.workers["actor"].replace(count=2)
    made = made.replace(
        policies={"policy": ActorCritic(hidden=(4,))}, workers={**made.workers, "actor": actors}
    )
    last = [0.0]

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not killed and metrics["update"] > 5:
            killed.extend(p for p in psutil.Process().children() if log_of(p).name == "trainer-0.log")
            killed[0].kill()
            wait_until(lambda: killed[0].status() == psutil.STATUS_ZOMBIE, 60, "it is dead")
            control.change(learning_rate=1e-5)
        if killed and not last[0] and metrics["learning_rate"] == 1e-5:
            last[0] = metrics["update"] + 20
        if last[0] and metrics["update"] > last[0]:
            control.stop()

    settings: dict[str, Any] = {"source": watched_weights.__file__, "layout": "given", "quiet": True}
    result = train(made, run_dir=path, on_update=on_update, **settings)
    assert result.summary["status"] == "completed"
    assert [event.worker for event in read_events(path) if event.what == "died"] == ["trainer-0"]
    assert [event.worker for event in read_events(path) if event.what == "lives"] == ["trainer-0"]
    lines = {file.name: file.read_text().splitlines() for file in record.iterdir()}
    dead = lines.pop(str(killed[0].pid))
    lived, born = sorted(lines.values(), key=len, reverse=True)
    assert len(lived) == result.summary["updates"]
    assert dead == lived[: len(dead)] and born == lived[-len(born) :]
    assert abs(len(dead) + len(born) - len(lived)) <= 1
    assert float(born[0].split()[0]) == 1e-5
