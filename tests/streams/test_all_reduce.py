"""The sums of equal trainers, over the local transport: right, the same everywhere, and
never more than a message ahead."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.api.edges import Edge
from tidemill.core.errors import SchemaError
from tidemill.streams.all_reduce import WHOLE, AllReduce
from tidemill.transports.local import local_endpoints


def trainers(count: int, most_bytes: int) -> list[AllReduce]:
    names = [f"trainer-{i}" for i in range(count)]
    edges = [Edge(f"sums/p/{a}/{b}", "channel", a, (b,)) for a in names for b in names if a != b]
    ends = {name: endpoints for name, (endpoints, _) in local_endpoints(names, edges).items()}
    return [
        AllReduce(
            rank,
            {i: ends[name].producer(f"sums/p/{name}/{other}") for i, other in enumerate(names) if i != rank},
            {i: ends[name].consumer(f"sums/p/{other}/{name}") for i, other in enumerate(names) if i != rank},
            most_bytes,
        )
        for rank, name in enumerate(names)
    ]


@settings(max_examples=40)
@given(
    count=st.integers(2, 5),
    size=st.sampled_from([1, 3, 1000, WHOLE // 4 + 1, WHOLE // 4 + 4099]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**31),
)
def test_everybody_has_the_sum_and_the_same_bits(count: int, size: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = trainers(count, size * 8)
    for _ in range(3):
        given_ = [rng.standard_normal(size).astype(dtype) for _ in range(count)]
        arrays = [array.copy() for array in given_]
        going = {rank: group[rank].add(arrays[rank]) for rank in range(count)}
        while going:  # whoever is drawn goes on, so that trainers come in any order and some run ahead
            rank = int(rng.choice(list(going)))
            if next(going[rank], "done") == "done":
                del going[rank]
        np.testing.assert_allclose(arrays[0], np.sum(given_, 0, dtype=np.float64), rtol=1e-4, atol=1e-4)
        for array in arrays[1:]:
            assert array.tobytes() == arrays[0].tobytes()


def test_one_who_runs_ahead_waits_for_the_others() -> None:
    first, second = trainers(2, 64)
    mine, theirs = np.ones(4), np.full(4, 2.0)
    going = first.add(mine)
    assert [next(going, "done") for _ in range(5)] == [None] * 5
    assert (mine == 1).all()
    assert next(second.add(theirs), "done") == "done"
    assert next(going, "done") == "done"
    assert (mine == 3).all() and (theirs == 3).all()


def test_what_is_too_large_is_refused() -> None:
    first, _ = trainers(2, 64)
    with pytest.raises(SchemaError, match="72 bytes does not fit a slot of 64"):
        next(first.add(np.ones(9)))
