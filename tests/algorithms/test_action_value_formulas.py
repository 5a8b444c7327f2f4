"""The formulas of DQN, against numbers that were worked out by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algorithms.action_value_formulas import (
    bootstrap_values,
    differentiate_cross_entropy,
    differentiate_deterministic_actor,
    differentiate_huber,
    differentiate_quantile_huber,
    n_step_returns,
    project,
    smoothed_actions,
)


def f(*numbers):
    return np.array(numbers, np.float32)


def test_n_step_returns_discount_rewards_and_the_value_behind_them():
    rewards = f([1, 2, 4], [3, 5, 0], [7, 0, 0])
    returns, discount = n_step_returns(
        rewards, np.array([3, 2, 1], np.int32), np.array([False, True, False]), 0.5
    )
    np.testing.assert_allclose(returns, [1 + 1 + 1, 3 + 2.5, 7])
    np.testing.assert_allclose(discount, [0.125, 0, 0.5])  # no value behind an end


def test_double_q_learning_values_what_the_other_network_chooses():
    target, online = f([1, 5, 3], [4, 2, 0]), f([0, 1, 2], [0, 9, 1])
    assert bootstrap_values(target, online).tolist() == [3, 2]
    assert bootstrap_values(target, target).tolist() == [5, 4]


def test_the_huber_loss_is_a_parabola_with_straight_arms():
    loss, slope = differentiate_huber(f(0.5, -1, 3, -2.5))
    np.testing.assert_allclose(loss, [0.125, 0.5, 2.5, 2.0])
    np.testing.assert_allclose(slope, [0.5, -1, 1, -1])


def test_the_quantile_huber_loss_weighs_errors_above_by_tau_and_below_by_the_rest():
    # quantiles 0 and 1 stand for τ = 1/4 and 3/4. Errors of the first 2 and 0.5, of the
    # second 1 and -0.5: L is 1.5 and 0.125, 0.5 and 0.125, slopes 1 and 0.5, 1 and -0.5
    loss, slope = differentiate_quantile_huber(f([0, 1]), f([2, 0.5]), 1.0)
    below, above = 0.25 * (1.5 + 0.125) / 2, (0.75 * 0.5 + 0.25 * 0.125) / 2
    np.testing.assert_allclose(loss, [below + above])
    np.testing.assert_allclose(slope, [[-0.25 * 1.5 / 2, -(0.75 * 1 - 0.25 * 0.5) / 2]])
    # κ = ½: errors of 2 and 0.5 of one quantile, τ = 1/2: L is ½ (2 - ¼) and 0.125
    loss, slope = differentiate_quantile_huber(f([0]), f([2, 0.5]), 0.5)
    np.testing.assert_allclose(loss, [0.5 * (0.875 + 0.125) / 2])
    np.testing.assert_allclose(slope, [[-0.5 * 0.5]])


def test_the_least_quantile_huber_loss_is_at_the_quantiles():
    """Of 0, 1, …, 99, each as likely: with a small κ the quantiles of 1/8, 3/8, …"""
    goals, found = np.arange(100, dtype=np.float32)[None], np.full((1, 4), 50, np.float32)
    for _ in range(3_000):
        found -= 10 * differentiate_quantile_huber(found, goals, 0.1)[1]
    np.testing.assert_allclose(found[0], [12.5, 37.5, 62.5, 87.5], atol=1)


def test_a_projected_distribution_is_split_between_its_neighbours():
    support = f(0, 1, 2, 3)
    found = project(
        f([0, 1, 0, 0], [0.5, 0, 0, 0.5], [0.25, 0.25, 0.25, 0.25]), f(0.25, 2, 2.5), f(0.5, 1, 0), support
    )
    # R + Γz: 0.25 + 0.5 = 0.75; 2 and 5 (beyond the end); 2.5 whatever z is
    np.testing.assert_allclose(found, [[0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]], atol=1e-6)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(2, 51))
def test_a_projection_keeps_the_mass_and_within_the_support_the_mean(seed, count):
    rng = np.random.default_rng(seed)
    support = np.linspace(-10, 10, count, dtype=np.float32)
    spread = rng.dirichlet(np.ones(count), 8).astype(np.float32)
    returns, discount = rng.uniform(-1, 1, 8).astype(np.float32), rng.uniform(0, 0.9, 8).astype(np.float32)
    found = project(spread, returns, discount, support)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    assert (found >= -1e-6).all()
    np.testing.assert_allclose(found @ support, returns + discount * (spread @ support), atol=1e-4)


def test_the_cross_entropys_derivative_is_that_of_its_differences():
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((3, 5)), rng.dirichlet(np.ones(5), 3)
    loss, slope = differentiate_cross_entropy(logits, target)
    np.testing.assert_allclose(
        loss, -(target * np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))).sum(1)
    )
    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-6
        above = differentiate_cross_entropy(logits + step, target)[0]
        below = differentiate_cross_entropy(logits - step, target)[0]
        np.testing.assert_allclose((above - below) / 2e-6, slope[:, i], atol=1e-6)


def test_smoothed_target_actions_have_clipped_noise_and_stay_within_their_bounds():
    found = smoothed_actions(f([0.2, -0.9, 0.8]), f([0.1, -0.7, 0.7]), 0.5)
    np.testing.assert_allclose(found, [[0.3, -1, 1]], atol=1e-6)
    np.testing.assert_allclose(smoothed_actions(f([0.2, 0.1]), f([9, -9]), 0.5), [[0.7, -0.4]], atol=1e-6)


def test_a_deterministic_actor_climbs_the_critics_slope_times_that_of_tanh():
    # of -Q(tanh u): -2 (1 - 0.25) and 3 (1 - 0.64)
    found = differentiate_deterministic_actor(f([0.5, -0.8]), f([2, -3]))
    np.testing.assert_allclose(found, [[-1.5, 1.08]], atol=1e-6)
