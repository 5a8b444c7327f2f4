"""Policy workers: two actors step environments, one policy worker answers both in
batches, a trainer trains; all over shared memory.

tidemill train examples/policy_workers.py:experiment
"""

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


def experiment() -> Experiment:
    return Experiment(
        name="policy-workers",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                count=2,
                environment=Gymnasium(id="CartPole-v1"),
                lanes=32,
                ring=2,  # step one target while the other waits for its answers
                agents=(AgentSpec(inference="inference", sample_steps=64),),
            ),
            "policy": PolicyWorkers(stream="inference"),
            "trainer": Trainer(algorithm=PPO(learning_rate=2e-3, minibatch_size=1024, epochs=4)),
        },
        limits=Limits(mean_return=475.0, steps=600_000),
    )
