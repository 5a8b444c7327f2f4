"""Ratings, with written-out numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.workers.elo_rating import FIRST, expected_score, performance


def test_expected_scores_are_those_of_elo() -> None:
    np.testing.assert_allclose(
        expected_score(1400.0, np.array([1000.0, 1400.0, 1800.0])), [10 / 11, 0.5, 1 / 11]
    )


def test_somebody_who_scores_what_is_expected_has_that_rating() -> None:
    # 10 wins of 11 against 1000, and the draw that is assumed: 10.5 of 12, odds of 7 to 1
    assert performance(np.full(11, 1000.0), np.array([1.0] * 10 + [0.0])) == pytest.approx(
        1000 + 400 * np.log10(7)
    )
    assert performance(np.array([900.0, 1100.0]), np.array([0.5, 0.5])) == pytest.approx(1000.0)


def test_without_a_game_one_is_rated_like_the_first() -> None:
    assert performance(np.empty(0), np.empty(0)) == FIRST


@given(st.lists(st.tuples(st.floats(500, 1500), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=30))
def test_a_rating_is_finite_and_rises_with_the_score(games: list[tuple[float, float]]) -> None:
    opponents, scores = np.array(games).T
    rating = performance(opponents, scores)
    assert abs(rating - opponents.mean()) < 4000
    if (scores < 1).any():
        better = scores.copy()
        better[scores.argmin()] += 0.5
        assert performance(opponents, better) > rating
