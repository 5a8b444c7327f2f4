"""Simulators through the whole system."""

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Limits, SimulatorEnvironment, Trainer
from tidemill.bridge.worlds import corridor, reach
from tidemill.cli.main import app
from tidemill.core.user_code_loading import load_attribute
from tidemill.presets.environment_names import environment_from
from tidemill.presets.experiments import experiment_for
from tidemill.trained.evaluate import evaluate

SIMULATORS = str(Path(__file__).parent / "simulators.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "simulator.py"


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def alive():
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found |= {child.pid} if child.status() != psutil.STATUS_ZOMBIE else set()
    return found


def test_training_goes_on_while_simulators_die_and_their_statistics_are_metrics(tmp_path):
    """Each dies in its twelfth exchange. Rows before and behind the cuts are trained on,
    and nothing is left."""
    before, files = alive(), psutil.Process().num_fds()
    environment = SimulatorEnvironment(path=SIMULATORS, arguments=("mortal",))
    experiment = Experiment(
        name="mortal",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=environment, lanes=2, agents=(AgentSpec(sample_steps=8),), lane_restarts=40
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=8, epochs=1)),
        },
        limits=Limits(steps=80),
    )
    result = tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True)
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 80
    metrics = metrics_of(tmp_path / "run")
    told = [line for line in metrics if "environment/t" in line]
    assert told and all(0 <= line["environment/t"] < 12 for line in told)
    assert max(line.get("time/actor-0/lanes/restarts", 0) for line in metrics) >= 2
    # those of the run itself; each restart once left more
    assert alive() <= before and psutil.Process().num_fds() <= files + 4


def test_the_command_line_trains_a_policy_per_group(tmp_path):
    groups = '[{"name": "late", "max_agents": 2, "observations": [[2]], "branches": [2]}]'
    settings = [
        "--env-arg",
        'arguments=["late"]',
        "--env-arg",
        f"groups={groups}",
        "--set",
        "workers.actor.lanes=1",
    ]
    short = [f"--set=workers.actor.agents.{spec}.sample_steps=16" for spec in (0, 1)]
    given = [
        "train",
        f"simulator:{SIMULATORS}",
        "--launch",
        "inline",
        "--max-steps",
        "40",
        "--run-dir",
        str(tmp_path / "run"),
        *settings,
        *short,
    ]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert f"tidemill eval {tmp_path / 'run'}" in result.output and "tidemill play" not in result.output, (
        "simulators have no pictures"
    )
    filmed = CliRunner().invoke(app, ["play", str(tmp_path / "run"), "--video", str(tmp_path / "run.mp4")])
    assert (
        filmed.exit_code == 1
        and "SimulatorEnvironment has no pictures" in filmed.output
        and f"eval {tmp_path / 'run'}" in filmed.output
    )
    last = metrics_of(tmp_path / "run")[-1]
    assert {name.partition("/")[0] for name in last if "/entropy" in name} <= {
        "trainer-early-0",
        "trainer-late-0",
    }
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] >= 40


def test_a_simulator_that_cuts_its_memory_short_is_named_as_the_likely_cause_and_nothing_stays(tmp_path):
    """The kernel ends the actor then, and nobody can answer it: docs/simulators.md says
    what the bridge trusts."""
    before = alive()
    settings = [
        "--env-arg",
        'arguments=["cutting"]',
        "--set",
        "workers.actor.lanes=1",
        "--set",
        "workers.actor.restarts=null",  # it would come again
        "--layout",
        "given",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, ["train", f"simulator:{SIMULATORS}", *settings])
    assert (
        result.exit_code == 1
        and "killed by SIGBUS (a file that it had mapped became shorter"
        in result.output + (result.stderr or "")
    )
    gone = time.monotonic() + 60
    while alive() - before and time.monotonic() < gone:
        time.sleep(0.05)
    assert alive() <= before


def test_the_refusal_of_two_rows_in_a_tick_names_what_cures_it(tmp_path):
    """Off-policy algorithms send one row in a tick; that a simulator never has two is
    said by same_step, also as Python writes it."""
    given = [
        "train",
        f"simulator:{SIMULATORS}",
        "--algorithm",
        "sac",
        "--env-arg",
        'arguments=["one"]',
        "--launch",
        "inline",
        "--max-steps",
        "20",
    ]
    refused = CliRunner().invoke(app, [*given, "--run-dir", str(tmp_path / "refused")])
    assert refused.exit_code == 1 and "same_step=False (--env-arg same_step=false)" in refused.output + (
        refused.stderr or ""
    )
    cured = CliRunner().invoke(
        app,
        [
            *given,
            "--env-arg",
            "same_step=False",
            "--set",
            "workers.actor.lanes=1",
            "--run-dir",
            str(tmp_path / "cured"),
        ],
    )
    assert cured.exit_code == 0, cured.output
    assert json.loads((tmp_path / "cured" / "summary.json").read_text())["env_steps"] >= 20


def test_presets_have_a_policy_for_each_group_and_one_lane_for_an_editor():
    one = experiment_for("simulator:", environment_from("simulator:"))
    assert one.name == "editor" and one.workers["actor"].lanes == 1 and list(one.policies) == ["policy"]
    groups = [
        {"name": name, "max_agents": 4, "observations": [[2]], "continuous": 1}
        for name in ("Hunter", "Prey?team=1")
    ]
    two = experiment_for("simulator:", environment_from("simulator:", {"groups": groups}))
    assert list(two.policies) == ["Hunter", "group1"]
    assert [spec.match for spec in two.workers["actor"].agents] == [r"Hunter_\d+", r"Prey\?team=1_\d+"]
    ten = experiment_for("simulator:reach", environment_from(f"simulator:{reach.__file__}"))
    assert ten.workers["actor"].lanes == 4 and ten.workers["actor"].environment.path == reach.__file__


def test_bad_input_is_told_in_a_line_and_leaves_nothing(tmp_path):
    for what, said in (
        (str(tmp_path / "nowhere"), "nowhere"),
        (str(Path(__file__)), "simulator 0"),  # a program that exits at once
    ):
        result = CliRunner().invoke(app, ["train", f"simulator:{what}", "--run-dir", str(tmp_path / "run")])
        assert result.exit_code == 1 and said in result.output + (result.stderr or ""), result.output
        assert "Traceback" not in result.output.partition("The end of its output")[0]
    result = CliRunner().invoke(app, ["train", f"simulator:{reach.__file__}", "--env-arg", "restarts=2"])
    assert result.exit_code == 1 and "workers.actor.lane_restarts=N" in result.output + (result.stderr or "")


@pytest.mark.parametrize("function", ["reach", "corridor"])
def test_the_examples_learn_and_evaluation_counts_the_episodes_of_agents(function, tmp_path):
    """Not to the end: two thirds of what their heuristics reach are far from chance."""
    experiment = load_attribute(f"{EXAMPLE}:{function}", "experiment")()
    experiment = experiment.replace(
        limits=experiment.limits.replace(mean_return=experiment.limits.mean_return * 0.7)
    )
    result = tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", source=EXAMPLE, quiet=True)
    assert result.summary["reason"].startswith("mean return")
    found = evaluate(tmp_path / "run", 60, lanes=2, file=EXAMPLE, quiet=True)
    assert found.specs[0].episodes == 60
    assert found.mean >= 0.6 * {"reach": 1.999, "corridor": 0.92}[function]
    assert (
        corridor.LONGEST < reach.LONGEST
        and found.specs[0].length_max <= {"reach": 50, "corridor": 30}[function]
    )


def test_evaluation_plays_episodes_of_every_group(tmp_path):
    """As many of each, also where one group has so many agents that theirs begin
    first."""
    experiment = experiment_for(
        f"simulator:{SIMULATORS}", environment_from(f"simulator:{SIMULATORS}", {"arguments": ["two"]})
    )
    actor = experiment.workers["actor"]
    specs = tuple(spec.replace(sample_steps=8) for spec in actor.agents)
    experiment = experiment.replace(
        workers={**experiment.workers, "actor": actor.replace(lanes=1, agents=specs)},
        limits=experiment.limits.replace(steps=20),
    )
    tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True)
    found = evaluate(tmp_path / "run", 4, lanes=1, quiet=True)
    assert [(spec.episodes, spec.mean, spec.length_max) for spec in found.specs] == [(4, 2, 2), (4, 4, 2)]
