"""CartPole without its velocities: to balance the pole a policy must remember where it
was.

tidemill train examples/masked_cartpole.py:experiment      # with a GRU
tidemill train examples/masked_cartpole.py:feed_forward    # the same without memory
"""

import gymnasium
import numpy as np

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    RecurrentActorCritic,
    Trainer,
)


class Masked(gymnasium.ObservationWrapper):
    """Shows the cart's position and the pole's angle alone."""

    def __init__(self, **settings) -> None:
        super().__init__(gymnasium.make("CartPole-v1", **settings))
        box = self.observation_space
        self.observation_space = gymnasium.spaces.Box(box.low[::2], box.high[::2], dtype=np.float32)

    def observation(self, observation):
        return observation[::2]


def of(policy, name: str, **algorithm) -> Experiment:
    return Experiment(
        name=name,
        policies={"policy": policy},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Masked"),
                lanes=64,
                slots=2,
                agents=(AgentSpec(sample_steps=64),),
            ),
            "trainer": Trainer(
                algorithm=PPO(learning_rate=1e-3, minibatch_size=512, epochs=4, clip_apart=False, **algorithm)
            ),
        },
        limits=Limits(mean_return=475.0, steps=400_000),
    )


def experiment() -> Experiment:
    return of(
        RecurrentActorCritic(cell="gru", normalise_observations=True), "masked-cartpole", chunk_steps=32
    )


def feed_forward() -> Experiment:
    return of(ActorCritic(normalise_observations=True), "masked-cartpole-feed-forward")
