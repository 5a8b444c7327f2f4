"""Samples that are episodes train as well as samples of so many rows."""

import pytest

import tidemill
from tidemill import GAE, PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer

WANTED = 150.0


@pytest.mark.parametrize(
    "spec",
    [
        AgentSpec(mode="after_done", sample_steps=32),
        AgentSpec(mode="full"),
        AgentSpec(mode="full", padded=True, post=(GAE(),)),
        AgentSpec(frame_stack=2, sample_steps=32),
    ],
    ids=["after done", "full", "full, padded, with advantages", "two frames"],
)
def test_cartpole_improves_whatever_a_sample_is(spec, tmp_path):
    experiment = Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=16, agents=(spec,), slots=4),
            "trainer": Trainer(algorithm=PPO(learning_rate=2e-3, minibatch_size=512), batch_size=2048),
        },
        limits=Limits(steps=200_000, mean_return=WANTED),
    )
    result = tidemill.train(experiment, run_dir=tmp_path / "run", quiet=True, launch="inline")
    assert result.summary["status"] == "completed"
    assert result.summary["mean_return"] >= WANTED, result.summary
    assert tidemill.evaluate(result.folder, episodes=10, seed=3, quiet=True).mean > 50
