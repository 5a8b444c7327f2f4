"""States from the rollout to the update, through whole runs: none leaks into another
episode, and each row's is the one that was acted on."""

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

import tidemill
from tidemill import (
    PPO,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    RecurrentActorCritic,
    Scripted,
    Trainer,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel, Sample
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.core.errors import TidemillError
from tidemill.core.schema import Field
from tidemill.trained.evaluate import evaluate

CUES = 4


class Cue(gymnasium.Env):
    """Shows a cue (1 … 4) in every step of an episode of two or three steps. Pays 1 for
    an episode's first action if it is the cue of the episode before: what a policy can
    know only if its state leaks."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Discrete(CUES + 1)
        self.action_space = gymnasium.spaces.Discrete(CUES + 1)
        self.cue = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.before, self.cue, self.steps = self.cue, int(self.np_random.integers(1, CUES + 1)), 0
        return self.cue, {}

    def step(self, action):
        self.steps += 1
        pays = self.steps == 1 and self.before > 0 and action == self.before
        return self.cue, float(pays), self.steps == 1 + self.cue % 2, False, {}


@dataclass(frozen=True, kw_only=True)
class Parrot(PolicyConfig):
    """Does what its state says, and puts the cue that it sees into it: with a state that
    leaks it would earn all that there is. How its state goes wrong: "name" (a field
    without its prefix), "clash" (an answer with the name of a row's field), "shape" (it
    grows), "write" (into too small an array)."""

    wrong: str = ""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        fields = {
            "action": Field((), "int64"),
            "log_prob": Field((), "float32"),
            "value": Field((), "float32"),
        }
        return fields | ({"reward": Field((), "float32")} if self.wrong == "clash" else {})

    def state(self, spaces: Spaces) -> dict[str, Field]:
        return {"cue" if self.wrong == "name" else "state.cue": Field((1,), "int64")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        return _Parrot(self.wrong)


class _Parrot(Policy):
    def __init__(self, wrong: str) -> None:
        self.wrong, self.w = wrong, np.zeros(1)

    def act(self, observation, state, deterministic, out) -> None:
        seen = observation["obs"]
        out["action"][: len(seen)] = state["state.cue"][:, 0]
        out["log_prob"][: len(seen)] = out["value"][: len(seen)] = 0
        if self.wrong == "shape":
            out["state.cue"] = np.zeros((len(seen), 2), np.int64)
        elif self.wrong == "write":
            out["state.cue"][: len(seen)] = np.zeros((len(seen), 2), np.int64)
        else:
            out["state.cue"][: len(seen), 0] = seen

    def parameters(self):
        return {"w": self.w}

    def load(self, parameters, version) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class Witness(AlgorithmConfig):
    """Keeps what it is given, and learns nothing."""

    seen: ClassVar[list[Sample]] = []

    def build(self, policy: Policy, seed: int) -> Algorithm:
        self.seen.clear()
        return _Witness(self, policy)


class _Witness(DataParallel):
    largest_sum = 8

    def __init__(self, config: Witness, policy: Policy) -> None:
        self.config, self.policy = config, policy

    def parallel_update(self, samples, steps) -> Generator[Any, None, dict[str, float]]:
        yield np.zeros(1)
        self.config.seen.extend(
            Sample({name: array.copy() for name, array in sample.items()}) for sample in samples
        )
        return {}

    def state(self):
        return {}

    def load_state(self, state) -> None:
        pass


def experiment(
    policy: PolicyConfig, environment: EnvironmentConfig, algorithm: AlgorithmConfig, layout: str, **spec: Any
) -> Experiment:
    served = layout.startswith("served")
    inference = {"inference": "ask"} if served else {}
    servers = {"server": PolicyWorkers(stream="ask", threaded=layout.endswith("threads"))} if served else {}
    limit, steps = (
        ({"max_episode_steps": 20}, {})
        if spec.get("mode") == "full"
        else ({}, {} if "sample_steps" in spec else {"sample_steps": 16})
    )
    ring = {"ring": 3, "flush_requests": 2} if "ring" in layout else {}
    actors = Actors(
        environment=environment, lanes=3, agents=(AgentSpec(**steps, **spec, **inference),), **ring, **limit
    )
    return Experiment(
        name="memory",
        policies={"policy": policy},
        workers={"actor": actors, **servers, "trainer": Trainer(algorithm=algorithm, batch_size=48)},
        limits=Limits(updates=12),
    )


LAYOUTS = ["inline", "inline ring", "served", "served ring", "served ring threads"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_earlier_episode_showed_is_forgotten(layout: str, tmp_path: Path) -> None:
    environment = Gymnasium(make=f"{__file__}:Cue")
    made = experiment(Parrot(), environment, Witness(), layout, burn_in=2)
    run = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
    begins = within = 0
    for sample in Witness.seen:
        real, first = sample["version"] >= 0, sample["on_reset"]
        begins += int(first.sum())
        assert not sample["state.cue"][first].any()
        assert not sample["reward"][:-1][first[:-1]].any()
        # within an episode the state is what the row before showed
        later = np.argwhere(real[1:] & ~first[1:]) + np.array([1, 0])
        within += len(later)
        for t, seat in later:
            assert sample["state.cue"][t, seat, 0] == sample["obs"][t - 1, seat]
        acted = real & ~(sample["done"] | sample["truncated"])
        np.testing.assert_array_equal(sample["action"][acted], sample["state.cue"][acted][:, 0])
    assert begins > 100 and within > 100
    assert set(evaluate(run.folder, 20, lanes=4, quiet=True).specs[0].returns) == {0.0}


def test_a_loaded_policy_remembers_until_it_is_reset(tmp_path: Path) -> None:
    made = experiment(Parrot(), Gymnasium(make=f"{__file__}:Cue"), Witness(), "inline")
    policy = tidemill.load(tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True).folder)
    assert [policy.act(cue) for cue in (3, 1, 4)] == [0, 3, 1]
    policy.reset()
    assert [policy.act(cue) for cue in (2, 2)] == [0, 2]
    policy.reset()
    assert policy.act(np.array([1, 2, 3])).tolist() == [0, 0, 0]
    assert policy.act(np.array([4, 4, 4])).tolist() == [1, 2, 3]
    policy.reset([False, True, False])
    assert policy.act(np.array([1, 1, 1])).tolist() == [4, 0, 4]
    policy.reset([0, 2])
    assert policy.act(np.array([1, 1, 1])).tolist() == [0, 1, 0]


@dataclass(frozen=True, kw_only=True)
class Stirred(RecurrentActorCritic):
    """Begins with a policy that is far from uniform."""

    def build_on(self, device, spaces, seed):
        policy = super().build_on(device, spaces, seed)
        policy.network.weights["actor.weight"] *= 400
        policy.network.weights["cell.recurrent"] *= 2
        return policy


ENVIRONMENTS = {
    "in step": Scripted(),
    "deaths": Scripted(agents=2, deaths=True),
    "turns": Scripted(agents=3, turns=2, deaths=True),
    "same step": Scripted(same_step=True),
}


FIXED = {"burn_in": 3}


@pytest.mark.parametrize(
    ("layout", "environment", "cell", "spec"),
    [
        *((layout, "deaths", "lstm", FIXED) for layout in LAYOUTS),
        ("inline ring", "in step", "gru", FIXED),
        ("inline", "turns", "gru", FIXED),
        ("served ring", "turns", "lstm", FIXED),
        ("inline", "same step", "gru", FIXED),
        ("inline", "deaths", "lstm", {**FIXED, "mode": "after_done"}),
        ("inline", "deaths", "gru", {"mode": "full"}),
        ("served", "turns", "lstm", {"mode": "full", "padded": True, "frame_stack": 2}),
    ],
)
def test_the_learner_finds_the_log_probs_that_the_actors_stored(
    layout: str, environment: str, cell: str, spec: dict[str, Any], tmp_path: Path
) -> None:
    """The weights stay as they are, so that nothing but a wrong state could make old and
    new policy differ."""
    algorithm = PPO(
        learning_rate=0.0, epochs=1, chunk_steps=5, correct_off_policy=True, normalise_returns=False
    )
    policy = Stirred(cell=cell, hidden=(8,), width=8, normalise_observations=False)
    made = experiment(policy, ENVIRONMENTS[environment], algorithm, layout, **spec)
    run = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
    updates = [
        line
        for line in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        if "kl" in line
    ]
    assert updates and all(line["rows"] > 20 for line in updates)
    assert all(0 <= line["kl"] < 1e-9 and line["clip_fraction"] == 0 for line in updates)
    assert all(line["entropy"] < 1.36 for line in updates)  # far from uniform: what a state says matters


@pytest.mark.parametrize("layout", ["inline", "served threads"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "name",
            r'policy "policy" \(Parrot\): its state\(\) has a field "cue"; names of a state, and no others, '
            r'begin with "state\."',
        ),
        ("clash", r'its answer\(\) has a field "reward"'),
        ("shape", r"_Parrot was given state\.cue as int64\[1\] and gives it back as int64\[2\].*declares"),
        ("write", r"_Parrot did not answer: ValueError.*\(\d,2\).*state\.cue int64\[1\]"),
    ],
)
def test_a_state_of_another_form_is_named(layout: str, wrong: str, message: str, tmp_path: Path) -> None:
    made = experiment(Parrot(wrong=wrong), Gymnasium(make=f"{__file__}:Cue"), Witness(), layout)
    with pytest.raises(TidemillError, match=message):
        tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
