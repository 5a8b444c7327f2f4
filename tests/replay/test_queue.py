"""The queue: order, slots that are held, uses in succession, and what is too old at the
moment of training."""

import numpy as np
import pytest
from tests.replay.stream import ROWS, Stream

from tidemill.api.buffer import SampleCounts
from tidemill.core.errors import ConfigError
from tidemill.replay.queue import Queue


def test_samples_are_used_in_order_where_they_lie() -> None:
    stream = Stream(Queue(), rows=2 * ROWS)
    slots = [block["reward"] for block in stream.producers[0]._groups[0][0]._slots]  # type: ignore[attr-defined]
    assert stream.send(1) and stream.take() is None
    assert stream.send(2) and not stream.send(3)
    taken = stream.buffer.take(0)
    assert taken is not None
    assert all(np.shares_memory(held.sample["reward"], slot) for held, slot in zip(taken, slots, strict=True))
    assert not stream.send(3)  # both are held until they were used
    stream.buffer.release()
    assert stream.send(3) and stream.send(4) and stream.take() == [3, 4]
    assert stream.buffer.counts == SampleCounts()


def test_a_batch_is_used_so_many_times_in_succession() -> None:
    stream = Stream(Queue(reuses=3))
    assert stream.send(1) and stream.send(2)
    assert [stream.take(version) for version in range(7)] == [[1], [1], [1], [2], [2], [2], None]
    assert stream.buffer.counts == SampleCounts(reused=4)


def test_slots_are_held_until_the_last_use() -> None:
    stream = Stream(Queue(reuses=2), slots=1)
    assert stream.send(1) and stream.take() == [1]
    assert not stream.send(2)
    assert stream.take() == [1]
    assert stream.send(2)


def test_what_became_too_old_between_two_uses_is_dropped_and_its_place_filled() -> None:
    stream = Stream(Queue(reuses=3), slots=4, rows=2 * ROWS, max_lag=2)
    for mark, version in ((1, 8), (2, 10)):
        stream.send(mark, version)
    assert stream.take(10) == [1, 2]
    stream.send(3, 10)
    assert stream.take(11) == [2, 3]  # 1 is 3 behind
    assert stream.buffer.counts == SampleCounts(dropped=1, reused=1)
    assert stream.take(12) == [2, 3]
    assert stream.take(12) is None  # 2 is used up
    stream.send(4, 12)
    assert stream.take(12) == [3, 4]
    for mark in range(5, 8):
        assert stream.send(mark, 12), "slots were not given back"


def test_a_slot_is_given_back_in_order_whatever_is_done_first() -> None:
    """The second sample is dropped while the first is still in use."""
    stream = Stream(Queue(reuses=2), slots=3, rows=2 * ROWS, max_lag=1)
    for mark, version in ((1, 5), (2, 4), (3, 5)):
        stream.send(mark, version)
    assert stream.take(5) == [1, 2]
    assert stream.take(6) == [1, 3]
    assert stream.buffer.counts.dropped == 1
    assert [stream.send(mark, 6) for mark in (4, 5, 6)] == [True, True, False]  # the slots of 1 and 2
    assert stream.take(6) == [3, 4]


def test_a_batch_that_no_slots_can_hold_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError,
        match=r"batch_size = 34 \(17 for each of 2 trainers\) is more than the 16 rows that all 2 sample "
        r"slots hold",
    ):
        Stream(Queue(), rows=17, trainers=2)
    stream = Stream(Queue(), rows=17, late=True)  # whoever makes the samples is not there yet
    assert stream.take() is None
    stream.offer()
    with pytest.raises(ConfigError, match="no batch would ever be full"):
        stream.take()


def test_uses_that_would_always_be_too_old_are_refused() -> None:
    with pytest.raises(ConfigError, match="reuses = 0"):
        Queue(reuses=0)
    Queue(reuses=3).check(2)
    with pytest.raises(
        ConfigError, match=r"reuses = 3, but max_policy_lag = 1.*take reuses = 2 or max_policy_lag = 2"
    ):
        Queue(reuses=3).check(1)
