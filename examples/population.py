"""Population-based training: CartPole with learning rates that begin anywhere between far too small and far too large.

tidemill train examples/population.py:experiment      # members that do badly go on from one that does well
tidemill train examples/population.py:alone           # the same members, each on its own
"""

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer, populate

STARTS = [{"learning_rate": rate} for rate in (1e-6, 3e-6, 1e-5, 3e-5)]


def one() -> Experiment:
    return Experiment(
        name="population",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=16, agents=(AgentSpec(sample_steps=64),)),
            "trainer": Trainer(algorithm=PPO(minibatch_size=256), database_seconds=0.5, max_policy_lag=4),
        },
        limits=Limits(steps=150_000),
    )


def experiment() -> Experiment:
    return populate(one(), STARTS, explore={"learning_rate": (1e-6, 1e-2)}, steps=5_000, factors=(0.5, 2.0, 4.0))


def alone() -> Experiment:
    made = experiment()
    return made.replace(name="alone", workers={name: config for name, config in made.workers.items() if name != "population"})
