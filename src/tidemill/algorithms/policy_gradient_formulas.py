"""The formulas of the algorithms: pure functions, each with its source. Nothing here
imports torch: losses, with their derivatives written out, take the library (numpy or
torch) whose arrays they are handed.

Letters: T rows in time, N seats, n any rows. Tidemill rows: an episode of T actions has
T+1 rows, the reward stands in the row whose action caused it, and the final row (done or
truncated) holds the last observation and never enters a loss. Unwritten cells may hold
NaN: they are masked with `where`, never by multiplying.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def gae(
    reward: Floats,
    value: Floats,
    done: Bools,
    truncated: Bools,
    acted: Bools,
    gamma: float,
    lam: float,
    rho: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return (advantages, λ-returns), both float32 [T, N], of Tidemill rows; all inputs
    are [T, N].

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eq. 16 with the residual of eq. 10: δ_t = r_t + γ V_{t+1} - V_t, A_t =
    δ_t + γ λ A_{t+1}, and the λ-return A_t + V_t. V_{t+1} is 0 where the next row is
    `done`, and its stored bootstrap value where it is `truncated`; the trace is cut
    there. `acted` is version >= 0. The advantage is 0 in final rows, in rows that did not
    act and in the last row; so is the λ-return of a row without a value.

    With `rho` (π/μ per row) the trace is that of V-trace, Espeholt et al. 2018, "IMPALA",
    eq. 1, with both clipping levels at 1: A_t = δ_t + γ λ min(1, ρ_{t+1}) A_{t+1}, and
    the value's target V_t + min(1, ρ_t) A_t; ρ = 1 gives GAE. The policy's own ratio is
    not in A_t.
    """
    steps, seats = reward.shape
    held, active, delta = _residuals(reward, value, done, truncated, acted, gamma)
    decay = active * np.float32(gamma * lam)
    weight = np.ones((steps, seats), np.float32)
    if rho is not None:
        active[-1:] = False  # whose ratio belongs to the next sample
        weight = np.where(active, np.minimum(rho, np.float32(1)), np.float32(0))
        decay[:-1] *= weight[1:]
    advantage = delta
    carried = np.empty(seats, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # updates look for what is not finite
        for t in range(steps - 2, -1, -1):
            np.multiply(decay[t], advantage[t + 1], out=carried)
            advantage[t] += carried
        return advantage, held + weight * advantage


def vtrace(
    reward: Floats,
    value: Floats,
    done: Bools,
    truncated: Bools,
    acted: Bools,
    rho: Floats,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Floats, Floats]:
    """Return (weighted advantages, targets of the values), both float32 [T, N], of
    Tidemill rows as in `gae`; all inputs are [T, N].

    Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
    Actor-Learner Architectures", eq. 1 as its recursion (remark 1): v_t - V_t = ρ_t δ_t +
    γ c_t (v_{t+1} - V_{t+1}) with δ_t = r_t + γ V_{t+1} - V_t, ρ_t = min(ρ̄, `rho`_t) and
    c_t = λ min(c̄, `rho`_t) (remark 2), `rho` being π/μ. The advantage is what multiplies
    the gradient of log π in section 4.2: ρ_t (r_t + γ v_{t+1} - V_t). As in `gae` V_{t+1}
    is 0 where the next row is `done` and the bootstrap value where it is `truncated`,
    whose own v is that value: the trace is cut there, and at the last row. The advantage
    is 0 in final rows, in rows that did not act and in the last row; their cells of `rho`
    are not read.
    """
    held, active, delta = _residuals(reward, value, done, truncated, acted, gamma)
    active[-1:] = False
    weight = np.where(active, np.minimum(rho, np.float32(rho_clip)), np.float32(0))
    decay = np.where(active, np.minimum(rho, np.float32(c_clip)) * np.float32(gamma * lam), np.float32(0))
    gap = weight * delta  # v - V
    for t in range(len(gap) - 2, -1, -1):
        gap[t] += decay[t] * gap[t + 1]
    advantage = delta
    advantage[:-1] += np.float32(gamma) * gap[1:]
    return weight * advantage, held + gap


def _residuals(
    reward: Floats, value: Floats, done: Bools, truncated: Bools, acted: Bools, gamma: float
) -> tuple[Floats, Bools, Floats]:
    """Return (values, which rows act and are not final, δ_t = r_t + γ V_{t+1} - V_t);
    values are 0 where there is none, δ is 0 in rows that do not act, in final ones and in
    the last."""
    steps, seats = reward.shape
    held = np.where(acted & ~done, value, np.float32(0))
    active = acted & ~(done | truncated)
    delta = np.zeros((steps, seats), np.float32)
    np.multiply(held[1:], np.float32(gamma), out=delta[:-1])
    delta[:-1] += reward[:-1]
    delta[:-1] -= held[:-1]
    delta = np.where(active, delta, np.float32(0))
    delta[-1:] = 0  # no successor is known
    return held, active, delta


def differentiate_surrogate(
    xp: Any, log_ratio: Any, advantage: Any, clip: float
) -> tuple[Any, Any, Any, Any]:
    """Return (loss, derivative [n], divergence, clipped) of arrays [n] of library `xp`;
    all but the derivative are sums over the rows.

    loss: -Σ min(ρ A, clip(ρ, 1-ε, 1+ε) A), Schulman et al. 2017, "Proximal Policy
    Optimization Algorithms", eq. 7, with log_ratio = log π(a) - log μ(a). Its derivative
    with respect to log π(a) is -ρ A, and 0 in rows where the clipped term is the smaller
    one. divergence: Σ ρ - 1 - log ρ, n times the estimate k3 of KL(μ‖π) in Schulman 2020,
    "Approximating KL Divergence": unbiased and never negative. clipped: the number of
    rows with |ρ - 1| > ε, whose gradient eq. 7 may cut.
    """
    excess = xp.expm1(log_ratio)  # ρ - 1
    gain = (excess + 1) * advantage
    held = (excess.clip(-clip, clip) + 1) * advantage
    derivative = xp.where(gain <= held, -gain, 0)
    return -xp.minimum(gain, held).sum(), derivative, (excess - log_ratio).sum(), (abs(excess) > clip).sum()


def differentiate_policy_gradient(xp: Any, log_prob: Any, advantage: Any) -> tuple[Any, Any]:
    """Return (loss, derivative [n]) of arrays [n] of library `xp`: -Σ A log π(a), whose
    derivative with respect to log π(a) is -A.

    Williams 1992, "Simple statistical gradient-following algorithms", eq. 11; with the
    weighted advantages of `vtrace` the policy gradient of IMPALA, section 4.2.
    """
    return -(log_prob @ advantage), -advantage


def differentiate_value_loss(
    xp: Any, value: Any, target: Any, old: Any, clip: float | None
) -> tuple[Any, Any]:
    """Return (loss, derivative [n]) of arrays [n] of library `xp`; the loss is the sum
    over the rows.

    Σ ½ (V - target)², Schulman et al. 2017, eq. 9, halved as is customary, whose
    derivative with respect to V is V - target. With `clip` Σ ½ max((V - target)²,
    (clip(V, old ± ε) - target)²), from OpenAI Baselines' ppo2 (Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", section 3), whose derivative is 0
    where V has left old ± ε and the clipped error is the larger one.
    """
    error = value - target
    if clip is None:
        return (error @ error) * 0.5, error
    move = value - old
    near = old + move.clip(-clip, clip) - target
    squares, near_squares = error * error, near * near
    derivative = xp.where((near_squares > squares) & (abs(move) > clip), 0, error)
    return xp.maximum(squares, near_squares).sum() * 0.5, derivative


def minibatch_sums(advantage: Floats, lengths: Sequence[int]) -> NDArray[np.float64]:
    """Return rows, sum and sum of squares of the advantages of each minibatch, [count,
    3]; they lie one after the other, `lengths` rows each."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    x = advantage.astype(np.float64)
    sums = [np.bincount(number, weights, len(lengths)) for weights in (np.ones_like(x), x, x * x)]
    return np.stack(sums, 1, dtype=np.float64)  # of no rows bincount tells integers


def normalise_minibatches(
    advantage: Floats, lengths: Sequence[int], sums: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the advantages of minibatches (as of `minibatch_sums`) brought to mean 0 and
    standard deviation 1 over each, of which `sums` tells: those of all trainers together.
    One of a single row stays as it is.

    Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization",
    detail 7; Andrychowicz et al. 2021, "What Matters for On-Policy Deep Actor-Critic
    Methods?", choice C67.
    """
    rows, total, squares = sums.T
    mean = total / np.maximum(rows, 1)
    deviation = np.sqrt(np.maximum(squares / np.maximum(rows, 1) - mean * mean, 0)) + 1e-8
    alone = rows < 2
    mean[alone], deviation[alone] = 0, 1
    number = np.repeat(np.arange(len(lengths)), lengths)
    normal: NDArray[np.float64] = (advantage - mean[number]) / deviation[number]
    return normal


def adapted_rate(rate: float, kl: float, desired: float) -> float:
    """Return the learning rate after an update that went `kl` nats, where `desired` is
    wished for: 1.5 times as much or as little, where it went less than half or more than
    twice as far, between 1e-5 and 1e-2 (Rudin et al. 2022, "Learning to Walk in Minutes
    Using Massively Parallel Deep Reinforcement Learning", whose implementation does so
    for each minibatch)."""
    if kl > 2 * desired:
        return max(rate / 1.5, min(rate, 1e-5))
    if 0 < kl < desired / 2:
        return min(rate * 1.5, max(rate, 1e-2))
    return rate
