"""The sums of equal trainers that torch.distributed adds up, by gloo."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from tests.streams.test_all_reduce import trainers

from tidemill.core.errors import ConfigError, RunError, SchemaError
from tidemill.streams import torch_sums
from tidemill.streams.all_reduce import AllReduce, SumBroken
from tidemill.streams.torch_sums import SMALL, TorchSums


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def group(count: int, folder: Path, most_bytes: int) -> list[TorchSums]:
    channels = [each for each in trainers(count, SMALL) if isinstance(each, AllReduce)]
    made = [TorchSums(each, folder / "sums-p", "cpu", most_bytes, Event().set) for each in channels]
    for each in made:
        each.begin(0)
    return made


def turns(going: dict[int, Iterator[None]]) -> None:
    """Have all come to their ends, by turns."""
    while going:
        for rank in [*going]:
            if next(going[rank], "done") == "done":
                del going[rank]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everybody_has_the_sum_and_the_same_bits_and_no_file_is_left(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "sums-p@1f").touch()  # of some that were killed as they met
    members = group(3, tmp_path, 8 * 70_001)
    for size in (1, 3, 500, 70_001, 7):  # small ones, and those that torch adds up
        brought = [rng.standard_normal(size).astype(dtype) for _ in members]
        arrays = [array.copy() for array in brought]
        turns({rank: member.add(arrays[rank]) for rank, member in enumerate(members)})
        np.testing.assert_allclose(arrays[0], np.sum(brought, 0, dtype=np.float64), rtol=1e-4, atol=1e-5)
        assert len({array.tobytes() for array in arrays}) == 1
    turns({rank: member.word() for rank, member in enumerate(members)})
    assert [*tmp_path.iterdir()] == []


def test_a_sum_breaks_for_want_of_one_and_all_meet_anew(tmp_path: Path) -> None:
    members = group(3, tmp_path, 4000)
    arrays = [np.full(1000, rank + 1.0, np.float32) for rank in range(3)]
    turns({rank: member.add(arrays[rank]) for rank, member in enumerate(members)})
    (tmp_path / "sums-p.x@1f").touch()  # of a policy that is called so
    going = {rank: members[rank].add(arrays[rank]) for rank in (0, 1)}
    assert all(next(each, "done") is None for each in going.values())
    members[2].break_off()  # and it is gone
    for rank, each in going.items():
        members[rank].lost.add(2)
        with pytest.raises(SumBroken):
            turns({rank: each})
        members[rank].break_off()
    assert (arrays[0] == 6).all() and (arrays[1] == 6).all()  # what they bring is as it was
    for member in members:
        member.begin(1)
    turns({rank: member.add(arrays[rank]) for rank, member in enumerate(members)})
    assert all((array == 18).all() for array in arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["sums-p.x@1f"]


def test_one_that_is_late_is_waited_for(tmp_path: Path) -> None:
    members = group(2, tmp_path, 4000)
    arrays = [np.full(1000, rank + 1.0, np.float32) for rank in range(2)]
    going = {rank: member.add(arrays[rank]) for rank, member in enumerate(members)}
    assert [next(going[0]) for _ in range(100)] == [None] * 100
    assert not members[0]._meeting  # the time to meet has not begun
    turns(going)
    assert (arrays[0] == 3).all()
    for member in members:  # what a sum has without a word of its own
        member._group._set_default_timeout(timedelta(seconds=0.2))
    going = {rank: member.add(arrays[rank]) for rank, member in enumerate(members)}
    next(going[0])
    time.sleep(1.0)
    turns(going)
    assert (arrays[0] == 6).all()


def test_what_is_too_large_is_refused_and_so_are_cores_beside_gpus(tmp_path: Path) -> None:
    first, second = group(2, tmp_path, 4000)
    with pytest.raises(SchemaError, match="4008 bytes is larger than the largest, of 4000"):
        next(first.add(np.ones(501)))
    second._device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="1 of 2 equal trainers have a GPU"):
        turns({rank: member.add(np.ones(500)) for rank, member in enumerate((first, second))})


def test_a_failure_that_no_death_explains_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sums, "LOST_S", 0.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    members = group(2, tmp_path, 4000)
    with pytest.raises(RunError, match=r"could not add up: .*GLOO_SOCKET_IFNAME"):
        turns({rank: member.add(np.ones(500)) for rank, member in enumerate(members)})
