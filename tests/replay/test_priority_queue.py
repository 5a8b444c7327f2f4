"""The priority queue: what is trained on first, what is evicted first, and what is
counted."""

import numpy as np
import pytest
from tests.replay.stream import ROWS, Stream, mark_of

from tidemill.api.buffer import SampleCounts
from tidemill.core.errors import ConfigError
from tidemill.replay.priority_queue import PriorityQueue


def stream_of(places: int, reuses: int = 1, **settings: object) -> Stream:
    return Stream(PriorityQueue(capacity=places * ROWS, reuses=reuses), **settings)  # type: ignore[arg-type]


def test_slots_are_free_again_at_once() -> None:
    stream = stream_of(8, slots=1, rows=8 * ROWS)
    for mark in range(8):
        assert stream.send(mark)
        taken = stream.buffer.take(0)
        assert (taken is None) == (mark < 7)
    assert taken is not None
    assert sorted(map(mark_of, taken)) == list(range(8))  # none was written over


def test_the_newest_are_used_first() -> None:
    stream = stream_of(4, slots=4)
    for mark in range(4):
        stream.send(mark)
    assert [stream.take() for _ in range(5)] == [[3], [2], [1], [0], None]
    assert stream.buffer.counts == SampleCounts()


def test_most_uses_left_come_first_then_the_newest() -> None:
    stream = stream_of(8, reuses=3, slots=4)
    stream.send(1), stream.send(2)
    assert stream.take() == [2]
    assert stream.take() == [1]
    stream.send(3)
    assert [stream.take() for _ in range(8)] == [[3], [3], [2], [1], [3], [2], [1], None]
    assert stream.buffer.counts == SampleCounts(reused=6)


def test_fewest_uses_left_are_evicted_first_then_the_oldest() -> None:
    stream = stream_of(3, reuses=3, slots=4)
    for mark in (1, 2, 3):
        stream.send(mark)
    assert [stream.take(), stream.take()] == [[3], [2]]  # 1: three uses left; 2 and 3: two
    stream.send(4)
    assert stream.take() == [4]  # in the place of 2, the older of those
    stream.send(5)
    assert stream.take() == [5]  # in the place of 3
    assert stream.buffer.counts == SampleCounts(evicted=2)
    assert [stream.take() for _ in range(8)] == [[1], [5], [4], [1], [5], [4], [1], None]


def test_what_arrives_in_excess_is_counted_not_lost_silently() -> None:
    stream = stream_of(2, slots=10)
    sent = used = 0
    for mark in range(10):
        sent += stream.send(mark)
    while stream.take() is not None:
        used += 1
    assert sent == 10 and used == 2 and stream.buffer.counts.evicted == 8


def test_a_batch_stays_until_it_was_used_whatever_comes_meanwhile() -> None:
    stream = stream_of(4, reuses=2, slots=4)
    stream.send(1)
    first = stream.buffer.take(0)
    stream.send(2)
    assert first is not None and stream.buffer.take(0) == first
    stream.buffer.release()
    assert stream.take() == [2] and stream.buffer.counts == SampleCounts()


def test_staleness_counts_at_each_use() -> None:
    stream = stream_of(4, reuses=3, slots=4, max_lag=2)
    stream.send(1, version=5), stream.send(2, version=4), stream.send(3, version=2)
    assert stream.take(5) == [2]  # 3 was too old when it came
    assert stream.buffer.counts == SampleCounts(dropped=1)
    assert stream.take(6) == [1]
    assert stream.take(7) == [1] and stream.take(7) == [1]  # 2 has become too old
    assert stream.take(7) is None
    assert stream.buffer.counts == SampleCounts(dropped=2, reused=2)


def test_a_sample_is_what_was_sent_whatever_its_size() -> None:
    """Producers of different numbers of seats share the places."""
    stream = Stream(PriorityQueue(capacity=2 * 12), seats=(3, 1), rows=8)
    assert stream.send(1, producer=0) and stream.send(2, producer=1)
    taken = stream.buffer.take(0)
    assert taken is not None
    assert sorted((held.sample["version"].shape, mark_of(held)) for held in taken) == [
        ((6, 1), 2),
        ((6, 3), 1),
    ]
    arrays = [array for held in taken for array in held.sample.values()]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_a_sample_that_it_cannot_hold_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"capacity = 7 rows cannot hold a sample of 8; make it at least 8, or .* less"
    ):
        Stream(PriorityQueue(capacity=7))
    with pytest.raises(
        ConfigError,
        match=r"capacity = 15 rows \(8 for each of 2 trainers\) holds 1 samples of 8 rows, less than a batch "
        r"of 9 rows",
    ):
        Stream(PriorityQueue(capacity=15), rows=9, trainers=2)
    with pytest.raises(ConfigError, match="less than a batch of 2 samples, as many as actors fill at a time"):
        Stream(PriorityQueue(capacity=15), seats=(2, 2))
    with pytest.raises(ConfigError, match="capacity = 0"):
        PriorityQueue(capacity=0)
    with pytest.raises(ConfigError, match="reuses = 2, but max_policy_lag = 0"):
        PriorityQueue(capacity=8, reuses=2).check(0)


def test_its_memory_is_told() -> None:
    (need,) = stream_of(5).buffer.needs
    assert need.what == "buffers" and need.nbytes == 5 * sum(
        -(-6 * 2 * width // 64) * 64 for width in (1, 1, 1, 4, 8, 2, 1, 4, 4)
    )
