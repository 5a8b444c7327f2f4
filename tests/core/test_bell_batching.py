import threading

import pytest

from tidemill.core.bell_batching import BatchedRings, ring


def test_rings_put_off_are_rung_once_each_in_order_at_the_end():
    rung = []

    def first():
        rung.append("first")

    def second():
        rung.append("second")

    ring(second)
    with BatchedRings():
        for call in (first, second, first, second):
            ring(call)
        assert rung == ["second"]
    assert rung == ["second", "first", "second"]
    ring(first)
    assert rung == ["second", "first", "second", "first"]


def test_rings_within_are_rung_at_the_end_of_the_whole_and_after_errors_too():
    rung = []

    def fails():
        with BatchedRings():
            ring(rung.clear)
            raise ValueError("as the test asks")

    with BatchedRings():
        with pytest.raises(ValueError, match="as the test asks"):
            fails()
        rung.append(1)
    assert rung == []


def test_other_threads_ring_at_once():
    rung = threading.Event()
    with BatchedRings():
        thread = threading.Thread(target=ring, args=(rung.set,))
        thread.start()
        assert rung.wait(60)
    thread.join()
