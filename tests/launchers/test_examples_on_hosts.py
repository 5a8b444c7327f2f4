"""Every kind of experiment runs on two hosts unchanged, to its exact limit: the examples,
shortly."""

from pathlib import Path

import pytest
from tests.launchers.host_launchers import TwoHosts

import tidemill
from tidemill.core.user_code_loading import load_attribute

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {
    "population.py": "experiment",
    "self_play.py": "experiment",
    "curriculum.py": "experiment",
    "augmentation.py": "experiment",  # buffer workers
    "impala.py": "served",  # policy workers
    "repeat_previous.py": "experiment",  # memory
    "simple_spread.py": "separate",  # several policies
    "hybrid_actions.py": "experiment",
    "simulator.py": "reach",
    "own_algorithm.py": "experiment",
    "own_worker.py": "experiment",
}


@pytest.mark.parametrize("name", KINDS)
def test_an_example_runs_on_two_hosts(name: str, tmp_path: Path) -> None:
    file = EXAMPLES / name
    experiment = load_attribute(f"{file}:{KINDS[name]}", "experiment")()
    experiment = experiment.replace(limits=experiment.limits.replace(steps=1200, mean_return=None))
    result = tidemill.train(
        experiment, launch=TwoHosts, layout="given", run_dir=tmp_path / "run", source=file, quiet=True
    )
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 1200
