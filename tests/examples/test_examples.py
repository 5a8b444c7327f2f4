"""The examples train: each for a few thousand steps in one thread."""

import json
from math import isfinite
from pathlib import Path

import numpy as np
import pytest

import tidemill
from tidemill.algorithms.minibatches import gae_of, gather
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.user_code_loading import load_attribute
from tidemill.run.folder import RunFolder
from tidemill.streams import sources
from tidemill.workers import evaluation

EXAMPLES = Path(__file__).parents[2] / "examples"
SPACES = Spaces(Box((4,), "float32"), Discrete(2))


def run(name, folder, steps, function="experiment", lanes=None, **limits):
    file = EXAMPLES / name
    experiment = load_attribute(f"{file}:{function}", "experiment")()
    experiment = experiment.replace(limits=experiment.limits.replace(steps=steps, **limits))
    if lanes is not None:
        actor = experiment.workers["actor"].replace(lanes=lanes)
        experiment = experiment.replace(workers={**experiment.workers, "actor": actor})
    result = tidemill.train(experiment, launch="inline", run_dir=folder, source=file, quiet=True)
    assert result.summary["status"] == "completed"
    return result.summary, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


LEARNT = {  # by how much the return rises (seen: by a third more than that, at least), in how
    # many steps, and an observation
    "own_environment.py": (0.3, 12_000, np.zeros(3, np.float32)),
    "own_network.py": (20, 32_000, np.zeros(4, np.float32)),
    "own_algorithm.py": (20, 24_000, np.zeros(4, np.float32)),
    "policy_workers.py": (20, 40_000, np.zeros(4, np.float32)),
    "masked_cartpole.py": (20, 40_000, np.zeros(2, np.float32)),
    "repeat_previous.py": (0.05, 40_000, 3),
    "impala.py": (20, 28_000, np.zeros(4, np.float32)),
    "hybrid_actions.py": (
        8,
        40_000,
        {"lie": np.zeros(3, np.float32), "action_mask": np.ones(3, np.int8)},
    ),
}
OTHERS = [  # file, function, lanes in place of the example's, steps
    ("masked_cartpole.py", "feed_forward", None, 4_000),
    ("repeat_previous.py", "feed_forward", None, 4_000),
    ("impala.py", "served", None, 4_000),
]
OTHERS += [("simple_spread.py", function, 8, 600) for function in ("experiment", "separate", "centralised")]


@pytest.mark.parametrize("name", LEARNT)
def test_an_example_runs_to_its_limit_learns_and_can_be_played(name, tmp_path):
    gain, steps, observation = LEARNT[name]
    summary, metrics = run(name, tmp_path / "run", steps, mean_return=None, window=300)
    assert steps <= summary["env_steps"] < steps + 9_000  # a batch more at most
    assert not wrong(metrics)
    returns = [line["return/mean"] for line in metrics if "return/mean" in line]
    assert summary["mean_return"] > returns[0] + gain
    policy = tidemill.load(tmp_path / "run")
    action = policy.act(observation)
    assert (action["club"] if isinstance(action, dict) else action) in range(4)


def test_a_slow_environment_is_trained_on_in_iterations_that_a_resumed_run_goes_on_with(tmp_path):
    file = EXAMPLES / "slow_environment.py"
    runner = load_attribute(f"{file}:runner", "runner")
    for iterations in (2, 3):
        made = runner(iterations)
        result = made.run(tmp_path / "run", source=file, quiet=True, resume=iterations == 3)
        assert result.summary["status"] == "completed"
        assert [iteration["step"] for iteration in made.iterations] == [
            1_000 * number for number in range(1, iterations + 1)
        ]
        assert all(iteration["iteration/evaluation_steps"] == 100 for iteration in made.iterations)
    returns = [iteration["iteration/training_return"] for iteration in made.iterations]
    assert returns[-1] > returns[0]
    assert tidemill.load(tmp_path / "run").act(np.array([0, 1], np.float32)) in range(3)


def test_images_are_augmented_on_their_way(tmp_path):
    summary, metrics = run("augmentation.py", tmp_path / "run", 4_000, mean_return=None)
    assert summary["env_steps"] >= 4_000 and summary["dropped"] == 0
    assert metrics[-1]["lag/mean"] > 0  # through two streams
    picture = np.zeros((1, 40, 40), np.uint8)
    assert tidemill.load(tmp_path / "run").act(picture) in range(3)


def test_the_population_is_compared_and_its_members_can_be_played(tmp_path):
    file = EXAMPLES / "population.py"
    experiment, alone = (load_attribute(f"{file}:{name}", "experiment")() for name in ("experiment", "alone"))
    assert {name: alone.workers.get(name) for name in experiment.workers} == {
        **experiment.workers,
        "population": None,
    }
    workers = {**experiment.workers, "population": experiment.workers["population"].replace(steps=1_000)}
    limits = tidemill.Limits(until="population/best > 0", steps=200_000)
    result = tidemill.train(
        experiment.replace(workers=workers, limits=limits),
        launch="inline",
        run_dir=tmp_path / "run",
        source=file,
        quiet=True,
    )
    assert result.summary["reason"] == "population/best > 0"
    for member in experiment.policies:
        policy = tidemill.load(tmp_path / "run", policy=member)
        assert policy.act(np.zeros(4, np.float32)) in range(2)


@pytest.fixture
def no_waiting(monkeypatch):
    """Evaluations look for versions with each poll: else a machine that is quick enough
    trains to the end before any has looked again."""
    monkeypatch.setattr(evaluation, "LOOK", 0.0)
    monkeypatch.setattr(sources, "LOOK", 0.0)


@pytest.mark.usefixtures("no_waiting")
def test_the_curriculum_s_stages_end_by_evaluation_and_the_best_version_is_of_the_last_one(tmp_path):
    file = EXAMPLES / "curriculum.py"
    experiment = load_attribute(f"{file}:experiment", "experiment")()
    stages = [
        stage.replace(until="evaluation/return >= 20" if stage.until else "")
        for stage in experiment.curriculum
    ]
    often = experiment.workers["trainer"].replace(database_seconds=1e-9)
    short = experiment.workers["judge"].replace(max_episode_steps=30)
    workers = {**experiment.workers, "trainer": often, "judge": short}
    experiment = experiment.replace(
        curriculum=tuple(stages), workers=workers, limits=tidemill.Limits(steps=60_000)
    )
    result = tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", source=file, quiet=True)
    assert result.summary["stage"] == "3 of 3"
    (best,) = (v for v in RunFolder.open(tmp_path / "run").database().versions("policy") if "best" in v.tags)
    assert best.means["evaluation/stage"].mean == 3


@pytest.mark.parametrize(("name", "function", "lanes", "steps"), OTHERS)
def test_the_other_experiments_of_examples_train(name, function, lanes, steps, tmp_path):
    summary, metrics = run(name, tmp_path / "run", steps, function, lanes)
    assert summary["updates"] >= 2
    assert not wrong(metrics)


def wrong(metrics):
    return {
        key: value
        for line in metrics
        for key, value in line.items()
        if isinstance(value, float) and not isfinite(value)
    }


@pytest.mark.usefixtures("no_waiting")
def test_self_play_meets_the_past_and_both_sides_are_rated_and_checked(tmp_path):
    file = EXAMPLES / "self_play.py"
    experiment = load_attribute(f"{file}:experiment", "experiment")()
    changes = {"rating": {"games": 20}, "check": {"games": 20}, "trainer": {"database_seconds": 1e-9}}
    changes |= {"learn-first": {"lanes": 8}, "learn-second": {"lanes": 8}}
    workers = {name: worker.replace(**changes.get(name, {})) for name, worker in experiment.workers.items()}
    limits = experiment.limits.replace(steps=40_000, until="evaluation/version >= 1 and chance/version >= 1")
    result = tidemill.train(
        experiment.replace(workers=workers, limits=limits),
        launch="inline",
        run_dir=tmp_path / "run",
        source=file,
        quiet=True,
    )
    assert result.summary["reason"] == limits.until
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ratings, chances = (
        [line for line in metrics if name in line] for name in ("evaluation/elo", "chance/win_rate")
    )
    assert ratings[0]["evaluation/elo"] == 1000 and len(ratings) > 1 and len(chances) > 1
    assert {line["evaluation/games"] for line in ratings} == {20} and {
        line["chance/games"] for line in chances
    } == {20}
    assert all(0 < line["chance/win_rate"] < 1 and "chance/elo" not in line for line in chances)
    policy = tidemill.load(tmp_path / "run")
    mask = np.array([0, 0, 0, 1, 0, 0, 0], np.int8)
    assert policy.act({"observation": np.zeros((6, 7, 2), np.int8), "action_mask": mask}) == 3


def test_the_algorithm_goes_on_from_its_moments():
    config = load_attribute(f"{EXAMPLES / 'own_algorithm.py'}:A2C", "algorithm")()
    one, other = (config.build(tidemill.ActorCritic().build(SPACES, 1), 1) for _ in range(2))
    sample = rows()
    one.update([sample], 0.0)
    other.policy.load(one.policy.parameters(), 1)
    other.load_state(one.state())
    for learner in (one, other):
        learner.update([sample], 0.0)
    for name, array in one.policy.parameters().items():
        np.testing.assert_array_equal(array, other.policy.parameters()[name])


def test_the_algorithm_s_returns_are_those_of_gae_with_lambda_1():
    sample = rows()
    config = load_attribute(f"{EXAMPLES / 'own_algorithm.py'}:A2C", "algorithm")()
    learner = config.build(tidemill.ActorCritic().build(SPACES, 1), 1)
    np.testing.assert_allclose(
        learner.returns(sample)[sample.trained()],
        gather([sample], gae_of(config.gamma, 1.0)).target,
        rtol=1e-5,
    )


def rows():
    """7 rows of 3 seats: one goes on, one ends at row 3, one is cut at row 4."""
    rng = np.random.default_rng(5)
    shape = (7, 3)
    done, truncated = np.zeros(shape, bool), np.zeros(shape, bool)
    done[3, 1] = truncated[4, 2] = True
    sample = tidemill.Sample(
        obs=rng.standard_normal((*shape, 4)).astype(np.float32),
        action=rng.integers(0, 2, shape),
        log_prob=np.full(shape, -0.7, np.float32),
        value=np.where(done, 0, rng.standard_normal(shape)).astype(np.float32),
        reward=np.where(done | truncated, 0, rng.standard_normal(shape)).astype(np.float32),
        version=np.where(done, -1, 0),
        done=done,
        truncated=truncated,
    )
    sample.burn_in, sample.bootstrap = 0, 1
    return sample


def test_a_worker_of_ones_own_measures_each_version_that_it_sees(tmp_path):
    summary, metrics = run("own_worker.py", tmp_path / "run", 20_000, mean_return=None)
    norms = [line["weights/norm"] for line in metrics if "weights/norm" in line]
    assert summary["updates"] + 1 >= len(norms) > 2 and len(set(norms)) == len(norms)
    assert all(1 < norm < 100 for norm in norms)
