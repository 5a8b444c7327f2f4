"""A run that is resumed by other code than has written its checkpoints: what no longer
goes with them is named, with what to do."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    Trainer,
    resume,
    train,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.core.errors import TidemillError
from tidemill.core.schema import Field
from tidemill.store.checkpoint import MANIFEST, checkpoints

FILE = Path(__file__)


def now(name: str, usual: int) -> int:
    """What the code says: as if somebody had edited the file."""
    return int(os.environ.get(f"TIDEMILL_TEST_{name}", usual))


class Sees(gymnasium.Env[Any, Any]):
    """Sees so many numbers."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (now("SEES", 2),), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action: Any) -> Any:
        return self.observation_space.low, 1.0, self.np_random.random() < 0.1, False, {}


@dataclass(frozen=True, kw_only=True)
class OwnPolicy(PolicyConfig):
    """It has so many weights."""

    def answer(self, spaces: Any) -> dict[str, Field]:
        return {"action": Field((), "int64"), "log_prob": Field((), "float32"), "value": Field((), "float32")}

    def build(self, spaces: Any, seed: int) -> Policy:
        return _OwnPolicy()


class _OwnPolicy(Policy):
    def __init__(self) -> None:
        self.w = np.zeros(now("WEIGHTS", 4))

    def act(self, observation: Any, state: Any, deterministic: Any, out: Any) -> None:
        for array in out.values():
            array[: len(observation["obs"])] = 0

    def parameters(self) -> dict[str, Any]:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Any], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class OwnAlgorithm(AlgorithmConfig):
    """Its state has a number of its own."""

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _OwnAlgorithm()


class _OwnAlgorithm(Algorithm):
    def __init__(self) -> None:
        self.count, self.name = np.zeros(1), f"count-{now('STATE', 1)}"

    def update(self, samples: Any, steps: int) -> dict[str, float]:
        self.count += 1
        return {}

    def state(self) -> dict[str, Any]:
        return {self.name: self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count[:] = state[self.name]
        np.zeros(now("MEMORY", 0) << 55)  # more than any machine has


def made(own: bool, exact: bool = False) -> Experiment:
    return Experiment(
        name="mine",
        policies={"policy": OwnPolicy() if own else ActorCritic(hidden=(4,))},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=Sees), lanes=2, agents=(AgentSpec(sample_steps=now("STEPS", 8)),)
            ),
            "trainer": Trainer(algorithm=OwnAlgorithm() if own else PPO(minibatch_size=16)),
        },
        limits=Limits(updates=3),
        exact_resume=exact,
        seed=5,
    )


CHANGED: dict[str, tuple[bool, bool, str, str]] = {
    "the policy's shapes": (
        True,
        False,
        "WEIGHTS",
        r"weights of checkpoint \S+update-3 cannot be gone on from",
    ),
    "the algorithm's state": (
        True,
        False,
        "STATE",
        r"KeyError: 'count-9'.*Most likely other code has written",
    ),
    "the memory that there is": (
        True,
        False,
        "MEMORY",
        r"(?s)^(?!.*other code).* which _OwnAlgorithm .* for want of memory: .* no more memory is given",
    ),
    "the environment's spaces": (
        False,
        False,
        "SEES",
        r"of checkpoint \S+update-3 cannot .*hidden\.0\.weight is",
    ),
    "the environment's spaces, exactly": (
        False,
        True,
        "SEES",
        r"what actor-0 had in hand .*hidden\.0\.weight is",
    ),
}


@pytest.mark.parametrize(("own", "exact", "what", "match"), CHANGED.values(), ids=CHANGED)
def test_what_no_longer_goes_with_a_checkpoint_is_named(
    own: bool, exact: bool, what: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    train(made(own, exact), launch="inline", run_dir=folder, source=FILE, quiet=True)
    monkeypatch.setenv(f"TIDEMILL_TEST_{what}", "9")
    with pytest.raises(TidemillError, match=match) as caught:
        resume(folder, limits={"updates": 5}, quiet=True, trust=True)
    assert "Traceback" not in str(caught.value)
    monkeypatch.delenv(f"TIDEMILL_TEST_{what}")
    assert resume(folder, limits={"updates": 5}, quiet=True, trust=True).summary["updates"] == 5


def test_what_a_newer_version_has_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(made(False), launch="inline", run_dir=folder, source=FILE, quiet=True)
    newest = checkpoints(folder / "checkpoints" / "policy")[-1]
    manifest = newest / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(TidemillError, match=r"has format 2; .* a newer one has written it"):
        resume(folder, limits={"updates": 5}, quiet=True, trust=True)
    assert newest.exists()


def test_a_setting_that_this_version_does_not_have_is_told_with_the_version_that_had_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train(made(False), launch="inline", run_dir=folder, source=FILE, quiet=True)
    for name, before, after in (
        ("versions.json", f'"tidemill": "{version("tidemill")}"', '"tidemill": "99.1"'),
        ("config.json", '"lanes": 2', '"lanes": 2, "lines": 2'),
    ):
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))
    with pytest.raises(
        TidemillError, match=r'no setting "lines"; did you .* begun by Tidemill 99.1, and this'
    ):
        resume(folder, limits={"updates": 5}, quiet=True, trust=True)
