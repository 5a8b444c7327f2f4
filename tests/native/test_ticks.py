"""What the native core does with arrays of a tick leaves the bits that numpy leaves."""

import numpy as np
import pytest

from tidemill.api.environment import Tick
from tidemill.api.spaces import Box
from tidemill.api.stream import Answer
from tidemill.core.schema import Field, allocate
from tidemill.envs.lane_ends import LaneEnds
from tidemill.workers.step_books import StepBooks

ROWS = 5
SPACE = Box((2,), "float32", (-1.0,), (1.0,))
SCHEMA = {
    "reward": Field((), "float32"),
    "action": Field((3,), "float32"),
    "log_prob": Field((), "float32"),
    "value": Field((), "float32"),
    "state.h": Field((2,), "float32"),
    "version": Field((), "int64"),
    "policy": Field((), "int16"),
}
ANSWERS = ("action", "log_prob", "value")
KEPT = ("action", "state.h")


def ticks_of(seats, rng):
    """A tick that is filled anew again and again, with few ends."""
    tick = Tick.allocate(SPACE, seats, {}, False)
    while True:
        tick.reward[:] = rng.standard_normal(seats)
        tick.done[:], tick.truncated[:] = rng.random((2, seats)) < 0.5 / seats
        yield tick


@pytest.mark.parametrize("seats", [1, 7, 64])
@pytest.mark.parametrize("returns", ["float32", "float64"])
def test_ticks_are_counted_as_numpy_counts_them(kernels, seats, returns):
    kept = allocate({name: SCHEMA[name] for name in KEPT}, (seats,))
    both = [
        (np.zeros(seats, returns), np.zeros(seats, np.int32), allocate(SCHEMA, (ROWS, seats)), core)
        for core in (kernels, None)
    ]
    books = [StepBooks(total, length, ANSWERS, kept, core) for total, length, _, core in both]
    rng, ends = np.random.default_rng(seats), []
    for number, tick in zip(range(60), ticks_of(seats, rng), strict=False):
        tick.present[-1], tick.restarted[0] = number % 7 != 3, number % 11 == 4
        if number == 30:  # an environment that does not write in place
            tick.reward, tick.done = tick.reward.copy(), tick.done.copy()
        if number == 40:  # nor in the types that it is given
            tick.reward, tick.truncated = tick.reward.astype(np.float64), tick.truncated.astype(np.int64)
        if number == 45:
            tick.reward, tick.truncated = np.zeros((seats, 2), np.float32)[:, 0], tick.truncated.astype(bool)
        told = [
            each.count(tick, block, number % (ROWS + 1) - 1)
            for each, (*_, block, _) in zip(books, both, strict=True)
        ]
        assert told[0] == told[1]
        assert (told[0] is None) == (number % 7 == 3 or number % 11 == 4)
        assert told[0] in (None, bool((tick.done | tick.truncated).any()))
        (own, length, block, _), (total, steps, rows, _) = both
        assert np.array_equal(own, total) and np.array_equal(length, steps)
        assert np.array_equal(block["reward"], rows["reward"])
        ends.append(told[0])
    assert {True, False, None} <= {*ends}


@pytest.mark.parametrize("seats", [1, 7, 64])
@pytest.mark.parametrize("kind", ["alike", "other type", "gaps"])
def test_answers_are_written_as_numpy_writes_them(kernels, seats, kind):
    """Blocks and answers come from a few slots each; an answer may have more rows."""
    rng = np.random.default_rng(seats)
    fields = {name: SCHEMA[name] for name in ("action", "log_prob", "value", "state.h")}
    answers = [allocate(fields, (seats + 2,)) for _ in range(2)]
    for answer in answers if kind == "other type" else ():
        answer["action"] = answer["action"].astype(np.float64)
    for answer in answers if kind == "gaps" else ():
        answer["log_prob"] = np.zeros(2 * (seats + 2), np.float32)[::2]
    sides = []
    for core in (kernels, None):
        kept = allocate({name: SCHEMA[name] for name in KEPT}, (seats,))
        books = StepBooks(np.zeros(seats, np.float32), np.zeros(seats, np.int32), ANSWERS, kept, core)
        sides.append((books, kept, [allocate(SCHEMA, (ROWS, seats)) for _ in range(3)]))
    for number in range(40):
        fields = answers[number % 2]
        if number == 30:  # a policy that does not write in place
            fields["value"] = fields["value"].copy()
        for array in fields.values():
            array[...] = rng.standard_normal(array.shape)
        for books, _, blocks in sides:
            books.complete(Answer(fields, number // 3, number // 9 - 1), blocks[number % 3], number % ROWS)
        (_, own, blocks), (_, kept, others) = sides
        for block, other in zip([own, *blocks], [kept, *others], strict=True):
            assert all(np.array_equal(block[name], other[name]) for name in block), number
    assert own["action"].any() and blocks[0]["version"].any()


@pytest.mark.parametrize("lanes", [1, 7, 64])
def test_lanes_end_and_wait_as_numpy_has_it(kernels, lanes):
    rng, sides = np.random.default_rng(lanes), []
    for core in (kernels, None):
        counts, limits, idle = np.zeros(lanes, np.int64), np.full(lanes, 9), np.zeros(lanes, np.bool_)
        tick = Tick.allocate(SPACE, lanes, {}, False)
        sides.append((LaneEnds(counts, limits, idle, core), tick, counts, idle))
    cut = waited = 0
    for _ in range(60):
        reward, done, again = rng.standard_normal(lanes), rng.random(lanes) < 0.1, rng.random(lanes) < 0.4
        for ends, tick, counts, idle in sides:
            counts += 1
            counts[idle & again] = 0
            idle[again] = False
            tick.reward[:], tick.done[:] = reward, done
            tick.restarted.fill(True)
            ends.tell(tick)
        (_, own, _, idle), (_, other, _, waiting) = sides
        for name in ("reward", "done", "truncated", "present", "restarted"):
            assert np.array_equal(getattr(own, name), getattr(other, name)), name
        assert np.array_equal(idle, waiting)
        cut, waited = cut + own.truncated.sum(), waited + (~own.present).sum()
    assert cut and waited
