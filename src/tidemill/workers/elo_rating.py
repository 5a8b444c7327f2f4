"""How strong a version is, from the games that it played against rated ones. Pure
functions."""

import numpy as np
from numpy.typing import NDArray

FIRST = 1000.0
"""The rating of the first version that is rated."""
_FAR = 4000.0  # no rating is farther from its opponents' mean: 10 orders of magnitude of the odds

Floats = NDArray[np.float64]


def expected_score(rating: float, opponents: Floats) -> Floats:
    """Return the expected score (1 for a win, ½ for a draw) of one rated `rating` against
    each of `opponents` [n].

    Elo 1978, "The Rating of Chessplayers, Past and Present", with the logistic curve: 1 /
    (1 + 10^((R_i - R) / 400)).
    """
    score: Floats = 1 / (1 + 10 ** ((opponents - rating) / 400))
    return score


def performance(opponents: Floats, scores: Floats) -> float:
    """Return the rating under which `scores` [n] (1 won, ½ drawn, 0 lost) against
    opponents rated `opponents` [n] are just what is to be expected: Σ (s_i - E_i(R)) = 0,
    the maximum of the likelihood of Bradley, Terry 1952, "Rank Analysis of Incomplete
    Block Designs".

    One more drawn game against their mean is assumed, so that somebody who won all has a
    finite rating, which grows with the games won. `FIRST` without any game.
    """
    if not len(opponents):
        return FIRST
    mean = float(opponents.mean())
    low, high = mean - _FAR, mean + _FAR
    opponents, score = np.append(opponents, mean), float(scores.sum()) + 0.5
    for _ in range(60):  # halves the interval to less than a rounding
        middle = (low + high) / 2
        low, high = (
            (middle, high) if float(expected_score(middle, opponents).sum()) < score else (low, middle)
        )
    return (low + high) / 2
