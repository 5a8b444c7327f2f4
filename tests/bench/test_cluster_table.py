"""The table of `benchmarks/cluster.py`: what it counts as kept, and where it goes on."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tidemill.core.user_code_loading import load_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("zmq")


WELL = {"noticed": 0.1, "ratio": 0.8, "lost": 0}


@pytest.fixture(scope="module")
def cluster() -> Any:
    return load_file(BENCHMARKS / "cluster.py", "benchmarks")


def given(keep: Path) -> argparse.Namespace:
    return argparse.Namespace(keep=keep, short=False, seed=1, times=None)


def test_a_table_goes_on_where_it_was_cut(cluster: Any, tmp_path: Path) -> None:
    drawn: list[float] = []

    def measure(draw: Random, short: bool) -> Iterator[dict[str, float]]:
        drawn.append(draw.random())
        if len(drawn) == 2:
            raise KeyboardInterrupt
        yield {"noticed": drawn[-1]}

    part, keep = cluster.Part("it dies", measure, {"noticed": 1.0}), given(tmp_path / "kept")
    with pytest.raises(KeyboardInterrupt):
        cluster.measured("actor", part, 3, keep)
    found = cluster.measured("actor", part, 3, keep)
    assert [each["noticed"] for each in found] == [drawn[0], *drawn[2:]]
    assert drawn[1] == drawn[2] and len(set(drawn)) == 3  # the one that was cut is drawn again
    assert cluster.measured("actor", part, 3, keep) == found and len(drawn) == 4


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        ([{"noticed": 0.4}, {"noticed": 9.0}, {"noticed": 0.5, "ratio": 0.8}, {"lost": 0}], []),
        ([{**WELL, "noticed": 0.6}], ["it: noticed 0.6"]),
        ([{**WELL, "ratio": 0.6}], ["it: ratio 0.6"]),
        ([WELL, WELL, {"lost": 2}], ["it: lost 2"]),
        ([{"noticed": 0.1, "lost": 0}], ["it: ratio was not measured"]),
        ([{"noticed": 0.1}, {"broken": "two errors"}], ["it: broken: two errors"]),
    ],
)
def test_medians_and_single_losses_break_promises(
    cluster: Any, seen: list[dict[str, Any]], wrong: list[str]
) -> None:
    part = cluster.Part("a fault", None, {"noticed": 0.5}, {"ratio": 0.7}, {"lost": 0.0})
    text, found = cluster.line_of("it", part, seen)
    assert found == wrong
    assert text.endswith("| NO |" if wrong else "| yes |") and "noticed ≤ 0.5; lost ≤ 0; ratio ≥ 0.7" in text
