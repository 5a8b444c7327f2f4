"""IMPALA on CartPole: V-trace, one pass over each batch, actors that never wait for the
trainer (Espeholt et al. 2018).

# each of two actors computes its own actions
tidemill train examples/impala.py:experiment
tidemill train examples/impala.py:served        # a policy worker answers both
"""

from tidemill import (
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Impala,
    Limits,
    LinearSchedule,
    PolicyWorkers,
    Trainer,
)

CARTPOLE = Gymnasium(id="CartPole-v1")


def of(name: str, inference: str, **workers) -> Experiment:
    algorithm = Impala(
        learning_rate=LinearSchedule(2e-3, 0), minibatch_size=512, clip_apart=False, entropy_coefficient=0.01
    )
    actor = Actors(
        environment=CARTPOLE,
        count=2,
        lanes=32,
        slots=2,
        agents=(AgentSpec(inference=inference, sample_steps=20),),
    )
    return Experiment(
        name=name,
        policies={"policy": ActorCritic(normalise_observations=False)},
        workers={"actor": actor, **workers, "trainer": Trainer(algorithm=algorithm)},
        limits=Limits(steps=600_000),
    )


def experiment() -> Experiment:
    return of("impala", "inline")


def served() -> Experiment:
    return of("impala-served", "inference", policy=PolicyWorkers(stream="inference"))
