"""`make bench` runs and writes its files. No timing decides anything here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill import PPO, Actors, Experiment, Trainer
from tidemill.core.source import load_attribute, load_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
compare: Any = load_file(BENCHMARKS / "compare.py", "benchmarks")
common: Any = load_file(BENCHMARKS / "peers" / "common.py", "benchmarks")


def test_the_quick_bench_writes_figures_table_and_plot(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text("# Benchmarks\n\nWritten by hand.\n")
    words = [sys.executable, str(BENCHMARKS / "compare.py"), "--quick", "--docs", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "results" / "bench" / "cartpole.json").read_text())["runs"]["tidemill"]["1"]
    assert "failed" not in run, run["failed"]
    assert run["steps_per_second"] > 0 and run["bound"] > 0 and run["versions"]["torch"]
    assert (tmp_path / "results" / "bench" / "cartpole.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "benchmarks.md").read_text()
    assert "Written by hand." in text and "### CartPole-v1" in text and "| Tidemill |" in text


@pytest.mark.parametrize("name", list(common.WORKS))
def test_the_works_have_the_peers_hyperparameters(name: str) -> None:
    experiment: Experiment = load_attribute(f"{BENCHMARKS / 'works.py'}:{name}", "experiment")()
    experiment.check()
    actor, trainer, work = experiment.workers["actor"], experiment.workers["trainer"], common.WORKS[name]
    assert isinstance(actor, Actors) and isinstance(trainer, Trainer) and isinstance(trainer.algorithm, PPO)
    same = ("epochs", "learning_rate", "clip", "entropy_coefficient", "gamma", "gae_lambda", "value_coefficient", "max_gradient_norm", "adam_epsilon")
    assert {key: getattr(trainer.algorithm, key) for key in same} == {key: getattr(work, key) for key in same}
    assert trainer.algorithm.learning_rate_schedule == "constant" and not trainer.algorithm.normalise_returns
    assert actor.agents[0].sample_steps == work.rollout
    assert trainer.algorithm.minibatch_size == work.rollout * actor.lanes // work.minibatches


def test_every_work_has_its_systems_and_every_system_its_script() -> None:
    assert {work.name for work in compare.WORKS.values() if set(work.systems) != {compare.TIDEMILL}} == set(common.WORKS)
    assert all(work.inline in compare.WORKS for work in compare.WORKS.values() if work.inline)
    for name in compare.WORKS:
        load_attribute(f"{BENCHMARKS / 'works.py'}:{name}", "experiment")().check()
    assert all((BENCHMARKS / script).exists() for script, *_ in compare.SCRIPTS)
    for name in compare.SYSTEMS:
        if name != compare.TIDEMILL:
            assert (BENCHMARKS / "peers" / f"{name}.py").exists() and (BENCHMARKS / "peers" / "requirements" / f"{name}.txt").exists()


def test_generated_parts_are_replaced_and_what_is_written_by_hand_stays() -> None:
    document = compare.put("# Benchmarks\n\nBy hand.\n", "pong", "old")
    document = compare.put(document + "\nAlso by hand.\n", "pong", r"new \1")
    assert document.count("make bench: pong") == 1 and "old" not in document and r"new \1" in document
    assert document.index("By hand.") < document.index("new") < document.index("Also by hand.")


def test_a_failed_system_is_reported_with_its_reason() -> None:
    good = {"steps_per_second": 100.0, "settings": {"envs": 2}, "versions": {"torch": "2"}, "seconds_to_475": None}
    runs = {
        "cleanrl_style": {"1": good, "2": {**good, "steps_per_second": 300.0, "seconds_to_475": 4.0}},
        "sample_factory": {"1": {"failed": "no end"}},
    }
    data = {"seconds": 20.0, "date": "2026-11-21", "machine": {"processor": "P", "cores": 2, "gpu": False}, "runs": runs}
    text = compare.section_of(compare.WORKS["cartpole"], data, "results/bench")
    served = {**data, "runs": {"tidemill": {"1": {**good, "bound": 200.0, "efficiency": 0.5, "notes": []}}}}
    assert "0.80 of what inline inference makes (cartpole)" in compare.section_of(compare.WORKS["cartpole_served"], served, "", 125.0)
    assert "200 (100 … 300)" in text and "4.0 (1 of 2)" in text and "failed; 1 of 1 runs failed: no end" in text


def test_a_command_past_its_deadline_is_killed() -> None:
    with pytest.raises(compare.Failed, match="no end after"):
        compare.command([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    with pytest.raises(compare.Failed, match="status 3: sorry"):
        compare.command([sys.executable, "-c", "import sys; print('sorry', file=sys.stderr); sys.exit(3)"], 60)
