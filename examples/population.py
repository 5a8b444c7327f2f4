"""Population-based training: CartPole with learning rates that begin far too small and
far too large.

# members that do badly go on from one that does well
tidemill train examples/population.py:experiment
tidemill train examples/population.py:alone           # the same members, each on its own
"""

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer, populate

STARTS = [{"learning_rate": rate} for rate in (1e-6, 3e-6, 0.1, 0.3)]


def one() -> Experiment:
    return Experiment(
        name="population",
        policies={"policy": ActorCritic(normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"),
                lanes=16,
                slots=2,
                agents=(AgentSpec(sample_steps=64),),
            ),
            "trainer": Trainer(
                algorithm=PPO(minibatch_size=256, epochs=4, clip_apart=False),
                database_seconds=0.25,
                max_policy_lag=4,
            ),
        },
        limits=Limits(steps=300_000),
    )


def experiment() -> Experiment:
    return populate(one(), STARTS, explore={"learning_rate": (1e-6, 1.0)}, steps=10_000, resample=0.5)


def alone() -> Experiment:
    made = experiment()
    return made.replace(
        name="alone", workers={name: config for name, config in made.workers.items() if name != "population"}
    )
