"""Tuning: what is tried, what is kept, what is written. No timing decides anything
here."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Scripted, Trainer
from tidemill.bench import tune as tuning
from tidemill.bench.efficiency import Run
from tidemill.bench.tune import candidates, check_out, literal_of, source_text, table, tune, undivided, write
from tidemill.cli import measuring
from tidemill.cli.main import app
from tidemill.core.errors import ConfigError, Interrupted, RunError
from tidemill.core.user_code_loading import load_attribute
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import apply, layout_of, why_unchanged
from tidemill.layouts.layout import Layout

CARTPOLE = Costs(4.5e-6, 4.5e-6, 0.3e-6, 17e-6, 3.6e-6, 1, True)
SLEEPS = Costs(74e-6, 5.1e-3, 0.3e-6, 17e-6, 3.6e-6, 1, True, True)


def experiment(environment: Any = None, **trainer: Any) -> Experiment:
    actors = Actors(
        environment=environment or Gymnasium(id="CartPole-v1"), lanes=64, agents=(AgentSpec(sample_steps=64),)
    )
    workers = {"actor": actors, "trainer": Trainer(**{"algorithm": PPO(minibatch_size=1024), **trainer})}
    return Experiment(name="small", policies={"policy": ActorCritic(hidden=(8,))}, workers=workers)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Layout, float]]:
    """Runs take no time; the more trainers and the longer the samples, the faster. Two
    slots fail."""
    ran: list[tuple[Layout, float]] = []

    def run_for(made: Experiment, source: Path | None, seconds: float) -> Run:
        layout = layout_of(made)
        ran.append((layout, seconds))
        if layout.together and layout.slots == 2:
            raise RunError("no room\nfor two")
        return Run(1000.0 * layout.trainers + layout.sample_steps + len(ran) / 100, seconds, 9, 0.0, ())

    monkeypatch.setattr(tuning, "run_for", run_for)
    monkeypatch.setattr(tuning, "costs_of", lambda *_: CARTPOLE)
    monkeypatch.setattr(tuning, "cores", lambda: 2)
    return ran


@pytest.mark.parametrize("costs", [CARTPOLE, SLEEPS])
@pytest.mark.parametrize("cores", [1, 2, 16])
def test_what_is_tried_has_the_same_batches(costs: Costs, cores: int) -> None:
    made = experiment()
    trials = candidates(made, undivided(made), costs, cores)
    layouts = [trial.layout for trial in trials]
    assert 3 <= len(set(layouts)) == len(layouts) <= tuning.MOST
    assert {layout.rows for layout in layouts} == {64 * 64}
    assert [mark for trial in trials for mark in trial.marks] == ["auto", "given"]
    assert min(layout.sample_steps for layout in layouts) >= 32
    if costs is SLEEPS:
        assert {layout.ring for layout in layouts} >= {4, 8, 16}
    for layout in layouts:
        apply(made, layout).check()


def test_the_best_few_run_again_by_turns(pretend: list[tuple[Layout, float]]) -> None:
    heard: list[str] = []
    found = tune(experiment(), None, 6.0, lambda now: heard.append(f"{now.done}/{now.runs} {now.now}"))
    coarse, fine = [r for r in pretend if r[1] == 3.0], [r[0] for r in pretend if r[1] == 6.0]
    assert len(coarse) == len(found.trials) and len(fine) == 6
    assert fine[:3] == fine[:2:-1] and len(set(fine)) == 3  # the same, the other way round
    assert (found.best.layout.trainers, found.best.layout.sample_steps) == (2, 128)
    assert found.best.layout in fine and len(found.best.fine) == 2
    (failed,) = [trial for trial in found.trials if trial.failed]
    assert failed.failed == "no room" and failed.layout not in fine
    assert (
        heard[0].startswith(f"0/{len(coarse) + 6} coarse")
        and heard[-1] == f"{found.done}/{found.runs} "
        and found.done == found.runs
    )
    console = Console(width=200, record=True, file=sys.stderr)
    console.print(table(found))
    said = console.export_text()
    assert (
        said.count("actors=") == len(found.trials)
        and "no room" in said
        and "auto" in said
        and "given" in said
    )


def test_the_layout_that_would_be_chosen_runs_to_the_end(
    pretend: list[tuple[Layout, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FINALISTS", 1)
    found = tune(experiment())
    assert [(trial.marks, len(trial.fine)) for trial in found.trials if trial.fine] == [
        (["auto"], 2),
        ([], 2),
    ]
    assert found.done == found.runs and "auto" not in found.best.marks


def test_runs_are_as_long_as_slow_updates_need(
    pretend: list[tuple[Layout, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4,096 rows take two cores 2 s
    monkeypatch.setattr(tuning, "costs_of", lambda *_: msgspec.structs.replace(CARTPOLE, train=1e-3))
    tune(experiment(), seconds=1.0)
    assert {round(seconds, 1) for _, seconds in pretend} == {8.3, 16.5}


def test_an_experiment_that_is_laid_out_already_can_be_tuned_again(
    pretend: list[tuple[Layout, float]],
) -> None:
    made = apply(
        experiment(),
        Layout(actors=2, trainers=2, together=True, lanes=16, sample_steps=128, ring=1, slots=1, threads=0),
    )
    assert layout_of(undivided(made)).rows == 64 * 64
    assert tune(made).best.layout.trainers == 2


def test_what_cannot_be_tuned_says_why(
    pretend: list[tuple[Layout, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--seconds 0"):
        tune(experiment(), seconds=0)
    made = experiment()
    with pytest.raises(ConfigError, match="small cannot be tuned, since it has 2 groups of Actors"):
        tune(made.replace(workers={**made.workers, "second": made.workers["actor"]}))
    with pytest.raises(ConfigError, match=r"its batch_size is set \(4,096\).*leave it out"):
        tune(experiment(batch_size=4096))
    assert pretend == []

    def fails(*_: Any) -> Run:
        raise RunError("no")

    monkeypatch.setattr(tuning, "run_for", fails)
    with pytest.raises(RunError, match=r"no layout of small could be run.*: no"):
        _ = tune(made).best

    def interrupted(*_: Any) -> Run:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(tuning, "run_for", interrupted)
    with pytest.raises(RunError, match="interrupted by SIGTERM: nothing was measured"):
        tune(made)


@pytest.mark.parametrize("ended", [Interrupted("Ctrl-C"), KeyboardInterrupt()])
@pytest.mark.parametrize("runs", [3, 11])  # amid the coarse runs, amid the longer ones
def test_a_search_that_a_signal_ends_keeps_what_has_run(
    pretend: list[tuple[Layout, float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ended: BaseException,
    runs: int,
) -> None:
    run_for = tuning.run_for

    def interrupted(made: Experiment, source: Path | None, seconds: float) -> Run:
        if len(pretend) == runs:
            raise ended
        return run_for(made, source, seconds)

    monkeypatch.setattr(tuning, "run_for", interrupted)
    monkeypatch.setattr(measuring, "experiment_from", lambda *_, **__: (experiment(), None))
    out = tmp_path / "tuned.py"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", "small", "--out", str(out)])
    assert result.exit_code == 130 and f"Ctrl-C ended the search: {runs} of" in result.output
    tried = {str(layout) for layout, _ in pretend}
    assert result.output.partition("fastest: --layout ")[2].splitlines()[0] in tried
    text = out.read_text()
    assert (
        sum(layout in text for layout in tried) == text.count("  actors=") >= 2
        and "until Ctrl-C ended the search" in text
    )
    assert layout_of(load_attribute(f"{out}:experiment", "experiment")()).rows == 64 * 64


def test_the_file_gives_the_tuned_experiment_and_auto_lets_it_be(
    pretend: list[tuple[Layout, float]], tmp_path: Path
) -> None:
    found = tune(experiment())
    write(found, tmp_path / "tuned.py", None)
    made = load_attribute(f"{tmp_path / 'tuned.py'}:experiment", "experiment")()
    assert made == apply(experiment(), found.best.layout)
    text = (tmp_path / "tuned.py").read_text()
    for part in (
        "tidemill train tuned.py:experiment",
        "2 cores",
        str(found.best.layout),
        "env steps/s",
        "Return the tuned experiment",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 150
    assert why_unchanged(made)

    for trial in found.trials:  # one actor beside one trainer, as any experiment may be
        trial.fine = [9e9] if (trial.layout.actors, trial.layout.together) == (1, False) else []
    write(found, tmp_path / "single.py", None)
    made = load_attribute(f"{tmp_path / 'single.py'}:experiment", "experiment")()
    assert layout_of(made) == found.best.layout == layout_of(experiment())
    made.check()
    assert made.processes() == [["actor-0"], ["trainer-0"]] and why_unchanged(made) == "together is set"


def test_the_file_loads_the_one_whose_classes_it_needs(
    pretend: list[tuple[Layout, float]], tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text("LOADED = True\n")
    (tmp_path / "below").mkdir()
    text = source_text(tune(experiment(), own), tmp_path / "below" / "tuned.py", own)
    assert "'../own.py'" in text and str(tmp_path) not in text
    (tmp_path / "below" / "tuned.py").write_text(text)
    assert load_attribute(f"{tmp_path / 'below' / 'tuned.py'}:experiment", "experiment")().name == "small"


def test_nothing_is_overwritten_by_chance(pretend: list[tuple[Layout, float]], tmp_path: Path) -> None:
    out = tmp_path / "tuned.py"
    out.write_text("mine")
    result = CliRunner().invoke(app, ["tune", "CartPole-v1", "--out", str(out)])
    assert (
        result.exit_code == 1 and "exists; name another file, or overwrite it with --force" in result.output
    )
    assert out.read_text() == "mine" and pretend == []
    with pytest.raises(ConfigError, match=r"ends in \.py"):
        check_out(tmp_path / "tuned.txt", False, None)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_out(tmp_path / "none" / "tuned.py", False, None)
    with pytest.raises(ConfigError, match="would need itself"):
        check_out(out, True, out)
    assert CliRunner().invoke(app, ["tune", "CartPole-v1", "--out", str(out), "--force"]).exit_code == 0
    assert "tidemill tune" in out.read_text()


def test_literals() -> None:
    value = {
        "a": [1, 2.5, None, True, "x" * 90],
        "b": {"c": {}, "d": list(range(60))},
        "e": "quotes \" and ' and \\",
    }
    text = literal_of(value)
    assert eval(text) == value and max(map(len, text.splitlines())) < 120


def test_numbers_that_no_literal_says_are_refused(
    pretend: list[tuple[Layout, float]], tmp_path: Path
) -> None:
    made = experiment(Gymnasium(id="CartPole-v1", kwargs={"most": float("inf")}))
    with pytest.raises(ConfigError, match="infinite"):
        source_text(tune(made), tmp_path / "tuned.py", None)


def test_the_command_searches_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "MOST", 2)
    monkeypatch.setattr(tuning, "TURNS", 1)
    monkeypatch.setattr("tidemill.layouts.auto_layout.SECONDS", 240)  # also on a busy machine
    small = ["--set", "policies.policy.hidden=[8]", "--set", "workers.trainer.algorithm.epochs=1"]
    for seconds in ("1", "4", "16"):  # longer where in fewer nothing could be measured
        result = CliRunner(env={"COLUMNS": "200"}).invoke(
            app, ["tune", "CartPole-v1", "--seconds", seconds, "--out", "tuned.py", *small]
        )
        if result.exit_code == 0:
            break
    assert result.exit_code == 0, result.output
    assert (
        "fastest: --layout actors=" in result.output
        and "train tuned.py:experiment" in result.output
        and "run 1 of 4" in result.output
    )
    again = CliRunner().invoke(
        app, ["train", "tuned.py:experiment", "--max-steps", "5000", "--run-dir", "run"]
    )
    assert again.exit_code == 0, again.output
    assert "layout: as given, since" in again.output
    assert json.loads(Path("run/layout.json").read_bytes())["layout"] is None


def test_environments_without_threads_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(Scripted())
    for costs in (CARTPOLE, SLEEPS):
        assert {trial.layout.threads for trial in candidates(made, undivided(made), costs, 2)} == {None}
