"""Runs whose settings change with their env steps."""

from pathlib import Path

import pytest

import tidemill
from tidemill import DQN, PPO, LinearSchedule
from tidemill.metrics.json_lines import read_metrics


def mean_of(name: str, run: Path, after: int = 0, to: float = float("inf")) -> float:
    """Return the mean over updates, of which a record may stand for several."""
    total, before = 0.0, 0.0
    for record in read_metrics(run):
        if name in record:
            if after < record["step"] <= to:
                total += record[name] * (record["update"] - before)
            elif record["step"] > to:
                break
            else:
                after_updates = record["update"]
            before = record["update"]
    return total / (before - (after_updates if after else 0))


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_each_update_is_done_by_the_settings_of_its_step(tmp_path: Path, launch: str) -> None:
    algorithm = PPO(
        learning_rate=LinearSchedule(1e-3, 0),
        clip=LinearSchedule(0.2, 0.1, from_step=1_024, to_step=3_072),
        minibatch_size=256,
        epochs=1,
    )
    tidemill.train(
        "CartPole-v1", algorithm=algorithm, steps=4_096, launch=launch, layout="given", quiet=True,
        run_dir=tmp_path / "run", lanes=4, sample_steps=256,
    )  # fmt: skip
    # five updates: final rows are no env steps, so that each is of less than 1,024
    assert mean_of("clip", tmp_path / "run") == pytest.approx((0.2 + 0.2 + 0.155 + 0.105 + 0.1) / 5, abs=5e-3)
    assert mean_of("learning_rate", tmp_path / "run") == pytest.approx(5.2e-4, abs=5e-5)


def test_a_resumed_run_goes_on_where_its_schedules_were(tmp_path: Path) -> None:
    algorithm = DQN(epsilon=LinearSchedule(1, 0, to_step=2_000), target_steps=100)
    tidemill.train(
        "CartPole-v1", algorithm=algorithm, steps=1_500, launch="inline", layout="given", quiet=True,
        run_dir=tmp_path / "run", warm_up=100,
    )  # fmt: skip
    tidemill.resume(tmp_path / "run", limits={"steps": 2_500}, quiet=True)
    assert mean_of("epsilon", tmp_path / "run", to=1_500) == pytest.approx(0.6, abs=0.03)
    assert mean_of("epsilon", tmp_path / "run", after=1_500) == pytest.approx(0.0625, abs=0.02)
