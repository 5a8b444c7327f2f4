"""Learners that go on from the state of another one."""

import numpy as np
import pytest

from tidemill.core.errors import SchemaError


def check_restored(one, other, sample_of):
    """Whatever `other` was, it goes on just as `one` would, whose weights and state it
    takes over."""
    for i in range(5):
        one.update([sample_of(i)], 0.0)
    other.policy.load({name: array.copy() for name, array in one.policy.parameters().items()}, 5)
    other.load_state(one.state())
    for i in range(5, 12):
        assert one.update([sample_of(i)], 0.0) == other.update([sample_of(i)], 0.0)
    np.testing.assert_array_equal(one.policy.flat, other.policy.flat)
    with pytest.raises(SchemaError, match="does not fit"):
        other.load_state({})
