"""The sums of equal trainers, over the local transport: right, the same everywhere, never
more than a message ahead, and what becomes of them where one dies."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.api.edges import Edge
from tidemill.core.errors import SchemaError
from tidemill.streams.all_reduce import WHOLE, AllReduce, HostSums, SharedSums, SumBroken
from tidemill.transports.local import local_endpoints

HOSTS = st.sampled_from(["", "aab", "aabb", "aba", "abc", "abbac", "aaabc"])  # of each rank; "": by rank


def trainers(count: int, most_bytes: int, hosts: Sequence[str] = ()) -> list[SharedSums]:
    names = [f"trainer-{i}" for i in range(count)]
    edges = [Edge(f"sums/p/{a}/{b}", "channel", a, (b,)) for a in names for b in names if a != b]
    ends = {name: endpoints for name, (endpoints, _) in local_endpoints(names, edges).items()}
    if hosts:
        return [
            HostSums(
                rank,
                hosts,
                lambda i, name=name: ends[name].producer(f"sums/p/{name}/{names[i]}"),  # type: ignore[misc]
                lambda i, name=name: ends[name].consumer(f"sums/p/{names[i]}/{name}"),  # type: ignore[misc]
                most_bytes,
            )
            for rank, name in enumerate(names)
        ]
    return [
        AllReduce(
            rank,
            {i: ends[name].producer(f"sums/p/{name}/{other}") for i, other in enumerate(names) if i != rank},
            {i: ends[name].consumer(f"sums/p/{other}/{name}") for i, other in enumerate(names) if i != rank},
            most_bytes,
        )
        for rank, name in enumerate(names)
    ]


@settings(max_examples=80)
@given(
    count=st.integers(2, 5),
    size=st.sampled_from([1, 3, 1000, WHOLE // 4 + 1, WHOLE // 4 + 4099]),
    dtype=st.sampled_from(["float32", "float64"]),
    hosts=HOSTS,
    seed=st.integers(0, 2**31),
)
def test_everybody_has_the_sum_and_the_same_bits(
    count: int, size: int, dtype: str, hosts: str, seed: int
) -> None:
    rng, count = np.random.default_rng(seed), len(hosts) or count
    group = trainers(count, size * 8, hosts)
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


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(2, 4),
    size=st.sampled_from([3, 3, 3, WHOLE // 8 + 1]),
    hosts=HOSTS,
    seed=st.integers(0, 2**31),
)
def test_where_one_dies_sums_are_whole_or_broken_and_all_begin_anew(
    count: int, size: int, hosts: str, seed: int
) -> None:
    """Some die at random moments; what one has finished that died alone, all others can
    finish. What was sent before counts no more once all begin anew."""
    rng, count = np.random.default_rng(seed), len(hosts) or count
    group, finished = trainers(count, size * 8, hosts), [0] * count
    dead = rng.choice(count, int(rng.integers(1, count)), replace=False).tolist()
    ranks = set(range(count))

    def sums(rank: int, first: int) -> Iterator[None]:
        for number in range(first, first + 4):
            array = np.full(size, 10.0**rank * number)
            yield from group[rank].add(array)
            assert (array == sum(10.0**other * number for other in ranks)).all()
            finished[rank] += 1

    going = {rank: sums(rank, 1) for rank in ranks}
    lives = dict(zip(dead, rng.integers(0, 40, len(dead)).tolist(), strict=True))
    while going:
        rank = int(rng.choice(list(going)))
        if rank in lives:
            lives[rank] -= 1
            if lives[rank] < 0:
                del going[rank]
                continue
        if not going.keys() & lives.keys() and rng.random() < 0.3:  # all have died, which some are told
            group[rank].lost.update(dead)
        try:
            if next(going[rank], "done") == "done":
                del going[rank]
        except SumBroken:
            group[rank].break_off()
            del going[rank]
    living = [finished[rank] for rank in ranks.difference(dead)]
    assert max(living) - min(living) <= 1
    assert len(dead) > 1 or min(living) >= finished[dead[0]]
    before, begin = [*finished], rng.permutation(count).tolist()
    while going or begin:
        if begin and (not going or rng.random() < 0.3):
            rank = begin.pop(0)
            group[rank].begin(1)
            going[rank] = sums(rank, 5)
        rank = int(rng.choice(list(going)))
        if next(going[rank], "done") == "done":
            del going[rank]
    assert finished == [number + 4 for number in before]


def test_who_has_broken_off_brings_nothing_more_by_whatever_it_sends() -> None:
    """The first rank of the other host has heard from the first one that it brings no
    more; what it sends by mistake then is no sum."""
    group = trainers(4, 64, "aabb")
    arrays = [np.full(4, 10.0**rank) for rank in range(4)]
    going = {rank: group[rank].add(arrays[rank]) for rank in (0, 2, 3)}  # 1 has died
    for _ in range(4):
        assert [next(each, "done") for each in going.values()] == [None] * 3
    group[0].lost.add(1)
    with pytest.raises(SumBroken):
        next(going[0])
    group[0].break_off()
    with pytest.raises(SumBroken):
        next(going[2])
    group[2].break_off()
    next(group[2].add(np.full(4, 7.0)))
    with pytest.raises(SumBroken):
        next(going[3])
    assert (arrays[3] == 1100).all()  # what its host brings


def test_what_is_too_large_is_refused() -> None:
    first, _ = trainers(2, 64)
    with pytest.raises(SchemaError, match="72 bytes is larger than the largest, of 64"):
        next(first.add(np.ones(9)))
