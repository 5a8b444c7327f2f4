"""Every formula against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from tests.algorithms import losses

from tidemill.algorithms import policy_gradient_formulas as f
from tidemill.nets.normaliser import merge_moments

NAN = np.nan


def column(*values, dtype=np.float32):
    """One seat: [T, 1]."""
    return np.array(values, dtype).reshape(-1, 1)


def flags(length, *places):
    out = np.zeros((length, 1), bool)
    out[list(places)] = True
    return out


def test_advantages_of_each_minibatch_have_mean_0_and_deviation_1():
    # 1, 3: mean 2, deviation 1. 5 is alone. 2, 2, 8: mean 4, deviation √8.
    advantage = np.array([1, 3, 5, 2, 2, 8], np.float32)
    sums = f.minibatch_sums(advantage, [2, 1, 0, 3])
    np.testing.assert_allclose(sums, [[2, 4, 10], [1, 5, 25], [0, 0, 0], [3, 12, 72]])
    normal = f.normalise_minibatches(advantage, [2, 1, 0, 3], sums)
    np.testing.assert_allclose(normal, [-1, 1, 5, -(2**-0.5), -(2**-0.5), 2**0.5], rtol=1e-6)


def test_a_minibatch_is_normalised_over_its_rows_at_all_trainers():
    # 1, 3 here and 8, 8 there: mean 5, variance (1 + 9 + 64 + 64) / 4 - 25 = 9.5.
    here, there = np.array([1, 3], np.float32), np.array([8, 8], np.float32)
    sums = f.minibatch_sums(here, [2]) + f.minibatch_sums(there, [2])
    np.testing.assert_allclose(
        f.normalise_minibatches(here, [2], sums), [-4 / 9.5**0.5, -2 / 9.5**0.5], rtol=1e-6
    )


def test_gae_of_an_episode_that_ends_takes_zero_as_the_value_after_it():
    # γ = 0.5, λ = 0.5. Rows: two actions, the ended row (its value was never written),
    # then a new episode with one action and the border row.
    # δ_1 = 2 + 0.5·0 - 3 = -1           A_1 = -1
    # δ_0 = 1 + 0.5·3 - 2 = 0.5          A_0 = 0.5 + 0.25·(-1) = 0.25
    # δ_3 = 4 + 0.5·6 - 5 = 2            A_3 = 2
    advantage, target = f.gae(
        column(1, 2, 0, 4, NAN), column(2, 3, NAN, 5, 6), flags(5, 2), flags(5), ~flags(5, 2), 0.5, 0.5
    )
    np.testing.assert_allclose(advantage, column(0.25, -1, 0, 2, 0))
    np.testing.assert_allclose(target[[0, 1, 3]], column(2.25, 2, 7))


def test_gae_of_an_episode_that_is_cut_takes_the_bootstrap_value_and_stops_the_trace():
    # The same, but row 2 is truncated with bootstrap value 8:
    # δ_1 = 2 + 0.5·8 - 3 = 3            A_1 = 3
    # δ_0 = 0.5                          A_0 = 0.5 + 0.25·3 = 1.25
    advantage, target = f.gae(
        column(1, 2, 0, 4, NAN), column(2, 3, 8, 5, 6), flags(5), flags(5, 2), ~flags(5), 0.5, 0.5
    )
    np.testing.assert_allclose(advantage, column(1.25, 3, 0, 2, 0))
    np.testing.assert_allclose(target[[0, 1, 3]], column(3.25, 6, 7))


def test_gae_reads_no_cell_of_fillers_and_of_rows_that_did_not_act():
    acted = ~flags(4, 0, 3)
    advantage, target = f.gae(
        column(NAN, 1, NAN, NAN), column(NAN, 2, 4, NAN), flags(4, 3), flags(4, 2), acted, 0.5, 0.5
    )
    # Row 1: δ = 1 + 0.5·4 - 2 = 1; rows 0 and 3 are fillers, row 2 is cut.
    np.testing.assert_allclose(advantage, column(0, 1, 0, 0))
    assert np.isfinite(target).all()


def test_gae_keeps_seats_apart():
    rng = np.random.default_rng(0)
    reward, value = rng.standard_normal((2, 9, 5)).astype(np.float32)
    done = rng.random((9, 5)) < 0.2
    truncated = ~done & (rng.random((9, 5)) < 0.2)
    whole, _ = f.gae(reward, value, done, truncated, ~done, 0.9, 0.8)
    for seat in range(5):
        one = slice(seat, seat + 1)
        alone, _ = f.gae(
            reward[:, one], value[:, one], done[:, one], truncated[:, one], ~done[:, one], 0.9, 0.8
        )
        np.testing.assert_array_equal(whole[:, one], alone)


def test_gae_with_ratios_is_the_trace_of_v_trace():
    # γ = 0.5, λ = 1; ρ = (2 → clipped to 1, 0.5, –). δ_1 = 2 + 0.5·4 - 3 = 1; δ_0 = 1 +
    # 0.5·3 - 2 = 0.5. A_1 = 1; A_0 = 0.5 + 0.5·0.5·1 = 0.75. Targets: 2 + 1·0.75 = 2.75
    # and 3 + 0.5·1 = 3.5.
    inputs = (column(1, 2, NAN), column(2, 3, 4), flags(3), flags(3), ~flags(3), 0.5, 1.0)
    advantage, target = f.gae(*inputs, rho=column(2, 0.5, NAN))
    np.testing.assert_allclose(advantage, column(0.75, 1, 0))
    np.testing.assert_allclose(target[:2], column(2.75, 3.5))
    same = f.gae(*inputs, rho=column(1, 1, 1))
    np.testing.assert_array_equal(same[0], f.gae(*inputs)[0])
    np.testing.assert_array_equal(same[1], f.gae(*inputs)[1])


def test_ratios_of_rows_that_are_final_or_did_not_act_are_not_read():
    # γ = 0.5, λ = 1. Rows: filler, action, cut (value 4), action, ended, action, border.
    # The trace is cut at both final rows. δ_1 = 1 + 0.5·4 - 2 = 1, δ_3 = 3 + 0 - 5 = -2,
    # δ_5 = 2 + 0.5·8 - 1 = 5; no row has an acting successor.
    reward, value = column(NAN, 1, NAN, 3, NAN, 2, NAN), column(NAN, 2, 4, 5, NAN, 1, 8)
    rho = column(NAN, 0.5, NAN, 4, NAN, 0.25, NAN)
    advantage, target = f.gae(reward, value, flags(7, 4), flags(7, 2), ~flags(7, 0, 4), 0.5, 1.0, rho)
    np.testing.assert_allclose(advantage, column(0, 1, 0, -2, 0, 5, 0))
    np.testing.assert_allclose(target[[1, 3, 5]], column(2 + 0.5, 5 - 2, 1 + 0.25 * 5))
    np.testing.assert_allclose(target[[2]], column(4))


VTRACE = (column(1, 2, 3, NAN), column(2, 3, 4, 6), flags(4), flags(4), ~flags(4))


def test_vtrace():
    # γ = 0.5, λ = 0.8, ρ̄ = 2, c̄ = 1; π/μ = 4, 0.5, 1.5: ρ = 2, 0.5, 1.5;
    # c = 0.8, 0.4, 0.8.
    # δ_2 = 3 + 0.5·6 - 4 = 2      v_2 - V_2 = 1.5·2 = 3                   v_2 = 7
    # δ_1 = 2 + 0.5·4 - 3 = 1      v_1 - V_1 = 0.5·1 + 0.5·0.4·3 = 1.1     v_1 = 4.1
    # δ_0 = 1 + 0.5·3 - 2 = 0.5    v_0 - V_0 = 2·0.5 + 0.5·0.8·1.1 = 1.44  v_0 = 3.44
    # Advantages: 2 (1 + 0.5·4.1 - 2) = 2.1;  0.5 (2 + 0.5·7 - 3) = 1.25;
    # 1.5 (3 + 0.5·6 - 4) = 3
    advantage, target = f.vtrace(*VTRACE, column(4, 0.5, 1.5, NAN), 0.5, 0.8, 2.0, 1.0)
    np.testing.assert_allclose(advantage, column(2.1, 1.25, 3, 0), rtol=1e-6)
    np.testing.assert_allclose(target, column(3.44, 4.1, 7, 6), rtol=1e-6)


def test_vtrace_on_policy_is_the_n_step_return():
    # Remark 1 of the paper: with π = μ, v_t = r_t + γ r_{t+1} + … + γⁿ V: 3 + 0.5·6 = 6;
    # 2 + 0.5·6 = 5; 1 + 0.5·5 = 3.5.
    advantage, target = f.vtrace(*VTRACE, column(1, 1, 1, NAN), 0.5)
    np.testing.assert_allclose(target, column(3.5, 5, 6, 6))
    np.testing.assert_allclose(advantage, column(1.5, 2, 2, 0))
    same = f.gae(*VTRACE, 0.5, 1.0)
    np.testing.assert_allclose(advantage, same[0])
    np.testing.assert_allclose(target[:3], same[1][:3])


def test_vtrace_is_cut_at_final_rows_and_reads_no_cell_that_nobody_wrote():
    # As in the test of gae above: filler, action, cut (value 4), action, ended, action,
    # border.
    reward, value = column(NAN, 1, NAN, 3, NAN, 2, NAN), column(NAN, 2, 4, 5, NAN, 1, 8)
    rho = column(NAN, 0.5, NAN, 4, NAN, 0.25, NAN)
    advantage, target = f.vtrace(reward, value, flags(7, 4), flags(7, 2), ~flags(7, 0, 4), rho, 0.5)
    np.testing.assert_allclose(advantage, column(0, 0.5, 0, -2, 0, 1.25, 0))
    np.testing.assert_allclose(target[[1, 2, 3, 5, 6]], column(2.5, 4, 3, 2.25, 8))


def test_explained_variance():
    target = np.array([1, 2, 3, 4], np.float32)  # variance 1.25
    assert losses.explained_variance(target, target) == 1
    # errors 0 0 0 2: 1 - 0.75/1.25
    assert losses.explained_variance(np.array([1, 2, 3, 2], np.float32), target) == pytest.approx(0.4)
    assert np.isnan(losses.explained_variance(target, np.ones(4, np.float32)))


def test_merge_moments():
    # {1, 3}: mean 2, variance 1; {5, 7, 9}: mean 7, variance 8/3. Together: mean 5,
    # variance (16+4+0+4+16)/5 = 8.
    mean, variance, count = merge_moments(np.array(2.0), np.array(1.0), 2, np.array(7.0), np.array(8 / 3), 3)
    assert (mean, count) == (5, 5)
    assert variance == pytest.approx(8)


def test_clipped_surrogate():
    # ρ = 1.5, 0.5, 1.1, 1.5 with A = 1, -1, 2, -1 and ε = 0.2: min(1.5, 1.2) = 1.2;
    # min(-0.5, -0.8) = -0.8; 2.2; min(-1.5, -1.2) = -1.5. Mean (1.2 - 0.8 + 2.2 - 1.5)/4
    # = 0.275
    log_ratio = torch.tensor([1.5, 0.5, 1.1, 1.5]).log()
    assert losses.clipped_surrogate(
        log_ratio, torch.tensor([1.0, -1.0, 2.0, -1.0]), 0.2
    ).item() == pytest.approx(-0.275)


def test_value_losses():
    value, old, target = torch.tensor([2.0, 5.0]), torch.tensor([1.0, 5.0]), torch.tensor([4.0, 3.0])
    assert losses.value_loss(value, target).item() == 2  # ½ (4 + 4) / 2
    # Clipped at 0.5: 1.5 and 5 → (1.5 - 4)² = 6.25 > 4, (5 - 3)² = 4: ½ (6.25 + 4) / 2
    assert losses.clipped_value_loss(value, old, target, 0.5).item() == pytest.approx(2.5625)


def test_approximate_kl_and_clip_fraction():
    ratio = torch.tensor([1.0, 2.0])
    # k3: 0 and 2 - 1 - log 2 = 0.306853; mean 0.1534264
    assert losses.approximate_kl(ratio.log()).item() == pytest.approx(0.1534264)
    assert losses.clip_fraction(torch.tensor([1.0, 1.1, 1.3, 0.7]).log(), 0.2).item() == 0.5


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
def test_the_surrogate_s_derivative_by_hand(xp):
    # ε = 0.2. ρ = 1, A = 2: loss -2, derivative -2. ρ = 1.5, A = 1: clipped, -1.2 and 0.
    # ρ = 1.5, A = -1: 1.5 and 1.5. ρ = 0.5, A = -2: clipped, 1.6 and 0. Together -2 - 1.2
    # + 1.5 + 1.6 = -0.1. ρ - 1 - log ρ: 0, 0.5 - log 1.5 twice, -0.5 - log 0.5.
    log_ratio, advantage = (
        xp.asarray(np.array(x, np.float32)) for x in (np.log([1, 1.5, 1.5, 0.5]), [2, 1, -1, -2])
    )
    loss, derivative, divergence, clipped = f.differentiate_surrogate(xp, log_ratio, advantage, 0.2)
    np.testing.assert_allclose(derivative, [-2, 0, 1.5, 0], rtol=1e-6)
    assert float(loss) == pytest.approx(-0.1)
    assert float(divergence) == pytest.approx(0.5 - 2 * np.log(1.5) - np.log(0.5), rel=1e-5)
    assert int(clipped) == 3


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
def test_the_value_loss_s_derivative_by_hand(xp):
    # Targets 0. Unclipped: ½ (1 + 4 + 9) = 7. Clipped at old ± 0.5: near = 1.5, 1.5,
    # -2.5; squares 1 < 2.25 (and V has left: 0), 4, 9.
    value, target, old = (xp.asarray(np.array(x, np.float32)) for x in ([1, 2, -3], [0, 0, 0], [2, 1, -2]))
    loss, derivative = f.differentiate_value_loss(xp, value, target, old, None)
    assert float(loss) == 7
    np.testing.assert_array_equal(derivative, [1, 2, -3])
    loss, derivative = f.differentiate_value_loss(xp, value, target, old, 0.5)
    assert float(loss) == (2.25 + 4 + 9) / 2
    np.testing.assert_array_equal(derivative, [0, 2, -3])


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
def test_the_derivatives_are_those_that_autograd_finds(xp):
    rng = np.random.default_rng(0)
    log_ratio, advantage, value, target, old = (
        torch.from_numpy(x) for x in rng.standard_normal((5, 1000)).astype(np.float32)
    )
    log_ratio *= 0.3
    for x in (log_ratio, value):
        x.requires_grad_()
    whole = (
        losses.clipped_surrogate(log_ratio, advantage, 0.2),
        losses.clipped_value_loss(value, old, target, 0.4),
    )
    sum(whole).backward()
    plain = [xp.asarray(x.detach().numpy()) for x in (log_ratio, advantage, value, target, old)]
    loss, of_log_ratio, divergence, clipped = f.differentiate_surrogate(xp, plain[0], plain[1], 0.2)
    np.testing.assert_allclose(of_log_ratio / 1000, log_ratio.grad, atol=1e-9, rtol=1e-5)
    assert float(loss) / 1000 == pytest.approx(whole[0].item(), abs=1e-6)
    assert float(divergence) / 1000 == pytest.approx(losses.approximate_kl(log_ratio).item(), rel=1e-5)
    assert int(clipped) / 1000 == pytest.approx(losses.clip_fraction(log_ratio, 0.2).item())
    loss, of_value = f.differentiate_value_loss(xp, *plain[2:], 0.4)
    np.testing.assert_allclose(of_value / 1000, value.grad, atol=1e-9, rtol=1e-5)
    assert float(loss) / 1000 == pytest.approx(whole[1].item(), rel=1e-5)


def test_policy_gradient_and_its_derivative():
    log_prob, advantage = np.array([-1.0, -2.0], np.float32), np.array([3.0, -0.5], np.float32)
    loss, derivative = f.differentiate_policy_gradient(np, log_prob, advantage)
    assert loss == 2  # -(3·(-1) + (-0.5)·(-2))
    np.testing.assert_array_equal(derivative, [-3, 0.5])
