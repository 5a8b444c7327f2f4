"""Scores of the suite: pure functions of numbers."""

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2_000  # of the bootstrap
Draw = Callable[[Sequence[float]], np.ndarray]  # as many runs, drawn with replacement


def score(value: float, random: float, reference: float) -> float:
    """Return how much of the way from random actions to the reference was gone. NaN where
    the reference is no better than random."""
    return (value - random) / (reference - random) if reference > random else float("nan")


def interquartile_mean(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half; values at its edges count by their share
    (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice"). Of fewer than four values it is their mean."""
    ordered = np.sort(np.asarray(values, np.float64))
    count = len(ordered)
    if count < 4:
        return float(ordered.mean())
    places = np.arange(count)
    shares = np.clip(np.minimum(places + 1, 0.75 * count) - np.maximum(places, 0.25 * count), 0, 1)
    return float((shares * ordered).sum() / shares.sum())


def scores_interval(tasks: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the interquartile mean over the
    runs of all tasks. Seeds are drawn anew within each task, so that each keeps its
    weight."""
    return _interval(lambda draw: interquartile_mean(np.concatenate([draw(runs) for runs in tasks])), seed)


def difference_interval(ours: Sequence[float], others: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the difference of the two
    interquartile means, ours - others. Seeds are drawn anew on both sides."""
    return _interval(lambda draw: interquartile_mean(draw(ours)) - interquartile_mean(draw(others)), seed)


def _interval(statistic: Callable[[Draw], float], seed: int) -> tuple[float, float]:
    """Return the interval of a statistic that draws its runs, with replacement."""
    rng = np.random.default_rng(seed)
    found = [statistic(lambda runs: rng.choice(np.asarray(runs), len(runs))) for _ in range(RESAMPLES)]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)
