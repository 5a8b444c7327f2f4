"""Versions of whole runs: kept while they train, gone on from, never two sets of weights
under one number."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run import experiments

import tidemill
from tidemill.core.schema import Arrays
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder
from tidemill.workers import version_writer


@pytest.fixture(autouse=True)
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last version is waited for, however busy the disk is."""
    monkeypatch.setattr(version_writer, "LAST_PUSH", 60.0)


def train(path: Path, **trainer: Any) -> RunFolder:
    made = experiments.ppo()
    workers = {
        **made.workers,
        "trainer": made.workers["trainer"].replace(
            database_seconds=1e-9, checkpoints=100, checkpoint_seconds=1e-9, checkpoint_share=1, **trainer
        ),
    }
    tidemill.train(made.replace(workers=workers), launch="inline", run_dir=path, quiet=True)
    return RunFolder.open(path)


def weights(run: RunFolder) -> dict[int, Arrays]:
    return {v.version: run.database().load("policy", v.version)[0] for v in run.database().versions("policy")}


def test_a_run_keeps_its_first_and_last_version_and_some_between(tmp_path: Path) -> None:
    run = train(tmp_path / "run", database_versions=5)
    found = run.database().versions("policy")
    assert found[-1].version == 8 and found[-1].tags == ("latest",) and len(found) <= 5
    assert found[-1].counters["env_steps"] == run.read("summary.json")["env_steps"]
    # version 0 is among the five where the disk was slow
    steps = {0: 0} | {row["update"]: row["step"] for row in read_metrics(run.path)}
    assert [v.counters["env_steps"] for v in found] == [steps[v.version] for v in found]


@pytest.mark.parametrize("lost", [0, 3])
def test_a_resumed_run_goes_on_with_its_versions(tmp_path: Path, lost: int) -> None:
    """Also when it was killed: then versions may be newer than the last checkpoint."""
    run = train(tmp_path / "run")
    checkpoints = run.checkpoints("policy")
    for update in range(9 - lost, 9):
        shutil.rmtree(checkpoints / f"update-{update}")
    (run.path / "summary.json").unlink()
    run.database().tag("policy", "mine", 0)
    before = weights(run)
    tidemill.resume(run.path, launch="inline", limits={"updates": 12}, quiet=True)
    after = weights(run)
    assert {0, 8 - lost, 12} <= after.keys() and run.database().tags("policy") == {"mine": 0, "latest": 12}
    for version in before.keys() & after.keys():
        assert version <= 8 - lost or lost, "a version was made again"
        same = all(np.array_equal(before[version][name], after[version][name]) for name in after[version])
        assert same if version <= 8 - lost else not same, f"version {version}"
    # what is under its number is what the run's own checkpoint has under it
    for version, arrays in after.items():
        loaded = tidemill.load(run.path, checkpoint=version) if version else None
        if loaded is not None:
            own = loaded._policy.parameters()
            assert all(np.array_equal(own[name], array) for name, array in arrays.items())
