"""The formulas of algorithms that learn action values from single transitions: pure
functions, each with its source.

Letters: B transitions, each of n steps at most (an n-step window: fewer at an episode's
end), A actions, Z returns that a distribution is spread over.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tidemill.native.library import Kernels, address

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


def n_step_returns(
    rewards: Floats, steps: NDArray[np.int32], done: Bools, gamma: float
) -> tuple[Floats, Floats]:
    """Return (R, Γ), both [B]: the discounted rewards Σ γ^i r_i of windows `rewards` [B,
    n] (0 behind their `steps`), and by what the value behind the window counts, γ^steps,
    0 where it ended in an end (`done`).

    Sutton & Barto 2018, "Reinforcement Learning", eq. 7.1: G = r_1 + γ r_2 + … + γ^(n-1)
    r_n + γ^n V.
    """
    powers = discounts(gamma, rewards.shape[1])
    return np.matmul(rewards, powers[:-1]), np.where(done, np.float32(0), powers[steps])


@lru_cache(maxsize=16)
def discounts(gamma: float, steps: int) -> Floats:
    """Return 1, γ, … γ^steps; not to be written."""
    found: Floats = np.power(gamma, np.arange(steps + 1)).astype(np.float32)
    found.flags.writeable = False
    return found


def bootstrap_values(target: Floats, chooser: Floats) -> Floats:
    """Return [B]: what `target` [B, A] says of the action that is best by `chooser` [B,
    A].

    With the online network as chooser van Hasselt et al. 2016, "Deep Reinforcement
    Learning with Double Q-learning", eq. 4; with the target itself Mnih et al. 2015,
    "Human-level control through deep reinforcement learning", Methods, algorithm 1.
    """
    found: Floats = target[np.arange(len(target)), chooser.argmax(1)]
    return found


def differentiate_huber(error: Floats) -> tuple[Floats, Floats]:
    """Return (loss, derivative) of each error [B]: ½ e² for |e| ≤ 1, |e| - ½ beyond,
    whose derivative is e clipped to ±1.

    Huber 1964, "Robust Estimation of a Location Parameter", with the bound 1; Mnih et al.
    2015, Methods, "clip the error term".
    """
    # two thirds of what np.clip takes
    slope: Floats = np.minimum(np.maximum(error, np.float32(-1)), np.float32(1))
    return slope * (error - np.float32(0.5) * slope), slope


def differentiate_quantile_huber(found: Floats, goals: Floats, kappa: float) -> tuple[Floats, Floats]:
    """Return (loss [B], derivative [B, Z] with respect to `found`) of the quantiles
    `found` [B, Z] where samples `goals` [B, Y] of the return were seen; the loss is Σ_i
    E_j ρ(goal_j - found_i), and found_i stands for the quantile τ_i = (2i - 1) / 2Z.

    Dabney et al. 2018, "Distributional Reinforcement Learning with Quantile Regression",
    eq. 9, 10 and algorithm 1: ρ(u) = |τ - [u < 0]| L(u); L(u) = ½ u² for |u| ≤ κ, κ (|u|
    - ½ κ) beyond.
    """
    count, bound = found.shape[1], np.float32(kappa)
    tau = ((np.arange(count, dtype=np.float32) + np.float32(0.5)) / np.float32(count))[:, None]
    error = goals[:, None, :] - found[:, :, None]
    cut = np.minimum(np.maximum(error, -bound), bound)
    weighted = np.where(error < 0, 1 - tau, tau) * cut
    error -= np.float32(0.5) * cut
    loss: Floats = np.einsum("bij,bij->b", weighted, error) / np.float32(goals.shape[1])
    return loss, -weighted.mean(2)


def project(distribution: Floats, returns: Floats, discount: Floats, support: Floats) -> Floats:
    """Return [B, Z]: the distribution of R + Γ z on the equally spaced `support` [Z], z
    being spread over it as `distribution` [B, Z] says.

    Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning",
    algorithm 1: what falls between two of the support is split between them, what falls
    beyond its ends is given to these.
    """
    count = len(support)
    width = (support[-1] - support[0]) / np.float32(count - 1)
    at = (returns[:, None] + discount[:, None] * support).clip(support[0], support[-1])
    at = ((at - support[0]) / width).clip(0, count - 1)
    below = np.floor(at).astype(np.int64)
    above = np.minimum(below + 1, count - 1)
    share = at - below
    rows = np.arange(len(at))[:, None] * count
    size = at.size
    found = np.bincount((rows + below).reshape(-1), (distribution * (1 - share)).reshape(-1), size)
    found += np.bincount((rows + above).reshape(-1), (distribution * share).reshape(-1), size)
    return found.reshape(at.shape).astype(np.float32)


def differentiate_cross_entropy(logits: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Return (loss [B], derivative [B, Z]) of -Σ m log softmax(x) of `logits` x and
    `target` m, both [B, Z]: softmax(x) - m.

    Bellemare et al. 2017, eq. 7 and algorithm 1.
    """
    shifted = logits - logits.max(1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(1, keepdims=True)
    return (target * (np.log(total) - shifted)).sum(1), powers / total - target


def soft_values(values: Floats, log_prob: Floats, temperature: float) -> Floats:
    """Return [B]: the soft value of a drawn action of which two critics `values` [2, B],
    the lesser counts, and whose log-probability was [B].

    Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", eq. 3, V = Q -
    α log π, with the minimum of section 4.2.
    """
    lesser: Floats = values.min(0)
    return lesser - np.float32(temperature) * log_prob


def differentiate_actor(
    action: Floats, spread: Floats, of_action: Floats, temperature: float
) -> tuple[Floats, Floats]:
    """Return the derivatives of α log π(a) - Q(a), a = tanh(u), u = m + s ε, with respect
    to m and to log s, both [B, actions]; `action` is a, `spread` s ε, and `of_action`
    ∂Q/∂a.

    Haarnoja et al. 2018, eq. 9 written out, with eq. 26: log π = Σ (-½ ε² - log s - log(1
    - a²)) and constants, so that at fixed ε ∂ log π/∂m = 2a, ∂ log π/∂ log s = 2a s ε -
    1; ∂a/∂m = 1 - a², ∂a/∂ log s = (1 - a²) s ε.
    """
    alpha = np.float32(temperature)
    of_mean: Floats = alpha * 2 * action - of_action * (1 - action * action)
    return of_mean, of_mean * spread - alpha


def smoothed_actions(action: Floats, noise: Floats, limit: float) -> Floats:
    """Return actions [B, actions] in [-1, 1] to which `noise` was added, clipped to
    ±`limit`.

    Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic
    Methods", eq. 14 with the clipping of section 5.3.
    """
    found: Floats = np.clip(action + np.clip(noise, -limit, limit), -1, 1).astype(np.float32, copy=False)
    return found


def differentiate_deterministic_actor(action: Floats, of_action: Floats) -> Floats:
    """Return the derivative of -Q(a), a = tanh(u), with respect to u, [B, actions];
    `action` is a, `of_action` ∂Q/∂a.

    Silver et al. 2014, "Deterministic Policy Gradient Algorithms", eq. 9, with ∂a/∂u =
    1 - a².
    """
    return -of_action * (1 - action * action)


def approach(target: Floats, weights: Floats, rate: float, kernels: Kernels | None) -> None:
    """Move `target` the share `rate` of the way to `weights`; by the native core where
    its `kernels` are given.

    Lillicrap et al. 2016, "Continuous Control with Deep Reinforcement Learning",
    algorithm 1: θ' ← τ θ + (1 - τ) θ'.
    """
    if kernels is None:
        target += np.float32(rate) * (weights - target)
    else:
        kernels.approach(len(target), rate, address(weights), address(target))
