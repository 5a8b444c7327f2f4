"""`tidemill.train` takes an environment however it is named, any setting by its name, and
returns what was trained and measured."""

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.run import experiments, watched_weights
from tests.run.watched_weights import Watched

import tidemill
from tidemill import (
    DQN,
    GAE,
    PPO,
    ActorCritic,
    AgentSpec,
    ConfigError,
    Gymnasium,
    Limits,
    QNetwork,
    RunControl,
)
from tidemill.core.config import encode
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import ending
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest
from tidemill.training.experiment_from import make_experiment, with_settings

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = Path(experiments.__file__)


class Nearest(gymnasium.Env[Any, Any]):
    """Says at once how near the action was, and notes its process's priority."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, note: str = "") -> None:
        if note:
            Path(note).write_text(str(os.nice(0)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(3, np.float32), float(action), True, False, {}


class Longer(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows so many zeros more."""

    def __init__(self, env: Any, zeros: int = 1) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-10.0, 10.0, (4 + zeros,), np.float32)
        self._zeros = np.zeros(zeros, np.float32)

    def observation(self, observation: Any) -> Any:
        return np.concatenate([observation, self._zeros])


def make() -> gymnasium.Env[Any, Any]:
    return Nearest()


def setting(path: str, **more: Any) -> Any:
    """Return a setting of CartPole's experiment by its path, after `more`."""
    found: Any = encode(with_settings(make_experiment("CartPole-v1")[0], more)[0])
    for part in path.split("."):
        found = found[part]
    return found


def test_a_run_of_a_class_returns_its_policy_metrics_and_summary(tmp_path: Path) -> None:
    result = tidemill.train(
        Nearest, steps=4_000, seed=3, lanes=4, launch="inline", run_dir=tmp_path / "run", quiet=True
    )
    assert result.summary.status == result.summary["status"] == "completed"
    assert result.summary.env_steps >= 4_000 and result.summary.mean_return is not None
    assert result.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result.policy.act(np.zeros(3, np.float32)) in (0, 1)
    metrics = result.metrics()
    assert metrics["step"][-1] == result.summary.env_steps and metrics["return/mean"].dtype == np.float64
    assert {len(column) for column in metrics.values()} == {len(metrics["step"])}
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["seed"], saved["workers"]["actor"]["lanes"]) == (3, 4)


def test_metrics_are_a_data_frame_where_there_is_a_library_for_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    result = tidemill.train("CartPole-v1", steps=4_000, launch="inline", run_dir=tmp_path / "run", quiet=True)
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame["step"]) == list(result.metrics()["step"])


@pytest.mark.parametrize(
    "what",
    [Nearest, make, f"{__file__}:Nearest", f"{__file__}:make", Gymnasium(make=Nearest), Gymnasium(make=make)],
)
def test_an_environment_is_named_by_what_makes_it(what: Any) -> None:
    experiment, _ = make_experiment(what)
    environment = experiment.workers["actor"].environment
    built = environment.build(2, 0)
    assert built.agents[0].spaces.action.n == 2
    built.close()


class Bold(DQN):
    """A user's own."""


def test_an_algorithm_is_its_name_or_its_settings() -> None:
    by_name, _ = make_experiment("CartPole-v1", "dqn")
    given, _ = make_experiment("CartPole-v1", DQN(learning_rate=0.5))
    assert given.workers["trainer"].replace(algorithm=DQN()) == by_name.workers["trainer"].replace(
        algorithm=DQN()
    )
    assert given.workers["trainer"].algorithm == DQN(learning_rate=0.5)
    assert make_experiment("CartPole-v1", PPO(epochs=7))[0].workers["trainer"].algorithm == PPO(epochs=7)
    derived, _ = make_experiment("CartPole-v1", Bold())
    assert derived.workers["trainer"] == by_name.workers["trainer"].replace(algorithm=Bold())
    with pytest.raises(ConfigError, match='did you mean "dqn"'):
        make_experiment("CartPole-v1", "dqm")
    with pytest.raises(ConfigError, match="an experiment has its own"):
        make_experiment(experiments.cartpole(), "ppo")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": PPO}, r"algorithm = <class .*PPO.>: write a name, .* or settings, as PPO\(epochs=4\)"),
        ({"on_update": 3}, "on_update = 3 must be a function"),
        ({"log": 3}, "log = 3: write names of sinks"),
        ({"layout": 3}, '--layout 3: there is no layout "3"'),
        ({"launch": 3}, "--launch 3: that is 3, and no subclass of Launcher"),
    ],
)
def test_what_is_of_another_type_is_refused_before_anything_is_made(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        tidemill.train("CartPole-v1", run_dir=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_setting_is_found_by_its_last_word_or_by_its_path() -> None:
    assert setting("workers.actor.lanes", lanes=5) == 5
    assert setting("limits.mean_return", mean_return=10.5) == 10.5
    assert setting("workers.trainer.algorithm.epochs", epochs=7) == 7
    assert setting("policies.policy.hidden", hidden=(8, 8)) == [8, 8]
    assert setting("workers.trainer.policy", **{"workers.trainer.policy": "policy"}) == "policy"
    equal = experiments.equal()
    several = equal.replace(workers={**equal.workers, "second": equal.workers["actor"]})
    workers = with_settings(several, {"lanes": 3})[0].workers
    assert (workers["actor"].lanes, workers["second"].lanes) == (3, 3)


def test_a_setting_that_there_is_not_or_that_several_have_is_refused_by_name() -> None:
    made, _ = make_experiment("CartPole-v1")
    with pytest.raises(ConfigError, match='has a setting lans; did you mean "lanes"'):
        with_settings(made, {"lans": 3})
    with pytest.raises(ConfigError, match=r"several settings are called policy; .*workers\.trainer\.policy"):
        with_settings(made, {"policy": "other"})
    with pytest.raises(ConfigError, match=r'^workers\.actor\.lans: .*did you mean "lanes"'):
        with_settings(made, {"workers.actor.lans": 3})
    with pytest.raises(ConfigError, match=r"3 cannot be trained"):
        make_experiment(3)  # type: ignore[arg-type]


def test_slots_and_a_ratio_are_given_as_on_the_command_line(tmp_path: Path) -> None:
    result = tidemill.train(
        "CartPole-v1",
        algorithm="dqn",
        slots=2,
        ratio="1/4",
        steps=400,
        warm_up=100,
        launch="threads",
        run_dir=tmp_path / "run",
        quiet=True,
    )
    assert result.summary.committed is not None and result.summary.committed >= 400
    assert result.summary["updates"] == result.summary.updates > 0


def test_a_callback_logs_saves_and_stops(tmp_path: Path) -> None:
    seen: list[float] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        seen.append(metrics["update"])
        control.log({"my/metric": metrics["update"] + 0.5})
        if len(seen) == 2:
            assert control.save()
        if len(seen) == 4:
            control.stop("four are enough")

    made = experiments.cartpole().replace(limits=Limits(steps=10_000_000))
    trainer = made.workers["trainer"].replace(checkpoints=100)  # however many there are, that one stays
    made = made.replace(workers={**made.workers, "trainer": trainer})
    result = tidemill.train(
        made, launch="inline", run_dir=tmp_path / "run", source=FILE, quiet=True, on_update=on_update
    )
    assert result.summary.reason == "four are enough" and seen[:4] == [1, 2, 3, 4]
    mine = result.metrics()["my/metric"]
    assert list(mine[~np.isnan(mine)][:4]) == [1.5, 2.5, 3.5, 4.5]
    assert (tmp_path / "run" / "checkpoints" / "policy" / "update-2").is_dir()


def test_a_callback_that_raises_ends_the_run_with_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would raise again as that is written; and the run's files are tidied up once its
    summary is there."""
    run, called, tidy = tmp_path / "run", list[float](), RunFolder.tidy

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        called.append(metrics["update"])
        if len(called) > 1:
            raise ValueError("mine")

    def tidy_after_the_summary(folder: RunFolder) -> None:
        assert folder.read("summary.json")["reason"] == "mine"
        tidy(folder)

    monkeypatch.setattr(RunFolder, "tidy", tidy_after_the_summary)
    monkeypatch.chdir(tmp_path)  # where there is a file once it saves
    made = experiments.slow_saving().replace(limits=Limits(steps=10_000_000))
    trainer = made.workers["trainer"].replace(checkpoint_share=1e-6)  # the first one, and the last
    made = made.replace(workers={**made.workers, "trainer": trainer})
    with pytest.raises(ValueError, match="mine"):
        tidemill.train(made, launch="processes", run_dir=run, source=FILE, quiet=True, on_update=on_update)
    told = [record["update"] for record in read_metrics(run)]
    assert read_newest(run / "checkpoints" / "policy").facts["updates"] == told[-1] > called[0]
    assert len(called) == 2 and told == sorted(set(told))
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_a_callback_changes_limits_and_is_told_what_it_may_change(tmp_path: Path) -> None:
    refused: list[str] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        for asked in ({"learning_rate": 1}, {"steps": 1}, {"until": "nothing >", "mean_return": -1.0}):
            try:
                control.change(**asked)
            except ConfigError as error:
                refused.append(str(error))
        with pytest.raises(ConfigError, match='no trainer trains "red"; known: policy'):
            control.change("red", learning_rate=1)
        if metrics["episodes"] > 5:
            control.change(mean_return=-1.0)

    made = experiments.cartpole().replace(limits=Limits(steps=10_000_000, window=1))
    result = tidemill.train(
        made, launch="inline", run_dir=tmp_path / "run", source=FILE, quiet=True, on_update=on_update
    )
    assert result.summary.reason.startswith("mean return")
    # an algorithm of one's own takes no changes, unless it says so
    assert refused[0].startswith(
        "learning_rate cannot be changed while a run is going on; these can be: mean_return"
    )
    assert refused[1].startswith("steps cannot be changed") and "nothing >" in refused[2]


def test_a_callback_changes_settings_at_one_update_of_equal_trainers_and_after_a_resume(
    tmp_path: Path,
) -> None:
    record = tmp_path / "record"
    record.mkdir()
    told: list[float] = []
    refused: list[str] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        told.append(metrics["learning_rate"])
        if metrics["update"] == 3:
            control.change(learning_rate=1e-5, clip=0.1)
            for wrong in (
                {"epochs": 0},
                {"adam_epsilon": 1e-3},
                {"clip": "wide"},
                {"learning_rate": 1, "adam": 1},
            ):
                try:
                    control.change(**wrong)
                except ConfigError as error:
                    refused.append(str(error))
        if told[-1] == 1e-5:
            control.stop("changed")

    made = experiments.experiment(
        Gymnasium(id="CartPole-v1"),
        algorithm=Watched(record=str(record), minibatch_size=32),
        count=2,
    )
    made = made.replace(
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={**made.workers, "actor": made.workers["actor"].replace(count=2)},
    )
    how: dict[str, Any] = {"launch": "processes", "quiet": True}
    source = watched_weights.__file__
    tidemill.train(made, run_dir=tmp_path / "run", source=source, layout="given", on_update=on_update, **how)
    one, other = ([line.split() for line in file.read_text().splitlines()] for file in record.iterdir())
    both = min(len(one), len(other))
    assert one[:both] == other[:both]
    rates = [float(rate) for rate, _ in one[:both]]
    changed = rates.index(1e-5)
    assert changed >= 3 and rates == [3e-4] * changed + [1e-5] * (both - changed)
    assert "epochs = 0 is not between 1" in refused[0] and "these can be: clip," in refused[1]
    assert "clip" in refused[2] and refused[3].startswith("adam cannot be changed")
    told.clear()
    result = tidemill.resume(
        tmp_path / "run", limits={"updates": both + 2}, on_update=on_update, trust=True, **how
    )
    assert result.summary.updates > changed and set(told) == {1e-5}


@pytest.mark.parametrize(
    ("settings", "asked", "why"),
    [
        (
            {
                "policies": {"policy": QNetwork(hidden=(4,), noise=0.5)},
                "workers.trainer.algorithm": DQN(),
            },
            {"epsilon": 0.2},
            "no effect on a noisy network",
        ),
        ({"exact": True}, {"learning_rate": 1e-4}, "exact = True"),
    ],
)
def test_a_change_that_could_not_be_trained_with_is_refused_before_it_is_sent(
    tmp_path: Path, settings: dict[str, Any], asked: dict[str, float], why: str
) -> None:
    seen: list[float] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        with pytest.raises(ConfigError, match=why):
            control.change(**asked)
        seen.append(metrics["update"])
        control.stop()

    tidemill.train(
        Nearest, algorithm="dqn", slots=2, ratio=1, steps=10_000, launch="inline",
        run_dir=tmp_path / "run", quiet=True, on_update=on_update, warm_up=10, **settings,
    )  # fmt: skip
    assert seen


def test_advantages_that_actors_add_are_not_changed_in_the_trainer(tmp_path: Path) -> None:
    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        with pytest.raises(ConfigError, match="have their advantages already"):
            control.change(gamma=0.9)
        control.stop("refused")

    made, _ = make_experiment(Nearest)
    actors, specs = made.workers["actor"], (AgentSpec(mode="full", padded=True, post=(GAE(),)),)
    made = made.replace(workers={**made.workers, "actor": actors.replace(agents=specs, max_episode_steps=1)})
    result = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=on_update)
    assert result.summary.reason == "refused"


def test_a_change_takes_numbers_of_numpy_and_rounds_what_counts(tmp_path: Path) -> None:
    told: list[float] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        told.append(metrics["learning_rate"])
        control.change(learning_rate=1e-3 * np.exp(-1.0), clip=np.float32(0.5), epochs=3.7)
        control.change(mean_return=np.float32(1e6))
        if len(told) == 2:
            control.stop()

    tidemill.train(
        Nearest, steps=10**6, lanes=4, launch="inline", run_dir=tmp_path / "run", quiet=True,
        on_update=on_update,
    )  # fmt: skip
    assert told[1] == 1e-3 * np.exp(-1.0)
    settings = read_newest(tmp_path / "run" / "checkpoints" / "policy").facts["settings"]
    assert settings == {"learning_rate": told[1], "clip": 0.5, "epochs": 4}


def test_what_a_callback_raises_ends_the_run(tmp_path: Path) -> None:
    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tidemill.train(
            experiments.cartpole(),
            launch="inline",
            run_dir=tmp_path / "run",
            source=FILE,
            quiet=True,
            on_update=on_update,
        )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_callback_that_raises_at_the_last_update_lets_no_worker_be_taken_for_one_that_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "CLOSE_DEADLINE", 60.0)  # one that does hang is told all the same

    def fail(metrics: dict[str, float], control: RunControl) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        tidemill.train("CartPole-v1", steps=1, launch="inline", run_dir=tmp_path / "run", on_update=fail)
    assert "hangs" not in capsys.readouterr().err


def test_an_environment_is_looked_over_from_python() -> None:
    findings = tidemill.check_env(Nearest)
    assert findings and {type(finding).__name__ for finding in findings} == {"Finding"}


def test_a_launcher_of_ones_own_puts_a_command_before_each_worker(tmp_path: Path) -> None:
    note = tmp_path / "note"
    result = tidemill.train(
        Gymnasium(make=f"{__file__}:Nearest", kwargs={"note": str(note)}),
        steps=2_000,
        layout="given",
        launch=f"{EXAMPLES}/own_launcher.py:Nice",
        log=f"{EXAMPLES}/own_sink.py:Returns",
        run_dir=tmp_path / "run",
        quiet=True,
    )
    assert result.summary.status == "completed"
    assert note.read_text() == str(min(os.nice(0) + 19, 19))
    lines = (tmp_path / "run" / "returns.txt").read_text().splitlines()
    assert len(lines) == np.isfinite(result.metrics()["return/mean"]).sum() > 0


def test_wrappers_hold_for_workers_evaluation_and_resumed_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    wrap = [f"{__file__}:Longer(zeros=3)", "time-limit(30)", Longer]
    more = {"lanes": 4, "sample_steps": 32, "quiet": True}
    tidemill.train("CartPole-v1", steps=512, wrap=wrap[:2], run_dir=run, **more)
    resumed = tidemill.resume(run, limits={"steps": 1024}, quiet=True)
    assert resumed.summary["env_steps"] >= 1024
    (played,) = tidemill.evaluate(run, episodes=4, lanes=2).specs
    assert 8 <= played.length_mean <= 30 and played.max <= 30
    assert tidemill.load(run).spaces.observation.shape == (7,)
    with pytest.raises(ConfigError, match="wrappers go with an environment's name"):
        make_experiment(experiments.cartpole(), wrap=["flatten"])
    made, _ = make_experiment(Gymnasium(id="CartPole-v1", wrap=("flatten",)), wrap=wrap[2])
    assert made.workers["actor"].environment.wrap[0] == "flatten"  # type: ignore[attr-defined]
    assert made.workers["actor"].environment.wrap[1].endswith(":Longer")  # type: ignore[attr-defined]


class Wandering(Nearest):
    """Takes its process to another working directory."""

    def __init__(self, there: str) -> None:
        super().__init__()
        os.chdir(there)


def test_an_environment_that_changes_the_working_directory_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    short = {"launch": "inline", "quiet": True, "lanes": 4, "sample_steps": 16}
    wandering = Gymnasium(make=Wandering, kwargs={"there": str(there)})
    tidemill.train(wandering, run_dir="run", steps=100, **short)
    assert Path.cwd() == here and not list(there.iterdir())
    assert tidemill.resume("run", limits={"steps": 600}, quiet=True).summary["status"] == "completed"
    assert (here / "run" / "summary.json").exists() and not list(there.iterdir())
