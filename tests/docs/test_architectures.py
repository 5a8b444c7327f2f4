"""The page of architectures: each experiment on it trains, in one thread and in
processes."""

import json
import re
from math import isfinite
from pathlib import Path

import pytest

from tidemill import Experiment, Limits, train
from tidemill.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
PREAMBLE, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def made(block: str) -> Experiment:
    names: dict[str, Experiment] = {}
    exec(PREAMBLE + block, names)
    return names["experiment"]


EXPERIMENTS = {experiment.name: experiment for experiment in map(made, BLOCKS)}


def test_each_section_has_its_experiment() -> None:
    assert [*EXPERIMENTS] == ["inline", "central", "decoupled", "turns", "policies", "readers"]


@pytest.mark.parametrize("launch", ["inline", "processes"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_trains(name: str, launch: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name].replace(limits=Limits(updates=2))
    summary = train(experiment, launch=launch, run_dir=tmp_path / "run", quiet=True, layout="given").summary
    assert summary["status"] == "completed" and summary["updates"] >= 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines and all(
        isfinite(value) for line in lines for value in line.values() if isinstance(value, float)
    )


def test_more_policy_workers_than_askers_are_refused() -> None:
    experiment = EXPERIMENTS["decoupled"]
    workers = {**experiment.workers, "policy": experiment.workers["policy"].replace(count=4)}
    with pytest.raises(ConfigError, match="policy-3 would never be asked"):
        experiment.replace(workers=workers).check()
