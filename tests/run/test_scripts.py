"""Scripts, notebooks and prompts that train: what is defined in them reaches workers, or
one sentence says why it cannot; importing never trains."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    Trainer,
    evaluate,
    train,
)
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_file

SCRIPT = """
from dataclasses import dataclass
import gymnasium, numpy as np
import tidemill
from tidemill import Actors, AgentSpec, ActorCritic, Experiment, Gymnasium, Limits, PPO, Trainer

@dataclass(frozen=True, kw_only=True)
class Mine(PPO):
    pass

class Tiny(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 5, False, {}

def experiment(algorithm=PPO):
    actors = Actors(environment=Gymnasium(make=Tiny), lanes=2, agents=(AgentSpec(sample_steps=8),))
    workers = {"actor": actors, "trainer": Trainer(algorithm=algorithm(minibatch_size=16))}
    policies = {"policy": ActorCritic(hidden=(4,))}
    return Experiment(name="one", policies=policies, workers=workers, limits=Limits(updates=2))

def run(**settings):
    print(tidemill.train(experiment(Mine), quiet=True, **settings).summary["status"])
"""


def python(folder: Path, *words: str, given: str = "") -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, input=given, capture_output=True, text=True, timeout=240
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("layout", ["auto", "given"])
def test_a_script_that_trains_when_it_is_imported_trains_nothing_and_is_told_the_cure(
    tmp_path: Path, layout: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open('loaded', 'a').write('+')\n{SCRIPT}\nrun(layout={layout!r}, run_dir='run')\n")
    out, errors = python(tmp_path, "script.py")
    *_, told = errors.splitlines()
    assert (
        f"tidemill.train(…) is called while {script} is loaded for what it defines" in told
        and 'under  if __name__ == "__main__":' in told
    ), out
    # the main process, and one or two that are to work for it
    assert len((tmp_path / "loaded").read_text()) <= 3
    assert not (tmp_path / "run").exists()


def test_what_a_guarded_script_defines_reaches_workers_and_who_comes_after(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f'{SCRIPT}\nif __name__ == "__main__":\n    run(layout="given", run_dir="run")\n'
    )
    out, errors = python(tmp_path, "script.py")
    assert out.split() == ["completed"], out + errors
    config = json.loads((tmp_path / "run" / "config.json").read_bytes())
    assert config["workers"]["actor"]["environment"]["make"] == f"{tmp_path}/script.py:Tiny"
    out, errors = python(tmp_path, "-m", "tidemill.cli.main", "eval", "run", "--episodes", "2")
    assert "mean return" in out, out + errors


def test_what_a_prompt_defines_trains_in_its_own_process_and_others_say_why_they_cannot(
    tmp_path: Path,
) -> None:
    out, errors = python(
        tmp_path, "-", given=f"{SCRIPT}\nrun(launch='threads', run_dir='run')\nrun(layout='given')\n"
    )
    *_, told = errors.splitlines()
    assert out.split() == ["completed"], out + errors
    assert told.partition(": ")[2].startswith(
        '"__main__:Tiny" is defined in a notebook, or at a prompt, and no other process has it'
    )
    assert (
        told.endswith('or train in this process: launch="threads" (or "inline")')
        and not (tmp_path / "runs").exists()
    )
    made = json.loads((tmp_path / "run" / "config.json").read_bytes())
    made["workers"]["trainer"]["algorithm"]["kind"] = "PPO"  # Mine is known there alone, too
    (tmp_path / "run" / "config.json").write_text(json.dumps(made))
    out, errors = python(tmp_path, "-m", "tidemill.cli.main", "eval", "run", "--trust")
    assert 'error: make: "__main__:Tiny" is defined in a notebook' in errors and "Traceback" not in errors


def cartpole(make: object, **settings: object) -> Experiment:
    actors = Actors(
        environment=Gymnasium(make=make, **settings),  # type: ignore[arg-type]
        lanes=2,
        agents=(AgentSpec(sample_steps=8),),
    )
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=16))}
    return Experiment(
        name="one", policies={"policy": ActorCritic(hidden=(4,))}, workers=workers, limits=Limits(updates=1)
    )


def test_lambdas_and_local_classes_train_in_one_process_and_are_refused_by_others(tmp_path: Path) -> None:
    class Local(gymnasium.Wrapper):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__(gymnasium.make("CartPole-v1"))

    makes = (lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Acrobot-v1"), Local)
    shapes = []
    for number, make in enumerate(makes):
        folder = train(cartpole(make), launch="threads", run_dir=tmp_path / str(number), quiet=True).folder
        shapes.append(tidemill.load(folder).spaces.observation.shape)  # type: ignore[union-attr]
        assert evaluate(folder, 1, trust=True).specs[0].episodes == 1
        with pytest.raises(
            ConfigError,
            match=r"is a lambda, or made inside of a function, and no other process has it: define it at the "
            r"top of a file",
        ):
            train(cartpole(make), run_dir=tmp_path / "other", quiet=True)
    assert shapes == [(4,), (6,), (4,)] and not (tmp_path / "other").exists()
    assert cartpole(makes[0]) == cartpole(makes[0]) != cartpole(makes[1])


def test_a_class_of_a_module_is_called_by_its_name() -> None:
    from gymnasium.envs.classic_control import CartPoleEnv

    assert Gymnasium(make=CartPoleEnv) == Gymnasium(  # type: ignore[arg-type]
        make="gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    )


@pytest.mark.parametrize(
    "call",
    [
        "tidemill.train(experiment())",
        "tidemill.resume('run')",
        "tidemill.TrainRunner(experiment(), num_slots=1).run()",
        "tune(experiment())",
        "bench(experiment())",
    ],
)
def test_nothing_begins_a_run_while_a_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "loads.py"
    dqn = (
        "from tidemill.presets.experiments import experiment_for\n"
        "def experiment(): return experiment_for('x', tidemill.Gymnasium(id='CartPole-v1'), 'dqn')\n"
    )
    file.write_text(
        "import tidemill\nfrom tidemill.bench.tune import tune\nfrom tidemill.bench.efficiency import "
        f"bench\n{dqn}{call}\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"loads\.py is loaded for what it defines, as every worker process does.* put the call under  "
        r"if __name__",
    ):
        load_file(file, "experiment")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["loads.py"]


def test_a_file_that_ends_the_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(
        ConfigError, match=r"exits.py failed: SystemExit: 0; put what ends it under if __name__"
    ):
        load_file(tmp_path / "exits.py", "test")
