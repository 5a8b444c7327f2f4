"""The user's folders are not ours: nothing in them takes the place of a module of
Python's, and all of it is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.user_code_loading import environment_of_ours

PLANTED = ("random", "secrets", "numbers", "json", "psutil")
ENVIRONMENT = """
import random, secrets, numbers
import gymnasium, numpy as np
from neighbour import LENGTH

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), random.random(), self.steps % LENGTH == 0, False, {}
"""
SCRIPT = """
import sys
import tidemill
from tidemill import Actors, AgentSpec, ActorCritic, Experiment, Gymnasium, Limits, PPO, Trainer

def experiment(make):
    actors = Actors(environment=Gymnasium(make=make), lanes=2, agents=(AgentSpec(sample_steps=8),))
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO(minibatch_size=16))}
    policies = {"policy": ActorCritic(hidden=(4,))}
    return Experiment(name="one", policies=policies, workers=workers, limits=Limits(updates=2))

if __name__ == "__main__":
    print(tidemill.train(experiment(sys.argv[1]), quiet=True, layout=sys.argv[2]).summary["status"])
"""


@pytest.mark.parametrize(("what", "layout"), [("file", "measure"), ("package", "given")])
def test_nothing_in_the_users_folders_takes_the_place_of_a_module_and_all_of_it_is_found(
    tmp_path: Path, what: str, layout: str
) -> None:
    """What is planted lies in the working directory, and beside the environment's
    file."""
    here, beside, project = (tmp_path / name for name in ("here", "beside", "project"))
    for folder in (here, beside, project / "mypkg"):
        folder.mkdir(parents=True)
    for folder in (here, beside):
        for name in PLANTED:
            (folder / f"{name}.py").write_text(
                f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__)\nraise ImportError('planted')\n"
            )
    (beside / "env.py").write_text(ENVIRONMENT)
    (project / "mypkg" / "envs.py").write_text(ENVIRONMENT)
    for folder in (beside, project):
        (folder / "neighbour.py").write_text("LENGTH = 5\n")
    (project / "script.py").write_text(SCRIPT)
    make = f"{beside}/env.py:Env" if what == "file" else "mypkg.envs:Env"
    words = [sys.executable, str(project / "script.py"), make, layout]
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["completed"], done.stdout + done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_an_empty_place_in_pythonpath_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path), ""]))
    assert environment_of_ours(MORE="1") == {**os.environ, "PYTHONPATH": str(tmp_path), "MORE": "1"}
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    assert not environment_of_ours()["PYTHONPATH"]
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in environment_of_ours()
