import numpy as np
import pytest

from tidemill.algorithms.minibatches import gae_of, gather
from tidemill.algorithms.post_processors import GAE, Returns
from tidemill.api.algorithm import Sample
from tidemill.core.errors import ConfigError


def episodes(**changes):
    """Two of them, each a column: three actions and an end; one action and a cut, then
    fillers."""
    given = {
        "reward": [[1, 5], [2, 0], [4, 0], [0, 0]],
        "value": [[10, 20], [30, 40], [50, 0], [0, 0]],
        "done": [[0, 0], [0, 0], [0, 0], [1, 0]],
        "truncated": [[0, 0], [0, 1], [0, 0], [0, 0]],
        "version": [[0, 0], [0, 0], [0, -1], [-1, -1]],
    }
    kinds = {
        "reward": np.float32,
        "value": np.float32,
        "done": np.bool_,
        "truncated": np.bool_,
        "version": np.int64,
    }
    return {name: np.array(changes.get(name, values), kinds[name]) for name, values in given.items()}


def test_returns_are_discounted_rewards_and_the_value_where_an_episode_was_cut():
    found = Returns(gamma=0.5).process(episodes())["return"]
    np.testing.assert_allclose(found[:, 0], [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4, 0])
    np.testing.assert_allclose(found[:2, 1], [5 + 0.5 * 40, 40])
    assert found.dtype == np.float32


def test_advantages_by_hand():
    found = GAE(gamma=0.5, gae_lambda=0.5).process(episodes())
    delta = [1 + 0.5 * 30 - 10, 2 + 0.5 * 50 - 30, 4 - 50]
    advantage = [delta[0] + 0.25 * (delta[1] + 0.25 * delta[2]), delta[1] + 0.25 * delta[2], delta[2]]
    np.testing.assert_allclose(found["advantage"][:, 0], [*advantage, 0])
    np.testing.assert_allclose(found["target"][:3, 0], np.add(advantage, [10, 30, 50]))
    np.testing.assert_allclose(found["advantage"][:, 1], [5 + 0.5 * 40 - 20, 0, 0, 0])


def test_what_is_made_is_what_was_announced():
    for post in (Returns(), GAE()):
        made = post.process(episodes())
        assert {name: array.dtype.name for name, array in made.items()} == {
            name: field.dtype for name, field in post.fields().items()
        }


def test_a_batch_takes_the_advantages_that_rows_have():
    rows = episodes()
    sample = Sample(
        rows
        | {
            "obs": np.zeros((4, 2, 3), np.float32),
            "action": np.zeros((4, 2), np.int64),
            "log_prob": np.zeros((4, 2), np.float32),
        }
    )
    own = gather([sample], gae_of(0.5, 0.5))
    sample |= {f"post.{name}": array for name, array in GAE(gamma=0.5, gae_lambda=0.5).process(rows).items()}
    given = gather([sample], gae_of(0.99, 0.95))
    assert len(own) == len(given) == 4
    np.testing.assert_array_equal(given.advantage, own.advantage)
    np.testing.assert_array_equal(given.target, own.target)
    assert not np.allclose(
        gather([sample], gae_of(0.99, 0.95, lambda sample, rows: np.zeros(len(rows), np.float32))).advantage,
        own.advantage,
    )  # corrected anew


@pytest.mark.parametrize("settings", [{"gamma": 1.5}, {"gamma": float("nan")}, {"gae_lambda": -0.1}])
def test_impossible_discounts_are_refused(settings):
    with pytest.raises(ConfigError, match="is not between 0 and 1"):
        GAE(**settings)
