"""Every kind of observation goes the whole way: environment, rows, policy, training,
evaluation, and a loaded policy."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    Trainer,
)
from tidemill.core.errors import RunError
from tidemill.layouts.probe import measure
from tidemill.testing.check_env import check_environment

STEPS = 10  # of an episode; each pays 1 for the right action


class Shown(gymnasium.Env[Any, int]):
    """The right action of three is shown in a part of the observation; the others say
    nothing."""

    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.right = 0, int(self.np_random.integers(3))
        return self.see(), {}

    def step(self, action: int) -> Any:
        reward, self.steps = float(action == self.right), self.steps + 1
        self.right = int(self.np_random.integers(3))
        over = self.steps == STEPS
        return self.see(), reward, over and bool(self.np_random.integers(2)), over, {}

    def see(self) -> Any:
        raise NotImplementedError

    def noise(self, *shape: int) -> Any:
        return self.np_random.standard_normal(shape).astype(np.float32)


class Pair(Shown):
    observation_space = spaces.Tuple((spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3, start=4)))

    def see(self) -> Any:
        return self.noise(2), self.right + 4


class Nested(Shown):
    """The right action is a digit deep inside."""

    at = spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(0, 255, (2, 2), np.uint8)))  # a grid of kinds
    place = spaces.Dict({"cell": spaces.Discrete(4), "at": at})
    observation_space = spaces.Dict(
        {"place": place, "bits": spaces.MultiBinary(3), "one": spaces.Box(-np.inf, np.inf, ())}
    )

    def see(self) -> Any:
        at = (
            np.array([self.np_random.integers(2), self.right]),
            self.np_random.integers(0, 10, (2, 2), np.uint8),
        )
        bits = self.np_random.integers(0, 2, 3).astype(np.int8)
        return {
            "one": self.noise(),
            "bits": bits,
            "place": {"cell": int(self.np_random.integers(4)), "at": at},
        }


class Masked(Shown):
    """Raises for a forbidden action; final observations forbid all. Where the right
    action is forbidden, any other pays."""

    state = spaces.Box(-np.inf, np.inf, (4,))
    observation_space = spaces.Dict(
        {"action_mask": spaces.MultiBinary(3), "shown": spaces.Discrete(3), "global_state": state}
    )

    def step(self, action: int) -> Any:
        if not self.mask[action]:
            raise ValueError(f"action {action} is forbidden by {self.mask}")
        if not self.mask[self.right]:
            self.right = action
        return super().step(action)

    def see(self) -> Any:
        self.mask = (self.np_random.random(3) < 0.5).astype(np.int8)
        self.mask[self.np_random.integers(3)] = 1
        if self.steps == STEPS:
            self.mask[:] = 0
        return {"shown": self.right, "action_mask": self.mask, "global_state": self.noise(4)}


def experiment(kind: type[Shown], inference: str) -> Experiment:
    servers = {} if inference == "inline" else {"server": PolicyWorkers(stream=inference)}
    environment = Gymnasium(make=f"{__file__}:{kind.__name__}")
    return Experiment(
        name="shown",
        policies={"policy": ActorCritic(hidden=(32,))},
        workers={
            "actor": Actors(
                environment=environment, lanes=16, agents=(AgentSpec(inference=inference, sample_steps=32),)
            ),
            **servers,
            "trainer": Trainer(algorithm=PPO(gamma=0.0, minibatch_size=128, learning_rate=5e-3)),
        },
        limits=Limits(updates=25),
    )


@pytest.mark.parametrize(
    ("kind", "inference"),
    [(Pair, "inline"), (Nested, "inline"), (Masked, "inline"), (Nested, "asked"), (Masked, "asked")],
)
def test_a_policy_learns_from_every_part_of_an_observation(
    kind: type[Shown], inference: str, tmp_path: Path
) -> None:
    result = tidemill.train(
        experiment(kind, inference), launch="inline", run_dir=tmp_path / "run", quiet=True
    )
    assert result.summary["status"] == "completed"
    assert tidemill.evaluate(result.folder, episodes=20, seed=7, quiet=True).mean > 0.9 * STEPS
    policy, environment = tidemill.load(result.folder), kind()
    observation, _ = environment.reset(seed=3)
    total = 0.0
    for _ in range(STEPS):
        observation, reward, *_ = environment.step(policy.act(observation))
        total += reward
    assert total > 0.8 * STEPS


@pytest.mark.parametrize("kind", [Pair, Nested, Masked])
def test_an_environment_of_each_kind_is_found_in_order(kind: type[Shown]) -> None:
    findings = check_environment(Gymnasium(make=f"{__file__}:{kind.__name__}"), seconds=0.1)
    assert [(f.name, f.message) for f in findings if f.level == "fail"] == []


def test_what_is_forbidden_does_not_keep_a_run_from_being_measured() -> None:
    for left in (4, 3, 2, 1, 0):
        try:
            costs = measure(experiment(Masked, "inline"))
            break
        except RunError as error:  # on a busy machine it may be given up
            if not left or "too slow" not in str(error):
                raise
    assert costs.env > 0 and costs.train > 0
