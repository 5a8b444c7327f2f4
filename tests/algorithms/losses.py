"""Losses and measures as the papers have them: what derivatives written out by hand, and
sums over trainers, are held against."""

import numpy as np
from torch import Tensor


def explained_variance(prediction, target):
    """Return 1 - Var(target - prediction) / Var(target): 1 is perfect, 0 no better than a
    constant. NaN when the targets do not vary."""
    variance = float(np.var(target, dtype=np.float64))
    return (
        1 - float(np.var(target - prediction, dtype=np.float64)) / variance if variance > 0 else float("nan")
    )


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return PPO's policy loss (to minimise), a scalar; inputs [n], log_ratio = log π(a)
    - log μ(a).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7: -mean(min(ρ A,
    clip(ρ, 1-ε, 1+ε) A)).
    """
    ratio = log_ratio.exp()
    return -(ratio * advantage).minimum(ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def value_loss(value: Tensor, target: Tensor) -> Tensor:
    """Return mean(½ (V - target)²), a scalar; inputs [n]. Schulman et al. 2017, eq. 9
    (its L^VF, halved as is customary)."""
    return (value - target).square().mean() * 0.5


def clipped_value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """Return mean(½ max((V - target)², (clip(V, old ± ε) - target)²)), a scalar; inputs
    [n].

    From OpenAI Baselines' ppo2; Engstrom et al. 2020, "Implementation Matters in Deep
    Policy Gradients", section 3.
    """
    near = old + (value - old).clamp(-clip, clip)
    return (value - target).square().maximum((near - target).square()).mean() * 0.5


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Return the estimate mean(ρ - 1 - log ρ) of KL(μ‖π) from actions of μ, a scalar.

    Schulman 2020, "Approximating KL Divergence", estimator k3: unbiased and never
    negative.
    """
    return (log_ratio.expm1() - log_ratio).mean()


def clip_fraction(log_ratio: Tensor, clip: float) -> Tensor:
    """Return the share of rows with |ρ - 1| > ε, a scalar: those whose gradient eq. 7 of
    Schulman et al. 2017 may cut."""
    return (log_ratio.expm1().abs() > clip).float().mean()
