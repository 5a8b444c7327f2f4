"""Actions of several parts through the whole system: they are learnt, served, kept,
played and exported."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from typer.testing import CliRunner

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Impala,
    Limits,
    PolicyWorkers,
    RecurrentActorCritic,
    SimulatorEnvironment,
    Trainer,
)
from tidemill.cli.main import app
from tidemill.core.user_code_loading import load_attribute
from tidemill.native.library import VARIABLE, unavailable

GOLF = str(Path(__file__).parents[2] / "examples" / "hybrid_actions.py")
SIMULATORS = str(Path(__file__).parents[1] / "bridge" / "simulators.py")


class Pairs(gymnasium.Env[Any, Any]):
    """An episode of one step, whose action is a Tuple: a bit, and a pair of a choice and
    a number. Shown x and which choice is wanted, pay 1 for the bit that says whether x is
    negative, 1 for that choice and up to 1 for a number near x."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float32), "want": spaces.Discrete(3)})
    action_space = spaces.Tuple(
        [spaces.MultiBinary(1), spaces.Dict({"pick": spaces.Discrete(3), "x": spaces.Box(-1, 1, (1,))})]
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown = {
            "x": self.np_random.uniform(-1, 1, 1).astype(np.float32),
            "want": int(self.np_random.integers(3)),
        }
        return self.shown, {}

    def step(self, action: Any) -> Any:
        bit, pair = action
        x = self.shown["x"][0]
        pay = (bit[0] == (x < 0), pair["pick"] == self.shown["want"], max(0.0, 1 - abs(pair["x"][0] - x)))
        return self.shown, float(sum(pay)), True, False, {}


def pairs(policy: ActorCritic, algorithm: Any, **agent: Any) -> Experiment:
    return Experiment(
        name="pairs",
        policies={"policy": policy},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Pairs"),
                lanes=32,
                agents=(AgentSpec(sample_steps=16, **agent),),
            ),
            **({"policy": PolicyWorkers(stream="inference")} if agent else {}),
            "trainer": Trainer(algorithm=algorithm),
        },
        limits=Limits(steps=12_000, window=500),
    )


RATE = {"learning_rate": 3e-3}


@pytest.mark.parametrize(
    ("policy", "algorithm", "agent"),
    [
        (ActorCritic(), PPO(minibatch_size=128, **RATE), {}),
        (ActorCritic(), Impala(**RATE), {}),
        (ActorCritic(), PPO(minibatch_size=128, **RATE), {"inference": "inference"}),
        (RecurrentActorCritic(width=16), PPO(minibatch_size=128, chunk_steps=16, **RATE), {}),
        pytest.param(
            ActorCritic(native="baseline"),
            PPO(minibatch_size=128, **RATE),
            {},
            marks=pytest.mark.skipif(unavailable("baseline") is not None, reason="no native core here"),
        ),
    ],
    ids=["ppo", "impala", "policy worker", "recurrent", "native core"],
)
def test_every_part_of_an_action_is_learnt(policy, algorithm, agent, tmp_path, monkeypatch):
    """Random play is paid 0.5, 1/3 and some 0.3; a policy that learns one part alone, 2
    at most. IMPALA was seen at 2.5 by then, all others from 2.7 on."""
    monkeypatch.delenv(VARIABLE, raising=False)  # the policy says who computes
    result = tidemill.train(
        pairs(policy, algorithm, **agent), launch="inline", run_dir=tmp_path / "run", quiet=True
    )
    assert result.summary["status"] == "completed"
    assert result.summary["mean_return"] > (1.8 if isinstance(algorithm, Impala) else 2.2)


def test_golf_is_learnt_in_processes_kept_and_played(tmp_path):
    experiment = load_attribute(f"{GOLF}:experiment", "experiment")()
    golf = load_attribute(f"{GOLF}:Golf", "environment")
    folder = tmp_path / "run"
    result = tidemill.train(experiment, run_dir=folder, source=Path(GOLF), quiet=True)
    assert result.summary["reason"].startswith("mean return")
    policy = tidemill.load(folder)

    def play(change: Any) -> float:
        rng, paid = np.random.default_rng(0), 0.0
        for seed in range(50):
            env = golf()
            seen, over = env.reset(seed=seed)[0], False
            while not over:
                clubs = np.flatnonzero(seen["action_mask"])
                action = change(policy.act(seen), {"club": rng.choice(clubs), "swing": rng.random(1)})
                assert action["club"] in clubs
                seen, reward, done, cut, _ = env.step(action)
                paid, over = paid + reward, done or cut
        return paid / 50

    learnt = play(lambda own, drawn: own)
    assert learnt > -4.5  # and no part of it is idle
    assert learnt > play(lambda own, drawn: {**own, "club": drawn["club"]}) + 2
    assert learnt > play(lambda own, drawn: {**own, "swing": drawn["swing"]}) + 2
    assert learnt > play(lambda own, drawn: drawn) + 8

    seen = golf().reset(seed=0)[0]
    answer = policy.answer(seen)
    assert set(answer) == {"action", "log_prob", "value"} and set(answer["action"]) == {"club", "swing"}
    given = policy.module()({name: torch.from_numpy(part[None]) for name, part in seen.items()})
    assert given["club"].item() == answer["action"]["club"]
    np.testing.assert_allclose(given["swing"][0].detach(), answer["action"]["swing"], rtol=1e-5, atol=1e-6)

    assert tidemill.evaluate(folder, episodes=20, seed=3).specs[0].mean > -5
    resumed = CliRunner().invoke(
        app, ["resume", str(folder), "--max-steps", str(result.summary["env_steps"] + 4000)]
    )
    assert resumed.exit_code == 0, resumed.output


def test_a_simulator_s_group_with_both_kinds_of_actions_learns_both(tmp_path):
    """Its reward is the sum of two numbers, at most 1 each, and a choice of 0 … 3."""
    experiment = Experiment(
        name="both",
        policies={"policy": ActorCritic(hidden=(16,), normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=SimulatorEnvironment(path=SIMULATORS, arguments=("hybrid",), layout="0.3.2"),
                lanes=2,
                agents=(AgentSpec(sample_steps=64),),
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=32, epochs=8, learning_rate=5e-3)),
        },
        limits=Limits(steps=5_000),
    )
    result = tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True)
    assert result.summary["status"] == "completed"
    policy = tidemill.load(tmp_path / "run")
    action = policy.act({"observation": np.array([1000], np.float32), "action_mask": np.ones(4, np.int8)})
    assert action["discrete"] == 3 and (action["continuous"] > 0.5).all()
