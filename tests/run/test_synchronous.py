"""Synchronous, on-policy training (max_policy_lag = 0): no row lags, nothing is dropped,
and the launcher makes no difference any more."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS, wait_until

from tidemill import PPO, ActorCritic, RecurrentActorCritic
from tidemill.api.experiment import Experiment
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.control_socket import tell
from tidemill.testing.scripted import Scripted, reward_of
from tidemill.training.train import resume, train
from tidemill.workers import base

experiments = load_file(EXPERIMENTS, "test")

UPDATES, STEPS, LANES = 6, 5, 4


@pytest.fixture(autouse=True)
def bells_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rings may be kept from it for long; that nobody does is what is looked
    for."""
    monkeypatch.setattr(base, "RING_LATE", 30.0)


def synchronous(
    inference: str = "inline", record: Path | None = None, environment: Any = None, **changes: dict[str, Any]
) -> Experiment:
    """`changes`: of each group of workers."""
    recorder = experiments.Recorder(record=None if record is None else str(record), seconds=0.0)
    made = experiments.experiment(
        environment or Scripted(agents=2),
        lanes=LANES,
        inference=inference,
        sample_steps=STEPS,
        algorithm=recorder,
        max_policy_lag=0,
    )
    workers = {name: config.replace(**changes.get(name, {})) for name, config in made.workers.items()}
    limits = made.limits.replace(updates=UPDATES)
    return made.replace(policies={"policy": experiments.ByVersion()}, workers=workers, limits=limits)


def run(experiment: Experiment, launch: str, folder: Path) -> list[dict[str, float]]:
    """Train; return the records, each of which says that nothing lagged."""
    result = train(experiment, launch=launch, run_dir=folder, source=EXPERIMENTS, quiet=True)
    assert result.summary["status"] == "completed" and result.summary["updates"] == UPDATES
    records = read_metrics(folder)
    assert [record["update"] for record in records] == list(range(1, UPDATES + 1))
    # in processes of their own, a bell counts as not rung that is late on a busy machine
    nothing_lagged(records, 2 if launch == "processes" else 0)
    return records


def nothing_lagged(records: list[dict[str, float]], late: int) -> None:
    """`late`: bells of each worker that may not have been rung in time."""
    for record in records:
        assert (record["lag/max"], record["lag/mean"], record["dropped"]) == (0, 0, 0)
        rescues = {name: value for name, value in record.items() if name.endswith("/rescues")}
        assert max(rescues.values(), default=0) <= late, rescues  # nobody slept through a bell


def recorded(record: Path, count: int) -> list[dict[str, np.ndarray]]:
    samples = []
    for number in range(count):
        with np.load(f"{record}-{number}.npz") as arrays:
            samples.append({name: arrays[name] for name in arrays.files})
    return samples


def test_whatever_launches_it_every_row_is_of_the_version_that_trains_on_it(tmp_path: Path) -> None:
    first: list[dict[str, np.ndarray]] = []
    for launch in ("inline", "threads", "processes"):
        for inference in ("inline", "inference"):
            record = tmp_path / f"{launch}-{inference}"
            records = run(synchronous(inference, record), launch, tmp_path / f"run-{launch}-{inference}")
            samples = recorded(record, UPDATES)
            first = first or samples
            trained = 0
            for version, (sample, same) in enumerate(zip(samples, first, strict=True)):
                mask = (sample["version"] >= 0) & ~(sample["done"] | sample["truncated"])
                mask[-1] = False
                trained += int(mask.sum())
                assert (sample["version"][mask] == version).all() and (sample["value"][mask] == version).all()
                lane, agent, episode, row, _ = sample["obs"][mask].astype(np.int64).T
                np.testing.assert_array_equal(
                    sample["reward"][mask], reward_of(lane, agent, episode, row, sample["action"][mask])
                )
                for name in sample:
                    np.testing.assert_array_equal(
                        sample[name], same[name], err_msg=f"{launch}, {inference}, sample {version}, {name}"
                    )
                if version:
                    np.testing.assert_array_equal(sample["obs"][0], samples[version - 1]["obs"][-1])
            assert records[-1]["step"] == trained // 2  # two seats in a lane


@pytest.mark.parametrize(
    ("launch", "inference"),
    [("inline", "inline"), ("threads", "inline"), ("inline", "inference"), ("processes", "inference")],
)
@pytest.mark.parametrize(
    "environment",
    [Scripted(same_step=True), Scripted(agents=3, turns=3), Scripted(agents=2, deaths=True, delay=1e-4)],
    ids=["ends within a tick", "in turn", "agents die, elsewhere"],
)
def test_rings_and_several_actors(launch: str, inference: str, environment: Scripted, tmp_path: Path) -> None:
    run(
        synchronous(inference, environment=environment, actor={"ring": 2, "count": 2}),
        launch,
        tmp_path / "run",
    )


@pytest.mark.parametrize(
    ("launch", "inference", "actors", "trainers", "together"),
    [
        ("inline", "inline", 2, 2, ()),
        ("threads", "inference", 3, 2, ()),
        ("processes", "inference", 3, 2, ()),
        ("processes", "inline", 3, 2, ()),
        ("processes", "inline", 2, 2, ("actor", "trainer")),
        ("processes", "inline", 1, 1, ("actor", "trainer")),
    ],
)
def test_equal_trainers(
    launch: str, inference: str, actors: int, trainers: int, together: tuple[str, ...], tmp_path: Path
) -> None:
    """Whichever trainer publishes to whoever answers: nobody is given a sample back
    before all have published."""
    made = synchronous(inference, actor={"count": actors, "ring": 2}, trainer={"count": trainers})
    records = run(made.replace(together=together), launch, tmp_path / "run")
    assert all(record["trainers"] == trainers for record in records)


@pytest.mark.parametrize(
    ("inference", "remembers"), [("inline", False), ("inline", True), ("inference", True)]
)
@pytest.mark.parametrize(
    "environment",
    [Scripted(agents=2), Scripted(agents=3, turns=3), Scripted(same_step=True)],
    ids=["", "in turn", "same step"],
)
def test_the_weights_that_are_trained_are_those_that_acted(
    environment: Scripted, inference: str, remembers: bool, tmp_path: Path
) -> None:
    """Before an update's first step every row's probability is the stored one, also of
    policies that remember, so that all divergence is rounding."""
    policy = (RecurrentActorCritic if remembers else ActorCritic)(hidden=(16,), normalise_observations=True)
    found = {}
    for lag in (0, None):
        made = synchronous(
            inference,
            environment=environment,
            trainer={"algorithm": PPO(epochs=1, minibatch_size=10_000, learning_rate=0.05)},
        )
        made = made.replace(
            policies={"policy": policy},
            workers={**made.workers, "trainer": made.workers["trainer"].replace(max_policy_lag=lag)},
        )
        folder = tmp_path / f"run-{lag}"
        train(made, launch="inline", run_dir=folder, source=EXPERIMENTS, quiet=True)
        found[lag] = [record["kl"] for record in read_metrics(folder)]
        assert len(found[lag]) == UPDATES
    assert max(found[0]) < 1e-6 < max(found[None])


def test_pauses_checkpoints_and_a_new_start_are_no_lag(tmp_path: Path) -> None:
    made = synchronous(
        "inference",
        actor={"count": 2, "ring": 2},
        trainer={"checkpoint_seconds": 1e-3, "checkpoint_share": 1},
    )
    made = made.replace(limits=made.limits.replace(updates=None))
    folder = tmp_path / "run"
    ending: list[str] = []

    def whole_run() -> None:
        ending.append(
            train(made, launch="threads", run_dir=folder, source=EXPERIMENTS, quiet=True).summary["status"]
        )

    thread = threading.Thread(target=whole_run)
    thread.start()
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 2, 60, "updates")
    for _ in range(3):
        assert tell(folder, "pause") == "paused"
        assert tell(folder, "start") == "running"
        updates = len(read_metrics(folder))
        wait_until(lambda: len(read_metrics(folder)) > updates + 2, 60, "updates")  # noqa: B023
    tell(folder, "save")
    tell(folder, "stop")
    thread.join(60)
    assert ending == ["completed"]
    done = int(read_metrics(folder)[-1]["update"])
    result = resume(folder, launch="threads", limits={"updates": done + UPDATES}, quiet=True)
    assert (result.summary["status"], result.summary["updates"]) == ("completed", done + UPDATES)
    records = read_metrics(folder)
    assert [record["update"] for record in records] == list(range(1, done + UPDATES + 1))
    nothing_lagged(records, 0)


def test_a_run_ends_while_actors_are_held(tmp_path: Path) -> None:
    """One actor takes for ever to fill its sample: the other one waits, and both are told
    to end."""
    made = synchronous(environment=Scripted(delay=0.02, shortest=1000, longest=1000), actor={"count": 2})
    made = made.replace(limits=made.limits.replace(updates=None, seconds=0.5))
    result = train(made, launch="processes", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True)
    assert result.summary["status"] == "completed"
