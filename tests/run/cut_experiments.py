"""Experiments that are cut and go on exactly, for several files of tests. A process that
imports them needs nothing that tests alone need."""

from typing import Any

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
    populate,
)

MANY = 1_000_000
"""Updates that no run comes to: it ends in another way."""
JUDGE = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")


def experiment(
    lag: int | None = None,
    updates: int = 6,
    policy: Any = None,
    algorithm: Any = None,
    trainers: int = 1,
    **actors: Any,
) -> Experiment:
    return Experiment(
        name="cuts",
        policies={"policy": policy or ActorCritic(hidden=(16,))},
        workers={
            "actor": Actors(
                **{
                    "environment": Gymnasium(id="CartPole-v1"),
                    "lanes": 4,
                    "ring": 2,
                    "agents": (AgentSpec(sample_steps=16),),
                    **actors,
                }
            ),
            "trainer": Trainer(
                algorithm=algorithm or PPO(minibatch_size=32, epochs=2),
                max_policy_lag=lag,
                checkpoints=100,
                count=trainers,
            ),
        },
        limits=Limits(updates=updates),
        exact_resume=True,
        seed=5,
    )


def two_policies(lag: int | None) -> Experiment:
    """A speaker and a listener, each with a trainer."""
    names = "speaker", "listener"
    specs = (AgentSpec(match=f"{name}.*", policy=name, samples=name, sample_steps=8) for name in names)
    game = PettingZoo(make="mpe2.simple_speaker_listener_v4", kwargs={"max_cycles": 12})
    return Experiment(
        name="cuts",
        policies={name: ActorCritic(hidden=(8,)) for name in names},
        workers={
            "actor": Actors(environment=game, lanes=2, ring=2, agents=tuple(specs)),
            **{
                name: Trainer(
                    policy=name,
                    samples=name,
                    algorithm=PPO(minibatch_size=16, epochs=1),
                    max_policy_lag=lag,
                )
                for name in names
            },
        },
        seed=5,
    )


def judged(lag: int | None, updates: int = 6, judges: int = 1, **evaluation: Any) -> Experiment:
    """Two targets of two lanes, judges that draw their actions likewise."""
    made = experiment(lag, updates, lanes=2, max_episode_steps=30, agents=(AgentSpec(sample_steps=8),))
    trainer = made.workers["trainer"].replace(database_updates=1)
    judge = Actors(
        environment=Gymnasium(id="CartPole-v1"),
        lanes=2,
        ring=2,
        count=judges,
        agents=(JUDGE,),
        max_episode_steps=30,
    )
    own = Evaluation(**{"games": 7 * judges, "updates": 2, **evaluation})
    return made.replace(workers={**made.workers, "trainer": trainer, "judge": judge, "evaluation": own})


def population(lag: int | None, updates: int = 6) -> Experiment:
    """Two members, compared by their evaluations: one of them learns nothing."""
    made = judged(lag, updates, games=3)
    judge = made.workers["judge"].replace(ring=1)
    actor = made.workers["actor"].replace(ring=1)
    made = made.replace(workers={**made.workers, "actor": actor, "judge": judge})
    starts = [{"learning_rate": rate} for rate in (1e-2, 1e-6)]
    explored = {"learning_rate": (1e-6, 1.0)}
    return populate(made, starts, explore=explored, updates=2, resample=0.5, metric="evaluation/return")


def training_population(updates: int) -> Experiment:
    """Two members in lockstep, compared by their training: one of them learns nothing at
    first."""
    made = experiment(0, updates, lanes=2, ring=1, max_episode_steps=30)
    trainer = made.workers["trainer"].replace(database_updates=1)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    starts, explored = [{"learning_rate": rate} for rate in (1e-2, 1e-6)], {"learning_rate": (1e-6, 1.0)}
    return populate(made, starts, explore=explored, updates=2, resample=0.5)


def with_memory(name: str, **trainer: Any) -> dict[str, Any]:
    """The workers of an exact replay memory from which policy `name` is trained."""
    return {
        f"actor-{name}": ReplayActors(
            environment=Gymnasium(id="CartPole-v1"), lanes=1, ring=2, policy=name, samples=name
        ),
        f"trainer-{name}": ReplayTrainer(
            policy=name,
            samples=name,
            algorithm=DQN(),
            exact=True,
            ratio="1/2",
            batch_size=8,
            buffer=Replay(capacity=200, warm_up=20),
            **trainer,
        ),
    }


def beside_memory(updates: int, **trainer: Any) -> Experiment:
    """A policy that PPO trains in lockstep, and another one from a replay memory."""
    made = experiment(0, updates, lanes=2)
    trainers = {**made.workers, "trainer": made.workers["trainer"].replace(checkpoints=3)}
    policies = {**made.policies, "other": QNetwork(hidden=(16,))}
    return made.replace(policies=policies, workers={**trainers, **with_memory("other", **trainer)})


def two_memories(updates: int) -> Experiment:
    """Two policies, each with a replay memory of its own."""
    return Experiment(
        name="cuts",
        policies={name: QNetwork(hidden=(16,)) for name in ("one", "other")},
        workers={**with_memory("one"), **with_memory("other")},
        limits=Limits(updates=updates),
        seed=5,
    )
