"""Runs with a limiter: exact ratios, whatever launches them and however long environments
and training take. What holds at every instant: see `test_gates`."""

import json
import re
import shutil
import sys
import threading
import time
from fractions import Fraction
from functools import partial
from math import floor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.run.watching import wait_until

from tidemill import (
    Actors,
    AgentSpec,
    Gymnasium,
    Limits,
    PolicyWorkers,
    Queue,
    Scripted,
    Slots,
    TidemillError,
    Trainer,
)
from tidemill.api.algorithm import ARRIVAL_FIELDS, Sample
from tidemill.api.buffer import Demand
from tidemill.api.experiment import Experiment
from tidemill.api.stream import Offered
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.core.schema import Field, allocate
from tidemill.core.seeding import derive_seed
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.limiter import Limiter
from tidemill.replay.replay import Replay
from tidemill.replay_training import trainer
from tidemill.replay_training.slot_fault_notices import SlotFaults
from tidemill.replay_training.trainer import ReplayTrainerWorker
from tidemill.run.control_socket import tell
from tidemill.run.controller import Controller
from tidemill.run.ending import EXIT_DEADLINE
from tidemill.store.checkpoint import checkpoints, read_checkpoint, read_newest
from tidemill.trained.retrain import retrain
from tidemill.training.train import resume, train
from tidemill.workers.base import Worker
from tidemill.workers.checkpoint_pace import CheckpointPace

FILE = Path(__file__).with_name("limited.py")
limited = load_file(FILE, "test")


@pytest.fixture(autouse=True)
def nobody_waits_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so for ever here."""
    monkeypatch.setattr("tidemill.envs.parallel_build.LEAVE_SECONDS", 0.0)


def run(experiment: Experiment, folder: Path, launch: str = "inline") -> dict[str, Any]:
    """Train to the end, with the steps of all environments counted from 0. Return the
    facts of the final checkpoint, the weights as `w`, and what the replay holds."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(FILE):
            module.Walk.steps = module.Walk.made = module.Walk.closed = 0
    result = train(experiment, launch=launch, run_dir=folder, source=FILE, quiet=True)
    assert result.summary["status"] == "completed", result.summary
    path, arrays, facts, _ = read_newest(folder / "checkpoints" / "policy")
    memory = {file.name: np.load(file) for file in sorted((path / "buffer").glob("*.npy"))}
    return {**facts, "w": arrays["policy"]["w"], "memory": memory}


def check_counts(facts: dict[str, Any], ratio: Fraction, steps: int) -> None:
    """The run ended at a quiescent cut (G3)."""
    n = facts["limiter"]
    assert n["committed"] == facts["steps"] == steps
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == facts["updates"] == floor(max(0, n["committed"] - n["waived"]) * ratio) > 0


def test_several_actors_in_processes_share_the_credits(tmp_path: Path) -> None:
    meeting = {"log": str(tmp_path / "met"), "copies": 4}
    walk = Gymnasium(make=f"{FILE}:Meeting", kwargs=meeting, threads=1)
    made = limited.experiment(steps=400, slots=2, actors=2, ratio="1/4", environment=walk)
    facts = run(made, tmp_path / "run", "processes")
    check_counts(facts, Fraction(1, 4), 400)
    seeds = np.unique(facts["memory"]["row.obs.npy"][..., 3])
    assert len(seeds[seeds != 0]) == 4  # all slots stepped


@pytest.mark.parametrize("together", [(), ("actor", "trainer")])
@pytest.mark.parametrize("exact", [False, True])
def test_actor_and_trainer_may_take_turns_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: tuple[str, ...], exact: bool
) -> None:
    threads: dict[str, set[int]] = {}

    def run_once(self: Worker) -> bool:
        threads.setdefault(self.name, set()).add(threading.get_ident())
        return own(self)

    own = Worker.run_once
    monkeypatch.setattr(Worker, "run_once", run_once)
    made = limited.experiment(steps=61, slots=3, ratio="3/2", latency="random", exact=exact).replace(
        together=together
    )
    check_counts(run(made, tmp_path / "run", "threads"), Fraction(3, 2), 61)
    assert len(threads["actor-0"] | threads["trainer-0"]) == (1 if together else 2)


def test_lanes_of_a_target_step_together(tmp_path: Path) -> None:
    facts = run(limited.experiment(steps=64, slots=2, lanes=3, threads=0, ratio="1"), tmp_path / "run")
    assert 64 <= facts["steps"] < 64 + 6  # a tick is not cut short
    check_counts(facts, Fraction(1), facts["steps"])


def test_an_exact_run_is_the_same_to_the_last_bit_whatever_takes_how_long(tmp_path: Path) -> None:
    """Four profiles of latencies, of environments and of training, by two launchers; the
    replay is the same, too."""
    reference: dict[str, Any] = {}
    for number, latency in enumerate(limited.PROFILES):
        algorithm = limited.Mixing(seconds=0.002 * (number % 2))
        made = limited.experiment(
            steps=120, slots=4, latency=latency, exact=True, ratio="3/2", algorithm=algorithm
        )
        facts = run(
            made, tmp_path / latency, "inline" if number == 0 else "processes" if number == 3 else "threads"
        )
        check_counts(facts, Fraction(3, 2), 120)
        reference = reference or facts
        assert facts["w"].tobytes() == reference["w"].tobytes()
        assert facts["memory"].keys() == reference["memory"].keys()
        for name, array in facts["memory"].items():
            assert array.tobytes() == reference["memory"][name].tobytes(), name


def test_a_run_that_is_not_exact_does_depend_on_latencies(tmp_path: Path) -> None:
    """So that the test above says something."""
    weights = [
        run(
            limited.experiment(steps=120, slots=4, latency=latency, ratio="3/2"),
            tmp_path / latency,
            "threads",
        )["w"].tobytes()
        for latency in ("none", "random", "first")
    ]
    assert len({*weights}) > 1


def test_an_exact_run_of_one_slot_is_the_plain_loop(tmp_path: Path) -> None:
    """Step, store, train; step, store, train: as anybody would write it, with the same
    parts."""
    steps, ratio = 80, Fraction(3, 2)
    made = limited.experiment(steps=steps, slots=1, exact=True, ratio=str(ratio), latency="random")
    facts = run(made, tmp_path / "run", "threads")
    weights, rows = plain_loop(made, steps, ratio)
    assert facts["w"].tobytes() == weights.tobytes()
    stored = facts["memory"]["row.obs.npy"].reshape(-1, 4)
    np.testing.assert_array_equal(stored[: len(rows)], rows)


def plain_loop(experiment: Experiment, steps: int, ratio: Fraction) -> tuple[Any, Any]:
    """Return the weights, and the rows that were stored."""
    config = experiment.workers["trainer"]
    env = limited.Walk()
    policy = limited.DrawingPolicy(derive_seed(experiment.seed, "actor-0", "policy", "policy"))
    source = Arrivals()
    algorithm = config.algorithm.build(policy, 0)
    memory = config.buffer.build(
        source, Demand(config.batch_size, 1, seed=derive_seed(experiment.seed, "trainer-0", "buffer"))
    )
    root, episode, step = derive_seed(experiment.seed, "actor-0", "slot", 0), -1, 0
    committed = tasks = 0
    waived: int | None = None
    done, rows = True, []
    out = {"action": np.zeros(1, np.int64)}
    while committed < steps:
        if done:
            episode, step, done = episode + 1, 0, False
            observation, _ = env.reset(seed=derive_seed(root, "reset", episode))
            memory_row = {"on_reset": True, "version": -1, "policy": -1}
        else:
            policy.reseed(derive_seed(root, "act", episode, step))
            policy.act({"obs": observation[None]}, {}, False, out)
            step += 1
            observation, reward, ended, cut, _ = env.step(out["action"][0])
            done = ended or cut
            memory_row = {
                "action": out["action"][0],
                "reward": reward,
                "done": ended,
                "truncated": cut and not ended,
                "version": tasks,
                "policy": 0,
            }
        rows.append(observation)
        source.put({"obs": observation, **memory_row})
        committed += sum(received.committed for received in memory.receive())
        if memory.sampleable and waived is None:
            waived = committed
        while waived is not None and floor((committed - waived) * ratio) > tasks:
            algorithm.update([held.sample for held in memory.take(tasks)], 0.0)
            memory.release()
            tasks += 1
            policy.version = tasks
    return policy.parameters()["w"], np.array(rows)


class Arrivals:
    """Where the plain loop puts its rows."""

    def __init__(self) -> None:
        self.schema = {"obs": Field((4,), "float32"), **ARRIVAL_FIELDS, "action": Field((), "int64")}
        self.waiting: list[Sample] = []

    def offered(self) -> list[Offered]:
        return [Offered(self.schema, (1, 1), 2, 1)]

    def put(self, row: dict[str, Any]) -> None:
        arrays = allocate(self.schema, (1, 1))
        for name, value in row.items():
            arrays[name][0, 0] = value
        sample = Sample(arrays)
        sample.bootstrap = 0
        self.waiting.append(sample)

    def consume(self) -> Sample | None:
        return self.waiting.pop(0) if self.waiting else None

    def release(self) -> None:
        pass


def faulty(**changes: Any) -> Experiment:
    """Each slot's environment may fail."""
    kwargs = {name: changes.pop(name) for name in ("fails", "broken", "hangs", "latency") if name in changes}
    slots = {
        name: changes.pop(name)
        for name in ("failures", "window_steps", "deadline_s", "max_backoff_s")
        if name in changes
    }
    walk = Gymnasium(make=f"{FILE}:Walk", kwargs=kwargs, threads=1)
    return limited.experiment(environment=Slots(environment=walk, backoff_s=0.001, **slots), **changes)


def check_memory(facts: dict[str, Any], slots: int) -> None:
    """Rows of a slot follow each other: a step further in the same episode of the same
    environment, or the first of another episode."""
    rows = facts["memory"]["row.obs.npy"]
    assert len(rows) == slots
    firsts = 0
    for row, reward in zip(rows, facts["memory"]["row.reward.npy"], strict=True):
        row = row[row[:, 3] != 0]
        step, begins = row[:, 1], row[:, 1] == 0
        follows = (np.diff(step) == 1) & (np.diff(row[:, 2]) == 0) & (np.diff(row[:, 3]) == 0)
        assert begins[0] and (follows ^ begins[1:]).all()
        firsts += int(begins.sum())
        np.testing.assert_array_equal(reward[: len(row)], np.where(begins, 0, -np.abs(row[:, 0])))
    assert sum(len(row[row[:, 3] != 0]) for row in rows) - firsts == facts["limiter"]["committed"]


def lose_patience_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Have the seconds without a stored step begin with so many steps, lost ones among
    them: until then a busy machine may take as long as it likes."""
    walk, look = load_attribute(f"{FILE}:Walk", "make"), ReplayTrainerWorker._look_for_progress

    def look_later(worker: ReplayTrainerWorker) -> None:
        if walk.steps < steps:
            worker._progress_at = awake()
        look(worker)

    patch.setattr(ReplayTrainerWorker, "_look_for_progress", look_later)


@pytest.mark.parametrize("exact", [False, True])
def test_lost_steps_are_voided_counted_and_told_and_no_transition_is_made_up(
    tmp_path: Path, exact: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = (3, 4, 20, 33, 34, 50, 51, 52)
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 60.0)  # what is in flight comes
    facts = run(
        faulty(steps=100, slots=3, ratio="1", fails=fails, failures=100, window_steps=100, exact=exact),
        tmp_path / "run",
        "threads",
    )
    check_counts(facts, Fraction(1), 100)
    assert facts["limiter"]["voided"] == len(fails)
    told = re.findall(
        r"slot \d: a step is lost.*?(?: \(and (\d+) more\))?$", capsys.readouterr().err, re.MULTILINE
    )
    assert sum(1 + int(more or 0) for more in told) == len(fails)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {name: summary[name] for name in ("started", "committed", "voided")} == {
        name: facts["limiter"][name] for name in ("started", "committed", "voided")
    }
    check_memory(facts, 3)


def test_slots_that_are_made_side_by_side_keep_to_their_actors_core(tmp_path: Path) -> None:
    made = limited.experiment(
        environment=Slots(environment=Gymnasium(make=f"{FILE}:Slow", threads=1)), slots=4
    )
    made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(one_core=True)})
    cores = load_attribute(f"{FILE}:Slow", "make").cores
    cores.clear()
    run(made, tmp_path / "run", "threads")
    assert len(cores) == 1 and len(*cores) == 1


def test_one_that_hangs_is_voided_at_its_deadline_and_the_others_go_on(tmp_path: Path) -> None:
    facts = run(faulty(steps=60, slots=3, hangs=(7, 30), deadline_s=1.0), tmp_path / "run", "threads")
    check_counts(facts, Fraction(1, 2), 60)
    assert facts["limiter"]["voided"] >= 2  # on a busy machine others may miss it, too


def test_a_run_outlives_an_outage_in_which_all_of_its_slots_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lasts until that was told of both of them, and how many are healthy."""
    walk, rested, lost = load_attribute(f"{FILE}:Walk", "make"), [0], list[str]()
    stats, step = SlotFaults.stats, walk.step

    def stats_and_note(faults: SlotFaults) -> dict[str, float]:
        rested[0] = len(faults._rested)
        return stats(faults)

    def out(env: Any, action: Any) -> Any:
        if walk.steps >= 40 and rested[0] < 2:
            lost.append("one")
            raise ConnectionError("lost")
        return step(env, action)

    monkeypatch.setattr(SlotFaults, "stats", stats_and_note)
    monkeypatch.setattr(walk, "step", out)
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 60.0)  # what is in flight comes
    facts = run(
        faulty(steps=100, slots=2, failures=3, max_backoff_s=0.02, ratio="1"), tmp_path / "run", "threads"
    )
    check_counts(facts, Fraction(1), 100)
    assert facts["limiter"]["voided"] == len(lost) >= 6
    check_memory(facts, 2)
    assert {
        *re.findall(
            r"slot (\d) rests, and is tried again after pauses that grow: it failed", capsys.readouterr().err
        )
    } == {"0", "1"}
    last = read_metrics(tmp_path / "run")[-1]
    assert last["time/actor-0/slots/healthy"] + last["time/actor-0/slots/resting"] == 2


def test_an_exact_run_fails_with_its_first_slot_that_would_rest(tmp_path: Path) -> None:
    with pytest.raises(
        TidemillError,
        match=r"slot \d fails again and again, and an exact run .*; the first fault was: slot \d: a step is "
        r"lost: .*step 30",
    ):
        failed(faulty(steps=100, slots=2, fails=(30,), failures=1, exact=True), tmp_path / "run")


def test_a_run_in_which_nothing_comes_tells_so_though_its_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("no space is left")

    monkeypatch.setattr("tidemill.workers.checkpoint_writer.write_checkpoint", full)
    made = faulty(slots=2, steps=100, broken=True, max_backoff_s=0.01, max_no_progress_s=0.5)
    with pytest.raises(TidemillError, match=r"no step was stored for 0\.5 s"):
        failed(made, tmp_path / "run")


def test_a_run_in_which_nothing_comes_any_more_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_patience_after(monkeypatch, 20)
    made = limited.experiment(slots=1, kwargs={"hangs": (20,)}, max_no_progress_s=1.5)
    with pytest.raises(
        TidemillError, match=r"no step was stored for 1.5 s \(max_no_progress_s\), with 1 in flight"
    ):
        failed(made, tmp_path / "run")
    assert read_newest(tmp_path / "run" / "checkpoints" / "policy")[2]["steps"] == 19
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["voided"] == 1 and summary["started"] == summary["committed"] + summary["voided"]


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_a_trainer_that_raises_ends_the_run_with_the_cause(tmp_path: Path, launch: str) -> None:
    with pytest.raises(TidemillError, match="ArithmeticError: the update failed"):
        failed(
            limited.experiment(algorithm=limited.Mixing(fails=5), latency="constant"),
            tmp_path / "run",
            launch,
        )
    if launch != "processes":  # there they end with their process
        walk = load_attribute(f"{FILE}:Walk", "make")
        wait_until(lambda: walk.closed == walk.made, 60, "every slot is closed")
        assert walk.made >= 3


def failed(experiment: Experiment, folder: Path, launch: str = "threads") -> None:
    """Run, which raises the cause."""
    run(experiment, folder, launch)


def test_a_run_that_is_told_to_stop_drains_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop() -> None:
        wait_until(
            lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 0, 60, "an update"
        )
        tell(folder, "stop")

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    made = limited.experiment(steps=1_000_000, latency="constant", ratio="1")
    assert (
        train(made, launch="threads", run_dir=folder, source=FILE, quiet=True).summary["status"]
        == "completed"
    )
    thread.join(60)
    _, _, facts, _ = read_newest(folder / "checkpoints" / "policy")
    check_counts(facts, Fraction(1), facts["steps"])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_what_gathering_waits_is_told_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool, exact: bool
) -> None:
    """As many slots as the slack: while they all step the gate is shut, and nobody waits
    for it. Where training takes long they do. By a clock on which no time passes but in
    steps and updates: what a busy machine takes is not looked at."""
    now, lock = [0.0], threading.Lock()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        with lock:
            now[0] += seconds

    monkeypatch.setattr(limited, "time", SimpleNamespace(sleep=sleep))
    for place in ("ready_environments", "exact"):
        monkeypatch.setattr(f"tidemill.replay_training.{place}.awake", lambda: now[0])
    monkeypatch.setattr("tidemill.replay_training.ingest.Limiter", partial(Limiter, clock=lambda: now[0]))
    seconds = 0.02 if training else 0.0
    latency = "none" if training else "long"
    made = limited.experiment(
        steps=50,
        slots=2,
        slack=None if exact else 2,
        ratio="1",
        latency=latency,
        exact=exact,
        algorithm=limited.Mixing(seconds=seconds),
    )
    run(made, tmp_path / "run", "threads")
    records = read_metrics(tmp_path / "run")
    gathering = records[-1]["time/actor-0/slots/waited"]
    trained = sum(record.get("limiter/training_waited", 0.0) for record in records)
    assert (gathering > trained) == training, (gathering, trained)
    # updates sleep for 1 s in all, steps for 0.75 s of each slot
    assert max(gathering, trained) > 0.25, (gathering, trained)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_trainer_that_is_told_to_end_has_long_to_save_and_not_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """On the controller's clock more than its deadline passes at once, while the trainer
    saves, or once it hangs."""
    monkeypatch.setattr("tidemill.run.ending.CLOSE_DEADLINE", 0.3)
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 0.05)
    walk, told, saves = load_attribute(f"{FILE}:Walk", "make"), threading.Event(), threading.Event()
    state, lead = limited._Mixing.state, Controller.run
    passed, leading = [0.0], list[Controller]()
    for place in ("ending", "member", "stall_watch", "worker_messages"):
        monkeypatch.setattr(f"tidemill.run.{place}.awake", lambda: awake() + passed[0])

    def lead_and_note(controller: Controller) -> None:
        leading.append(controller)
        lead(controller)

    def slow_state(self: Any) -> Any:
        if told.is_set():
            saves.set()
            wait_until(lambda: leading[0].state.members["trainer-0"].saving, 60, "it is known that it saves")
            passed[0] += 2 * EXIT_DEADLINE
            time.sleep(0.5)  # in which the controller looks
        return state(self)

    monkeypatch.setattr(Controller, "run", lead_and_note)
    monkeypatch.setattr(load_attribute(f"{FILE}:_Mixing", "make"), "state", slow_state)
    # Its environment steps in the thread of actor and trainer, so that nobody there hears
    # of the end.
    made = limited.experiment(
        slots=1, steps=1_000_000, threads=0, kwargs={"hangs": (20,)} if hangs else {}
    ).replace(together=("actor", "trainer"))

    def stop() -> None:
        wait_until(lambda: walk.steps >= 20, 60, "20 steps")
        told.set()
        tell(tmp_path / "run", "stop")
        if hangs:
            wait_until(lambda: leading[0]._ending.deadline is not None, 60, "the trainer is told to end")
            passed[0] += 2 * EXIT_DEADLINE

    thread = threading.Thread(target=stop, daemon=True)
    walk.steps = 0
    thread.start()
    if hangs:
        with pytest.raises(
            TidemillError, match=r"trainer-0 did not finish within \d+ s after it was told to"
        ):
            train(made, launch="threads", run_dir=tmp_path / "run", source=FILE, quiet=True)
    else:
        assert (
            train(made, launch="threads", run_dir=tmp_path / "run", source=FILE, quiet=True).summary["status"]
            == "completed"
        )
    thread.join(60)
    assert saves.is_set() == (not hangs)


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_run_conserves_the_counters_and_owes_no_more_than_it_did(
    tmp_path: Path, keep: bool
) -> None:
    made = limited.experiment(steps=50, ratio="3/2", keep_buffer=keep, latency="constant")
    train(made, launch="threads", run_dir=tmp_path / "run", source=FILE, quiet=True)
    before = read_newest(tmp_path / "run" / "checkpoints" / "policy")[2]["limiter"]
    resume(tmp_path / "run", launch="threads", limits={"steps": 110}, quiet=True)
    _, _, facts, _ = read_newest(tmp_path / "run" / "checkpoints" / "policy")
    n = facts["limiter"]
    assert n["committed"] == facts["steps"] == 110 and n["started"] == n["committed"] + n["voided"]
    if keep:
        assert n["waived"] == before["waived"] and n["tasks"] == floor((110 - n["waived"]) * Fraction(3, 2))
    else:
        assert n["waived"] >= 60 and n["base"] == before["tasks"]
        assert n["tasks"] == before["tasks"] + floor((110 - n["waived"]) * Fraction(3, 2))


def test_steps_are_taken_by_new_versions_also_while_training_lags_behind(tmp_path: Path) -> None:
    """Something is owed all the time then; and regular checkpoints are written all the
    same."""
    made = limited.experiment(
        slots=4,
        steps=150,
        ratio="1",
        algorithm=limited.Mixing(seconds=0.004),
        checkpoint_seconds=0.1,
        checkpoint_share=1,
        checkpoints=1000,
    )
    facts = run(made, tmp_path / "run", "threads")
    rows, versions = facts["memory"]["row.obs.npy"], facts["memory"]["row.version.npy"]
    acted = np.sort(versions[(versions >= 0) & (rows[..., 3] != 0)])
    waived, ahead = facts["limiter"]["waived"], 4 + 4  # the slack, and steps in flight
    assert len(acted) == 150 and (acted >= np.arange(150) - waived - ahead).all()
    assert len(checkpoints(tmp_path / "run" / "checkpoints" / "policy")) > 2


def test_a_ratio_that_changes_in_the_warm_up_owes_nothing_before_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(limited.experiment(steps=6), launch="inline", run_dir=folder, source=FILE, quiet=True)
    assert read_newest(folder / "checkpoints" / "policy")[2]["limiter"]["waived"] is None
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"ratio": "1/2"', '"ratio": "2"'))
    resume(folder, launch="inline", limits={"steps": 60}, quiet=True)
    check_counts(read_newest(folder / "checkpoints" / "policy")[2], Fraction(2), 60)


def test_a_run_that_stops_storing_steps_fails_with_the_first_and_the_last_that_its_slots_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two slots loses at least five of nine steps and rests, then both hang. The
    trainer that waits knows nothing of that."""
    fails, hangs = tuple(range(20, 29)), tuple(range(29, 60))
    lose_patience_after(monkeypatch, 30)
    made = faulty(
        slots=2, steps=100, fails=fails, hangs=hangs, failures=5, max_backoff_s=0.01, max_no_progress_s=1.5
    )
    with pytest.raises(TidemillError, match=r"no step was stored for 1.5 s") as error:
        failed(made, tmp_path / "run")
    told = str(error.value).splitlines()[1:3]
    assert told and all(
        re.search(
            r"(first|last): actor-0: slot \d.*: a step is lost: .*ConnectionError.*lost in step 2\d", line
        )
        for line in told
    )
    assert any(
        re.search(
            r"slot \d rests, and is tried again after pauses that grow: it failed [5-9] times, at last: a "
            r"step is lost",
            line,
        )
        for line in told
    )


def test_a_run_in_which_every_step_is_lost_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_patience_after(monkeypatch, 6)
    made = faulty(slots=2, steps=100, broken=True, max_backoff_s=0.01, max_no_progress_s=1.5)
    with pytest.raises(
        TidemillError,
        match=r"no step was stored for 1.5 s[\s\S]*\nMeanwhile, first: actor-0: slot \d(: a step is| rests)",
    ):
        failed(made, tmp_path / "run")


def test_the_limit_of_seconds_holds_also_when_nothing_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 0.05)  # nothing in flight comes
    walk = Gymnasium(make=f"{FILE}:Walk", kwargs={"hangs": list(range(20, 30))}, threads=1)
    load_attribute(walk.name, "make").steps = 0
    made = limited.experiment(environment=walk, slots=2)
    result = train(
        made.replace(limits=Limits(seconds=0.5)),
        launch="threads",
        run_dir=tmp_path / "run",
        source=FILE,
        quiet=True,
    )
    assert result.summary["status"] == "completed" and "s of training" in result.summary["reason"]
    assert result.summary["seconds"] < 60


def save_once(patch: pytest.MonkeyPatch, steps: int, flying: bool = True) -> None:
    """Have trainers write a regular checkpoint once so many steps are stored, steps are
    in flight, or are not, and tasks owed, and no other before the last one."""
    look, saved = ReplayTrainerWorker._look_round, list[ReplayTrainerWorker]()

    def look_and_save(worker: ReplayTrainerWorker) -> None:
        look(worker)
        if (
            not saved
            and worker.learner.counters.steps >= steps
            and bool(worker.limiter.in_flight) == flying
            and worker.limiter.owed
        ):
            saved.append(worker)
            worker._save()

    patch.setattr(ReplayTrainerWorker, "_look_round", look_and_save)
    patch.setattr(trainer, "TASKS", 1)  # before it looks: some are owed then
    patch.setattr(CheckpointPace, "due", lambda *_: False)


def test_regular_checkpoints_stop_no_slot_and_what_was_in_flight_is_void_in_a_run_that_goes_on_from_one(
    tmp_path: Path,
) -> None:
    """Counters are conserved, no work bursts, open episodes are cut, and the run can be
    trained again from its journal."""
    ratio, folder = Fraction(3, 2), tmp_path / "run"
    made = limited.experiment(
        steps=90,
        slots=4,
        ratio=str(ratio),
        latency="constant",
        journal=True,
        algorithm=limited.Mixing(seconds=0.001),
    )
    with pytest.MonkeyPatch.context() as patch:
        save_once(patch, 40)
        check_counts(run(made, folder, "threads"), ratio, 90)
    at, last = checkpoints(folder / "checkpoints" / "policy")
    facts = read_checkpoint(at)[1]
    n = facts["limiter"]
    flight = n["started"] - n["committed"] - n["voided"]
    # it was written while slots stepped
    assert 0 < flight <= 4 and 40 <= n["committed"] == facts["steps"] < 90
    assert (
        0 < floor((n["committed"] - n["waived"]) * ratio) - n["tasks"] <= 2 * 4 * ratio
        and n["tasks"] == facts["updates"]
    )
    # all until then was told: what comes later is dropped now
    assert n["tasks"] in {record.get("update") for record in read_metrics(folder)}
    shutil.rmtree(last)
    resume(folder, launch="threads", quiet=True)
    path, _, facts, _ = read_newest(folder / "checkpoints" / "policy")
    check_counts(facts, ratio, 90)
    assert facts["limiter"]["voided"] == flight
    again = retrain(folder)
    assert again.same and again.committed == 90
    check_memory(
        {**facts, "memory": {file.name: np.load(file) for file in sorted((path / "buffer").glob("*.npy"))}}, 4
    )


def test_what_was_owed_when_a_run_was_killed_at_its_limit_of_steps_is_trained_by_the_resumed_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        save_once(patch, 30, flying=False)
        run(limited.experiment(steps=30, slots=4, ratio="8"), folder)
    at, last = checkpoints(folder / "checkpoints" / "policy")
    assert read_checkpoint(at)[1]["steps"] == 30
    shutil.rmtree(last)
    resume(folder, launch="inline", quiet=True)
    check_counts(read_newest(folder / "checkpoints" / "policy")[2], Fraction(8), 30)
    with pytest.raises(TidemillError, match="already reached its limit of 30 steps"):
        resume(folder, launch="inline", quiet=True)


def test_the_gates_hold_in_a_run_that_goes_on_from_a_checkpoint_with_steps_in_flight_and_tasks_owed(
    tmp_path: Path,
) -> None:
    """The limiter looks at itself after each change (see `watched`)."""
    watched, folder = load_file(Path(__file__).with_name("watched.py"), "test"), tmp_path / "run"
    made = watched.experiment(tmp_path / "log", steps=100, slots=4, ratio="8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemill.replay_training.ingest.Limiter", watched.Watched)
        patch.setattr("tidemill.replay_training.trainer.DRAIN", trainer.DRAIN)  # see `watched`
        save_once(patch, 50)
        train(made, launch="threads", run_dir=folder, source=watched.__file__, quiet=True)
        shutil.rmtree(checkpoints(folder / "checkpoints" / "policy")[1])
        looks = watched.Watched.looks
        resume(folder, launch="threads", quiet=True)
    n = read_newest(folder / "checkpoints" / "policy")[2]["limiter"]
    assert (
        n["committed"] == 100 == n["started"] - n["voided"]
        and n["tasks"] == (100 - n["waived"]) * 8
        and watched.Watched.looks > looks
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ratio": "0"}, "must be above 0"),
        ({"ratio": "0.5"}, 'ratio = "1/2"'),
        ({"slack": 0}, "slack = 0"),
        ({"slack": 2, "exact": True}, "leave it out"),
        ({"buffer": Queue()}, "is no replay memory"),
        ({"batch_size": None}, "batch_size = None says how many"),
        ({"count": 2}, "one trainer has the replay memory.*set it to 1.*A Trainer.*ReplayActors"),
        ({"max_no_progress_s": 0}, "max_no_progress_s"),
    ],
)
def test_impossible_settings_are_refused_at_once(changes: dict[str, Any], text: str) -> None:
    trainer = limited.experiment().workers["trainer"]
    with pytest.raises(ConfigError, match=text):
        trainer.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lanes": 3, "threads": 0, "slack": 2}, "slack = 2 can deadlock"),
        ({"exact": True, "actors": 2}, "exact = True needs one actor"),
        ({"exact": True, "lanes": 2}, "exact = True needs one actor"),
        (
            {
                "exact": True,
                "environment": Slots(environment=Gymnasium(make=f"{FILE}:Walk"), max_episode_seconds=9.0),
            },
            "max_episode_seconds cuts them",
        ),
        (
            {"environment": Scripted(agents=2)},
            "go with environments of one agent.*without a ratio.*take an environment of one",
        ),
        ({"environment": Scripted(same_step=True)}, "send one row in a tick.*resets in the next step"),
    ],
)
def test_what_the_environment_makes_impossible_is_refused_at_the_start(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(TidemillError, match=text):
        run(limited.experiment(**changes), tmp_path / "run")


def test_an_exact_run_with_a_policy_worker_is_refused_at_the_start(tmp_path: Path) -> None:
    made = limited.experiment(exact=True)
    actor = made.workers["actor"].replace(inference="inference")
    workers = {
        "actor": actor,
        "server": PolicyWorkers(stream="inference"),
        "trainer": made.workers["trainer"],
    }
    with pytest.raises(
        TidemillError, match='whose policy runs inline, not count = 1, lanes = 1, inference = "inference"'
    ):
        run(made.replace(workers=workers), tmp_path / "run")


def test_other_modes_and_replay_memories_do_not_go_together(tmp_path: Path) -> None:
    made = limited.experiment()
    environment = made.workers["actor"].environment  # type: ignore[attr-defined]
    actor = Actors(environment=environment, lanes=1, agents=(AgentSpec(sample_steps=4),))
    fixed = made.replace(workers={**made.workers, "actor": actor})
    with pytest.raises(TidemillError, match="take ReplayActors in place of Actors"):
        run(fixed, tmp_path / "fixed")
    queue = made.replace(workers={**made.workers, "trainer": Trainer(algorithm=limited.Mixing())})
    with pytest.raises(TidemillError, match="for a replay memory"):
        run(queue, tmp_path / "queue")


def test_a_resumed_run_does_not_play_again_what_it_has_played(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(
        limited.experiment(steps=30, slots=2, threads=0),
        launch="inline",
        run_dir=folder,
        source=FILE,
        quiet=True,
    )
    resume(folder, launch="inline", limits={"steps": 60}, quiet=True)
    rows = np.load(read_newest(folder / "checkpoints" / "policy")[0] / "buffer" / "row.obs.npy").reshape(
        -1, 4
    )
    firsts = rows[(rows[:, 1] == 0) & (rows[:, 3] != 0)]
    assert len(np.unique(firsts[:, 3])) == 4 and len(np.unique(firsts[:, 0])) == len(firsts) > 4


def test_a_run_that_is_cut_at_any_step_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Counters are conserved, the ratio stays exact, and the memory holds what both lives
    stored."""
    for cut in range(1, 16):
        folder = tmp_path / str(cut)
        buffer = Replay(capacity=400, warm_up=6)
        run(limited.experiment(steps=cut, slots=2, ratio="3/2", buffer=buffer, threads=0), folder)
        resume(folder, launch="inline", limits={"steps": 16}, quiet=True)
        path, _, facts, _ = read_newest(folder / "checkpoints" / "policy")
        facts["memory"] = {file.name: np.load(file) for file in sorted((path / "buffer").glob("*.npy"))}
        check_counts(facts, Fraction(3, 2), 16)
        rows = facts["memory"]["row.obs.npy"]
        firsts = int(((rows[..., 1] == 0) & (rows[..., 3] != 0)).sum())
        assert int((rows[..., 3] != 0).sum()) - firsts == 16


@pytest.mark.parametrize("drop", [False, True])
def test_episodes_that_lost_a_step_can_be_dropped(tmp_path: Path, drop: bool) -> None:
    """They are not in the memory then; what was counted stays so."""
    buffer = Replay(capacity=400, warm_up=10, drop_cut=drop)
    made = faulty(
        steps=150, slots=3, fails=list(range(60, 10_000, 11)), max_backoff_s=0.01, buffer=buffer, ratio="1"
    )
    facts = run(made, tmp_path / "run", "inline")
    check_counts(facts, Fraction(1), 150)
    assert facts["limiter"]["voided"] > 5
    steps = [
        np.count_nonzero(rows[:head, 1])  # an episode's first row is of no step
        for rows, head in zip(facts["memory"]["row.obs.npy"], facts["memory"]["heads.npy"], strict=True)
    ]
    assert (sum(steps) < 150) if drop else sum(steps) == 150
