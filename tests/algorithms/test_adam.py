"""Adam in numpy is torch's."""

import numpy as np
import pytest
import torch

from tidemill.algorithms import adam
from tidemill.algorithms.adam import Adam


@pytest.mark.parametrize("block", [adam.BLOCK, 7])
def test_many_steps_are_those_of_torch(block, monkeypatch):
    monkeypatch.setattr(adam, "BLOCK", block)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(50).astype(np.float32)
    gradient = np.empty(50, np.float32)
    theirs = torch.tensor(weights, requires_grad=True)
    reference, own = torch.optim.Adam([theirs], eps=1e-5), Adam(weights, gradient, 1e-5)
    for step in range(300):
        rate, scale = 1e-2 / (1 + step), 1 / (1 + step % 3)
        gradient[...] = rng.standard_normal(50) * 10.0 ** rng.integers(-6, 2, 50)
        gradient[:5] = 0
        reference.param_groups[0]["lr"] = rate
        theirs.grad = torch.from_numpy(gradient) * scale
        reference.step()
        own.descend(rate, 1 / scale, None, 0.0)
    np.testing.assert_allclose(weights, theirs.detach(), rtol=1e-5, atol=1e-6)
    state = own.state()
    assert state["0.step"] == 300
    for name in ("exp_avg", "exp_avg_sq"):
        np.testing.assert_allclose(state[f"0.{name}"], reference.state[theirs][name], rtol=1e-4, atol=1e-7)


def test_the_state_is_a_copy_and_goes_on_exactly():
    rng = np.random.default_rng(0)
    weights, gradient = rng.standard_normal((2, 20)).astype(np.float32)
    one = Adam(weights, gradient, 1e-5)
    one.descend(1e-2, 1.0, None, 0.0)
    state, copy = one.state(), weights.copy()
    two = Adam(copy, gradient, 1e-5)
    two.load_state(state)
    for optimiser in (one, two):
        optimiser.descend(1e-2, 2.0, None, 0.0)
    np.testing.assert_array_equal(weights, copy)
    assert state["0.step"] == 1
