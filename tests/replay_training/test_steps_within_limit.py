"""Where a replay memory's lanes step together the run's limit of steps is exact all the
same."""

from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
from tests.run.journaled import journaled_steps
from tests.run.watching import EXPERIMENTS

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Offered, SampleConsumer
from tidemill.core.user_code_loading import load_file
from tidemill.replay_training.steps_within_limit import StepsWithinLimit
from tidemill.store.checkpoint import read_newest
from tidemill.training.train import train

experiments = load_file(EXPERIMENTS, "test")


class Ticks(SampleConsumer):
    """Three seats, of which these take a step in each tick."""

    def __init__(self, *stepped: tuple[bool, bool, bool]) -> None:
        self._stepped = list(stepped)
        self.rows: list[Sample] = []

    def offered(self) -> list[Offered] | None:
        return None

    def consume(self) -> Sample | None:
        stepped = np.array([self._stepped.pop(0)])
        self.rows.append(
            Sample(
                version=np.where(stepped, 5, -1),
                voided=np.zeros((1, 3), np.bool_),
                done=stepped.copy(),
                on_reset=~stepped,
            )
        )
        return Sample(self.rows[-1])

    def release(self) -> None:
        raise AssertionError("nobody releases")


def test_steps_beyond_the_limit_are_void_and_the_slot_stays_as_it_was() -> None:
    every, source = (True,) * 3, Ticks((True, False, True), (True,) * 3, (True,) * 3)
    limited = StepsWithinLimit(source, 4)
    ticks = [limited.consume() for _ in range(3)]
    assert [(tick["version"] >= 0)[0].tolist() for tick in ticks if tick is not None] == [
        [True, False, True],
        [True, True, False],
        [False] * 3,
    ]
    for tick, voided in zip(ticks, [(False,) * 3, (False, False, True), every], strict=True):
        assert tick is not None
        assert tuple(tick["voided"][0].tolist()) == voided
        assert not (tick["voided"] & tick["done"]).any()
    assert all((row["version"][0] == 5).all() and not row["voided"].any() for row in source.rows[1:])


@pytest.mark.parametrize("steps", [100, 101])
def test_a_run_has_as_many_steps_as_its_limit_says(tmp_path: Path, steps: int) -> None:
    made = experiments.numbered_memory(slots=False)
    made = made.replace(limits=made.limits.replace(updates=None, steps=steps))
    result = train(made, run_dir=tmp_path / "run", source=EXPERIMENTS, launch="inline", quiet=True)
    facts = read_newest(tmp_path / "run" / "checkpoints" / "policy").facts
    n = facts["limiter"]
    assert result.summary["env_steps"] == facts["steps"] == n["committed"] == steps
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == facts["updates"] == floor((steps - n["waived"]) * Fraction(1, 2))
    lived, _ = journaled_steps(tmp_path / "run")
    assert len(lived) == len(set(lived)) == steps
