"""What a run warns of by itself, from numbers that are written out and from real runs."""

import json
import re
from math import nan
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import tidemill
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.training_warnings import LONG, WINDOW, TrainingWarnings

ALGORITHM = {"clip": 0.2, "entropy_coefficient": 0.0}
PPO = {"workers": {"trainer": {"policy": "policy", "algorithm": ALGORITHM}, "actor": {}}}
SOUND = {
    "explained_variance": 0.6,
    "kl": 0.01,
    "clip_fraction": 0.15,
    "entropy": 0.5,
    "loss/value": 0.2,
    "return/mean": 50.0,
    "learning_rate": 3e-4,
    "episodes": 300.0,
}
FIRST = {**SOUND, "explained_variance": 0.0, "entropy": 0.69, "return/mean": 20.0}


def told(*parts, config=PPO, whole=True, first=FIRST):
    """Return what is told of a first record and then so many of each kind."""
    warnings = TrainingWarnings(config, whole)
    records = [first] + [{**SOUND, **changed} for count, changed in parts for _ in range(count)]
    return [
        each for number, record in enumerate(records) for each in warnings.add({"update": number, **record})
    ]


def test_a_run_that_learns_gives_no_warning():
    assert not told((500, {}))


def test_what_is_solved_gives_none():
    # CartPole at 500: values explain nothing of what is left, and the rate has fallen
    end = {"explained_variance": -0.2, "kl": 1e-7, "clip_fraction": 0.0, "entropy": 0.3, "return/mean": 500.0}
    assert not told((30, {}), (300, end))
    assert not told((30, {}), (300, {**end, "entropy": 0.0, "kl": 0.0}))
    # so soon that values never came to explain anything
    climbing = [(1, {"explained_variance": -1.0, "return/mean": 20.0 + 16 * n}) for n in range(30)]
    assert not told(*climbing, (300, {**end, "return/mean": 480.0}))
    ((what, _),) = told(*climbing, (300, {**end, "return/mean": 460.0}))
    assert what.startswith("values explain nothing")
    # what began with a few bad episodes has risen by nothing
    flat = [(1, {**end, "return/mean": -180.0 + n % 5}) for n in range(100)]
    ((what, _),) = told(*flat, first={**FIRST, "return/mean": -450.0})
    assert what.startswith("values explain nothing")


@pytest.mark.parametrize(
    ("changed", "count", "what", "cure"),
    [
        (
            {"clip_fraction": 0.51},
            WINDOW - 1,
            "51% of rows are clipped (clip_fraction): updates go too far",
            "--set workers.trainer.algorithm.learning_rate=3e-05, fewer epochs, or larger minibatches",
        ),
        (
            {"clip_fraction": 0.999, "kl": 1e-6, "entropy": 0.69},
            WINDOW - 1,
            "100% of rows are clipped (clip_fraction): clip = 0.2 is so narrow that hardly a step counts",
            "--set workers.trainer.algorithm.clip=0.2 is usual",
        ),
        (
            {"kl": 1e-9, "entropy": 0.69, "learning_rate": 1e-7},
            2 * WINDOW - 1,
            "the policy does not change (kl 1e-09, entropy as at the start): the learning rate, 1e-07, is "
            "too small, or rewards do not tell one action from another",
            "--set workers.trainer.algorithm.learning_rate=0.0003",
        ),
        (
            {"kl": 0.0, "entropy": 0.0, "return/mean": 9.4, "clip_fraction": 0.0},
            2 * WINDOW - 1,
            "the policy always does the same (entropy and kl are 0), and gains no more than at the start: a "
            "step went too far",
            "begin anew with --set workers.trainer.algorithm.learning_rate=3e-05, or --set "
            "workers.trainer.algorithm.entropy_coefficient=0.01",
        ),
        (
            {"explained_variance": 0.01, "return/mean": 19.0},
            LONG - 1,
            "values explain nothing of the returns (explained_variance 0.01 after 60 records, never above "
            "0.01): they learn too slowly, or observations do not tell how well it goes",
            "a larger --set workers.trainer.algorithm.learning_rate or value_coefficient, more epochs, or, "
            "where they are not yet normalised, --set policies.policy.normalise_observations=true",
        ),
        (
            {"return/mean": 20.0},
            LONG - 1,
            "every episode so far had the same return, 20, so that there is nothing to learn from",
            "rewards that random actions hardly ever find need shaping, or more exploration (--set "
            "workers.trainer.algorithm.entropy_coefficient=0.01); those that never differ are a mistake of "
            "the environment (tidemill check-env)",
        ),
    ],
)
def test_each_thing_is_told_once_it_has_been_so_for_a_while_and_never_again(changed, count, what, cure):
    assert not told((count - 1, changed))
    assert told((count, changed)) == [(what, cure)]
    assert told((count, changed), (50, {}), (200, changed)) == [(what, cure)]


def test_more_exploration_is_by_a_setting_that_the_algorithm_has():
    algorithm = {"kind": "DQN", "epsilon": {"kind": "LinearSchedule", "start": 1, "end": 0}}
    config = {"workers": {**PPO["workers"], "trainer": {**PPO["workers"]["trainer"], "algorithm": algorithm}}}
    ((_, cure),) = told((LONG - 1, {"return/mean": 20.0}), config=config)
    assert "(--set workers.trainer.algorithm.epsilon=0.3)" in cure


def test_few_episodes_may_be_alike():
    assert not told((200, {"return/mean": 20.0, "episodes": 299.0}))


def test_what_one_wins_another_loses_and_the_mean_stays_0():
    actor = {"environment": {"kind": "PettingZoo", "make": "pettingzoo.classic.tictactoe_v3"}}
    config = {"workers": {**PPO["workers"], "actor": actor}}
    assert not told((200, {"return/mean": 20.0}), config=config)


def test_a_loss_explodes_only_where_returns_do_not_grow():
    before, after = (WINDOW, {"return/mean": 20.0}), {"loss/value": 50.0}
    ((what, cure),) = told(before, (WINDOW, {**after, "return/mean": 19.0}))
    assert what == "the values' loss explodes (0.2 at first, 50 now), and returns do not grow"
    assert cure.startswith("--set workers.trainer.algorithm.learning_rate=3e-05")
    assert not told(before, (WINDOW, {**after, "return/mean": 90.0}))
    assert not told(before, (WINDOW, {"loss/value": 19.0, "return/mean": 19.0}))


def test_metrics_that_are_not_there_are_nothing_odd():
    assert not told((200, dict.fromkeys(SOUND, nan)), first=dict.fromkeys(SOUND, nan))
    warnings = TrainingWarnings(PPO)
    assert not [each for _ in range(200) for each in warnings.add({"update": 1.0, "loss/value": 0.1})]
    assert not [*warnings.add({"step": 5.0, "evaluation/return": 1.0})]  # no record of updates
    for odd in ({}, {"workers": 3}, {"workers": {"trainer": {"algorithm": {"clip": None}}}}):
        assert not told((WINDOW, {"clip_fraction": 1.0}), config=odd)


def test_impala_clips_most_rows_and_nobody_minds():
    impala = {"workers": {"trainer": {"algorithm": {"rho_clip": 1.0}}}}
    assert not told((WINDOW, {"clip_fraction": 0.9}), config=impala)


def test_a_resumed_run_is_not_taken_for_a_new_one():
    still = {"kl": 1e-9, "entropy": 0.69, "explained_variance": 0.0, "return/mean": 20.0}
    assert not told((200, still), whole=False)


def test_of_several_trainers_each_is_told_by_its_name():
    config = {
        "workers": {
            name: {"policy": name[8:], "algorithm": {"clip": 0.2}} for name in ("trainer-a", "trainer-b")
        }
    }
    warnings = TrainingWarnings(config)
    record = {"update": 1.0, **{f"trainer-a-0/{k}": v for k, v in SOUND.items()}}
    record |= {f"trainer-b-0/{k}": v for k, v in {**SOUND, "clip_fraction": 0.9}.items()}
    ((what, cure),) = [each for _ in range(100) for each in warnings.add(record)]
    assert what.startswith("trainer-b: 90% of rows") and "workers.trainer-b.algorithm" in cure


def test_of_several_policies_each_trainer_has_the_returns_of_its_own():
    config = {
        "workers": {
            name: {"policy": name[8:], "algorithm": {"clip": 0.2}} for name in ("trainer-a", "trainer-b")
        }
    }
    warnings, told = TrainingWarnings(config), []
    for n in range(100):
        record = {"update": 1.0, "return/a/mean": float(n), "return/b/mean": 5.0}
        record |= {f"trainer-{p}-0/{k}": v for p in "ab" for k, v in SOUND.items()}
        record |= {f"trainer-{p}-0/loss/value": 1000.0 if n > 50 else 1.0 for p in "ab"}
        told += [what for what, _ in warnings.add(record)]
    (what,) = told
    assert what.startswith("trainer-b: the values' loss explodes")


class Constant(gymnasium.Env):
    """Pays 1 for each of 5 steps, whatever is done."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        return self.np_random.random(2, np.float32), 1.0, self._steps == 5, False, {}


@pytest.mark.parametrize(
    ("environment", "settings", "words"),
    [
        ("CartPole-v1", {"learning_rate": 1.0}, "learning_rate=0."),
        ("CartPole-v1", {"clip": 1e-6}, "clip = 1e-06 is so narrow"),
        ("CartPole-v1", {"learning_rate": 1e-9}, "the policy does not change"),
        ("CartPole-v1", {"value_coefficient": 0.0}, "values explain nothing"),
        (Constant, {}, "every episode so far had the same return, 5"),
        ("CartPole-v1", {}, ""),
    ],
)
def test_real_runs_give_the_notes_and_sound_ones_none(environment, settings, words, tmp_path, capsys):
    sizes = {"lanes": 8, "sample_steps": 16, "minibatch_size": 64}
    run = tidemill.train(
        environment,
        steps=70 * 128,
        launch="inline",
        quiet=True,
        log=(),
        run_dir=tmp_path / "run",
        **sizes,
        **({"learning_rate": 1e-3} | settings),
    )
    # what a busy machine may have told besides
    told = re.compile(r"note: (?!.*(silent|speaks again|come back|no update for|did not take))")
    notes = [line for line in capsys.readouterr().err.splitlines() if told.match(line)]
    assert [note for note in notes if words and words in note] or not (words or notes), notes
    again = TrainingWarnings(json.loads((Path(run.folder) / "config.json").read_text()))
    found = [str(each) for record in read_metrics(run.folder) for each in again.add(record)]
    assert [f"note: {text}" for text in found] == notes  # what doctor run sees, too
