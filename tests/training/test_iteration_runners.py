"""Runners: iterations of training and evaluation, of one experiment that any launcher
runs."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill import (
    PPO,
    AsyncTrainRunner,
    Gymnasium,
    Limits,
    ReplayActors,
    ReplayTrainer,
    Slots,
    TidemillError,
    Trainer,
    TrainRunner,
)
from tidemill.api.algorithm import Sample
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError
from tidemill.core.step_deadlines import FIRST
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.limiter import parse_ratio
from tidemill.replay_training import iteration_evaluation
from tidemill.replay_training.policy_lag import PolicyLag
from tidemill.replay_training.trainer import ReplayTrainerWorker
from tidemill.store.checkpoint import checkpoints, read_checkpoint, read_newest
from tidemill.training.iteration_runners import read_iterations
from tidemill.training.replay_slots import with_slots
from tidemill.training.train import resume, train
from tidemill.workers import checkpoint_pace

FILE = Path(__file__).parents[1] / "run" / "limited.py"
limited = load_file(FILE, "test")


def plain(ratio: str | None = "1") -> Any:
    """An experiment whose actors say nothing of slots: lanes in the actor's own
    thread."""
    made = limited.experiment(threads=0, ratio=ratio, checkpoints=100)
    actor = made.workers["actor"].replace(ring=1, lanes=4)
    return made.replace(workers={**made.workers, "actor": actor})


def weights(folder: Path) -> bytes:
    data: bytes = read_newest(folder / "checkpoints" / "policy")[1]["policy"]["w"].tobytes()
    return data


@pytest.fixture
def no_regular_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is due between two iterations, however long they take: where no update came
    since, it would be written in the place of the iteration's."""
    monkeypatch.setattr(checkpoint_pace, "LEAST", 3600.0)


@pytest.mark.usefixtures("no_regular_checkpoints")
def test_each_iteration_trains_evaluates_saves_and_tells(tmp_path: Path) -> None:
    runner = AsyncTrainRunner(
        plain(None), num_slots=3, ratio="1/2", num_iterations=3, training_steps=40, evaluation_steps=30
    )
    result = runner.run(tmp_path / "run", source=FILE, quiet=True)
    assert result.summary["env_steps"] == 120
    assert [iteration["step"] for iteration in runner.iterations] == [40, 80, 120]
    assert [iteration["iteration/number"] for iteration in runner.iterations] == [1, 2, 3]
    saved = {
        facts["steps"]: facts
        for facts in (
            read_checkpoint(path)[1] for path in checkpoints(tmp_path / "run" / "checkpoints" / "policy")
        )
    }
    for iteration in runner.iterations:
        n = saved[iteration["step"]]["limiter"]
        assert n["committed"] == iteration["step"] == n["started"] - n["voided"]
        assert n["tasks"] == iteration["iteration/updates"] == (n["committed"] - n["waived"]) // 2
        assert iteration["iteration/evaluation_steps"] == 30
        assert (
            iteration["iteration/evaluation_episodes"] >= 2 and iteration["iteration/evaluation_return"] < 0
        )
        assert iteration["iteration/training_episodes"] >= 1  # of at most 12 steps; others are open


def test_a_run_that_raises_leaves_its_iterations_and_can_be_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_slots": 1, "exact": True, "training_steps": 20}
    trainer = plain().workers["trainer"]
    failing = plain().replace(
        workers={**plain().workers, "trainer": trainer.replace(algorithm=limited.Mixing(fails=25))}
    )
    runner = AsyncTrainRunner(failing, num_iterations=3, **settings)
    for again in (False, True):  # at the same update each time: what fails are the experiment's own settings
        with pytest.raises(TidemillError, match="the update failed"):
            runner.run(None if again else tmp_path / "run", source=FILE, quiet=True, resume=again)
        assert [iteration["step"] for iteration in runner.iterations] == [20]
    short = AsyncTrainRunner(plain(), num_iterations=1, **settings)
    short.run(tmp_path / "short", source=FILE, quiet=True)
    further = AsyncTrainRunner(plain(), num_iterations=3, **settings)
    further.run(tmp_path / "short", quiet=True, resume=True)
    assert [iteration["step"] for iteration in further.iterations] == [20, 40, 60] and read_iterations(
        tmp_path / "short"
    ) == further.iterations


def test_a_runner_that_did_not_run_has_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not run yet"):
        AsyncTrainRunner(plain(), num_slots=1).run(quiet=True, resume=True)
    runner = AsyncTrainRunner(plain(), num_slots=1)
    with pytest.raises(TidemillError):
        runner.run(tmp_path / "nothing", quiet=True, resume=True)
    assert runner.iterations == []


def test_evaluation_changes_nothing_in_training(tmp_path: Path) -> None:
    for evaluation in (0, 25):
        runner = AsyncTrainRunner(
            plain(), num_slots=3, exact=True, training_steps=40, evaluation_steps=evaluation
        )
        runner.run(tmp_path / str(evaluation), source=FILE, quiet=True)
    assert weights(tmp_path / "0") == weights(tmp_path / "25")


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"fails": [21, 22, 23]}, "the first fault was: a step is lost: .*step 21"),
        ({"hangs": [21]}, r"it answered no step for 600 s"),
    ],
)
def test_an_evaluation_whose_environment_fails_is_given_up_and_training_goes_on(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kwargs: dict[str, Any],
    why: str,
) -> None:
    walk = load_attribute(f"{FILE}:Walk", "make")
    walk.steps = 0

    def now() -> float:  # when it hangs, it has done so for long
        return awake() + 1000.0 * ("hangs" in kwargs and walk.steps >= 21)

    monkeypatch.setattr(iteration_evaluation, "awake", now)
    monkeypatch.setattr("tidemill.envs.parallel_build.LEAVE_SECONDS", 0.0)  # it hangs for ever
    environment = Gymnasium(make=f"{FILE}:Walk", kwargs=kwargs, threads=1)
    slots = Slots(environment=environment, backoff_s=0.2, failures=3)
    made = limited.experiment(environment=slots, slots=1, max_no_progress_s=600.0)
    runner = AsyncTrainRunner(made, num_slots=1, num_iterations=2, training_steps=20, evaluation_steps=10)
    assert runner.run(tmp_path / "run", source=FILE).summary["env_steps"] == 40
    first, second = runner.iterations
    assert "iteration/evaluation_steps" not in first and second["iteration/evaluation_steps"] == 10
    said = capfd.readouterr()
    assert re.search(f"the evaluation of iteration 1 was given up; {why}", said.out + said.err)


@pytest.mark.usefixtures("no_regular_checkpoints")
@pytest.mark.parametrize(
    ("settings", "launch"),
    [
        ({"num_slots": 4}, "threads"),
        ({"num_slots": 4}, "inline"),
        ({"num_slots": 3, "exact": True}, "threads"),
        ({"num_slots": 1, "exact": True}, "inline"),
        ({"num_slots": 5, "exact": True}, "inline"),
    ],
)
def test_phases_can_end_with_episodes(tmp_path: Path, settings: dict[str, Any], launch: str) -> None:
    """No episode is open then, none is cut for it, and the steps that this takes more are
    counted, and trained."""
    made = limited.experiment(latency="random", ratio="3/2", checkpoints=100)
    runner = AsyncTrainRunner(
        made,
        num_iterations=4,
        training_steps=60,
        evaluation_steps=5,
        finish_episodes=True,
        launch=launch,
        **settings,
    )
    runner.run(tmp_path / "run", source=FILE, quiet=True)
    assert len(runner.iterations) == 4
    assert any(iteration["iteration/overshoot"] > 0 for iteration in runner.iterations)
    saved = {
        facts["steps"]: path
        for path, facts in (
            (path, read_checkpoint(path)[1]) for path in checkpoints(tmp_path / "run/checkpoints/policy")
        )
    }
    for iteration in runner.iterations:
        steps, path = iteration["step"], saved[iteration["step"]]
        assert steps == 60 * iteration["iteration/number"] + iteration["iteration/overshoot"]
        assert 0 <= iteration["iteration/overshoot"] < 12 * settings["num_slots"]
        n = read_checkpoint(path)[1]["limiter"]
        assert (
            n["committed"] == steps == n["started"] and n["tasks"] == (n["committed"] - n["waived"]) * 3 // 2
        )
        assert (np.load(path / "buffer" / "age.npy") <= 0).all()
        assert_every_episode_ended(path / "buffer")


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_ends_with_episodes_does_so_at_any_limit(tmp_path: Path, exact: bool) -> None:
    """Also where the last phase has fewer steps than there are slots, and some of these
    never get one."""
    for limit in range(41, 60, 2):
        made = limited.experiment(
            slots=5, steps=limit, threads=0, exact=exact, iteration_steps=20, finish_episodes=True, ratio="1"
        )
        train(made, launch="inline", run_dir=tmp_path / str(limit), source=FILE, quiet=True)
        path, _, facts, _ = read_newest(tmp_path / str(limit) / "checkpoints" / "policy")
        assert limit <= facts["steps"] == facts["limiter"]["committed"] == facts["limiter"]["started"]
        assert (np.load(path / "buffer" / "age.npy") <= 0).all()
        assert_every_episode_ended(path / "buffer")


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_whose_updates_end_while_episodes_are_open_ends(tmp_path: Path, exact: bool) -> None:
    for updates in range(20, 34):
        made = limited.experiment(
            slots=5, threads=0, exact=exact, iteration_steps=20, finish_episodes=True, ratio="1"
        )
        made = made.replace(limits=Limits(updates=updates, seconds=60))
        train(made, launch="inline", run_dir=tmp_path / str(updates), source=FILE, quiet=True)
        assert read_newest(tmp_path / str(updates) / "checkpoints" / "policy")[2]["updates"] == updates


def assert_every_episode_ended(memory: Path) -> None:
    """In each lane an episode's first row follows upon an end, or upon the limit of 12
    steps."""
    heads, rows, done = (np.load(memory / f"{name}.npy") for name in ("heads", "row.obs", "row.done"))
    for lane, head in enumerate(heads):
        step = rows[lane, :head, 1]
        for before in (step[1:] == 0).nonzero()[0]:
            assert done[lane, before] or step[before] == 12


def test_a_resumed_run_ends_the_iteration_that_it_was_finishing(tmp_path: Path) -> None:
    """Its open episodes are cut, so that nothing is left to wait for."""
    made = limited.experiment(slots=3, threads=0, ratio="1", iteration_steps=30, finish_episodes=True)
    folder = tmp_path / "run"
    grant = ReplayTrainerWorker._grant

    def stop(worker: ReplayTrainerWorker) -> int:
        if worker._phases.finishing:
            worker.exit("stopped")
        return grant(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayTrainerWorker, "_grant", stop)
        train(made, launch="inline", run_dir=folder, source=FILE, quiet=True)
    assert read_newest(folder / "checkpoints" / "policy")[2]["iteration_end"] == 30
    resume(folder, launch="inline", quiet=True)
    told = [record for record in read_metrics(folder) if "iteration/number" in record]
    assert [(record["iteration/number"], record["step"]) for record in told[:1]] == [(1, 30)] and told[1][
        "step"
    ] >= 60


def test_an_evaluation_that_was_due_when_a_run_was_stopped_is_played_by_the_resumed_one(
    tmp_path: Path,
) -> None:
    made = limited.experiment(slots=3, threads=0, steps=20, iteration_steps=20, evaluation_steps=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ReplayTrainerWorker, "_end_iteration", lambda worker: iter([worker.exit("stopped")][1:])
        )
        train(made, launch="inline", run_dir=tmp_path / "run", source=FILE, quiet=True)
    assert not [record for record in read_metrics(tmp_path / "run") if "iteration/number" in record]
    resume(tmp_path / "run", launch="inline", quiet=True)
    assert [
        record["step"] for record in read_metrics(tmp_path / "run") if "iteration/evaluation_steps" in record
    ] == [20]
    with pytest.raises(TidemillError, match="already reached its limit of 20 steps"):
        resume(tmp_path / "run", launch="inline", quiet=True)


def test_episodes_can_be_awaited_only_where_lanes_begin_alone(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match="finish_episodes = True needs targets of one lane"):
        train(
            limited.experiment(lanes=2, threads=0, finish_episodes=True),
            launch="inline",
            run_dir=tmp_path / "run",
            source=FILE,
            quiet=True,
        )


def test_steps_of_an_evaluation_that_are_lost_are_played_again(tmp_path: Path) -> None:
    walk = Gymnasium(make=f"{FILE}:Walk", kwargs={"fails": [23, 25]}, threads=0)
    module = load_attribute(f"{FILE}:Walk", "make")
    module.steps = 0
    made = limited.experiment(environment=Slots(environment=walk, backoff_s=0.001), slots=1)
    runner = AsyncTrainRunner(made, num_slots=1, num_iterations=1, training_steps=20, evaluation_steps=10)
    runner.run(tmp_path / "run", source=FILE, quiet=True)
    assert runner.iterations[0]["iteration/evaluation_steps"] == 10 and module.steps == 20 + 10 + 2


def test_a_regular_checkpoint_at_the_end_of_an_iteration_does_not_skip_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_pace, "LEAST", 0.0)
    made = limited.experiment(
        latency="constant", checkpoint_seconds=0.001, checkpoint_share=1, checkpoints=1000
    )
    runner = AsyncTrainRunner(made, num_slots=3, num_iterations=6, training_steps=8)
    runner.run(tmp_path / "run", source=FILE, quiet=True)
    assert [iteration["iteration/number"] for iteration in runner.iterations] == list(range(1, 7))


def test_the_synchronous_runner_is_the_exact_one_with_a_slot(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_iterations": 2, "training_steps": 40, "evaluation_steps": 10}
    TrainRunner(plain(), **settings).run(tmp_path / "plain", source=FILE, quiet=True)
    AsyncTrainRunner(plain(), num_slots=1, exact=True, **settings).run(
        tmp_path / "threads", source=FILE, quiet=True
    )
    AsyncTrainRunner(plain(), num_slots=1, exact=True, num_iterations=1, training_steps=80).run(
        tmp_path / "one", source=FILE, quiet=True
    )
    assert weights(tmp_path / "plain") == weights(tmp_path / "threads") == weights(tmp_path / "one")


def test_slots_are_settings_of_the_experiment() -> None:
    made = with_slots(plain(), 5, "3/2")
    actor, trainer = made.workers["actor"], made.workers["trainer"]
    assert isinstance(actor, ReplayActors) and isinstance(trainer, ReplayTrainer)
    assert (actor.count, actor.lanes, actor.ring, trainer.ratio) == (1, 1, 5, "3/2")
    assert isinstance(actor.environment, Slots) and isinstance(actor.environment.environment, Gymnasium)
    assert actor.environment.environment.threads == 1
    # one that hangs is found
    assert actor.environment.deadline_s is None and trainer.max_no_progress_s > FIRST
    assert with_slots(made, 5, "3/2") == made
    assert with_slots(plain()) == plain()


def test_in_threads_the_actor_of_slots_and_its_trainer_take_turns_unless_a_slack_lets_them_overlap() -> None:
    assert AsyncTrainRunner(plain(), num_slots=5).experiment.together == ("actor", "trainer")
    assert AsyncTrainRunner(plain(), num_slots=5, slack=10).experiment.together == ()
    assert AsyncTrainRunner(plain(), num_slots=5, launch="processes").experiment.together == ()
    said = plain().replace(together=("trainer", "actor"))
    assert AsyncTrainRunner(said, num_slots=5, slack=10).experiment.together == ("trainer", "actor")


def test_a_ratio_is_said_in_one_place_and_another_one_in_the_other_is_refused() -> None:
    for where, ratio in ((plain(None), "1/4"), (plain("1/4"), None), (plain("1/4"), "1/4")):
        made = AsyncTrainRunner(where, num_slots=2, ratio=ratio).experiment
        made.check()
        assert parse_ratio(made.workers["trainer"].ratio) == Fraction(1, 4)
    with pytest.raises(
        ConfigError,
        match="ratio = '1/2', and the experiment's trainer has ratio = '1/4': say it in one of both places",
    ):
        AsyncTrainRunner(plain("1/4"), num_slots=2, ratio="1/2")
    with pytest.raises(ConfigError, match="ratio = '2/8', and the experiment's trainer has ratio = '1/4'"):
        AsyncTrainRunner(plain("1/4"), num_slots=2, ratio="2/8")  # two at once
    with pytest.raises(
        ConfigError,
        match=r'nothing says how often to train on it; set ratio, .* like "1/4" or 1 \(ReplayTrainer.ratio, '
        r"--ratio, or",
    ):
        AsyncTrainRunner(plain(None), num_slots=2).run(quiet=True)


def test_what_a_runner_is_not_told_stays_as_the_experiment_has_it() -> None:
    made = limited.experiment(ratio="8", slack=7, iteration_steps=40, evaluation_steps=9)
    trainer = AsyncTrainRunner(made, num_slots=2).experiment.workers["trainer"]
    assert (trainer.ratio, trainer.slack, trainer.iteration_steps, trainer.evaluation_steps) == (
        "8",
        7,
        40,
        9,
    )
    assert AsyncTrainRunner(limited.experiment(exact=True), num_slots=2).experiment.workers["trainer"].exact
    plain = TrainRunner(made).experiment.workers["trainer"]
    assert (plain.exact, plain.slack, plain.iteration_steps) == (True, None, 40)


def test_what_cannot_be_is_refused() -> None:
    for slots, ratio, text in ((0, "1", "slots = 0"), (3, "0", "ratio"), (3, "1.5", 'ratio = "3/2"')):
        with pytest.raises(ConfigError, match=text):
            with_slots(plain(), slots, ratio)
    on_policy = plain().replace(workers={**plain().workers, "trainer": Trainer(algorithm=PPO())})
    with pytest.raises(
        ConfigError, match="trainer is a Trainer: PPO learns from what its own policy has just done"
    ):
        with_slots(on_policy, 3, "1")
    with pytest.raises(ConfigError, match="training_steps"):
        AsyncTrainRunner(plain(), num_slots=2, num_iterations=3)
    with pytest.raises(ConfigError, match="evaluation_steps"):
        AsyncTrainRunner(plain(), num_slots=2, evaluation_steps=3)


def test_the_metrics_of_the_limiter_are_told(tmp_path: Path) -> None:
    AsyncTrainRunner(plain(), num_slots=3).run(tmp_path / "run", source=FILE, quiet=True)
    last: dict[str, float] = {}
    for record in read_metrics(tmp_path / "run"):  # nothing may have been stored since the one before
        last |= record
    for name in (
        "debt",
        "debt_min",
        "debt_max",
        "training_waited",
        "committed",
        "tasks",
        "age_versions",
        "age_seconds",
    ):
        assert last[f"limiter/{name}"] >= 0


def test_how_old_the_policy_was_that_acted_is_known_when_its_step_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("tidemill.replay_training.policy_lag.monotonic", lambda: now)
    samples = [Sample(version=np.array([[version]])) for version in (0, 2, -1)]

    class Source:
        def consume(self) -> Sample | None:
            return samples.pop(0) if samples else None

    ages = PolicyLag(Source())  # type: ignore[arg-type]
    for version in range(4):
        ages.publish(version)
        now += 1.0
    while ages.consume() is not None:
        pass
    # 3 and 1 behind version 3, 4 s and 2 s old
    assert ages.take() == {"limiter/age_versions": 2.0, "limiter/age_seconds": 3.0}
    assert ages.take() == {}
