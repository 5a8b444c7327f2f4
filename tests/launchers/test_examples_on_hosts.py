"""Every kind of experiment runs on two hosts unchanged, to its exact limit: most of the
examples, shortly."""

from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path

import pytest
from tests.launchers.host_launchers import TwoHosts
from tests.remote.served import applied, client, serving
from tests.run.journaled import journaled_steps
from tests.run.watching import EXPERIMENTS

import tidemill
from tidemill.core.user_code_loading import load_attribute
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {
    "population.py": "experiment",
    "self_play.py": "experiment",
    "curriculum.py": "experiment",
    "impala.py": "served",  # policy workers
    "repeat_previous.py": "experiment",  # memory
    "simple_spread.py": "separate",  # several policies
    "hybrid_actions.py": "experiment",
    "simulator.py": "reach",
    "own_network.py": "experiment",
    "own_worker.py": "experiment",
    # buffer workers, and an algorithm, a policy and a processor of the user's own: as in
    # augmentation.py and own_algorithm.py, whose five processes would import torch
    str(EXPERIMENTS): "numbered_behind_buffers",
}


class OneActorOnB(TwoHosts):
    """The first actor stands on the other host, however many cores there are."""

    def __init__(self) -> None:
        super().__init__({"actor-0": "b"})


@pytest.mark.parametrize("name", KINDS, ids=[Path(name).name for name in KINDS])
def test_an_example_runs_on_two_hosts(name: str, tmp_path: Path) -> None:
    file = EXAMPLES / name
    given = (str(tmp_path / "sample"),) if file == EXPERIMENTS else ()
    experiment = load_attribute(f"{file}:{KINDS[name]}", "experiment")(*given)
    experiment = experiment.replace(limits=experiment.limits.replace(steps=1200, mean_return=None))
    result = tidemill.train(
        experiment, launch=TwoHosts, layout="given", run_dir=tmp_path / "run", source=file, quiet=True
    )
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 1200
    assert RunFolder.open(result.folder).read("placement.json")["b"]["workers"]
    beyond = [record for record in read_metrics(result.folder) if record["step"] >= 1200]
    if len(experiment.trained()) == 1:  # else each has a last update of its own
        assert len(beyond) == 1  # nobody trains on


def test_a_replay_memory_on_two_hosts_has_as_many_steps_as_its_limit_says(tmp_path: Path) -> None:
    made = load_attribute(f"{EXPERIMENTS}:numbered_memory", "experiment")(slots=False)
    made = made.replace(limits=made.limits.replace(updates=None, steps=101))
    result = tidemill.train(
        made, launch=OneActorOnB, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True
    )
    facts = read_newest(tmp_path / "run" / "checkpoints" / "policy").facts
    n = facts["limiter"]
    assert result.summary["env_steps"] == facts["steps"] == n["committed"] == 101
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == facts["updates"] == floor((101 - n["waived"]) * Fraction(1, 2))
    lived, _ = journaled_steps(tmp_path / "run")
    assert len(lived) == len(set(lived)) == 101


def test_a_service_is_played_from_another_host(tmp_path: Path) -> None:
    with serving() as server:
        made = load_attribute(f"{EXPERIMENTS}:experiment", "experiment")(client(server), lanes=4)
        made = made.replace(limits=replace(made.limits, updates=3))
        result = tidemill.train(
            made, launch=OneActorOnB, layout="given", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True
        )
        assert result.summary["status"] == "completed" and result.summary["updates"] == 3
        assert applied(server) >= result.summary["env_steps"] > 0
