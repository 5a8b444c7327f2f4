"""`make bench` runs and writes its files. No timing decides anything here."""

import json
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    Experiment,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
)
from tidemill.core.user_code_loading import load_attribute, load_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
compare: Any = load_file(BENCHMARKS / "compare.py", "benchmarks")
common: Any = load_file(BENCHMARKS / "peers" / "common.py", "benchmarks")


@pytest.mark.parametrize("script", [file.name for file in sorted(BENCHMARKS.glob("*.py"))])
def test_each_benchmark_finds_what_it_imports(script: str) -> None:
    load_file(BENCHMARKS / script, "benchmarks")


def test_the_quick_bench_writes_figures_table_and_plot(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text("# Benchmarks\n\nWritten by hand.\n")
    words = [sys.executable, str(BENCHMARKS / "compare.py"), "--quick", "--docs", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
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
    same = (
        "epochs",
        "learning_rate",
        "clip",
        "entropy_coefficient",
        "gamma",
        "gae_lambda",
        "value_coefficient",
        "max_gradient_norm",
        "adam_epsilon",
    )
    assert {key: getattr(trainer.algorithm, key) for key in same} == {key: getattr(work, key) for key in same}
    assert not trainer.algorithm.schedules and not trainer.algorithm.normalise_returns
    assert not trainer.algorithm.clip_apart and actor.slots == 2
    policy = experiment.policies["policy"]
    assert isinstance(policy, ActorCritic) and policy.normalise_observations is False
    assert actor.agents[0].sample_steps == work.rollout
    assert trainer.algorithm.minibatch_size == work.rollout * actor.lanes // work.minibatches


@pytest.mark.parametrize("name", list(common.OFF_POLICY))
def test_the_works_of_replay_memories_have_the_peers_hyperparameters(name: str) -> None:
    experiment: Experiment = load_attribute(f"{BENCHMARKS / 'works.py'}:{name}", "experiment")()
    experiment.check()
    actor, trainer, work = experiment.workers["actor"], experiment.workers["trainer"], common.OFF_POLICY[name]
    assert (
        isinstance(actor, ReplayActors)
        and isinstance(trainer, ReplayTrainer)
        and type(trainer.buffer) is Replay
    )
    learner, policy = trainer.algorithm, experiment.policies["policy"]
    assert type(learner).__name__ == work.algorithm
    same = ("learning_rate", "gamma", "target_rate", "max_gradient_norm")
    assert {key: getattr(learner, key) for key in same} == {key: getattr(work, key) for key in same}
    if isinstance(learner, DQN):
        assert learner.target_steps == work.target_updates * work.envs // work.updates
    assert vars(policy)["hidden"] == work.hidden
    assert (trainer.buffer.capacity, trainer.buffer.warm_up, trainer.buffer.steps) == (
        work.capacity,
        work.warm_up,
        1,
    )
    assert (actor.lanes, trainer.batch_size, Fraction(trainer.ratio or 0)) == (
        work.envs,
        work.batch,
        Fraction(work.updates, work.envs),
    )
    if isinstance(learner, DQN):
        assert not learner.double and [*learner.schedules] == ["epsilon"]
        assert isinstance(policy, QNetwork) and not policy.duelling and not policy.noise and policy.atoms == 1


def test_every_work_has_its_systems_and_every_system_its_script() -> None:
    assert {work.name for work in compare.WORKS.values() if not work.inline} == {
        *common.WORKS,
        *common.OFF_POLICY,
    }
    assert all(work.inline in compare.WORKS for work in compare.WORKS.values() if work.inline)
    for name in compare.WORKS:
        load_attribute(f"{BENCHMARKS / 'works.py'}:{name}", "experiment")().check()
    assert all((BENCHMARKS / script).exists() for script, *_ in compare.SCRIPTS)
    for name in compare.SYSTEMS:
        if name not in (compare.TIDEMILL, compare.INLINE):
            assert (BENCHMARKS / "peers" / f"{name}.py").exists() and (
                BENCHMARKS / "peers" / "requirements" / f"{name}.txt"
            ).exists()


def test_generated_parts_are_replaced_and_what_is_written_by_hand_stays() -> None:
    document = compare.put("# Benchmarks\n\nBy hand.\n", "pong", "old")
    document = compare.put(document + "\nAlso by hand.\n", "pong", r"new \1")
    assert document.count("make bench: pong") == 1 and "old" not in document and r"new \1" in document
    assert document.index("By hand.") < document.index("new") < document.index("Also by hand.")


def test_a_failed_system_is_reported_with_its_reason() -> None:
    good = {
        "steps": 2000,
        "core_seconds": 16.0,
        "steps_per_second": 100.0,
        "settings": {"envs": 2},
        "versions": {"torch": "2"},
        "seconds_to_475": None,
    }
    runs = {
        "cleanrl_style": {"1": good, "2": {**good, "steps_per_second": 300.0, "seconds_to_475": 4.0}},
        "sample_factory": {"1": {"failed": "no end"}},
    }
    data = {
        "seconds": 20.0,
        "date": "2026-11-21",
        "machine": {"processor": "P", "cores": 2, "gpu": False},
        "runs": runs,
    }
    text = compare.section_of(compare.WORKS["cartpole"], data, "")
    assert "`python benchmarks/compare.py cartpole --runs 2 --seconds 20`" in text
    assert "compare.py pong --runs 2 --seconds 10`" in compare.section_of(
        compare.WORKS["pong"], {**data, "seconds": 30.0}, ""
    )
    own = {**good, "bound": 200.0, "efficiency": 0.5, "notes": []}
    served = {**data, "runs": {"tidemill": {"1": own}, "inline": {"1": {**own, "steps_per_second": 125.0}}}}
    assert "0.80 of what inline inference makes (cartpole)" in compare.section_of(
        compare.WORKS["cartpole_served"], served, ""
    )
    assert (
        "| float32 | 200 (100 … 300) | 125 |" in text
        and "4.0 (1 of 2)" in text
        and "failed; 1 of 1 runs failed: no end" in text
    )


def test_readme_has_a_row_for_each_work_and_compares_the_same_data_type(tmp_path: Path) -> None:
    docs, readme = tmp_path / "docs", tmp_path / "README.md"
    readme.write_text(compare.put("# T\n", "overview", "old") + "By hand.\n")
    speeds = {"tidemill": 300.0, "cleanrl_style": 100.0, "stable_baselines3": 150.0}
    types = {"tidemill": "float32, convolutions bfloat16", "cleanrl_style": "bfloat16 (autocast)"}
    for leg in compare.LEGS:
        store = compare.Store(docs / "results" / "bench" / f"{leg}pong.json", 5.0, False)
        store.data["machine"] = {"processor": "P", "features": leg or "all", "cores": 2, "gpu": False}
        for name, speed in speeds.items():
            more = {"computes": types[name]} if name in types else {}
            run = {"bound": 1e3, "efficiency": 0.3, "notes": [], "settings": {}, "versions": {}, **more}
            store.add(name, 1, {"steps": 500, "core_seconds": 10.0, "steps_per_second": speed, **run})
    compare.report(docs)
    text = readme.read_text()
    beside = "float32, convolutions bfloat16 | 300 (50) | CleanRL-style file 100 (50): 3.00 × | 2 × P; all; "
    assert text.count(compare.WORKS["pong"].title) == 2 and beside in text and "P; avx2/; " in text
    assert text.count("; 1 × 5 s |") == 2
    assert "Stable-Baselines3" not in text and "old" not in text and "By hand." in text
    section = (docs / "benchmarks.md").read_text()
    assert "Of a core-second 1.00 × the most of any other." in section


def test_the_leg_keeps_avx512_from_numpy_as_it_names_it_today() -> None:
    names = r"""
import numpy._core._multiarray_umath as core
print(*(name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]))
"""
    told = compare.command([sys.executable, "-c", names], 120, **compare.AVX2).split()
    assert not [name for name in told if "AVX512" in name or name == "X86_V4"]


def test_the_leg_on_avx2_is_told_apart_and_keeps_to_float32(tmp_path: Path) -> None:
    machine = {"processor": "P", "features": "AVX2", "cores": 2, "gpu": False}
    for leg, speed in (("", 200.0), ("avx2/", 100.0)):
        store = compare.Store(tmp_path / "results" / "bench" / f"{leg}dqn.json", 5.0, False)
        store.data["machine"] = machine
        store.add("stable_baselines3", 1, {"steps_per_second": speed, "versions": {}, "settings": {}})
    compare.report(tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    full, avx2 = (compare.WORKS["dqn"].title + more for more in ("", ", on AVX2"))
    assert text.index("| 200 (") < text.index(f"### {avx2}") < text.index("| 100 (") and f"### {full}" in text
    assert "compare.py --avx2 dqn --runs 1" in text and "2 cores (P; AVX2), no GPU" in text
    assert all((tmp_path / "results" / "bench" / f"{leg}dqn.png").exists() for leg in compare.LEGS)
    assert not compare.ordinary(compare.WORKS["pong"]) and compare.ordinary(compare.WORKS["dqn"])


def test_a_run_of_a_replay_memory_is_measured_by_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"time/seconds": t, "step": 100.0 * t, "update": 50.0 * t} for t in (0.5, 2.5, 4.0, 12.0)]

    def command(words: list[str], deadline: float, **environment: str) -> str:
        assert "limits.seconds=12.0" in " ".join(words)
        folder = Path(next(word for word in words if word.startswith("--run-dir=")).partition("=")[2])
        folder.mkdir()
        workers, policies = {"actor": {"lanes": 8}, "trainer": {}}, {"policy": {"native": "avx2"}}
        config = {"workers": workers, "together": list(workers), "policies": policies}
        (folder / "config.json").write_text(json.dumps(config))
        for record in records:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            for _ in range(2):  # the second look has begun behind this
                looked.clear()
                assert looked.wait(60)
        return ""

    steps, looked = [0], threading.Event()
    so_far = compare.pairs.so_far

    def look(folder: Path) -> tuple[int, float]:
        found = so_far(folder)
        steps[0] = found[0]
        looked.set()
        return found

    monkeypatch.setattr(compare.pairs, "LOOK", 0.01)
    monkeypatch.setattr(compare.pairs, "so_far", look)
    monkeypatch.setattr(compare.pairs, "processor_seconds", lambda root: steps[0] / 500)
    monkeypatch.delenv("TIDEMILL_NATIVE", raising=False)
    monkeypatch.setattr(compare, "command", command)
    found = compare.run_tidemill(compare.WORKS["dqn"], 10.0, 1)
    assert (found["steps"], found["seconds"], found["steps_per_second"], found["updates"]) == (
        950.0,
        9.5,
        100.0,
        475.0,
    )
    assert found["settings"] == {"workers": "actor+trainer", "lanes": 8}
    assert found["core_seconds"] == pytest.approx(950 / 500)
    assert found["computes"] == "float32, native core avx2"
    data = {"seconds": 10.0, "date": "2026-11-22", "machine": {"processor": "P", "cores": 2, "gpu": False}}
    others = {"steps_per_second": 50.0, "settings": {}, "versions": {}}
    text = compare.section_of(
        compare.WORKS["dqn"],
        {**data, "runs": {"tidemill": {"1": found}, "stable_baselines3": {"1": others}}},
        "results",
    )
    assert "Best other system: 2.00 times slower." in text and "Bound" not in text


def test_a_command_past_its_deadline_is_killed() -> None:
    with pytest.raises(compare.Failed, match="no end after"):
        compare.command([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    with pytest.raises(compare.Failed, match="status 3: sorry"):
        compare.command(
            [sys.executable, "-c", "import sys; print('sorry', file=sys.stderr); sys.exit(3)"], 60
        )


def test_what_a_command_leaves_in_its_temporary_folder_goes() -> None:
    left = compare.command([sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], 60)
    assert not Path(left.strip()).exists() and not Path(left.strip()).parent.exists()


def store_of(folder: Path, seconds: float = 20.0, keep: bool = True) -> Any:
    return compare.Store(folder / "cartpole.json", seconds, keep)


def test_a_run_that_fails_in_any_way_holds_up_no_other_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    wrong: dict[str, Exception] = {
        "stable_baselines3": ValueError("no JSON"),
        "cleanrl_style": OSError("no such file"),
    }

    def run(system: str, work: str, seconds: float, seed: int) -> dict[str, Any]:
        asked.append((system, seed))
        if system in wrong and seed == 2:
            raise wrong[system]
        return {"steps_per_second": 100.0}

    monkeypatch.setattr(compare, "run_peer", run)
    monkeypatch.setattr(
        compare, "run_tidemill", lambda work, seconds, seed: run("tidemill", work.name, seconds, seed)
    )
    work, systems = compare.WORKS["cartpole"], ("stable_baselines3", "tidemill", "cleanrl_style")
    compare.measure(work, 2, 20.0, systems, store_of(tmp_path, keep=False))
    assert asked == [(system, number) for number in (1, 2) for system in systems]
    assert (
        "ValueError: no JSON"
        in json.loads((tmp_path / "cartpole.json").read_text())["runs"]["stable_baselines3"]["2"]["failed"]
    )
    asked.clear()
    wrong.clear()
    compare.measure(work, 2, 20.0, systems, store_of(tmp_path))  # goes on
    assert asked == [("stable_baselines3", 2), ("cleanrl_style", 2)]
    compare.measure(work, 1, 10.0, ("tidemill",), store_of(tmp_path, 10.0))  # of another length
    assert asked[2:] == [("tidemill", 1)]
    monkeypatch.setattr(compare, "machine", lambda: {"processor": "another", "cores": 2, "gpu": False})
    compare.measure(work, 1, 10.0, ("tidemill",), store_of(tmp_path, 10.0))
    assert asked[3:] == [("tidemill", 1)]


def test_a_system_that_cannot_be_installed_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def prepare(name: str, title: str) -> Path:
        tried.append(name)
        raise compare.Failed("no network")

    monkeypatch.setattr(compare, "prepare", prepare)
    monkeypatch.setattr(compare, "_refused", {})
    for seed in (1, 2):
        with pytest.raises(compare.Failed, match="could not be installed: no network"):
            compare.run_peer("sample_factory", "pong", 1.0, seed)
    assert tried == ["sample_factory"]


def test_how_long_it_will_take_follows_from_what_runs_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(tmp_path)
    systems = ("tidemill", "sample_factory")
    guessed = compare.expected(store, 5, systems)
    assert guessed > 5 * 2 * 20
    for number, took in enumerate((50.0, 70.0), 1):
        store.add("tidemill", number, {"steps_per_second": 1.0, "took": took})
    store.add("sample_factory", 1, {"failed": "no end"})
    peers = compare.expected(store, 5, ("sample_factory",))
    assert compare.expected(store, 5, systems) == pytest.approx(3 * 60.0 + peers)
    assert compare.expected(store, 2, ("tidemill",)) == 0
    compare.foretell({"cartpole": store}, {"cartpole": ("tidemill",)}, 5, tmp_path, {})
    assert "this will take about 3 minutes (runs 3 minutes)" in capsys.readouterr().out
    (tmp_path / "results" / "bench").mkdir(parents=True)
    name = " ".join(next(iter(compare.SCRIPTS)))
    (tmp_path / "results" / "bench" / "scripts.json").write_text(
        json.dumps({name: {"output": "", "seconds": 36_000.0}})
    )
    compare.foretell({}, {}, 5, tmp_path, compare.SCRIPTS)
    compare.foretell({}, {}, 5, tmp_path, {("start.py",): 150.0})
    anew, rest = capsys.readouterr().out.splitlines()
    assert "10." in anew and "hours" in anew and "minutes" in rest


def test_the_table_of_the_same_settings_has_a_row_for_each_number_of_lanes(tmp_path: Path) -> None:
    def run(speed: float) -> dict[str, Any]:
        return {"steps": 100, "core_seconds": 1.0, "steps_per_second": speed, "versions": {}}

    assert compare.same_settings(tmp_path) == ""
    folder = tmp_path / "results" / "bench"
    folder.mkdir(parents=True)
    facts = {"cores": 2, "processor": "X", "features": "", "gpu": False}
    for name, ours in (("hopper_one", 900.0), ("hopper_small", 1500.0)):
        runs = {"tidemill": {"1": run(ours)}, "stable_baselines3": {"1": run(300.0), "2": {"failed": "x"}}}
        told = {"seconds": 4.0, "machine": facts, "date": "2026-11-25", "runs": runs}
        (folder / f"{name}.json").write_text(json.dumps(told))
    *_, one, small = compare.same_settings(tmp_path).splitlines()
    assert one == "| Hopper-v5 | 1 × 2,048 | 900 (100) | 300 (100); 3.0 × |  | 2 × X; 2026-11-25 |"
    assert small.startswith("| Hopper-v5 | 8 × 256 | 1,500 (100) | 300 (100); 5.0 × |")
    parts = compare.parts_of(tmp_path)
    assert [next(parts)[0], next(parts)[0]] == ["introduction", "same settings"]
