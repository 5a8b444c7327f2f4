import numpy as np

from tidemill.algorithms.learner_state import random_state, set_random_state


def test_a_stream_goes_on_where_it_was_saved():
    rng = np.random.default_rng(7)
    rng.integers(0, 10, 3, np.int32)  # leaves half a word behind
    saved = random_state(rng)
    expected = rng.integers(0, 1000, 5, np.int32), rng.permutation(20)
    other = np.random.default_rng(8)
    set_random_state(other, saved)
    np.testing.assert_array_equal(other.integers(0, 1000, 5, np.int32), expected[0])
    np.testing.assert_array_equal(other.permutation(20), expected[1])
