"""Exact runs that are cut and resumed are the same to the last bit as those that are
not."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tidemill import (
    DQN,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Limits,
    PrioritisedReplay,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Scripted,
    Slots,
    TidemillError,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule
from tidemill.api.spaces import Spaces
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay_training.trainer import ReplayTrainerWorker
from tidemill.store.checkpoint import read_newest
from tidemill.training.train import resume, train

FILE = Path(__file__).with_name("limited.py")
limited = load_file(FILE, "test")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of checkpoints: whether they survive a power failure is not what is looked
    at."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight as a run is stopped comes, however busy the machine is."""
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 60.0)


FAILING = Slots(
    environment=Gymnasium(make=f"{FILE}:Failing"),
    backoff_s=0.0001,
    max_backoff_s=0.001,
    failures=1000,
    window_steps=1000,
)
CARTPOLE = Slots(environment=Gymnasium(id="CartPole-v1"))
SCRIPTED = Scripted(longest=6)
NETWORK, REPLAY = QNetwork(hidden=(16, 16)), Replay(capacity=400, warm_up=8)
EVERYTHING: dict[str, Any] = {
    "network": QNetwork(
        hidden=(16,), noise=0.5, atoms=5, least_return=0, greatest_return=10, normalise_observations=True
    ),
    "buffer": PrioritisedReplay(capacity=400, warm_up=8, steps=3, frame_stack=2, beta_updates=40),
    "frame_stack": 2,
}

UNNAMED = shutil.ignore_patterns(".*")  # what another thread is about to rename


def dqn(
    environment: EnvironmentConfig = CARTPOLE,
    slots: int = 4,
    steps: int = 30,
    network: QNetwork = NETWORK,
    buffer: Replay = REPLAY,
    frame_stack: int = 1,
    max_episode_steps: int = 0,
    lane_restarts: int | Literal["auto"] = "auto",
    **trainer: Any,
) -> Experiment:
    exploration: dict[str, Any] = {} if network.noise else {"epsilon": LinearSchedule(1, 0.05, to_step=70)}
    return Experiment(
        name="exact",
        policies={"policy": network},
        workers={
            "actor": ReplayActors(
                environment=environment, lanes=1, ring=slots, max_episode_steps=max_episode_steps,
                frame_stack=frame_stack, lane_restarts=lane_restarts,
            ),
            "trainer": ReplayTrainer(
                algorithm=DQN(target_steps=10, **exploration), buffer=buffer, batch_size=4,
                database_seconds=None, exact=True, **{"ratio": "1/2", "journal": True, **trainer},
            ),
        },
        limits=Limits(steps=steps),
    )  # fmt: skip


def result(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves: weights, moments, counters, random streams, replay,
    open episodes, journal."""
    path, arrays, facts, _ = read_newest(folder / "checkpoints" / "policy")
    left = {
        f"{file}/{name}": array.tobytes()
        for file, content in arrays.items()
        for name, array in content.items()
    }
    left |= {file.name: file.read_bytes() for file in (path / "buffer").iterdir()}
    left |= {name: repr(value).encode() for name, value in facts.items() if name != "seconds"}
    return left | {"journal": (folder / "journal-policy.bin").read_bytes()}


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def at_every_row(monkeypatch: pytest.MonkeyPatch, do: Callable[[ReplayTrainerWorker, int], None]) -> None:
    """Have `do` called whenever a row was stored, and all that it owes trained."""
    receive, look = ReplayTrainerWorker._receive, ReplayTrainerWorker._look_round
    rows, seen = [0], [0]

    def count(worker: ReplayTrainerWorker) -> int:
        came = receive(worker)
        rows[0] += came
        return came

    def look_round(worker: ReplayTrainerWorker) -> None:
        look(worker)
        if rows[0] > seen[0] and not worker.limiter.owed and worker._reason is None:
            seen[0] = rows[0]
            do(worker, rows[0])

    monkeypatch.setattr(ReplayTrainerWorker, "_receive", count)
    monkeypatch.setattr(ReplayTrainerWorker, "_look_round", look_round)


def killed_at_every_row(
    experiment: Experiment, folder: Path, launch: str = "inline", every: int = 1
) -> list[Path]:
    """Train to the end, with a checkpoint at each row of so many. Return what a kill
    would have left just behind each of them. There are more than 30 rows."""
    images, rows = list[Path](), list[int]()

    def save(worker: ReplayTrainerWorker, row: int) -> None:
        if len(rows) % every == 0:
            worker.learner.checkpoints.newest = -1, -1, -1
            worker._save()
            images.append(folder.with_name(f"{folder.name}-{row}"))
            shutil.copytree(folder, images[-1], ignore=UNNAMED)
        rows.append(row)

    with pytest.MonkeyPatch.context() as patch:
        at_every_row(patch, save)
        train(experiment, launch=launch, run_dir=folder, source=FILE, quiet=True)
    assert len(rows) > 30
    return images


@pytest.mark.parametrize(
    ("settings", "every", "launch"),
    [
        ({}, 2, "inline"),
        ({"environment": SCRIPTED, **EVERYTHING}, 2, "inline"),
        ({"slots": 1, "max_episode_steps": 5}, 3, "inline"),
        (
            {
                "environment": SCRIPTED,
                "ratio": "3/2",
                "buffer": Replay(capacity=400, warm_up=8, whole_episodes=True),
            },
            5,
            "inline",
        ),
        (
            {
                "environment": Slots(environment=Gymnasium(id="CartPole-v1", threads=1)),
                "max_episode_steps": 4,
                "iteration_steps": 13,
            },
            7,
            "threads",
        ),
        ({"environment": GymnasiumVector(id="CartPole-v1", max_episode_steps=5), "slots": 2}, 8, "inline"),
        ({"environment": FAILING, "buffer": Replay(capacity=400, warm_up=8, drop_cut=True)}, 3, "inline"),
        ({"environment": Gymnasium(make=f"{FILE}:Failing"), "lane_restarts": 1000}, 3, "inline"),
        ({"environment": SCRIPTED, "iteration_steps": 13, "finish_episodes": True}, 3, "inline"),
        (
            {
                "environment": SCRIPTED,
                "iteration_steps": 10,
                "finish_episodes": True,
                "slots": 2,
                "steps": 35,
            },
            3,
            "inline",
        ),
    ],
    ids=[
        "cartpole",
        "everything",
        "one slot",
        "whole episodes",
        "threads",
        "vector",
        "lost steps",
        "lost steps without slots",
        "phases of episodes",
        "phases of two slots",
    ],
)
def test_a_run_that_is_killed_at_any_row_goes_on_as_if_it_had_not_been(
    tmp_path: Path, settings: dict[str, Any], every: int, launch: str
) -> None:
    images = killed_at_every_row(dqn(**settings), tmp_path / "run", launch, every)
    whole = result(tmp_path / "run")
    limit = settings.get("steps", 30)
    # others have reached it
    below = [image for image in images if read_newest(image / "checkpoints" / "policy")[2]["steps"] < limit]
    for image in below:
        resume(image, launch=launch, quiet=True)
        assert not differences(result(image), whole), image.name
        shutil.rmtree(image)


def stopped(experiment: Experiment, folder: Path, row: int, launch: str = "inline") -> None:
    """Train until so many rows were stored; then the run is told to end, as by Ctrl-C.
    Several may come at once."""
    with pytest.MonkeyPatch.context() as patch:
        at_every_row(patch, lambda worker, stored: worker.exit("stopped") if stored >= row else None)
        train(experiment, launch=launch, run_dir=folder, source=FILE, quiet=True)


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"environment": SCRIPTED, **EVERYTHING}, 1),
        ({"slots": 1, "environment": SCRIPTED, "ratio": "3/2"}, 2),
    ],
)
def test_a_run_that_is_stopped_at_any_row_goes_on_as_if_it_had_not_been(
    tmp_path: Path, settings: dict[str, Any], row: int
) -> None:
    """What is in flight comes, what it owes is trained; what is chosen meanwhile waits
    for the resumed run. At every third row."""
    train(dqn(**settings), launch="inline", run_dir=tmp_path / "whole", source=FILE, quiet=True)
    whole = result(tmp_path / "whole")
    while True:
        folder = tmp_path / str(row)
        stopped(dqn(**settings), folder, row)
        if read_newest(folder / "checkpoints" / "policy")[2]["steps"] == 30:
            break
        resume(folder, launch="inline", quiet=True)
        assert not differences(result(folder), whole), row
        row += 3
    assert row >= 28


def test_a_checkpoint_while_something_is_owed_is_gone_on_from_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tidemill save` may write it: the resumed run trains that before anybody
    acts."""
    monkeypatch.setattr("tidemill.replay_training.trainer.TASKS", 1)
    look, images = ReplayTrainerWorker._look_round, []

    def save(worker: ReplayTrainerWorker) -> None:
        look(worker)
        if worker.limiter.owed and worker._reason is None:
            worker._save()
            images.append(tmp_path / str(worker.learner.counters.updates))
            shutil.copytree(tmp_path / "run", images[-1], ignore=UNNAMED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayTrainerWorker, "_look_round", save)
        train(
            dqn(environment=SCRIPTED, ratio="3"),
            launch="inline",
            run_dir=tmp_path / "run",
            source=FILE,
            quiet=True,
        )
    whole = result(tmp_path / "run")
    below = [image for image in images if read_newest(image / "checkpoints" / "policy")[2]["steps"] < 30]
    assert len(below) > 30
    for image in below[::5]:
        resume(image, launch="inline", quiet=True)
        assert not differences(result(image), whole), image.name


def test_without_its_memory_a_run_goes_on_with_new_episodes(tmp_path: Path) -> None:
    """And with other seeds than those of the episodes that it had."""
    walk = Gymnasium(make=f"{FILE}:Strolling")
    made = dqn(walk, steps=40, keep_buffer=False, journal=False)
    stopped(made, tmp_path / "run", 20)
    before = read_newest(tmp_path / "run" / "checkpoints" / "policy")[1]["slots"]
    resume(tmp_path / "run", launch="inline", quiet=True)
    _, arrays, facts, _ = read_newest(tmp_path / "run" / "checkpoints" / "policy")
    assert facts["limiter"]["committed"] == 40 == facts["limiter"]["started"] - facts["limiter"]["voided"]
    for slot in range(4):
        assert 0 <= before[f"{slot}/number"] < arrays["slots"][f"{slot}/number"]


def test_a_limit_that_is_raised_changes_nothing(tmp_path: Path) -> None:
    """But for what is a share of the limit: the progress that the journal notes."""
    for name, limits in {"whole": [30], "cut": [7, 8, 20, 30]}.items():
        train(
            dqn(steps=limits[0], environment=SCRIPTED),
            launch="inline",
            run_dir=tmp_path / name,
            source=FILE,
            quiet=True,
        )
        for steps in limits[1:]:
            resume(tmp_path / name, launch="inline", limits={"steps": steps}, quiet=True)
    assert differences(result(tmp_path / "cut"), result(tmp_path / "whole")) == ["journal"]


def test_iterations_change_nothing(tmp_path: Path) -> None:
    for each in (None, 7):
        made = dqn(environment=SCRIPTED, iteration_steps=each, evaluation_steps=3 if each else 0)
        train(made, launch="inline", run_dir=tmp_path / str(each), source=FILE, quiet=True)
    assert not differences(result(tmp_path / "7"), result(tmp_path / "None"))


@pytest.mark.parametrize("finish", [False, True])
def test_an_evaluation_that_was_due_when_a_run_was_killed_is_made_up_and_none_is_played_twice(
    tmp_path: Path, finish: bool
) -> None:
    """Also at the limit, that of the last iteration."""
    made = dqn(environment=SCRIPTED, iteration_steps=10, evaluation_steps=20, finish_episodes=finish, slots=2)
    save, evaluated = ReplayTrainerWorker._save, []

    def save_and_copy(worker: ReplayTrainerWorker, final: bool = False, again: bool = False) -> None:
        save(worker, final, again)
        if worker._phases.iteration_end is None:
            evaluated.append(tmp_path / f"evaluated-{worker.learner.counters.steps}")
            shutil.copytree(tmp_path / "run", evaluated[-1], ignore=UNNAMED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayTrainerWorker, "_save", save_and_copy)
        images = killed_at_every_row(made, tmp_path / "run")
    whole, told = result(tmp_path / "run"), evaluations(tmp_path / "run")
    assert len(told) >= 2 and told[0]["evaluation_return"] != told[1]["evaluation_return"]
    assert finish or [each["step"] for each in told] == [10, 20, 30]
    due = [image for image in images if "iteration_end" in read_newest(image / "checkpoints" / "policy")[2]]
    assert len(due) >= len(told) == len(evaluated)
    for image in due:
        resume(image, launch="inline", quiet=True)
        assert (evaluations(image), differences(result(image), whole)) == (told, []), image.name
    for image, own in list(zip(evaluated, told, strict=True))[:-1]:  # what it came to was not written yet
        resume(image, launch="inline", quiet=True)
        assert (evaluations(image), differences(result(image), whole)) == (
            [each for each in told if each is not own],
            [],
        ), image.name
    with pytest.raises(TidemillError, match="already reached its limit"):
        resume(tmp_path / "run", launch="inline", quiet=True)


def evaluations(folder: Path) -> list[dict[str, float]]:
    """What the iterations of a run came to."""
    names = ("step", "iteration/number", "iteration/evaluation_return", "iteration/evaluation_episodes")
    return [
        {name.rpartition("/")[2]: told[name] for name in names}
        for told in read_metrics(folder)
        if "iteration/number" in told
    ]


def test_latencies_change_nothing_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    results = []
    for number, (latency, launch) in enumerate(
        [("none", "inline"), ("random", "threads"), ("first", "processes")]
    ):
        walk = Gymnasium(make=f"{FILE}:Strolling", kwargs={"latency": latency}, threads=1)
        folder = tmp_path / latency
        stopped(
            dqn(walk, network=QNetwork(hidden=(8,))),
            folder,
            20 + number,
            "inline" if launch == "processes" else launch,
        )
        resume(folder, launch=launch, quiet=True)
        results.append(result(folder))
    assert not differences(results[0], results[1]) and not differences(results[0], results[2])


@dataclass(frozen=True, kw_only=True)
class Unseeded(QNetwork):
    """Whose policy cannot be seeded anew."""

    def build(self, spaces: Spaces, seed: int) -> Policy:
        policy = super().build(spaces, seed)
        policy.reseed = partial(Policy.reseed, policy)  # type: ignore[method-assign]
        return policy


def test_a_policy_that_cannot_be_seeded_anew_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match="QPolicy has no reseed"):
        train(
            dqn(network=Unseeded()),
            launch="inline",
            run_dir=tmp_path / "run",
            source=Path(__file__),
            quiet=True,
        )
    assert not (tmp_path / "run").exists()


def test_an_environment_that_does_not_repeat_itself_is_named_and_its_episode_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    walk = Gymnasium(make=f"{FILE}:Counting")
    stopped(dqn(walk, slots=2, steps=30), tmp_path / "run", 20)
    path, arrays, _, _ = read_newest(tmp_path / "run" / "checkpoints" / "policy")
    assert min(int(arrays["slots"][f"{slot}/steps"]) for slot in (0, 1)) > 2
    before = {slot: int(np.load(path / "buffer" / "heads.npy")[slot]) for slot in (0, 1)}
    resume(tmp_path / "run", launch="inline")
    path, _, facts, _ = read_newest(tmp_path / "run" / "checkpoints" / "policy")
    said = capfd.readouterr().err
    for slot in (0, 1):
        assert re.search(
            rf"slot {slot}: its open episode of \d+ steps was cut .* another observation \(obs\).* is not "
            rf"deterministic",
            said,
        )
        done = np.load(path / "buffer" / "row.done.npy")[slot]
        span = np.load(path / "buffer" / "span.npy").reshape(2, -1)[slot]
        assert not done[before[slot] - 1] and span[before[slot] - 2] == 1 and span[before[slot] - 1] == 0
    n = facts["limiter"]
    assert n["committed"] == 30 == n["started"] - n["voided"]


def test_an_episode_that_is_too_long_is_cut_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.replay_training.open_episodes.LONGEST", 2)
    monkeypatch.setattr("tidemill.replay_training.exact.LONGEST", 2)
    stopped(dqn(slots=2), tmp_path / "run", 20)
    resume(tmp_path / "run", launch="inline")
    assert re.search(
        r"slot 0: its open episode of \d+ steps was cut after its last stored one: it had more than 2 steps",
        capfd.readouterr().err,
    )
