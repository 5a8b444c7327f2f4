"""Advantages and values' targets by the native core are those of the formulas."""

import numpy as np
import pytest

from tidemill.algorithms.native_traces import native_gae, native_vtrace
from tidemill.algorithms.policy_gradient_formulas import gae, vtrace

SPOILT = [None, np.nan, np.inf]


def rows_of(steps, seats, spoilt, seed=0):
    """[reward, value, done, truncated, acted], and ratios; cells that nobody wrote are
    NaN."""
    rng = np.random.default_rng(seed)
    reward, value = rng.standard_normal((2, steps, seats), np.float32)
    rho = rng.lognormal(size=(steps, seats)).astype(np.float32)
    done = rng.random((steps, seats)) < 0.15
    truncated = ~done & (rng.random((steps, seats)) < 0.15)
    acted = ~done & (rng.random((steps, seats)) < 0.9)
    rho[~acted | truncated] = np.nan
    value[done] = np.nan
    reward[-1] = np.nan
    if spoilt is not None:
        for array in (reward, value, rho):
            array[rng.random((steps, seats)) < 0.02] = spoilt
    return [reward, value, done, truncated, acted], rho


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (33, 1), (17, 8), (128, 64), (40, 13)])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_traces_are_the_formulas(kernels, shape, spoilt):
    rows, rho = rows_of(*shape, spoilt)
    with np.errstate(all="ignore"):
        both = [
            (gae(*rows, 0.99, 0.95), native_gae(kernels, *rows, 0.99, 0.95)),
            (gae(*rows, 0.9, 1.0, rho), native_gae(kernels, *rows, 0.9, 1.0, rho)),
            (vtrace(*rows, rho, 0.97), native_vtrace(kernels, *rows, rho, 0.97)),
            (
                vtrace(*rows, rho, 0.5, 0.8, 2.0, 0.7),
                native_vtrace(kernels, *rows, rho, 0.5, 0.8, 2.0, 0.7),
            ),
        ]
    for expected, found in both:
        for reference, array in zip(expected, found, strict=True):
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, reference, rtol=2e-5, atol=2e-5)


def test_rows_that_lie_apart_are_read(kernels):
    """A sample's fields may be parts of larger arrays."""
    rows, _ = rows_of(20, 6, None)
    halves = [array[:, ::2] for array in rows]
    for found, expected in zip(native_gae(kernels, *halves, 0.9, 0.9), gae(*halves, 0.9, 0.9), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
