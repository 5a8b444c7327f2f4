"""Every formula against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from tidemill.algorithms import formulas as f

NAN = np.nan


def column(*values, dtype=np.float32):
    """One seat: [T, 1]."""
    return np.array(values, dtype).reshape(-1, 1)


def flags(length, *places):
    out = np.zeros((length, 1), bool)
    out[list(places)] = True
    return out


def test_gae_of_an_episode_that_ends_takes_zero_as_the_value_after_it():
    # γ = 0.5, λ = 0.5. Rows: two actions, the ended row (its value was never written), then a new episode with one action and the border row.
    # δ_1 = 2 + 0.5·0 - 3 = -1           A_1 = -1
    # δ_0 = 1 + 0.5·3 - 2 = 0.5          A_0 = 0.5 + 0.25·(-1) = 0.25
    # δ_3 = 4 + 0.5·6 - 5 = 2            A_3 = 2
    advantage, target = f.gae(column(1, 2, 0, 4, NAN), column(2, 3, NAN, 5, 6), flags(5, 2), flags(5), ~flags(5, 2), 0.5, 0.5)
    np.testing.assert_allclose(advantage, column(0.25, -1, 0, 2, 0))
    np.testing.assert_allclose(target[[0, 1, 3]], column(2.25, 2, 7))


def test_gae_of_an_episode_that_is_cut_takes_the_bootstrap_value_and_stops_the_trace():
    # The same, but row 2 is truncated with bootstrap value 8:
    # δ_1 = 2 + 0.5·8 - 3 = 3            A_1 = 3
    # δ_0 = 0.5                          A_0 = 0.5 + 0.25·3 = 1.25
    advantage, target = f.gae(column(1, 2, 0, 4, NAN), column(2, 3, 8, 5, 6), flags(5), flags(5, 2), ~flags(5), 0.5, 0.5)
    np.testing.assert_allclose(advantage, column(1.25, 3, 0, 2, 0))
    np.testing.assert_allclose(target[[0, 1, 3]], column(3.25, 6, 7))


def test_gae_reads_no_cell_of_fillers_and_of_rows_that_did_not_act():
    acted = ~flags(4, 0, 3)
    advantage, target = f.gae(column(NAN, 1, NAN, NAN), column(NAN, 2, 4, NAN), flags(4, 3), flags(4, 2), acted, 0.5, 0.5)
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
        alone, _ = f.gae(reward[:, one], value[:, one], done[:, one], truncated[:, one], ~done[:, one], 0.9, 0.8)
        np.testing.assert_array_equal(whole[:, one], alone)


def test_gae_with_ratios_is_the_trace_of_v_trace():
    # γ = 0.5, λ = 1; ρ = (2 → clipped to 1, 0.5, –). δ_1 = 2 + 0.5·4 - 3 = 1; δ_0 = 1 + 0.5·3 - 2 = 0.5.
    # A_1 = 1; A_0 = 0.5 + 0.5·0.5·1 = 0.75. Targets: 2 + 1·0.75 = 2.75 and 3 + 0.5·1 = 3.5.
    inputs = (column(1, 2, NAN), column(2, 3, 4), flags(3), flags(3), ~flags(3), 0.5, 1.0)
    advantage, target = f.gae(*inputs, rho=column(2, 0.5, NAN))
    np.testing.assert_allclose(advantage, column(0.75, 1, 0))
    np.testing.assert_allclose(target[:2], column(2.75, 3.5))
    same = f.gae(*inputs, rho=column(1, 1, 1))
    np.testing.assert_array_equal(same[0], f.gae(*inputs)[0])
    np.testing.assert_array_equal(same[1], f.gae(*inputs)[1])


def test_masked_mean():
    assert f.masked_mean(np.array([1, NAN, 3], np.float32), np.array([True, False, True])) == 2  # (1 + 3) / 2
    assert f.masked_mean(np.array([NAN], np.float32), np.array([False])) == 0


def test_explained_variance():
    target = np.array([1, 2, 3, 4], np.float32)  # variance 1.25
    assert f.explained_variance(target, target) == 1
    assert f.explained_variance(np.array([1, 2, 3, 2], np.float32), target) == pytest.approx(0.4)  # errors 0 0 0 2, variance 0.75: 1 - 0.75/1.25
    assert np.isnan(f.explained_variance(target, np.ones(4, np.float32)))


def test_merge_moments():
    # {1, 3}: mean 2, variance 1; {5, 7, 9}: mean 7, variance 8/3. Together: mean 5, variance (16+4+0+4+16)/5 = 8.
    mean, variance, count = f.merge_moments(np.array(2.0), np.array(1.0), 2, np.array(7.0), np.array(8 / 3), 3)
    assert (mean, count) == (5, 5)
    assert variance == pytest.approx(8)


def test_clipped_surrogate():
    # ρ = 1.5, 0.5, 1.1, 1.5 with A = 1, -1, 2, -1 and ε = 0.2:
    # min(1.5, 1.2) = 1.2; min(-0.5, -0.8) = -0.8; 2.2; min(-1.5, -1.2) = -1.5. Mean (1.2 - 0.8 + 2.2 - 1.5)/4 = 0.275
    log_ratio = torch.tensor([1.5, 0.5, 1.1, 1.5]).log()
    assert f.clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0, 2.0, -1.0]), 0.2).item() == pytest.approx(-0.275)


def test_value_losses():
    value, old, target = torch.tensor([2.0, 5.0]), torch.tensor([1.0, 5.0]), torch.tensor([4.0, 3.0])
    assert f.value_loss(value, target).item() == 2  # ½ (4 + 4) / 2
    # Clipped at 0.5: 1.5 and 5 → (1.5 - 4)² = 6.25 > 4, (5 - 3)² = 4: ½ (6.25 + 4) / 2
    assert f.clipped_value_loss(value, old, target, 0.5).item() == pytest.approx(2.5625)


def test_approximate_kl_and_clip_fraction():
    ratio = torch.tensor([1.0, 2.0])
    # k3: 0 and 2 - 1 - log 2 = 0.306853; mean 0.1534264
    assert f.approximate_kl(ratio.log()).item() == pytest.approx(0.1534264)
    assert f.clip_fraction(torch.tensor([1.0, 1.1, 1.3, 0.7]).log(), 0.2).item() == 0.5
