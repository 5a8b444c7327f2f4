"""Whom a member of a population goes on from, and with which settings: pure functions.

Jaderberg et al. 2017, "Population Based Training of Neural Networks", section 4.1.1.
"""

from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np


def choose_donor(
    scores: Mapping[str, float], member: str, quantile: float, rng: np.random.Generator
) -> str | None:
    """Return whom `member` is to go on from, by all members' `scores`: where it is among
    the share `quantile` of the worst (one at least), one of the best, as many, drawn from
    `rng`. None where it is not, or has reached as much as that one: it goes on by itself.

    Jaderberg et al. 2017, section 4.1.1, "truncation selection".
    """
    ranked = sorted(scores, key=lambda name: (scores[name], name))
    share = max(1, int(len(ranked) * quantile))
    if member not in ranked[:share]:
        return None
    donor = ranked[len(ranked) - share + int(rng.integers(share))]
    return donor if scores[donor] > scores[member] else None


def explore(
    settings: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    factors: Sequence[float],
    resample: float,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Return `settings`, each multiplied by one of `factors` or, with probability
    `resample`, drawn anew log-uniformly, within its `bounds`.

    Jaderberg et al. 2017, section 4.1.1, "perturb" and "resample".
    """
    changed = {}
    for name, (low, high) in bounds.items():
        anew = rng.random() < resample
        value = (
            exp(rng.uniform(log(low), log(high)))
            if anew
            else settings[name] * factors[int(rng.integers(len(factors)))]
        )
        changed[name] = min(max(value, low), high)
    return changed
